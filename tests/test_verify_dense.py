"""`ktft verify --dense-format`: what formats of dense weights change, and that what is wrong is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import adapted
from commands import invoke, refused
from given import Checkpoint
from packing import round_trip
from quantize import quantize
from safetensors.torch import load_file, save_file
from tiny import write_checkpoint
from torch import Tensor

from ktft.dense.formats import dense_bytes
from ktft.dense.linear import PackedLinear
from ktft.formats import FORMAT_TRAITS
from ktft.native.dense import pack_dense


def verify(model: Path, formats: str, *options: object) -> tuple[int, dict[str, Any]]:
    """`--json` of one thread. The results of formats are by name."""
    done = invoke(
        "verify",
        model,
        "--dense-format",
        formats,
        "--threads",
        "1",
        "--tokens",
        "24",
        "--json",
        "--format",
        "bf16",
        *options,
    )
    assert done.exit_code in (0, 1), done.stderr
    report = json.loads(done.stdout)
    assert report["passed"] == (not report["problems"]) == (done.exit_code == 0)
    return done.exit_code, report | {"formats": {each["format"]: each for each in report["formats"]}}


def texts(report: dict[str, Any]) -> str:
    return "\n".join(problem["text"] for problem in report["problems"])


# --- what is right passes ---------------------------------------------------------------------------------------------


def test_formats_in_the_order_of_their_errors(tiny_checkpoint: Checkpoint) -> None:
    status, report = verify(tiny_checkpoint("dsv3"), "all")
    assert status == 0
    formats = report["formats"]
    assert list(formats) == ["bf16", "fp8", "int8", "k4"]
    for name, found in formats.items():
        assert list(found["groups"]) == ["attention", "shared experts", "dense layers", "output layer"]
        assert found["contract"]["logits"] == found["contract"]["gradient"] == 0
        for group in found["groups"].values():
            assert group["relative_rms"] <= group["worst_relative_rms"] <= FORMAT_TRAITS[name].error_limit
        assert found["bytes"] == sum(group["bytes"] for group in found["groups"].values())
    plain = formats["bf16"]
    assert plain["effect"] == {"logits": 0, "kl": 0, "top1": 1, "gradient": 0}
    assert all(group["relative_rms"] == 0 for group in plain["groups"].values())
    assert plain["bytes"] == sum(group["plain_bytes"] for group in plain["groups"].values())
    assert all(found["bytes"] < plain["bytes"] for name, found in formats.items() if name != "bf16")
    errors = [formats[name]["groups"]["attention"]["relative_rms"] for name in ("int8", "fp8", "k4")]
    assert 0 < errors[0] < errors[1] < errors[2]
    effects = [formats[name]["effect"] for name in ("int8", "fp8", "k4")]
    assert all(0 < effect["logits"] < 1 and effect["gradient"] > 0 and effect["kl"] > 0 for effect in effects)
    assert effects[0]["logits"] < effects[2]["logits"] and effects[0]["kl"] < effects[2]["kl"]


def test_errors_and_bytes_are_those_of_the_weights(tiny_checkpoint: Checkpoint) -> None:
    """Computed here from the shards and a layer of experts, without ktft's loading."""
    path = tiny_checkpoint("qwen3moe")
    group = verify(path, "k4")[1]["formats"]["k4"]["groups"]["attention"]
    weights = {
        name.removesuffix(".weight"): weight
        for file in path.glob("*.safetensors")
        for name, weight in load_file(file).items()
        if "_proj.weight" in name and "self_attn" in name
    }
    off = {name: round_trip("k4", weight) - weight.float() for name, weight in weights.items()}
    errors = {name: float(each.norm() / weights[name].float().norm()) for name, each in off.items()}
    sizes = [sum(float(each.norm()) ** 2 for each in found.values()) for found in (off, weights)]
    assert group["relative_rms"] == pytest.approx((sizes[0] / sizes[1]) ** 0.5, rel=0.01)
    assert group["worst"] == max(errors, key=lambda name: errors[name])
    assert group["worst_relative_rms"] == pytest.approx(max(errors.values()), rel=0.01)
    assert group["weights"] == len(weights)
    assert group["bytes"] == sum(dense_bytes("k4", *weight.shape) for weight in weights.values())


def test_fp8_as_released_is_exact(tmp_path: Path) -> None:
    """The output layer, which is released in bf16, stays so."""
    whole = write_checkpoint("dsv3", tmp_path / "whole", hidden_size=256, moe_intermediate_size=128, dtype="bfloat16")
    path, *_ = quantize(whole, tmp_path, "fp8")
    status, report = verify(path, "fp8,int8")
    fp8, int8 = report["formats"]["fp8"], report["formats"]["int8"]
    assert status == 0 and fp8["groups"].keys() == int8["groups"].keys()
    assert len(fp8["groups"]) == 4 and {group["relative_rms"] for group in fp8["groups"].values()} == {0}
    assert fp8["effect"] == {"logits": 0, "kl": 0, "top1": 1, "gradient": 0}
    assert all(group["relative_rms"] > 0 for group in int8["groups"].values())


def test_an_adapter_and_prompts(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    path, prompts = tiny_checkpoint("qwen3moe"), tmp_path / "prompts.txt"
    adapted(path).save_pretrained(tmp_path / "adapter")
    prompts.write_text("how far apart are they\n\nand which of them\n")
    alone = verify(path, "k4", "--prompts", prompts)[1]["formats"]["k4"]
    status, report = verify(path, "k4", "--prompts", prompts, "--adapter", tmp_path / "adapter")
    found = report["formats"]["k4"]
    assert status == 0 and found["groups"] == alone["groups"] and found["effect"] != alone["effect"]
    assert found["contract"]["logits"] == found["contract"]["gradient"] == 0
    assert verify(path, "k4")[1]["formats"]["k4"]["effect"] != alone["effect"]
    prompts.write_text("\n")
    assert "has no line of two tokens" in refused(
        "verify", path, "--dense-format", "k4", "--threads", "1", "--prompts", prompts
    )


def test_tables_for_a_person(base: Path) -> None:
    done = invoke("verify", base, "--dense-format", "k4, int8,k4", "--threads", "1", "--tokens", "8")
    assert done.exit_code == 0, done.stderr
    assert "(limit 14%)" in done.stdout and "attention" in done.stdout and "KL, nats" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("with dense weights in k4, int8: pass")


# --- what is wrong is named -------------------------------------------------------------------------------------------


def test_a_weight_that_is_packed_wrongly(tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The contract does not see it, for the decoded weight is wrong too."""
    path, name = tiny_checkpoint("qwen3moe"), "model.layers.1.self_attn.o_proj"
    given = next(
        tensors[f"{name}.weight"]
        for file in path.glob("*.safetensors")
        if f"{name}.weight" in (tensors := load_file(file))
    )

    def damaged(runtime: Any, format: str, weight: Tensor, *more: Any, **named: Any) -> Tensor:
        right = weight.shape != given.shape or not torch.equal(weight.float(), given.float())
        return pack_dense(runtime, format, weight if right else weight * 1.2, *more, **named)

    monkeypatch.setattr("ktft.dense.model.pack_dense", damaged)
    status, report = verify(path, "fp8,k4")
    assert status == 1 and texts(report).splitlines() == [
        text for text in texts(report).splitlines() if text.startswith(f"layer 1: {name} in ")
    ]
    assert [problem["layer"] for problem in report["problems"]] == [1, 1]
    assert 0.19 < report["problems"][0]["error"] < 0.21
    assert all(found["groups"]["attention"]["worst"] == name for found in report["formats"].values())
    assert all(found["contract"]["logits"] == 0 for found in report["formats"].values())
    done = invoke("verify", path, "--dense-format", "k4", "--threads", "1", "--tokens", "8")
    assert done.exit_code == 1 and "off, 1 over the limit" in done.stdout and name in done.stderr


def test_products_that_break_the_contract(tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    original = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, input: original(self, input) * 1.02)
    status, report = verify(tiny_checkpoint("qwen3moe"), "int8")
    assert status == 1 and {problem["check"] for problem in report["problems"]} == {"dense contract"}
    assert "logits with weights in int8 against the decoded ones is" in texts(report)
    assert all(group["relative_rms"] < 0.02 for group in report["formats"]["int8"]["groups"].values())


def test_a_gradient_that_breaks_the_contract(tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    from ktft.dense import linear

    original = linear._Product.backward
    wrong = staticmethod(lambda ctx, grad: (original(ctx, grad)[0] * 1.02, None, None))
    monkeypatch.setattr(linear._Product, "backward", wrong)
    status, report = verify(tiny_checkpoint("qwen3moe"), "int8")
    assert status == 1
    assert "gradient of the embeddings with weights in int8" in texts(report) and "logits" not in texts(report)


def test_a_damaged_checkpoint(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint("qwen3moe"), tmp_path, dirs_exist_ok=True)
    name = "model.layers.1.self_attn.o_proj.weight"
    (file,) = [each for each in tmp_path.glob("*.safetensors") if name in load_file(each)]
    tensors = load_file(file)
    tensors[name][3, 5] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    said = refused("verify", tmp_path, "--dense-format", "k4", "--threads", "1")
    assert f"{file.name}: {name}" in said and "NaN or Inf" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("k5",), "--dense-format has 'k5'; supported: bf16, fp8, int8, k4, or all"),
        (("k4,",), "--dense-format has ''"),
        (("mxfp4",), "--dense-format has 'mxfp4'"),
        (("k4", "--layers", "1"), "--layers: not with --dense-format"),
        (("k4", "--whole", "--deferral", "1"), "--whole, --deferral: not with --dense-format"),
        (("k4", "--source", "."), "--source: not with --dense-format"),
        (("k4,int8", "--serve", "http://127.0.0.1:1"), "dense_format is 'k4,int8'; supported: bf16, fp8, int8, k4"),
        (("k4", "--serve", "http://127.0.0.1:1", "--layers", "1"), "--layers: not with --serve URL"),
    ],
)
def test_refused(base: Path, options: tuple[str, ...], message: str) -> None:
    assert message in refused("verify", base, "--dense-format", *options)


def test_no_model(tmp_path: Path) -> None:
    assert "is not a directory with a config.json" in refused("verify", tmp_path, "--dense-format", "k4")

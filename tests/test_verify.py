"""`ktft verify`: passes what is right in any format, ISA and NUMA split, names the layer and expert that is not."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import adapted
from commands import invoke, refused, run
from given import Checkpoint
from quantize import quantize
from safetensors.torch import load_file
from tiny import write_checkpoint

from ktft import native
from ktft.checkpoint.cache import MANIFEST, Manifest, describe_file, layer_file, read_metadata
from ktft.checkpoint.files import CRC32, NewTensor, to_json, write_safetensors
from ktft.verify.whole import StockExperts


def verify(model: Path, *options: str | Path) -> tuple[int, dict[str, Any]]:
    """`--json` of two threads."""
    done = invoke("verify", model, "--threads", "2", "--json", *options)
    assert done.exit_code in (0, 1), done.stderr
    return done.exit_code, json.loads(done.stdout)


@pytest.fixture(autouse=True)
def any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits over NUMA nodes, and two threads, whatever this machine has."""
    monkeypatch.setenv("KTFT_EMULATE_CPUS", "1")


@pytest.fixture(scope="module")
def fp8(tiny_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek-V3 as released: FP8 in blocks, the experts in two slices of which one is short."""
    return quantize(tiny_checkpoint("dsv3"), tmp_path_factory.mktemp("fp8"), "fp8")[0]


@pytest.fixture(scope="module")
def converted(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`qwen3moe` in k4. Copy it before changing it."""
    target = tmp_path_factory.mktemp("converted") / "k4"
    status, said = run("convert", base, target, "--format", "k4", "--threads", "1")
    assert status == 0, said
    return target


# --- what is right passes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "formats"), [("qwen3moe", "bf16 k4"), ("dsv3", "fp8 int8"), ("gpt_oss", "k4 mxfp4")]
)
def test_passes(tiny_checkpoint: Checkpoint, fp8: Path, family: str, formats: str) -> None:
    model = fp8 if family == "dsv3" else tiny_checkpoint(family)
    layers = [1, 2] if family == "dsv3" else [0, 1, 2]
    for expert_format, isa, nodes in zip(formats.split(), ("scalar", native.default_isa()), (2, 1), strict=True):
        status, report = verify(model, "--format", expert_format, "--isa", isa, "--numa-nodes", str(nodes))
        assert status == 0 and report["passed"] and not report["problems"]
        assert (report["format"], report["isa"], report["numa_nodes"]) == (expert_format, isa, nodes)
        assert [layer["layer"] for layer in report["layers"]] == layers
        quantities = {error["quantity"]: error for error in report["layers"][0]["contract"]}
        assert len(quantities) == 9 and all(error["relative"] > 1e-4 for error in quantities.values())
        whole = report["whole"]
        assert 1e-4 < whole["arithmetic"]["logits"] < 0.01 and 1e-4 < whole["arithmetic"]["gradient"] < 0.01
        assert whole["noise"]["logits"] > 0 and set(whole["layers"]) == set(map(str, layers))
        kept = expert_format in ("bf16", "fp8")
        assert (whole["quantization"]["logits"] < 0.005) == kept
        worst = max(e["worst_relative_rms"] for layer in report["layers"] for e in layer["quantization"].values())
        assert (worst < 0.003) == kept


def test_a_split_over_nodes(tmp_path: Path) -> None:
    """Experts wide enough for both nodes to have a slice."""
    model = write_checkpoint("qwen3moe", tmp_path, moe_intermediate_size=288, num_hidden_layers=1, num_experts=4)
    status, report = verify(model, "--format", "int8", "--numa-nodes", "2")
    assert status == 0 and report["numa_nodes"] == 2


def test_tables_for_a_person(base: Path) -> None:
    done = invoke("verify", base, "--threads", "1", "--layers", "2,0", "--tokens", "8")
    out = done.stdout
    assert done.exit_code == 0 and "(limit 0.5%)" in out and "The whole model" not in out
    assert out.splitlines()[-1].endswith("NUMA nodes: pass")


def test_an_adapter(tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own LoRA, with its scaling, in layers and in the whole model."""
    path = tiny_checkpoint("qwen3moe")
    lora = {"lora_alpha": 32, "target_modules": ["up_proj", "down_proj", "q_proj"], "rank_pattern": {"up_proj": 2}}
    adapted(path, **lora).save_pretrained(tmp_path)
    status, report = verify(path, "--adapter", tmp_path)
    assert status == 0
    quantities = [error["quantity"] for error in report["layers"][0]["contract"]]
    assert "up_proj lora_A gradient" in quantities and "gate_proj lora_A gradient" not in quantities
    monkeypatch.setattr(StockExperts, "merge", lambda self: None)
    status, report = verify(path, "--adapter", tmp_path)
    assert status == 1, "without the adapter the reference is another model"
    assert {problem["check"] for problem in report["problems"]} == {"whole model"}


# --- what is wrong is named -------------------------------------------------------------------------------------------


def places(report: dict[str, Any], check: str) -> set[tuple[int, int]]:
    return {(p["layer"], p["expert"]) for p in report["problems"] if p["check"] == check}


Change = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture
def wrong_outputs(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], None]:
    """`wrong_outputs(change)`: a layer's output is what `change(layer, output, index)` makes of the right one."""

    def install(change: Change) -> None:
        def wrong(self: Any, x: Any, index: Any, *more: Any, **named: Any) -> Any:
            out, saved = honest(self, x, index, *more, **named)
            return change(self, out, index), saved

        honest = native.ExpertLayer.forward
        monkeypatch.setattr(native.ExpertLayer, "forward", wrong)

    return install


def test_a_wrong_output_of_one_expert(base: Path, wrong_outputs: Callable[[Change], None]) -> None:
    def change(layer: Any, out: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return out * (1 + 0.01 * (index == 3).any(1, keepdim=True)) if ".layers.1." in layer.name else out

    wrong_outputs(change)
    status, report = verify(base, "--format", "k4")
    assert status == 1 and not report["passed"] and report["whole"] is None
    assert places(report, "contract") == {(1, 3)}
    (problem,) = report["problems"]
    assert problem["quantity"] == "output" and problem["text"].startswith("layer 1, expert 3: output is ")
    done = invoke("verify", base, "--layers", "1", "--threads", "1")
    assert done.exit_code == 1 and "off, 1 over the limit" in done.stdout
    assert "layer 1, expert 3: output is " in done.stderr


def test_a_wrong_gradient_of_one_expert(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = native.ExpertLayer.backward

    def wrong(self: Any, *arguments: Any) -> Any:
        grads = honest(self, *arguments)
        if ".layers.2." in self.name and grads.lora:
            grads.lora[3][5] *= 1.02
        return grads

    monkeypatch.setattr(native.ExpertLayer, "backward", wrong)
    status, report = verify(base)
    assert status == 1
    (problem,) = report["problems"]
    assert (problem["layer"], problem["expert"], problem["projection"]) == (2, 5, "up_proj")
    assert problem["quantity"] == "up_proj lora_B gradient"


def test_nan_is_off(base: Path, wrong_outputs: Callable[[Change], None]) -> None:
    wrong_outputs(lambda layer, out, index: out.masked_fill((index == 4).any(1, keepdim=True), float("nan")))
    status, report = verify(base, "--layers", "0")
    assert status == 1 and (0, 4) in places(report, "contract")
    assert {p["error"] for p in report["problems"] if p["quantity"] == "output"} == {"nan"}


def test_wrong_experts_in_the_whole_model(base: Path, wrong_outputs: Callable[[Change], None]) -> None:
    """The layer's check uses no routing of the model's own; this one does."""
    wrong_outputs(lambda layer, out, index: out * 1.1 if ".layers.1." in layer.name else out)
    status, report = verify(base, "--whole")
    assert status == 1
    whole = [problem for problem in report["problems"] if problem["check"] == "whole model"]
    assert whole[0]["layer"] == 1 and 0.05 < whole[0]["error"] < 0.15


def test_corrupted_weights_with_valid_checksums(base: Path, converted: Path, tmp_path: Path) -> None:
    source, target = base, tmp_path / "k4"
    shutil.copytree(converted, target)
    assert verify(target, "--source", source)[0] == 0
    file = target / layer_file(1)
    tensors, metadata = load_file(file), read_metadata(file)
    tensors["3.up_proj.packed"] = tensors["4.up_proj.packed"]
    kept = {key: value for key, value in metadata.items() if key not in (CRC32, "format")}
    places_of = [NewTensor(name, "U8", tuple(t.shape), t.numel()) for name, t in tensors.items()]
    write_safetensors(file, places_of, kept, ([t.numpy().data] for t in tensors.values()))
    manifest = Manifest.read(target / MANIFEST)
    files = manifest.files | {layer_file(1): describe_file(file)}
    (target / MANIFEST).write_bytes(to_json(replace(manifest, files=files).to_dict()))
    status, report = verify(target, "--source", source)
    assert status == 1
    (problem,) = report["problems"]
    assert (problem["layer"], problem["expert"], problem["projection"]) == (1, 3, "up_proj")
    assert problem["check"] == "quantization" and problem["error"] > 1
    assert verify(target)[0] == 1, "ktft convert wrote down where the source is"
    (target / MANIFEST).write_bytes(to_json(replace(manifest, files=files, source_directory="").to_dict()))
    status, report = verify(target)
    assert status == 0 and report["layers"][1]["quantization"] is None and "give --source" in report["notes"][0]


# --- input and memory -------------------------------------------------------------------------------------------------


def test_bad_input(tiny_checkpoint: Checkpoint, converted: Path, tmp_path: Path) -> None:
    model = tiny_checkpoint("dsv3")
    for options, message in (
        (["--layers", "0"], "layer 0 of .* has no routed experts; 2 layers have, 1 to 2"),
        (["--layers", "1,x"], "--layers is '1,x'; give layer numbers, as in 3,7"),
        (["--isa", "sse9"], "unknown ISA 'sse9'"),
        (["--format", "int3"], "expert_format is 'int3'"),
        (["--source", str(model)], "is no conversion: it is its own source"),
        (["--adapter", str(tmp_path)], "has no adapter_config.json"),
    ):
        assert re.search(message, refused("verify", model, *options)), options
    assert refused("verify", tmp_path)
    assert str(converted) in refused("verify", converted, "--source", model)
    assert "holds experts in k4" in refused("verify", converted, "--format", "int8")


def test_a_model_that_does_not_fit(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTFT_MEMORY_LIMIT", "1M")
    status, report = verify(base)
    assert status == 0 and report["whole"] is None and "1.0 MiB are free" in report["notes"][0]
    assert verify(base, "--whole", "--layers", "1")[1]["whole"] is not None
    assert verify(base, "--layers-only")[1]["notes"] == []

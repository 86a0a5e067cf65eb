"""A server loads what training loads, from any source format, a converted checkpoint or another one for the experts.
What it cannot load is refused by name.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run
from quantize import SCHEMES, changed, quantize, read_all
from tiny import write_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from ktft import native
from ktft.config import PROJECTIONS
from ktft.model.experts import find_experts
from ktft.model.quantizer import KtftConfig
from ktft.native import ExpertLayer
from ktft.serve.runtime import served_weights
from ktft.serve.runtime.progress import Progress
from ktft.serve.runtime.served_weights import ServedWeights
from ktft.serve.runtime.settings import ServeSettings

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
ROUTER = "model.layers.1.mlp.gate.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # wide enough for groups of 128 and blocks of fp8
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    return write_checkpoint("qwen3moe", tmp_path_factory.mktemp("plain"), head_dim=32, **sizes)


def weights(checkpoint: Path, **settings: Any) -> ServedWeights:
    return ServedWeights(ServeSettings(str(checkpoint), threads=1, **settings))


def loaded(checkpoint: Path, **settings: Any) -> tuple[dict[str, Tensor], dict[int, ExpertLayer], list[Progress]]:
    """The other weights in fp32, the experts' layers, and the progress that was reported."""
    served, told = weights(checkpoint, **settings), []
    dense = dict(served.dense(torch.float32))
    served.load_experts(told.append)
    return dense, served.layers, told


def experts_of(layers: dict[int, ExpertLayer]) -> dict[str, Tensor]:
    return {
        f"model.layers.{number}.mlp.experts.{expert}.{projection}.weight": layer.dequantize(expert, projection)
        for number, layer in layers.items()
        for expert in range(layer.num_experts)
        for projection in PROJECTIONS
    }


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name].float(), tensor.float()), name


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_every_source_format_loads_as_in_training(plain: Path, tmp_path: Path, scheme: str | None) -> None:
    """The same tensors as in the model that training loads from the same directory."""
    source, values = plain, {name: tensor.float() for name, tensor in read_all(plain).items()}
    if scheme is not None:
        source, _, values = quantize(plain, tmp_path, scheme)
    dense, layers, told = loaded(source, expert_format="bf16")
    assert_same(dense, {name: tensor for name, tensor in values.items() if ".experts." not in name})
    config = KtftConfig(expert_format="bf16", threads=1)
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config, dtype=torch.float32)
    trained = {int(name.split(".")[2]): module.layer for name, module in find_experts(model).items()}
    assert_same(experts_of(layers), experts_of(trained))
    assert told[0].done == 0 and told[-1].done == told[-1].total > 0
    assert [each.done for each in told] == sorted(each.done for each in told)
    assert {each.phase for each in told} == {"Packing experts (bf16)"}


def test_converted_checkpoint_and_experts_from_elsewhere(plain: Path, tmp_path: Path) -> None:
    target = tmp_path / "converted"
    status, said = run("convert", plain, target, "--format", "k4", "--threads", "1")
    assert status == 0, said
    expected = loaded(plain, expert_format="k4")
    for actual in (loaded(target), loaded(plain, expert_checkpoint=str(target))):
        assert_same(actual[0], expected[0])
        assert_same(experts_of(actual[1]), experts_of(expected[1]))
        assert {each.phase for each in actual[2]} == {"Loading packed experts (k4)"}
    with pytest.raises(ValueError, match="holds experts in k4, but expert_format is int8"):
        weights(target, expert_format="int8")


def test_experts_from_gguf(plain: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from ggufs import write_gguf

    values = write_gguf(plain, tmp_path / "model.gguf", "qwen3moe", "BF16")
    dense, layers, told = loaded(plain, expert_checkpoint=str(tmp_path))
    assert_same(dense, {name: tensor for name, tensor in read_all(plain).items() if ".experts." not in name})
    names = {f"model.layers.{n}.mlp.experts.{e}.{p}.weight": weight for (n, e, p), weight in values.items()}
    assert_same(experts_of(layers), names)
    assert {each.phase for each in told} == {"Packing GGUF experts (bf16)"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(EXPERT), f"lacks expert tensors: {EXPERT}"),
        (lambda t: t.pop(ROUTER), f"lacks tensors that the model needs: {ROUTER}"),
        (lambda t: t.update({"model.layers.1.mlp.odd.weight": torch.ones(1)}), "no place for: model.layers.1.mlp.odd"),
        (lambda t: t.update({ROUTER: t[ROUTER][1:]}), f"{ROUTER} has shape (7, 128)"),
        (lambda t: t[EXPERT][3].fill_(float("nan")), f"{EXPERT}: "),
        (lambda t: t[ROUTER][3].fill_(float("inf")), f"{ROUTER} holds NaN or Inf"),
    ],
    ids=["lacks an expert", "lacks a router", "left over", "shape", "NaN in an expert", "Inf in a router"],
)
def test_bad_checkpoints_are_refused_by_name(plain: Path, tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        loaded(changed(plain, tmp_path / "bad", change), expert_format="bf16")


def test_truncated_shard_and_too_little_memory(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(plain, tmp_path / "cut")
    shard = sorted((tmp_path / "cut").glob("*.safetensors"))[0]
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 100)
    with pytest.raises(ValueError, match=f"{shard.name} is truncated"):
        weights(tmp_path / "cut")
    monkeypatch.setenv("KTFT_MEMORY_LIMIT", "100K")
    with pytest.raises((ValueError, MemoryError), match="the model in expert_format int8"):
        weights(plain)


@pytest.mark.parametrize(("gpu", "given", "expected"), [(False, None, None), (True, None, 15), (True, 4, 4)])
def test_one_core_is_left_for_a_gpu(
    plain: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool, given: int | None, expected: int | None
) -> None:
    class Asked(Exception):
        """What the plan was asked for."""

    def plan(model: Any, files: list[str], settings: Any) -> None:
        raise Asked(settings.threads)

    monkeypatch.setattr(served_weights, "LoadPlan", plan)
    monkeypatch.setattr(served_weights, "has_gpu", lambda: gpu)
    monkeypatch.setattr(served_weights.native, "topology", lambda: {"cores": 16})
    with pytest.raises(Asked) as asked:
        ServedWeights(ServeSettings(str(plain), threads=given))
    assert asked.value.args == (expected,)


def test_activation_bits_that_cannot_be_are_refused_before_anything_is_read(plain: Path) -> None:
    with pytest.raises(ValueError, match="activation_bits is 8, but the experts' format is fp8"):
        weights(plain, expert_format="fp8", activation_bits=8)
    format = "int8" if "amx_bf16" in native.isas() else "k4"
    assert weights(plain, expert_format=format, activation_bits=8).layers

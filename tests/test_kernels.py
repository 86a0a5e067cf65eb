"""Every format x ISA x thread count x activation policy against the fp32 reference, within contract.py's tolerances."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
import torch
from contract import (
    CASES,
    EXPERTS,
    MORE_THAN_ONE_CALL,
    SIZES,
    TAILS,
    assert_contract,
    compare,
    empty_layer,
    emulation_in_full,
    in_every_way,
    inputs_for,
    make_layer,
    make_lora,
)

from ktft import native
from ktft.model.autograd import routed_experts


def test_table_is_complete() -> None:
    """Every ISA has every format, forward and backward, whether or not this CPU runs it."""
    rows = [(k["isa"], k["format"], k["backward"]) for k in native.kernels()]
    isas = {isa for isa, _, _ in rows}
    assert set(native.isas()) <= isas
    assert sorted(rows) == sorted(itertools.product(isas, native.FORMATS, (False, True)))


@in_every_way(CASES)
def test_contract(isa: str, fmt: str, nodes: int, threads: int, activation: str) -> None:
    for hidden, intermediate, rank, rows in SIZES[nodes]:
        layer = make_layer(hidden, intermediate, fmt, isa, threads, nodes)
        lora = make_lora(hidden, intermediate, rank, torch.float32)
        assert_contract(compare(layer, lora, *inputs_for(rows, hidden), activation))


@pytest.mark.parametrize(("isa", "fmt"), emulation_in_full(CASES))
def test_reduction_longer_than_one_block(isa: str, fmt: str) -> None:
    for hidden, intermediate in ((1120, 64), (64, 1056)):
        layer = make_layer(hidden, intermediate, fmt, isa, 2)
        lora = make_lora(hidden, intermediate, 4, torch.float32)
        assert_contract(compare(layer, lora, *inputs_for((3, 14, 0, 1, 2), hidden)))


@pytest.mark.parametrize("isa", emulation_in_full(native.isas()))
def test_more_rows_than_one_call_takes(isa: str) -> None:
    layer = make_layer(32, 32, "int8", isa, 2)
    lora = make_lora(32, 32, 33, torch.float32)
    assert_contract(compare(layer, lora, *inputs_for(MORE_THAN_ONE_CALL, 32)))


# Two projections of rank 176 fill one gradient call's 704 rows, two of 177 take two calls
@pytest.mark.parametrize(("rank", "threads"), [(176, 1), (177, 2), (256, 1), (256, 2)])
@pytest.mark.parametrize("isa", emulation_in_full(sorted({native.default_isa(), "amx_emu"})))
def test_large_ranks(isa: str, rank: int, threads: int) -> None:
    layer = make_layer(64, 32, "int8", isa, threads)
    assert_contract(compare(layer, make_lora(64, 32, rank, torch.float32), *inputs_for(TAILS[1], 64)))


def test_rank_out_of_range_is_refused() -> None:
    layer = make_layer(32, 32, "int8", native.default_isa())
    for rank in (0, 257):
        with pytest.raises(ValueError, match=f"LoRA rank is {rank}, it must be 1 to 256"):
            routed_experts(layer, *inputs_for(TAILS[0], 32), make_lora(32, 32, rank, torch.float32))


@pytest.mark.parametrize("names", [(), ("down_proj",), ("gate_proj",), ("up_proj", "down_proj")])
@pytest.mark.parametrize(("activation", "threads"), [("retain", 1), ("recompute", 1), ("retain", 2), ("recompute", 2)])
def test_subset_of_projections(names: tuple[str, ...], activation: str, threads: int) -> None:
    layer = make_layer(64, 96, "int8", native.default_isa(), threads)
    assert_contract(compare(layer, make_lora(64, 96, 4, torch.float32, names), *inputs_for(TAILS[1], 64), activation))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_of_hidden_states_and_lora(dtype: torch.dtype) -> None:
    layer = make_layer(64, 96, "bf16", native.default_isa(), 2)
    lora = make_lora(64, 96, 8, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    x, index, weights = inputs_for(TAILS[1], 64, dtype)
    out = routed_experts(layer, x, index, weights, lora)
    assert out.dtype == dtype
    out.sum().backward()
    assert x.grad is not None and x.grad.dtype == dtype
    assert all(each.grad is not None and each.grad.dtype == each.dtype for each in lora.parameters())
    x.grad = None
    assert_contract(compare(layer, lora, x, index, weights))


@pytest.mark.parametrize("fmt", ["bf16", "int8", "fp8", "mxfp4"])
@pytest.mark.parametrize("isa", emulation_in_full(native.isas()))
def test_same_bits_whatever_the_threads_and_the_policy(isa: str, fmt: str) -> None:
    results = []
    for threads, activation in ((1, "retain"), (2, "recompute"), (3, "retain")):
        layer = make_layer(64, 96, fmt, isa, threads)
        torch.manual_seed(1)
        lora = make_lora(64, 96, 33, torch.float32, dropout=0.1, seed=11)
        x, index, weights = inputs_for(TAILS[1], 64)
        out = routed_experts(layer, x, index, weights, lora, activation)
        leaves = [x, weights, *lora.parameters()]
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("rows", [(5, 1, 6, 0, 3), (0, 0, 0, 0, 2), ()])
@pytest.mark.usefixtures("poisoned_memory")
def test_experts_without_tokens_have_zero_gradients(rows: tuple[int, ...], nodes: int) -> None:
    assert torch.empty(1).isnan()
    layer = make_layer(64, 160, "int8", native.default_isa(), nodes, nodes)
    lora = make_lora(64, 160, 4, torch.float32)
    routed_experts(layer, *inputs_for(rows, 64), lora).sum().backward()
    for tensor in lora.parameters():
        assert tensor.grad.isfinite().all()
        assert tensor.grad.flatten(1).any(1).tolist() == [count > 0 for count in (*rows, 0, 0, 0, 0, 0)[:EXPERTS]]


def test_two_forwards_before_their_backwards() -> None:
    layer = make_layer(64, 64, "bf16", native.default_isa())
    lora = make_lora(64, 64, 4, torch.float32)
    first, second = inputs_for(TAILS[0], 64), inputs_for(TAILS[1], 64)
    outs = [routed_experts(layer, *args, lora) for args in (first, second)]
    grads = [torch.autograd.grad(out.sum(), args[0])[0] for out, args in zip(outs, (first, second), strict=True)]
    for args, grad in zip((first, second), grads, strict=True):
        assert torch.equal(torch.autograd.grad(routed_experts(layer, *args, lora).sum(), args[0])[0], grad)


def test_a_wrong_gradient_fails_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness notices one gradient that is 2% off."""
    layer = make_layer(64, 64, "bf16", native.default_isa())
    lora = make_lora(64, 64, 4, torch.float32)
    arguments = (layer, lora, *inputs_for(TAILS[1], 64))
    assert_contract(compare(*arguments))
    honest = native.ExpertLayer.backward

    def wrong(*args):
        grads = honest(*args)
        grads.lora[3] *= 1.02
        return grads

    monkeypatch.setattr(native.ExpertLayer, "backward", wrong)
    with pytest.raises(AssertionError, match=r"up_proj\.lora_B"):
        assert_contract(compare(*arguments))


def test_bad_input_is_named() -> None:
    layer = make_layer(64, 64, "int8", native.default_isa())
    x, index, weights = inputs_for(TAILS[0], 64)
    poisoned = x.detach().clone()
    poisoned[3, 5] = float("nan")
    with pytest.raises(ValueError, match=r"NaN or Inf \(token 3 of"):
        routed_experts(layer, poisoned, index, weights)
    with pytest.raises(ValueError, match="routed to expert 9"):
        routed_experts(layer, x, index.clone().fill_(9), weights)
    with pytest.raises(ValueError, match=r"\[tokens, 64\]"):
        routed_experts(layer, x[:, :32], index, weights)
    with pytest.raises(ValueError, match="loaded already"):
        layer.load(0, "up_proj", torch.zeros(64, 64))
    with pytest.raises(ValueError, match="hidden_size is 48.*multiple of 32"):
        empty_layer(48, 32, "bf16")
    with pytest.raises(ValueError, match="unknown expert format 'int3'"):
        empty_layer(32, 32, "int3")
    fresh = empty_layer(32, 64, "int8", num_experts=1)
    with pytest.raises(ValueError, match=r"\[32, 64\].*\[64, 32\]"):
        fresh.load(0, "gate_proj", torch.zeros(32, 64))
    bad = torch.zeros(64, 32)
    bad[40, 2] = float("inf")
    with pytest.raises(ValueError, match=r"NaN or Inf.*\[40, 2\]"):
        fresh.load(0, "gate_proj", bad)
    assert len(fresh.missing()) == 3


def test_no_tokens() -> None:
    layer = make_layer(64, 64, "bf16", native.default_isa())
    x = torch.zeros(0, 64, requires_grad=True)
    out = routed_experts(layer, x, torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2))
    out.sum().backward()
    assert out.shape == (0, 64) and x.grad.shape == (0, 64)


def test_isa_that_this_cpu_lacks_is_refused() -> None:
    for isa in {kernel["isa"] for kernel in native.kernels()} - set(native.isas()):
        with pytest.raises(ValueError, match=f"{isa} cannot run on this CPU"):
            native.runtime(1, 1, isa)
    with pytest.raises(ValueError, match="unknown ISA 'sse9'"):
        native.runtime(1, 1, "sse9")


@pytest.mark.parametrize("isa", emulation_in_full([isa for isa in native.isas() if isa != "scalar"]))
@pytest.mark.parametrize("fmt", native.FORMATS)
def test_every_weight_is_read_once_a_pass(fmt: str, isa: str) -> None:
    layer = make_layer(256, 384, fmt, isa, 2)
    x, index, weights = inputs_for(TAILS[1], 256)
    used = len(index.unique()) / layer.num_experts
    layer.runtime.take_weight_bytes()
    out = routed_experts(layer, x, index, weights, make_lora(256, 384, 8, torch.float32))
    forward = layer.runtime.take_weight_bytes()
    out.sum().backward()
    backward = layer.runtime.take_weight_bytes()
    # scales that lie beside the tiles and the strips' padding are not counted
    assert 0.5 < forward / (layer.packed_bytes * used) <= 1.0
    assert forward == backward


@pytest.mark.parametrize("threads", [1, 2])
def test_phases_are_seconds_of_the_calls(threads: int) -> None:
    layer = make_layer(64, 96, "int8", native.default_isa(), threads)
    x, index, weights = inputs_for(TAILS[1], 64)
    layer.runtime.take_phases()
    started = time.perf_counter()
    routed_experts(layer, x, index, weights, make_lora(64, 96, 8, torch.float32)).sum().backward()
    elapsed = time.perf_counter() - started
    phases = layer.runtime.take_phases()
    assert {"experts", "combine"} <= phases.keys() or {"lora pack", "combine"} < phases.keys()
    assert 0 < sum(phases.values()) < elapsed
    assert layer.runtime.take_phases() == {}

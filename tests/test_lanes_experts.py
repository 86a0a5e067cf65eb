"""A device's arithmetic of experts, here on the CPU: held to the numeric contract, and to the native layer's masks."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from contract import (
    GPT_OSS,
    SIZES,
    TAILS,
    assert_contract,
    compare,
    dropout_mask,
    dropout_oracle,
    empty_layer,
    gated_oracle,
    inputs_for,
    make_gated,
    make_layer,
    make_lora,
    relative,
    small_lora,
)
from lanes import Lane

from ktft import native
from ktft.config import EXPERT_FORMATS, PROJECTIONS
from ktft.lanes.ops import chunk, torch_ops
from ktft.lanes.ops import interface as ops
from ktft.lanes.ops.dropout import Dropout, room_for_streams, stays, write_streams
from ktft.lanes.ops.interface import operations
from ktft.lanes.routes import PIECE_ROWS, Routes, lay_out, piece_rows
from ktft.lora import ExpertLora
from ktft.model.autograd import routed_experts
from ktft.swiglu import GELU_TANH, Swiglu, clamped_after

ISA = native.default_isa()


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("fmt", EXPERT_FORMATS)
def test_contract(fmt: str, nodes: int) -> None:
    for hidden, intermediate, rank, rows in SIZES[nodes]:
        layer = make_layer(hidden, intermediate, fmt, ISA, nodes=nodes)
        lora = make_lora(hidden, intermediate, rank, torch.float32)
        assert_contract(compare(layer, lora, *inputs_for(rows, hidden), forward=Lane()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("names", [(), ("gate_proj",), ("up_proj", "down_proj")])
def test_subsets_of_projections_and_dtypes(names: tuple[str, ...], dtype: torch.dtype) -> None:
    layer = make_layer(64, 96, "k4", ISA)
    lora = make_lora(64, 96, 8, torch.bfloat16, names) if names else None
    assert_contract(compare(layer, lora, *inputs_for(TAILS[1], 64, dtype), forward=Lane(chunk=3)))


def test_ranks_may_differ() -> None:
    layer = make_layer(64, 96, "int8", ISA)
    pairs = {
        name: make_lora(64, 96, r, torch.float32).pairs[name] for name, r in zip(PROJECTIONS, (1, 256, 20), strict=True)
    }
    assert_contract(compare(layer, ExpertLora(pairs), *inputs_for(TAILS[1], 64), forward=Lane()))


@pytest.mark.parametrize("nodes", [1, 2])
def test_dropout(nodes: int) -> None:
    layer = make_layer(32, 160, "int8", ISA, nodes=nodes)
    lora = make_lora(32, 160, 33, torch.float32, dropout=0.2, seed=2**63 + 5)
    assert_contract(compare(layer, lora, *inputs_for(TAILS[1], 32), oracle=dropout_oracle, forward=Lane()))


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_masks_are_the_native_ones(projection: str) -> None:
    """One expert whose adapter shows what it gets: with A = B = 1 columns, and weights of zero but down's."""
    size, tokens, probability = 64, 40, 0.3
    layer = empty_layer(size, size, "bf16", num_experts=1)
    for name in PROJECTIONS:
        layer.load(0, name, torch.eye(size))
    lora = make_lora(size, size, 4, torch.float32, (projection,), dropout=probability, seed=77)
    one = {name: type(p)(p.a[:1], p.b[:1], 4.0) for name, p in lora.pairs.items()}
    x = torch.randn(tokens, size).bfloat16()
    index, weights = torch.zeros(tokens, 2, dtype=torch.long), torch.rand(tokens, 2)
    masked = ExpertLora(one, probability, 77)
    with torch.no_grad():
        here, there = (f(layer, x, index, weights, masked) for f in (Lane(), routed_experts))
        other = Lane()(layer, x, index, weights, ExpertLora(one, probability, 78))
    assert relative(here, there) < 0.005 < 0.05 < relative(other, there)


def test_masks_drop_what_they_should() -> None:
    lora = make_lora(32, 32, 4, torch.float32, dropout=0.25, seed=2**64 - 1)
    lora = replace(lora, streams=write_streams(lora, room_for_streams(torch.device("cpu"))))
    first, second = (stays(Dropout.of(lora, name), torch.arange(4096), 256) for name in PROJECTIONS[:2])
    for row in (0, 4095):
        assert (first[row].numpy() == dropout_mask(lora, PROJECTIONS[0], row, 256)).all()
    for mask in (first, second):
        assert mask.float().mean().item() == pytest.approx(0.75, abs=0.002)
    assert (first == second).float().mean().item() == pytest.approx(0.75**2 + 0.25**2, abs=0.002)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    ("fmt", "swiglu"),
    [*((fmt, GPT_OSS) for fmt in ("bf16", "mxfp4", "int8")), ("k4", GELU_TANH), ("int8", clamped_after(4.0))],
)
def test_biases_and_other_activations(fmt: str, swiglu: Swiglu, nodes: int) -> None:
    layer = make_gated(64, 160, fmt, ISA, nodes=nodes, swiglu=swiglu)
    for lora in (None, small_lora(64, 160, 8, torch.float32)):
        assert_contract(compare(layer, lora, *inputs_for(TAILS[1], 64), oracle=gated_oracle(layer), forward=Lane()))


def test_order_chunks_and_pieces_do_not_matter() -> None:
    layer = make_layer(64, 96, "int8", ISA)
    lora = make_lora(64, 96, 8, torch.float32, dropout=0.1, seed=3)
    x, index, weights = inputs_for(TAILS[2], 64)
    leaves = [x, weights, *lora.parameters()]
    results = []
    for lane in (Lane(chunk=5), Lane(chunk=2, experts=[4, 1, 3, 0, 2], piece_rows=20)):
        out = lane(layer, x, index, weights, lora)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for one, other in zip(*results, strict=True):
        assert relative(one, other) < 0.002


def test_experts_without_rows() -> None:
    layer = make_layer(64, 96, "bf16", ISA)
    lora = make_lora(64, 96, 8, torch.float32)
    x, index, weights = inputs_for((0, 0, 0, 6, 0), 64)
    out = Lane()(layer, x, index, weights, lora)
    grads = torch.autograd.grad(out.float().sum(), lora.parameters())
    assert all(grad[3].any() and not grad[[0, 1, 2, 4]].any() for grad in grads)


def test_rows_are_sorted_by_expert() -> None:
    index = torch.tensor([[2, 0], [-1, 2], [0, 1], [2, -1]])
    counts = [2, 1, 3, 0]
    routes = Routes(index, counts)
    (first, second), empty = lay_out(routes, [[2, 1], [3]], piece_rows=3)
    assert empty == []
    assert first.row_route.tolist() == [0, 3, 6] and second.row_route.tolist() == [5]
    assert (first.counts, first.ends.tolist()) == ([3, 0], [3, 3])
    assert (second.counts, second.ends.tolist(), second.begin) == ([0, 1], [0, 1], 3)
    here = first.route_row < 4
    assert here.tolist() == [True, False, False, True, False, True, True, False]
    assert first.route_row[here].tolist() == [0, 1, 3, 2]


def test_products_are_laid_out_as_torch_groups_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own grouped product, as CUDA takes it, checks strides and alignment here too."""
    layer = make_gated(64, 160, "k4", ISA, nodes=2, swiglu=GPT_OSS)
    lora = small_lora(64, 160, 8, torch.float32)
    monkeypatch.setattr(chunk, "is_grouped", lambda device: True)
    inputs = inputs_for(TAILS[0], 64)
    assert_contract(compare(layer, lora, *inputs, oracle=gated_oracle(layer), forward=Lane(chunk=5, piece_rows=9)))


def test_pieces_are_smaller_where_rows_are_wide() -> None:
    assert piece_rows(2048, 768) == PIECE_ROWS
    assert piece_rows(7168, 2048) == (384 << 20) // (2 * (3 * 7168 + 4 * 2048)) < PIECE_ROWS


def test_torch_operations_where_triton_is_not_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    assert operations(torch.device("cpu")) is torch_ops
    monkeypatch.setattr(ops, "has_triton", lambda: False)
    assert operations(cuda) is torch_ops
    monkeypatch.setattr(ops, "has_triton", lambda: True)
    monkeypatch.setitem(sys.modules, "ktft.lanes.ops.triton_ops", chosen := ModuleType("triton_ops"))
    assert operations(cuda) is chosen
    monkeypatch.setenv("KTFT_TRITON", "0")
    assert operations(cuda) is torch_ops

"""The Triton kernels against the torch operations: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from contract import (
    GPT_OSS,
    OUTPUT_TOLERANCE,
    assert_contract,
    compare,
    dropout_oracle,
    gated_oracle,
    inputs_for,
    make_gated,
    make_layer,
    make_lora,
    relative,
    small_lora,
)

pytest.importorskip("triton", reason="Triton is not installed")

from interpreted import DEVICE, bf16_in_the_interpreter
from lanes import Lane, blocks, decoded
from toy_format import check_decoding, toy

from ktft import native
from ktft.config import EXPERT_FORMATS, PROJECTIONS
from ktft.dense.formats import layout
from ktft.lanes.ops import torch_ops, triton_ops
from ktft.lanes.ops.chunk import decode
from ktft.lanes.ops.weights import ChunkWeights, PackedExperts
from ktft.lanes.routes import PIECE_ROWS, ChunkBounds, Piece
from ktft.lora import ExpertLora
from ktft.native.dense import pack_dense
from ktft.swiglu import GELU_TANH, RELU2, SILU, Swiglu, clamped_after

__all__ = ["bf16_in_the_interpreter", "toy"]

ROWS = (5, 33, 0, 2, 6)
LANE = Lane(DEVICE, triton_ops, chunk=3, piece_rows=30)


@pytest.mark.parametrize("fmt", EXPERT_FORMATS)
def test_decode(fmt: str) -> None:
    layer = make_layer(160, 288, fmt, native.default_isa(), nodes=2)
    ours, expected = (decoded(layer, [3, 0], None, torch.device(DEVICE), ops) for ops in (triton_ops, torch_ops))
    assert torch.equal(ours.gate_up.values, expected.gate_up.values)
    assert torch.equal(ours.down.values, expected.down.values)


@pytest.mark.parametrize("slots", [[4, 1, 2], [4, -2, 1], [-1, -3, -2]])
@pytest.mark.parametrize("fmt", EXPERT_FORMATS)
def test_residents_and_copies(fmt: str, slots: list[int]) -> None:
    """Residents lie in any blocks of an arena, with the slices of an expert one behind the other; the others in rows of
    a buffer. They are decoded, or multiplied where they are.
    """
    layer, device = make_layer(160, 288, fmt, native.default_isa(), nodes=2), torch.device(DEVICE)
    packed, numbers = blocks(layer, [3, 0, 2], device), torch.tensor(slots, dtype=torch.int32, device=device)
    arena, at = torch.zeros(6, sum(each.shape[1] for each in packed) + 256, dtype=torch.uint8, device=device), 0
    held, copied = [], []
    for each in packed:
        held.append(arena[:, at : at + each.shape[1]])
        copied.append(torch.zeros(4, each.shape[1], dtype=torch.uint8, device=device))
        for slot, block in zip(slots, each, strict=True):
            (held if slot >= 0 else copied)[-1][slot if slot >= 0 else -1 - slot] = block
        at += each.shape[1]
    where = PackedExperts(fmt, layer.slices(), copied, numbers, held)
    ours, expected = ChunkWeights.empty(layer, 3, None, device), decoded(layer, [3, 0, 2], None, device, torch_ops)
    for ops in (torch_ops, triton_ops):
        for matrix in (ours.gate_up, ours.down):
            matrix.values.fill_(torch.nan)
        decode(where, ours, ops)
        assert torch.equal(ours.gate_up.values, expected.gate_up.values)
        assert torch.equal(ours.down.values, expected.down.values)
    ends, routes = torch.tensor([2, 2, 7], device=device), torch.arange(7, device=device)
    piece = Piece(0, [2, 0, 5], ends.int(), routes.int(), routes.int(), 1)
    for matrix, whole in ((ours.gate_up, expected.gate_up), (ours.down, expected.down)):
        matrix.values.fill_(torch.nan)
        x, dy = (torch.randn(7, size, device=device).bfloat16() for size in (matrix.inputs, matrix.values.shape[1]))
        own = [whole.values[0]] * 2 + [whole.values[2]] * 5
        found = triton_ops.outputs(x, matrix, where, piece), triton_ops.input_grads(dy, matrix, where, piece)
        rows = [row.float() @ each.float().T for row, each in zip(x, own, strict=True)]
        grads = [row.float() @ each.float() for row, each in zip(dy, own, strict=True)]
        for ours_of_rows, exact in zip(found, (rows, grads), strict=True):
            assert relative(ours_of_rows, torch.stack(exact)) < OUTPUT_TOLERANCE


@pytest.mark.parametrize("fmt", EXPERT_FORMATS)
def test_decode_matrix(fmt: str) -> None:
    """Any number of strips and columns, in either dtype, with the scales of rows folded in once."""
    for rows, cols in ((32, 32), (48, 288), (144, 160)):
        weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)) * 0.02
        packed, (matrix, _) = pack_dense(native.runtime(1), fmt, weight).to(DEVICE), layout(fmt, rows, cols)
        for dtype in (torch.bfloat16, torch.float32):
            ours, expected = (torch.full((rows, cols), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
            triton_ops.decode_matrix(fmt, packed, matrix, ours)
            torch_ops.decode_matrix(fmt, packed, matrix, expected)
            assert torch.equal(ours, expected)


def test_a_new_format_needs_its_row_alone(toy: native.ExpertLayer) -> None:
    check_decoding(toy, triton_ops, DEVICE)


def test_contract() -> None:
    layer = make_layer(160, 32, "k4", native.default_isa())
    ranks = dict(zip(PROJECTIONS, (80, 1, 20), strict=True))
    pairs = {name: make_lora(160, 32, rank, torch.float32).pairs[name] for name, rank in ranks.items()}
    assert_contract(compare(layer, ExpertLora(pairs), *inputs_for(ROWS, 160), forward=LANE))


@pytest.mark.parametrize("piece_rows", [PIECE_ROWS, 20])
@pytest.mark.parametrize("rows", [ROWS, (0, 0, 48, 0, 0), (1, 0, 0, 0, 3)])
def test_rows_that_only_the_device_knows(rows: tuple[int, ...], piece_rows: int) -> None:
    """Each chunk gets memory for the rows of all; nothing may read or write behind its own."""
    layer = make_layer(160, 32, "k4", native.default_isa())
    lane = Lane(DEVICE, triton_ops, chunk=3, steady=True, piece_rows=piece_rows)
    assert_contract(compare(layer, make_lora(160, 32, 8, torch.float32), *inputs_for(rows, 160), forward=lane))


@pytest.mark.parametrize("swiglu", [SILU, RELU2])
@pytest.mark.parametrize("steady", [False, True])
def test_kept_gates(swiglu: Swiglu, steady: bool) -> None:
    """The same gradients, bit for bit, with gate and up from forward; some experts have a row, one has none."""
    layer, found = make_layer(64, 160, "k4", native.default_isa(), swiglu=swiglu), []
    lora = make_lora(64, 160, 8, torch.float32, swiglu.projections, dropout=0.2, seed=4)
    for keeps in (False, True):
        x, index, weights = inputs_for(ROWS, 64)
        lane = Lane(DEVICE, triton_ops, chunk=3, piece_rows=30, steady=steady, keeps=keeps)
        out = lane(layer, x.requires_grad_(), index, weights.requires_grad_(), lora)
        out.float().square().sum().backward()
        found.append([out, x.grad, weights.grad, *(each.grad for each in lora.parameters())])
        for each in lora.parameters():
            each.grad = None
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    assert all(grad.abs().max() > 0 for grad in found[1][1:])


@pytest.mark.parametrize(("experts", "sizes"), [(5, (3, 2)), (130, (44, 43, 43)), (1, (1,))])
@pytest.mark.parametrize("piece_rows", [40, 5000])
def test_sort_routes(experts: int, sizes: tuple[int, ...], piece_rows: int) -> None:
    """More routes than one block has, experts without any, some that do not exist, and values that are not finite."""
    tokens, top_k, random = 700, 3, torch.Generator().manual_seed(experts)
    index = torch.randint(max(1, experts // 2), experts + 1, (tokens, top_k), generator=random)
    hidden, pieces = torch.full((tokens, 1500), 3e38), -(-tokens * top_k // piece_rows)
    factors = torch.randint(2**62, (tokens * top_k,), generator=random)
    for stray, bad in ((None, None), (-7, 690), (experts + 2, 0)):
        index = index.clamp(0, experts - 1) if stray is None else index.index_fill(0, torch.tensor(5), stray)
        if bad is not None:
            hidden[bad, 1400] = torch.nan if bad else -torch.inf
        found = []
        for ops in (torch_ops, triton_ops):
            bounds = ChunkBounds.of(sizes, torch.device(DEVICE))
            ends = torch.full((len(sizes), pieces * experts), -1, dtype=torch.int32, device=DEVICE)
            row_route, route_row = (
                torch.zeros(len(sizes), tokens * top_k, dtype=torch.int32, device=DEVICE) for _ in range(2)
            )
            told = torch.zeros(experts + 3, dtype=torch.int64, device=DEVICE)
            given = index.to(DEVICE), factors.to(DEVICE), bounds, piece_rows
            ops.sort_routes(*given, ends, row_route, route_row, told)
            ops.find_bad(hidden.to(DEVICE), told)
            rows = [int(counts.sum()) for counts in told[:experts].split(sizes)]
            routes = torch.cat([own[:count] for own, count in zip(row_route, rows, strict=True)])
            found.append([each.cpu() for each in (ends, routes, route_row, told)])
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
        assert found[0][-1][[-3, -1]].tolist() == [stray or 0, -1 if bad is None else bad]
        assert torch.equal(
            found[0][-1][:experts], torch.bincount(index[(index >= 0) & (index < experts)], minlength=experts)
        )


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("fmt", EXPERT_FORMATS)
def test_products_from_packed_bytes(fmt: str, steady: bool) -> None:
    """Sizes that fill neither a tile nor a program's block, weights in two slices, biases, one adapter missing."""
    layer = make_gated(160, 288, fmt, native.default_isa(), nodes=2, swiglu=GPT_OSS)
    pairs = dict(small_lora(160, 288, 40, torch.float32).pairs)
    del pairs["up_proj"]
    lane = Lane(DEVICE, triton_ops, chunk=3, piece_rows=30, steady=steady, in_place=True)
    assert_contract(compare(layer, ExpertLora(pairs), *inputs_for(ROWS, 160), oracle=gated_oracle(layer), forward=lane))


def test_products_from_packed_bytes_of_several_tiles() -> None:
    layer, lora = make_layer(256, 128, "k4", native.default_isa()), make_lora(256, 128, 8, torch.float32, dropout=0.2)
    lane = Lane(DEVICE, triton_ops, chunk=3, in_place=True)
    inputs = inputs_for((200, 0, 1, 130, 64), 256)
    assert_contract(compare(layer, lora, *inputs, oracle=dropout_oracle, forward=lane))


@pytest.mark.parametrize("steady", [False, True])
def test_dropout(steady: bool) -> None:
    layer = make_layer(32, 160, "int8", native.default_isa())
    lora = make_lora(32, 160, 8, torch.float32, dropout=0.2, seed=2**63 + 5)
    lane = Lane(DEVICE, triton_ops, chunk=3, piece_rows=30, steady=steady)
    assert_contract(compare(layer, lora, *inputs_for(ROWS, 32), oracle=dropout_oracle, forward=lane))


@pytest.mark.parametrize("swiglu", [GPT_OSS, GELU_TANH, clamped_after(4.0)])
def test_biases_and_other_activations(swiglu: Swiglu) -> None:
    layer = make_gated(64, 160, "mxfp4", native.default_isa(), swiglu=swiglu)
    lora = small_lora(64, 160, 8, torch.float32)
    assert_contract(compare(layer, lora, *inputs_for(ROWS, 64), oracle=gated_oracle(layer), forward=LANE))


@pytest.mark.parametrize("fmt", ["k4", "bf16"])
def test_experts_without_a_gate(fmt: str) -> None:
    layer = make_layer(64, 160, fmt, native.default_isa(), nodes=2, swiglu=RELU2)
    lora = make_lora(64, 160, 20, torch.float32, RELU2.projections, dropout=0.1, seed=5)
    assert_contract(compare(layer, lora, *inputs_for(ROWS, 64), oracle=dropout_oracle, forward=LANE))
    lora = make_lora(64, 160, 8, torch.float32, RELU2.projections)
    steady = Lane(DEVICE, triton_ops, chunk=3, steady=True)
    assert_contract(compare(layer, lora, *inputs_for(ROWS, 64), oracle=gated_oracle(layer), forward=steady))
    layer = make_gated(64, 160, fmt, native.default_isa(), swiglu=RELU2)
    assert_contract(compare(layer, None, *inputs_for(ROWS, 64), oracle=gated_oracle(layer), forward=LANE))


@pytest.mark.parametrize("name", PROJECTIONS[:2])
def test_one_of_two_projections_that_lie_side_by_side(name: str) -> None:
    layer = make_layer(32, 32, "int8", native.default_isa())
    lora = make_lora(32, 32, 20, torch.bfloat16, (name,))
    assert_contract(compare(layer, lora, *inputs_for(ROWS, 32), forward=LANE))

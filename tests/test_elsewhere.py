"""Experts computed elsewhere: the native layer leaves them out, and the parts add up to the whole."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_kernels import EXPERTS, MORE_THAN_ONE_CALL, dequantized, inputs_for, make_layer, make_lora, relative

from ktft import native

HIDDEN, INTERMEDIATE = 64, 288
ROWS = (17, 3, 0, 64, 9)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("rows", [ROWS, MORE_THAN_ONE_CALL])
def test_parts_add_up(nodes, rows):
    layer = make_layer(HIDDEN, INTERMEDIATE, "int8", native.default_isa(), threads=2, nodes=nodes)
    lora = make_lora(HIDDEN, INTERMEDIATE, 8, torch.float32)
    x, index, weights = (t.detach() for t in inputs_for(rows, HIDDEN, torch.float32))
    dy = torch.randn(x.shape)
    whole, saved = layer.forward(x, index, weights, lora, "retain")
    grads = layer.backward(saved, dy, x, index, weights, lora)

    marked = torch.full((EXPERTS,), 7.0)
    total, hidden, routing = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(weights)
    lora_grads = [torch.full(p.shape, 7.0) for p in lora.parameters()]
    for here in ([0, 2, 3], [1, 4]):
        elsewhere = torch.ones(EXPERTS, dtype=torch.bool)
        elsewhere[here] = False
        part_index = index.masked_fill(elsewhere[index], native.ELSEWHERE)
        out, part = layer.forward(x, part_index, weights, lora, "recompute")
        found = layer.backward(part, dy, x, part_index, weights, lora, elsewhere=elsewhere, lora_grads=lora_grads)
        total, hidden, routing = total + out, hidden + found.hidden_states, routing + found.top_k_weights
        marked[here] = 0
        for grad in lora_grads:
            untouched = grad[marked == 7]
            assert (untouched == 7).all()
    assert relative(total, whole) < 1e-5
    assert relative(hidden, grads.hidden_states) < 1e-5
    assert relative(routing, grads.top_k_weights) < 1e-5
    for found_grad, grad in zip(lora_grads, grads.lora, strict=True):
        assert relative(found_grad, grad) < 1e-5


def test_nothing_here():
    layer = make_layer(HIDDEN, INTERMEDIATE, "bf16", native.default_isa())
    x, index, weights = (t.detach() for t in inputs_for(ROWS, HIDDEN))
    nowhere = torch.full_like(index, native.ELSEWHERE)
    out, saved = layer.forward(x, nowhere, weights, None, "retain")
    grads = layer.backward(saved, x, x, nowhere, weights, None)
    assert not out.any() and not grads.hidden_states.any() and not grads.top_k_weights.any()


def test_nan_is_found_though_the_first_slot_is_elsewhere():
    layer = make_layer(HIDDEN, INTERMEDIATE, "bf16", native.default_isa())
    x, index, weights = (t.detach().clone() for t in inputs_for(ROWS, HIDDEN))
    x[3, 5] = float("nan")
    index[:, 0] = native.ELSEWHERE
    with pytest.raises(ValueError, match="token 3 of"):
        layer.forward(x, index, weights, None, "none")


def test_other_negative_numbers_are_refused():
    layer = make_layer(HIDDEN, INTERMEDIATE, "bf16", native.default_isa())
    x, index, weights = (t.detach().clone() for t in inputs_for(ROWS, HIDDEN))
    index[0, 0] = -2
    with pytest.raises(ValueError, match="routed to expert -2"):
        layer.forward(x, index, weights, None, "none")


@pytest.mark.parametrize("fmt", native.FORMATS)
@pytest.mark.parametrize("nodes", [1, 3])
def test_slices_say_where_weights_lie(fmt, nodes):
    """Read through the addresses: in a bf16 layer the weights, in others their scales."""
    import ctypes

    layer = make_layer(HIDDEN, INTERMEDIATE, fmt, native.default_isa(), nodes=nodes, biases=True)
    for e, (name, size) in itertools.product(range(EXPERTS), {"gate_proj": INTERMEDIATE, "down_proj": HIDDEN}.items()):
        layer.load_bias(e, name, torch.arange(size) + e * 1000.0)
    slices = layer.slices()
    assert sum(s.width for s in slices) == INTERMEDIATE and len(slices) == nodes
    assert sum(s.expert_bytes for s in slices) * EXPERTS == layer.packed_bytes
    gate = dequantized(layer)[0]
    for s, e in itertools.product(slices, range(EXPERTS)):
        block = torch.frombuffer(
            (ctypes.c_uint8 * s.expert_bytes).from_address(s.address + e * s.expert_bytes), dtype=torch.uint8
        )
        matrix = s.matrices["gate_proj"]
        assert (matrix.rows, matrix.cols) == (s.width, HIDDEN)
        bias = block[matrix.bias : matrix.bias + 4 * matrix.rows].view(torch.float32)
        assert torch.equal(bias, torch.arange(s.begin, s.begin + s.width) + e * 1000.0)
        assert (s.matrices["down_proj"].bias is None) == (s.begin > 0)
        if fmt == "bf16":
            strips = block[matrix.tiles :][: matrix.rows // 16 * matrix.strip_bytes].view(-1, matrix.strip_bytes)
            tiles = strips[:, : HIDDEN // 32 * 1024].contiguous().view(torch.bfloat16).view(-1, HIDDEN // 32, 16, 32)
            rows = tiles.transpose(1, 2).reshape(matrix.rows, HIDDEN)
            assert torch.equal(rows.float(), gate[e, s.begin : s.begin + s.width])
        if fmt == "int8":
            scales = block[matrix.scales : matrix.scales + 4 * matrix.rows].view(torch.float32)
            largest = gate[e, s.begin : s.begin + s.width].abs().amax(1)
            assert torch.allclose(scales * 127, largest, rtol=1e-5)

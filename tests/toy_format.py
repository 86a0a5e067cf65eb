"""A format that no code of ktft knows by name: mxfp4's bytes, with other values for the codes by its row alone."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from contract import EXPERTS, make_layer, relative
from lanes import blocks, decoded
from torch import Tensor

from ktft import native, reference
from ktft.config import PROJECTIONS
from ktft.lanes.gpu.lane import GpuLane
from ktft.lanes.ops.interface import Operations
from ktft.native import ExpertLayer
from ktft.native.packed import CODE_BYTES, GROUP, PACKED_FORMATS, ROW_BYTES, TILE_ROWS, PackedMatrix
from ktft.serve.runtime.resident_experts import HotExperts, HotOperations

NAME = "toy"
MAGNITUDES = (0.0, 0.25, 0.75, 1.0, 2.5, 5.0, 10.0, 31.75)
ROW = dataclasses.replace(
    PACKED_FORMATS["mxfp4"], name=NAME, values=(*MAGNITUDES, *(-m for m in MAGNITUDES)), unit=0.25
)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ExpertLayer:
    """A layer in the toy format, whose row is in the table of formats."""
    monkeypatch.setitem(PACKED_FORMATS, NAME, ROW)
    layer = make_layer(160, 32, "mxfp4", native.default_isa())
    layer.format = NAME
    return layer


def _matrix(block: list[int], matrix: PackedMatrix) -> Tensor:
    """`[rows, cols]` as docs/dev/architecture.md and csrc/quant/nibble-inl.h say, value by value."""
    out = torch.empty(matrix.rows, matrix.cols)
    for row in range(matrix.rows):
        for col in range(matrix.cols):
            strip, tile = row // TILE_ROWS * matrix.strip_bytes, col // ROW.tile_cols * ROW.tile_bytes
            at, r, group = matrix.tiles + strip + tile, row % TILE_ROWS, col % ROW.tile_cols // GROUP
            byte = block[at + r * ROW_BYTES + group * GROUP // 2 + col % (GROUP // 2)]
            code = byte >> 4 if col % GROUP >= GROUP // 2 else byte & 15
            exponent = block[at + CODE_BYTES + r * (ROW.tile_cols // GROUP) + group] - 127
            out[row, col] = ROW.values[code] * 2.0**exponent
    return out.bfloat16().float()


def weights(layer: ExpertLayer) -> list[Tensor]:
    """Gate, up and down of all experts, in fp32."""
    (part,) = layer.slices()
    packed = [block.tolist() for block in blocks(layer, list(range(EXPERTS)), torch.device("cpu"))[0]]
    return [torch.stack([_matrix(block, part.matrices[name]) for block in packed]) for name in PROJECTIONS]


def check_decoding(layer: ExpertLayer, ops: Operations, device: str) -> None:
    """Check that the lanes' operations decode the format."""
    found, (gate, up, down) = decoded(layer, [3, 0], None, torch.device(device), ops), weights(layer)
    assert torch.equal(found.gate_up.values.float().cpu(), torch.cat((gate, up), dim=1)[[3, 0]])
    assert torch.equal(found.down.values.float().cpu(), down[[3, 0]])


def check_products(layer: ExpertLayer, ops: HotOperations, device: str) -> None:
    """Check that a server's residents multiply with the format."""
    hot = HotExperts(GpuLane(device), layer.packed_bytes + 256 * EXPERTS, [layer])
    hot.start({layer: [1.0] * EXPERTS})
    torch.manual_seed(5)
    x, index = torch.randn(2, layer.hidden_size).bfloat16(), torch.tensor([[0, 3], [4, 1]])
    routing = torch.rand(2, 2)
    slots, _ = ops.route(hot.layers[0], index.to(device))
    out = ops.forward(hot.layers[0], x.to(device), slots, routing.to(device))
    assert relative(out.cpu(), reference.moe(x.float(), index, routing, *weights(layer))) < 0.005

"""`ops.Operations` in torch operations, for any device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ktft.lanes.dropout import Dropout, stays
from ktft.lanes.routes import Piece
from ktft.lanes.tiles import CODE_BYTES, ROW_BYTES, SCALE_BLOCK, TILE_ROWS, TILES
from ktft.native.packed import PackedMatrix
from ktft.swiglu import Swiglu


def decode(format: str, blocks: Tensor, matrix: PackedMatrix, out: Tensor) -> None:
    """See `ops.Operations`. One expert after the other: codes take several times their bytes meanwhile."""
    for block, decoded in zip(blocks, out, strict=True):
        values = _tiles(format, block, matrix)
        values = values.permute(0, 2, 1, 3).reshape(matrix.rows, -1)[:, : matrix.cols]
        if format == "fp8":
            values = values.float() * _block_scales(block, matrix)
        decoded.copy_(values)


def _tiles(format: str, block: Tensor, matrix: PackedMatrix) -> Tensor:
    """Values without scales that lie outside of the tiles, `[strips, tiles of a strip, 16, columns of a tile]`."""
    tile = TILES[format]

    def cut(offset: int, row_bytes: int) -> Tensor:
        return block.as_strided(
            (matrix.rows // TILE_ROWS, -(-matrix.cols // tile.cols), TILE_ROWS, row_bytes),
            (matrix.strip_bytes, tile.bytes, row_bytes, 1),
            block.storage_offset() + matrix.tiles + offset,
        )

    codes = cut(0, ROW_BYTES)
    if tile.table is None:
        return codes.view({"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[format])
    groups = codes.unflatten(-1, (4, 1, 16))
    both = torch.cat((groups & 15, groups >> 4), dim=-2).flatten(-2)
    values = _table(format, block.device)[both.int()]
    scales = cut(CODE_BYTES, (tile.bytes - CODE_BYTES) // TILE_ROWS)
    if format == "int4":
        scales = scales.view(torch.bfloat16)
    elif format == "mxfp4":
        scales = torch.where(scales == 0, 2.0**-127, (scales.int() << 23).view(torch.float32))
    return (values * scales.float()[..., None]).bfloat16().flatten(-2)


@functools.cache
def _table(format: str, device: torch.device) -> Tensor:
    return torch.tensor(TILES[format].table, device=device)


def _block_scales(block: Tensor, matrix: PackedMatrix) -> Tensor:
    """fp32 `[rows, cols]`."""
    assert matrix.scales is not None
    across = -(-matrix.cols // SCALE_BLOCK)
    down = -(-matrix.rows // SCALE_BLOCK)
    scales = block[matrix.scales :][: across * down * 4].view(torch.float32).view(down, across)
    wide = scales.repeat_interleave(SCALE_BLOCK, 0).repeat_interleave(SCALE_BLOCK, 1)
    return wide[: matrix.rows, : matrix.cols]


def _of_rows(scale: Tensor, piece: Piece) -> Tensor:
    """`[n, outputs]`: each row's expert's scale."""
    rows = torch.arange(piece.rows, dtype=torch.int32, device=scale.device)
    return scale[torch.searchsorted(piece.ends, rows, right=True)]


def gather(source: Tensor, piece: Piece, scale: Tensor | None, out: Tensor) -> None:
    """See `ops.Operations`."""
    rows = source[piece.row_route // piece.top_k]
    out.copy_(rows if scale is None else rows.float() * _of_rows(scale, piece))


def _dropped(x: Tensor, piece: Piece, dropout: Dropout | None) -> Tensor:
    if dropout is None:
        return x
    return torch.where(stays(dropout, piece.row_route, x.shape[1]), x, torch.zeros((), dtype=x.dtype, device=x.device))


def low_rank(x: Tensor, a: Tensor, piece: Piece, dropout: Dropout | None, out: Tensor) -> None:
    """See `ops.Operations`."""
    x = _dropped(x, piece, dropout)
    for expert, rows in piece.ranges():
        out[rows] = (x[rows].float() @ a[expert].float().sum(0).T)[:, None]


def add_low_rank(low: Tensor, a: Tensor, piece: Piece, dropout: Dropout | None, out: Tensor) -> None:
    """See `ops.Operations`."""
    added = torch.empty(out.shape, device=out.device)
    for expert, rows in piece.ranges():
        torch.mm(low[rows].float().sum(1), a[expert].float().sum(0), out=added[rows])
    out += _dropped(added, piece, dropout)


def lora_gradient(
    low: Tensor,
    wide: Tensor,
    piece: Piece,
    weights: Tensor | None,
    dropout: Dropout | None,
    factor: float,
    scale: Tensor | None,
    out: Tensor,
) -> None:
    """See `ops.Operations`."""
    left = low[..., : out.shape[1]].float().sum(1) * factor
    if weights is not None:
        left *= weights.view(-1)[piece.row_route][:, None]
    wide = _dropped(wide, piece, dropout)
    for expert, rows in piece.ranges():
        found = left[rows].T @ wide[rows].float()
        out[expert] += found if scale is None else found / scale[expert]


def _activation(
    gate_up: Tensor, scale: Tensor | None, piece: Piece, swiglu: Swiglu
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gate and up in fp32, the clamped gate's sigmoid and the clamped up with its shift."""
    scaled = gate_up.float() if scale is None else gate_up.float() * _of_rows(scale, piece)
    gate, up = scaled.chunk(2, dim=1)
    sigmoid = torch.sigmoid(swiglu.alpha * gate.clamp(max=swiglu.limit))
    return gate, up, sigmoid, up.clamp(-swiglu.limit, swiglu.limit) + swiglu.shift


def swiglu(gate_up: Tensor, scale: Tensor | None, piece: Piece, swiglu: Swiglu, out: Tensor) -> None:
    """See `ops.Operations`."""
    gate, _, sigmoid, up = _activation(gate_up, scale, piece, swiglu)
    out.copy_(gate.clamp(max=swiglu.limit) * sigmoid * up)


def swiglu_backward(
    gate_up: Tensor,
    scale: Tensor | None,
    grad_h: Tensor,
    more: Tensor | None,
    piece: Piece,
    swiglu: Swiglu,
    weights: Tensor,
    h: Tensor,
    grad_weights: Tensor,
) -> None:
    """See `ops.Operations`."""
    routes = piece.row_route
    gate, up, sigmoid, shifted = _activation(gate_up, scale, piece, swiglu)
    clamped = gate.clamp(max=swiglu.limit)
    active = clamped * sigmoid * shifted
    grad, flat = grad_h.float(), grad_weights.view(-1)
    flat[routes] += (grad * active).sum(1) + (0 if more is None else more[:, :2].float().sum(1))
    grad = grad * weights.view(-1)[routes][:, None]
    # (g sigmoid(alpha g))' = s + alpha g s (1 - s)
    slope = sigmoid + swiglu.alpha * clamped * sigmoid * (1 - sigmoid)
    h.copy_(active)
    grad_gate = torch.where(gate <= swiglu.limit, grad * shifted * slope, 0)
    grad_up = torch.where(up.abs() <= swiglu.limit, grad * clamped * sigmoid, 0)
    both = torch.cat((grad_gate, grad_up), dim=1)
    gate_up.copy_(both if scale is None else both * _of_rows(scale, piece))


def combine(y: Tensor, scale: Tensor | None, piece: Piece, weights: Tensor | None, out: Tensor) -> None:
    """See `ops.Operations`."""
    if scale is not None:
        y = y.float() * _of_rows(scale, piece)
    rows = piece.route_row.view(-1, piece.top_k) - piece.begin
    here = (rows >= 0) & (rows < piece.rows)
    rows = rows.clamp(0, piece.rows - 1)
    for slot in range(piece.top_k):
        added = torch.where(here[:, slot, None], y[rows[:, slot]], 0).float()
        out += added if weights is None else added * weights[:, slot, None]

"""`interface.Operations`, which says what each function does, in torch operations, for any device."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from ktft.lanes.ops.dropout import Dropout, stays
from ktft.lanes.ops.interface import KeptGates
from ktft.lanes.ops.weights import PLACES, Adapters, ChunkMatrix, PackedExperts, PackedPart
from ktft.lanes.routes import ChunkBounds, Piece
from ktft.native.packed import CODE_BYTES, GROUP, PACKED_FORMATS, ROW_BYTES, SCALE_BLOCK, TILE_ROWS, PackedMatrix
from ktft.swiglu import Swiglu


def decode(part: PackedPart, out: ChunkMatrix, values: bool) -> None:
    """Experts are decoded one by one, since decoding takes several times the bytes of their codes."""
    blocks, held, slots = part.blocks, part.held, part.slots
    if slots is not None:
        assert held is not None
        at = slots.long()
        blocks = torch.where((at >= 0)[:, None], held[at.clamp(min=0)], blocks[(-1 - at).clamp(min=0)])
    stacked, scale = out.by_projection
    for i, matrix in enumerate(part.matrices):
        rows = slice(part.row, part.row + matrix.rows)
        if values:
            to = stacked[:, i, rows, part.col : part.col + matrix.cols]
            for block, decoded in zip(blocks, to, strict=True):
                decoded.copy_(_values(part.format, block, matrix))
        scales = None
        if scale is not None and matrix.scales is not None:
            scales = scale[:, i, rows]
            scales.copy_(_floats(blocks, matrix.scales, matrix.rows))
        if matrix.bias is not None:
            bias, to = _floats(blocks, matrix.bias, matrix.rows), stacked[:, i, rows, -PLACES:]
            to.zero_()
            _split(bias if scales is None else bias / scales, to[..., 0], to[..., 1])


def reads_packed(format: str, rows_each: float) -> bool:
    return False


def outputs(x: Tensor, matrix: ChunkMatrix, packed: PackedExperts, piece: Piece) -> Tensor:
    values = _whole(matrix, packed)
    out = x.new_zeros(piece.rows, values.shape[1])
    for expert, rows in piece.ranges():
        torch.mm(x[rows], values[expert].mT, out=out[rows])
    return out


def input_grads(dy: Tensor, matrix: ChunkMatrix, packed: PackedExperts, piece: Piece) -> Tensor:
    values = _whole(matrix, packed)
    out = dy.new_zeros(piece.rows, values.shape[2])
    for expert, rows in piece.ranges():
        torch.mm(dy[rows], values[expert], out=out[rows])
    return out


def _whole(matrix: ChunkMatrix, packed: PackedExperts) -> Tensor:
    """The values, decoded, with the further columns of `matrix`."""
    whole = matrix.changed(torch.clone)
    for part in packed.parts(whole):
        decode(part, whole, True)
    return whole.values


def decode_matrix(format: str, packed: Tensor, matrix: PackedMatrix, out: Tensor) -> None:
    values = _values(format, packed, matrix)
    if PACKED_FORMATS[format].row_scaled:
        assert matrix.scales is not None
        values = values.float() * _floats(packed[None], matrix.scales, matrix.rows).T
    out.copy_(values)


def _values(format: str, block: Tensor, matrix: PackedMatrix) -> Tensor:
    """Values `[rows, cols]` without row scales."""
    values = _tiles(format, block, matrix).permute(0, 2, 1, 3).reshape(matrix.rows, -1)[:, : matrix.cols]
    return values.float() * _block_scales(block, matrix) if PACKED_FORMATS[format].block_scaled else values


def _floats(blocks: Tensor, offset: int, count: int) -> Tensor:
    return blocks[:, offset : offset + 4 * count].view(torch.float32)


def _split(values: Tensor, high: Tensor, low: Tensor) -> None:
    """Write values as the sum of two bf16 tensors."""
    high.copy_(values)
    torch.sub(values, high, out=low)


def _tiles(format: str, block: Tensor, matrix: PackedMatrix) -> Tensor:
    """Values `[strips, tiles of a strip, 16, columns of a tile]`, without the scales that lie outside of the tiles."""
    form = PACKED_FORMATS[format]

    def cut(offset: int, row_bytes: int) -> Tensor:
        return block.as_strided(
            (matrix.rows // TILE_ROWS, -(-matrix.cols // form.tile_cols), TILE_ROWS, row_bytes),
            (matrix.strip_bytes, form.tile_bytes, row_bytes, 1),
            block.storage_offset() + matrix.tiles + offset,
        )

    codes = cut(0, ROW_BYTES)
    if not form.values:
        return codes.view(form.code_dtype)
    groups = codes.unflatten(-1, (-1, 1, GROUP // 2))
    both = torch.cat((groups & 15, groups >> 4), dim=-2).flatten(-2)
    stored = cut(CODE_BYTES, (form.tile_bytes - CODE_BYTES) // TILE_ROWS)
    if form.multipliers:
        scales = _table(form.multipliers, block.device)[stored.int()]
    else:
        scales = stored.view(torch.bfloat16).float()
    return (_table(form.values, block.device)[both.int()] * scales[..., None]).bfloat16().flatten(-2)


@functools.cache
def _table(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device)


def _block_scales(block: Tensor, matrix: PackedMatrix) -> Tensor:
    """The scale of each value, fp32 `[rows, cols]`."""
    assert matrix.scales is not None
    across = -(-matrix.cols // SCALE_BLOCK)
    down = -(-matrix.rows // SCALE_BLOCK)
    scales = block[matrix.scales :][: across * down * 4].view(torch.float32).view(down, across)
    wide = scales.repeat_interleave(SCALE_BLOCK, 0).repeat_interleave(SCALE_BLOCK, 1)
    return wide[: matrix.rows, : matrix.cols]


def _of_rows(scale: Tensor, piece: Piece) -> Tensor:
    """For each row the scale of its expert: `[n, outputs]`."""
    rows = torch.arange(piece.rows, dtype=torch.int32, device=scale.device)
    return scale[torch.searchsorted(piece.ends, rows, right=True)]


def place(adapters: Adapters) -> None:
    a, b, scale = adapters.a, adapters.b, adapters.scale
    parts = b[..., a.shape[3] :][..., : 2 * adapters.places].unflatten(-1, (2, -1))
    parts.zero_()
    a.zero_()
    outputs = b.shape[1] // len(adapters.pairs)
    for i, (pair, begin) in enumerate(zip(adapters.pairs, adapters.begins, strict=True)):
        if pair is None:
            continue
        places, rows = slice(begin, begin + pair.a.shape[1]), slice(i * outputs, (i + 1) * outputs)
        factor = pair.scaling if scale is None else (pair.scaling / scale[:, rows])[..., None]
        _split(pair.a.float() / adapters.kept, *a[:, :, places].unbind(1))
        _split(pair.b.float() * factor, *parts[:, rows, :, places].unbind(2))


def gather(source: Tensor, piece: Piece, scale: Tensor | None, out: Tensor) -> None:
    rows = source[piece.row_route // piece.top_k]
    out[:, : source.shape[1]] = rows if scale is None else rows.float() * _of_rows(scale, piece)


def _dropped(x: Tensor, piece: Piece, dropout: Dropout | None) -> Tensor:
    if dropout is None:
        return x
    return torch.where(stays(dropout, piece.row_route, x.shape[1]), x, torch.zeros((), dtype=x.dtype, device=x.device))


def _places(rows: Tensor, inputs: int, places: int) -> Tensor:
    """The two parts of places that lie behind the inputs: `[n, 2, places]`."""
    return rows[:, inputs : inputs + 2 * places].unflatten(1, (2, -1))


def low_rank(rows: Tensor, a: Tensor, piece: Piece, begin: int, end: int, dropout: Dropout | None) -> None:
    _, _, places, inputs = a.shape
    x, out = _dropped(rows[:, :inputs], piece, dropout), _places(rows, inputs, places)
    for expert, at in piece.ranges():
        out[at, :, begin:end] = (x[at].float() @ a[expert, :, begin:end].float().sum(0).T)[:, None]


def add_low_rank(rows: Tensor, a: Tensor, piece: Piece, begin: int, end: int, dropout: Dropout | None) -> None:
    _, _, places, inputs = a.shape
    low = _places(rows, inputs, places)[..., begin:end].float().sum(1)
    added = torch.empty(rows.shape[0], inputs, device=rows.device)
    for expert, at in piece.ranges():
        torch.mm(low[at], a[expert, :, begin:end].float().sum(0), out=added[at])
    rows[:, :inputs] += _dropped(added, piece, dropout)


def lora_gradients(
    adapters: Adapters, x: Tensor, dx: Tensor, dy: Tensor, piece: Piece, weights: Tensor | None, out: Tensor, adds: bool
) -> None:
    if not adds:
        out.zero_()
    outputs, at = dy.shape[1] // len(adapters.pairs), 0
    scale = adapters.scale
    routing = 1 if weights is None else weights.view(-1)[piece.row_route][:, None]
    for i, (pair, begin, dropout) in enumerate(zip(adapters.pairs, adapters.begins, adapters.dropouts, strict=True)):
        if pair is None:
            continue
        grads = []
        for tensor in (pair.a, pair.b):
            grads.append(out[at : at + tensor.numel()].view(tensor.shape))
            at += tensor.numel()
        inputs, places = pair.a.shape[2], slice(begin, begin + pair.a.shape[1])
        cols = slice(i * outputs, (i + 1) * outputs)
        low_x, low_dy = (_places(rows, inputs, adapters.places)[..., places].float() for rows in (x, dx))
        low_x, low_dy = low_x[:, 0] * pair.scaling * routing, low_dy.sum(1) / adapters.kept * routing
        wide = _dropped(x[:, :inputs], piece, dropout)
        for expert, rows in piece.ranges():
            grads[0][expert] += low_dy[rows].T @ wide[rows].float()
            found = dy[rows, cols].float().T @ low_x[rows]
            grads[1][expert] += found if scale is None else found / scale[expert, cols, None]


def _activation(
    gate_up: Tensor, scale: Tensor | None, piece: Piece, swiglu: Swiglu
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gate and up in fp32, the sigmoid of the clamped gate, and the clamped up plus its shift."""
    scaled = gate_up.float() if scale is None else gate_up.float() * _of_rows(scale, piece)
    gate, up = scaled.chunk(2, dim=1)
    clamped = gate.clamp(max=swiglu.gate_most)
    sigmoid = torch.sigmoid(swiglu.alpha * clamped + swiglu.cubic * clamped**3)
    return gate, up, sigmoid, up.clamp(-swiglu.limit, swiglu.limit) + swiglu.shift


def _up(up: Tensor, scale: Tensor | None, piece: Piece) -> Tensor:
    """max(up, 0) in fp32, for experts without a gate."""
    return (up.float() if scale is None else up.float() * _of_rows(scale, piece)).relu_()


def swiglu(
    gate_up: Tensor,
    scale: Tensor | None,
    piece: Piece,
    swiglu: Swiglu,
    out: Tensor,
    kept: KeptGates | None = None,
) -> None:
    if kept is not None:
        kept.rows[piece.row_route] = gate_up
    if not swiglu.gated:
        out[:, : gate_up.shape[1]] = _up(gate_up, scale, piece).square_()
        return
    gate, _, sigmoid, up = _activation(gate_up, scale, piece, swiglu)
    out[:, : up.shape[1]] = gate.clamp(max=swiglu.gate_most) * sigmoid * up


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
    kept: KeptGates | None = None,
) -> None:
    if kept is not None:
        gate_up.copy_(kept.rows[piece.row_route])
    if not swiglu.gated:
        _relu2_backward(gate_up, scale, grad_h, more, piece, weights, h, grad_weights)
        return
    routes = piece.row_route
    gate, up, sigmoid, shifted = _activation(gate_up, scale, piece, swiglu)
    clamped = gate.clamp(max=swiglu.gate_most)
    active = clamped * sigmoid * shifted
    grad, flat = grad_h[:, : gate.shape[1]].float(), grad_weights.view(-1)
    flat[routes] += (grad * active).sum(1) + (0 if more is None else more[:, :2].float().sum(1))
    grad = grad * weights.view(-1)[routes][:, None]
    # (g sigmoid(z))' = s + z' g s (1 - s)
    slope = sigmoid + (swiglu.alpha + 3 * swiglu.cubic * clamped**2) * clamped * sigmoid * (1 - sigmoid)
    h[:, : gate.shape[1]] = active
    grad_gate = torch.where(gate <= swiglu.gate_most, grad * shifted * slope, 0)
    grad_up = torch.where(up.abs() <= swiglu.limit, grad * clamped * sigmoid, 0)
    both = torch.cat((grad_gate, grad_up), dim=1)
    gate_up.copy_(both if scale is None else both * _of_rows(scale, piece))


def _relu2_backward(
    up: Tensor,
    scale: Tensor | None,
    grad_h: Tensor,
    more: Tensor | None,
    piece: Piece,
    weights: Tensor,
    h: Tensor,
    grad_weights: Tensor,
) -> None:
    """`swiglu_backward` of experts without a gate."""
    routes, above = piece.row_route, _up(up, scale, piece)
    active, grad = above.square(), grad_h[:, : up.shape[1]].float()
    grad_weights.view(-1)[routes] += (grad * active).sum(1) + (0 if more is None else more[:, :2].float().sum(1))
    h[:, : up.shape[1]] = active
    grad = 2 * grad * weights.view(-1)[routes][:, None] * above
    up.copy_(grad if scale is None else grad * _of_rows(scale, piece))


def combine(y: Tensor, scale: Tensor | None, piece: Piece, weights: Tensor | None, out: Tensor) -> None:
    y = y[:, : out.shape[1]]
    if scale is not None:
        y = y.float() * _of_rows(scale, piece)
    rows = piece.route_row.view(-1, piece.top_k) - piece.begin
    here = (rows >= 0) & (rows < piece.rows)
    rows = rows.clamp(0, piece.rows - 1)
    for slot in range(piece.top_k):
        added = torch.where(here[:, slot, None], y[rows[:, slot]], 0).float()
        out += added if weights is None else added * weights[:, slot, None]


def sort_routes(
    index: Tensor, factors: Tensor, bounds: ChunkBounds, piece_rows: int, ends: Tensor,
    row_route: Tensor, route_row: Tensor, told: Tensor,
) -> None:  # fmt: skip
    flat, experts, rows = index.view(-1), len(bounds.chunk_of), index.numel()
    numbers = torch.arange(rows, device=index.device)
    exists = (flat >= 0) & (flat < experts)
    of_route = torch.where(exists, flat, experts).to(torch.int16)
    by_row = torch.sort(of_route, stable=True).indices
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=index.device).scatter_add_(
        0, of_route.long(), torch.ones_like(numbers)
    )
    last = counts[:-1].cumsum(0)
    row_of = torch.empty_like(by_row).scatter_(0, by_row, numbers)
    pieces = ends.shape[1] // experts
    begins = torch.arange(0, pieces * piece_rows, piece_rows, device=index.device)[:, None]
    before = torch.zeros_like(last[0])
    for chunk, (first, end) in enumerate(itertools.pairwise(itertools.accumulate(bounds.sizes, initial=0))):
        own = last[first:end] - before
        ends[chunk, : pieces * len(own)].copy_((own - begins).clamp(0, piece_rows).view(-1))
        row_route[chunk].copy_(by_row[(numbers + before).clamp(max=rows - 1)])
        here = (row_of >= before) & (row_of < last[end - 1])
        route_row[chunk].copy_(torch.where(here, row_of - before, rows))
        before = last[end - 1]
    low, high = flat.min(), flat.max()
    stray = torch.where(low < 0, low, torch.where(high < experts, 0, high))
    told[:experts].copy_(counts[:-1])
    told[experts:].copy_(torch.stack((stray, (flat * factors).sum(), torch.full_like(stray, -1))))


def find_bad(hidden: Tensor, told: Tensor) -> None:
    bad = (hidden - hidden).sum(1) != 0  # of NaN and Inf the difference is NaN, of all else 0
    told[-1].copy_((bad.to(torch.int32).argmax() + 1) * bad.any() - 1)

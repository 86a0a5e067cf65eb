"""Adds to a weight as a checkpoint stores it, in the same scheme: the way back from `ktft.checkpoint.schemes`.

What is stored lies on a grid (scale x a few levels). Where nothing is added, codes and scales stay as they are, bit for
bit. Elsewhere a block keeps its scale as long as the sum fits, so that its other weights are not rounded once more, and
gets a new one where the sum does not fit or the block was zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from ktft.checkpoint.encoded import E2M1, INT4_ZERO, exponents, pack_nibbles, unpack_nibbles
from ktft.checkpoint.schemes import CompressedFp8, DeepSeekFp4, DeepSeekFp8, Fp8, Mxfp4, PackedInt4, Scheme

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Grid:
    """The levels of a code: floats of `mantissa` bits whose step stops shrinking below 2^`least_exponent`.

    Small integers are such floats: with 2 bits and exponent 2 the step is 1 everywhere below 8.
    """

    mantissa: int
    least_exponent: int
    lowest: float
    highest: float

    def step(self, values: Tensor) -> Tensor:
        """The distance between two neighbouring levels at each value."""
        exponent = torch.frexp(values).exponent - 1
        return torch.ldexp(torch.ones_like(values), exponent.clamp_min(self.least_exponent) - self.mantissa)

    def fits(self, highest: Tensor, lowest: Tensor) -> Tensor:
        """Whether the highest and lowest values are at most half a step beyond the levels. It is False for NaN."""
        ends = torch.tensor([self.highest, self.lowest], dtype=torch.float32)
        half = (self.step(0.99 * ends) / 2).tolist()
        return (highest <= self.highest + half[0]) & (lowest >= self.lowest - half[1])

    def round(self, values: Tensor, dither: Generator | None) -> Tensor:
        """The nearest levels; with `dither` one of the two nearest, at random, so that the mean is the value."""
        step = self.step(values)
        steps = values / step
        if dither is None:
            steps = steps.round()
        else:
            up = torch.rand(steps.shape, generator=dither) < steps - steps.floor()
            steps = torch.where(steps == steps.floor(), steps, steps.floor() + up)  # keeps -0
        return (steps * step).clamp(self.lowest, self.highest)


E4M3_GRID = Grid(3, -6, -448, 448)
E2M1_GRID = Grid(1, 0, -6, 6)
INT4_GRID = Grid(2, 2, -8, 7)


def add(scheme: Scheme, tensors: Tensors, delta: Tensor, dither: Generator | None = None) -> dict[str, Tensor]:
    """The tensors, by role, of the weight plus `delta`.

    Args:
        scheme: how the weight is stored.
        tensors: its tensors by role, as `Scheme.decode` takes them.
        delta: fp32, in the weight's shape and orientation as `Scheme.decode` gives it.
        dither: round up or down at random, with the mean in the middle, instead of to the nearest.

    Raises:
        KeyError: the scheme is not in `ADDERS`.
        ValueError: the sum is too large for the stored dtype.
    """
    return {**tensors, **ADDERS[type(scheme)](scheme, tensors, delta, dither)}


def rounded(values: Tensor, dtype: torch.dtype, dither: Generator | None = None) -> Tensor:
    """fp32 values in a plain weight's dtype.

    Raises:
        ValueError: one is too large for it.
    """
    if dither is not None and dtype != torch.float32:
        bits, least = {torch.bfloat16: (7, -126), torch.float16: (10, -14)}[dtype]
        values = Grid(bits, least, torch.finfo(dtype).min, torch.finfo(dtype).max).round(values, dither)
    result = values.to(dtype)
    if bool(result.isinf().any()):
        raise ValueError(f"the sum {float(values.abs().max()):.3g} is too large for {dtype}")
    return result


def _add_plain(scheme: Scheme, tensors: Tensors, delta: Tensor, dither: Generator | None) -> dict[str, Tensor]:
    codes = tensors["codes"]
    return {"codes": torch.where(delta == 0, codes, rounded(codes.float() + delta, codes.dtype, dither))}


def _add_fp8(scheme: Scheme, tensors: Tensors, delta: Tensor, dither: Generator | None) -> dict[str, Tensor]:
    encoded, stored = scheme.decode(tensors), tensors["scales"]
    assert encoded.scales is not None and encoded.block is not None
    blocks = _Blocks(encoded.block, encoded.scales, stored.dtype)
    levels, scales = blocks.add(E4M3_GRID, encoded.values.float(), delta, dither)
    return {"codes": levels.to(torch.float8_e4m3fn), "scales": scales.to(stored.dtype).view(stored.shape)}


def _add_int4(scheme: Scheme, tensors: Tensors, delta: Tensor, dither: Generator | None) -> dict[str, Tensor]:
    encoded, stored = scheme.decode(tensors), tensors["scales"]
    assert encoded.scales is not None and encoded.block is not None
    blocks = _Blocks(encoded.block, encoded.scales, stored.dtype)
    levels, scales = blocks.add(INT4_GRID, unpack_nibbles(encoded.values).float() - INT4_ZERO, delta, dither)
    codes = pack_nibbles((levels + INT4_ZERO).to(torch.uint8)).contiguous().view(torch.int32)
    return {"codes": codes, "scales": scales.to(stored.dtype)}


def _add_mxfp4(scheme: Scheme, tensors: Tensors, delta: Tensor, dither: Generator | None) -> dict[str, Tensor]:
    encoded = scheme.decode(tensors)
    assert encoded.scales is not None and encoded.block is not None
    blocks = _Blocks(encoded.block, exponents(encoded.scales), torch.float8_e8m0fnu)
    stored = torch.tensor(E2M1)[unpack_nibbles(encoded.values).int()]
    levels, scales = blocks.add(E2M1_GRID, stored, delta, dither)
    codes = torch.searchsorted(torch.tensor(E2M1[:8]), levels.abs().contiguous()).to(torch.uint8)
    codes |= levels.signbit().to(torch.uint8) << 3
    exponent = (torch.frexp(scales).exponent + 126).to(torch.uint8)
    packed, as_stored = pack_nibbles(codes).view(tensors["codes"].shape), tensors["codes"].dtype
    return {"codes": packed.view(as_stored), "scales": exponent.view(tensors["scales"].dtype)}


ADDERS: dict[type[Scheme], Callable[[Scheme, Tensors, Tensor, Generator | None], dict[str, Tensor]]] = {
    Scheme: _add_plain,
    Fp8: _add_fp8,
    CompressedFp8: _add_fp8,
    DeepSeekFp8: _add_fp8,
    DeepSeekFp4: _add_mxfp4,
    PackedInt4: _add_int4,
    Mxfp4: _add_mxfp4,
}
"""A scheme that can be written -> the function that adds to a weight in it."""


@dataclass(frozen=True)
class _Blocks:
    """Scales of a matrix, fp32 `[blocks of rows, blocks of columns]`, which are stored as `dtype`."""

    size: tuple[int, int]
    scales: Tensor
    dtype: torch.dtype

    def add(self, grid: Grid, levels: Tensor, delta: Tensor, dither: Generator | None) -> tuple[Tensor, Tensor]:
        """Levels and scales of the matrix `levels x scales + delta`."""
        idle = delta == 0
        sums = torch.where(idle, levels, levels + delta / self._wide(self.scales, delta))
        kept = grid.fits(self._most(sums), -self._most(-sums)) & (self._most(levels.abs()) > 0)
        kept |= self._most(delta.abs()) == 0
        scales = self.scales
        if not kept.all():
            values = levels * self._wide(self.scales, delta) + delta
            needed = torch.maximum(self._most(values) / grid.highest, self._most(-values) / -grid.lowest)
            scales = torch.where(kept, scales, self._storable(needed))
            sums = torch.where(self._wide(kept, delta), sums, values / self._wide(scales, delta))
        return grid.round(sums, dither), scales

    def _wide(self, blocks: Tensor, like: Tensor) -> Tensor:
        rows, cols = like.shape
        return blocks.repeat_interleave(self.size[0], 0)[:rows].repeat_interleave(self.size[1], 1)[:, :cols]

    def _most(self, values: Tensor) -> Tensor:
        """The largest value of each block; NaN if the block has one."""
        (rows, cols), (height, width) = values.shape, self.size
        whole = F.pad(values, (0, -cols % width, 0, -rows % height), value=-torch.inf)
        return whole.unflatten(1, (-1, width)).unflatten(0, (-1, height)).amax((1, 3))

    def _storable(self, needed: Tensor) -> Tensor:
        """Scales at least as large that `dtype` holds: powers of two where the stored ones are all that."""
        mantissa, exponent = torch.frexp(needed)
        if bool((torch.frexp(self.scales[self.scales > 0]).mantissa == 0.5).all()) and bool((self.scales > 0).any()):
            return torch.ldexp(torch.ones_like(needed), exponent - (mantissa == 0.5).int())
        stored = needed.to(self.dtype).float()
        return torch.where(stored < needed, (needed * (1 + torch.finfo(self.dtype).eps)).to(self.dtype).float(), stored)

"""One weight matrix as a checkpoint encodes it, in the few forms that every quantization scheme comes down to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ktft.native.encodings import CODED
from ktft.native.packed import PACKED_FORMATS

E2M1 = PACKED_FORMATS["mxfp4"].values
INT4_ZERO = 8


@dataclass(frozen=True)
class Encoded:
    """A matrix `[out_features, in_features]`: floats, or codes with scales, as `ktft.native.ExpertLayer.load` takes it.

    Attributes:
        values: float; or E4M3 codes; or uint8 `[out_features, in_features / 2]`, two 4-bit codes a byte, the even
            column in the low half.
        scales: fp32 one a block (E4M3, and 4-bit codes that are q + 8), or uint8 E8M0 (4-bit codes are E2M1).
        block: rows and columns that share a scale; blocks at the edges may be short.
        zeros: for 4-bit integers, in the shape of `scales`: the code that means zero. None stands for 8 everywhere.
    """

    values: Tensor
    scales: Tensor | None = None
    block: tuple[int, int] | None = None
    zeros: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """`(out_features, in_features)`."""
        rows, cols = self.values.shape
        return rows, cols * (2 if self.values.dtype == torch.uint8 else 1)

    @property
    def native_format(self) -> str | None:
        """The expert format that can hold these codes; None for plain floats."""
        if self.scales is None:
            return None
        # transformers hands over E4M3 codes widened to a floating-point type
        codes = torch.float8_e4m3fn if self.values.dtype.is_floating_point else self.values.dtype
        return CODED[codes, self.scales.dtype]

    def load_arguments(self) -> dict[str, Any]:
        """What `ExpertLayer.load` takes beside expert and projection."""
        return {"weight": self.values, "scales": self.scales, "block": self.block, "zeros": self.zeros}

    def transpose(self) -> Encoded:
        """The matrix stored the other way round. Not for 4-bit codes, whose bytes run along `in_features`."""
        assert self.values.dtype != torch.uint8
        if self.scales is None or self.block is None:
            return Encoded(self.values.T)
        return Encoded(self.values.T, self.scales.T, self.block[::-1])

    def take_rows(self, rows: slice) -> Encoded:
        """Only these rows. Scales of whole blocks stay, those of blocks that are cut up are repeated for each row."""
        height = self.shape[0]
        if rows.indices(height) == (0, height, 1):
            return self
        if self.scales is None or self.block is None:
            return Encoded(self.values[rows])
        begin, end, step = rows.indices(height)
        size = self.block[0]
        whole = step == 1 and begin % size == 0 and (end % size == 0 or end == height)
        blocks = slice(begin // size, -(-end // size))

        def cut(tensor: Tensor) -> Tensor:
            return tensor[blocks] if whole else tensor.repeat_interleave(size, 0)[:height][rows]

        return Encoded(
            self.values[rows],
            cut(self.scales),
            self.block if whole else (1, self.block[1]),
            None if self.zeros is None else cut(self.zeros),
        )

    def dequantize(self) -> Tensor:
        """fp32 `[out_features, in_features]`: value x scale.

        Raises:
            ValueError: it holds NaN or Inf, or a negative fp8 scale.
        """
        result = self.values.float() if self.scales is None else self._products()
        if not result.isfinite().all():
            raise ValueError("it holds NaN or Inf")
        return result

    def _products(self) -> Tensor:
        assert self.scales is not None and self.block is not None
        scales = exponents(self.scales) if self.scales.dtype == torch.uint8 else self.scales
        if self.native_format == "fp8" and bool((scales < 0).any()):
            raise ValueError("its scales hold a negative number, which no fp8 scale is")
        if self.native_format == "fp8":
            values = self.values.float()
        else:
            codes = unpack_nibbles(self.values)
            values = (
                torch.tensor(E2M1, device=codes.device)[codes.int()]
                if self.native_format == "mxfp4"
                else codes.float() - (INT4_ZERO if self.zeros is None else self._expand(self.zeros.float()))
            )
        return values * self._expand(scales)

    def _expand(self, blocks: Tensor) -> Tensor:
        assert self.block is not None
        rows, cols = self.shape
        return blocks.repeat_interleave(self.block[0], 0)[:rows].repeat_interleave(self.block[1], 1)[:, :cols]


def exponents(e8m0: Tensor) -> Tensor:
    """E8M0 bytes as fp32: 2^(e - 127), NaN for 255 (OCP MX v1.0, 5.4)."""
    one = torch.ones(e8m0.shape, device=e8m0.device)
    return torch.ldexp(one, e8m0.int() - 127).masked_fill(e8m0 == 255, float("nan"))


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 `[..., n]` to `[..., 2 n]` codes, the low half first."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """The inverse of `unpack_nibbles`."""
    return codes[..., 0::2] | codes[..., 1::2] << 4

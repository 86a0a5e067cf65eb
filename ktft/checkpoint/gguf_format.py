"""The package gguf: the header of one file, and the values of quantized rows. Imported only where a GGUF file is read.

The package's own reader looks at the tensors' data and does not say which of them a damaged file lacks. Here it reads
the header alone, and every place that the header names is checked.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField
from torch import Tensor

from ktft.checkpoint.reader import TensorEntry

_LENGTH = struct.Struct("<Q")
ROWS = 64  # dequantized at once: the package keeps several arrays of their size in memory while it works


@dataclass(frozen=True)
class GgufHeader:
    """The header of one file.

    Attributes:
        fields: its single values by their keys; arrays, such as the vocabulary, are left out.
        tensors: in file order, shapes as torch has them. `dtype` is the type's name, or its number if the installed
            gguf does not know it; `nbytes` is then 0.
        nbytes: the number of bytes before the first tensor.
    """

    fields: dict[str, Any]
    tensors: list[TensorEntry]
    nbytes: int


class _HeaderReader(GGUFReader):
    """The package's reader without the tensors' data."""

    def __init__(self, path: Path) -> None:
        self.infos: list[ReaderField] = []
        super().__init__(path)

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        # numpy's slices end at the file's end and say nothing: an array of a damaged length would never be read through
        if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise ValueError(f"its header goes on beyond the file's end, byte {len(self.data)}")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        """Step over an array: the package makes several objects of each word of the vocabulary, which takes seconds."""
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count, end = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
        if kind in self.gguf_scalar_to_np:
            self._get(end, self.gguf_scalar_to_np[kind], count)  # only to see that it is there
            end += np.dtype(self.gguf_scalar_to_np[kind]).itemsize * count
        elif kind == GGUFValueType.STRING:
            content = self.data.data
            for _ in range(count):
                end += 8 + int(_LENGTH.unpack_from(content, end)[0])
        else:
            for _ in range(count):
                end += self._get_field_parts(end, kind)[0]
        return end - orig_offs, [], [], [GGUFValueType.ARRAY]

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        self.infos = fields


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file.

    Raises:
        ValueError: the file is truncated, or is not GGUF; two tensors overlap.
    """
    try:
        reader = _HeaderReader(path)
        if reader.byte_order != "I":
            raise ValueError("its numbers are in big-endian order, ktft reads little-endian")
        single = {name: field for name, field in reader.fields.items() if GGUFValueType.ARRAY not in field.types}
        fields = {name: field.contents() for name, field in single.items()}
        tensors = [_entry(path, info, int(reader.data_offset)) for info in reader.infos]
    except (ValueError, KeyError, IndexError, OverflowError, TypeError, RecursionError, struct.error) as error:
        raise ValueError(f"{path} is no whole GGUF file that ktft reads: {error}; download it again") from None
    twice = [name for name, count in Counter(entry.name for entry in tensors).items() if count > 1]
    if twice:
        raise ValueError(f"{path}: tensor {twice[0]} is there twice; download it again")
    size, end, previous = path.stat().st_size, int(reader.data_offset), "the header"
    tensors.sort(key=lambda entry: (entry.offset, entry.nbytes))
    for entry in tensors:
        if entry.offset < end:
            raise ValueError(f"{path}: tensor {entry.name} begins at byte {entry.offset} and overlaps {previous}")
        end, previous = entry.offset + entry.nbytes, entry.name
        if end > size:
            raise ValueError(
                f"{path} is truncated: tensor {entry.name} ends at byte {end}, the file at {size}; download it again"
            )
    return GgufHeader(fields, tensors, int(reader.data_offset))


def _entry(path: Path, info: ReaderField, data_start: int) -> TensorEntry:
    _, _, _, dims, number, offset = info.parts
    if not info.name.isprintable():
        raise ValueError(f"{info.name!r} is no name of a tensor")
    shape = tuple(int(n) for n in reversed(dims))
    begin = data_start + int(offset[0])
    try:
        kind = GGMLQuantizationType(int(number[0]))
    except ValueError:
        return TensorEntry(info.name, path, f"type {int(number[0])}", shape, begin, 0)
    values, nbytes = GGML_QUANT_SIZES[kind]
    if shape and shape[-1] % values:
        raise ValueError(f"tensor {info.name}, {kind.name} of shape {shape}, has rows that are not whole blocks")
    return TensorEntry(info.name, path, kind.name, shape, begin, math.prod(shape) // values * nbytes)


@cache
def readable_types() -> tuple[str, ...]:
    """The types of tensors whose values the installed gguf gives."""
    found = []
    for kind, (_, nbytes) in GGML_QUANT_SIZES.items():
        try:
            gguf.dequantize(np.zeros((1, nbytes), np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind.name)
    return tuple(found)


def bits_per_weight(name: str) -> float:
    """The bits that one weight of this type takes, scales included."""
    values, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    return 8 * nbytes / values


def dequantize(raw: Tensor, name: str, shape: tuple[int, ...]) -> Tensor:
    """The values of quantized bytes, in fp32. More than `ROWS` rows are never decoded at once."""
    rows = raw.numpy().reshape(math.prod(shape[:-1]), -1)
    result = torch.empty(shape)
    values, kind = result.numpy().reshape(len(rows), -1), GGMLQuantizationType[name]
    with np.errstate(all="ignore"):  # a NaN or infinity is refused where the weights are packed
        for begin in range(0, len(rows), ROWS):
            values[begin : begin + ROWS] = gguf.dequantize(rows[begin : begin + ROWS], kind)
    return result

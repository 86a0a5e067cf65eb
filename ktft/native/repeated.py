"""Memory of which many rows are the same pages, for kernels and copies that take a matrix for each expert."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref

import torch
from torch import Tensor

MAPPINGS = 16
"""The most mappings of one tensor. Linux allows a process 65,530 of them by default, and a large model has hundreds of
such tensors."""

_NORESERVE, _FIXED = 0x4000, 0x10  # Linux's values; the module mmap does not name MAP_FIXED, and the other not always
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
_FAILED = ctypes.c_void_p(-1).value


def distinct_rows(rows: int, row_bytes: int) -> int:
    """How many rows of `repeated` memory are pages of their own, as far as sizes tell."""
    return rows if row_bytes % mmap.PAGESIZE or not row_bytes else -(-rows // MAPPINGS)


def repeated(rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, int]:
    """A tensor `[rows, *shape]` on the CPU, and how many of its first rows must be written for all to have a value.

    The other rows are the same memory as these, in the same order. Rows that are not whole pages, and a system that
    refuses, give a tensor of which every row is its own.
    """
    row_bytes = math.prod(shape) * dtype.itemsize
    distinct = distinct_rows(rows, row_bytes)
    address = _mapped(rows * row_bytes, distinct * row_bytes) if distinct < rows else None
    if address is None:
        return torch.empty((rows, *shape), dtype=dtype, device="cpu"), rows
    memory = (ctypes.c_char * (rows * row_bytes)).from_address(address)
    weakref.finalize(memory, _libc().munmap, address, rows * row_bytes).atexit = False
    return torch.frombuffer(memory, dtype=dtype).view(rows, *shape), distinct


def _mapped(size: int, piece: int) -> int | None:
    """The address of `size` bytes that repeat a piece of memory; None if the system refuses."""
    libc = _libc()
    try:
        file = os.memfd_create("ktft-shared-lora")
    except OSError:
        return None
    try:
        os.ftruncate(file, piece)
        base: int = libc.mmap(None, size, 0, _RESERVED, -1, 0)
        if base == _FAILED:
            return None
        for at in range(0, size, piece):
            own, access = min(piece, size - at), mmap.PROT_READ | mmap.PROT_WRITE
            if libc.mmap(base + at, own, access, mmap.MAP_SHARED | _FIXED, file, 0) != base + at:
                libc.munmap(base, size)
                return None
        return base
    except OSError:
        return None
    finally:
        os.close(file)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc

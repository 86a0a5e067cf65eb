"""Measures the ceilings of the machine: the highest rates that a runtime's threads can reach."""

from __future__ import annotations

from ktft.native.extension import core
from ktft.native.machine import Runtime


def compute_ceilings(runtime: Runtime, seconds: float = 0.01) -> tuple[float, float]:
    """Measures the FLOP/s of all the runtime's threads together, for twice `seconds`.

    Returns:
        P, for products of registers only, and H, for the forward kernel's inner loop on operands in L1 and L2 without
        decoding.
    """
    measure, handle = core.measure_flops, runtime.handle
    return float(measure(handle, core.Ceiling.registers, seconds)), float(measure(handle, core.Ceiling.hot, seconds))


class StreamedMemory:
    """Memory for measuring the ceilings of operands outside of the caches. `bytes` must far exceed the caches' size."""

    def __init__(self, runtime: Runtime, bytes: int) -> None:
        self._native = core.StreamedMemory(runtime.handle, bytes)

    def read(self) -> float:
        """Bytes per second of all threads together when they read the whole memory once."""
        return float(self._native.read())

    def update(self) -> float:
        """Bytes per second of all threads together in AdamW's mix: of four lines read, three are written in place."""
        return float(self._native.update())

    def gemm(self, tokens: int, reduction: int) -> float:
        """FLOP/s of the bf16 forward GEMM alone on all threads (S).

        The whole memory is read once as weights of `reduction` columns (a multiple of 32) and multiplied with the same
        1 to 704 tokens. The results are not used.
        """
        return float(self._native.gemm(tokens, reduction))

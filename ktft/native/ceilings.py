"""What the machine can do at most, on a runtime's threads."""

from __future__ import annotations

from ktft.native.extension import core
from ktft.native.machine import Runtime


def compute_ceilings(runtime: Runtime, seconds: float = 0.01) -> tuple[float, float]:
    """FLOP/s of all the runtime's threads now: products of registers only (P), and the forward kernel's inner loop on
    operands in L1 and L2 with nothing decoded (H). Takes twice `seconds`.
    """
    measure, handle = core.measure_flops, runtime.handle
    return float(measure(handle, core.Ceiling.registers, seconds)), float(measure(handle, core.Ceiling.hot, seconds))


class StreamedMemory:
    """Memory for the ceilings of operands that no cache holds. Take far more `bytes` than the caches hold."""

    def __init__(self, runtime: Runtime, bytes: int) -> None:
        self._native = core.StreamedMemory(runtime.handle, bytes)

    def read(self) -> float:
        """Bytes per second of all threads together, reading everything once."""
        return float(self._native.read())

    def update(self) -> float:
        """Bytes per second of all threads together in AdamW's mix, in place: of four lines read, three are written."""
        return float(self._native.update())

    def gemm(self, tokens: int, reduction: int) -> float:
        """FLOP/s of all threads' bf16 forward GEMM alone (S): everything once as weights of `reduction` columns (a
        multiple of 32), under the same 1 to 704 tokens, results not used.
        """
        return float(self._native.gemm(tokens, reduction))

"""Products with packed linear weights on the CPU, compared with fp32 ones of the weights that were packed."""

from __future__ import annotations

import pytest
import torch
from contract import CASES, OUTPUT_TOLERANCE, emulation_in_full, relative
from torch import Tensor

from ktft import native
from ktft.dense.formats import layout
from ktft.lanes.ops import torch_ops
from ktft.native.dense import HostDense, pack_dense
from ktft.native.machine import Runtime

SHAPES = [(32, 32), (96, 160), (544, 352)]  # rows and columns that are no whole tiles, blocks or cache lines
TOKENS = (1, 2, 4, 5, 7, 8, 9, 12, 13, 16, 17, 32, 33, 705)  # each way of multiplying, and more than one call takes


def dense_product(
    runtime: Runtime,
    format: str,
    packed: Tensor,
    shape: tuple[int, int],
    x: Tensor,
    bias: Tensor | None = None,
    activation_bits: int = 16,
) -> Tensor:
    return HostDense(runtime, format, packed, shape, bias, activation_bits).product(x)


def decoded(format: str, packed: Tensor, shape: tuple[int, int]) -> Tensor:
    """The packed weight in fp32, by the decoder of the GPU's lanes."""
    out = torch.empty(shape)
    torch_ops.decode_matrix(format, packed, layout(format, *shape)[0], out)
    return out


@pytest.mark.parametrize(("isa", "fmt"), emulation_in_full(CASES))
def test_product(isa: str, fmt: str) -> None:
    generator = torch.Generator().manual_seed(3)
    for threads in (1, 3):
        runtime = native.runtime(isa=isa, threads=threads)
        for shape in SHAPES:
            weight = torch.randn(shape, generator=generator).bfloat16()
            bias = torch.randn(shape[0], generator=generator)
            packed = pack_dense(runtime, fmt, weight)
            exact = weight.float() if fmt == "bf16" else decoded(fmt, packed, shape)
            for tokens in TOKENS[: 4 if isa in ("scalar", "amx_emu") and shape != SHAPES[1] else None]:
                x = torch.randn(tokens, shape[1], generator=generator).bfloat16()
                found = dense_product(runtime, fmt, packed, shape, x, bias)
                assert found.dtype == torch.bfloat16 and found.shape == (tokens, shape[0])
                assert relative(found, x.float() @ exact.T + bias) < OUTPUT_TOLERANCE


def test_same_bits_whatever_the_threads() -> None:
    x = torch.randn(7, 352).bfloat16()
    weight = torch.randn(544, 352)
    runtimes = [native.runtime(threads=threads) for threads in (1, 2, 3)]
    packed = pack_dense(runtimes[0], "int8", weight)
    outs = [dense_product(runtime, "int8", packed, (544, 352), x) for runtime in runtimes]
    assert all(torch.equal(outs[0], other) for other in outs[1:])
    several = dense_product(runtimes[0], "int8", packed, (544, 352), x.view(1, 7, 352))
    assert several.shape == (1, 7, 544) and torch.equal(several[0], outs[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 64, dtype=torch.bfloat16)}, r"x is torch.bfloat16 \[2, 64\]"),
        ({"x": torch.zeros(2, 96)}, "x is torch.float32"),
        ({"packed": torch.zeros(10, dtype=torch.uint8)}, r"the packed weight is torch.uint8 \[10\]"),
        ({"bias": torch.zeros(5)}, r"bias is torch.float32 \[5\]"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Tensor], message: str) -> None:
    runtime = native.runtime(threads=1)
    given = {"x": torch.zeros(2, 96, dtype=torch.bfloat16), "packed": pack_dense(runtime, "k4", torch.ones(64, 96))}
    given |= change
    with pytest.raises(ValueError, match=message):
        dense_product(runtime, "k4", given["packed"], (64, 96), given["x"], given.get("bias"))


def test_rows_that_are_no_whole_strips_are_refused() -> None:
    runtime = native.runtime(threads=1)
    packed = pack_dense(runtime, "int8", torch.ones(48, 32))
    with pytest.raises(ValueError, match="no multiple of 32"):
        dense_product(runtime, "int8", packed, (48, 32), torch.zeros(1, 32, dtype=torch.bfloat16))

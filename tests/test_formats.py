"""What packing does to weights: error, exactness, size. The kernels' arithmetic on them is in test_kernels.py."""

from __future__ import annotations

import pytest
import torch
from packing import error_percent, gaussian, pack, round_trip, student_t5
from torch import Tensor

from ktft import native

# Relative RMS error in %, on Gaussian weights and on Student's t with 5 degrees of freedom: measured, and a few percent
# of slack. `python tests/scripts/quantization_error.py` prints the table of docs/reference/formats.md.
BOUNDS = {
    "bf16": (0.17, 0.17),
    "int8": (0.85, 1.65),
    "fp8": (2.7, 2.7),
    "k4": (7.75, 9.2),
    "int4": (8.4, 10.7),
    "mxfp4": (11.7, 12.9),
}
K4_CODEBOOK = (6, 18, 31, 45, 60, 77, 98, 127)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def choose(values: Tensor, shape: tuple[int, ...], seed: int) -> Tensor:
    return values[torch.randint(len(values), shape, generator=torch.Generator().manual_seed(seed))]


def powers(shape: tuple[int, ...], seed: int) -> Tensor:
    return 2.0 ** torch.randint(-9, 4, shape, generator=torch.Generator().manual_seed(seed))


def signed(magnitudes: tuple[float, ...]) -> Tensor:
    return torch.tensor([*magnitudes, *(-m for m in magnitudes)], dtype=torch.float32)


def in_groups(values: Tensor, scales: Tensor, largest: float) -> Tensor:
    """[rows, cols] from values [rows, groups, 32], the first of each group made `largest`, and a scale a group."""
    values[..., 0] = largest
    return (values * scales[..., None]).flatten(1)


def representable(fmt: str, rows: int, cols: int) -> Tensor:
    """Weights that the format holds exactly, with the extremes its scales are found by."""
    grouped = (rows, cols // 32, 32)
    if fmt == "bf16":
        return gaussian(rows, cols).bfloat16().float()
    if fmt == "int8":
        codes = choose(torch.arange(-127.0, 128.0), (rows, cols), 1)
        codes[:, 3] = -127
        return codes * 1.375 * powers((rows, 1), 2)
    if fmt == "fp8":
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        codes = choose(every[every.isfinite()], (rows, cols), 1)
        codes[::128, ::128] = 448
        scales = 1.375 * powers(((rows + 127) // 128, (cols + 127) // 128), 2)
        return codes * scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
    if fmt == "k4":
        subs = choose(torch.arange(1.0, 65.0), grouped[:2], 2)
        subs[:, -1] = 64
        values = in_groups(choose(signed(K4_CODEBOOK), grouped, 1), subs, -127).bfloat16().float()
        return values * 1.375 * powers((rows, 1), 3)
    if fmt == "int4":
        scales = choose(torch.arange(16.0, 32.0), grouped[:2], 2) * powers(grouped[:2], 3)  # of 5 bits: no rounding
        codes = choose(torch.arange(-8.0, 8.0), grouped, 1)
        return torch.cat([in_groups(codes.clone(), scales, -8), in_groups(codes.clamp(-7, 7), scales, 7)])[::2]
    assert fmt == "mxfp4", f"say what {fmt} holds exactly"
    return in_groups(choose(signed(E2M1), grouped, 1), powers(grouped[:2], 2), 4)


@pytest.mark.parametrize("fmt", native.FORMATS)
def test_error(fmt: str) -> None:
    for weights, bound in zip((gaussian(512, 1024), student_t5(512, 1024)), BOUNDS[fmt], strict=True):
        error = error_percent(round_trip(fmt, weights), weights)
        assert 0.9 * bound < error < bound, f"{error:.3f}%"


@pytest.mark.parametrize("fmt", native.FORMATS)
@pytest.mark.parametrize("shape", [(160, 288), (32, 32), (128, 416)])
def test_representable_values_are_kept(fmt: str, shape: tuple[int, int]) -> None:
    weights = representable(fmt, *shape)
    assert torch.equal(round_trip(fmt, weights), weights)


@pytest.mark.parametrize("fmt", native.FORMATS)
@pytest.mark.parametrize("size", [1e-42, 1e-38, 1e-20, 1e30])
def test_zeros_stay_zero_and_extreme_sizes_finite(fmt: str, size: float) -> None:
    weights = gaussian(64, 160) * size
    weights[3] = 0
    weights[:, 32:64] = 0
    actual = round_trip(fmt, weights)
    assert actual.isfinite().all()
    assert not actual[3].any() and (size < 1e-30 or not actual[:, 32:64].any())
    assert size < 1e-30 or error_percent(actual, weights) < 13


@pytest.mark.parametrize("fmt", native.FORMATS)
@pytest.mark.parametrize("outlier", [20.0, 1e3, 1e6])
def test_an_outlier_leaves_its_neighbours_no_worse_than_zero(fmt: str, outlier: float) -> None:
    weights = gaussian(32, 256)
    weights[:, 5] = outlier
    actual = round_trip(fmt, weights)
    assert error_percent(actual[:, 32:], weights[:, 32:]) <= 100
    assert error_percent(actual[:, 5], weights[:, 5]) <= 25


@pytest.mark.parametrize("fmt", native.FORMATS)
def test_bytes(fmt: str) -> None:
    bits = {"bf16": 16, "int8": 8, "fp8": 8, "k4": 4.25, "int4": 4.5, "mxfp4": 4.25}[fmt]
    row_scales = 32 / 1024 if fmt in ("int8", "k4") else 0
    block_scales = 32 / 128**2 if fmt == "fp8" else 0
    strip_pad = 256 * 8 / (16 * 1024)  # 256 bytes for 16 rows
    layer = pack(fmt, torch.zeros(1024, 1024))
    assert layer.packed_bytes * 8 / (3 * 1024 * 1024) == pytest.approx(
        bits + row_scales + block_scales + strip_pad, rel=1e-3
    )


def test_mxfp4_rounds_to_even_and_saturates() -> None:
    """OCP MX v1.0: the scale is 2^(floor(log2 of the largest) - 2); ties go to even codes; above 6 is 6."""
    given = [7.9, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.76, -2.4, 5.1]
    kept = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, -1.0, -2.0, 6.0]
    weights = torch.zeros(32, 32)
    weights[0, : len(given)] = torch.tensor(given) * 2**-5
    assert round_trip("mxfp4", weights)[0, : len(given)].tolist() == [v * 2**-5 for v in kept]


def test_fp8_rounds_as_torch_does() -> None:
    weights = gaussian(128, 128)
    weights[0, 0] = 448 * 2**-6  # the block's scale is 2^-6 then
    expected = (weights * 2**6).to(torch.float8_e4m3fn).float() * 2**-6
    assert torch.equal(round_trip("fp8", weights), expected)

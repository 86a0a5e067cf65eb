"""Adding deltas to stored weights: zero changes nothing, any other delta is added within the format's error."""

from __future__ import annotations

import pytest
import torch
from contract import relative
from quantize import ALL_SCHEMES, EXPERTS
from torch import Generator, Tensor

from ktft.checkpoint.addition import ADDERS, add
from ktft.checkpoint.schemes import PLAIN_SCHEME, DeepSeekFp4, Scheme, scheme_of
from ktft.formats import FORMAT_TRAITS

WRITTEN = {name: scheme_of({"quantization_config": config}, "config.json") for name, (_, config) in ALL_SCHEMES.items()}
ENCODERS = {name: encode for name, (encode, _) in ALL_SCHEMES.items()} | {"fp4": EXPERTS["fp4-fp8"]}
WRITTEN["fp4"] = next(each for each in WRITTEN["fp4-fp8"].beside if type(each) is DeepSeekFp4)
WRITTEN = {name: scheme for name, scheme in WRITTEN.items() if type(scheme) in ADDERS}
SHAPE = (200, 256)  # blocks of 128 are ragged


def weight(seed: int = 0, size: float = 1.0) -> Tensor:
    return torch.randn(SHAPE, generator=Generator().manual_seed(seed)) * size


def stored(name: str, matrix: Tensor) -> dict[str, Tensor]:
    tensors, _ = ENCODERS[name](matrix)
    if name == "mxfp4":
        return {"codes": tensors["blocks"], "scales": tensors["scales"]}
    parts = {role: part.suffix for role, part in WRITTEN[name].parts.items()}
    return {role: tensors.get("weight" + suffix, tensors.get(suffix[1:])) for role, suffix in parts.items()}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        (one[role].dtype, one[role].shape) == (other[role].dtype, other[role].shape)
        and one[role].reshape(-1).view(torch.uint8).equal(other[role].reshape(-1).view(torch.uint8))
        for role in one
    )


def value(scheme: Scheme, tensors: dict[str, Tensor]) -> Tensor:
    return scheme.decode(tensors).dequantize()


def limit(name: str) -> float:
    rounds_as = WRITTEN[name].rounds_as
    assert rounds_as is not None, f"{name} is written: say in its scheme which expert format it rounds as"
    return FORMAT_TRAITS[rounds_as].error_limit


def test_every_scheme_is_tested() -> None:
    assert {type(scheme) for scheme in WRITTEN.values()} | {Scheme} == set(ADDERS)


@pytest.mark.parametrize("name", WRITTEN)
def test_adding_zero_changes_no_bit(name: str) -> None:
    """Nor in other blocks than the one added to; with zeros, negative zeros and blocks of zeros, dithered or not."""
    scheme, matrix = WRITTEN[name], weight()
    matrix[3], matrix[:, 64:96] = 0, -1e-9
    tensors = stored(name, matrix)
    delta = torch.zeros(SHAPE)
    for dither in (None, Generator().manual_seed(1)):
        assert same_bits(add(scheme, tensors, delta, dither), tensors)
    delta[190, 250] = 100.0
    before, after = value(scheme, tensors), value(scheme, add(scheme, tensors, delta))
    assert after[190, 250] > 90
    if name != "fp8-tensor":
        assert torch.equal(after[:100, :100], before[:100, :100])


@pytest.mark.parametrize("name", WRITTEN)
def test_the_sum_is_within_the_formats_error(name: str) -> None:
    """For small and large deltas, and for a weight added to zeros, whose scales carry no information."""
    scheme, tensors = WRITTEN[name], stored(name, weight())
    base = value(scheme, tensors)
    most = 1.2 * limit(name) if "channel" not in name else 0.2  # quantize.py's scales are a third too large
    for size in (0.01, 1.0, 100.0):
        delta = weight(1, size)
        assert relative(value(scheme, add(scheme, tensors, delta)), base + delta) < most, size
    zeros = stored(name, torch.zeros(SHAPE))
    assert relative(value(scheme, add(scheme, zeros, weight(2))), weight(2)) < most


@pytest.mark.parametrize("name", WRITTEN)
def test_dithering_is_unbiased(name: str) -> None:
    scheme, tensors = WRITTEN[name], stored(name, weight())
    delta = weight(1, 0.02)
    base = value(scheme, tensors)
    nearest = value(scheme, add(scheme, tensors, delta)) - base
    seeds = (*range(8), 0)
    dithered = [value(scheme, add(scheme, tensors, delta, Generator().manual_seed(n))) - base for n in seeds]

    def projection(moved: Tensor) -> float:
        return float((moved * delta).sum() / delta.square().sum())

    assert projection(nearest) < 0.75
    assert projection(torch.stack(dithered[:8]).mean(0)) == pytest.approx(1, abs=0.1)
    assert torch.equal(dithered[8], dithered[0])


def test_powers_of_two_stay_powers_of_two() -> None:
    """DeepSeek-V3.1 and MXFP8 scales: a block that outgrows its scale gets the next power."""
    scheme, tensors = WRITTEN["fp8"], stored("fp8", weight())
    tensors["scales"] = torch.full_like(tensors["scales"], 2.0**-6)
    delta = torch.zeros(SHAPE)
    delta[0, 0] = 1000.0
    scales = add(scheme, tensors, delta)["scales"]
    assert scales[0, 0] == 4.0 and bool((scales.flatten()[1:] == 2.0**-6).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain(dtype: torch.dtype) -> None:
    tensors, delta = {"codes": weight().to(dtype)}, weight(1, 0.01)
    exact = tensors["codes"].float() + delta
    assert same_bits(add(PLAIN_SCHEME, tensors, delta), {"codes": exact.to(dtype)})
    dithered = add(PLAIN_SCHEME, tensors, delta, Generator().manual_seed(0))["codes"].float()
    step = torch.finfo(dtype).eps * exact.abs()
    assert bool(((dithered - exact).abs() <= step).all())
    assert (dithered == exact.to(dtype).float()).float().mean() < 0.9 or dtype == torch.float32
    if dtype == torch.float16:
        with pytest.raises(ValueError, match=r"the sum 9.*e\+04 is too large for torch.float16"):
            add(PLAIN_SCHEME, {"codes": torch.full((2, 2), 6e4, dtype=dtype)}, torch.full((2, 2), 3e4))

"""CPU experts in stream order, on the CPU and through a driver that needs no GPU: what their tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from contract import TOP_K, make_layer, random_inputs
from fake_cuda import Fake

from ktft import native
from ktft.lora import ExpertLora
from ktft.native import ExpertLayer, HostExperts
from ktft.native.cuda import Driver

HIDDEN, INTERMEDIATE, TOKENS = 64, 96, 32
WAYS = ("words", "host_functions")
Make = Callable[..., HostExperts]
SIZES = {"max_tokens": TOKENS, "hidden_size": HIDDEN, "top_k": TOP_K, "dtype": torch.bfloat16}


def layer_of(fmt: str = "k4", threads: int = 2) -> ExpertLayer:
    return make_layer(HIDDEN, INTERMEDIATE, fmt, native.default_isa(), threads, name=f"layers.7.{fmt}")


@pytest.fixture
def driver(fake: Fake) -> Iterator[Driver]:
    """The fake one, as new."""
    fake.reset()
    yield Driver(fake.path)
    fake.reset()


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """`make(layer, way, **options)` -> host experts, which are closed after the test; no way means no driver."""
    made: list[HostExperts] = []

    def make(layer: ExpertLayer, way: str | None = None, **options) -> HostExperts:
        if way is not None:
            options |= {"driver": request.getfixturevalue("driver"), "through": way}
        made.append(HostExperts(layer.runtime, "cpu", **SIZES | options))
        return made[-1]

    yield make
    for host in made:
        host.close()


@pytest.fixture(params=[None, *WAYS])
def host(request: pytest.FixtureRequest, make: Make) -> HostExperts:
    """Without a driver, and with one in both ways."""
    return make(layer_of(), request.param)


def inputs(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return random_inputs(tokens, HIDDEN, seed=seed)


def direct(layer: ExpertLayer, x, index, weights, lora=None) -> torch.Tensor:
    return layer.forward(x, index, weights, lora, "none")[0]


def served(layer: ExpertLayer, x, index, weights, lora=None) -> torch.Tensor:
    """The layer's own result in the order that a server's calls take, whose adapters were packed before."""
    if lora is None:
        return direct(layer, x, index, weights)
    return layer.forward_adapters(x, index, weights, [layer.keep_lora(lora)], same(len(x)))


def through(host: HostExperts, layer: ExpertLayer, x, index, weights, of_token=None, slot: int = 0) -> torch.Tensor:
    host.submit(layer, x, index, weights, of_token, slot=slot, stream=5)
    return host.wait(layer, len(x), slot=slot, stream=5)


def give(host: HostExperts, layer: ExpertLayer, lora: ExpertLora | None, place: int = 0) -> None:
    host.set_adapter(layer, place, None if lora is None else layer.keep_lora(lora))


def same(tokens: int, place: int = 0) -> torch.Tensor:
    return torch.full((tokens,), place, dtype=torch.int32)


def begin_in_place(host: HostExperts, layer: ExpertLayer, x, index, weights, of_token=None) -> torch.Tensor:
    """Write the inputs as a stream's kernel does, and submit them. Returns where the output will be."""
    place = host.place(layer, x, index, weights, of_token, stream=5)
    place.hidden[: len(x)], place.weights[: len(x)] = x, weights
    place.index.view(index.dtype)[: index.numel()] = index.flatten()
    if of_token is not None:
        place.of_token[: len(x)] = of_token
    host.submit_in_place(layer, len(x), index.dtype, adapters=of_token is not None, stream=5)
    return place.out[: len(x)]

"""Several adapters in one batch of a model that vLLM serves: each request is computed by its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")

from adapters import random_adapter
from damage import flip
from in_process import Served, served

from ktft.config import SHARED_OUTER
from ktft.native import ExpertLayer
from ktft.serve.runtime.hybrid_experts import HybridModel
from ktft.serve.runtime.served_model import current
from ktft.serve.vllm.lora_linear import slots_of

COUNT, FILE = 8, "adapter_model.safetensors"
NOISE = 0.03
"""Nats between batches of different sizes, whose sums in bf16 differ. Adapters move log-probabilities by far more."""
ROUNDED = 0.1
"""The same where adapters of resident experts, as strong as these, are rounded to bf16."""


def prompt(number: int) -> list[int]:
    return [3 + (7 * number + 5 * i) % 250 for i in range(12 + number)]


@pytest.fixture(scope="module")
def adapters(served_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of different ranks; some are on experts or attention alone, one shares the outer matrices of its experts."""
    folder = tmp_path_factory.mktemp("adapters")
    options = [{"r": 16}, {"target_modules": ["experts"]}, {"target_modules": ["q_proj", "o_proj"], "r": 3}]
    options += [{"r": 1}, {"form": SHARED_OUTER}, {"r": 5, "lora_alpha": 20}, {"target_modules": ["v_proj"]}, {"r": 8}]
    return [random_adapter(served_checkpoint, folder / f"a{i}", seed=i, **each) for i, each in enumerate(options)]


@pytest.fixture(scope="module")
def alone(served_checkpoint: Path, adapters: list[Path]) -> list[tuple[list[int], Tensor]]:
    """What a server with one adapter at a time answers to the prompt of each: the base's first."""
    found = []
    with served(served_checkpoint, expert_format="bf16") as running:
        for number, adapter in enumerate([None, *adapters]):
            running.use(adapter)
            found += running.together([(prompt(number), running.number)])
    return found


@pytest.fixture(scope="module", params=["on a CPU", "as beside a GPU"])
def many(
    request: pytest.FixtureRequest, served_checkpoint: Path, adapters: list[Path], alone: object
) -> Iterator[Served]:
    """A server with all of them, by the numbers 1 to `COUNT`. One process serves one model at a time.

    Beside a GPU, for which the CPU stands in, some experts are resident, and each adapter has a place on the device.
    """
    named = tuple((f"a{i}", str(path)) for i, path in enumerate(adapters, start=1))
    settings: dict[str, Any] = {"expert_format": "bf16", "adapters": named, "max_lora_rank": 16}
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "as beside a GPU":
            settings |= {"gpu_expert_memory": 16 << 20}
            patch.setattr("ktft.serve.vllm.loader.ACCELERATORS", ("cpu",))
            patch.setattr("ktft.serve.vllm.loader._check_worker", lambda: None)
        # vLLM's own blocks have 128 tokens on a CPU, more than any prompt here: nothing would ever come from the cache
        with served(served_checkpoint, options={"block_size": 32}, **settings) as running:
            assert isinstance(current(), HybridModel) == (request.param == "as beside a GPU")
            yield running


def distance(found: tuple[list[int], Tensor], expected: tuple[list[int], Tensor]) -> float:
    """The largest difference of the log-probabilities as far as both continue with the same tokens."""
    same = len(found[1]) - len(found[0])
    for mine, other in zip(found[0], expected[0], strict=True):
        same += 1
        if mine != other:  # a near tie: the first token that differs is still compared
            break
    return float((found[1] - expected[1])[:same].abs().max())


def test_nine_prompts_of_nine_adapters_in_one_batch(many: Served, alone: list[tuple[list[int], Tensor]]) -> None:
    """Each is what its adapter alone gives, in prefill and in decode, and no other adapter would pass for it."""
    found = many.together([(prompt(number), number) for number in range(COUNT + 1)])
    for number, (mine, expected) in enumerate(zip(found, alone, strict=True)):
        assert distance(mine, expected) < NOISE, number
    base = many.together([(prompt(number), 0) for number in range(1, COUNT + 1)])
    for mine, plain in zip(found[1:], base, strict=True):
        size = len(mine[1]) - len(mine[0])
        assert (mine[1] - plain[1])[:size].abs().max() > 10 * NOISE
    assert [each["name"] for each in many.status()["adapters"]] == [f"a{i}" for i in range(COUNT)]


def test_many_tokens_of_some_adapters(many: Served) -> None:
    """Long prompts take another way through linear layers than a few tokens do, and so does a batch of one adapter."""
    long = [[*prompt(number), *prompt(number + 3), *prompt(number + 5)] for number in range(4)]
    apart = [many.together([(ids, number)])[0] for number, ids in enumerate(long)]
    many.llm.reset_prefix_cache()
    together = many.together([(ids, number) for number, ids in enumerate(long)])
    for mine, expected in zip(together, apart, strict=True):
        assert distance(mine, expected) < NOISE


def test_a_prompt_in_the_cache_of_one_adapter_serves_no_other(many: Served) -> None:
    ids = [3 + 11 * i % 250 for i in range(100)]
    many.together([(ids, 1)])
    for number in (0, 2, 1):
        cached = many.together([(ids, number)])[0]
        many.llm.reset_prefix_cache()
        assert distance(cached, many.together([(ids, number)])[0]) < NOISE


def test_a_name_that_stands_for_another_adapter_finds_none_of_its_cache(many: Served) -> None:
    """Even from the same directory, whose files may have changed. vLLM 0.24 knows an adapter's cache by the name."""
    from vllm.lora.request import LoRARequest

    ids, found = [3 + 13 * i % 250 for i in range(100)], []
    many.llm.reset_prefix_cache()
    for number in (1, 4):
        many.number = number
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Served, "_carried", staticmethod(lambda n: LoRARequest("same", n, "/same")))
            found.append(many.greedy(ids))
    many.llm.reset_prefix_cache()
    assert many.greedy(ids) == found[1] != found[0]
    many.number = 0


def test_adapters_come_and_go(many: Served, adapters: list[Path], alone: list[tuple[list[int], Tensor]]) -> None:
    """The others stay what they are, to the bit. A number whose adapter is gone computes the base."""
    many.llm.reset_prefix_cache()
    asked = [(prompt(number), number) for number in (0, 1, 2, 3)]
    before = many.together(asked)
    many.remove_adapter(7)
    told = many.add_adapter(20, adapters[4])
    many.llm.reset_prefix_cache()
    for mine, expected in zip(many.together(asked), before, strict=True):
        assert torch.equal(mine[1], expected[1])
    assert told["name"] == "a4" and all(each["nonzero"] for each in told["applied"].values())
    (mine,) = many.together([(prompt(5), 20)])
    assert distance(mine, alone[5]) < ROUNDED
    many.remove_adapter(20)
    many.llm.reset_prefix_cache()
    gone, base = many.together([(prompt(5), 20), (prompt(5), 0)])
    assert distance(gone, base) < NOISE
    many.add_adapter(7, adapters[6])
    assert len(many.status()["adapters"]) == COUNT


def test_a_load_that_fails_leaves_the_others(
    many: Served, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many.llm.reset_prefix_cache()
    asked = [(prompt(number), number) for number in (0, 1, 4)]
    before, told = many.together(asked), many.status()["adapters"]
    shutil.copytree(adapters[0], tmp_path / "flipped")
    flip(tmp_path / "flipped" / FILE, -3)

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(Exception, match="is damaged, its CRC-32 is"):
        many.add_adapter(30, tmp_path / "flipped")
    slot = type(next(iter(slots_of(many.model).values())))
    for owner, name in ((ExpertLayer, "keep_lora"), (slot, "joined")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, out_of_memory)
            with pytest.raises(Exception, match="out of memory"):
                many.add_adapter(30, adapters[0])
    with monkeypatch.context() as patch:
        patch.setattr(slot, "parted", out_of_memory)
        with pytest.raises(Exception, match="out of memory"):
            many.remove_adapter(1)
    many.llm.reset_prefix_cache()
    assert many.status()["adapters"] == told
    for mine, expected in zip(many.together(asked), before, strict=True):
        assert torch.equal(mine[1], expected[1])

"""Routed experts of hidden states on a GPU, as a server runs them; the CPU's torch stands in for the GPU."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from contract import EXPERTS, OUTPUT_TOLERANCE, dequantized, make_layer, make_lora, random_inputs, relative
from lanes import no_calibration

from ktft import native, reference
from ktft.checkpoint.routing_profile import Routing
from ktft.deferral import lowest
from ktft.lora import ExpertLora
from ktft.native.hybrid import HostExpertsError
from ktft.serve.runtime import hybrid_experts as hybrid
from ktft.serve.runtime.hybrid_experts import HybridModel
from ktft.serve.runtime.settings import ServeSettings

HIDDEN, INTERMEDIATE, TOP_K, LAYERS = 64, 160, 3, 3
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

__all__ = ["no_calibration"]

pytestmark = pytest.mark.usefixtures("no_calibration")


@pytest.fixture
def layers() -> dict[int, native.ExpertLayer]:
    """Numbers as of a model whose first layer is dense."""
    return {n + 1: make_layer(HIDDEN, INTERMEDIATE, "k4", native.default_isa(), nodes=2) for n in range(LAYERS)}


Make = Callable[..., HybridModel]


@pytest.fixture
def make(layers: dict[int, native.ExpertLayer]) -> Iterator[Make]:
    """`make(**options)` -> a model, which is closed after the test."""
    made: list[HybridModel] = []

    def make(**options) -> HybridModel:
        options = {"top_k": TOP_K, "dtype": torch.bfloat16, "max_tokens": 4, **options}
        made.append(HybridModel(layers, "cpu", **options))
        return made[-1]

    yield make
    for model in made:
        model.close()


def room(experts: int, rank: int = 0) -> int:
    """GPU memory for so many."""
    packed = make_layer(HIDDEN, INTERMEDIATE, "k4", native.default_isa(), nodes=2).packed_bytes // EXPERTS
    return experts * (packed + 256 + (1 << 18 if rank else 0))


def batch(tokens: int, seed: int = 3) -> Batch:
    x, index, weights = random_inputs(tokens, HIDDEN, TOP_K, seed)
    return x, index.int(), weights


def expected(layer: native.ExpertLayer, given: Batch, lora: ExpertLora | None = None) -> torch.Tensor:
    x, index, weights = given
    return reference.moe(x.float(), index, weights, *dequantized(layer), lora)


HOT = Routing({1: [9, 0, 9, 0, 0], 2: [0, 9, 9, 9, 0], 3: [0, 0, 0, 0, 9]})


def mark(model: HybridModel, numbers: list[int]) -> None:
    """Begin a step whose tokens have these adapters."""
    model.step.set(numbers, model.adapters)


@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("tokens", [1, 4, 9])
def test_few_and_many_tokens_with_and_without_residents(make: Make, tokens: int, rank: int) -> None:
    lora = make_lora(HIDDEN, INTERMEDIATE, rank, torch.float32) if rank else None
    given = batch(tokens)
    residents = {"gpu_expert_memory": room(6, rank), "routing": HOT, "placement": "stream"}
    for options in ({}, residents):
        model = make(max_lora_rank=16, **options) if rank else make(**options)
        if lora:
            model.add_adapter(1, {n: lora for n in model.layers}, {})
            mark(model, [1] * tokens)
        for number, experts in model.layers.items():
            with torch.inference_mode():
                out = experts(*given)
            assert out.dtype == torch.bfloat16
            assert relative(out, expected(experts.layer, given, lora)) < OUTPUT_TOLERANCE
            assert model.status()["heat"][str(number)] == torch.bincount(given[1].flatten(), minlength=EXPERTS).tolist()
        found = model.status()["lanes"]
        assert sum(lane["pairs"] for lane in found.values()) == LAYERS * tokens * TOP_K
        assert (found["resident"]["pairs"] > 0) == ("routing" in options)


@pytest.mark.parametrize("residents", [False, True])
@pytest.mark.parametrize("numbers", [[5, 0, 6, 5], [6] * 7 + [0] * 5 + [5, 0, 6, 5, 5], [5] * 9, [0] * 3 + [5] * 8])
def test_each_token_has_the_adapter_of_its_number(make: Make, numbers: list[int], residents: bool) -> None:
    """In few and in many tokens; adapters 5 and 6 are at places 0 and 1, 6 is not on layer 2."""
    options = {"gpu_expert_memory": room(6, 16), "routing": HOT} if residents else {}
    model = make(max_lora_rank=16, max_adapters=2, **options)
    loras = {adapter: make_lora(HIDDEN, INTERMEDIATE, rank, torch.float32) for adapter, rank in ((5, 16), (6, 3))}
    model.add_adapter(5, {n: loras[5] for n in model.layers}, {"name": "five"})
    model.add_adapter(6, {n: loras[6] for n in (1, 3)}, {"name": "six"})
    given = batch(len(numbers))
    mark(model, numbers)
    for number, experts in model.layers.items():
        out = experts(*given)
        for adapter in set(numbers):
            mine = torch.tensor([each == adapter for each in numbers])
            lora = None if number == 2 and adapter == 6 else loras.get(adapter)
            assert relative(out[mine], expected(experts.layer, given, lora)[mine]) < 2 * OUTPUT_TOLERANCE
    assert [each["name"] for each in model.status()["adapters"]] == ["five", "six"]
    model.remove_adapter(5)
    mark(model, numbers)
    out = model.layers[1](*given)
    for adapter, lora in ((0, None), (5, None), (6, loras[6])):
        mine = torch.tensor([each == adapter for each in numbers])
        if mine.any():
            assert relative(out[mine], expected(model.layers[1].layer, given, lora)[mine]) < 2 * OUTPUT_TOLERANCE


def test_an_adapter_takes_the_place_of_another_at_once(make: Make) -> None:
    model, given = make(gpu_expert_memory=room(6, 16), routing=HOT, max_lora_rank=16), batch(4)
    base = [experts(*given) for experts in model.layers.values()]
    for seed, rank, names in ((1, 16, ("gate_proj", "up_proj", "down_proj")), (2, 3, ("down_proj",))):
        torch.manual_seed(seed)
        lora = make_lora(HIDDEN, INTERMEDIATE, rank, torch.bfloat16, names)
        model.remove_adapter(seed - 1)
        model.add_adapter(seed, {2: lora}, {})
        mark(model, [seed] * 4)
        outs = [experts(*given) for experts in model.layers.values()]
        assert torch.equal(outs[0], base[0]) and torch.equal(outs[2], base[2])
        assert relative(outs[1], expected(model.layers[2].layer, given, lora)) < OUTPUT_TOLERANCE
    with pytest.raises(ValueError, match=r"there is room for 1 adapters, .* --max-adapters 2"):
        model.add_adapter(3, {2: lora}, {})
    model.remove_adapter(2)
    for _ in range(2):  # a load that fails leaves the place free
        with pytest.raises(ValueError, match=r"rank 17, residents .* have room for 16; .* max_lora_rank"):
            model.add_adapter(4, {2: make_lora(HIDDEN, INTERMEDIATE, 17, torch.bfloat16)}, {})
    with pytest.raises(ValueError, match="expert LoRA for layer 7, which has no routed experts here"):
        model.add_adapter(5, {7: lora}, {})
    mark(model, [2] * 4)
    assert all(torch.equal(experts(*given), was) for experts, was in zip(model.layers.values(), base, strict=True))
    assert not model.status()["adapters"]


def test_deferred_experts_are_added_one_layer_later(make: Make) -> None:
    """By the sum of what the two layers' halves give, and never by the last layer."""
    one = Routing({1: [0, 0, 1, 0, 0], 2: [0] * EXPERTS, 3: [0] * EXPERTS})
    plain, model = make(), make(deferral=1, gpu_expert_memory=room(2), routing=one)
    model.decoding = lambda: True
    batches = [batch(4, seed=seed) for seed in (1, 2, 3)]
    light = [lowest(weights, 1) for _, _, weights in batches]
    light[0] &= batches[0][1] != 2  # a resident is on time
    light[2] = torch.zeros_like(light[2])

    def part(i: int, mask: torch.Tensor) -> torch.Tensor:
        x, index, weights = batches[i]
        return expected(plain.layers[i + 1].layer, (x, index, weights.where(mask, 0.0)))

    for _ in range(2):
        for i, experts in enumerate(model.layers.values()):
            wanted = part(i, ~light[i]) + (part(i - 1, light[i - 1]) if i else 0)
            assert relative(experts(*batches[i]), wanted) < OUTPUT_TOLERANCE
    assert relative(model.layers[1](*batches[0]), expected(model.layers[1].layer, batches[0])) > 0.05
    model.decoding = lambda: False  # a step that was broken off leaves nothing behind
    assert relative(model.layers[1](*batches[0]), expected(model.layers[1].layer, batches[0])) < OUTPUT_TOLERANCE


def test_residents_follow_the_traffic_between_steps(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid, "ADAPT_SECONDS", 0.0)
    model = make(gpu_expert_memory=room(3))
    x, index, weights = batch(4)
    index[:] = torch.tensor([0, 2, 4])
    many = batch(9)
    for _ in range(6):
        for experts in model.layers.values():
            experts(x, index, weights)
    table = model.hot.layers[0].table
    address, shown = table.data_ptr(), table.clone()
    assert (shown == -1).all()
    for _ in range(3):
        for experts in model.layers.values():
            assert relative(experts(*many), expected(experts.layer, many)) < OUTPUT_TOLERANCE
    held = model.status()["residents"]["experts"]
    assert sum(len(each) for each in held.values()) == 3
    assert all(set(each) <= {0, 2, 4} for each in held.values())
    assert model.hot.layers[0].table.data_ptr() == address  # graphs read it there
    for hot in model.hot.layers:
        assert {e: s for e, s in enumerate(hot.table.tolist()) if s >= 0} == model.hot.residents.slots(hot.layer)

    for _ in range(40):  # others are hit now: they come, few at a time, and outputs stay right
        index[:] = torch.tensor([1, 3, 0])
        for experts in model.layers.values():
            out = experts(x, index, weights)
        assert relative(out, expected(experts.layer, (x, index, weights))) < OUTPUT_TOLERANCE
        model.between_steps()
    held = model.status()["residents"]["experts"]
    assert all(set(each) <= {0, 1, 3} for each in held.values()) and model.status()["residents"]["moved"] > 3


def test_warming_up_is_not_counted(make: Make) -> None:
    model = make(gpu_expert_memory=room(3), routing=HOT)
    model.warm_up(8)
    status = model.status()
    assert not any(map(sum, status["heat"].values()))
    assert not any(lane["pairs"] for lane in status["lanes"].values())


def test_profiles(make: Make, layers: dict[int, native.ExpertLayer], tmp_path: Path) -> None:
    path = tmp_path / "expert_routing.json"
    model = make()
    model.layers[2](*batch(4))
    model.routing().save(path)
    settings = ServeSettings(str(tmp_path), gpu_expert_memory=room(2, 1), routing=str(path), max_lora_rank=8)
    with contextlib.closing(HybridModel.of(settings, layers, "cpu", TOP_K, torch.bfloat16, 64)) as made:
        status = made.status()
        assert made.hot.stacks is None, "without adapters there is no room for them"
    swaps = dataclasses.replace(settings, adapter_swap=True, gpu_expert_memory=room(2, 1) + (1 << 20))
    with contextlib.closing(HybridModel.of(swaps, layers, "cpu", TOP_K, torch.bfloat16, 64)) as made:
        assert made.hot.stacks is not None and made.hot.layers[0].stack.width == 16
    assert {layer for layer, held in status["residents"]["experts"].items() if held} == {"2"}
    assert status["expert_format"] == "k4" and status["adapters"] == []
    again = Routing.load(path)
    assert again.tokens[2] == torch.bincount(batch(4)[1].flatten(), minlength=EXPERTS).tolist()
    assert again.tokens[1] == [0] * EXPERTS
    with pytest.raises(ValueError, match="counts experts of 2 layers, the model has 3; layer 3 is only in the model"):
        make(routing=Routing({1: [1] * EXPERTS, 2: [1] * EXPERTS}))
    with pytest.raises(ValueError, match="counts 4 experts in layer 1, the model has 5"):
        make(routing=Routing({n: [1] * 4 for n in (1, 2, 3)}))
    for text in ("", "[]", '{"layout": 2, "layers": {}}', '{"layout": 1, "layers": {"0": [-1]}}', '{"layout": 1}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="is no routing profile"):
            Routing.load(path)


def test_bad_input(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="deferral is 3; a token has 3 experts"):
        make(deferral=3)
    with pytest.raises(ValueError, match="100 bytes hold no expert"):
        make(gpu_expert_memory=100)
    model = make(gpu_expert_memory="auto")  # the CPU has no memory of a GPU's
    assert model.hot is None
    monkeypatch.setattr(model, "capturing", lambda: True)
    with pytest.raises(ValueError, match="a CUDA graph of 9 tokens is captured, the experts take graphs of at most 4"):
        model.layers[1](*batch(9))


def test_a_job_that_fails_is_raised_by_the_check_after_its_step(make: Make) -> None:
    """Graphs cannot raise: what they computed with NaN in the hidden states must not be served as zeros."""
    model = make()
    model.layers[1](*batch(4))
    model.check()
    x, index, weights = batch(4)
    with pytest.raises(HostExpertsError, match="NaN|Inf|finite"):
        model.layers[1](x.fill_(torch.nan), index, weights)
        model.check()

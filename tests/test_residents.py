"""Which experts stay on the device: chosen by tokens, exchanged a few at a time, held as the layer holds them."""

from __future__ import annotations

import pytest
import torch
from contract import EXPERTS, make_layer
from fake_cuda import statistics

from ktft import native
from ktft.device import Device, device_of
from ktft.lanes.gpu import residents as residents_module
from ktft.lanes.gpu.lane import GpuLane
from ktft.lanes.gpu.residents import Residents, TrainingResidents, free_for_residents
from ktft.native import ExpertLayer
from ktft.native.cuda import Rows, copy_on_host

ISA = native.default_isa()


def layers(*formats: str, nodes: int = 1) -> list[ExpertLayer]:
    return [make_layer(64, 288, fmt, ISA, nodes=nodes) for fmt in formats]


def block(layer: ExpertLayer) -> int:
    return -(-layer.packed_bytes // EXPERTS // 256) * 256


def held(residents: Residents, among: list[ExpertLayer]) -> list[set[int]]:
    return [set(residents.slots(layer)) for layer in among]


def assert_blocks_are_the_layers(residents: Residents, among: list[ExpertLayer]) -> None:
    """Every resident's block, slice by slice, has the bytes of the packed expert; no two share a block."""
    taken = [slot for layer in among for slot in residents.slots(layer).values()]
    assert len(set(taken)) == len(taken)
    for layer in among:
        for expert, slot in residents.slots(layer).items():
            for part, blocks in zip(layer.slices(), residents.blocks(layer), strict=True):
                theirs = torch.zeros(part.expert_bytes, dtype=torch.uint8)
                there = Rows(part.address, theirs.data_ptr(), part.expert_bytes)
                copy_on_host([expert], [there], gather=True)
                assert theirs.any() and torch.equal(blocks[slot], theirs)


def streamed(lane: GpuLane, layer: ExpertLayer, experts: int) -> None:
    """As if a step had copied so many experts to the device."""
    lane.transfer.copied_bytes += experts * block(layer)


def test_the_first_step_fills_the_arena_with_the_experts_of_most_tokens() -> None:
    both = layers("k4", "k4", nodes=2)
    residents = Residents(GpuLane("cpu"), 4 * block(both[0]) + 77, both)
    assert residents.bytes == 4 * block(both[0])
    assert residents.adapt() == 0 and held(residents, both) == [set(), set()]
    for _ in range(2):  # two micro-batches
        residents.observe(both[0], [10, 0, 30, 0, 60])
        residents.observe(both[1], [20, 21, 19, 21, 19])
    assert residents.adapt() == 4 * both[0].packed_bytes // EXPERTS
    assert held(residents, both) == [{4, 2}, {1, 3}]
    assert_blocks_are_the_layers(residents, both)


def test_experts_without_tokens_take_places_that_are_left() -> None:
    """In training, where the routing changes; a profile of an earlier run says what will be asked for."""
    both = layers("int8", "int8")
    for places, expected in ((3, [{0, 1, 4}, set()]), (10, [set(range(5)), set(range(5))])):
        residents = Residents(GpuLane("cpu"), places * block(both[0]), both)
        residents.observe(both[0], [0, 5, 0, 0, 1])
        residents.adapt()
        assert held(residents, both) == expected
        assert_blocks_are_the_layers(residents, both)
    residents = Residents(GpuLane("cpu"), 10 * block(both[0]), both)
    residents.start({both[0]: [0, 5, 0, 0, 1]})
    assert held(residents, both) == [{1, 4}, set()]


def test_changes_are_few_and_not_back_and_forth() -> None:
    both, lane = layers("k4", "k4"), GpuLane("cpu")
    residents = Residents(lane, 3 * block(both[0]), both)
    residents.start({both[0]: [1, 1, 1, 0, 0], both[1]: [0, 0, 0, 0, 0]})
    assert held(residents, both) == [{0, 1, 2}, set()]

    counts = {both[0]: [0, 0, 20, 40, 40], both[1]: [20, 20, 20, 20, 20]}
    seen = []
    for _ in range(60):
        for layer in both:
            residents.observe(layer, counts[layer])
        streamed(lane, both[0], 20)  # 3% of which is less than one expert: one at a time
        seen.append(residents.adapt() // (both[0].packed_bytes // EXPERTS))
    assert max(seen) == 1 and sum(seen) == residents.moved - 3
    # 3 and 4 came for 0 and 1, one a step. Expert 2 has a fifth of its layer's tokens, and stays: so have all experts
    # of the other layer.
    assert held(residents, both) == [{2, 3, 4}, set()] and sum(seen) == 2
    assert_blocks_are_the_layers(residents, both)

    for layer in both:
        residents.observe(layer, [0, 100, 0, 0, 0])
    assert residents.adapt() == 0  # nothing was streamed: nothing may change
    streamed(lane, both[0], 100)
    for _ in range(30):
        for layer in both:
            residents.observe(layer, [0, 100, 0, 0, 0])
        streamed(lane, both[0], 70)
        assert residents.adapt() <= 2 * both[0].packed_bytes // EXPERTS
    assert held(residents, both) == [{1} | held(residents, both)[0], {1}]
    assert_blocks_are_the_layers(residents, both)


def test_layers_of_several_formats_share_the_arena() -> None:
    mixed = layers("bf16", "k4", "int8", nodes=3)
    residents = Residents(GpuLane("cpu"), 6 * block(mixed[0]), mixed)
    residents.start({layer: [5, 4, 1, 1, 1] for layer in mixed})
    assert held(residents, mixed) == [{0, 1}, {0, 1}, {0, 1}]
    assert_blocks_are_the_layers(residents, mixed)


def test_bad_input() -> None:
    (layer,), lane = layers("k4"), GpuLane("cpu")
    with pytest.raises(ValueError, match="gpu_expert_memory: 100 bytes hold no expert, one takes"):
        Residents(lane, 100, [layer])
    assert lane.residents is None
    residents = Residents(lane, 1 << 20, [layer])
    assert lane.residents is residents
    with pytest.raises(ValueError, match="has 5 experts, the earlier run's counts are of 3"):
        residents.start({layer: [1, 2, 3]})
    assert free_for_residents(lane) == 0 and residents.slots(layers("k4")[0]) == {}


def test_auto_takes_what_torch_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what the driver has: `torch.cuda.set_per_process_memory_fraction` leaves the rest to others."""
    lane = GpuLane("cpu")
    monkeypatch.setattr(lane, "device", torch.device("cuda", 0))
    facts = {"mem_get_info": (100 << 30, 120 << 30), "get_per_process_memory_fraction": 0.2}
    for name, value in (facts | {"memory_stats_as_nested_dict": statistics(8 << 30)}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert device_of(lane.device).free_bytes() == (16 << 30, 24 << 30)
    assert free_for_residents(lane) == (16 - 2) << 30
    before_the_limit = statistics(30 << 30)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda *_: before_the_limit)
    assert free_for_residents(lane) == 0


def test_residents_go_before_a_step_that_needs_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    both, lane = layers("k4", "k4"), GpuLane("cpu")
    one, used = block(both[0]), [30]  # blocks that training itself takes, of 100

    class Gpu(Device):
        def memory_reserved(self) -> int:
            return used[0] * one + bytes_of_residents(lane)

        def free_bytes(self) -> tuple[int, int]:
            return 100 * one - self.memory_reserved(), 100 * one

    monkeypatch.setattr(residents_module, "device_of", lambda _: Gpu(lane.device))
    monkeypatch.setattr(
        residents_module, "free_for_residents", lambda _: max(0, (98 - used[0]) * one - bytes_of_residents(lane))
    )
    training = TrainingResidents(lane, "auto")

    def step(tokens: int) -> int:
        """How many experts stay on the GPU during a step."""
        training.make_room(tokens, 2 * tokens)
        there = bytes_of_residents(lane) // one
        for layer in both:
            training.observe(layer, [1] * EXPERTS)
        training.end_step(both)
        return there

    every = 2 * EXPERTS
    assert [step(8) for _ in range(4)] == [0, 0, every, every]
    assert step(20) == every  # 45 more blocks are free
    used[0] = 80
    assert step(40) == 0
    assert step(40) == every  # what is free now is still enough for all
    used[0] = 94
    assert step(80) == 0
    assert [step(80), step(20)] == [4, 4]


def bytes_of_residents(lane: GpuLane) -> int:
    return lane.residents.bytes if lane.residents is not None else 0

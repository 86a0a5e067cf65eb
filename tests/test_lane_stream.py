"""The GPU lane's way of working, on the CPU: chunks, buffers in turns, residents, gradients, failures."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from contract import EXPERTS, SIZES, TAILS, assert_contract, compare, inputs_for, make_layer, make_lora
from gpu_lane import Lane, run_layer
from lanes import blocks
from torch import Tensor

from ktft import native
from ktft.config import EXPERT_FORMATS, PROJECTIONS
from ktft.lanes.gpu import buffers as buffers_module
from ktft.lanes.gpu import lane as lane_module
from ktft.lanes.gpu.lane import GpuLane
from ktft.lanes.gpu.residents import Residents
from ktft.lanes.gpu.transfer import Locks, Transfer
from ktft.lanes.ops.chunk import decode
from ktft.lanes.ops.weights import ChunkWeights, PackedExperts
from ktft.lanes.routes import Routes
from ktft.lora import ExpertLora
from ktft.model import autograd
from ktft.model.autograd import routed_experts
from ktft.native import ExpertLayer
from ktft.native.cuda import CudaError

ISA = native.default_isa()
HIDDEN, INTERMEDIATE = 64, 96


def small(layer: ExpertLayer, experts: int = 2) -> GpuLane:
    """Chunks of so many experts."""
    return GpuLane("cpu", chunk_bytes=experts * layer.packed_bytes // EXPERTS)


class Watched:
    """Every filling of a buffer by a lane, (which ring, the experts), and the blocks of each chunk of residents."""

    def __init__(self, lane: GpuLane, monkeypatch: pytest.MonkeyPatch) -> None:
        self.filled: list[tuple[str, list[int]]] = []
        buffers = lane._buffers
        for name, ring in (("packed", buffers.packed), ("adapters", buffers.adapters)):
            monkeypatch.setattr(ring, "fill", self._noting(name, ring.fill))
        of = lane._slots.of
        monkeypatch.setattr(
            lane._slots, "of", lambda numbers: self._noting("resident", lambda *_: of(numbers))(0, numbers)
        )

    def _noting(self, name: str, fill: Any) -> Any:
        def noting(places: Any, rows: list[int]) -> Any:
            self.filled.append((name, list(rows)))
            return fill(places, rows)

        return noting

    def take(self, name: str) -> list[list[int]]:
        """What one ring was filled with since this was last called."""
        taken = [rows for of, rows in self.filled if of == name]
        self.filled = [entry for entry in self.filled if entry[0] != name]
        return taken


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("fmt", EXPERT_FORMATS)
def test_contract(fmt: str, nodes: int) -> None:
    hidden, intermediate, rank, rows = SIZES[nodes][0]
    layer = make_layer(hidden, intermediate, fmt, ISA, nodes=nodes)
    lora = make_lora(hidden, intermediate, rank, torch.float32)
    assert_contract(compare(layer, lora, *inputs_for(rows, hidden), forward=Lane(small(layer))))


@pytest.mark.parametrize("chunk", [1, 3, EXPERTS, 99])
def test_chunks_of_any_size_and_a_lane_for_several_layers(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [make_layer(HIDDEN, INTERMEDIATE, "int8", ISA), make_layer(96, 160, "k4", ISA, nodes=2)]
    lane = small(layers[0], chunk)
    for layer in (*layers, layers[0]):  # buffers grow for the second one
        sizes = layer.hidden_size, layer.intermediate_size
        for lora in (make_lora(*sizes, 8, torch.bfloat16), None):
            inputs = inputs_for(TAILS[0], layer.hidden_size)
            assert_contract(compare(layer, lora, *inputs, forward=Lane(lane)))
    watched = Watched(lane, monkeypatch)
    inputs = inputs_for(TAILS[0], HIDDEN)
    with torch.no_grad():
        Lane(lane)(layers[0], *inputs)
    sizes = [len(rows) for rows in watched.take("packed")]
    assert sum(sizes) == EXPERTS and max(sizes) <= chunk and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("buffers", [2, 4])
def test_what_a_buffer_holds_is_not_copied_again(buffers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two buffers hold one of these layers, four hold both."""
    monkeypatch.setattr(buffers_module, "MOST_BUFFERS", buffers)
    layer, other = (make_layer(HIDDEN, INTERMEDIATE, "k4", ISA) for _ in range(2))
    lane, inputs = small(layer, 3), inputs_for((1, 9, 4, 2, 30), HIDDEN)
    outputs, copied = [], []
    for each in (layer, layer, other, layer):
        before = lane.transfer.copied_bytes
        with torch.no_grad():
            outputs.append(Lane(lane)(each, *inputs))
        copied.append(lane.transfer.copied_bytes - before)
    assert copied == [layer.packed_bytes, 0, other.packed_bytes, layer.packed_bytes if buffers == 2 else 0]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[3])


def test_only_the_experts_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their part of the output and gradients; other experts' LoRA gradients are not touched."""
    layer, lora = make_layer(HIDDEN, INTERMEDIATE, "int8", ISA), make_lora(HIDDEN, INTERMEDIATE, 4, torch.float32)
    lane = small(layer)
    x, index, weights = inputs_for(TAILS[1], HIDDEN)
    halves = [4, 0, 2], [3, 1]
    with torch.no_grad():
        both = sum(Lane(lane, half)(layer, x, index, weights, lora).float() for half in halves)
        whole = Lane(lane)(layer, x, index, weights, lora)
    torch.testing.assert_close(both, whole.float(), rtol=1e-2, atol=1e-2)
    routes = Routes(index, torch.bincount(index.flatten(), minlength=EXPERTS).tolist())
    grads = [torch.full(p.shape, 7.0) for p in lora.parameters()]
    sums = torch.zeros(x.shape), torch.zeros(weights.shape)
    watched = Watched(lane, monkeypatch)
    with torch.no_grad():
        lane.backward(layer, halves[0], routes, x, torch.ones_like(x), weights.float(), lora, *sums, grads)
    lane.finish()
    for grad in grads:
        assert (grad[[1, 3]] == 7).all() and not (grad[[0, 2, 4]] == 7).any()
    assert watched.take("packed") == watched.take("adapters") == [[0], [2, 4]]  # ascending: neighbours travel together


def test_lanes_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some experts here, the others in the native layer: the reference's output and gradients."""
    layer, lora = make_layer(HIDDEN, 160, "k4", ISA), make_lora(HIDDEN, 160, 8, torch.float32)
    lane, here = small(layer), [0, 3, 4]
    monkeypatch.setattr(autograd, "rows_of", lambda *_: [])  # which refuses `ELSEWHERE`

    class Both(Lane):
        def __call__(self, layer: ExpertLayer, x: Tensor, index: Tensor, weights: Tensor, lora: Any, *_: Any) -> Tensor:
            there = index.masked_fill(torch.isin(index, torch.tensor(here)), native.ELSEWHERE)
            parts = super().__call__(layer, x, index, weights, lora), routed_experts(layer, x, there, weights, lora)
            return sum(parts)

    assert_contract(compare(layer, lora, *inputs_for(TAILS[2], HIDDEN, torch.float32), forward=Both(lane, here)))


def test_memory_that_cannot_be_locked_goes_through_mirrors(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, lora = make_layer(HIDDEN, 288, "k4", ISA, nodes=2), make_lora(HIDDEN, 288, 4, torch.float32)
    inputs = inputs_for(TAILS[1], HIDDEN)
    straight = run_layer(small(layer), layer, lora, *inputs)
    parameters = {p.data_ptr() for p in lora.parameters()}
    monkeypatch.setattr(Locks, "layer", lambda self, layer: False)
    monkeypatch.setattr(Locks, "tensor", lambda self, tensor: tensor.data_ptr() not in parameters)
    mirrored = run_layer(small(layer), layer, lora, *inputs)
    assert all(torch.equal(a, b) for a, b in zip(straight, mirrored, strict=True))


def test_residents_are_taken_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [make_layer(HIDDEN, 288, fmt, ISA, nodes=2) for fmt in ("k4", "int8")]
    lora = make_lora(HIDDEN, 288, 4, torch.float32)
    lane = GpuLane("cpu", chunk_bytes=2 * layers[1].packed_bytes // EXPERTS)
    residents = Residents(lane, 6 * (layers[1].packed_bytes // EXPERTS + 256), layers)
    residents.start({layers[0]: [9, 1, 8, 1, 7], layers[1]: [1, 0, 1, 9, 8]})
    assert set(residents.slots(layers[0])) == {0, 2, 4} and set(residents.slots(layers[1])) == {3, 4, 0}
    watched = Watched(lane, monkeypatch)
    for layer in layers:
        watched.filled.clear()
        assert_contract(compare(layer, lora, *inputs_for(TAILS[1], HIDDEN), forward=Lane(lane)))
        taken, streamed = watched.take("resident"), watched.take("packed")
        slots, half = residents.slots(layer), len(taken) // 2
        assert taken[:half] == taken[half:]  # forward, then backward
        assert sorted(slot for rows in taken[:half] for slot in rows) == sorted(slots.values())
        assert {e for rows in streamed for e in rows} == set(range(EXPERTS)) - set(slots)
    lane.hold(None)
    assert_contract(compare(layers[0], lora, *inputs_for(TAILS[1], HIDDEN), forward=Lane(lane)))
    assert not watched.take("resident")


def test_chunks_begun_ahead_are_used_or_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers_module, "MOST_BUFFERS", 2)
    layer, lora = make_layer(HIDDEN, INTERMEDIATE, "int8", ISA), make_lora(HIDDEN, INTERMEDIATE, 4, torch.float32)
    lane, inputs = small(layer), inputs_for(TAILS[1], HIDDEN)
    with torch.no_grad():
        expected = Lane(lane)(layer, *inputs, lora)
        watched = Watched(lane, monkeypatch)
        lane.prefetch(layer, [3, 2, 4, 1, 0], lora)
        lane.prefetch(layer, [3, 2, 4, 1, 0], lora)  # the buffers are full
        ahead = watched.take("packed")
        assert ahead == [[0], [1, 2]]
        got = Lane(lane)(layer, *inputs, lora)
        assert watched.take("packed") == [[3, 4]]
        torch.testing.assert_close(got, expected)

        lane.prefetch(layer, list(range(5)), lora)
        watched.take("packed")
        got = Lane(lane, [0, 2, 3])(layer, *inputs, lora)  # without expert 1
        assert watched.take("packed") == [[2, 3]]
        torch.testing.assert_close(got, Lane(lane, [0, 2, 3])(layer, *inputs, lora))

        x, index, weights = inputs
        index = torch.where(index == 1, 0, index)  # expert 1 has no rows, so its chunk is as good
        lane.prefetch(layer, list(range(5)), lora)
        watched.take("packed")
        got = Lane(lane, [0, 2, 3])(layer, x, index, weights, lora)
        assert watched.take("packed") == [[3]]
        torch.testing.assert_close(got, Lane(lane, [0, 2, 3])(layer, x, index, weights, lora))

        other = make_layer(HIDDEN, INTERMEDIATE, "k4", ISA)
        lane.prefetch(other, list(range(5)), lora)
        torch.testing.assert_close(Lane(lane)(layer, *inputs, lora), expected)


@pytest.mark.parametrize("resident", [0, 2, 5])
def test_a_steady_call_gets_what_was_prefetched_for_it(monkeypatch: pytest.MonkeyPatch, resident: int) -> None:
    """LoRA that has changed since is copied again, and a call of another layer drops all."""
    layer, other = (make_layer(HIDDEN, INTERMEDIATE, "int8", ISA) for _ in range(2))
    lora = make_lora(HIDDEN, INTERMEDIATE, 4, torch.float32)
    lane = small(layer, 3)
    if resident:
        block = -(-layer.packed_bytes // EXPERTS // 256) * 256
        Residents(lane, resident * block, [layer]).start({layer: [3, 1, 2, 1, 5]})
    held = lane.held(layer)
    parts = [[expert for expert in chunk if expert not in held] for chunk in ([0, 1], [2, 3, 4])]
    watched = Watched(lane, monkeypatch)

    def call(of: ExpertLayer = layer) -> list[Any]:
        with lane.using(of, "forward"):
            chunks = lane.all_chunks(of, lora)
            for chunk, decoded in zip(chunks, lane.decoded(of, chunks, lora), strict=True):
                assert chunk.experts == decoded.experts
                for name, pair in lora.pairs.items():
                    assert decoded.adapters is not None
                    assert torch.equal(decoded.adapters.pairs[name].a, pair.a[chunk.experts])
        return watched.take("adapters")

    assert lane.prefetch_steady(layer, lora, adapters=True) == (resident == 5)
    assert lane.prefetch_steady(layer, lora, adapters=True)  # the buffers are full
    assert watched.take("packed") == [part for part in parts if part]
    assert watched.take("adapters") == [[0, 1], [2, 3, 4]]
    assert call() == [] and watched.take("packed") == []
    lane.prefetch_steady(layer, lora, adapters=True)
    with torch.no_grad():
        lora.pairs["up_proj"].a.add_(1)
    watched.take("adapters")
    assert call() == [[0, 1], [2, 3, 4]]
    lane.prefetch_steady(layer, lora, adapters=False)
    assert watched.take("adapters") == []
    lane.prefetch_steady(layer, lora, adapters=True)
    watched.take("adapters")
    assert call(other) == [[0, 1], [2, 3, 4]]
    assert call() == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize(("buffers", "begun"), [(2, []), (3, [[0, 1]]), (4, [[0, 1], [2, 3, 4]])])
def test_buffers_that_the_next_call_does_not_need_are_for_a_later_one(
    monkeypatch: pytest.MonkeyPatch, buffers: int, begun: list[list[int]]
) -> None:
    monkeypatch.setattr(buffers_module, "MOST_BUFFERS", buffers)
    layer, other = (make_layer(HIDDEN, INTERMEDIATE, "int8", ISA) for _ in range(2))
    lane, chunks = small(layer, 3), [[0, 1], [2, 3, 4]]
    watched = Watched(lane, monkeypatch)

    def call(of: ExpertLayer) -> None:
        with lane.using(of, "forward"):
            for chunk, decoded in zip(chunks, lane.decoded(of, lane.all_chunks(of, None), None), strict=True):
                expected = ChunkWeights.empty(of, len(chunk), None, torch.device("cpu"))
                decode(PackedExperts(of.format, of.slices(), blocks(of, chunk, torch.device("cpu"))), expected)
                assert torch.equal(decoded.weights.down.values, expected.down.values)

    assert not lane.prefetch_steady(layer, None, adapters=False)
    assert watched.take("packed") == chunks
    lane.prefetch_beside(other, None)
    assert watched.take("packed") == begun
    before = lane.transfer.copied_bytes
    call(layer)
    assert lane.transfer.copied_bytes == before and lane.prefetch_steady(other, None, adapters=False) == (buffers == 4)
    call(other)


class Replays:
    """As `Recorded` on a GPU: work whose key was seen is what was recorded then, with the memory it had."""

    def __init__(self) -> None:
        self.recorded: dict[Any, Any] = {}
        self.replayed = 0

    def run(self, key: Any, work: Any) -> None:
        self.replayed += key in self.recorded
        (work if key is None else self.recorded.setdefault(key, work))()


def test_recorded_kernels_are_those_that_a_chunk_needs() -> None:
    first = make_layer(HIDDEN, INTERMEDIATE, "int8", ISA)
    negative = {key: -first.dequantize(*key) for key in itertools.product(range(EXPERTS), PROJECTIONS)}
    second = make_layer(HIDDEN, INTERMEDIATE, "int8", ISA, weights=negative)
    other = make_layer(HIDDEN, INTERMEDIATE, "k4", ISA)
    lora, wide = (make_lora(HIDDEN, INTERMEDIATE, rank, torch.float32) for rank in (4, 12))
    pair = lora.pairs["up_proj"]
    scaled = replace(lora, pairs=lora.pairs | {"up_proj": replace(pair, scaling=3.0)})
    dropping = replace(lora, dropout=0.25, seed=3)
    lane, plain, replays = small(first), small(first), Replays()
    lane._recorded = replays  # type: ignore[assignment]
    inputs = inputs_for(TAILS[1], HIDDEN)
    cases = [(layer, each) for layer in (first, second, other) for each in (lora, scaled, dropping, wide)]
    for layer, adapters in cases + cases:
        found, expected = (run_layer(each, layer, adapters, *inputs) for each in (lane, plain))
        assert all(map(torch.equal, found, expected))
    assert replays.replayed > len(cases)


def test_buffers_stay_within_their_limit() -> None:
    layer, lora = make_layer(512, 512, "k4", ISA), make_lora(512, 512, 64, torch.float32)
    inputs = inputs_for(TAILS[0], 512)
    one = layer.packed_bytes // EXPERTS
    lane = GpuLane("cpu", limit=16 << 20)
    with torch.no_grad():
        Lane(lane)(layer, *inputs, lora)
        assert 8 << 20 < lane.bytes <= 16 << 20
        tight = GpuLane("cpu", limit=1)  # one expert a chunk at least
        out = Lane(tight)(layer, *inputs, lora)
        assert 2 * one < tight.bytes < 8 << 20
        torch.testing.assert_close(out, Lane(lane)(layer, *inputs, lora), rtol=1e-2, atol=1e-1)


def test_out_of_memory_names_the_lane_after_copies_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, lora = make_layer(HIDDEN, INTERMEDIATE, "int8", ISA), make_lora(HIDDEN, INTERMEDIATE, 4, torch.float32)
    lane, inputs, events = small(layer), inputs_for(TAILS[1], HIDDEN), []
    expected = run_layer(lane, layer, lora, *inputs)

    def no_memory(*_: Any) -> None:
        events.append("products")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore of it.")

    wait = Transfer.synchronize
    monkeypatch.setattr(Transfer, "synchronize", lambda self: events.append("waited") or wait(self))
    with monkeypatch.context() as patch:
        patch.setattr(lane_module, "chunk_forward", no_memory)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            Lane(lane)(layer, *inputs, lora)
    message = str(caught.value)
    assert "CUDA out of memory in the GPU lane on cpu, forward of" in message and "its buffers hold" in message
    assert "Tried to allocate 2.00 GiB" in message and "More of it" not in message
    assert events == ["products", "waited"]
    # and the lane works on
    assert all(torch.equal(a, b) for a, b in zip(run_layer(lane, layer, lora, *inputs), expected, strict=True))


def test_bad_tensors_are_named() -> None:
    layer, lora = make_layer(HIDDEN, INTERMEDIATE, "int8", ISA), make_lora(HIDDEN, INTERMEDIATE, 4, torch.float32)
    lane, (x, index, weights) = small(layer), inputs_for(TAILS[1], HIDDEN)
    pair = lora.pairs["up_proj"]
    crooked = type(pair)(pair.a.detach().mT.contiguous().mT, pair.b, pair.scaling)
    with pytest.raises(ValueError, match=r"must be contiguous CPU tensors of 5 experts, got \[5, 4, 64\] with strides"):
        Lane(lane)(layer, x, index, weights, ExpertLora({"up_proj": crooked}))
    routes = Routes(index, torch.bincount(index.flatten(), minlength=EXPERTS).tolist())
    sums = torch.zeros(x.shape), torch.zeros(weights.shape)
    rest = routes, x, torch.ones_like(x), weights.float(), lora, *sums
    with pytest.raises(ValueError, match=r"gradients have the shapes \[\], its tensors \[\[5, 4, 64\]"):
        lane.backward(layer, [0], *rest, [])
    with pytest.raises(ValueError, match="contiguous fp32 CPU tensors, got torch.bfloat16"):
        lane.backward(layer, [0], *rest, [torch.zeros(p.shape).bfloat16() for p in lora.parameters()])
    with pytest.raises(ValueError, match="experts cannot run on meta"):
        GpuLane("meta")
    if not torch.cuda.is_available():
        with pytest.raises(CudaError, match="CUDA's driver cannot be opened"):
            GpuLane("cuda:0")


class NotingDriver:
    """Stands for `cuda.Driver`: what is locked now; refuses what is there already."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.refused: list[int] = []

    def register(self, device: int, address: int, size: int) -> None:
        if any(a < address + size and address < a + n for a, n in self.locked.items()):
            self.refused.append(address)
            raise CudaError("cuMemHostRegister of 9 bytes failed: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED (no)")
        self.locked[address] = size

    def unregister(self, device: int, address: int) -> None:
        del self.locked[address]


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Locks, NotingDriver]]:
    transfer, driver = Transfer(torch.device("cpu")), NotingDriver()
    monkeypatch.setattr(transfer, "driver", driver)
    monkeypatch.setattr(transfer, "synchronize", lambda: None)
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: False)
    yield transfer.locks, driver


def test_memory_is_locked_once_and_until_its_owner_dies(noting: tuple[Locks, NotingDriver]) -> None:
    locks, driver = noting
    layer = make_layer(HIDDEN, 288, "k4", ISA, nodes=3)
    slices = {part.address: part.expert_bytes * EXPERTS for part in layer.slices()}
    assert locks.layer(layer) and locks.layer(layer)
    assert driver.locked == slices and locks.locked_bytes == sum(slices.values())

    parameter = torch.nn.Parameter(torch.randn(5, 4, 64))
    assert locks.tensor(parameter.detach()) and locks.tensor(parameter)
    assert driver.locked == slices | {parameter.data_ptr(): parameter.nbytes}
    assert not locks.tensor(parameter[1:]) and locks.refusals == ["CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED (no)"]
    assert not locks.tensor(parameter[1:]) and len(driver.refused) == 1  # it is not asked again

    kept = parameter.detach()[0]
    del parameter
    gc.collect()
    assert len(driver.locked) == 4  # the storage lives
    del kept
    gc.collect()
    assert driver.locked == slices
    del layer
    gc.collect()
    assert not driver.locked and not locks.locked_bytes


def test_locking_reports_progress() -> None:
    layers = [make_layer(HIDDEN, INTERMEDIATE, fmt, ISA) for fmt in ("k4", "bf16")]
    seen: list[tuple[str, int]] = []
    assert GpuLane("cpu").lock(layers, lambda name, size: seen.append((name, size)))
    assert seen == [(layer.name, layer.packed_bytes) for layer in layers]

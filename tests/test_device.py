"""Devices: the CPU as a stand-in, CUDA where available, and a toy one, to show that a class and a row are enough."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_cuda import Fake, statistics
from torch import Tensor

from ktft import device as devices
from ktft.device import ACCELERATORS, Cuda, Device, HostStream, accelerator, accelerators, device_of
from ktft.lanes.gpu.transfer import Transfer
from ktft.native.cuda import Rows

HERE = ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]


def rows(matrix: Tensor, batch: Tensor) -> list[Rows]:
    return [Rows(matrix.data_ptr(), batch.data_ptr(), matrix[0].nbytes)]


@pytest.mark.parametrize("where", HERE)
def test_rows_travel_to_a_device_and_back(where: str) -> None:
    device = device_of(torch.device(where))
    transfer = Transfer(device.device)
    source = torch.randn(9, 64).pin_memory() if device.pin_memory else torch.randn(9, 64)
    there, again = (torch.zeros(4, 64, device=where) for _ in range(2))
    back, chosen = torch.zeros(9, 64, pin_memory=device.pin_memory), [2, 3, 7, 0]
    device.synchronize()
    event, arrived = transfer.event(), transfer.event()
    transfer.copy_in(chosen, rows(source, there))
    event.record(transfer.into)
    event.wait(transfer.compute())
    again.copy_(there[[3, 0, 1, 2]])
    event.record(transfer.compute())
    event.wait(transfer.out)
    transfer.copy_out([5, 4, 6, 8], rows(back, again))
    transfer.keep([there, again], transfer.out)
    arrived.record(transfer.out)
    arrived.synchronize()
    assert arrived.query() and torch.equal(back[[4, 6, 8, 5]], source[chosen])
    assert transfer.copied_bytes == 4 * 64 * 4


@pytest.mark.parametrize("where", HERE)
def test_events_with_timing_tell_what_lies_between_them(where: str) -> None:
    device = device_of(torch.device(where))
    begin, middle, end = (device.event(timing=True) for _ in range(3))
    stream = device.new_stream()
    stream.wait_stream(device.current_stream())
    with device.stream(stream):
        begin.record()
        x = torch.ones(300, 300, device=where)
        middle.record()
        for _ in range(20):
            x = x @ x / 300
        end.record(stream)
    end.synchronize()
    stream.synchronize()
    first, second = begin.elapsed_time(middle), middle.elapsed_time(end)
    assert first >= 0 and second > 0 and begin.elapsed_time(end) == pytest.approx(first + second, rel=1e-3, abs=1e-2)
    assert not device.is_current_stream_capturing()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_cuda_says_what_torch_says() -> None:
    device, current = accelerator(), torch.cuda.current_device()
    assert isinstance(device, Cuda) and device.indexed() == torch.device("cuda", current)
    assert [each.name() for each in accelerators()][current] == device.name() == torch.cuda.get_device_name()
    held = torch.empty(1 << 20, dtype=torch.uint8, device=device.device)
    free, peak = device.free_bytes(), device.peak_bytes()
    assert free is not None and 0 < free[0] < free[1] and 0 < peak[1] < free[1]
    assert held.nbytes <= peak[0] and held.nbytes <= device.memory_reserved()
    assert device.handle(device.new_stream()) != device.handle(device.current_stream()) == 0
    graph = device.record(lambda: held.fill_(3), device.new_stream())
    held.zero_()
    graph.replay()
    assert device.is_initialized() and int(held[-1]) == 3


def test_flags_and_caps_reach_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 bytes, others hold 10 and torch has reserved 70 and used at most 40; then it is capped at half."""
    device = Cuda(torch.device("cuda", 3))
    monkeypatch.setattr(torch.cuda, "Event", lambda **flags: flags)
    assert device.event(blocking=True) == {"enable_timing": False, "blocking": True}
    assert device.event(timing=True) == {"enable_timing": True, "blocking": False}
    asked: list[int | None] = []
    facts = {"mem_get_info": (20, 100), "memory_stats_as_nested_dict": statistics(70, peak=40)}
    for name, value in (facts | {"get_per_process_memory_fraction": 1.0}).items():
        monkeypatch.setattr(torch.cuda, name, lambda index, value=value: asked.append(index) or value)
    assert device.free_bytes() == (20, 100) and device.peak_bytes() == (40, 50)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda index: 0.5)
    assert device.free_bytes() == (0, 50) and device.peak_bytes() == (40, 10)
    assert set(asked) == {3}


def test_the_cpu_waits_for_nothing_and_has_no_memory_of_its_own() -> None:
    device = device_of(torch.device("cpu"))
    assert type(device) is Device and device is device_of(torch.device("cpu"))
    assert isinstance(device.current_stream(), HostStream) and device.handle(device.new_stream()) == 0
    assert device.free_bytes() is None and device.memory_reserved() == 0 and device.peak_bytes() == (0, 0)
    assert device.indexed() == torch.device("cpu") and device.driver_library() is None
    assert not (device.pin_memory or device.runs_triton or device.records_graphs or device.has_grouped_mm())


@pytest.mark.parametrize("kind", ACCELERATORS.values())
def test_an_accelerator_leaves_nothing_to_the_stand_in(kind: type[Device]) -> None:
    """A method inherited from the CPU's stand-in would silently not wait for the device."""
    public = {name for name in vars(Device) if not name.startswith("_")}
    assert public <= set(vars(kind))


def test_a_device_of_no_known_type_is_named() -> None:
    with pytest.raises(ValueError, match="experts cannot run on meta; ktft knows devices of the types cpu, cuda"):
        device_of(torch.device("meta"))


# --- another vendor's -------------------------------------------------------------------------------------------------


class Toy(Device):
    """A device in host memory, with a driver that notes its calls."""

    fake_driver = ""

    @staticmethod
    def device_count() -> int:
        return 2

    def indexed(self) -> torch.device:
        return torch.device("xpu", self.index or 0)

    def name(self) -> str:
        return f"toy {self.index}"

    def driver_library(self) -> str:
        return self.fake_driver

    def new_stream(self) -> Any:
        return HostStream()

    def handle(self, stream: HostStream) -> int:
        return 7 if stream is self.current_stream() else 5


@pytest.fixture
def toy(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setattr(Toy, "fake_driver", fake.path)
    monkeypatch.setitem(devices.ACCELERATORS, "xpu", Toy)
    yield fake
    device_of.cache_clear()


def test_a_class_and_a_row_are_another_device(toy: Fake) -> None:
    device = torch.device("xpu", 0)
    assert device_of(device).name() == "toy 0" and accelerators()[-1].name() == "toy 1"
    transfer = Transfer(device)
    source, there, back = torch.randn(9, 64), torch.zeros(3, 64), torch.zeros(9, 64)
    toy.reset()
    assert transfer.locks.tensor(source)
    transfer.copy_in([2, 3, 8], rows(source, there))
    transfer.copy_out([4, 0], rows(back, there))
    calls = [call.partition(" 0x")[0] for call in toy.calls]
    assert [call for call in calls if not call.startswith(("retain", "current"))] == [
        "register",
        "in 512 stream 5",
        "in 256 stream 5",
        "out 256 stream 5",
        "out 256 stream 5",
    ]
    assert torch.equal(back[[4, 0]], source[[2, 3]])

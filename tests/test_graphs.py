"""Work that is recorded: done at first, then recorded, then replayed; and done as before where that cannot be."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import pytest
import torch

from ktft.device import device_of
from ktft.lanes.gpu.graphs import Recorded

DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def own_devices() -> Iterator[None]:
    """A device keeps the stream in which it records."""
    device_of.cache_clear()
    yield
    device_of.cache_clear()


class Cuda:
    """In place of torch.cuda's graphs and streams; notes what is asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refuses: bool = False) -> None:
        self.calls: list[str] = []
        cuda, calls = self, self.calls

        class Graph:
            def capture_begin(self, pool: str, capture_error_mode: str) -> None:
                calls.append(f"begin {capture_error_mode} in {pool}")

            def capture_end(self) -> None:
                calls.append("end")
                if refuses:
                    raise RuntimeError("operation not permitted\nCUDA kernel errors ...")

            def replay(self) -> None:
                calls.append("replay")

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: "stream")
        monkeypatch.setattr(torch.cuda, "stream", cuda.stream)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "a pool")
        monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)

    @contextlib.contextmanager
    def stream(self, stream: str):  # type: ignore[no-untyped-def]
        self.calls.append(f"on {stream}")
        yield

    def since(self) -> list[str]:
        found = list(self.calls)
        self.calls.clear()
        return found


def test_work_is_done_then_recorded_then_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    recorded = Recorded(DEVICE)
    for key in ("one", "two"):
        seen = []
        for _ in range(3):
            recorded.run(key, lambda: cuda.calls.append("work"))
            seen.append(cuda.since())
        assert seen == [["work"], ["on stream", "begin thread_local in a pool", "work", "end", "replay"], ["replay"]]
    recorded.run(None, lambda: cuda.calls.append("work"))
    assert cuda.since() == ["work"]


def test_there_is_an_end_of_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    monkeypatch.setattr("ktft.lanes.gpu.graphs.MOST", 1)
    recorded = Recorded(DEVICE)
    for key in ("one", "two") * 3:
        recorded.run(key, lambda key=key: cuda.calls.append(key))
    record = ["on stream", "begin thread_local in a pool", "one", "end", "replay"]
    assert cuda.since() == ["one", "two", *record, "two", "replay", "two"]


def test_where_nothing_can_be_recorded_work_is_done(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = Cuda(monkeypatch, refuses=True)
    recorded = Recorded(DEVICE)
    with caplog.at_level(logging.INFO, "ktft"):
        for _ in range(4):
            recorded.run("one", lambda: cuda.calls.append("work"))
    assert cuda.since() == ["work", "on stream", "begin thread_local in a pool", "work", "end"] + ["work"] * 3
    assert [r.getMessage() for r in caplog.records] == [
        "kernels cannot be recorded here, and are launched one by one: operation not permitted"
    ]


def test_an_error_of_the_work_itself_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch)
    recorded = Recorded(DEVICE)
    recorded.run("one", lambda: None)

    def wrong() -> None:
        raise ValueError("a shape")

    with pytest.raises(ValueError, match="a shape"):
        recorded.run("one", wrong)


@pytest.mark.parametrize("device, on", [("cpu", True), ("cuda", False)])
def test_elsewhere_it_is_done_each_time(device: str, on: bool) -> None:
    recorded, calls = Recorded(torch.device(device), on), []
    for _ in range(3):
        recorded.run("one", lambda: calls.append("work"))
    assert calls == ["work"] * 3


@pytest.mark.parametrize("device", ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])])
def test_it_is_the_same_work_each_time(device: str) -> None:
    recorded, x = Recorded(torch.device(device)), torch.zeros(4, device=device)

    def add() -> None:
        x.add_(1)

    for n in range(1, 6):
        recorded.run("add", add)
        assert x.tolist() == [n] * 4

"""The recorder of spans: sums, nesting, threads, events of a GPU read late; the trace; attention's hooks."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import statistics
from given import Checkpoint
from stock import load
from torch import Tensor, nn

from ktft import spans
from ktft.device import HostStream
from ktft.spans import Interval, Recorder
from ktft.train import trace
from ktft.train.attention import AttentionSpans, attention_modules
from ktft.train.run_times import Since, memory_now, times_of
from ktft.train.trace import ROWS, Trace


@dataclass
class Clock:
    """A GPU's: it comes to what is enqueued when it is told to."""

    now: float = 100.0  # ms
    made: int = 0

    def event(self) -> FakeEvent:
        self.made += 1
        return FakeEvent(self)


@dataclass
class FakeEvent:
    """As `torch.cuda.Event`, for as much as spans use of it."""

    clock: Clock
    at: float | None = None

    def record(self, stream: Any = None) -> None:
        self.at = self.clock.now

    def query(self) -> bool:
        return self.at <= self.clock.now

    def synchronize(self) -> None:
        self.clock.now = max(self.clock.now, self.at)

    def elapsed_time(self, other: FakeEvent) -> float:
        assert other.query()
        return other.at - self.at


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`passes(seconds)`: for the recorder, time passes then only, however busy the machine is."""
    now = [100.0]

    def passes(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(spans, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return passes


def started(*how: Any) -> Recorder:
    """A recorder within a step."""
    made = Recorder(*how)
    made.start()
    made.on = True
    return made


@pytest.fixture
def recorder() -> Recorder:
    return started()


# --- recorder ---------------------------------------------------------------------------------------------------------


def test_sums_by_name_and_layer(recorder: Recorder) -> None:
    for layer in (0, 1, 0):
        with recorder.span("cpu", layer, bytes=10, flops=3) as span:
            span.bytes += 5
            time.sleep(0.002)
    recorder.add("data", None, 1.0, 3.5, waited=True)
    recorder.add("copy_in", 1, 1.0, 2.0, bytes=7)
    recorder.expect(0, {"cpu": 0.5, "stream": 0.25})
    sums = recorder.take()
    assert set(sums) == {("cpu", 0), ("cpu", 1), ("data", None), ("copy_in", 1), ("stream", 0)}
    cpu = sums["cpu", 0]
    assert (cpu.count, cpu.bytes, cpu.flops, cpu.expected) == (2, 30, 6, 0.5)
    assert cpu.seconds == cpu.waited >= 0.004
    assert (sums["data", None].seconds, sums["data", None].waited) == (2.5, 2.5)
    assert (sums["copy_in", 1].seconds, sums["copy_in", 1].waited) == (1.0, 0.0)
    assert (sums["stream", 0].seconds, sums["stream", 0].expected) == (0.0, 0.25)
    assert recorder.take() == {}


def test_split_counts_each_moment_once(recorder: Recorder) -> None:
    """A span inside another is taken off it; what goes on aside, or in another thread, is no part of the split."""

    def lane() -> None:
        with recorder.span("cpu", 4):
            time.sleep(0.03)

    began = time.perf_counter()
    worker = threading.Thread(target=lane)
    handle = recorder.begin("stream", 4, bytes=1)
    with recorder.span("attention", 4):
        worker.start()
        time.sleep(0.01)
        with recorder.span("wait", 4):
            worker.join()
    recorder.end(handle)
    seconds = time.perf_counter() - began
    sums = recorder.take()
    assert sums["cpu", 4].seconds >= 0.03 and sums["cpu", 4].waited == 0
    assert sums["stream", 4].seconds >= 0.03 and sums["stream", 4].waited == 0
    inner, outer = sums["wait", 4], sums["attention", 4]
    assert outer.seconds == pytest.approx(outer.waited + inner.waited)
    row = times_of(seconds, sums)
    assert sum(row[name] or 0.0 for name in (*spans.KINDS, "other")) == pytest.approx(seconds)
    assert (row["cpu"], row["stream"]) == (0, 0)
    assert row["busy_cpu"] == sums["cpu", 4].seconds and (row["other"] or 0.0) >= 0


def test_spans_in_backward_are_in_the_split(recorder: Recorder) -> None:
    """Backward of a GPU's tensors runs in a thread of torch's, for which the main thread waits."""

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            with recorder.span("cpu", 1):
                time.sleep(0.001)
            return grad

    out = Node.apply(torch.ones(2, requires_grad=True)).sum()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(threading.get_ident).result() not in recorder.threads
        pool.submit(out.backward).result()
    assert recorder.take()["cpu", 1].waited >= 0.001


def test_spans_that_never_end_harm_no_other(recorder: Recorder) -> None:
    with recorder.span("cpu", 0):
        recorder.span("wait", 0).begin()  # an exception came
    recorder.span("attention", 3).begin()
    sums = recorder.take()
    assert set(sums) == {("cpu", 0)} and sums["cpu", 0].seconds == sums["cpu", 0].waited
    with recorder.span("cpu", 1):
        pass
    assert set(recorder.take()) == {("cpu", 1)}


def test_nothing_is_taken_outside_of_steps() -> None:
    quiet = Recorder()
    with quiet.span("cpu", 0), quiet.device("stream", 0, object()):
        quiet.end(quiet.begin("cpu"))
        quiet.add("cpu", 0, 0.0, 1.0)
        quiet.expect(0, {"cpu": 1.0})
    assert quiet.take() == {}


def test_unknown_name_is_an_error(recorder: Recorder) -> None:
    with recorder.span("gpu", 0):
        pass
    with pytest.raises(ValueError, match="no span is called 'gpu'; names: attention, cpu, stream"):
        recorder.take()


def test_many_threads_and_many_spans_lose_nothing(recorder: Recorder) -> None:
    def work(layer: int) -> None:
        for _ in range(5000):
            with recorder.span("cpu", layer, bytes=1):
                pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    sums = recorder.take()
    assert [(sums["cpu", layer].count, sums["cpu", layer].bytes) for layer in range(4)] == [(5000, 5000)] * 4


def test_device_spans_are_read_when_they_are_over(passes: Callable[[float], None]) -> None:
    clock, seen, told, stream = Clock(), list[Interval](), list[float](), object()
    recorder = Recorder(clock.event)
    recorder.start(seen.append)
    recorder.on = True
    first = recorder.device("stream", 2, stream, bytes=100, flops=50)
    first.done = told.append
    with first:
        clock.now += 4.0
        passes(7.0)  # on the host; its clock and the GPU's are tied where the first span begins
    with recorder.device("copy_in", 2, stream):
        clock.now += 2.0
    clock.now -= 1.0  # the second is still under way
    assert told == []
    sums = recorder.take()
    assert set(sums) == {("stream", 2)} and told == [pytest.approx(4e-3)]
    one = sums["stream", 2]
    assert (one.count, one.bytes, one.flops, one.waited) == (1, 100, 50, 0.0)
    assert one.seconds == pytest.approx(4e-3)
    assert recorder.take() == {}
    clock.now += 1.0
    assert recorder.take()["copy_in", 2].seconds == pytest.approx(2e-3)
    assert [(each.name, each.row) for each in seen] == [("stream", "GPU"), ("copy_in", "PCIe in")]
    assert seen[0].begin == pytest.approx(100.0)
    assert seen[1].begin - seen[0].begin == pytest.approx(4e-3)
    made = clock.made
    with recorder.device("resident", 0, stream):
        clock.now += 1.0
    assert clock.made == made  # events are used again

    late = recorder.device("stream", 5, stream).begin()
    clock.now += 3.0
    late.end()
    clock.now -= 3.0
    assert set(recorder.take()) == {("resident", 0)}
    assert recorder.stop(wait=True)["stream", 5].seconds == pytest.approx(3e-3)


@pytest.mark.parametrize("stream", [None, HostStream()])
def test_device_spans_without_a_gpu_are_the_hosts(recorder: Recorder, stream: Any) -> None:
    told: list[float] = []
    with recorder.device("copy_in", 1, stream, bytes=8) as span:
        span.done = told.append
        time.sleep(0.001)
    found = recorder.take()["copy_in", 1]
    assert found.waited == found.seconds == told[0] >= 0.001 and found.bytes == 8


def test_end_of_a_failed_run_asks_no_gpu() -> None:
    clock = Clock()
    recorder = started(clock.event)
    with recorder.device("stream", 0, object()):
        clock.now += 5.0
    clock.now -= 5.0
    assert recorder.stop(wait=False) == {} and clock.now == 100.0


def test_profiler_sees_spans(recorder: Recorder) -> None:
    with recorder.span("cpu", 1):
        pass
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
        recorder.span("cpu", 7),
        recorder.device("optimizer"),
    ):
        torch.ones(3)
    names = {event.key for event in profile.key_averages()}
    assert {"ktft::cpu 7", "ktft::optimizer"} <= names and "ktft::cpu 1" not in names


def test_log_says_nothing_before_a_step() -> None:
    assert Since().take() == {}


@pytest.mark.parametrize(("fraction", "left"), [(1.0, 50), (0.5, 10), (0.2, 0)])
def test_room_on_a_gpu_is_that_at_its_peak(monkeypatch: pytest.MonkeyPatch, fraction: float, left: int) -> None:
    """Of 100 bytes others hold 10; this process reserved 70, used up to 40, and may be capped."""
    facts = {"is_available": True, "is_initialized": True, "mem_get_info": (20, 100)}
    facts |= {"memory_stats_as_nested_dict": statistics(70, peak=40), "get_per_process_memory_fraction": fraction}
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr("ktft.system.available_memory", lambda: 1234)
    now = memory_now()
    assert (now["gpu_bytes"], now["gpu_free_bytes"], now["ram_free_bytes"]) == (40, left, 1234)


# --- trace ------------------------------------------------------------------------------------------------------------


def events_of(path: Path) -> list[dict[str, Any]]:
    """Of a trace that may lack its end, as viewers read it."""
    text = path.read_text().rstrip()
    events: list[dict[str, Any]] = json.loads(text if text.endswith("]") else text + "]")
    for event in events:
        assert event["ph"] in ("M", "X") and isinstance(event["pid"], int)
        assert event["ph"] == "M" or (event["dur"] >= 0 and 0 <= event["tid"] < len(ROWS))
    return events


def test_trace_can_be_read_at_any_time_and_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    path.write_text("of an earlier run")
    written = Trace(path, steps=2)
    assert {event["ph"] for event in events_of(path)} == {"M"}
    now = time.perf_counter()
    for step in range(1, 5):
        begin = now + step
        written(Interval("cpu", 3, "CPU experts", begin, begin + 0.5, 2e9, 4e12))
        written(Interval("optimizer", None, "optimizer", begin + 0.5, begin + 0.6, 0, 0))
        if step == 3:  # a device span of step 2 that came late
            written(Interval("stream", 0, "GPU", begin - 0.2, begin + 0.1, 0, 0))
        with caplog.at_level(logging.INFO, "ktft"):
            written.step(step, begin, begin + 0.9)
        assert path.read_text().endswith("\n]\n") == (step > 2)
        spans_of = [event for event in events_of(path) if event["ph"] == "X"]
        assert [event["name"] for event in spans_of if event["cat"] == "step"] == ["step 1", "step 2"][:step]
    assert [event["name"] for event in spans_of if event["cat"] != "step"] == ["cpu 3", "optimizer"] * 2 + ["stream 0"]
    cpu = spans_of[0]
    assert cpu["args"] == {"layer": 3, "bytes": 2 * 10**9, "GB/s": 4.0, "flops": 4 * 10**12, "TFLOPS": 8.0}
    assert cpu["dur"] == pytest.approx(5e5) and ROWS[cpu["tid"]] == "CPU experts"
    assert f"{path} has 5 spans, and no later ones" in caplog.text


def test_trace_of_too_many_spans_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "MAX_EVENTS", 10)
    written = Trace(tmp_path / "trace.json")
    for _ in range(50):
        written(Interval("cpu", 0, "CPU experts", 1.0, 2.0, 0, 0))
    written.step(1, 1.0, 2.0)
    assert len([event for event in events_of(tmp_path / "trace.json") if event["ph"] == "X"]) == 10


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_full_disk_ends_the_trace_alone(caplog: pytest.LogCaptureFixture) -> None:
    written = Trace(Path("/dev/full"))
    written(Interval("cpu", 0, "CPU experts", 1.0, 2.0, 0, 0))
    written.step(1, 1.0, 2.0)
    written.close()
    assert "KTFT_TRACE: /dev/full ends here: No space left on device. Training goes on" in caplog.text


# --- attention --------------------------------------------------------------------------------------------------------


@pytest.fixture
def recording() -> Iterator[Recorder]:
    spans.RECORDER.start()
    spans.RECORDER.on = True
    yield spans.RECORDER
    spans.RECORDER.stop(wait=False)


@pytest.mark.parametrize("family", ["qwen3moe", "qwen3next", "qwen3vl"])
def test_attention_is_found_and_timed(family: str, tiny_checkpoint: Checkpoint, recording: Recorder) -> None:
    model = load(tiny_checkpoint(family), "int8").train()
    found = attention_modules(model)
    assert [layer for layer, _ in found] == [0, 1, 2]
    assert all("Attention" in type(module).__name__ or "DeltaNet" in type(module).__name__ for _, module in found)
    hooks = AttentionSpans(model)
    ids = torch.arange(3, 19)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    sums = recording.take()
    assert [sums["attention", layer].count for layer in range(3)] == [2] * 3
    hooks.close()
    model(input_ids=ids)
    assert not any(name == "attention" for name, _ in recording.take())


def test_attention_times_are_those_of_attention(
    recording: Recorder, passes: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward of a slow module, with an input that has a gradient and one that has none."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            passes(0.01)
            return x * weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            passes(0.02)
            return grad, grad.sum()

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, hidden_states: Tensor) -> tuple[Tensor, None]:
            if hidden_states.isnan().any():
                raise ValueError
            return Slow.apply(hidden_states, self.weight), None

    module = Attention()
    monkeypatch.setattr("ktft.train.attention.attention_modules", lambda model: [(5, module)])
    AttentionSpans(module)
    for input_grad in (False, True):
        x = torch.ones(3, requires_grad=input_grad)
        out = module(hidden_states=x * 1)[0]
        passes(0.05)
        out.sum().backward()
        found = recording.take()["attention", 5]
        assert found.count == 2 and found.waited == found.seconds == pytest.approx(0.03)
    with pytest.raises(ValueError):
        module(hidden_states=torch.tensor(float("nan")))
    assert recording.take()["attention", 5].count == 1


# --- as users do ------------------------------------------------------------------------------------------------------


def test_command_writes_a_trace(train_yaml: Callable[..., Any], fork_cli: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    config = train_yaml("dsv3", gradient_accumulation_steps=2, plot_loss=True)
    done = fork_cli(["llamafactory-cli", "train"], config, env={"KTFT_TRACE": str(path)})
    found = [event for event in events_of(path) if event["ph"] == "X"]
    assert [event["name"] for event in found if event["cat"] == "step"] == ["step 1", "step 2"]
    for layer in range(3):
        own = [event["cat"] for event in found if event.get("args", {}).get("layer") == layer]
        assert own.count("attention") >= 2 * 2 * 2, layer
        # A step's two batches go through the experts together
        assert own.count("cpu") == (0 if layer == 0 else own.count("attention") / 2)
    steps = [event for event in found if event["cat"] == "step"]
    for event in found:  # each within a step
        assert any(s["ts"] - 1 <= event["ts"] and event["ts"] + event["dur"] <= s["ts"] + s["dur"] + 1 for s in steps)
    assert f"{path} has {len(found) - 2} spans" in done.stdout
    assert "'ktft/cpu_s'" in done.stdout and "'ktft/ram_free_gib'" in done.stdout
    assert (tmp_path / "out" / "training_loss.png").stat().st_size > 0


def test_trace_that_cannot_be_written_ends_the_run_before_it_loads(
    train_yaml: Callable[..., Any], run_exp: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "missing" / "trace.json"
    monkeypatch.setenv("KTFT_TRACE", str(path))
    with pytest.raises(ValueError, match=r"KTFT_TRACE is '.*missing/trace.json', which cannot be written \(No such"):
        run_exp(train_yaml("qwen3moe", model_name_or_path=str(tmp_path)))
    assert not (tmp_path / "out").exists()

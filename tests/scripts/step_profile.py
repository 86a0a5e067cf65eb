"""Show where a training step's host time goes, and when a GPU idles: `python tests/scripts/step_profile.py`.

    step_profile.py bench [--tokens 512 --tokens 4096 --placement stream --format k4]
    step_profile.py train --directory DIR [--layers 6 --cutoff 2048]

`bench` trains the model of `ktft bench step` in this process; `train` lets LLaMA-Factory train a checkpoint written as
`train_large.py` does. After warm-up steps, each case prints the seconds of plain steps; then of steps in which a thread
samples every thread's stack each millisecond (functions by own and by cumulative time, for each thread); then of steps
under torch's profiler (kernels, launches, copies, idle time of the GPU, waits). Stacks and a trace for ui.perfetto.dev
go to `--output`. Without a GPU it runs on the CPU and emulates one (KTFT_EMULATE_GPU=1).
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("KTFT_EMULATE_GPU", "1")

PERIOD = 1e-3
Stack = tuple[str, ...]


class Sampler:
    """Sample the stacks of all threads every `PERIOD`. Without Python's lock it samples later, so long calls count."""

    def __init__(self) -> None:
        self.stacks: dict[str, Counter[Stack]] = {}
        self.samples = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        self.began = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.seconds = time.perf_counter() - self.began
        sys.setswitchinterval(self._interval)

    def _run(self) -> None:
        main = threading.main_thread().ident
        while not self._over.wait(PERIOD):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            self.samples += 1
            for ident, frame in sys._current_frames().items():
                if ident != self._thread.ident:
                    stack = _stack(frame)
                    # autograd's own threads are not Python's: they have no name, or "Dummy-1"
                    name = "main" if ident == main else names.get(ident, "backward")
                    name = "backward" if name.startswith("Dummy") else name
                    self.stacks.setdefault(name, Counter())[stack] += 1


def _stack(frame: FrameType | None) -> Stack:
    """The places of a stack, innermost first."""
    places = []
    while frame is not None:
        code = frame.f_code
        places.append(f"{_short(code.co_filename)}:{frame.f_lineno} {code.co_qualname}")
        frame = frame.f_back
    return tuple(places)


def _short(path: str) -> str:
    for mark in ("site-packages/", "dist-packages/", "/ktft/", "/lib/python3"):
        if mark in path:
            return ("ktft/" if mark == "/ktft/" else "") + path.split(mark)[-1]
    return path.rsplit("/", 1)[-1]


def show_samples(sampler: Sampler, steps: int, rows: int) -> None:
    """Print milliseconds a step: own time of lines, and cumulative time of functions."""
    per = 1e3 * sampler.seconds / max(sampler.samples, 1) / steps
    print(f"  {sampler.samples} samples, one each {1e3 * sampler.seconds / max(sampler.samples, 1):.2f} ms")
    for name, stacks in sorted(sampler.stacks.items(), key=lambda item: -sum(item[1].values())):
        own: Counter[str] = Counter()
        whole: Counter[str] = Counter()
        for stack, count in stacks.items():
            own[stack[0]] += count
            for place in {_function(place) for place in stack}:
                whole[place] += count
        total = sum(stacks.values())
        if total * per < 1.0 or _idle(own, total):
            continue
        print(f"  thread {name}: {total * per:.1f} ms a step with a stack")
        for title, counter in (("own", own), ("cumulative", whole)):
            print(f"   {title}:")
            for place, count in counter.most_common(rows):
                if count * per >= 0.2:
                    print(f"    {count * per:7.2f}  {place[-110:]}")


def _function(place: str) -> str:
    path, name = place.split(" ", 1)
    return f"{path.rsplit(':', 1)[0]} {name}"


def _idle(own: Counter[str], total: int) -> bool:
    """Whether a thread only waits for work."""
    place, count = own.most_common(1)[0]
    return count > 0.97 * total and ("threading.py" in place or "thread.py" in place or "selectors" in place)


def show_kernels(profile: Any, steps: int) -> None:
    """Print what torch's profiler saw the GPU do and the host call."""
    launches: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    spans: list[tuple[float, float]] = []
    copies: list[tuple[float, float]] = []
    for event in profile.events():
        device = event.device_type
        length = event.time_range.elapsed_us()
        if device == torch.autograd.DeviceType.CPU:
            launches[event.name] += 1
            seconds[event.name] += event.self_cpu_time_total
        elif not event.name.startswith(("ktft::", "ProfilerStep", "## ")):
            kernels[event.name] += length
            launches["gpu " + event.name] += 1
            whole = copies if "Memcpy HtoD" in event.name else spans
            whole.append((event.time_range.start, event.time_range.end))
    for title, found in (("kernels", spans), ("copies to the GPU", copies)):
        if found:
            busy, idle, gaps = _union(found)
            top = ", ".join(f"{gap / 1e3:.2f}" for gap in sorted(gaps, reverse=True)[:8])
            line = f"{len(found) / steps:.0f} a step, busy {busy / steps / 1e3:.2f} ms a step, idle between"
            print(f"  {title}: {line} {idle / steps / 1e3:.2f}; longest gaps {top} ms")
    print("  kernels by time, ms a step:")
    for name, length in kernels.most_common(14):
        print(f"    {length / steps / 1e3:7.2f} {launches['gpu ' + name] / steps:6.0f}x {name[:90]}")
    print("  host calls by own time, ms a step:")
    for name, length in seconds.most_common(32):
        print(f"    {length / steps / 1e3:7.2f} {launches[name] / steps:6.0f}x {name[:90]}")


def _union(spans: list[tuple[float, float]]) -> tuple[float, float, list[float]]:
    """The time that spans cover, the time between them, and each gap."""
    spans.sort()
    end, busy, gaps = spans[0][0], 0.0, []
    for begin, until in spans:
        if begin > end:
            gaps.append(begin - end)
        busy += max(0.0, until - max(begin, end))
        end = max(end, until)
    return busy, sum(gaps), gaps


@contextlib.contextmanager
def profiled(path: Path | None, steps: int) -> Iterator[None]:
    """Run steps under torch's profiler; the trace goes to `path`."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    show_kernels(profile, steps)
    if path is not None:
        profile.export_chrome_trace(str(path.with_suffix(".json")))
        with gzip.open(path.with_suffix(".json.gz"), "wb", 6) as file:
            file.write(path.with_suffix(".json").read_bytes())
        path.with_suffix(".json").unlink()


def keep_stacks(sampler: Sampler, path: Path | None, steps: int) -> None:
    """Write all stacks as JSON, in ms a step."""
    if path is None:
        return
    per = 1e3 * sampler.seconds / max(sampler.samples, 1) / steps
    found = {
        name: [[round(count * per, 4), list(stack)] for stack, count in stacks.most_common()]
        for name, stacks in sampler.stacks.items()
    }
    with gzip.open(path.with_suffix(".stacks.json.gz"), "wt") as file:
        json.dump(found, file)


def bench(args: argparse.Namespace) -> None:
    """Profile the model of `ktft bench step`."""
    from benchmarks.step.cases import Job, parse_step_shape
    from benchmarks.step.peers import RUNNERS

    shape = parse_step_shape(args.shape)
    ours = [("ktft", fmt, placement) for fmt in args.format for placement in args.placement]
    for runner, fmt, placement in [("without-experts", "", ""), *ours]:
        job = Job(runner, shape, args.layers or 2, tuple(args.tokens), "uniform", 8, True, fmt, placement)
        model = RUNNERS[runner](job)
        for tokens in args.tokens:
            title = f"{job.name}, {job.layers} layers, {tokens} tokens".strip()
            profile_steps(args, title, partial(model.step, tokens))
        del model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def profile_steps(args: argparse.Namespace, title: str, step: Callable[[], Any]) -> None:
    """Warm up, time, sample, profile."""
    print(f"\n=== {title}", flush=True)
    for _ in range(args.warm):
        step()
    times = [step() for _ in range(args.steps)]
    for part in ("forward", "backward", "optimizer", "step"):
        values = [1e3 * getattr(each, part) for each in times]
        print(f"  {part}: median {statistics.median(values):.2f} ms, least {min(values):.2f}")
    with Sampler() as sampler:
        for _ in range(args.steps):
            step()
    rows = args.rows if title.startswith("ktft") else 12
    show_samples(sampler, args.steps, rows)
    path = args.output / title.replace(", ", "-").replace(" ", "_") if args.output else None
    keep_stacks(sampler, path, args.steps)
    with profiled(path, 2):
        step()
        step()


def train(args: argparse.Namespace) -> None:
    """Profile LLaMA-Factory's own training, with the Trainer's callbacks."""
    import train_large

    from ktft.checkpoint.cache import MANIFEST

    large = train_large.arguments(
        ["--directory", str(args.directory), "--layers", str(args.layers or 6), "--cutoff", str(args.cutoff)]
        + ["--steps", str(args.warm + 2 * args.steps + 2), "--format", args.format[0], "--placement", args.placement[0]]
        + ["--micro-batches", str(args.micro_batches), "--gpu-expert-memory", args.gpu_expert_memory]
        + (["--hidden-size", "64", "--intermediate-size", "64", "--experts", "8", "--top-k", "2"] if args.tiny else [])
        + (["--vocabulary", "320"] if args.tiny else [])
    )
    os.environ["HF_HUB_OFFLINE"], os.environ["HF_DATASETS_CACHE"] = "1", str(args.directory / "cache")
    if not (args.directory / "model" / MANIFEST).is_file():
        train_large.write_checkpoint(large, args.directory / "model")
    train_large.write_data(large, args.directory / "data")
    settings = train_large.settings(large, args.directory)
    many = f"{large.micro_batches} x " if large.micro_batches > 1 else ""
    title = f"ktft train {large.format} {large.placement}, {large.layers} layers, {many}{large.cutoff} tokens"
    print(f"\n=== {title}", flush=True)

    from llamafactory.train.tuner import run_exp
    from transformers import TrainerCallback

    path = args.output / title.replace(", ", "-").replace(" ", "_") if args.output else None

    class Watch(TrainerCallback):
        """Starts and stops the measurements at the ends of steps."""

        def __init__(self) -> None:
            self.ends: list[float] = []
            self.stack = contextlib.ExitStack()

        def on_step_end(self, _args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.ends.append(time.perf_counter())
            number = state.global_step
            if number == args.warm + args.steps:
                plain = [b - a for a, b in zip(self.ends[args.warm - 1 : -1], self.ends[args.warm :], strict=True)]
                print(f"  step: median {1e3 * statistics.median(plain):.1f} ms, least {1e3 * min(plain):.1f}")
                self.sampler = self.stack.enter_context(Sampler())
            elif number == args.warm + 2 * args.steps:
                self.stack.close()
                show_samples(self.sampler, args.steps, args.rows)
                keep_stacks(self.sampler, path, args.steps)
                self.stack.enter_context(profiled(path, 2))
            elif number == args.warm + 2 * args.steps + 2:
                self.stack.close()

    run_exp(settings, callbacks=[Watch()])
    report = json.loads((args.directory / "out" / "ktft_report.json").read_text())
    train_large.show(large, report)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("bench", "train"))
    parser.add_argument("--shape", default="qwen3-30b-a3b", help="of bench: a name, or E,k,H,I")
    parser.add_argument("--layers", type=int, help="2 for bench, 6 for train")
    parser.add_argument("--tokens", type=int, action="append", help="of bench")
    parser.add_argument("--format", action="append")
    parser.add_argument("--placement", action="append")
    parser.add_argument("--warm", type=int, default=8, help="warm-up steps, which do not count")
    parser.add_argument("--steps", type=int, default=10, help="steps to time and to sample")
    parser.add_argument("--rows", type=int, default=25, help="of a table")
    parser.add_argument("--output", type=Path, help="directory for stacks and traces")
    parser.add_argument("--directory", type=Path, help="of train: for checkpoint, data and adapter")
    parser.add_argument("--cutoff", type=int, default=2048, help="of train: tokens a step")
    parser.add_argument("--micro-batches", type=int, default=1, help="of train: micro-batches a step")
    parser.add_argument("--gpu-expert-memory", default="0", help="of train")
    parser.add_argument("--tiny", action="store_true", help="of train: a tiny model, to try this script")
    args = parser.parse_args()
    args.tokens, args.format = args.tokens or [512], args.format or ["k4"]
    args.placement = args.placement or ["stream"]
    if args.output:
        args.output.mkdir(parents=True, exist_ok=True)
    return args


def main() -> int:
    args = arguments()
    {"bench": bench, "train": train}[args.what](args)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Shared by the scripts that measure: parts that may fail, random layers of any size, times, memory."""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

failed: list[str] = []


@contextmanager
def attempt(name: str) -> Iterator[None]:
    """A block that may fail: the error is printed, its name is added to `failed`, and the script goes on."""
    try:
        yield
    except Exception:
        failed.append(name)
        traceback.print_exc(file=sys.stdout)


@contextmanager
def part(name: str) -> Iterator[None]:
    """`attempt` with a title and the seconds that the block took."""
    print(f"\n== {name}", flush=True)
    begin = time.perf_counter()
    with attempt(name):
        yield
    print(f"   ({time.perf_counter() - begin:.1f} s)", flush=True)


def end() -> None:
    """Exit the script, with status 1 if a part failed."""
    print("\nfailed:", ", ".join(failed) or "nothing")
    sys.exit(bool(failed))


def random_layer(runtime: Any, fmt: str, experts: int, hidden: int, intermediate: int) -> Any:
    """An `ExpertLayer` that repeats a few experts, since packing all takes longer than what is measured."""
    from benchmarks.step.models import fill_experts
    from ktft.native import ExpertLayer

    sizes = {"num_experts": experts, "hidden_size": hidden, "intermediate_size": intermediate}
    layer = ExpertLayer(runtime, **sizes, format=fmt, name=f"{fmt} experts")
    fill_experts(layer)
    return layer


def random_lora(layer: Any, rank: int) -> Any:
    """fp32 adapters on all projections of a layer."""
    import torch
    from contract import make_lora

    return make_lora(layer.hidden_size, layer.intermediate_size, rank, torch.float32, experts=layer.num_experts)


def make_model(path: Path, experts: int, top_k: int, layers: int = 8, hidden_size: int = 1024) -> None:
    """Write a Qwen3-MoE checkpoint whose experts are nearly all of it."""
    import torch
    from tiny import write_checkpoint

    sizes = {"hidden_size": hidden_size, "moe_intermediate_size": 512, "num_hidden_layers": layers}
    torch.set_default_dtype(torch.bfloat16)
    write_checkpoint("qwen3moe", path, num_experts=experts, num_experts_per_tok=top_k, **sizes)
    torch.set_default_dtype(torch.float32)


def milliseconds(call: Callable[[], Any], repeats: int = 5, seconds: float = 0.0) -> float:
    """Median time of a call until the GPU has completed it, over at least `repeats` calls and `seconds`."""
    import torch

    call()
    torch.cuda.synchronize()
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < repeats or time.perf_counter() - began < seconds:
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(taken)


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a new process, so that its memory can be measured."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def memory(field: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (peak, file-mapped pages included) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])

"""Measure how fast experts are streamed to a GPU, at the shape of Qwen3-30B-A3B.

    python tests/scripts/cuda_stream.py [--formats int8 k4] [--tokens 512 4096 16384] [--threads 15]

Needs a CUDA GPU and about 4 GB of host memory. Prints for each format: seconds to lock a GB; the rate of copies from
locked memory, alone and while native threads compute; the lane's output and gradients compared with the native layer's;
the time of a layer's forward and backward with all experts streamed, with every other one, with a quarter resident, and
with copies begun ahead. A failed part is reported and the others still run; the exit status is 1 if any part failed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measuring import end, part, random_layer, random_lora

sys.path.insert(0, str(Path(__file__).parents[1]))
from contract import relative

from ktft import config, native
from ktft.lanes.gpu.lane import GpuLane
from ktft.lanes.gpu.residents import Residents, free_for_residents
from ktft.lanes.ops.interface import operations
from ktft.lanes.routes import Routes
from ktft.lora import ExpertLora
from ktft.native import ExpertLayer, cuda
from ktft.native.cuda import Rows

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, RANK = 128, 2048, 768, 8, 8
GB = 1e9


class Batch:
    """A layer's inputs on the device, buffers for its gradients, and calls of a lane with them."""

    def __init__(self, tokens: int, lora: ExpertLora, device: torch.device) -> None:
        self.index = torch.rand(tokens, EXPERTS).topk(TOP_K).indices
        self.hidden, self.grad = (torch.randn(tokens, HIDDEN, dtype=torch.bfloat16) for _ in range(2))
        self.weights, self.lora = torch.rand(tokens, TOP_K), lora
        counts = torch.bincount(self.index.flatten(), minlength=EXPERTS).tolist()
        self.counts, self.there = counts, [t.to(device) for t in (self.hidden, self.grad, self.weights)]
        self.routes: Routes = Routes(self.index.to(device), counts)
        self.out = torch.zeros(tokens, HIDDEN, device=device)
        self.grads = torch.zeros_like(self.out), torch.zeros(tokens, TOP_K, device=device)
        self.lora_grads = [torch.zeros(p.shape, pin_memory=True) for p in lora.parameters()]

    def forward(self, lane: GpuLane, layer: ExpertLayer, experts: list[int]) -> None:
        hidden, _, weights = self.there
        lane.forward(layer, experts, self.routes, hidden, weights, self.lora, self.out)

    def backward(self, lane: GpuLane, layer: ExpertLayer, experts: list[int]) -> None:
        hidden, grad, weights = self.there
        lane.backward(layer, experts, self.routes, hidden, grad, weights, self.lora, *self.grads, list(self.lora_grads))


def timed(work: Callable[[], object], settle: Callable[[], object], repeats: int = 7) -> tuple[float, float]:
    """Median seconds until a call's work is complete, and until the call itself returns."""
    whole, host = [], []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        host.append(time.perf_counter() - began)
        settle()
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - began)
    return statistics.median(whole[2:]), statistics.median(host[2:])


def lock(lane: GpuLane, layer: ExpertLayer) -> None:
    began = time.perf_counter()
    locked = lane.lock([layer])
    seconds = time.perf_counter() - began
    print(f"locked: {locked}, {layer.packed_bytes / GB:.3f} GB, {seconds / (layer.packed_bytes / GB):.3f} s/GB")
    print(f"refusals: {lane.transfer.locks.refusals}")


def copies(lane: GpuLane, layer: ExpertLayer, busy: ExpertLayer) -> float:
    """Print GB/s of copying a layer's packed bytes, alone and while the CPU is busy. Returns the first."""
    (piece, *_), experts = layer.slices(), 13
    buffer = torch.empty(2, experts * piece.expert_bytes, dtype=torch.uint8, device=lane.device)
    starts = range(0, EXPERTS - experts + 1, experts)
    total = len(starts) * experts * piece.expert_bytes

    def all_of_them() -> None:
        for i, first in enumerate(starts):
            target = Rows(piece.address, buffer[i % 2].data_ptr(), piece.expert_bytes)
            lane.transfer.copy_in(range(first, first + experts), [target])

    alone = total / timed(all_of_them, lane.transfer.into.synchronize)[0] / GB
    print(f"copies alone: {alone:.1f} GB/s")
    stop = threading.Event()
    calls: list[float] = []
    x, weights = torch.randn(512, HIDDEN).bfloat16(), torch.rand(512, TOP_K)
    index = torch.rand(512, EXPERTS).topk(TOP_K).indices

    def one_forward() -> float:
        began = time.perf_counter()
        busy.forward(x, index, weights, None, "none")
        return time.perf_counter() - began

    def compute() -> None:
        while not stop.is_set():
            calls.append(one_forward())

    compute_alone = [one_forward() for _ in range(3)]
    thread = threading.Thread(target=compute)
    thread.start()
    time.sleep(0.2)
    beside = total / timed(all_of_them, lane.transfer.into.synchronize, 20)[0] / GB
    stop.set()
    thread.join()
    print(
        f"copies beside {busy.runtime.threads} native threads: {beside:.1f} GB/s; a layer's forward at 512 tokens "
        f"took {min(compute_alone) * 1e3:.2f} ms alone, {statistics.median(calls) * 1e3:.2f} ms beside the copies"
    )
    return alone


def against_native(lane: GpuLane, layer: ExpertLayer, lora: ExpertLora) -> None:
    """Compare the lane with the native layer. The contract's limits are 0.5% for outputs and 1% for gradients."""
    batch = Batch(300, lora, lane.device)
    expected, saved = layer.forward(batch.hidden, batch.index, batch.weights, lora, "retain")
    wanted = layer.backward(saved, batch.grad, batch.hidden, batch.index, batch.weights, lora)
    experts = list(range(EXPERTS))
    batch.forward(lane, layer, experts)
    batch.backward(lane, layer, experts)
    lane.finish()
    out, hidden, weights = (each.cpu() for each in (batch.out, *batch.grads))
    print(f"output {relative(out, expected):.4%}, hidden {relative(hidden, wanted.hidden_states):.4%}, ")
    print(f"routing weights {relative(weights, wanted.top_k_weights):.4%}")
    worst = max(relative(mine, its) for mine, its in zip(batch.lora_grads, wanted.lora, strict=True))
    print(f"LoRA, the worst of {len(wanted.lora)}: {worst:.4%}")
    assert relative(out, expected) < 0.01 and worst < 0.02, "the lane and the native layer differ"
    first = batch.out.clone()
    batch.out.zero_()
    batch.forward(lane, layer, experts)
    print(f"the same again: {'bit for bit' if torch.equal(first, batch.out) else 'DIFFERENT'}")


def layer_times(lane: GpuLane, layer: ExpertLayer, batch: Batch, rate: float, label: str, share: int = 1) -> None:
    """Time a layer's forward and backward over every `share`-th expert."""
    experts = list(range(0, EXPERTS, share))
    tokens = len(batch.hidden)
    for name, call in (("forward", batch.forward), ("backward", batch.backward)):
        before = lane.transfer.copied_bytes
        call(lane, layer, experts)
        lane.finish()
        moved = lane.transfer.copied_bytes - before
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        seconds, host = timed(lambda call=call: call(lane, layer, experts), lane.finish)
        peak = torch.cuda.max_memory_allocated() - base
        reached = moved / seconds / GB
        print(
            f"T={tokens:6d} {label:21s} {name:8s} {seconds * 1e3:8.2f} ms  {moved / GB:.3f} GB at {reached:5.1f} GB/s "
            f"= {reached / rate:4.0%} of copies alone  host {host * 1e3:6.2f} ms  products take {peak / 2**20:5.0f} MiB"
        )


def ahead(lane: GpuLane, layer: ExpertLayer, batch: Batch) -> None:
    """Measure what beginning copies ahead saves, when they were complete before the forward."""
    experts = list(range(EXPERTS))

    def begin() -> None:
        lane.prefetch(layer, experts, batch.lora)
        lane.transfer.into.synchronize()

    for name, prepare in (("not ahead", lambda: None), ("ahead", begin)):
        taken = []
        for _ in range(9):
            prepare()
            torch.cuda.synchronize()
            began = time.perf_counter()
            batch.forward(lane, layer, experts)
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        print(f"T={len(batch.hidden)} forward, two chunks {name}: {statistics.median(taken[2:]) * 1e3:.2f} ms")


def neighbours(lane: GpuLane) -> None:
    """Check whether two tensors that share a page can both be locked, and that a freed tensor is unlocked."""
    driver, memory = cuda.driver(config.cuda_library()), torch.empty(1 << 20, dtype=torch.uint8)
    middle = memory.data_ptr() + 4096 * 50 + 64
    driver.register(lane.transfer.index, memory.data_ptr(), middle - memory.data_ptr())
    try:
        driver.register(lane.transfer.index, middle, 1 << 18)
        print("two that share a page: both can be locked")
        driver.unregister(lane.transfer.index, middle)
    except cuda.CudaError as error:
        print(f"two that share a page: the second is refused ({error})")
    driver.unregister(lane.transfer.index, memory.data_ptr())
    locks = lane.transfer.locks
    before, parameter = locks.locked_bytes, torch.nn.Parameter(torch.randn(1 << 20))
    assert locks.tensor(parameter), locks.refusals
    assert locks.locked_bytes - before == parameter.nbytes
    del parameter
    assert locks.locked_bytes == before, "a freed tensor is still locked"
    print("a freed tensor is unlocked")


def measure(fmt: str, tokens: list[int], threads: int) -> None:
    layer, busy = (random_layer(native.runtime(threads), fmt, EXPERTS, HIDDEN, INTERMEDIATE) for _ in range(2))
    lora = random_lora(layer, RANK)
    lane, rate = GpuLane("cuda"), 50.0
    print(f"{fmt}: {layer.packed_bytes / GB:.3f} GB a layer, {len(layer.slices())} slices, {layer.runtime.isa}")
    with part(f"{fmt}: locking"):
        lock(lane, layer)
    with part(f"{fmt}: copies"):
        rate = copies(lane, layer, busy)
    with part(f"{fmt}: against the native layer"):
        against_native(lane, layer, lora)
    for count in tokens:
        with part(f"{fmt}: T={count}"):
            batch = Batch(count, lora, lane.device)
            layer_times(lane, layer, batch, rate, "all streamed")
            layer_times(lane, layer, batch, rate, "every other streamed", 2)
            ahead(lane, layer, batch)
            lane.hold(None)
            residents = Residents(lane, layer.packed_bytes // 4, [layer])
            residents.observe(layer, batch.counts)
            began = time.perf_counter()
            residents.adapt()
            lane.transfer.synchronize()
            seconds = time.perf_counter() - began
            print(f"{len(residents.slots(layer))} residents, {residents.bytes / GB:.3f} GB, in {seconds * 1e3:.1f} ms")
            layer_times(lane, layer, batch, rate, "a quarter resident")
            if count == tokens[0]:
                against_native(lane, layer, lora)
            lane.hold(None)
            del residents, batch
            print(f"VRAM of the lane's buffers: {lane.bytes / 2**20:.0f} MiB")
    with part(f"{fmt}: what residents could have"):
        print(f"{free_for_residents(lane) / GB:.1f} GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--formats", nargs="+", default=["int8", "k4"], choices=config.EXPERT_FORMATS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 4096, 16384])
    parser.add_argument("--threads", type=int, default=15)
    given = parser.parse_args()
    try:
        cuda.driver(config.cuda_library())
    except cuda.CudaError as error:
        sys.exit(f"no GPU: {error}")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, operations: {operations(torch.device('cuda'))}")
    torch.set_grad_enabled(False)
    with part("locking"):
        neighbours(GpuLane("cuda"))
    for fmt in given.formats:
        with part(fmt):
            measure(fmt, given.tokens, given.threads)
    end()


if __name__ == "__main__":
    main()

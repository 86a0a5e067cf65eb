"""kt-kernel's AMX experts (KTransformers), if it is installed: inference without LoRA, fine-tuning with it.

Its threads spin. With one per CPU they preempt each other if other processes run, so several counts are tried on the
largest batch and the fastest is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from importlib import import_module
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from benchmarks.layers import Batch
from benchmarks.peer import Job, Peer
from ktft.config import PROJECTIONS

MODES = {"bf16": "AMXBF16", "int8": "AMXInt8"}  # ktft format -> prefix of the peer's class names
TRIALS = 3
# kt-kernel takes adapters and returns their gradients in this order.
LORA_NAMES = tuple(f"{name.removesuffix('_proj')}_lora_{part}" for name in PROJECTIONS for part in "ab")


def thread_counts(threads: int) -> list[int]:
    """The thread counts to try: all threads and some smaller counts, the largest first."""
    return sorted({threads, max(1, threads - 1), max(1, threads * 3 // 4), max(1, threads // 2)}, reverse=True)


class KtRunner:
    """One kt-kernel layer with its own thread pool."""

    def __init__(self, ext: Any, job: Job, threads: int) -> None:
        self.has_backward = job.lora is not None
        self._case, self._int8 = job.case, job.case.format == "int8"
        config = ext.WorkerPoolConfig()
        config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 1, [0], [threads]
        self._pool = ext.CPUInfer(config)
        # The peer holds addresses only, so these tensors must live as long as it does.
        self._map = torch.arange(job.case.shape.num_experts)
        self._count = torch.zeros(1, dtype=torch.int32)
        self._lora: list[Tensor] = []
        self._grads: list[Tensor] = []
        make = self._make_sft if self.has_backward else self._make_inference
        self._moes = cycle([make(ext, job) for _ in range(job.copies)])

    def _configure(self, config: Any, job: Job) -> Any:
        config.max_len = max(len(job.batch.x), 1)
        config.physical_to_logical_map, config.pool = self._map.data_ptr(), self._pool.backend_
        for name in PROJECTIONS:
            setattr(config, name, job.weights[name].data_ptr())
        return config

    def _make_inference(self, ext: Any, job: Job) -> Any:
        s = job.case.shape
        config = ext.moe.MOEConfig(s.num_experts, s.top_k, s.hidden_size, s.intermediate_size, 0)
        moe = getattr(ext.moe, f"{MODES[job.case.format]}_MOE")(self._configure(config, job))
        self._pool.submit(moe.load_weights_task())
        self._pool.sync()
        return moe

    def _make_sft(self, ext: Any, job: Job) -> Any:
        s, lora = job.case.shape, job.lora
        assert lora is not None
        config = self._configure(ext.moe.MOESFTConfig(s.num_experts, s.top_k, s.hidden_size, s.intermediate_size), job)
        config.max_cache_depth, config.layer_idx, config.lora_rank = 1, 0, job.case.rank
        config.lora_alpha = float(job.case.rank)
        config.full_weight_grad = config.share_backward_bb = config.share_cache_pool = False
        config.authoritative_optimizer_grads = self._int8
        if not self._lora:
            self._lora = [t.detach().bfloat16() for n in PROJECTIONS for t in (lora.pairs[n].a, lora.pairs[n].b)]
            self._grads = [torch.zeros_like(tensor) for tensor in self._lora]
        for name, tensor in zip(LORA_NAMES, self._lora, strict=True):
            setattr(config, name, tensor.data_ptr())
        moe = getattr(ext.moe, f"{MODES[job.case.format]}_SFT_MOE")(config)
        moe.load_weights()
        return moe

    def _inputs(self, batch: Batch, out: Tensor) -> tuple[int, ...]:
        self._count[0] = len(batch.x)
        tensors = (batch.index, batch.weights, batch.x, out)
        return (self._count.data_ptr(), self._case.shape.top_k, *(tensor.data_ptr() for tensor in tensors))

    def forward(self, batch: Batch) -> Tensor:
        out = torch.empty_like(batch.x)
        if self.has_backward:
            next(self._moes).forward_sft(*self._inputs(batch, out), False)
        else:
            self._pool.submit(next(self._moes).forward_task(*self._inputs(batch, out), False))
            self._pool.sync()
        return out

    def train(self, batch: Batch) -> Callable[[], object]:
        """Forward, keeping activations; the backward gives gradients of everything ktft's gives."""
        out, grad_x = torch.empty_like(batch.x), torch.empty_like(batch.x)
        grad_weights = torch.empty_like(batch.weights)
        moe = next(self._moes)
        moe.forward_sft(*self._inputs(batch, out), True)
        addresses = [tensor.data_ptr() for tensor in (batch.grad_output, grad_x, *self._grads, grad_weights)]
        # Base weight gradients: none. INT8's backward takes two arguments more.
        extra = (False, 1.0) if self._int8 else ()
        return lambda: (moe.backward(*addresses, 0, 0, 0, *extra), grad_x, grad_weights)


def _trial(ext: Any, job: Job, threads: int) -> float:
    """Seconds per step with this number of threads, which end with the trial."""
    runner, batch = KtRunner(ext, job, threads), job.batch
    times = []
    for _ in range(TRIALS + 1):
        start = time.perf_counter()
        if runner.has_backward:
            runner.train(batch)()
        else:
            runner.forward(batch)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _absent() -> str:
    """The package must import, and its build for this CPU must have the AMX experts."""
    try:
        ext = import_module("kt_kernel").kt_kernel_ext
    except Exception as error:
        # It probes the CPU and loads a binary for it: many things can be missing.
        return f"kt_kernel does not import: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    if not hasattr(ext.moe, "AMXBF16_SFT_MOE"):
        return "kt_kernel's build for this CPU has no AMX experts"
    return ""


def _make(job: Job) -> KtRunner:
    """The fastest of several thread counts. Raises ValueError for formats and sizes the peer lacks."""
    if job.case.format not in MODES:
        raise ValueError(f"kt-kernel has no counterpart of {job.case.format}")
    ext = import_module("kt_kernel").kt_kernel_ext
    try:
        times = {threads: _trial(ext, job, threads) for threads in thread_counts(job.threads)}
        return KtRunner(ext, job, min(times, key=lambda threads: times[threads]))
    except RuntimeError as error:
        raise ValueError(f"kt-kernel refuses this layer: {error}") from error


KT_KERNEL = Peer("kt-kernel", _make, _absent)

"""The runners that train a model. Each makes it from a `Job` in its own worker process and times steps."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.machine import not_installed
from benchmarks.step.cases import ORDERS, VOCABULARY, Job, Times
from benchmarks.step.models import fix_routing, ktft_model, set_checkpointing, skipped_model, stock_model
from ktft import system
from ktft.config import emulate_gpu
from ktft.device import accelerator, device_of
from ktft.lanes.decide.placer import usable_placement
from ktft.model.experts import find_experts
from ktft.model.layer_order import LayerOrder
from ktft.model.lockstep import Lockstep
from ktft.ranks.launch import Launch
from ktft.train.optimizer import AdamW
from ktft.train.parallel import average_gradients, split_parameters

LEARNING_RATE = 1e-4


def device_here() -> torch.device:
    """This process's GPU if there is one, else the CPU."""
    gpu = accelerator()
    if gpu is None:
        return torch.device("cpu")
    if (launch := Launch.of_environment()).ranks > 1:
        torch.cuda.set_device(launch.local_rank)
    return gpu.indexed()


def join(device: torch.device) -> None:
    """Meet the other processes of this job, if there are any."""
    launch = Launch.of_environment()
    if launch.ranks > 1 and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")


def clock(device: torch.device) -> float:
    """The time in seconds after the GPU has finished all work."""
    device_of(device).synchronize()
    return time.perf_counter()


def timed(
    device: torch.device, forward: Callable[[], Tensor], backward: Callable[[Tensor], Any], update: Callable[[], Any]
) -> Times:
    """Times one step's parts.

    Raises:
        RuntimeError: the loss is not finite.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = clock(device)
    loss = forward()
    middle = clock(device)
    backward(loss)
    late = clock(device)
    update()
    end = clock(device)
    if not bool(torch.isfinite(loss)):
        raise RuntimeError(f"the loss is {float(loss)}")
    vram = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return Times(middle - began, late - middle, end - late, vram, rss())


def rss() -> int:
    """Bytes of resident memory of this process now."""
    lines = (system.read(system.ROOT / "proc/self/status") or "").splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:")), 0)


def token_ids(tokens: int, device: torch.device) -> Tensor:
    """One sequence, `[1, T]`."""
    return torch.randint(VOCABULARY, (1, tokens), device=device)


class Runner(ABC):
    """One row of `RUNNERS`. `note` says what its figures contain or lack compared with others'."""

    name: ClassVar[str]
    note: ClassVar[str] = ""

    @staticmethod
    def absent() -> str:
        """Why it cannot run here; empty if it can."""
        return ""

    @abstractmethod
    def __init__(self, job: Job) -> None:
        """Make the model, ready to step. Raises ValueError with the reason if this job cannot run."""

    @abstractmethod
    def step(self, tokens: int) -> Times:
        """One training step of one sequence."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """`device`, and for ktft also `isa`, `threads` and `lanes`."""


class ModelRunner(Runner):
    """Trains a model whose parameters torch knows, as transformers' Trainer does with bf16: autocast, AdamW."""

    autocast: ClassVar[bool] = True
    by_layer = False
    """Whether even one batch goes forward and backward layer by layer, in `accumulate`."""
    make: Callable[[Job, torch.device], Any]
    """Makes the model on a device."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(0)
        self.job, self.device = job, device_here()
        join(self.device)
        if job.threads:
            torch.set_num_threads(job.threads)
        self.model = self.make(job, self.device)
        set_checkpointing(self.model, job)
        fix_routing(self.model, job, self.device)
        self.optimizer = self.make_optimizer([each for each in self.model.parameters() if each.requires_grad])
        if job.gpus > 1:
            self.model = self.together()

    def together(self) -> Any:
        """The model, whose gradients are averaged over the processes, experts' excepted."""
        split = split_parameters(self.model)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, list(split))
        return DistributedDataParallel(self.model, [self.device] if self.device.type == "cuda" else None)

    def make_optimizer(self, trained: list[Tensor]) -> torch.optim.Optimizer:
        """The optimizer of the trained parameters."""
        return AdamW(trained, lr=LEARNING_RATE)

    def backward(self, loss: Tensor) -> None:
        """The loss's backward."""
        loss.backward()

    def update(self) -> None:
        """The optimizer's step."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, tokens: int) -> Times:
        batches = [token_ids(tokens, self.device) for _ in range(self.job.micro_batches)]
        if len(batches) == 1 and not self.by_layer:
            return timed(self.device, lambda: self.forward(batches[0]), self.backward, self.update)
        return timed(self.device, lambda: self.accumulate(batches), lambda _: None, self.update)

    def forward(self, ids: Tensor) -> Tensor:
        """A micro-batch's loss."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss

    def train(self, ids: Tensor) -> Tensor:
        """A micro-batch's part of the loss, after its forward and backward."""
        loss = self.forward(ids) / self.job.micro_batches
        self.backward(loss)
        return loss.detach()

    def accumulate(self, batches: list[Tensor]) -> Tensor:
        """The loss of a step's micro-batches, after their forward and backward, one by one."""
        return torch.stack([self.train(ids) for ids in batches]).sum()

    def facts(self) -> dict[str, Any]:
        return {"device": device_of(self.device).name()}


class Ktft(ModelRunner):
    """ktft, LoRA on attention and every expert."""

    name: ClassVar[str] = "ktft"
    make = staticmethod(ktft_model)

    def __init__(self, job: Job) -> None:
        self.placement = usable_placement(job.settings(), cuda=torch.cuda.is_available() or emulate_gpu())
        super().__init__(job)
        self.order = LayerOrder(self.model, Lockstep(self.device), activation_memory=job.gpu_activation_memory)
        self.by_layer = self.order.pays_alone

    def make_optimizer(self, trained: list[Tensor]) -> torch.optim.Optimizer:
        """The optimizer as ktft's Trainer makes it."""
        experts = list(find_experts(self.model).values())
        self.runtime = experts[0].layer.runtime
        self.lanes = next((module.laned.lanes for module in experts if module.laned is not None), None)
        return AdamW(trained, lr=LEARNING_RATE, runtime=self.runtime)

    def accumulate(self, batches: list[Tensor]) -> Tensor:
        """The loss of a step's micro-batches, after their forward and backward, in the job's order."""
        together = len(batches) if self.job.order == ORDERS[0] else 1
        if together == 1 and not self.by_layer:
            return super().accumulate(batches)
        self.order.stored.begin_step()
        with self.model.no_sync() if self.job.gpus > 1 else nullcontext():
            works = [partial(self.train, ids) for ids in batches]
            losses = []
            for first in range(0, len(works), together):
                group = works[first : first + together]
                tokens = sum(ids.numel() for ids in batches[first : first + together])
                stored = self.order.stored.fitting(tokens) if self.job.gpus == 1 else 0
                losses += self.order.run(group, self.order.lockstep.seeded(len(group)), tokens, stored)
        if self.job.gpus > 1:
            average_gradients(self.model)
        return torch.stack(losses).sum()

    def update(self) -> None:
        """The optimizer's step, and what ktft does between steps."""
        super().update()
        if self.lanes is not None:
            self.lanes.end_step()

    def facts(self) -> dict[str, Any]:
        """Of these, `lanes` is the placement that this machine can do."""
        return super().facts() | {"isa": self.runtime.isa, "threads": self.runtime.threads, "lanes": self.placement}


class Skipped(ModelRunner):
    """The model without experts, which shows the cost of a step around them."""

    name: ClassVar[str] = "without-experts"
    make = staticmethod(skipped_model)


class HfResident(ModelRunner):
    """transformers alone, everything on the GPU: the ceiling."""

    name: ClassVar[str] = "hf-resident"
    note: ClassVar[str] = "bf16 weights all on the GPU, grouped products, LoRA on attention"
    make = staticmethod(stock_model)


def missing_for_gpu(*packages: str) -> str:
    """Why a peer that needs a GPU and packages cannot run; empty if it can."""
    return not_installed(*packages) if torch.cuda.is_available() else "needs a GPU"

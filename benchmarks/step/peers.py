"""Other ways to train what does not fit a GPU, each at its best, and the table of all that can be timed."""

from __future__ import annotations

import importlib.util
import os
import time
from abc import abstractmethod
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks import layers
from benchmarks.cases import Case
from benchmarks.peer import Job as KernelJob
from benchmarks.peer_kt import KT_KERNEL
from benchmarks.process import free_port
from benchmarks.step.cases import Job, Times
from benchmarks.step.models import fix_routing, set_checkpointing, stock_model
from benchmarks.step.runners import (
    LEARNING_RATE,
    HfResident,
    Ktft,
    ModelRunner,
    Runner,
    Skipped,
    device_here,
    missing_for_gpu,
    rss,
)
from ktft import native


class Offload(ModelRunner):
    """A model in CPU memory from which a library fetches what it needs, in this one process."""

    note: ClassVar[str] = "bf16 weights, LoRA on attention alone"
    autocast: ClassVar[bool] = False

    def __init__(self, job: Job) -> None:
        # What a launcher would set, for one process on a port that is free
        if job.gpus == 1:
            launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
            os.environ.update(launched, MASTER_PORT=str(free_port()))
        torch.manual_seed(0)
        self.job, self.device = job, device_here()
        self.model = stock_model(job, torch.device("cpu"))
        self.wrap(job)

    @abstractmethod
    def wrap(self, job: Job) -> None:
        """Hand the model to the library, and make the optimizer."""

    def trained(self) -> list[Tensor]:
        """The parameters that the model trains."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]


class Zero3Offload(Offload):
    """DeepSpeed ZeRO-3 with parameters and optimizer in pinned CPU memory.

    A MoE block is a leaf module, fetched whole and at once; buckets and limits let it hold one layer and fetch another.
    """

    name: ClassVar[str] = "zero3-offload"

    @staticmethod
    def absent() -> str:
        return missing_for_gpu("deepspeed")

    def wrap(self, job: Job) -> None:
        os.environ.setdefault("DS_BUILD_OPS", "0")
        import deepspeed
        from deepspeed.utils import set_z3_leaf_modules

        set_checkpointing(self.model, job, use_reentrant=False)
        blocks = {type(module) for name, module in self.model.named_modules() if name.endswith(".mlp")}
        set_z3_leaf_modules(self.model, list(blocks))
        self.model, *_ = deepspeed.initialize(
            model=self.model, model_parameters=self.trained(), config=self.config(job)
        )
        fix_routing(self.model.module, job, self.device)

    @staticmethod
    def config(job: Job) -> dict[str, Any]:
        """DeepSpeed's."""
        layer = 4 * job.shape.num_experts * job.shape.hidden_size * job.shape.intermediate_size
        offload = {"device": "cpu", "pin_memory": True}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": job.micro_batches,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}},
            "zero_optimization": {
                "stage": 3,
                "offload_param": offload,
                "offload_optimizer": offload,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "stage3_prefetch_bucket_size": 2 * layer,
                "stage3_max_live_parameters": 3 * layer,
                "stage3_max_reuse_distance": 1_000_000,
                "stage3_param_persistence_threshold": 100_000,
            },
        }

    def accumulate(self, batches: list[Tensor]) -> Tensor:
        """As the base class. DeepSpeed divides the losses itself, and counts micro-batches by calls of `step`."""
        losses = []
        for number, ids in enumerate(batches, 1):
            losses.append(self.forward(ids))
            self.backward(losses[-1])
            if number < len(batches):
                self.model.step()
        return torch.stack(losses).mean()

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss)

    def update(self) -> None:
        self.model.step()


class Fsdp2Offload(Offload):
    """torch's FSDP2 with parameters in pinned CPU memory, the next layer's copied while one computes."""

    name: ClassVar[str] = "fsdp2-offload"

    @staticmethod
    def absent() -> str:
        return missing_for_gpu()

    def wrap(self, job: Job) -> None:
        import torch.distributed as dist
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        on_gpu = self.device.type == "cuda"
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", rank=int(os.environ["RANK"]),
                                world_size=job.gpus)  # fmt: skip
        mesh = dist.init_device_mesh(self.device.type, (job.gpus,))
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        set_checkpointing(self.model, job, use_reentrant=False)
        for buffer in self.model.buffers():
            buffer.data = buffer.data.to(self.device)
        offload = CPUOffloadPolicy(pin_memory=True) if on_gpu else OffloadPolicy()
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        blocks = [name for name, _ in self.model.named_modules() if name.endswith(".mlp")]
        decoder = [self.model.get_submodule(name.rpartition(".")[0]) for name in blocks]
        for module in (*decoder, self.model):
            fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
        for earlier, later in pairwise(decoder):
            earlier.set_modules_to_forward_prefetch([later])
            later.set_modules_to_backward_prefetch([earlier])
        fix_routing(self.model, job, self.device)
        self.optimizer = torch.optim.AdamW(self.trained(), lr=LEARNING_RATE)


class KtKernelLayer(Runner):
    """kt-kernel's fine-tuning experts, one layer's forward and backward on the CPU at its best thread count."""

    name: ClassVar[str] = "kt-kernel"
    note: ClassVar[str] = "the experts' kernels of one layer alone, its INT8 with LoRA; no attention, no optimizer"

    @staticmethod
    def absent() -> str:
        return "" if importlib.util.find_spec("kt_kernel") else "kt_kernel is not installed"

    def __init__(self, job: Job) -> None:
        if reason := KT_KERNEL.absent():
            raise ValueError(reason)
        if job.micro_batches > 1:
            raise ValueError("it is timed with one micro-batch a step")
        torch.manual_seed(0)
        runtime = native.runtime(job.threads)
        torch.set_num_threads(runtime.threads)
        cases = {tokens: Case(job.shape, tokens, job.routing, "int8", job.rank) for tokens in job.tokens}
        self.batches = {tokens: layers.make_batch(case) for tokens, case in cases.items()}
        largest = max(job.tokens)
        weights, lora = layers.make_weights(job.shape), layers.make_lora(job.shape, job.rank)
        ktft = layers.Ktft(job.shape, "int8", runtime, weights, lora)
        self.layer = KT_KERNEL.make(KernelJob(cases[largest], weights, lora, self.batches[largest], ktft))

    def step(self, tokens: int) -> Times:
        began = time.perf_counter()
        backward = self.layer.train(self.batches[tokens])
        middle = time.perf_counter()
        backward()
        return Times(middle - began, time.perf_counter() - middle, 0.0, 0, rss())

    def facts(self) -> dict[str, Any]:
        return {"device": "cpu"}


PEERS: tuple[type[Runner], ...] = (Zero3Offload, Fsdp2Offload, KtKernelLayer, HfResident)
_ALL: tuple[type[Runner], ...] = (Ktft, Skipped, *PEERS)
RUNNERS = {runner.name: runner for runner in _ALL}
ONE_LAYER = KtKernelLayer.name
"""Its step is of one layer, whatever the job says."""

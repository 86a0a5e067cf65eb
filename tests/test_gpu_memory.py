"""A limit on GPU memory, which a process keeps, and what it says when memory runs out."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from fake_cuda import statistics
from given import Checkpoint, RunCli, TrainYaml
from host_graphs import record_on_host
from lanes import no_calibration
from torch import Tensor
from transformers import Trainer

from ktft import errors
from ktft.device import OUTSIDE, Cuda, Device, device_of
from ktft.lanes.gpu import lane as lane_module
from ktft.lanes.gpu.lane import GpuLane
from ktft.lanes.gpu.residents import free_for_residents
from ktft.model import gpu_memory as gpu_memory_module
from ktft.model import quantizer
from ktft.model.gpu_memory import hold_gpu_memory, require_gpu_memory
from ktft.model.shortage import GpuUse
from ktft.train.optimizer import AdamW
from ktft.train.out_of_memory import gpu_use, told

__all__ = ["no_calibration"]

pytestmark = pytest.mark.usefixtures("no_calibration")
GIB = 1 << 30
SAID = (
    "CUDA out of memory. Tried to allocate 3.50 GiB. GPU 0 has a total capacity of 22.00 GiB of which 1.00 GiB is free."
)


def cpu() -> Device:
    """The one that is in use now: other tests make `device_of` forget its devices."""
    return device_of(torch.device("cpu"))


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU's torch does a GPU's part, without a limit after the test."""
    monkeypatch.setenv("KTFT_EMULATE_GPU", "1")
    yield
    cpu().hold_to(None)


# --- the limit --------------------------------------------------------------------------------------------------------


class FakeCuda:
    """torch.cuda's memory of one GPU with 24 GiB, of which the driver holds some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, used: int) -> None:
        self.used, self.reserved, self.allocated, self.fraction, self.set = used, 0, 0, 1.0, list[float]()
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (24 * GIB - self.used - self.reserved, 24 * GIB))
        monkeypatch.setattr(
            torch.cuda, "memory_stats_as_nested_dict", lambda _: statistics(self.reserved, self.allocated)
        )
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: self.fraction)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.cap)

    def cap(self, fraction: float, index: int) -> None:
        assert index == 0
        self.fraction = fraction
        self.set.append(fraction)


@pytest.mark.parametrize(("used", "outside"), [(OUTSIDE // 4, OUTSIDE), (700 << 20, 700 << 20), (9 * GIB, 2 * OUTSIDE)])
def test_torch_may_take_what_the_limit_leaves_beside_the_driver(
    monkeypatch: pytest.MonkeyPatch, used: int, outside: int
) -> None:
    """The difference may be another process's memory, or not yet all of the driver's."""
    fake, device = FakeCuda(monkeypatch, used), Cuda(torch.device("cuda", 0))
    device.hold_to(None)
    assert fake.set == []  # a limit of the program's own stays
    device.hold_to(10 * GIB)
    fake.reserved = 4 * GIB
    free = device.free_bytes()
    assert free == pytest.approx((6 * GIB - outside, 10 * GIB - outside), abs=100)
    lane = GpuLane("cpu")
    monkeypatch.setattr(lane, "device", torch.device("cuda", 0))
    assert free_for_residents(lane) == pytest.approx(5 * GIB - outside, abs=100)
    device.hold_to(None)
    assert fake.fraction == 1.0


def test_torchs_memory_grows_in_place_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    new, old = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    for name in (new, old):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # so that it is absent after the test as well
    Cuda.prepare()
    assert new not in os.environ or torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for initialized, chosen, expected in (
        (True, None, None),
        (False, (old, "backend:native"), None),
        (False, (new, "x"), "x"),
        (False, None, "expandable_segments:True"),
    ):
        for name in (new, old):
            monkeypatch.delenv(name, raising=False)
        if chosen is not None:
            monkeypatch.setenv(*chosen)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda given=initialized: given)
        Cuda.prepare()
        assert os.environ.get(new) == expected


def test_a_limit_that_cannot_be_is_refused_before_loading(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, base: Path
) -> None:
    def refused(size: str) -> str:
        with pytest.raises(ValueError, match="gpu_memory is") as caught:
            runs.adapted(base, settings={"gpu_memory": size})
        return str(caught.value)

    assert "need 0.3 MiB of it" in (said := refused("1K")) and "dense_placement: host" in said
    assert cpu().free_bytes() is None
    monkeypatch.setattr(Device, "total_bytes", lambda self: 2 * GIB)
    assert "gpu_memory is 3.0 GiB, but cpu has 2.0 GiB; lower it" in refused("3G")
    assert "need 600.3 MiB of it" in refused("500M")


def test_a_model_brings_its_limit(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.adapted(base, settings={"gpu_memory": "2G"})
    assert cpu().free_bytes() == (2 * GIB, 2 * GIB)
    runs.adapted(base)
    assert cpu().free_bytes() is None
    monkeypatch.delenv("KTFT_EMULATE_GPU")
    monkeypatch.setattr(gpu_memory_module, "accelerator", lambda: None)
    hold_gpu_memory(1, weights=GIB)  # there is nothing to hold


def test_weights_that_the_gpu_has_no_room_for_are_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, device = FakeCuda(monkeypatch, 20 * GIB), Cuda(torch.device("cuda", 0))
    monkeypatch.setattr(gpu_memory_module, "accelerator", lambda: device)
    monkeypatch.setattr(Cuda, "name", lambda self: "a small GPU")
    fake.reserved, fake.allocated = 2 * GIB, 1 * GIB  # of an earlier model's, of which half is free again
    require_gpu_memory(3 * GIB)
    with pytest.raises(ValueError, match="dense_placement: host") as caught:
        require_gpu_memory(4 * GIB)
    said = "what is not a routed expert needs 4.0 GiB of a small GPU's memory, 3.0 GiB are available: 1.0 GiB too few."
    assert str(caught.value).startswith(said)
    fake.used, fake.reserved = 24 * GIB, 1 * GIB
    monkeypatch.setattr(quantizer, "is_on_cpu", lambda device_map: False)
    with pytest.raises(ValueError, match=r"what is not a routed expert needs 0\.\d MiB"):  # before a weight is read
        runs.adapted(base)


def test_a_command_within_a_limit(train_yaml: TrainYaml, fork_cli: RunCli, tmp_path: Path) -> None:
    """Under a limit too small for what waits for backward it waits in host memory, and the losses are the same."""
    losses = []
    for number, limit in enumerate(({}, {"gpu_memory": "1G"})):
        out = tmp_path / str(number)
        own = {"expert_format": "bf16", "threads": 1, "micro_batches_together": 2, "placement": "stream"}
        config = train_yaml("dsv3", gradient_accumulation_steps=2, kt_config=own | limit, output_dir=str(out))
        said = fork_cli(["llamafactory-cli", "train"], config, env={"KTFT_EMULATE_GPU": "1"}).stdout
        losses.append([each["loss"] for each in runs.logged(out)])
        assert ("what waits for backward waits in host memory" in said) == bool(limit)
    assert losses[0] == losses[1] and len(losses[0]) == 2
    config["kt_config"] |= {"gpu_memory": "100K"}
    done = fork_cli(["llamafactory-cli", "train"], config, env={"KTFT_EMULATE_GPU": "1"}, check=False)
    assert done.returncode == 2 and "error: gpu_memory is 100.0 KiB" in done.stdout.replace("0.1 MiB", "100.0 KiB")


# --- no memory left ---------------------------------------------------------------------------------------------------


def out_of_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError(SAID)


class NoMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        out_of_memory()


class Failing(Trainer):
    """Runs out of memory in its second step, in the pass `part`."""

    part = ""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if self.part == "forward" and self.state.global_step == 1:
            out_of_memory()
        return NoMemory.apply(loss) if self.part == "backward" and self.state.global_step == 1 else loss


def training(path: Path, out: Path, part: str, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Trainer:
    """A training that saves each step and fails in the second one."""
    step, lane = AdamW.step, lane_module.chunk_backward
    trainer = runs.trainer(path, out, cls=Failing, save_steps=1, gradient_checkpointing=True, **settings)
    trainer.part = part

    def failing(original: Any) -> Any:
        return lambda *given, **named: out_of_memory() if trainer.state.global_step == 1 else original(*given, **named)

    if part == "optimizer":
        monkeypatch.setattr(AdamW, "step", failing(step))
    if part == "experts":
        monkeypatch.setattr(lane_module, "chunk_backward", failing(lane))
    return trainer


@pytest.mark.parametrize("part", ["forward", "backward", "optimizer", "experts"])
def test_a_table_a_cure_and_the_last_checkpoint(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    trainer = training(base, tmp_path, part, monkeypatch, settings={"placement": "stream"})
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train()
    said = str(caught.value)
    assert errors.for_user(caught.value) is caught.value and errors.exit_code(caught.value) == 1
    where = " in the GPU lane on cpu, backward of model.layers.2.mlp.experts" if part == "experts" else ""
    assert said.startswith(f"step 2: CUDA out of memory{where}, 3.50 GiB more were asked for. What takes")
    lines = [line.split("  ") for line in said.splitlines() if line.startswith("  ")]
    assert "weights outside the routed experts" in said and len(lines) >= 3
    change = "halve lora_rank" if part == "optimizer" else "set dense_placement: host in kt_config"
    assert f"To go on, {change}, which frees about" in said
    assert said.endswith(f"The last checkpoint is intact: the same command goes on from {tmp_path / 'checkpoint-1'}.")
    assert json.loads((tmp_path / "ktft_report.json").read_text())["ended"].startswith("OutOfMemoryError: step 2")


def test_no_checkpoint_is_said_and_another_error_is_itself(base: Path, tmp_path: Path, monkeypatch: Any) -> None:
    trainer = training(base, tmp_path, "forward", monkeypatch)
    trainer.args.save_strategy = trainer.args.eval_strategy.__class__("no")
    with pytest.raises(torch.OutOfMemoryError, match="No checkpoint was saved yet, so training begins anew"):
        trainer.train()
    given = trainer, None, None
    assert told(*given, ValueError("another"), "") is None
    assert told(*given, torch.OutOfMemoryError(SAID), "") is not None
    outside_torch = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    assert "step 2: CUDA error: CUBLAS_STATUS_ALLOC_FAILED" in str(told(*given, outside_torch, ""))
    trainer.args.auto_find_batch_size = True  # it looks for torch's own words, and begins again
    assert told(*given, torch.OutOfMemoryError(SAID), "") is None


def test_a_recording_without_memory_is_left_out(base: Path, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """A layer runs kernel by kernel then, and training goes on."""
    record_on_host(monkeypatch.setattr)
    monkeypatch.setattr("ktft.model.recording.Recording._record_second", out_of_memory)
    found = runs.trainer(base, tmp_path, gradient_checkpointing=True, max_steps=4)
    found.train()
    assert "runs kernel by kernel: CUDA out of memory" in caplog.text
    assert len(runs.losses(found)) == 2


def test_sizes_are_those_of_what_is_there(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = training(base, tmp_path, "forward", monkeypatch)
    seen: list[GpuUse] = []

    def using(*given: Any) -> GpuUse:
        seen.append(gpu_use(*given))
        return seen[-1]

    monkeypatch.setattr("ktft.train.out_of_memory.gpu_use", using)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    frozen = [p.nbytes for p in trainer.model.parameters() if not p.requires_grad]
    trained = [p.nbytes for p in trainer.model.parameters() if p.requires_grad]
    buffers = [each.nbytes for each in trainer.model.buffers()]
    (use,) = seen
    assert use.weights == pytest.approx(sum(frozen) + sum(buffers), rel=1e-3) and use.layers == 3
    moments = 2 * sum(trained)  # the gradients of the step before are gone
    assert use.lora == pytest.approx(sum(trained) + moments, rel=0.01)
    # Of two micro-batches with 16 tokens, the first has passed three layers, and the second waits for its own turn in
    # the last one: inputs and outputs, of which an output is the next layer's input; and what experts kept of both
    assert use.waiting == (4 + 3 + 2 * 3) * 16 * 64 * 4 and use.together == 2
    allocated = "Of the allocated memory 20.00 GiB is allocated by PyTorch"
    told(trainer, None, None, torch.OutOfMemoryError(f"{SAID} {allocated}"), "")
    assert seen[-1].working + seen[-1].weights + seen[-1].lora == 20 * GIB


@pytest.mark.parametrize(
    ("use", "change"),
    [
        ({"weights": 12 * GIB, "working": 8 * GIB, "layers": 61}, "set dense_placement: host"),
        ({"weights": 12 * GIB, "working": 8 * GIB, "layers": 61, "dense_on_host": True}, "halve cutoff_len"),
        ({"weights": 1 * GIB, "working": 8 * GIB, "batch": 4}, "lower per_device_train_batch_size to 2"),
        ({"waiting": 8 * GIB, "working": 4 * GIB, "batch": 4, "together": 8}, "set micro_batches_together: 4"),
        ({"residents": 6 * GIB, "working": 8 * GIB}, "set gpu_expert_memory: 0"),
        ({"stored": 6 * GIB, "working": 8 * GIB}, "set gpu_activation_memory: 0"),
        ({"recordings": 6 * GIB, "working": 8 * GIB}, "set cuda_graphs: false"),
        ({"lora": 6 * GIB}, "halve lora_rank"),
    ],
)
def test_the_change_that_helps_most(use: dict[str, Any], change: str) -> None:
    every = dict.fromkeys(("weights", "lora", "recordings", "residents", "buffers", "waiting", "stored", "working"), 0)
    made = GpuUse(**every | use)
    assert made.best_change().startswith(change)
    assert len(made.table().splitlines()) == sum(use.get(name, 0) > 0 for name in every)

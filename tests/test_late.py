"""AdamW of the experts' LoRA goes on while the next step begins, and nobody sees weights that are half updated."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from given import Checkpoint
from lanes import no_calibration
from transformers import TrainerCallback

from ktft import late
from ktft.train import optimizer
from ktft.train.run import Run

__all__ = ["no_calibration"]

pytestmark = pytest.mark.usefixtures("no_calibration")


@pytest.fixture
def delayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Updates begin when somebody waits for them: who does not wait sees old weights. Returns how many there were."""
    seen: list[int] = []
    original, wait = optimizer.write_later, late.settle
    open_ = threading.Event()

    def write_later(writes: list[tuple[list[torch.Tensor], Any]]) -> None:
        seen.extend(len(tensors) for tensors, _ in writes)

        def waiting(write: Any) -> None:
            open_.wait(20)
            write()

        original([(tensors, partial(waiting, write)) for tensors, write in writes])

    def settle(*tensors: Any) -> None:
        open_.set()
        wait(*tensors)
        open_.clear()

    monkeypatch.setattr(optimizer, "write_later", write_later)
    for module in ("ktft.train.optimizer", "ktft.adapters.lora", "ktft.train.guards", "ktft.train.run"):
        monkeypatch.setattr(f"{module}.settle", settle)
    return seen


def train(path: Path, out: Path, **given: Any) -> tuple[list[float], dict[str, bytes]]:
    """The losses of a run in emulated lanes whose gradients are clipped, and the files of its last checkpoint."""
    settings = {"placement": "stream", "threads": 1}
    run = runs.trainer(path, out, settings=settings, gradient_checkpointing=True, max_grad_norm=0.01, **given)
    run.train()
    last = out / "checkpoint-7"
    return runs.losses(run), {name: (last / name).read_bytes() for name in runs.STATE}


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTFT_EMULATE_GPU", "1")


def test_same_training(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delayed: list[int]
) -> None:
    path = tiny_checkpoint("qwen3moe")
    with monkeypatch.context() as patch:
        patch.setattr(Run, "may_end_later", lambda *_: frozenset())
        usual = train(path, tmp_path / "usual")
    assert not delayed
    assert train(path, tmp_path / "later") == usual
    # In each step but the first, which finds no lanes: of each layer, a and b of three projections
    assert sum(delayed) == 6 * 3 * 6


def test_through_llamafactory(train_yaml: Any, run_exp: Any, tmp_path: Path, delayed: list[int]) -> None:
    """Its callbacks are known to read weights through `state_dict`."""
    kt_config = {"expert_format": "int8", "threads": 1, "placement": "stream"}
    run_exp(train_yaml("dsv3", max_steps=2, output_dir=str(tmp_path), save_steps=2, kt_config=kt_config))
    assert delayed


class Curious(TrainerCallback):
    """Looks at weights between steps."""

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        assert all(bool(each.isfinite().all()) for each in model.parameters())


def test_not_beside_callbacks_of_others(tiny_checkpoint: Checkpoint, tmp_path: Path, delayed: list[int]) -> None:
    train(tiny_checkpoint("qwen3moe"), tmp_path, callbacks=[Curious()])
    assert not delayed


def test_a_gradient_scaler_changes_no_norm(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """It divides gradients in place, without a sign to autograd, after their norms were taken."""
    path, after = tiny_checkpoint("qwen3moe"), []
    for scale in (1.0, 1024.0):
        run = runs.trainer(
            path, tmp_path / str(scale), settings={"placement": "stream", "threads": 1}, gradient_checkpointing=True,
            max_grad_norm=0.01, max_steps=3, logging_steps=1, save_strategy="no",
        )  # fmt: skip
        scaler = run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=100)
        run.accelerator.unscale_gradients = lambda *_, run=run, scaler=scaler: scaler.unscale_(run.optimizer.optimizer)
        run.train()
        assert scaler.get_scale() == scale
        norms = [entry["grad_norm"] for entry in run.state.log_history if "grad_norm" in entry]
        after.append((norms, {name: p.detach() for name, p in run.model.named_parameters() if p.requires_grad}))
    (norms, weights), (scaled_norms, scaled) = after
    assert len(norms) == 3 and scaled_norms == pytest.approx(norms, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(scaled[name], weight, rtol=1e-4, atol=1e-6)


def test_errors_are_raised_where_somebody_waits() -> None:
    def fail() -> None:
        raise ValueError("a moment has another shape")

    tensors, others = [torch.zeros(2), torch.zeros(2)], [torch.zeros(1)]
    late.write_later([(tensors, fail), (others, lambda: others[0].fill_(1))])
    late.settle(others)
    assert others[0] == 1
    with pytest.raises(ValueError, match="another shape"):
        late.settle(tensors[1:])
    late.settle()


def test_writes_keep_their_order() -> None:
    tensor = torch.zeros(1)
    late.write_later([([tensor], lambda: tensor.fill_(1))])
    late.write_later([([tensor], lambda: tensor.mul_(3))])
    late.settle([tensor])
    assert tensor == 3

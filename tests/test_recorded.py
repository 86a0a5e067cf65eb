"""Decoder layers that are recorded and played back, against the same layers run operation by operation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from adapted import randomize
from given import Checkpoint
from host_graphs import HostGraph, record_on_host
from ranks import results, run_jobs
from stacks import shown_by_the_first_stack
from tiny import FAMILIES, MORE_FAMILIES
from tiny_newer import SEE_IMAGES
from torch import Tensor
from transformers import Trainer
from transformers.models.qwen3_moe import modeling_qwen3_moe

STEPS = 4
"""The first runs kernel by kernel, the second records, the others play back."""


def steps(path: Path, out: Path, micro_batches: int = 1, lengths: tuple[int, ...] = (12,), **settings: Any) -> Any:
    """The losses of some steps, and the trained weights after them."""
    own = {name: settings.pop(name) for name in ("cuda_graphs", "micro_batches_together") if name in settings}
    model = randomize(runs.adapted(path, settings=own, lora_dropout=settings.pop("lora_dropout", 0.0)), std=0.05)
    torch.manual_seed(1)
    rows = [torch.randint(3, 100, (lengths[at % len(lengths)],)) for at in range(STEPS * micro_batches)]
    data = [{"input_ids": ids, "labels": ids} for ids in rows]
    given = {"max_steps": STEPS, "per_device_train_batch_size": 1, "gradient_accumulation_steps": micro_batches}
    given |= {"save_strategy": "no", "gradient_checkpointing": True, "learning_rate": 1e-3}
    trainer = Trainer(model, runs.arguments(out, **given | settings), train_dataset=data)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)  # type: ignore[method-assign]
    trainer.train()
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    return runs.losses(trainer), weights


def assert_same(plain: tuple[list[float], dict[str, Tensor]], recorded: tuple[list[float], dict[str, Tensor]]) -> None:
    """The same losses and weights, bit for bit."""
    assert plain[0] == recorded[0]
    assert all(torch.equal(recorded[1][name], weight) for name, weight in plain[1].items())


def plain(monkeypatch: pytest.MonkeyPatch, *args: Any, **settings: Any) -> Any:
    """The same steps, layer by layer, but operation by operation."""
    with monkeypatch.context() as patch:
        patch.setattr("ktft.model.recorder.USES", 1 << 30)
        return steps(*args, **settings)


BY_DEFAULT = {"dsv3", "qwen3moe", "gpt_oss"}
EVERY = [
    pytest.param(family, marks=() if family in BY_DEFAULT else pytest.mark.full)
    for family in sorted(
        {*FAMILIES, *MORE_FAMILIES} - SEE_IMAGES - {"gemma4"}
    )  # whose layers get an object of its own kind
]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[HostGraph]:
    return record_on_host(monkeypatch.setattr)


@pytest.mark.parametrize("family", EVERY)
def test_same_training(
    tiny_checkpoint: Checkpoint, tmp_path: Path, graphs: list[HostGraph], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    path = tiny_checkpoint(family)
    steps(path, tmp_path / "off", cuda_graphs=False)
    usual = plain(monkeypatch, path, tmp_path / "plain")
    assert not graphs
    recorded = steps(path, tmp_path / "recorded")
    assert max(graph.replays for graph in graphs) > 1
    assert_same(usual, recorded)


@shown_by_the_first_stack
def test_micro_batches_together(
    tiny_checkpoint: Checkpoint, tmp_path: Path, graphs: list[HostGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has recordings of its own. Some lengths come once, and run operation by operation beside others."""
    path, settings = (
        tiny_checkpoint("dsv3"),
        {"micro_batches": 3, "lengths": (12, 12, 9, 12, 12, 9, 12, 7, 9, 5, 12, 9)},
    )
    usual = steps(path, tmp_path / "usual", cuda_graphs=False, micro_batches_together=1, **settings)
    for together in ("auto", 2, 1):
        del graphs[:]
        own = settings | {"micro_batches_together": together}
        recorded = steps(path, tmp_path / f"recorded-{together}", **own)
        assert max(graph.replays for graph in graphs) > 0
        assert_same(plain(monkeypatch, path, tmp_path / f"plain-{together}", **own), recorded)
        assert recorded[0] == pytest.approx(usual[0], rel=2e-4)


@pytest.mark.parametrize("family", ["dsv3", "qwen3moe"])
def test_autocast(
    tiny_checkpoint: Checkpoint, tmp_path: Path, graphs: list[HostGraph], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """It is in force in both passes of a layer, though the second one runs when the model's forward is over."""
    path = tiny_checkpoint(family)
    usual = plain(monkeypatch, path, tmp_path / "plain", bf16=True)
    recorded = steps(path, tmp_path / "recorded", bf16=True)
    assert graphs
    assert_same(usual, recorded)


@shown_by_the_first_stack
def test_two_processes(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """DDP sees no gradient of a recorded layer: what each rank has is averaged after the step's passes."""
    base = str(tiny_checkpoint("dsv3"))
    common: dict[str, Any] = {"base": base, "gradient_checkpointing": True, "max_steps": STEPS, "save_strategy": "no"}
    jobs = [
        common | {"output": str(tmp_path / "usual"), "settings": {"cuda_graphs": False}},
        common | {"output": str(tmp_path / "recorded"), "recorded": True},
    ]
    status, said = run_jobs(2, tmp_path, *jobs)
    assert status == 0, said
    usual, recorded = (results(tmp_path / name)["losses"] for name in ("usual", "recorded"))
    assert recorded == pytest.approx(usual, rel=2e-4)
    assert usual[0] != usual[-1]


class Untold(torch.optim.SGD):
    """Changes parameters without a sign to autograd, as kernels of their own do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["lr"] * parameter.grad


def test_an_update_that_autograd_does_not_see(
    tiny_checkpoint: Checkpoint, tmp_path: Path, graphs: list[HostGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer that went backward last goes forward first, with new weights."""
    path = tiny_checkpoint("dsv3")
    monkeypatch.setattr(Trainer, "create_optimizer", lambda self: setattr(self, "optimizer", optimizer(self)))

    def optimizer(trainer: Trainer) -> Untold:
        return Untold([p for p in trainer.model.parameters() if p.requires_grad], lr=0.5)

    usual = plain(monkeypatch, path, tmp_path / "plain")
    recorded = steps(path, tmp_path / "recorded")
    assert graphs
    assert usual[0][0] != usual[0][-1]
    assert_same(usual, recorded)


@shown_by_the_first_stack
def test_dropout(
    tiny_checkpoint: Checkpoint, tmp_path: Path, graphs: list[HostGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masks on attention are drawn anew by each playback, and again by the second pass."""
    path, settings = tiny_checkpoint("dsv3"), {"micro_batches": 2, "lora_dropout": 0.3}
    usual = plain(monkeypatch, path, tmp_path / "plain", **settings)
    recorded = steps(path, tmp_path / "recorded", **settings)
    assert max(graph.replays for graph in graphs) > 1
    assert_same(usual, recorded)
    other = steps(path, tmp_path / "none", **settings | {"lora_dropout": 0.0})
    assert other[0] != pytest.approx(usual[0], rel=1e-3)


def test_a_layer_that_differs_or_cannot_be_recorded(
    tiny_checkpoint: Checkpoint,
    tmp_path: Path,
    graphs: list[HostGraph],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One differs by its number alone, as no attribute shows; one asks for a number. Both run by themselves."""
    path, attention = tiny_checkpoint("qwen3moe"), "Qwen3MoeAttention"
    original = getattr(modeling_qwen3_moe, attention).forward

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        out, weights = original(self, hidden_states, *args, **kwargs)
        if self.layer_idx == 1:
            out = 2 * out
        if self.layer_idx == 2 and asks:
            out = out * float(out.detach().abs().sum() > 0)
        return out, weights

    monkeypatch.setattr(getattr(modeling_qwen3_moe, attention), "forward", forward)
    for asks in (False, True):
        del graphs[:]
        usual = plain(monkeypatch, path, tmp_path / f"plain-{asks}")
        recorded = steps(path, tmp_path / f"recorded-{asks}")
        assert max(graph.replays for graph in graphs) > 1
        assert_same(usual, recorded)
        assert (
            "Qwen3MoeDecoderLayer runs kernel by kernel: another layer of its kind does something else" in caplog.text
        )

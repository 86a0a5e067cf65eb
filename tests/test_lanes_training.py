"""Training in lanes through LLaMA-Factory, the CPU's torch standing in for a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lanes import no_calibration
from runs import logged

from ktft.lanes.decide.placer import Placement, Placer
from ktft.lanes.gpu.lane import GpuLane
from ktft.native import ExpertLayer

__all__ = ["no_calibration"]

STEPS = 4
USED = {"cpu": {"cpu"}, "stream": {"stream"}, "resident": {"resident", "cpu"}, "both": {"cpu", "stream"}}


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTFT_EMULATE_GPU", "1")


def settings(train_yaml, tmp_path: Path, name: str, **kt_config):
    return train_yaml(
        "dsv3",
        max_steps=STEPS,
        output_dir=str(tmp_path / name),
        lora_dropout=0.1,
        save_steps=2,
        kt_config={"expert_format": "int8", "threads": 1, **kt_config},
    )


def half(self, counts, *_):
    """Every other expert is streamed."""
    used = [expert for expert, rows in enumerate(counts) if rows]
    zeros = dict.fromkeys(("cpu", "copy", "gpu"), 0.0)
    return Placement(used[::2], used[1::2], [], zeros, zeros, ahead=used[1::2])


def test_the_same_losses_in_every_lane(train_yaml, run_exp, tmp_path, monkeypatch):
    found = {}
    for name, kt_config in {
        "cpu": {"placement": "cpu"},
        "stream": {"placement": "stream"},
        "resident": {"placement": "resident", "gpu_expert_memory": "64M"},
        "both": {},
    }.items():
        with monkeypatch.context() as patch:
            if name == "both":
                patch.setattr(Placer, "decide", half)
            run_exp(settings(train_yaml, tmp_path, name, **kt_config))
        found[name] = [entry["loss"] for entry in logged(tmp_path / name)]
        assert len(found[name]) == STEPS
        spans = json.loads((tmp_path / name / "ktft_report.json").read_text())["spans"]
        assert all(sum(spans[lane]["count"]) > 0 for lane in USED[name])
    for name, values in found.items():
        assert values[0] == pytest.approx(found["cpu"][0], rel=5e-3), name
        assert values == pytest.approx(found["cpu"], rel=0.03), name  # rounding may give a near tie another expert


@pytest.mark.usefixtures("no_calibration")
@pytest.mark.parametrize(
    ("owner", "method", "error"),
    [
        (GpuLane, "backward", torch.OutOfMemoryError("CUDA out of memory")),
        (ExpertLayer, "backward", RuntimeError("the kernel failed")),
        (GpuLane, "forward", KeyboardInterrupt()),
    ],
    ids=["out of memory", "kernel error", "cancelled"],
)
def test_a_failure_ends_the_run_and_leaves_the_checkpoint(
    train_yaml, run_exp, tmp_path, monkeypatch, owner, method, error
):
    monkeypatch.setattr(Placer, "decide", half)
    config = settings(train_yaml, tmp_path, "run")
    whole, calls = getattr(owner, method), []

    def fail(*args, **kwargs):
        calls.append(1)
        if (tmp_path / "run" / "checkpoint-2").exists():
            raise error
        return whole(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, fail)
        with pytest.raises(type(error)):
            run_exp(config)
    checkpoint = tmp_path / "run" / "checkpoint-2"
    assert calls and checkpoint.exists() and not (tmp_path / "run" / "checkpoint-4").exists()
    run_exp({**config, "resume_from_checkpoint": str(checkpoint)})
    assert len(logged(tmp_path / "run")) == STEPS


def test_a_gpu_is_needed_to_stream(train_yaml, run_exp, tmp_path, monkeypatch):
    monkeypatch.delenv("KTFT_EMULATE_GPU")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="placement is 'stream', which needs a GPU"):
        run_exp(settings(train_yaml, tmp_path, "run", placement="stream"))

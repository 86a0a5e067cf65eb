"""Resuming is exact, and a checkpoint is whole or absent: in this process, and through llamafactory-cli."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from damage import edit_json, flip
from given import TrainYaml
from runs import STATE, history, require_same_end, trainer
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

import ktft
from ktft.train import checkpoints
from ktft.train.checkpoints import STAGING
from ktft.train.manifest import MANIFEST, damage

ADAPTER = "adapter_model.safetensors"
FIVE = {"max_steps": 5, "save_steps": 3}


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> transformers.Trainer:
    """A run of seven steps with checkpoints 3 (in the first epoch), 6 (in the second) and 7."""
    run = trainer(base, tmp_path_factory.mktemp("whole"))
    run.train()
    return run


@pytest.fixture
def begun(whole: transformers.Trainer, tmp_path: Path) -> Path:
    """That run's folder as a run leaves it that was killed after checkpoint-6."""
    output = tmp_path / "begun"
    shutil.copytree(whole.args.output_dir, output, ignore=shutil.ignore_patterns("checkpoint-7"))
    return output


# --- exact ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [3, 6])
def test_resumed_run_is_the_uninterrupted_run(base: Path, whole: transformers.Trainer, begun: Path, step: int) -> None:
    """From mid-epoch across an epoch's end, and with a checkpoint between two logs."""
    resumed = trainer(base, begun, cls=ktft.Trainer)
    torch.manual_seed(99)
    resumed.train(resume_from_checkpoint=True if step == 6 else str(begun / "checkpoint-3"))
    require_same_end(resumed, whole)


def last_adapter(run: transformers.Trainer) -> bytes:
    return Path(run.args.output_dir, "checkpoint-7", ADAPTER).read_bytes()


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_resuming_at_the_end_of_an_epoch(base: Path, tmp_path: Path, optim: str) -> None:
    options = {"save_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2, "optim": optim}
    runs = [trainer(base, tmp_path / str(i), save_total_limit=2 - i, **options) for i in range(2)]
    runs[0].train()
    shutil.copytree(tmp_path / "0/checkpoint-4", tmp_path / "1/checkpoint-4")
    runs[1].train(resume_from_checkpoint=True)
    require_same_end(runs[1], runs[0], step=8)
    assert not (tmp_path / "1/checkpoint-4").exists()  # save_total_limit: 1


def test_resuming_a_finished_run_trains_no_step_more(base: Path, whole: transformers.Trainer, tmp_path: Path) -> None:
    shutil.copytree(whole.args.output_dir, tmp_path / "done")
    again = trainer(base, tmp_path / "done")
    result = again.train(resume_from_checkpoint=True)
    assert (again.state.global_step, history(again)) == (7, history(whole))
    assert result.training_loss == whole.state.log_history[-1]["train_loss"]
    again.save_model()
    assert (tmp_path / "done" / ADAPTER).read_bytes() == last_adapter(whole)


def test_llamafactory_resumes_by_itself(
    train_yaml: TrainYaml, fork_cli: Callable[..., Any], run_exp: Callable[..., None], tmp_path: Path
) -> None:
    """The command finds the checkpoint of a run that was never interrupted, in another process."""
    packed = {"packing": True, "lora_dropout": 0.1, "gradient_accumulation_steps": 2, "logging_steps": 2}
    one, two = (train_yaml(output_dir=str(tmp_path / n), **FIVE, **packed) for n in ("one", "two"))
    run_exp(one)
    shutil.copytree(tmp_path / "one/checkpoint-3", tmp_path / "two/checkpoint-3")
    log = fork_cli(["llamafactory-cli", "train"], two).stdout
    assert f"Resuming training from {tmp_path}/two/checkpoint-3" in log
    require_same_folders(tmp_path / "one", tmp_path / "two")


def test_llamafactory_resumes_a_reward_model(train_yaml: TrainYaml, run_exp: Callable, tmp_path: Path) -> None:
    """Its callbacks replace files of each checkpoint, and transformers cannot load a model with a value head."""
    one, two = (train_yaml("dsv3", "rm", output_dir=str(tmp_path / n), **FIVE) for n in ("one", "two"))
    run_exp(one)
    assert damage(tmp_path / "one/checkpoint-3") is None
    shutil.copytree(tmp_path / "one/checkpoint-3", tmp_path / "two/checkpoint-3")
    run_exp(two)
    require_same_folders(tmp_path / "one", tmp_path / "two", "value_head.safetensors")


def folders(path: Path) -> list[str]:
    """Checkpoints and what else lies in an output folder, the training report apart."""
    return sorted(name for name in os.listdir(path) if not name.startswith(("ktft_report.", "expert_routing.")))


def require_same_folders(one: Path, two: Path, *more: str) -> None:
    for name in (*(f"checkpoint-5/{name}" for name in STATE), ADAPTER, *more):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    logs = [json.loads((path / "trainer_state.json").read_text())["log_history"] for path in (one, two)]
    assert [entry.get("loss") for entry in logs[0]] == [entry.get("loss") for entry in logs[1]]


# --- whole or absent --------------------------------------------------------------------------------------------------


class OnSave(TrainerCallback):
    """Writes into a checkpoint where LLaMA-Factory's callbacks do, and looks at what can be seen by then."""

    def __init__(self, output: Path, error: Exception | None = None) -> None:
        self.output, self.error = output, error
        self.seen: list[list[str]] = []

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append(sorted(path.name for path in self.output.glob("checkpoint-*")))
        Path(args.output_dir, f"checkpoint-{state.global_step}", "processor.json").write_text("{}")
        if self.error and state.global_step > 3:
            raise self.error


def test_checkpoint_appears_when_it_is_whole(base: Path, tmp_path: Path) -> None:
    spy = OnSave(tmp_path)
    run = trainer(base, tmp_path, callbacks=[spy], save_total_limit=1)
    run.train()
    assert spy.seen == [[], ["checkpoint-3"], ["checkpoint-6"]]  # an older one goes only after a newer one is there
    assert folders(tmp_path) == ["checkpoint-7"]
    assert "processor.json" in json.loads((tmp_path / "checkpoint-7" / MANIFEST).read_text())["files"]
    assert torch.load(tmp_path / "checkpoint-7/training_args.bin", weights_only=False).output_dir == str(tmp_path)


@pytest.mark.parametrize("error", [ValueError("refused"), KeyboardInterrupt()])
def test_interrupted_saving_leaves_the_older_checkpoint(base: Path, tmp_path: Path, error: Any) -> None:
    with pytest.raises(type(error)):
        trainer(base, tmp_path, callbacks=[OnSave(tmp_path, error)], save_total_limit=1).train()
    assert folders(tmp_path) == ["checkpoint-3"]
    assert damage(tmp_path / "checkpoint-3") is None


def test_leftovers_of_a_killed_run_are_removed(base: Path, begun: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.move(begun / "checkpoint-6", begun / STAGING / "checkpoint-6")
    (begun / STAGING / "checkpoint-6" / MANIFEST).unlink()
    (begun / ".saving-abc").mkdir()
    # Where names cannot be exchanged, a kill can come between two renames
    (begun / STAGING / "replaced").mkdir()
    (begun / "checkpoint-3").rename(begun / STAGING / "replaced/checkpoint-3")
    with caplog.at_level(logging.INFO, "ktft"):
        trainer(base, begun, max_steps=1, save_strategy="no").train()
    assert folders(begun) == ["checkpoint-3"]
    assert f"removed {begun}/{STAGING}/checkpoint-6, left unfinished by a run that was killed" in caplog.text


@pytest.mark.parametrize("exchange", [True, False])
def test_existing_checkpoint_is_replaced(
    base: Path, begun: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    (begun / "checkpoint-6/old").touch()
    if not exchange:  # a file system that cannot
        monkeypatch.setattr(checkpoints, "exchange", lambda *_: False)
    trainer(base, begun, max_steps=6).train(resume_from_checkpoint=str(begun / "checkpoint-3"))
    assert folders(begun) == ["checkpoint-3", "checkpoint-6"]
    assert not (begun / "checkpoint-6/old").exists()
    assert damage(begun / "checkpoint-6") is None


def test_failed_replacement_brings_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "exchange", lambda *_: False)
    place = tmp_path / "checkpoint-3"
    place.mkdir()
    with pytest.raises(FileNotFoundError), checkpoints._staging(tmp_path) as staging:
        checkpoints._publish(staging / "never written", place)
    assert folders(tmp_path) == ["checkpoint-3"]


def test_best_model_is_found_where_it_ended_up(base: Path, tmp_path: Path) -> None:
    best = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True, "save_total_limit": 1}
    run = trainer(base, tmp_path, **best, metric_for_best_model="loss", max_steps=6)
    run.train()
    assert run.state.best_model_checkpoint == str(tmp_path / "checkpoint-6")
    saved = json.loads((tmp_path / "checkpoint-6/trainer_state.json").read_text())
    assert saved["best_model_checkpoint"] == str(tmp_path / "checkpoint-6")


def test_sigterm_saves_and_stops_where_asked_to(base: Path, whole: transformers.Trainer, tmp_path: Path) -> None:
    class Terminate(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 4:
                (callback,) = (c for c in run.callback_handler.callbacks if isinstance(c, JITCheckpointCallback))
                manager = callback.jit_manager
                manager.kill_wait = 0
                os.kill(os.getpid(), signal.SIGTERM)
                while not manager.is_checkpoint_requested:
                    signal.sigtimedwait([], 0.01)

    run = trainer(base, tmp_path, enable_jit_checkpoint=True, callbacks=[Terminate()], save_steps=100)
    run.train()
    assert run.state.global_step == 5
    assert folders(tmp_path) == ["checkpoint-5"]
    resumed = trainer(base, tmp_path, save_steps=100)
    resumed.train(resume_from_checkpoint=True)
    require_same_end(resumed, whole)


# --- what is refused --------------------------------------------------------------------------------------------------


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("file", "harm", "message"),
    [
        ("optimizer.pt", cut, r"optimizer.pt has \d+ bytes, \d+ were written"),
        (ADAPTER, flip, f"{ADAPTER} has SHA-256"),
        ("adapter_config.json", Path.unlink, "adapter_config.json is missing"),
        ("rng_state.pth", Path.unlink, "it has no rng_state.pth"),
        ("model.safetensors", lambda path: save_file({"a": torch.zeros(1)}, path), "model.safetensors was added"),
        (MANIFEST, cut, f"{MANIFEST} is not valid JSON"),
        (MANIFEST, lambda path: path.write_text("[1]"), f"{MANIFEST} is damaged: it is no mapping"),
        (MANIFEST, lambda path: edit_json(path, files={"a": {}}), f"{MANIFEST} is damaged: files is {{'a': {{}}}}"),
        (MANIFEST, lambda path: edit_json(path, run=None), f"{MANIFEST} is damaged: run is None"),
        (MANIFEST, lambda path: edit_json(path, parameters=[{}]), rf"{MANIFEST} is damaged: parameters is \[{{}}\]"),
        (MANIFEST, lambda path: edit_json(path, losses={"logged": 1}), f"{MANIFEST} is damaged: losses is"),
        (MANIFEST, lambda path: path.write_text("{}"), f"{MANIFEST} has version None, this ktft reads version 1"),
    ],
)
def test_damaged_checkpoint_is_refused(
    base: Path, begun: Path, file: str, harm: Callable[[Path], None], message: str
) -> None:
    harm(begun / "checkpoint-6" / file)
    with pytest.raises(ValueError, match=rf"checkpoint-6 cannot be resumed: .*{message}.*") as failure:
        trainer(base, begun).train(resume_from_checkpoint=True)
    assert f"give resume_from_checkpoint: {begun}/checkpoint-3, which is whole" in str(failure.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lora": {"r": 4}}, r"has shape \[.*2.*\] in it and \[.*4.*\] now; set lora_target"),
        ({"lora": {"target_modules": ["experts"]}}, "it trained 24 parameters that are not trained now, the first is"),
        ({"settings": {"expert_format": "bf16"}}, "expert_format was int8, it is bf16 now"),
        ({"optim": "sgd"}, "optim was adamw_torch, it is sgd now"),
    ],
)
def test_another_run_is_refused(base: Path, begun: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"checkpoint-6 cannot be resumed: .*{message}.*adapter_name_or_path"):
        trainer(base, begun, **changed).train(resume_from_checkpoint=True)


def test_other_batches_are_told(base: Path, begun: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = trainer(base, begun, gradient_accumulation_steps=4, save_strategy="no")
    with caplog.at_level(logging.WARNING, "ktft"):
        run.train(resume_from_checkpoint=True)
    assert "examples a step were 2, they are 4 now: data will be repeated or left out" in caplog.text


def test_another_base_model_is_refused(base: Path, begun: Path, tmp_path: Path) -> None:
    other = shutil.copytree(base, tmp_path / "other")
    shards = {path: load_file(path) for path in other.glob("*.safetensors")}
    for path, tensors in shards.items():
        norms = {name: tensor * 1.01 for name, tensor in tensors.items() if "norm" in name}
        save_file(tensors | norms, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"checkpoint-6 cannot be resumed: base model .* was \w{64}, it is \w{64} now"):
        trainer(other, begun).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda state: state["exp_avg"].zero_(), r"exp_avg of .*lora.* was \(.* [1-9]\d* of .* is \(.* 0 of .*\)"),
        (lambda state: state.clear(), r"exp_avg of .*lora.* was \(.*\), what it loaded is \(absent\)"),
    ],
)
def test_lost_moments_are_seen(
    base: Path, begun: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Any], Any], message: str
) -> None:
    original = torch.optim.AdamW.load_state_dict

    def load_state_dict(self: torch.optim.AdamW, state: dict[str, Any]) -> None:
        original(self, state)
        if self.state:  # accelerate loads a new optimizer's own state first
            harm(self.state[self.param_groups[0]["params"][5]])

    monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", load_state_dict)
    with pytest.raises(ValueError, match=f"checkpoint-6 cannot be resumed: the optimizer's {message}"):
        trainer(base, begun).train(resume_from_checkpoint=True)


def test_checkpoint_without_manifest_resumes_with_a_word(
    base: Path, whole: transformers.Trainer, begun: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (begun / "checkpoint-6" / MANIFEST).unlink()
    resumed = trainer(base, begun)
    with caplog.at_level(logging.WARNING, "ktft"):
        resumed.train(resume_from_checkpoint=True)
    assert "checkpoint-6 has no manifest" in caplog.text
    assert last_adapter(resumed) == last_adapter(whole)
    with pytest.raises(ValueError, match=r"checkpoint-6 cannot be resumed: .* does not fit the model: .* has shape"):
        trainer(base, begun, lora={"r": 4}).train(resume_from_checkpoint=str(begun / "checkpoint-6"))
    cut(begun / "checkpoint-7/optimizer.pt")
    (begun / "checkpoint-7" / MANIFEST).unlink()
    with pytest.raises(ValueError, match="its optimizer's state cannot be loaded"):
        trainer(base, begun).train(resume_from_checkpoint=True)

"""Which checkpoint goes, and what a run that resumes with other settings is told."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import trainer

from ktft.train import checkpoints

SAVED = {"max_steps": 3, "save_steps": 2}


@pytest.fixture(scope="module")
def done(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps, saved at the second and the last."""
    output = tmp_path_factory.mktemp("done")
    trainer(base, output, **SAVED).train()
    return output


@pytest.mark.parametrize(
    ("steps", "limit", "kept", "left"),
    [
        ((10, 20), 1, (), (20,)),
        ((10, 20), 1, (20, None), (20,)),
        ((10, 20, 30), 2, (30, 10), (10, 30)),
        ((10, 20, 30), 1, (30, 10), (10, 30)),
        ((9, 10, 100), 2, (100,), (10, 100)),
        ((10, 20, 30), 1, (20,), (20, 30)),  # resumed from 10: the one just written stays
        ((10, 20), 5, (20,), (10, 20)),
        ((10, 20), 0, (20,), (10, 20)),
    ],
)
def test_the_earliest_steps_go(
    tmp_path: Path, steps: tuple[int, ...], limit: int, kept: tuple[int | None, ...], left: tuple[int, ...]
) -> None:
    """Whatever the times of the folders say: those of the earliest steps are of an hour to come."""
    for number, step in enumerate(steps):
        (tmp_path / f"checkpoint-{step}").mkdir()
        os.utime(tmp_path / f"checkpoint-{step}", (time.time() + 3600 - number * 60,) * 2)
    (tmp_path / "checkpoint-of-mine").mkdir()
    paths = [None if step is None else f"{tmp_path}/checkpoint-{step}" for step in kept]
    with checkpoints._staging(tmp_path) as staging:
        checkpoints._rotate(tmp_path, staging, limit, *paths)
    expected = {f"checkpoint-{step}" for step in left} | {"checkpoint-of-mine"}
    assert {path.name for path in tmp_path.iterdir()} == expected


def test_the_best_checkpoint_of_a_folder_that_was_moved_stays(base: Path, tmp_path: Path) -> None:
    """`trainer_state.json` names it by the path that the folder had."""
    best = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True}
    best |= {"metric_for_best_model": "loss", "greater_is_better": True, "save_total_limit": 1}  # so the first is best
    trainer(base, tmp_path / "one", **best, max_steps=2).train()
    shutil.move(tmp_path / "one", tmp_path / "two")
    for steps in (2, 4):  # one that was finished, which saves nothing, and one that goes on
        run = trainer(base, tmp_path / "two", **best, max_steps=steps)
        run.train(resume_from_checkpoint=True)
    assert run.state.best_model_checkpoint == str(tmp_path / "two/checkpoint-2")
    assert [path.name for path in (tmp_path / "two").glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.fixture
def resume(base: Path, done: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[..., str]:
    """`resume(**changed)`: ktft's warnings when a copy of `done` is resumed from its last checkpoint."""

    def run(begun: Path = done, **changed: Any) -> str:
        shutil.copytree(begun, tmp_path / "out")
        with caplog.at_level(logging.WARNING, "ktft"):
            trainer(base, tmp_path / "out", **SAVED | changed).train(resume_from_checkpoint=True)
        return "\n".join(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)

    return run


def test_a_finished_run_says_so(resume: Callable[..., str]) -> None:
    said = resume(learning_rate=0.5, seed=7, lora={"lora_dropout": 0.0})
    assert "checkpoint-3 is of step 3, and training ends at step 3: this run had finished. No step is trained" in said
    for change in ("learning_rate was 0.005, it is 0.5", "seed was 42, it is 7", "lora_dropout was 0.1, it is 0.0"):
        assert change in said
    assert "raise max_steps or num_train_epochs" in said and "give another output_dir" in said


def test_a_run_that_goes_on_says_what_differs(resume: Callable[..., str]) -> None:
    said = resume(max_steps=4, weight_decay=0.25)
    assert "Settings are others than then: weight_decay was 0.0, it is 0.25; max_steps was 3, it is 4. " in said
    assert "had finished" not in said and "learning_rate was" not in said


def test_nothing_is_said_of_a_run_that_is_the_same(resume: Callable[..., str], done: Path, tmp_path: Path) -> None:
    begun = shutil.copytree(done, tmp_path / "begun", ignore=shutil.ignore_patterns("checkpoint-3"))
    assert "ettings" not in resume(begun)


@pytest.mark.parametrize(("option", "value", "was"), [("lora_alpha", 16, "8"), ("use_rslora", True, "false")])
def test_another_strength_of_lora_is_refused(resume: Callable[..., str], option: str, value: Any, was: str) -> None:
    """The adapter's tensors would go on with another effect than they were trained for."""
    with pytest.raises(ValueError, match=f"cannot be resumed: {option} was {was}, it is {str(value).lower()} now"):
        resume(max_steps=4, lora={option: value})


def test_a_checkpoint_of_the_model_alone_has_a_cure(base: Path, tmp_path: Path) -> None:
    trainer(base, tmp_path, save_only_model=True, max_steps=2, save_steps=2).train()
    cure = f"set another output_dir, and {tmp_path}/checkpoint-2 as adapter_name_or_path"
    with pytest.raises(ValueError, match=rf"it has no optimizer.pt.*save_only_model: true keeps no optimizer.*{cure}"):
        trainer(base, tmp_path).train(resume_from_checkpoint=True)

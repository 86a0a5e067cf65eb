"""How a command ends: a user's error in one message and exit status 2, a bug with its traceback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from given import RunCli, TrainYaml

from ktft.errors import for_user
from ktft.sizes import parse_size

TRAIN = ["llamafactory-cli", "train"]


@pytest.mark.parametrize(
    "command",
    [TRAIN, pytest.param(["ktft", "train"], marks=pytest.mark.full)],
    ids=["llamafactory-cli", "ktft"],
)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kt_config": {"expert_fromat": "k4"}}, "error: unknown key 'kt_config.expert_fromat'; the nearest valid key"),
        ({"model_name_or_path": "build/demo/modle"}, "error: model_name_or_path 'build/demo/modle': no such directory"),
        ({"learning_rat": 1e-3}, "learning_rat"),  # LLaMA-Factory's own
        ({"dataset": "nowhere"}, "error: Undefined dataset nowhere"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_users_error_is_one_message(
    train_yaml: TrainYaml, fork_cli: RunCli, command: list[str], change: dict[str, Any], message: str
) -> None:
    done = fork_cli(command, train_yaml(**change), check=False)
    assert done.returncode == 2, done.stdout
    assert message in done.stdout
    assert "Traceback" not in done.stdout
    assert "KTFT_TRACEBACK=1 shows" in done.stdout


def test_the_traceback_can_be_asked_for(train_yaml: TrainYaml, fork_cli: RunCli) -> None:
    done = fork_cli(TRAIN, train_yaml(kt_config={"a": 1}), check=False, env={"KTFT_TRACEBACK": "1"})
    assert done.returncode == 1
    assert "Traceback" in done.stdout and "unknown key" in done.stdout


def test_without_use_kt_llamafactory_ends_as_it_does(train_yaml: TrainYaml, fork_cli: RunCli) -> None:
    settings = train_yaml(model_name_or_path="build/demo/modle")
    del settings["use_kt"], settings["kt_config"]
    done = fork_cli(TRAIN, settings, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stdout


def test_kt_config_without_use_kt(train_yaml: TrainYaml, fork_cli: RunCli) -> None:
    settings = train_yaml()
    del settings["use_kt"]
    done = fork_cli(TRAIN, settings, check=False)
    assert done.returncode == 2
    assert "error: kt_config is given without use_kt: true" in done.stdout
    assert "Traceback" not in done.stdout


def test_a_damaged_yaml(tmp_path: Path, fork_cli: RunCli) -> None:
    (tmp_path / "a.yaml").write_text("stage: sft\n  cutoff_len: [\n")
    done = fork_cli(["ktft", "train", str(tmp_path / "a.yaml")], check=False)
    assert done.returncode == 2
    assert "line 2" in done.stdout
    assert "Traceback" not in done.stdout


def told(function: Callable[[], Any]) -> str:
    """The words for the user of what this raises, none of a bug."""
    with pytest.raises(Exception) as caught:  # of whatever kind
        function()
    return str(for_user(caught.value) or "")


def wrapped() -> None:
    try:
        parse_size("lots")
    except ValueError as error:
        raise RuntimeError("Failed to load.") from error


def test_who_speaks_to_the_user(tmp_path: Path) -> None:
    assert "'lots' is not a size" in told(lambda: parse_size("lots"))
    # ktft's own words beneath those of a program that says less
    assert "'lots' is not a size" in told(wrapped)
    assert "absent" in told((tmp_path / "absent").read_text)


@pytest.mark.parametrize(
    "bug",
    [
        lambda: parse_size("8G", unit="x"),  # Python's own error in ktft's code
        lambda: int("x"),
        lambda: {}["key"],
    ],
)
def test_a_bug_keeps_its_traceback(bug: Callable[[], Any]) -> None:
    assert not told(bug)


def test_a_bug_in_a_command_keeps_its_traceback() -> None:
    code = (
        "import sys; from ktft.cli import main, convert\n"
        "convert._convert = lambda *args, **kwargs: int('x')\n"
        "main.app(['convert', 'a', 'b'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "invalid literal for int()" in done.stderr
    assert "Traceback" in done.stderr

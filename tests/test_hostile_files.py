"""Nothing is lost where disks fill up, folders are read-only, clocks jump, runs collide and processes die anywhere."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
import yaml
from dying import deaths
from forked import Forks
from given import RunCli, TrainYaml
from holding import held_by_another
from runs import STATE, require_same_end, trainer
from tiny import write_checkpoint
from transformers import TrainerCallback
from typer.testing import CliRunner

from ktft.adapters.files import read_config
from ktft.checkpoint.files import TEMPORARY, replacing
from ktft.cli.main import app
from ktft.train import checkpoints
from ktft.train.checkpoints import clear_leftovers
from ktft.train.manifest import damage

HOUR = 3600
LOCK = "_ktft.lock"


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> transformers.Trainer:
    """A run of seven steps with checkpoints 3, 6 and 7, that nothing disturbed."""
    run = trainer(base, tmp_path_factory.mktemp("whole"))
    run.train()
    return run


def ktft_command(*arguments: str | Path) -> tuple[int, str]:
    """A `ktft` command in this process: exit status and output or message, whose lines are not wrapped."""
    result = CliRunner(env={"COLUMNS": "400"}).invoke(app, list(map(str, arguments)))
    if result.exception is None or isinstance(result.exception, SystemExit):
        return result.exit_code, result.output
    from ktft import errors

    words = errors.message_for_user(result.exception)
    assert words is not None, result.exception
    return errors.exit_code(result.exception), words


# --- killed between any two files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["next", "again, where names cannot be exchanged"])
def test_killed_at_any_change_while_a_checkpoint_is_saved(
    whole: transformers.Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """What is left once the next start has cleared up are checkpoints that their manifests prove, one at least."""
    folder = tmp_path / "run"
    done = Path(whole.args.output_dir)
    before = "checkpoint-3" if kind == "next" else "checkpoint-7"
    monkeypatch.setattr(whole.args, "output_dir", str(folder))
    monkeypatch.setattr(whole.args, "save_total_limit", 1)
    if kind.endswith("exchanged"):
        monkeypatch.setattr(checkpoints, "exchange", lambda *_: False)

    def begin() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(done / before, folder / before)

    seen = set()
    for number in deaths(folder, begin, lambda: whole._save_checkpoint(whole.model, None)):
        clear_leftovers(folder)
        left = sorted(path.name for path in folder.iterdir())
        assert left and set(left) <= {before, "checkpoint-7"}, (number, left)
        assert [damage(folder / name) for name in left] == [None] * len(left), number
        seen.add(tuple(left))
    clear_leftovers(folder)
    assert os.listdir(folder) == ["checkpoint-7"]
    assert all(
        (folder / "checkpoint-7" / n).read_bytes() == (done / "checkpoint-7" / n).read_bytes() for n in STATE[:2]
    )
    if kind == "next":
        assert {("checkpoint-3",), ("checkpoint-3", "checkpoint-7")} <= seen


def test_killed_at_any_change_while_an_adapter_is_saved(tmp_path: Path) -> None:
    """In its place lies the old one, the new one, or what is refused by the name of what does not fit."""
    base = write_checkpoint("qwen3moe", tmp_path / "base", num_hidden_layers=1)  # each state is loaded
    folder, old, new = tmp_path / "adapter", tmp_path / "old", tmp_path / "new"
    small, large = (trainer(base, tmp_path, lora={"r": r}).model for r in (2, 4))
    small.save_pretrained(old)
    large.save_pretrained(new)
    model_of = {2: small, 4: large}

    def begin() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(old, folder)

    seen = set()
    for number in deaths(folder, begin, lambda: large.save_pretrained(folder)):
        try:
            rank = read_config(folder).r
        except ValueError as refusal:
            assert "adapter_config.json says r: 4, but its tensors were saved with r: 2" in str(refusal)
            seen.add("refused")
        else:
            model_of[rank].load_adapter(str(folder), "default")
            tensors = (folder / "adapter_model.safetensors").read_bytes()
            assert tensors == ((old if rank == 2 else new) / "adapter_model.safetensors").read_bytes(), number
            seen.add(str(rank))
    assert seen == {"2", "refused", "4"}
    begin()
    (folder / ".saving-left").mkdir()
    large.save_pretrained(folder)
    assert sorted(os.listdir(folder)) == sorted(os.listdir(new))


# --- disks ------------------------------------------------------------------------------------------------------------


class Disk:
    """A disk of 64 MiB that can be filled; where none may be mounted, a folder, and a limit on files' sizes instead."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path, self.mounted = path, mount(path, "size=64m")

    def fill(self, room: int) -> None:
        """Leave room for so many bytes, in all or in a file."""
        if not self.mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
            return
        with (self.path / "filler").open("wb") as file:
            file.write(bytes(shutil.disk_usage(self.path).free - room))

    def empty(self) -> None:
        (self.path / "filler").unlink(missing_ok=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def mount(place: Path, options: str) -> bool:
    """Whether this user may mount a disk, and it is there."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    return shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path / "disk")
    try:
        yield made
    finally:
        made.empty()
        if made.mounted:
            subprocess.run(["umount", "-l", str(made.path)], check=True)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that nobody can write into, root neither."""
    place = tmp_path / "read-only"
    place.mkdir()
    mounted = mount(place, "ro")
    place.chmod(0o555) if not mounted else None
    if not mounted and os.access(place, os.W_OK):
        pytest.skip("root may write everywhere, and may not mount here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True) if mounted else place.chmod(0o755)


def test_full_disk_keeps_what_was_there(base: Path, whole: transformers.Trainer, disk: Disk) -> None:
    """A run fails with its last checkpoint whole, and the same command goes on from it once there is room."""

    class Fill(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 4:
                disk.fill(50_000)

    with pytest.raises(OSError, match=r"checkpoint-6 could not be written: .*B are free in .*checkpoint-3 is whole"):
        trainer(base, disk.path / "run", callbacks=[Fill()]).train()
    assert [path.name for path in (disk.path / "run").glob("*check*")] == ["checkpoint-3"]
    assert damage(disk.path / "run/checkpoint-3") is None
    disk.empty()
    resumed = trainer(base, disk.path / "run")
    resumed.train(resume_from_checkpoint=True)
    require_same_end(resumed, whole)


def test_full_disk_refuses_adapters_and_conversions(base: Path, whole: transformers.Trainer, disk: Disk) -> None:
    model, place = whole.model, disk.path / "adapter"
    model.save_pretrained(place)
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    disk.fill(10_000)
    with pytest.raises(OSError, match="what .*/adapter held before is untouched"):
        model.save_pretrained(place)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    for command in (("export", place, disk.path / "out", "--to", "peft"), ("convert", base, disk.path / "out")):
        status, output = ktft_command(*command)
        assert status == 2 and ("MiB are free" in output or "free there" in output or "failed" in output), output
        assert not (disk.path / "out").exists() or not list((disk.path / "out").rglob("*.safetensors"))
    if disk.mounted:  # not even a lock can be written
        disk.empty()
        disk.fill(0)
        with pytest.raises(OSError, match="its disk is full: make room"):
            trainer(base, disk.path / "run").train()
        assert os.listdir(disk.path / "run") == []


def test_read_only_folders_are_refused_before_a_model_is_loaded(
    base: Path, read_only: Path, train_yaml: TrainYaml, run_exp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llamafactory.train.sft.workflow as workflow

    monkeypatch.setattr(workflow, "load_tokenizer", lambda *_: pytest.fail("it was begun"))
    with pytest.raises(OSError, match=f"{read_only} cannot be written .*give a"):
        run_exp(train_yaml(output_dir=str(read_only)))
    for command in (("convert", base, read_only / "out"), ("convert", base, read_only)):
        status, output = ktft_command(*command)
        assert status == 2 and "cannot be written" in output


# --- clocks and names -------------------------------------------------------------------------------------------------


def test_clock_that_jumps_between_saves(
    base: Path, whole: transformers.Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older checkpoint has a later time than the one just written, which must stay; and nothing else changes."""
    real = time.time

    class Jump(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            offset = HOUR if state.global_step < 6 else -HOUR
            monkeypatch.setattr(time, "time", lambda: real() + offset)
            for path in (tmp_path / "run").glob("checkpoint-*"):
                os.utime(path, (real() + HOUR, real() + HOUR))

    run = trainer(base, tmp_path / "run", callbacks=[Jump()], save_total_limit=1)
    run.train()
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-7"]
    require_same_end(run, whole)


def test_names_with_spaces_quotes_and_japanese(
    base: Path, data_dir: Path, train_yaml: TrainYaml, fork_cli: RunCli, run_exp: Any, tmp_path: Path
) -> None:
    """Of the model, the data, the settings' file and the output: trained by command, resumed, merged, exported."""
    folder = tmp_path / """it's "学習" {x} $HOME %s & 100%"""
    # The datasets library takes $HOME for a variable
    model, data = shutil.copytree(base, folder / "モデル 1"), shutil.copytree(data_dir, tmp_path / """データ '"1"'""")
    names = {"model_name_or_path": str(model), "dataset_dir": str(data), "output_dir": str(folder / "出力 '2'")}
    settings = train_yaml(**names, max_steps=2, save_steps=2)
    (folder / "設定 3.yaml").write_text(yaml.safe_dump(settings, allow_unicode=True), encoding="utf-8")
    fork_cli(["ktft", "train", str(folder / "設定 3.yaml")])
    output = folder / "出力 '2'"
    assert damage(output / "checkpoint-2") is None
    run_exp(settings | {"max_steps": 3})
    assert damage(output / "checkpoint-3") is None and not (output / LOCK).exists()
    for command in (("merge", model, output, folder / "合併"), ("export", output, folder / "別", "--to", "peft")):
        status, text = ktft_command(*command)
        assert status == 0, text


# --- two runs in one folder -------------------------------------------------------------------------------------------


def test_second_run_is_refused_and_the_first_goes_on(train_yaml: TrainYaml, forks: Forks, tmp_path: Path) -> None:
    """Through the command, before anything of the folder is read: it holds no checkpoint that could be resumed."""
    out, path, log = tmp_path / "out", tmp_path / "first.yaml", tmp_path / "log"
    path.write_text(yaml.safe_dump(train_yaml()))
    command = [str(Path(sys.executable).parent / "llamafactory-cli"), "train", str(path)]
    first = forks.start(command, dict(os.environ), log)
    try:
        while not ((out / LOCK).exists() and (out / LOCK).stat().st_size) and first.poll() is None:
            time.sleep(0.01)
        os.kill(first.pid, signal.SIGSTOP)
        before = sorted(out.iterdir())
        second = forks.run(command, dict(os.environ))
        assert second.returncode != 0
        assert f"{out} is in use by process {first.pid} on " in second.stdout
        assert sorted(out.iterdir()) == before
    finally:
        os.kill(first.pid, signal.SIGCONT)
    assert first.wait() == 0, log.read_text()
    assert (out / "adapter_model.safetensors").is_file() and not (out / LOCK).exists()


def test_two_writers_of_one_path(tmp_path: Path) -> None:
    """Each writes whole files under a name of its own; the one that ends last stays. What a kill leaves goes."""
    path = tmp_path / "expert_routing.json"
    with replacing(path) as first:
        os.pwrite(first, b"1" * 3000, 0)
        with replacing(path) as second:
            os.pwrite(second, b"2" * 2000, 0)
        assert path.read_bytes() == b"2" * 2000
    assert path.read_bytes() == b"1" * 3000
    (tmp_path / f"{path.name}.0123{TEMPORARY}").write_bytes(b"half")
    clear_leftovers(tmp_path)
    assert os.listdir(tmp_path) == [path.name]


def test_every_way_into_a_folder_in_use_is_refused(base: Path, whole: transformers.Trainer, tmp_path: Path) -> None:
    adapter, out = tmp_path / "adapter", tmp_path / "out"
    whole.model.save_pretrained(adapter)
    with held_by_another(out) as other:
        held = f"{out} is in use by process {other.pid}"
        run = trainer(base, out)
        for way in (run.train, run.save_model, lambda: run.model.save_pretrained(out)):
            with pytest.raises(ValueError, match=held):
                way()
        for command in (("export", adapter, out, "--to", "peft"), ("convert", base, out)):
            status, output = ktft_command(*command)
            assert status == 2 and held in output
        rank = SimpleNamespace(output_dir=str(out), should_save=False)
        with checkpoints.hold(rank):  # another rank of the run that holds it
            pass
    assert os.listdir(out) == []

"""One writer a folder: who is named, what is taken over, and what a lock never does to a run of its own."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import socket
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from holding import held_by_another

from ktft.checkpoint import lock
from ktft.checkpoint.lock import LOCK, Holder, locked


def test_names_the_other_process(tmp_path: Path) -> None:
    with held_by_another(tmp_path) as other:
        with pytest.raises(ValueError, match=f"{tmp_path} is in use by process {other.pid} on ") as refusal:
            locked(tmp_path, "converting").__enter__()
        assert f"{socket.gethostname()} (training since " in str(refusal.value)
        assert f"kill {other.pid}" in str(refusal.value)
    with locked(tmp_path, "converting") as first:
        assert first
    assert not list(tmp_path.iterdir())


def test_kill_leaves_a_lock_that_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with held_by_another(tmp_path) as other:
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        assert (tmp_path / LOCK).is_file()
        with caplog.at_level(logging.WARNING, "ktft"), locked(tmp_path, "training"):
            assert Holder.read((tmp_path / LOCK).read_bytes()) == replace(
                Holder.here("training"), since=json.loads((tmp_path / LOCK).read_bytes())["since"]
            )
    assert f"taken over from process {other.pid} on " in caplog.text and "ended without giving it back" in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("left", "remark"),
    [
        ({"pid": os.getppid(), "started": 1}, "ended without giving it back"),  # its number is another process's now
        ({"pid": os.getppid(), "boot": "another"}, "ended when this machine was booted"),
        ({"host": "elsewhere"}, "if it runs still, end one of the two"),
        ({"pid": "12"}, None),
        (b"", None),
        (b"\xff", None),
        (b"[" * 100_000, None),
    ],
)
def test_stale_locks(tmp_path: Path, caplog: pytest.LogCaptureFixture, left: object, remark: str | None) -> None:
    """What a process leaves behind that never gave the folder back."""
    here = asdict(Holder.here("training")) | {"pid": 2**22 + 1}
    content = left if isinstance(left, bytes) else json.dumps(here | left).encode()  # type: ignore[operator]
    (tmp_path / LOCK).write_bytes(content)
    with caplog.at_level(logging.WARNING, "ktft"), locked(tmp_path, "training"):
        pass
    assert remark in caplog.text if remark else not caplog.records


@pytest.mark.parametrize("number", [0, errno.ENOLCK, errno.EOPNOTSUPP])
def test_file_systems_whose_locks_mean_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A process that runs here is still seen; without one, the folder can be used."""

    def flock(*_: object) -> None:
        if number:
            raise OSError(number, os.strerror(number))

    with held_by_another(tmp_path) as other:
        monkeypatch.setattr(fcntl, "flock", flock)
        with pytest.raises(ValueError, match=f"in use by process {other.pid}"), locked(tmp_path, "training"):
            pass
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        with locked(tmp_path, "training") as first:
            assert first


def test_one_process_holds_it_repeatedly(tmp_path: Path) -> None:
    with locked(tmp_path / "new" / "folder", "training") as outer:
        with locked(tmp_path / "new/../new/folder", "saving an adapter") as inner:
            assert (outer, inner) == (True, False)
        assert (tmp_path / "new/folder" / LOCK).is_file()
    assert not list((tmp_path / "new/folder").iterdir())


def test_children_do_not_keep_it(tmp_path: Path) -> None:
    """Workers of a DataLoader can outlive the run that forked them for a while."""
    with locked(tmp_path, "training"):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
        os.close(reader)
    try:
        with locked(tmp_path, "training") as first:
            assert first
            content = (tmp_path / LOCK).read_bytes()
            with pytest.raises(BlockingIOError):
                lock._open_locked(str(tmp_path / LOCK))
            assert (tmp_path / LOCK).read_bytes() == content
    finally:
        os.close(writer)
        os.waitpid(child, 0)


def test_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(OSError, match=f"{place} cannot be written .*give a"), locked(place, "training"):
            pass

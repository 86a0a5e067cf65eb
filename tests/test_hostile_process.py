"""A process under limits and among others: refused threads, memory and files; forks; names that are no text."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from contract import make_layer, random_inputs
from forked import Forks
from given import Checkpoint
from safetensors.torch import load_file, save_file

from ktft import native
from ktft.serve.front.processes import end_group, members

HIDDEN, INTERMEDIATE = 64, 32
# Stacks of 64 threads take 512 MiB of address space, which stands for any limit on threads: root has no ulimit -u
LIMITED = """
import resource, sys
from ktft.cli.main import app
from typer.testing import CliRunner
source, first, second = sys.argv[1:]
options = ["--format", "k4", "--threads"]
assert CliRunner().invoke(app, ["convert", source, first, *options, "1"]).exit_code == 0  # all is imported now
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), used + (200 << 20)))
app(["convert", source, second, *options, "64"])
"""


def test_refused_threads_are_an_error_that_names_the_limits(
    tiny_checkpoint: Checkpoint, forks: Forks, tmp_path: Path
) -> None:
    (tmp_path / "limited.py").write_text(LIMITED)
    paths = (tmp_path / "limited.py", tiny_checkpoint("qwen3moe"), tmp_path / "first", tmp_path / "second")
    done = forks.run([*map(str, paths)], os.environ | {"COLUMNS": "400", "KTFT_EMULATE_CPUS": "1"})
    assert done.returncode == 2, done.stdout
    for words in ("of 64 for the experts could not be started", "ulimit -v", "kernel.threads-max", "set fewer threads"):
        assert words in done.stdout
    assert "Traceback" not in done.stdout


def test_a_runtime_that_could_not_be_made_leaves_no_threads() -> None:
    code = (
        "import os, resource\nfrom ktft import native\n"
        "used = int(next(l for l in open('/proc/self/status') if l.startswith('VmSize')).split()[1]) * 1024\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20),) * 2)\n"
        "try: native.runtime(64, 1)\nexcept OSError: print(len(os.listdir('/proc/self/task')) - before)\n"
        "print(native.runtime(2, 1).threads)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.split()) == (0, ["0", "2"]), done.stderr


def test_refused_memory_is_named() -> None:
    code = (
        "import resource\nfrom ktft import native\n"
        "runtime = native.runtime(1, 1)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "try: native.StreamedMemory(runtime, 16 << 30)\nexcept MemoryError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "16.000 GiB for the experts were refused" in done.stdout, done.stdout + done.stderr
    assert "ulimit -v, is 8.0 GiB: raise it" in done.stdout


def test_threads_and_nodes_that_the_machine_does_not_have(train_yaml: Any, fork_cli: Any) -> None:
    for key, number in (("threads", 100_000), ("numa_nodes", 1_000)):
        done = fork_cli(["llamafactory-cli", "train"], train_yaml(kt_config={key: number}), check=False)
        assert done.returncode != 0
        assert f"{key} is {number}, but this process may use " in done.stdout
        assert f"set {key} to at most " in done.stdout


def test_a_quota_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"nodes": [{"cpus": list(range(8))}], "cgroup_cpus": 2.5, "cores": 2}
    monkeypatch.setattr("ktft.native.machine.topology", lambda: found)
    native.check_machine(3, 1)
    with pytest.raises(ValueError, match="threads is 4, but this process may use 8 CPUs, with a cgroup quota of 2.5"):
        native.check_machine(4, 1)
    found["cgroup_cpus"] = None
    native.check_machine(8, None)
    monkeypatch.setenv("KTFT_EMULATE_CPUS", "1")
    native.check_machine(99, 99)


def test_training_with_few_open_files(train_yaml: Any, forks: Forks, tmp_path: Path) -> None:
    """Through the command, in a process that has the limit."""
    path = tmp_path / "few.yaml"
    path.write_text(yaml.safe_dump(train_yaml(max_steps=1)))
    command = [str(Path(sys.executable).parent / "llamafactory-cli"), "train", str(path)]
    done = forks.run(command, dict(os.environ), open_files=64)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_more_shards_than_open_files(tiny_checkpoint: Checkpoint, forks: Forks, tmp_path: Path) -> None:
    source, model = tiny_checkpoint("qwen3moe"), tmp_path / "model"
    model.mkdir()
    shutil.copy(source / "config.json", model)
    weight_map = {}
    for shard in source.glob("*.safetensors"):
        for name, tensor in load_file(shard).items():
            weight_map[name] = f"{name}.safetensors"
            save_file({name: tensor}, model / weight_map[name], metadata={"format": "pt"})
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    command = [
        str(Path(sys.executable).parent / "ktft"),
        "convert",
        str(model),
        str(tmp_path / "out"),
        "--threads",
        "1",
    ]
    done = forks.run(command, os.environ | {"COLUMNS": "400"}, open_files=24)
    assert done.returncode == 2 and "Traceback" not in done.stdout, done.stdout
    assert "ulimit -n is 24" in done.stdout


# --- forks ------------------------------------------------------------------------------------------------------------


def in_child(work: Callable[[], bool]) -> int:
    """A forked child's exit status: 0 where `work` says true. A child that hangs is ended by a signal."""
    if (child := os.fork()) == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            os._exit(0 if work() else 3)
        finally:
            os._exit(4)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_while_another_thread_computes() -> None:
    layer = make_layer(HIDDEN, INTERMEDIATE, "bf16", threads=2)
    small, large = (random_inputs(tokens, HIDDEN, dtype=torch.float32) for tokens in (8, 20_000))
    expected, _ = layer.forward(*small, None, "none")
    begun, over = threading.Event(), threading.Event()

    def busy() -> None:
        while not over.is_set():
            begun.set()
            layer.forward(*large, None, "none")

    thread = threading.Thread(target=busy)
    thread.start()
    begun.wait()
    try:
        found = [in_child(lambda: torch.equal(layer.forward(*small, None, "none")[0], expected)) for _ in range(3)]
    finally:
        over.set()
        thread.join()
    assert found == [0, 0, 0]
    assert torch.equal(layer.forward(*small, None, "none")[0], expected)


def test_a_forked_child_is_told_that_lanes_are_its_parents(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    import ktft

    monkeypatch.setenv("KTFT_EMULATE_GPU", "1")
    config = ktft.KtftConfig(expert_format="int8", threads=1)
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("qwen3moe"), quantization_config=config)
    ids = torch.arange(8).reshape(1, 8)
    with torch.no_grad():
        model(ids)

    def refused() -> bool:
        try:
            with torch.no_grad():
                model(ids)
        except RuntimeError as error:
            return "was forked from the one that loaded the model" in str(error)
        return False

    assert in_child(refused) == 0


# --- names ------------------------------------------------------------------------------------------------------------

NAMED = (
    "import ctypes, time; ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0); print('named', flush=True); time.sleep(600)"
)


def test_names_of_processes_need_not_be_text() -> None:
    name = "名前 ) (".encode()[:10] + b"\xe3"
    child = subprocess.Popen(
        [sys.executable, "-c", NAMED.format(name=name)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdout is not None and child.stdout.readline() == b"named\n"
    assert b"\xe3" in Path(f"/proc/{child.pid}/comm").read_bytes()
    assert list(members(child.pid)) == [child.pid]
    waiter = threading.Thread(target=child.wait)
    waiter.start()
    end_group(child.pid, 30)
    waiter.join()
    assert child.returncode == -signal.SIGTERM


def test_a_cgroups_name_need_not_be_text(tmp_path: Path) -> None:
    from ktft.system import cgroup_memory_limit

    folder = os.fsencode(tmp_path / "sys/fs/cgroup") + b"/job-\xe3"
    os.makedirs(folder)
    Path(os.fsdecode(folder), "memory.max").write_text("4096\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/job-\xe3\n")
    assert cgroup_memory_limit(tmp_path) == 4096

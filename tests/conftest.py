"""Fixtures shared by all tests: checkpoints, data, a training YAML, and the commands a user types.

They import torch and what needs it themselves: pytest's process that only hands tests to workers can do without.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import os
import signal
import subprocess
import sys

# Before any library is imported, since each of them reads these once. Triton's functions are made for a GPU or for its
# interpreter once and for all. torch's sums depend on how many threads share them: here as in the processes that tests
# start it is one, on every machine and however many tests run beside each other.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A shell ignores Ctrl-C for what it starts in the background, and so would every process that a test starts
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# SGLang imports what has no build for CPUs, and transformers asks for some of it once
if importlib.util.find_spec("sglang") and not importlib.util.find_spec("sgl_kernel"):
    sys.path.append(os.path.join(os.path.dirname(__file__), "serve", "sglang_stand_ins"))
# LLaMA-Factory gives transformers 5 the answers that TRL 0.24 expects of it, which TRL asks for once, at its import
with contextlib.suppress(ImportError):
    importlib.import_module("llamafactory.extras.packages")

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from fake_cuda import Fake, build
from forked import LIBRARIES, Forks
from given import RunCli, RunPython

import ktft_autoload
from ktft.system import available_memory
from ktft.versions import version_of

# Until all tests are collected: of the time that imports take, a quarter would go into looking for cycles
gc.disable()
pytest.register_assert_rewrite("commands", "contract", "hot", "planning", "runs")

collect_ignore = [] if version_of("llamafactory") else ["test_factory_options.py", "test_llamafactory.py"]
MEMORY_PER_WORKER = 3 << 30
"""More than a worker of pytest-xdist and the training process that its test starts ever hold."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """The workers of `-n auto`: as many as this process has cores, and memory has room for."""
    from ktft import _C  # ktft.native imports torch

    return max(1, min(_C.topology()["cores"], available_memory() // MEMORY_PER_WORKER))


def pytest_collection_finish() -> None:
    """Leave what is imported by now out of later collections. Each run of the Trainer asks for one, of 0.2 s in a
    process with many tests behind it: here Python decides when it is time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(2000, 20, 100)  # looking at all objects takes 0.2 s, with libraries that are imported later
    gc.enable()
    if "accelerate" in sys.modules:
        importlib.import_module("accelerate.utils.memory").gc = SimpleNamespace(collect=lambda: 0)


def pytest_unconfigure() -> None:
    """Leave all out of the collections with which Python ends the process, of seconds each."""
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def reports_without_plots() -> Iterator[None]:
    """Runs in the test's process leave out the plots: see `plots.py`."""
    from plots import without_plots

    with without_plots():
        yield


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_checkpoint("qwen3moe" | "dsv2" | "dsv3")` -> a checkpoint, made once. Copy it before changing it."""
    from tiny import write_checkpoint

    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = write_checkpoint(family, tmp_path_factory.mktemp(family))
        return made[family]

    return make


@pytest.fixture(scope="session")
def base(tiny_checkpoint: Callable[[str], Path]) -> Path:
    """A checkpoint for tests in which any family would do."""
    return tiny_checkpoint("qwen3moe")


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LLaMA-Factory's `dataset_dir`: sets `sft`, `pt`, `dpo` (rm too) and `kto`."""
    from tiny import write_data

    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def stock_hosts() -> Iterator[None]:
    """Remove ktft's patches of other libraries for the test, and put them back afterwards."""
    from ktft import hosts
    from ktft.hosts import llamafactory

    patched = hosts.undo()
    yield
    hosts.undo()
    hosts.install(patched)
    for name in ktft_autoload.MODULES:  # patched as soon as they are imported, which the test may have done
        if name in sys.modules:
            llamafactory.adapt(sys.modules[name])


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    """A CUDA driver that needs no GPU."""
    return build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def train_yaml(tiny_checkpoint: Callable[[str], Path], data_dir: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`train_yaml("dsv3", stage="sft", **overrides)` -> LLaMA-Factory settings: 2 steps with ktft's experts."""
    from tiny import factory_settings

    def make(family: str = "qwen3moe", stage: str = "sft", **overrides: Any) -> dict[str, Any]:
        own = {
            "stage": stage,
            "lora_rank": 4,
            "lora_alpha": 8,
            "dataset": {"rm": "dpo"}.get(stage, stage),
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "max_steps": 2,
            "logging_steps": 1,
        }
        return factory_settings(tiny_checkpoint(family), data_dir, tmp_path / "out", **own | overrides)

    return make


def _runner(execute: Callable[[list[str], dict[str, str]], subprocess.CompletedProcess[str]], folder: Path) -> RunCli:
    """What `run_cli` and `fork_cli` give; `execute` runs a command in an environment."""

    def run(
        args: list[str], config: dict[str, Any] | None = None, *, check: bool = True, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        if args[0] == "llamafactory-cli":
            pytest.importorskip("llamafactory")
        command = [str(Path(sys.executable).parent / args[0]), *args[1:]]
        if config is not None:
            path = folder / "train.yaml"
            path.write_text(yaml.safe_dump(config))
            command.append(str(path))
        own = {"HF_DATASETS_CACHE": str(folder / "cache"), "COLUMNS": "200"}
        done = execute(command, os.environ | own | (env or {}))
        if check and done.returncode:
            pytest.fail(f"{' '.join(done.args)} exited with {done.returncode}:\n{done.stdout}")
        return done

    return run


@pytest.fixture
def run_cli(tmp_path: Path) -> RunCli:
    """`run_cli(["llamafactory-cli", "train"], config, check=True)` -> finished process; `.stdout` holds both streams.

    A config mapping is written to a YAML file whose path becomes the last argument. With `check`, a non-zero exit
    fails the test and shows the output.
    """
    return _runner(_execute, tmp_path)


def _execute(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, env=environment, **pipes, text=True, timeout=600)


@pytest.fixture(scope="session")
def forks(library_forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """For `fork_cli`."""
    pytest.importorskip("llamafactory")
    forks = Forks(tmp_path_factory.mktemp("forks"), beneath=library_forks)
    yield forks
    forks.close()


@pytest.fixture
def fork_cli(forks: Forks, tmp_path: Path) -> RunCli:
    """`run_cli`, without the seconds that imports take: `forked.py` says what is then not tested."""
    return _runner(forks.run, tmp_path)


@pytest.fixture(scope="session")
def library_forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """For `fork_python`."""
    forks = Forks(tmp_path_factory.mktemp("library_forks"), LIBRARIES)
    yield forks
    forks.close()


@pytest.fixture
def fork_python(library_forks: Forks, tmp_path: Path) -> RunPython:
    """`fork_python(code)` -> finished process: `python -c`, but with the libraries of `LIBRARIES` imported before."""

    def run(code: str) -> subprocess.CompletedProcess[str]:
        program, out, err = (tmp_path / f"fork_python.{kind}" for kind in ("py", "out", "err"))
        program.write_text(code)
        status = library_forks.start([str(program)], dict(os.environ), out, stderr=err).wait()
        return subprocess.CompletedProcess(["python", str(program)], status, out.read_text(), err.read_text())

    return run


@pytest.fixture
def run_exp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """LLaMA-Factory as a library, in this process."""
    import torch

    run_exp = pytest.importorskip("llamafactory.train.tuner").run_exp

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    verbosity, grad = logging.getLogger("transformers").level, torch.is_grad_enabled()
    yield run_exp
    logging.getLogger("transformers").setLevel(verbosity)
    torch.set_grad_enabled(grad)


@pytest.fixture
def train(
    run_exp: Callable[[dict[str, Any]], None], caplog: pytest.LogCaptureFixture
) -> Callable[[dict[str, Any]], str]:
    """`train(config)` -> what ktft logged: `llamafactory-cli train`, but without the seconds that a process takes."""

    def run(config: dict[str, Any]) -> str:
        with caplog.at_level(logging.INFO, "ktft"):
            run_exp(config)
        return caplog.text

    return run

"""What vLLM's worker on a GPU does about ktft's experts between steps; the CPU stands in for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract import make_layer, random_inputs
from tiny import write_checkpoint
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from ktft import native
from ktft.native.hybrid import HostExpertsError
from ktft.serve.engine import Findings, Options
from ktft.serve.engines import VLLM
from ktft.serve.runtime import served_model
from ktft.serve.runtime.hybrid_experts import HybridModel
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.vllm import loader
from ktft.serve.vllm.gpu_worker import KtftGpuWorker

HIDDEN, TOP_K = 64, 2
TOKENS = "tokens of the step"


class Waiting(AsyncModelRunnerOutput):
    """Tokens that are still computed."""

    def get_output(self) -> Any:
        return TOKENS


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[HybridModel]:
    """The model that this process serves."""
    layer = make_layer(HIDDEN, 96, "k4", native.default_isa())
    made = HybridModel({0: layer}, "cpu", top_k=TOP_K, dtype=torch.bfloat16)
    monkeypatch.setattr(served_model, "_current", made)
    yield made
    made.close()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> KtftGpuWorker:
    """A worker whose vLLM gives what `gives` says, and writes down what it was asked for."""
    made = KtftGpuWorker.__new__(KtftGpuWorker)
    made.gives, made.asked = {"execute_model": None, "sample_tokens": TOKENS}, []
    for name in made.gives:
        monkeypatch.setattr(Worker, name, lambda self, _, name=name: self.asked.append(name) or self.gives[name])
    return made


def fail(model: HybridModel) -> None:
    """A step whose experts fail, as in a CUDA graph: nothing is raised."""
    hidden, index, weights = random_inputs(1, HIDDEN, TOP_K)
    model.layers[0](hidden * torch.nan, index, weights)


def test_residents_follow_traffic_before_each_step(
    model: HybridModel, worker: KtftGpuWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "between_steps", lambda: worker.asked.append("between_steps"))
    assert worker.execute_model(SimpleNamespace()) is None
    assert worker.asked == ["between_steps", "execute_model"]


def test_tokens_come_out(model: HybridModel, worker: KtftGpuWorker) -> None:
    assert worker.sample_tokens(None) == TOKENS
    worker.gives["sample_tokens"] = Waiting()
    found = worker.sample_tokens(None)
    assert isinstance(found, AsyncModelRunnerOutput)
    assert found.get_output() == TOKENS


@pytest.mark.parametrize("waits", [True, False])
def test_no_token_of_a_step_that_failed(model: HybridModel, worker: KtftGpuWorker, waits: bool) -> None:
    if waits:
        worker.gives["sample_tokens"] = Waiting()
        found = worker.sample_tokens(None)
        fail(model)
        with pytest.raises(HostExpertsError, match="NaN or Inf"):
            found.get_output()
    else:
        fail(model)
        with pytest.raises(HostExpertsError, match="NaN or Inf"):
            worker.sample_tokens(None)


def test_the_server_starts_it_and_the_loader_asks_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServeSettings(str(write_checkpoint("qwen3moe", tmp_path / "base")))
    on_gpu = Findings(VLLM, "qwen3_moe", True, 512, 1 << 20)
    words = VLLM.arguments(settings, Options(), on_gpu)
    chosen = words[words.index("--worker-cls") + 1]
    assert chosen == f"{KtftGpuWorker.__module__}.{KtftGpuWorker.__qualname__}"
    parallel = SimpleNamespace(worker_cls=chosen)
    monkeypatch.setattr(loader, "get_current_vllm_config", lambda: SimpleNamespace(parallel_config=parallel))
    loader._check_worker()
    parallel.worker_cls = "vllm.v1.worker.gpu_worker.Worker"
    with pytest.raises(ValueError, match="start vLLM by `ktft serve`"):
        loader._check_worker()

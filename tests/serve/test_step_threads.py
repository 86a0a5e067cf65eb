"""A server on a CPU takes the threads that a step needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from in_process import served
from tiny import write_checkpoint

from ktft.native.machine import Runtime, runtime
from ktft.serve.engine import Findings, Options
from ktft.serve.engines import VLLM
from ktft.serve.runtime.served_model import current
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.vllm.cpu_worker import AWAKE, FEW_TOKENS, SHORT, KtftCpuWorker, StepThreads

ALL = 2
WORKER = f"{KtftCpuWorker.__module__}.{KtftCpuWorker.__qualname__}"
USUAL = 50e-6
"""Seconds that ktft's threads spin unless told otherwise. Servers of other tests may have left them awake."""


@pytest.fixture
def threads() -> Iterator[int]:
    """All threads of OpenMP."""
    before = torch.get_num_threads()
    torch._C.set_num_threads(ALL)
    yield ALL
    torch._C.set_num_threads(before)


def spun_for(kernels: Runtime) -> float:
    """How long ktft's threads spin."""
    before = kernels.spin_for(0)
    kernels.spin_for(before)
    return before


def test_few_tokens_with_a_short_context_are_computed_by_one_thread(threads: int) -> None:
    kernels = runtime(threads=2)
    kernels.spin_for(USUAL)
    steps = StepThreads(kernels)
    for tokens, context, alone in (
        (2 * FEW_TOKENS, 0, False),
        (1, 32, True),
        (FEW_TOKENS, SHORT, True),
        (1, SHORT + 1, False),
        (1, 0, True),
        (FEW_TOKENS + 1, 0, False),
    ):
        steps.begin(tokens, context)
        assert torch.get_num_threads() == (1 if alone else threads), (tokens, context)
        assert spun_for(kernels) == pytest.approx(AWAKE if alone else USUAL), (tokens, context)


def test_steps_of_a_server_follow(tmp_path: Path, threads: int) -> None:
    checkpoint = write_checkpoint("qwen3moe", tmp_path / "base", head_dim=32)
    long = [3 + i % 90 for i in range(FEW_TOKENS + 1)]
    with served(checkpoint, threads=2) as server:
        current().runtime.spin_for(USUAL)
        prompt, _ = server.greedy(long, tokens=1)
        assert (torch.get_num_threads(), spun_for(current().runtime)) == (threads, USUAL), "after the prompt"
        answer, _ = server.greedy(long, tokens=4)
        assert (torch.get_num_threads(), spun_for(current().runtime)) == (1, AWAKE), "after single tokens"
        server.greedy(long[::-1], tokens=1)  # its start is not among the cached ones
        assert (torch.get_num_threads(), spun_for(current().runtime)) == (threads, USUAL), "after another prompt"
    assert answer[:1] == prompt


def test_a_server_without_a_gpu_gets_the_worker(tmp_path: Path) -> None:
    settings = ServeSettings(str(tmp_path))
    on_cpu = Findings(VLLM, "qwen3_moe", False, 512, 1 << 20)
    assert WORKER in VLLM.arguments(settings, Options(), on_cpu)
    assert WORKER not in VLLM.arguments(settings, Options(), replace(on_cpu, gpu=True))

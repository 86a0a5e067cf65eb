"""vLLM's worker on a CPU, which sets the threads of each step: `--worker-cls`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from ktft.native.machine import Runtime
from ktft.serve.runtime.served_model import current
from ktft.serve.vllm.attention import MOST_NEW, decodes

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

FEW_TOKENS = 32
"""With more, norms and attention are long enough for all threads."""
SHORT = 3072
"""Tokens of context, of all requests in a step: with more, vLLM's attention gains more by a second thread than norms
lose."""
AWAKE = 2e-3
"""Seconds that ktft's threads spin for their next product: longer than what lies between two of a step's."""

_set_num_threads = torch._C.set_num_threads  # of torch itself, CPUWorker takes it away


class StepThreads:
    """The threads of OpenMP and of ktft's kernels in a step.

    A token's norms, rotation and attention over a short context take less time than waking a second thread of OpenMP,
    and that thread would take the core from ktft's. One thread then computes them, while ktft's threads stay awake for
    the next product. Steps with more to do have all of OpenMP's threads, and ktft's sleep meanwhile.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime, self._threads = runtime, torch.get_num_threads()
        self._alone = False
        self._spin = 0.0

    def begin(self, tokens: int, context: int) -> None:
        """Set the threads for a step of so many new tokens, for which vLLM's attention reads so many earlier ones."""
        alone = tokens <= FEW_TOKENS and context <= SHORT
        if alone == self._alone:
            return
        _set_num_threads(1 if alone else self._threads)
        before = self._runtime.spin_for(AWAKE if alone else self._spin)
        if alone:
            self._spin = before
        self._alone = alone


class KtftCpuWorker(CPUWorker):
    """vLLM's own, but for the threads of a step."""

    _step_threads: StepThreads | None = None

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """A step of the model."""
        if self._step_threads is None:
            self._step_threads = StepThreads(current().runtime)
        tokens = scheduler_output.total_num_scheduled_tokens
        if max(scheduler_output.num_scheduled_tokens.values(), default=0) <= MOST_NEW and decodes():
            context = 0  # none is read by OpenMP's threads
        else:
            context = sum(request.num_computed_tokens for request in scheduler_output.scheduled_new_reqs)
            context += sum(scheduler_output.scheduled_cached_reqs.num_computed_tokens)
        self._step_threads.begin(tokens, context)
        return super().execute_model(scheduler_output)

"""vLLM's worker on a GPU, which looks after ktft's experts between steps: `--worker-cls`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from ktft.device import device_of
from ktft.serve.runtime.hybrid_experts import HybridModel
from ktft.serve.runtime.served_model import current

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class CheckedOutput(AsyncModelRunnerOutput):
    """A step's tokens, which vLLM takes while the next step is computed.

    Nothing in a CUDA graph can raise what the experts on the CPU met, so whoever takes the tokens does.
    """

    def __init__(self, output: AsyncModelRunnerOutput, model: HybridModel) -> None:
        self._output, self._model = output, model
        # vLLM's own event spins for the whole step, on a core
        self._computed = device_of(model.device).event(blocking=True)
        self._computed.record()

    def get_output(self) -> Any:
        """Wait for the step. Raises HostExpertsError if experts failed in it, or already in the next one."""
        self._computed.synchronize()
        output = self._output.get_output()
        self._model.check()
        return output


class KtftGpuWorker(Worker):
    """vLLM's own. Residents follow traffic before a step, and no token of a step whose experts failed gets out."""

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """A step of the model. What changes about residents goes into the stream, behind the steps in it."""
        _hybrid().between_steps()
        return _checked(super().execute_model(scheduler_output))

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The tokens of the step, which may still be computed."""
        return _checked(super().sample_tokens(grammar_output))


def _checked(output: Any) -> Any:
    """None if tokens are yet to be sampled. Any other output that does not wait has been waited for."""
    if isinstance(output, AsyncModelRunnerOutput):
        return CheckedOutput(output, _hybrid())
    if output is not None:
        _hybrid().check()
    return output


def _hybrid() -> HybridModel:
    return cast(HybridModel, current())

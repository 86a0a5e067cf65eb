"""SGLang in tests: what its processes need on a CPU, and its model runner in this process."""

from __future__ import annotations

import importlib.util
import os
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ktft.serve.runtime import served_model
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.runtime.step_adapters import BASE

IDS = list(range(3, 35))
STAND_INS = Path(__file__).parent / "sglang_stand_ins"
MISSING = "SGLang is not installed: pip install 'ktft[serve-sglang]', in an environment of its own"


def installed() -> bool:
    return importlib.util.find_spec("sglang") is not None


def environment() -> dict[str, str]:
    """For a process that imports SGLang on a CPU: as here, with what stands in for what is absent."""
    here = {"PYTHONPATH": str(STAND_INS)} if str(STAND_INS) in sys.path else {}
    return {"SGLANG_USE_CPU_ENGINE": "1"} | here


class Runner:
    """SGLang's own `ModelRunner` with ktft's plugin, as the server's scheduler has it."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner

    @property
    def model(self) -> Any:
        return self.runner.model

    def load(self, number: int, path: Path) -> None:
        """As the scheduler does when the server is asked to."""
        from sglang.srt.lora.lora_registry import LoRARef

        done = self.runner.load_lora_adapter(LoRARef(lora_id=str(number), lora_name=str(number), lora_path=str(path)))
        if not done.success:
            raise ValueError(done.error_message)

    def unload(self, number: int) -> None:
        from sglang.srt.lora.lora_registry import LoRARef

        assert self.runner.unload_lora_adapter(LoRARef(lora_id=str(number), lora_name=str(number))).success

    def next_logprobs(self, asked: Sequence[tuple[Sequence[int], int]]) -> Tensor:
        """Log-probabilities `[n, vocabulary]` of what follows n prompts, each by an adapter's number, in one batch."""
        from sglang.benchmark.one_batch import extend
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        requests = []
        for number, (ids, adapter) in enumerate(asked):
            request = Req(
                rid=str(number),
                origin_input_text="",
                origin_input_ids=array("q", ids),
                sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
                lora_id=None if adapter == BASE else str(adapter),
            )
            request.full_untruncated_fill_ids = request.origin_input_ids
            request.logprob_start_len = -1
            request.set_extend_range(0, len(ids))
            requests.append(request)
        logits = extend(requests, self.runner)[1]
        self.runner.req_to_token_pool.clear()
        self.runner.token_to_kv_pool_allocator.clear()
        return logits.float().log_softmax(-1)

    def logprobs(self, adapter: int = BASE) -> Tensor:
        """Log-probabilities of the tokens of `IDS` after the first, each after all that come before it."""
        counts = range(1, len(IDS))
        found = self.next_logprobs([(IDS[:count], adapter) for count in counts])
        return found.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]


@contextmanager
def runner(checkpoint: Path, **settings: Any) -> Iterator[Runner]:
    """Load a checkpoint by SGLang's own loading, in fp32. SGLang can do so once in a process."""
    served = ServeSettings(str(checkpoint), **{"threads": 1, "adapter_swap": True, "expert_format": "bf16"} | settings)
    environ = {"SGLANG_USE_CPU_ENGINE": "1"} | served.to_env()
    with patch.dict(os.environ, environ), patch.object(served_model, "_current", None):
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.benchmark.one_batch import load_model
        from sglang.srt.server_args import PortArgs, ServerArgs

        args = ServerArgs(
            model_path=str(checkpoint),
            dtype="float32",
            quantization="ktft",
            device="cpu",
            attention_backend="torch_native",
            max_total_tokens=2048,
            context_length=256,
            enable_lora=True,
            max_lora_rank=8,
            lora_target_modules=["all"],
            disable_overlap_schedule=True,
        )
        args.check_server_args()
        made, _ = load_model(args, PortArgs.init_new(args), 0, 0)
        yield Runner(made.torch_runner)

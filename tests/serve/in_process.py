"""A model served in this process, without HTTP: vLLM's `LLM` with ktft's plugin, as `ktft serve` sets it up."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ktft.serve.runtime import served_model as experts
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.vllm.plugin import register

IDS = list(range(3, 35))
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1"}
BLOCKS = 256
"""Of the KV cache: more than any test fills. vLLM would write zeros into a gigabyte for each model."""


class Served:
    """A model served in this process by vLLM's `llm`."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.number = 0  # of the adapter that prompts have
        self._last = 100  # of those that `use` has loaded

    def use(self, path: Path | None) -> dict[str, Any] | None:
        """Load an adapter for the prompts that follow, in place of the one before. None goes back to the base."""
        before, adapter = self.number, None
        if path is not None:
            adapter, self._last = self.add_adapter(self._last + 1, path), self._last + 1
        self.number = 0 if path is None else self._last
        if before:
            self.remove_adapter(before)
        return adapter

    def add_adapter(self, number: int, path: Path) -> dict[str, Any]:
        """Load one beside others, as the server does."""
        (done,) = self.llm.collective_rpc("ktft_add_adapter", args=(number, str(path)))
        return dict(done["adapter"])

    def remove_adapter(self, number: int) -> None:
        self.llm.collective_rpc("ktft_remove_adapter", args=(number,))

    def together(self, asked: Sequence[tuple[Sequence[int], int]], tokens: int = 4) -> list[tuple[list[int], Tensor]]:
        """The greedy continuations of prompts, each by the adapter of a number, 0 for the base, in one batch.

        With each come the log-probabilities of all tokens, the prompt's after the first and those of the continuation.
        """
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, max_tokens=tokens, prompt_logprobs=0, logprobs=0, ignore_eos=True)
        prompts = [{"prompt_token_ids": list(ids)} for ids, _ in asked]
        adapters = [self._carried(n) for _, n in asked]
        found = []
        for out in self.llm.generate(prompts, parameters, use_tqdm=False, lora_request=adapters):
            (said,) = out.outputs
            prompt = zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=True)
            every = [*prompt, *zip(said.token_ids, said.logprobs, strict=True)]
            found.append((list(said.token_ids), torch.tensor([each[i].logprob for i, each in every])))
        return found

    def _generate(self, ids: Sequence[int], parameters: Any) -> Any:
        carried = self._carried(self.number)
        return self.llm.generate([{"prompt_token_ids": list(ids)}], parameters, use_tqdm=False, lora_request=carried)

    @staticmethod
    def _carried(number: int) -> Any:
        """What a request for an adapter carries."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(f"a{number}", number, f"/a#{number}") if number else None

    def status(self) -> dict[str, Any]:
        (status,) = self.llm.collective_rpc("ktft_status")
        return dict(status)

    @property
    def adapter(self) -> dict[str, Any] | None:
        """What the status tells of the only adapter."""
        adapters = self.status()["adapters"]
        assert len(adapters) < 2
        return next(iter(adapters), None)

    @property
    def model(self) -> Any:
        """vLLM's model."""
        (model,) = self.llm.apply_model(lambda model: model)
        return model

    def logprobs(self, ids: Sequence[int] = IDS) -> Tensor:
        """Log-probabilities of a prompt's tokens after the first."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (out,) = self._generate(ids, parameters)
        return torch.tensor([found[i].logprob for i, found in zip(ids[1:], out.prompt_logprobs[1:], strict=True)])

    def greedy(self, ids: Sequence[int] = IDS, tokens: int = 8) -> tuple[list[int], list[float]]:
        """The greedy answer, and the log-probability of each of its tokens."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, ignore_eos=True)
        (out,) = self._generate(ids, parameters)
        (said,) = out.outputs
        return list(said.token_ids), [each[i].logprob for i, each in zip(said.token_ids, said.logprobs, strict=True)]

    def lead(self, ids: Sequence[int], token: int) -> float:
        """How much more probable, as a difference of logarithms, the likeliest token after `ids` is than this one."""
        from vllm import SamplingParams

        (out,) = self._generate(ids, SamplingParams(temperature=0, max_tokens=1, logprobs=20))
        (found,) = out.outputs[0].logprobs
        return max(each.logprob for each in found.values()) - found[token].logprob


@contextmanager
def engine(checkpoint: Path, **options: Any) -> Iterator[Any]:
    """vLLM's `LLM` of a checkpoint, with these options, until the block ends. A process has one at a time.

    vLLM freezes all objects as a model starts, thaws them as it ends, and asks for ten collections in between, each of
    which would look at all that was ever imported, for half a second. So what was there before is frozen for good.
    """
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.freeze()
    with patch.object(gc, "freeze", lambda: None), patch.object(gc, "unfreeze", lambda: None):
        llm = LLM(str(checkpoint), **{"enforce_eager": True, "dtype": "bfloat16", "max_model_len": 128} | options)
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            cleanup_dist_env_and_memory()


@contextmanager
def served(checkpoint: Path, *, options: dict[str, Any] | None = None, **settings: Any) -> Iterator[Served]:
    """Serve a checkpoint, with room for adapters. `settings` are `ServeSettings`'s, `options` vLLM's."""
    settings = {"threads": 1, "adapter_swap": True} | settings
    own = {
        "enable_lora": True,
        "max_loras": settings.get("max_adapters", 8),
        "quantization": "ktft",
        "load_format": "ktft",
        "worker_cls": "ktft.serve.vllm.cpu_worker.KtftCpuWorker",
        "worker_extension_cls": "ktft.serve.vllm.worker.KtftWorker",
        "num_gpu_blocks_override": BLOCKS,
    }
    environment = ENVIRONMENT | ServeSettings(str(checkpoint), **settings).to_env()
    with patch.dict(os.environ, environment), patch.object(experts, "_current", None):
        from vllm.platforms import current_platform

        # vLLM compiles single functions of its own, each for many seconds: logprobs, before they are imported
        current_platform.simple_compile_backend = "eager"
        # Once is enough, and each time looks at every name in every module
        override = current_platform.register_triton_kernel_overrides
        current_platform.register_triton_kernel_overrides = functools.cache(override)
        register()  # vLLM loads plugins once a process: an earlier test may have made it do so without ktft
        with engine(checkpoint, **own | (options or {})) as llm:
            made = Served(llm)
            del llm
            try:
                yield made
            finally:
                del made.llm

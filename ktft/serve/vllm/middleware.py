"""ktft's gate before vLLM's HTTP application, which vLLM makes of `--middleware`, and what the gate asks vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from vllm.lora.request import LoRARequest

from ktft.hosts.vllm import LORA_REQUESTS
from ktft.serve.engine import EngineError, Paths
from ktft.serve.front.asgi import Scope
from ktft.serve.front.gate import Gate
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.vllm.command import RESERVED_NAMES

_COMPUTES = {
    "/v1/chat/completions": True,
    "/v1/chat/completions/render": True,
    "/v1/completions": True,
    "/v1/completions/render": True,
    "/v1/responses": True,
    "/v1/responses/render": True,
    "/v1/messages": True,
    "/v1/messages/render": True,
    "/v1/messages/count_tokens": True,
    "/v1/chat/completions/batch": True,
    "/v1/systemone": True,
    "/generative_scoring": True,
    "/inference/v1/generate": True,
    "/invocations": True,
    "/tokenize": False,
    "/detokenize": False,
}
_ADMIN = ("/abort_requests", "/start_profile", "/stop_profile")
PATHS = Paths(_COMPUTES, admin=_ADMIN, passed=("/ping",), reserved=RESERVED_NAMES)
"""Those of every vLLM that ktft was tested with."""
_WRAPPINGS = (
    r"Call to \w+ method failed: (.*)",
    r"Worker failed with error '(.*)', please check the stack trace above for the root cause",
)


class VllmClient:
    """vLLM's engine as the scope of an HTTP request reaches it. See `ktft.serve.engine.Client`."""

    def __init__(self, scope: Scope) -> None:
        self._state = scope["app"].state
        self._engine = self._state.engine_client

    async def add_adapter(self, number: int, path: str) -> dict[str, Any]:
        """See `ktft.serve.vllm.worker.KtftWorker.ktft_add_adapter`."""
        return dict(await self._ask("ktft_add_adapter", number, path))

    async def remove_adapter(self, number: int) -> None:
        """See `ktft.serve.vllm.worker.KtftWorker.ktft_remove_adapter`."""
        await self._ask("ktft_remove_adapter", number)

    async def _ask(self, method: str, *args: Any) -> Any:
        try:
            return (await self._engine.collective_rpc(method, args=args))[0]
        except Exception as error:  # vLLM hands on the worker's exception as text
            raise EngineError(reason_of(error) or type(error).__name__, dead=self._engine.errored) from None

    def announce(self, adapters: Mapping[str, tuple[int, str]]) -> None:
        """KV cache is kept apart by the number, see `ktft.serve.vllm.lora_manager.cache_keys`."""
        requests = {name: LoRARequest(name, number, path) for name, (number, path) in adapters.items()}
        LORA_REQUESTS.put(self._state.openai_serving_models, requests)

    async def status(self) -> dict[str, Any]:
        """See `ktft.serve.vllm.worker.KtftWorker.ktft_status`."""
        return dict((await self._engine.collective_rpc("ktft_status"))[0])


class VllmGate(Gate):
    """`Gate` as vLLM makes it: of the application alone."""

    def __init__(self, app: Any, settings: ServeSettings | None = None, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(app, VllmClient, PATHS, settings, registry)


def reason_of(error: BaseException) -> str:
    """The message of what a worker's method raised, without what vLLM puts around it."""
    text = str(error)
    for wrapping in _WRAPPINGS:
        if match := re.fullmatch(wrapping, text, re.DOTALL):
            text = match[1]
    return text

"""ktft's gate before SGLang's HTTP application, and what the gate asks SGLang."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from sglang.srt.entrypoints.http_server import get_global_state
from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, UnloadLoRAAdapterReqInput

from ktft.serve.engine import EngineError, Paths
from ktft.serve.front.asgi import Scope
from ktft.serve.front.gate import Gate
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.sglang.answers import Answers
from ktft.serve.sglang.hooks import STATUS

PATHS = Paths(
    computes={
        "/v1/completions": True,
        "/v1/chat/completions": True,
        "/tokenize": False,
        "/detokenize": False,
    },
    reads=("/health", "/v1/models", "/metrics", "/openapi.json", "/docs", "/ping", "/model_info"),
)
"""SGLang has many more paths. Some of those that take a GET change what every user gets, such as /flush_cache."""


class SglangClient:
    """SGLang's engine as the HTTP process reaches it. See `ktft.serve.engine.Client`."""

    def __init__(self, scope: Scope) -> None:
        self._manager: Any = get_global_state().tokenizer_manager

    async def add_adapter(self, number: int, path: str) -> dict[str, Any]:
        """See `ktft.serve.sglang.lora_manager.add`."""
        begin = time.perf_counter()
        await self._load(str(number), path)
        return await self._loaded(begin)

    async def remove_adapter(self, number: int) -> None:
        """See `ktft.serve.runtime.slots.remove_adapter`."""
        await self._unload(str(number))

    async def _loaded(self, begin: float) -> dict[str, Any]:
        """What is told of the adapter that was loaded last."""
        seconds, adapters = time.perf_counter() - begin, (await self.status())["adapters"]
        return {"adapter": adapters[-1] if adapters else None, "seconds": seconds}

    async def _load(self, lora_id: str, path: str) -> None:
        await self._ask(LoadLoRAAdapterReqInput(lora_name=lora_id, lora_path=path, lora_id=lora_id))

    async def _unload(self, lora_id: str) -> None:
        await self._ask(UnloadLoRAAdapterReqInput(lora_name=lora_id, lora_id=lora_id))

    async def _ask(self, request: Any) -> None:
        """The scheduler answers between two steps. If it has died, SGLang ends this process, too."""
        self._manager.auto_create_handle_loop()
        (result,) = await self._manager.update_lora_adapter_communicator(request)
        if not result.success:
            raise EngineError(result.error_message, dead=False)

    def announce(self, adapters: Mapping[str, tuple[int, str]]) -> None:
        """See `ktft.serve.sglang.adapter_names.AdapterNames.announce`."""
        self._manager.lora_registry.announce(adapters)

    async def status(self) -> dict[str, Any]:
        """See `ktft.serve.sglang.hooks.get_internal_state`."""
        (state,) = await self._manager.get_internal_state()
        return dict(state[STATUS])


class SglangGate(Gate):
    """`Gate` as SGLang makes it: of the application alone."""

    def __init__(self, app: Any, settings: ServeSettings | None = None, registry: CollectorRegistry = REGISTRY) -> None:
        super().__init__(Answers(app, registry), SglangClient, PATHS, settings, registry)

"""What stands before vLLM's HTTP server: names of models, changes of the adapter, bad input, ktft's metrics.

vLLM gets it by `--middleware`, which puts it before all else. Responses that are computed pass through as they come.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry

from ktft import config
from ktft.hosts.vllm import BASE_MODEL_PATHS
from ktft.serve.front import requests
from ktft.serve.front.adapter_record import AdapterRecord, Named, NotRecorded
from ktft.serve.front.admission import Admission, Busy, Gone
from ktft.serve.front.bodies import COMPUTES, check_request
from ktft.serve.front.door import Door
from ktft.serve.front.metrics import Metrics
from ktft.serve.front.requests import Message, Receive, Refusal, Scope, Send
from ktft.serve.runtime.served_model import MIXED
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.vllm.worker import reason_of

PASSED = ("/ping", "/start_profile", "/stop_profile", "/abort_requests")
"""Paths that take a POST, besides those that compute."""
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MODELS, METRICS, STATUS, ROUTING = "/v1/models", "/metrics", "/ktft/status", "/ktft/routing"
LONGEST_NAME = 256  # characters of an adapter's
_RESET_TRIES, _RESET_PAUSE = 100, 0.05  # seconds: blocks of requests that were aborted are freed within a step


class Gate:
    """ASGI middleware around vLLM's server: one adapter or none is served, under its own name.

    Args:
        app: vLLM's application.
        settings: None takes this process's environment.
        registry: where vLLM's metrics are.
    """

    def __init__(self, app: Any, settings: ServeSettings | None = None, registry: CollectorRegistry = REGISTRY) -> None:
        self.app = app
        self.settings = settings or ServeSettings.from_env()
        self.admission = Admission(self.settings.swap_timeout)
        self.base = self.settings.base_name
        self.adapter = self.settings.served_adapter
        self.swaps = 0
        self.mixed: str | None = None  # what went wrong when no adapter could be put into the model whole
        self.door = Door(self.settings.hosts, self.settings.origins, *config.server_keys())
        self._record = AdapterRecord(self.settings.adapter_file)
        self._metrics = Metrics(self, registry)

    @property
    def served(self) -> str:
        """The name that requests have to give."""
        return self.base if self.adapter is None else self.adapter[0]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle or pass on what comes."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "ktft serve has no websocket"})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        send = self.door.answering(scope, send)
        try:
            await self._route(self.door.let_in(scope), receive, send)
        except Refusal as refusal:
            await refusal.answer(send)
        except Busy:
            wait = math.ceil(self.admission.timeout)
            text = f"the adapter is being changed, or requests in flight keep it from that, for more than {wait} s"
            await Refusal(503, f"{text}; try again", retry_after=min(wait, 5)).answer(send)
        except Gone:
            pass

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], requests.path_of(scope).rstrip("/")
        engine = scope["app"].state.engine_client if "app" in scope else None
        if method == "POST" and path in COMPUTES:
            await self._compute(path, scope, receive, send)
        elif method == "POST" and path in (LOAD, UNLOAD):
            await self._change(path, scope, receive, send)
        elif method == "POST" and path not in PASSED and not path.endswith("/cancel"):
            raise Refusal(404, f"ktft serve has no {path}; GET /openapi.json lists what there is")
        elif method == "GET" and path == MODELS:
            await self.app(scope, receive, _edited(send, self._add_parent))
        elif method == "GET" and path == STATUS:
            await self._metrics.refresh(engine)
            await requests.answer_json(send, self._metrics.to_dict())
        elif method == "GET" and path == ROUTING:
            await self._metrics.refresh(engine)
            await requests.answer_json(send, self._metrics.routing().to_dict())
        else:
            if path == METRICS:
                await self._metrics.refresh(engine)
            await self.app(scope, receive, send)

    async def _compute(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        body = await requests.read_body(scope, receive)
        if body is None:
            return
        name = check_request(path, requests.parse(scope, body))
        async with self.admission.entered(lambda: self._check_name(name), receive):
            await self.app(scope, requests.replayed(body, receive), send)

    def _check_name(self, name: str | None) -> None:
        if self.mixed is not None:
            raise Refusal(503, self.mixed)
        if name is not None and name != self.served:
            known = self.base if self.adapter is None else f"the adapter {self.served} of {self.base}"
            raise Refusal(404, f"the model {name!r} is not served; what is served is {known}", param="model")

    # --- the adapter --------------------------------------------------------------------------------------------------

    async def _change(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, with the bodies that vLLM's own take."""
        body = await requests.read_body(scope, receive)
        if body is None:
            return
        request = requests.parse(scope, body)
        keys = ("lora_name", "lora_path") if path == LOAD else ("lora_name",)
        for key in keys:
            if not isinstance(request.get(key), str) or not request[key]:
                raise Refusal(400, f"{key} is {request.get(key)!r}; give {' and '.join(keys)}", param=key)
        name = request["lora_name"]
        adapter = None
        if path == LOAD:
            _check_name_of_adapter(name, self.base)
            adapter = name, str(Path(request["lora_path"]).absolute())
        result = await self._swap(scope["app"].state, name, adapter)
        await requests.answer_json(send, {"model": self.served, **result})

    async def _swap(self, state: Any, name: str, adapter: Named | None) -> dict[str, Any]:
        """Serve another adapter, or the base. All or nothing, the record for a server that is started again included.

        Raises:
            Refusal: it was not possible; what was served before still is.
            Busy: requests in flight took too long.
        """
        if adapter is None and (self.adapter is None or self.adapter[0] != name):
            raise Refusal(404, f"no adapter {name!r} is loaded; what is served is {self.served}", param="lora_name")
        if adapter is not None:
            if not self.settings.adapter_slots:
                raise Refusal(400, "this server has no room for an adapter; start it with --adapter-swap")
            _check_directory(adapter[1])
        async with self.admission.closed():
            before = self.served
            # First: once it has worked there is one step left, and that one is atomic
            await _forget_prefixes(state.engine_client)
            try:
                with self._record.changing(adapter):
                    result: dict[str, Any] = await self._set(state, adapter)
            except NotRecorded as error:
                text = f"{self.served} is served, but that could not be recorded ({error})"
                result |= {"warning": f"{text}: after a crash, --supervise would start the server with {before}"}
            except OSError as error:
                text = f"cannot write {self._record.path}, from which --supervise starts again: {error.strerror}"
                raise Refusal(503, f"{text}. Nothing has changed: {before} is served") from None
        return result

    async def _set(self, state: Any, adapter: Named | None) -> dict[str, Any]:
        try:
            result: dict[str, Any] = await _call(state.engine_client, "ktft_set_adapter", adapter and adapter[1])
        except Refusal as refusal:
            self.mixed = str(refusal) if MIXED in str(refusal) else self.mixed
            raise
        self.adapter, self.mixed = adapter, None
        self.swaps += 1
        models = state.openai_serving_models
        first = models.base_model_paths[0]  # vLLM names responses after it
        BASE_MODEL_PATHS.put(models, [replace(first, name=self.served)])
        return result

    def _add_parent(self, body: bytes) -> bytes:
        """`/v1/models` with the base and the place of an adapter."""
        content = json.loads(body)
        if self.adapter is not None:
            for model in content["data"]:
                model |= {"parent": self.base, "root": self.adapter[1]}
        return json.dumps(content).encode()


def _check_name_of_adapter(name: str, base: str) -> None:
    if name == base:
        raise Refusal(400, f"lora_name is {name!r}, the base model's own name; give another", param="lora_name")
    if len(name) > LONGEST_NAME or not name.isprintable():  # it becomes a label of metrics
        text = f"lora_name has {len(name)} characters; give at most {LONGEST_NAME}, all of them printable"
        raise Refusal(400, text, param="lora_name")


def _check_directory(path: str) -> None:
    """Raise Refusal if it holds no adapter, or none that this process may read."""
    file = Path(path) / "adapter_config.json"
    denied = Refusal(403, f"the server may not read {file}: permission denied", param="lora_path")
    try:
        found = stat.S_ISREG(file.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        found = False
    except PermissionError:
        raise denied from None
    except (OSError, ValueError) as error:  # too long, a loop of links, NUL, no characters of the file system
        reason = getattr(error, "strerror", None) or str(error)
        raise Refusal(400, f"lora_path {path[:100]!r} is no path: {reason}", param="lora_path") from None
    if not found:
        raise Refusal(400, f"lora_path {path} has no adapter_config.json on the server", param="lora_path")
    if not os.access(file, os.R_OK):
        raise denied


async def _call(engine: Any, method: str, *args: Any) -> Any:
    """A method of `ktft.serve.vllm.worker.KtftWorker`.

    Raises:
        Refusal: it failed, with its message.
    """
    try:
        return (await engine.collective_rpc(method, args=args))[0]
    except Exception as error:  # vLLM gives the worker's exception as text
        raise Refusal(503 if engine.errored else 400, reason_of(error) or type(error).__name__) from None


async def _forget_prefixes(engine: Any) -> None:
    """Drop the KV cache that another adapter computed.

    Raises:
        Refusal: something still uses it.
    """
    for _ in range(_RESET_TRIES):
        if await engine.reset_prefix_cache():
            return
        await asyncio.sleep(_RESET_PAUSE)
    raise Refusal(503, "the engine still holds KV cache of requests that have ended; try again", retry_after=5)


def _edited(send: Send, edit: Any) -> Send:
    """A `send` that hands a response of status 200 on when it is whole, changed. For small ones."""
    held: list[Message] = []

    async def collect(message: Message) -> None:
        held.append(message)
        if message["type"] != "http.response.body" or message.get("more_body"):
            return
        start, body = held[0], b"".join(each.get("body", b"") for each in held[1:])
        if start["status"] == 200:
            body = edit(body)
        headers = [pair for pair in start["headers"] if pair[0].lower() != b"content-length"]
        await send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body})

    return collect

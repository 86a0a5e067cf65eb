"""The gate before an engine's HTTP application: names of models, changes of the adapter, bad input, ktft's metrics.

It is ASGI middleware that sees every request first. Responses that the engine computes pass through as they come.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry

from ktft import config
from ktft.serve.engine import Client, EngineError, Paths
from ktft.serve.front import asgi
from ktft.serve.front.adapter_record import AdapterRecord, Named, NotRecorded
from ktft.serve.front.admission import Admission, Busy
from ktft.serve.front.asgi import Gone, Message, Receive, Refusal, Scope, Send
from ktft.serve.front.bodies import check_request
from ktft.serve.front.door import Door
from ktft.serve.front.metrics import Metrics
from ktft.serve.runtime.served_model import MIXED
from ktft.serve.runtime.settings import ServeSettings

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MODELS, METRICS, STATUS, ROUTING = "/v1/models", "/metrics", "/ktft/status", "/ktft/routing"
LONGEST_NAME = 256
"""Characters of an adapter's name."""
_RESET_TRIES, _RESET_PAUSE = 100, 0.05  # seconds: an engine frees the cache of aborted requests within a step


class Gate:
    """Serves one adapter or none, under its own name.

    Args:
        app: the engine's application.
        connect: from the scope of a request to the engine behind the application.
        paths: what passes.
        settings: None takes this process's environment.
        registry: holds the engine's metrics.
    """

    def __init__(
        self,
        app: Any,
        connect: Callable[[Scope], Client],
        paths: Paths,
        settings: ServeSettings | None = None,
        registry: CollectorRegistry = REGISTRY,
    ) -> None:
        self.app, self.connect, self.paths = app, connect, paths
        self.settings = settings or ServeSettings.from_env()
        self.admission = Admission(self.settings.swap_timeout)
        self.base = self.settings.base_name
        self.adapter = self.settings.served_adapter
        self.swaps = 0
        self.mixed: str | None = None  # the error, if an adapter went into the model in part and nothing can be served
        admin = (LOAD, UNLOAD, *paths.admin)
        self.door = Door(self.settings.hosts, self.settings.origins, *config.server_keys(), admin)
        self._record = AdapterRecord(self.settings.adapter_file)
        self._metrics = Metrics(self, registry)

    @property
    def served(self) -> str:
        """The name that requests have to give."""
        return self.base if self.adapter is None else self.adapter[0]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on to the engine."""
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
        method, path = scope["method"], asgi.path_of(scope).rstrip("/")
        if method == "POST" and path in self.paths.computes:
            await self._compute(path, scope, receive, send)
        elif method == "POST" and path in (LOAD, UNLOAD):
            await self._change(path, scope, receive, send)
        elif method == "POST" and not self._passes(path):
            raise Refusal(404, f"ktft serve has no {path}; GET /openapi.json lists what there is")
        elif method == "GET" and path == MODELS:
            await self.app(scope, receive, _edited(send, self._add_parent))
        elif method == "GET" and path in (STATUS, ROUTING):
            await self._metrics.refresh(self.connect(scope))
            told = self._metrics.routing() if path == ROUTING else self._metrics
            await asgi.answer_json(send, told.to_dict())
        else:
            if path == METRICS:
                await self._metrics.refresh(self.connect(scope))
            await self.app(scope, receive, send)

    def _passes(self, path: str) -> bool:
        """Whether a POST that computes nothing may reach the engine. OpenAI's `/v1/responses/ID/cancel` may, too."""
        return path in self.paths.admin or path in self.paths.passed or path.endswith("/cancel")

    async def _compute(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        body = await asgi.read_body(scope, receive)
        name = check_request(path, asgi.parse(scope, body), must_name=self.paths.computes[path])
        async with self.admission.entered(lambda: self._check_name(name), receive):
            await self.app(scope, asgi.replayed(body, receive), send)

    def _check_name(self, name: str | None) -> None:
        if self.mixed is not None:
            raise Refusal(503, self.mixed)
        if name is not None and name != self.served:
            known = self.base if self.adapter is None else f"the adapter {self.served} of {self.base}"
            raise Refusal(404, f"the model {name!r} is not served; what is served is {known}", param="model")

    # --- the adapter --------------------------------------------------------------------------------------------------

    async def _change(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer `POST /v1/load_lora_adapter` or `/v1/unload_lora_adapter`. Their bodies are those of vLLM."""
        request = asgi.parse(scope, await asgi.read_body(scope, receive))
        keys = ("lora_name", "lora_path") if path == LOAD else ("lora_name",)
        for key in keys:
            if not isinstance(request.get(key), str) or not request[key]:
                raise Refusal(400, f"{key} is {request.get(key)!r}; give {' and '.join(keys)}", param=key)
        name = request["lora_name"]
        adapter = None
        if path == LOAD:
            _check_name_of_adapter(name, self.base)
            adapter = name, str(Path(request["lora_path"]).absolute())
        result = await self._swap(self.connect(scope), name, adapter)
        await asgi.answer_json(send, {"model": self.served, **result})

    async def _swap(self, client: Client, name: str, adapter: Named | None) -> dict[str, Any]:
        """Serve another adapter, or the base. Everything changes, the record on disk included, or nothing does."""
        if adapter is None and (self.adapter is None or self.adapter[0] != name):
            raise Refusal(404, f"no adapter {name!r} is loaded; what is served is {self.served}", param="lora_name")
        if adapter is not None:
            if not self.settings.adapter_slots:
                raise Refusal(400, "this server has no room for an adapter; start it with --adapter-swap")
            _check_directory(adapter[1])
        async with self.admission.closed():
            before = self.served
            # This comes first: once the adapter has changed, a single step is left, and that one is atomic
            await _forget_prefixes(client)
            try:
                with self._record.changing(adapter):
                    result = await self._set(client, adapter)
            except NotRecorded as error:
                text = f"{self.served} is served, but that could not be recorded ({error})"
                result |= {"warning": f"{text}: after a crash, --supervise would start the server with {before}"}
            except OSError as error:
                text = f"cannot write {self._record.path}, from which --supervise starts again: {error.strerror}"
                raise Refusal(503, f"{text}. Nothing has changed: {before} is served") from None
        return result

    async def _set(self, client: Client, adapter: Named | None) -> dict[str, Any]:
        try:
            result = await client.set_adapter(adapter and adapter[1])
        except EngineError as error:
            self.mixed = str(error) if MIXED in str(error) else self.mixed
            raise Refusal(503 if error.dead else 400, str(error)) from None
        self.adapter, self.mixed = adapter, None
        self.swaps += 1
        client.rename(self.served)
        return result

    def _add_parent(self, body: bytes) -> bytes:
        """The answer to `/v1/models`, with the base and the directory of the adapter that is served."""
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
    """Raise Refusal if the directory holds no adapter, or none that this process may read."""
    file = Path(path) / "adapter_config.json"
    denied = Refusal(403, f"the server may not read {file}: permission denied", param="lora_path")
    try:
        found = stat.S_ISREG(file.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        found = False
    except PermissionError:
        raise denied from None
    except (OSError, ValueError) as error:  # it is too long, a loop of links, or has characters that no path has
        reason = getattr(error, "strerror", None) or str(error)
        raise Refusal(400, f"lora_path {path[:100]!r} is no path: {reason}", param="lora_path") from None
    if not found:
        raise Refusal(400, f"lora_path {path} has no adapter_config.json on the server", param="lora_path")
    if not os.access(file, os.R_OK):
        raise denied


async def _forget_prefixes(client: Client) -> None:
    """Drop the KV cache that another adapter computed. Raises Refusal if a request still uses some of it."""
    for _ in range(_RESET_TRIES):
        if await client.forget_prefixes():
            return
        await asyncio.sleep(_RESET_PAUSE)
    raise Refusal(503, "the engine still holds KV cache of requests that have ended; try again", retry_after=5)


def _edited(send: Send, edit: Callable[[bytes], bytes]) -> Send:
    """A `send` that holds a response until it is whole, and edits its body if the status is 200. For small ones."""
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

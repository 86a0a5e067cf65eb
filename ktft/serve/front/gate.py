"""The gate before an engine's HTTP application: names of models, changes of adapters, bad input, ktft's metrics.

It is ASGI middleware that sees every request first. Responses that the engine computes pass through as they come.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry

from ktft import config
from ktft.serve.engine import Client, Paths
from ktft.serve.front import asgi
from ktft.serve.front.adapters import ServedAdapters
from ktft.serve.front.admission import Admission, Busy
from ktft.serve.front.asgi import Gone, Message, Receive, Refusal, Scope, Send
from ktft.serve.front.bodies import check_request
from ktft.serve.front.door import Door
from ktft.serve.front.metrics import Metrics
from ktft.serve.runtime.settings import ServeSettings

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MODELS, METRICS, STATUS, ROUTING = "/v1/models", "/metrics", "/ktft/status", "/ktft/routing"
READING = ("GET", "HEAD", "OPTIONS")
LONGEST_NAME = 256
"""Characters of an adapter's name."""


class Gate:
    """Serves the base model and its adapters, each under its own name.

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
        self.adapters = ServedAdapters(self.settings, self.admission)
        admin = (LOAD, UNLOAD, *paths.admin)
        self.door = Door(self.settings.hosts, self.settings.origins, *config.server_keys(), admin)
        self._metrics = Metrics(self, registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on to the engine."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "ktft serve has no websocket"})
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        send = answered = asgi.Answered(self.door.answering(scope, send))
        try:
            await self._route(self.door.let_in(scope), receive, send)
        except Refusal as refusal:
            await refusal.answer(send)
        except Busy:
            wait = math.ceil(self.admission.timeout)
            text = f"an adapter is being changed, or requests in flight keep it from that, for more than {wait} s"
            await Refusal(503, f"{text}; try again", retry_after=min(wait, 5)).answer(send)
        except Gone:
            pass
        except Exception as error:
            if not answered.status:
                await _answer(error, scope, receive, send)
            if not (answered.complete and answered.status < 500):
                raise

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope["method"], asgi.path_of(scope).rstrip("/")
        if method == "POST" and path in self.paths.computes:
            await self._compute(path, scope, receive, send)
        elif method == "POST" and path in (LOAD, UNLOAD):
            await self._change(path, scope, receive, send)
        elif method == "POST" and not self._passes(path):
            raise Refusal(404, f"ktft serve has no {path}; GET /openapi.json lists what there is")
        elif method != "POST" and not self._reads(method, path):
            raise Refusal(404, f"ktft serve does not answer {method} {path}; GET /openapi.json lists what there is")
        elif method == "GET" and path == MODELS:
            self.adapters.announce(self.connect(scope))
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

    def _reads(self, method: str, path: str) -> bool:
        """Whether a request that is no POST may reach the engine."""
        reads = self.paths.reads
        return reads is None or (method in READING and path in (*reads, STATUS, ROUTING))

    async def _compute(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        body = await asgi.read_body(scope, receive)
        # As with the engine alone, the only model needs no name
        must_name = self.paths.computes[path] and self.settings.adapter_slots
        name = check_request(path, asgi.parse(scope, body), must_name=must_name)
        self.adapters.announce(self.connect(scope))
        async with self.admission.entered(self.adapters.room(name), lambda: self.adapters.check(name), receive):
            await self.app(scope, asgi.replayed(body, receive), send)

    # --- the adapter --------------------------------------------------------------------------------------------------

    async def _change(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer `POST /v1/load_lora_adapter` or `/v1/unload_lora_adapter`. Their bodies are those of vLLM."""
        request = asgi.parse(scope, await asgi.read_body(scope, receive))
        keys = ("lora_name", "lora_path") if path == LOAD else ("lora_name",)
        for key in keys:
            if not isinstance(request.get(key), str) or not request[key]:
                raise Refusal(400, f"{key} is {request.get(key)!r}; give {' and '.join(keys)}", param=key)
        name, client = request["lora_name"], self.connect(scope)
        if path == LOAD:
            _check_name_of_adapter(name, self.adapters.base, self.paths.reserved)
            directory = str(Path(request["lora_path"]).absolute())
            _check_directory(directory)
            result = await self.adapters.load(client, name, directory)
        else:
            result = await self.adapters.unload(client, name)
        await asgi.answer_json(send, {"model": name if path == LOAD else self.adapters.base, **result})

    def _add_parent(self, body: bytes) -> bytes:
        """The answer to `/v1/models`, with each adapter's base and directory."""
        content = json.loads(body)
        for model in content["data"]:
            if adapter := self.adapters.loaded.get(model["id"]):
                model |= {"parent": self.adapters.base, "root": adapter.path}
        return json.dumps(content).encode()


def _check_name_of_adapter(name: str, base: str, reserved: Container[str]) -> None:
    if name == base:
        raise Refusal(400, f"lora_name is {name!r}, the base model's own name; give another", param="lora_name")
    if name in reserved:
        text = f"lora_name is {name!r}, which the engine takes for something else; give another"
        raise Refusal(400, text, param="lora_name")
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


async def _answer(error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer an error as the engine's application would, if it has a handler for any error.

    vLLM 0.24 has such a handler, and lets bad requests come to it. Starlette calls it outside of this gate and then
    raises the error all the same, whereupon the HTTP server closes the connection, under the client's next request.
    """
    handler = getattr(scope.get("app"), "exception_handlers", {}).get(Exception)
    if handler is not None:
        from starlette.requests import Request

        response = await handler(Request(scope, receive), error)
        await response(scope, receive, send)


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

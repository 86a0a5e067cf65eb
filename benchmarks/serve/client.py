"""Clients of an OpenAI server that note when each token comes."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from typing import Any

import httpx

from benchmarks.serve.cases import Load, Timing

SECONDS = 1800.0
FIRST_ID = 16
"""The first id of prompts, which is after the first special tokens of most tokenizers."""


class ServerFailed(RuntimeError):
    """A server failed or gave a wrong answer; the message quotes it."""


class Client:
    """Talks to one server.

    Args:
        url: the server's address without `/v1`.
        extras: fields of requests that this server accepts beyond those of all servers.
        text: decodes token ids, for a server that accepts only chats; None sends the ids.

    Attributes:
        models: the names that the requests of a round ask for in turn.
    """

    def __init__(self, url: str, extras: dict[str, Any], text: Callable[[list[int]], str] | None = None) -> None:
        self.url, self.extras, self.text = url, extras, text
        self.models: tuple[str, ...] = ()

    def find_model(self, wanted: str | None = None) -> str:
        """The name to ask for: this one, or the first that the server lists. Raises ServerFailed."""
        try:
            answer = httpx.get(f"{self.url}/v1/models", timeout=30)
            answer.raise_for_status()
            names = [each["id"] for each in answer.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise ServerFailed(f"{self.url}/v1/models: {error}") from None
        if wanted is None and not names:
            raise ServerFailed(f"{self.url} serves no model")
        self.models = (wanted or names[0],)
        return self.models[0]

    def round(self, load: Load, seed: int) -> list[Timing]:
        """Run one round of requests. Raises ServerFailed."""
        return asyncio.run(self._round(load, seed))

    async def _round(self, load: Load, seed: int) -> list[Timing]:
        draw = random.Random(seed)
        prompts = [
            [draw.randrange(FIRST_ID, load.vocabulary) for _ in range(load.prompt_tokens)] for _ in range(load.clients)
        ]
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=load.clients)
        async with httpx.AsyncClient(timeout=SECONDS, limits=limits) as http:
            began = time.perf_counter()
            requests = [self._request(each, load.output_tokens, i) for i, each in enumerate(prompts)]
            return await asyncio.gather(*(self._ask(http, *each, began) for each in requests))

    def _request(self, prompt: list[int], tokens: int, number: int) -> tuple[str, dict[str, Any], int]:
        """The path of a round's request of this number, its body, and the tokens of the prompt."""
        name = self.models[number % len(self.models)]
        body = {"model": name, "max_tokens": tokens, "temperature": 0, "stream": True} | self.extras
        if self.text is None:
            return "/v1/completions", body | {"prompt": prompt}, len(prompt)
        messages = [{"role": "user", "content": self.text(prompt)}]
        return "/v1/chat/completions", body | {"messages": messages}, len(prompt)

    async def _ask(self, http: httpx.AsyncClient, path: str, body: dict[str, Any], sent: int, began: float) -> Timing:
        arrivals: list[float] = []
        try:
            async with http.stream("POST", self.url + path, json=body) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")
                    raise ServerFailed(f"{path} answers {answer.status_code}: {text[:300]}")
                async for line in answer.aiter_lines():
                    now = time.perf_counter() - began
                    if line.startswith("data:") and line[5:].strip() != "[DONE]":
                        chunk = json.loads(line[5:])
                        if "error" in chunk:
                            raise ServerFailed(f"{path} broke off: {chunk['error']}")
                        usage, most = chunk.get("usage") or {}, body["max_tokens"]
                        sent = usage.get("prompt_tokens") or sent
                        _count(arrivals, now, usage.get("completion_tokens"), bool(chunk.get("choices")), most)
        except (httpx.HTTPError, ValueError) as error:
            raise ServerFailed(f"{path}: {error or type(error).__name__}") from None
        if not arrivals:
            raise ServerFailed(f"{path} ended without a token")
        return Timing(sent, arrivals)


def _count(arrivals: list[float], now: float, told: int | None, has_choice: bool, most: int) -> None:
    """Note the tokens of one piece: as many as the server counts, else one. Several share the time they took."""
    if not has_choice:
        return
    new = told - len(arrivals) if told is not None else int(len(arrivals) < most)
    before = arrivals[-1] if arrivals else now
    arrivals.extend(before + (now - before) * (number + 1) / new for number in range(new))

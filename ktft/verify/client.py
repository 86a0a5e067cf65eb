"""A client that asks an OpenAI-compatible server for the log-probabilities of prompts and of their continuations."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

SECONDS = 600.0
"""The longest wait for an answer."""
TOGETHER = 8
"""Requests in flight at once, so that the server batches them as it would for several users."""


class ServerError(OSError):
    """The server did not answer, refused a request, or gave an answer in an unexpected form."""


@dataclass(frozen=True)
class Continuation:
    """The server's answer to one prompt.

    Attributes:
        prompt: token ids.
        prompt_logprobs: log-probabilities of the prompt's tokens, without the first, which has nothing before it.
        tokens: the greedy continuation.
        logprobs: the log-probabilities of the continuation's tokens.
    """

    prompt: list[int]
    prompt_logprobs: list[float]
    tokens: list[int]
    logprobs: list[float]


class ServerClient:
    """A server to ask. It is a context manager, which closes its connections.

    Args:
        url: its address, with or without `/v1`, for instance `http://127.0.0.1:8000`.
        model: the name to ask for; None takes the only one that the server lists.

    Raises:
        ServerError: nobody answers there; the server lists several models, or not this one.
    """

    def __init__(self, url: str, model: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(timeout=httpx.Timeout(SECONDS, connect=10.0))
        try:
            self.model = self._choose(model)
        except ServerError:
            self._http.close()
            raise

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def _choose(self, wanted: str | None) -> str:
        names = [str(each["id"]) for each in self._ask("GET", "/v1/models")["data"]]
        if wanted is not None and wanted not in names:
            raise ServerError(f"{self.url} serves {', '.join(names)}, not {wanted}")
        if wanted is None and len(names) != 1:
            raise ServerError(f"{self.url} serves {', '.join(names) or 'nothing'}: say which with --served-model-name")
        return wanted or names[0]

    def continue_all(self, prompts: Sequence[list[int]], tokens: int) -> list[Continuation]:
        """Have every prompt continued greedily by `tokens` tokens, several prompts at once.

        Raises:
            ServerError: the server refuses a prompt, or does not give the log-probabilities of prompts.
        """
        with ThreadPoolExecutor(TOGETHER) as pool:
            return list(pool.map(lambda prompt: self._continue(prompt, tokens), prompts))

    def _continue(self, prompt: list[int], tokens: int) -> Continuation:
        request = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "logprobs": 0,
            "prompt_logprobs": 0,
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
        }
        choice = self._ask("POST", "/v1/completions", request)["choices"][0]
        if not choice.get("prompt_logprobs") or not choice.get("logprobs"):
            raise ServerError(f"{self.url} gives no log-probabilities of prompts; a server started by ktft serve does")
        given = zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
        continued = [int(each.removeprefix("token_id:")) for each in choice["logprobs"]["tokens"]]
        return Continuation(
            prompt,
            [one[str(token)]["logprob"] for token, one in given],
            continued,
            choice["logprobs"]["token_logprobs"],
        )

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            answer = self._http.request(method, self.url + path, json=body)
        except httpx.HTTPError as error:
            raise ServerError(f"no answer from {self.url}{path}: {error or type(error).__name__}") from None
        if answer.status_code != 200:
            raise ServerError(f"{self.url}{path} answers {answer.status_code}: {answer.text[:500]}")
        try:
            return answer.json()
        except ValueError:
            raise ServerError(f"{self.url}{path} gives an answer that is not JSON: {answer.text[:100]!r}") from None

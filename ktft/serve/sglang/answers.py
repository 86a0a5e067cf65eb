"""What ktft answers in SGLang's place: log-probabilities of prompts, and metrics.

`/v1/completions` of ktft takes vLLM's field `prompt_logprobs`, which `ktft verify --serve` sends. SGLang computes such
log-probabilities, but its OpenAI API has no field for them.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from sglang.srt.entrypoints.http_server import get_global_state
from sglang.srt.managers.io_struct import GenerateReqInput

from ktft.serve.front import asgi
from ktft.serve.front.asgi import Receive, Refusal, Scope, Send

COMPLETIONS = "/v1/completions"
FIELD = "prompt_logprobs"
TAKEN = {
    "model": str,
    "prompt": list,
    "max_tokens": int,
    "temperature": int | float,
    "logprobs": int,
    FIELD: int,
    "ignore_eos": bool,
    "return_tokens_as_token_ids": bool,
}
"""The fields that a request with `prompt_logprobs` may have, and their types."""


class Answers:
    """The application, which answers some requests without SGLang's own.

    Args:
        app: SGLang's application.
        registry: what `/metrics` shows. SGLang has its own metrics in another process, and ktft leaves them off.
    """

    def __init__(self, app: Any, registry: CollectorRegistry) -> None:
        self.app, self._registry = app, registry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        path = asgi.path_of(scope).rstrip("/") if scope["type"] == "http" else ""
        if path == "/metrics":
            await self._answer_metrics(send)
            return
        if path == COMPLETIONS:
            body = await asgi.read_body(scope, receive)
            request = asgi.parse(scope, body)
            if request.get(FIELD) is not None:
                await asgi.answer_json(send, await _complete(request))
                return
            receive = asgi.replayed(body, receive)
        await self.app(scope, receive, send)

    async def _answer_metrics(self, send: Send) -> None:
        body = generate_latest(self._registry)
        headers = [(b"content-type", CONTENT_TYPE_LATEST.encode()), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


async def _complete(request: dict[str, Any]) -> dict[str, Any]:
    """The greedy continuation of one prompt of token ids, with the log-probability of each token, as vLLM answers."""
    _check(request)
    manager: Any = get_global_state().tokenizer_manager
    prompt, model = request["prompt"], request["model"]
    asked = GenerateReqInput(
        input_ids=prompt,
        sampling_params={
            "temperature": 0,
            "max_new_tokens": request.get("max_tokens", 16),
            "ignore_eos": request.get("ignore_eos", False),
        },
        return_logprob=True,
        logprob_start_len=0,
        lora_path=model if model in manager.lora_registry.get_all_adapters() else None,
    )
    try:
        answer = await anext(aiter(manager.generate_request(asked, None)))
    except ValueError as error:  # the prompt is too long, for instance
        raise Refusal(400, str(error)) from None
    about = answer["meta_info"]
    of_prompt = [None, *({str(token): {"logprob": each}} for each, token, *_ in about["input_token_logprobs"][1:])]
    values, tokens = zip(*((each, token) for each, token, *_ in about["output_token_logprobs"]), strict=True)
    logprobs = {"tokens": [f"token_id:{token}" for token in tokens], "token_logprobs": list(values)}
    reason = about["finish_reason"]["type"]
    choice = {"index": 0, "text": answer["text"], "logprobs": logprobs, FIELD: of_prompt, "finish_reason": reason}
    used = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens), "total_tokens": len(prompt) + len(tokens)}
    return {"object": "text_completion", "model": model, "choices": [choice], "usage": used}


def _check(request: dict[str, Any]) -> None:
    """Raise Refusal unless a request with `prompt_logprobs` asks for what `_complete` answers."""
    for name, value in request.items():
        kind = TAKEN.get(name)
        if kind is None:
            taken = ", ".join(TAKEN)
            raise Refusal(400, f"{name} does not go with {FIELD}, beside which there may be {taken}", param=name)
        if not isinstance(value, kind):
            raise Refusal(400, f"{name} is {str(value)[:50]!r}, of another type than it has to be", param=name)
    prompt = request.get("prompt")
    if not prompt or not all(type(token) is int for token in prompt):
        raise Refusal(400, f"with {FIELD}, prompt has to be the token ids of one prompt", param="prompt")
    for name, only in (("temperature", 0), ("logprobs", 0), (FIELD, 0)):
        if request.get(name, only) != only:
            raise Refusal(400, f"{name} is {request[name]}; with {FIELD} it has to be {only}", param=name)

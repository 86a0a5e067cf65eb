"""`ktft verify --serve`: right of servers that compute what training does, by other code, and of those that do not.

The servers here are stock transformers in bf16 behind vLLM's answers; tests/serve has real ones.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import load
from commands import invoke, refused
from merging import merged_by_hand, stock, write_adapter

Change = Callable[[dict[str, Any]], Any]
COMMON = ("--format", "bf16", "--threads", "1", "--tokens", "4")


def continued(model: Any, prompt: list[int], tokens: int) -> dict[str, Any]:
    """What vLLM answers: log-probabilities of prompt and greedy continuation."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        logprobs = model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)
    told = [float(logprobs[place, token]) for place, token in enumerate(ids[1:])]
    given = [None, *({str(t): {"logprob": v}} for t, v in zip(prompt[1:], told, strict=False))]
    own = {"tokens": [f"token_id:{t}" for t in ids[len(prompt) :]], "token_logprobs": told[len(prompt) - 1 :]}
    return {"prompt_logprobs": given, "logprobs": own}


@contextmanager
def served(model: Any, change: Change = lambda choice: None, names: tuple[str, ...] = ("tiny",)) -> Iterator[str]:
    """A server's URL."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self.answer({"data": [{"id": name} for name in names]})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert request["model"] in names and request["temperature"] == 0
            choice = continued(model, request["prompt"], request["max_tokens"])
            change(choice)
            self.answer({"choices": [choice]})

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(base, tmp_path_factory.mktemp("adapter"), 0.2)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few, to be quick."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text('The lighthouse keeper counted the ships.\n\n"two\\nlines, as JSON"\n1, 1, 2, 3, 5, 8,\n')
    return file


def verify(url: str, base: Path, prompts: Path, *options: str | Path) -> tuple[int, dict[str, Any]]:
    """`--json`."""
    done = invoke("verify", base, "--serve", url, *COMMON, "--prompts", prompts, "--json", *options)
    assert done.exit_code in (0, 1), done.stderr
    return done.exit_code, json.loads(done.stdout)


def test_a_base_model(base: Path, prompts: Path) -> None:
    with served(stock(base).bfloat16()) as url:
        status, report = verify(f"{url}/v1/", base, prompts)
    assert status == 0 and report["verdict"] == "the same model" and report["model"] == "tiny"
    assert report["tokens"] == 72 and report["continued"] == 12
    assert 1e-4 < report["served"]["mean"] < report["limit"] < 0.1 and report["base"] is None


def test_packed_weights_around_the_experts(base: Path, prompts: Path) -> None:
    """A server that packs them is right for who names their format, and its noise shows for who does not."""
    with served(load(base, torch.bfloat16, dense_format="k4")) as url:
        status, named = verify(url, base, prompts, "--dense-format", "k4")
        unnamed = verify(url, base, prompts)[1]
    assert status == 0 and named["verdict"] == "the same model"
    assert unnamed["served"]["mean"] > 2 * named["served"]["mean"]


def test_an_adapter_that_is_applied_and_one_that_is_not(base: Path, adapter: Path, prompts: Path) -> None:
    with served(merged_by_hand(base, adapter).bfloat16()) as url:
        status, report = verify(url, base, prompts, "--adapter", adapter)
        assert status == 0 and report["verdict"] == "adapter applied" and 0.95 < report["applied"] < 1.05
        assert verify(url, base, prompts)[1]["verdict"] == "off", "the base alone is another model"
    with served(stock(base).bfloat16()) as url:
        status, report = verify(url, base, prompts, "--adapter", adapter)
    assert status == 1 and report["verdict"] == "adapter NOT applied" and abs(report["applied"]) < 0.05
    assert report["problems"][0].startswith("adapter NOT applied: the server is 0.0")


def test_another_adapter(base: Path, adapter: Path, prompts: Path, tmp_path: Path) -> None:
    other = write_adapter(base, tmp_path / "other", 0.3, target_modules=["q_proj", "down_proj"])
    with served(merged_by_hand(base, other).bfloat16()) as url:
        status, report = verify(url, base, prompts, "--adapter", adapter)
    assert status == 1 and report["verdict"] == "off" and "another adapter" in report["problems"][0]


def test_half_an_adapter(base: Path, adapter: Path, prompts: Path) -> None:
    """Experts' LoRA left out, say: the rest alone does not pass."""
    model = merged_by_hand(base, adapter)
    plain = stock(base)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.data.copy_(plain.get_parameter(name))
    with served(model.bfloat16()) as url:
        status, report = verify(url, base, prompts, "--adapter", adapter)
    assert status == 1 and report["verdict"] == "off"


def test_an_adapter_too_small_to_tell(base: Path, prompts: Path, tmp_path: Path) -> None:
    small = write_adapter(base, tmp_path / "small", 1e-6)
    with served(stock(base).bfloat16()) as url:
        status, report = verify(url, base, prompts, "--adapter", small)
    assert status == 1 and "cannot be told" in report["problems"][0]


def one_token_off(choice: dict[str, Any]) -> None:
    next(iter(choice["prompt_logprobs"][5].values()))["logprob"] -= 7


def another_continuation(choice: dict[str, Any]) -> None:
    choice["logprobs"]["tokens"] = ["token_id:5"] * len(choice["logprobs"]["tokens"])


def nan(choice: dict[str, Any]) -> None:
    choice["logprobs"]["token_logprobs"][0] = float("nan")


@pytest.mark.parametrize("change", [one_token_off, another_continuation, nan])
def test_what_a_server_tells_wrongly(base: Path, prompts: Path, change: Change) -> None:
    with served(stock(base).bfloat16(), change) as url:
        status, report = verify(url, base, prompts)
    assert status == 1 and report["verdict"] == "off" and report["problems"]


def test_a_verdict_for_a_person(base: Path, adapter: Path, prompts: Path) -> None:
    with served(stock(base).bfloat16()) as url:
        command = ("verify", base, "--serve", url, *COMMON, "--prompts", prompts)
        done = invoke(*command)
        assert done.exit_code == 0 and done.stdout.splitlines()[-1].startswith(f"{url}, tiny: the same model")
        done = invoke(*command, "--adapter", adapter)
    assert done.exit_code == 1 and "tiny: adapter NOT applied" in done.stdout
    assert "adapter NOT applied: the server" in done.stderr


def test_bad_input(base: Path, prompts: Path, tmp_path: Path) -> None:
    assert "no answer from http://127.0.0.1:9/v1/models" in refused("verify", base, "--serve", "http://127.0.0.1:9")
    assert "--layers: not with --serve" in refused("verify", base, "--serve", "http://x", "--layers", "1")
    assert "--prompts: only with --serve" in refused("verify", base, "--prompts", prompts)
    (tmp_path / "empty").write_text("\n")
    assert "has no prompts" in refused("verify", base, "--serve", "http://x", "--prompts", tmp_path / "empty")
    with served(stock(base), names=("one", "two")) as url:
        assert "serves one, two: say which" in refused("verify", base, "--serve", url, "--prompts", prompts)
        assert "serves one, two, not three" in refused("verify", base, "--serve", url, "--served-model-name", "three")
    with served(stock(base), lambda choice: choice.pop("prompt_logprobs")) as url:
        assert "gives no log-probabilities of prompts" in refused("verify", base, "--serve", url, "--prompts", prompts)

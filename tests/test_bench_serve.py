"""`ktft bench serve`: its figures for a server whose tokens come at times that the test sets."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from commands import invoke, run
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.cases import Shape
from benchmarks.serve import run as bench
from benchmarks.serve.cases import Job, Load, Timing
from benchmarks.serve.checkpoint import describe, write_checkpoint
from benchmarks.serve.client import Client, ServerFailed
from benchmarks.serve.servers import PEERS, Process, Row

FIRST, BETWEEN = 0.1, 0.02  # seconds


@contextmanager
def streaming(per_piece: int = 1, broken: bool = False) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server's URL and the requests it receives. The first token comes after `FIRST`, the others `BETWEEN` apart."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": "tiny"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            time.sleep(FIRST)
            for number in range(0, requests[-1]["max_tokens"], per_piece):
                if number:
                    time.sleep(BETWEEN * per_piece)
                usage = {"prompt_tokens": 7, "completion_tokens": number + per_piece}
                piece = {"choices": [{"text": "x"}], "usage": usage}
                if broken:
                    piece = {"error": {"message": "the engine died"}}
                self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
                self.wfile.flush()
            self.wfile.write(b'data: {"choices": [], "usage": {"prompt_tokens": 7}}\n\ndata: [DONE]\n\n')

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", requests
        server.shutdown()


def test_the_command(tmp_path: Path) -> None:
    options = ["--prompt-tokens", "9", "--output-tokens", "6", "--rounds", "2", "--clients", "3", "--clients", "1"]
    out = tmp_path / "records.jsonl"
    with streaming() as (url, requests):
        done = invoke("bench", "serve", "--url", url, *options, "--output", out)
    assert done.exit_code == 0, done.output
    one, three = (json.loads(line) for line in out.read_text().splitlines())
    assert (one["clients"], three["clients"], one["rounds"]) == (1, 3, 2)
    assert one["model"] == "tiny" and one["prompt_tokens"] == 7 and one["output_tokens"] == 6, "as the server counted"
    for record in (one, three):
        assert 1e3 * FIRST <= record["ttft_ms"] <= record["ttft_p95_ms"] and record["itl_ms"] <= record["itl_p95_ms"]
    assert one["prefill_tokens_per_second"] <= 7 / FIRST and one["decode_tokens_per_second"] > 0
    assert one["output_tokens_per_second"] <= 6 / (FIRST + 5 * BETWEEN)
    assert one["absent_peers"].keys() == {row.name for row in PEERS}
    assert len(requests) == (1 + 2) * (1 + 3), "one round in three is not counted"
    prompts = [tuple(request["prompt"]) for request in requests]
    assert len(set(prompts)) == len(prompts) and {len(prompt) for prompt in prompts} == {9}
    assert all(request["ignore_eos"] and request["model"] == "tiny" for request in requests)


def test_tokens_that_come_together_share_their_time() -> None:
    with streaming(per_piece=3) as (url, _):
        client = Client(url, {})
        client.find_model()
        (timing,) = client.round(Load(1, 4, 9), 0)
    assert len(timing.arrivals) == 9 and timing.prompt_tokens == 7
    gaps = timing.gaps[2:]
    assert all(gap > 0 for gap in gaps) and max(gaps[:3]) - min(gaps[:3]) < 1e-6


def test_figures_of_a_round() -> None:
    """Decoding is counted only while all clients are being answered."""
    early, late = Timing(10, [1.0, 2.0, 3.0, 4.0]), Timing(10, [2.0, 2.5, 3.0, 3.5, 4.0, 9.0])
    assert bench.decode_rate([early, late]) == pytest.approx((2 + 4) / 2)
    assert bench.decode_rate([Timing(1, [1.0, 1.5]), Timing(1, [2.0, 3.0])]) is None
    assert bench.percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 3.0 and bench.percentile([1.0], 0.95) == 1.0
    assert early.gaps == [1.0, 1.0, 1.0]


def test_a_server_that_fails(tmp_path: Path) -> None:
    with streaming(broken=True) as (url, _):
        status, said = run("bench", "serve", "--url", url, "--clients", "1")
    assert status == 1 and "the engine died" in said
    status, said = run("bench", "serve", "--url", "http://127.0.0.1:9")
    assert status == 1 and "http://127.0.0.1:9/v1/models" in said
    noise = r"nanobind: leaked 2 functions!\n - leaked x\n"
    after = r"ValueError: no such model\n" + r"RuntimeError: see above\n" * 8 + noise
    for printed, expected in (("no such model", "no such model"), (after, "ValueError: no such model / RuntimeError")):
        command = ["sh", "-c", 'printf "$1"; exit 3', "-", printed]
        row = Row("gone", lambda *_: "", lambda *_, command=command: command)  # type: ignore[misc]
        with pytest.raises(ServerFailed, match=f"gone ended with 3: {expected}") as failure:
            Process(row, Job(tmp_path, None, 1, 8), str)
        assert "leaked" not in str(failure.value)


def test_peers_are_absent_with_a_reason(tmp_path: Path) -> None:
    reasons = {row.name: row.absent(Job(tmp_path, None, 1, 8)) for row in PEERS}
    assert "llama-server" in reasons["llama.cpp"] or "--gguf" in reasons["llama.cpp"]
    for row in PEERS:
        command = row.command(Job(tmp_path, tmp_path / "model.gguf", 4, 100, threads=2), 1234)
        assert "1234" in command
    assert PEERS[1].command(Job(tmp_path, tmp_path, 4, 100), 1)[-2:] == ["--ctx-size", "400"]


def test_options_of_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They reach its command line, in the place of the default that they would add to."""
    write_checkpoint(Shape("8,2,64,32", 8, 2, 64, 32), 1, tmp_path / "model")
    (tmp_path / "model.gguf").touch()
    server = tmp_path / "llama-server"
    server.write_text('#!/bin/sh\necho "got $*"; exit 3\n')
    server.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    out = tmp_path / "out.jsonl"
    with streaming() as (url, _):
        options = ["--url", url, "--clients", "1", "--output-tokens", "4", "--rounds", "1", "--output", out]
        peer = ["--peer", "llama.cpp", "--gguf", tmp_path / "model.gguf"]
        more = ["--peer-option", "llama.cpp=--n-cpu-moe 2 --ubatch-size 64"]
        invoke("bench", "serve", tmp_path / "model", *options, *peer, *more)
        reason = json.loads(out.read_text())["absent_peers"]["llama.cpp"]
        status, said = run("bench", "serve", "--url", url, "--peer-option", "llama.cpp=--n-cpu-moe 2")
    assert reason.count("--n-cpu-moe") == 1 and reason.rstrip().endswith("--n-cpu-moe 2 --ubatch-size 64")
    assert status == 2 and "give --peer llama.cpp" in said


def test_a_checkpoint_of_a_shape(tmp_path: Path) -> None:
    """It loads, with all its weights, and its tokenizer has a word for each token."""
    write_checkpoint(Shape("8,2,64,32", 8, 2, 64, 32), 2, tmp_path)
    assert describe(tmp_path) == (2, 32768)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and model.config.use_cache
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer(tokenizer.decode([7, 31000, 20]))["input_ids"] == [7, 31000, 20]
    with pytest.raises(ValueError, match="is not a directory with a config.json"):
        describe(tmp_path / "nothing")

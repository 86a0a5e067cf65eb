"""`llamafactory-cli api` and clients that leave: their generations go on in threads of their own, beside later ones."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

LEAVING = 20


@contextmanager
def api_server(directory: Path, settings: dict[str, Any], **environment: str) -> Iterator[httpx.Client]:
    """A client of a server that answers until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config, log = directory / "api.yaml", directory / "log"
    config.write_text(yaml.safe_dump(settings))
    with log.open("w") as output:
        server = subprocess.Popen(
            [str(Path(sys.executable).parent / "llamafactory-cli"), "api", str(config)],
            env=os.environ | {"API_HOST": "127.0.0.1", "API_PORT": str(port)} | environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=300) as client:
            while True:
                try:
                    client.get("/v1/models").raise_for_status()
                    break
                except httpx.TransportError:
                    assert server.poll() is None, log.read_text()
                    time.sleep(0.3)
            yield client
    finally:
        server.kill()
        server.wait()


def request(number: int, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"add {number} and {3 * number}"}]
    return {"model": "ktft", "messages": messages, "do_sample": False, "max_tokens": 12} | options


def test_answers_are_those_of_a_server_that_nobody_left(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Each token has two experts: their sum is the same bits in whatever order the lanes come to add them."""
    settings = {
        "model_name_or_path": str(tiny_checkpoint("dsv3")),
        "template": "default",
        "use_kt": True,
        "kt_config": {"expert_format": "bf16", "threads": 1, "placement": "stream"},
    }

    def ask(client: httpx.Client, number: int) -> str:
        reply = client.post("/v1/chat/completions", json=request(number)).raise_for_status().json()
        content: str = reply["choices"][0]["message"]["content"]
        return content

    with api_server(tmp_path, settings, KTFT_EMULATE_GPU="1") as client:
        undisturbed = [ask(client, number) for number in range(4)]
        assert len(set(undisturbed)) > 1
        for number in range(LEAVING):
            body = request(number, stream=True, max_tokens=40)
            with client.stream("POST", "/v1/chat/completions", json=body) as stream:
                lines = stream.iter_lines()
                for _ in range(3):
                    next(lines)
            assert ask(client, number % 4) == undisturbed[number % 4], f"after {number + 1} clients left"

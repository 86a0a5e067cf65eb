"""`llamafactory-cli api`, beside the test."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from forked import Forks


@contextmanager
def api_server(forks: Forks, directory: Path, settings: dict[str, Any], **environment: str) -> Iterator[httpx.Client]:
    """A client of a server that answers until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config, log = directory / "api.yaml", directory / "log"
    config.write_text(yaml.safe_dump(settings))
    command = [str(Path(sys.executable).parent / "llamafactory-cli"), "api", str(config)]
    server = forks.start(command, os.environ | {"API_HOST": "127.0.0.1", "API_PORT": str(port)} | environment, log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=300) as client:
            deadline = time.monotonic() + 600
            while True:
                try:
                    client.get("/v1/models").raise_for_status()
                    break
                except httpx.TransportError:
                    assert server.poll() is None and time.monotonic() < deadline, log.read_text()
                    time.sleep(0.3)
            yield client
    finally:
        server.kill()
        server.wait()

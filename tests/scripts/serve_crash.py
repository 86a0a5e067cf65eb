"""Crash a served model again and again: `ktft serve --supervise` must bring it back with its adapter.

Starts the real server on a tiny checkpoint in which one token's hidden states overflow, loads an adapter, and requests
that token: the request must get a 5xx, and the server must restart by itself and serve the same adapter with the same
log-probabilities as before. Then the parent is killed with SIGKILL, and no process may be left. Takes some minutes on
two cores.

    python tests/scripts/serve_crash.py [--crashes 2]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "serve")]
from adapters import random_adapter  # noqa: E402
from fragile import TOKEN, write_fragile  # noqa: E402
from tiny import write_checkpoint  # noqa: E402

PORT = 8765
URL = f"http://127.0.0.1:{PORT}"


def ask(prompt: list[int]) -> httpx.Response:
    body: dict[str, Any] = {"model": "tuned", "prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 1}
    return httpx.post(f"{URL}/v1/completions", json=body, timeout=120)


def wait_until_served(log: Path, times: int) -> None:
    deadline = time.monotonic() + 600
    while log.read_text(errors="replace").count("Ctrl-C ends it") < times:
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.5)


def processes() -> list[str]:
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if "-m ktft.serve.vllm" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--crashes", type=int, default=2)
    crashes = parser.parse_args().crashes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny = write_checkpoint("qwen3moe", folder / "tiny", head_dim=32)
        checkpoint, log = write_fragile(tiny, folder / "fragile"), folder / "log.txt"
        # On experts alone, since attention must not write to the place that overflows
        adapter = random_adapter(checkpoint, folder / "tuned", target_modules=["gate_proj", "up_proj", "down_proj"])
        others = processes()
        command = [str(Path(sys.executable).with_name("ktft")), "serve", str(checkpoint), "--port", str(PORT)]
        command += ["--supervise", "--threads", "1", "--adapter-swap", "--max-model-len", "256"]
        with log.open("w") as output:
            server = subprocess.Popen(command, stderr=output, env=os.environ | {"TMPDIR": name})
        try:
            wait_until_served(log, 1)
            loaded = {"lora_name": "tuned", "lora_path": str(adapter)}
            httpx.post(f"{URL}/v1/load_lora_adapter", json=loaded, timeout=120).raise_for_status()
            before = ask([5, 6, 7]).json()["choices"][0]["logprobs"]["token_logprobs"]
            for crash in range(1, crashes + 1):
                response = ask([5, TOKEN])
                assert response.status_code >= 500, response.text
                print(f"crash {crash}: the request got {response.status_code}", flush=True)
                wait_until_served(log, crash + 1)
                after = ask([5, 6, 7]).json()["choices"][0]["logprobs"]["token_logprobs"]
                assert after == before, (before, after)
                print("it is back, with the adapter and the same log-probabilities", flush=True)
        finally:
            server.send_signal(signal.SIGKILL)
            server.wait()
            print(log.read_text(errors="replace"))
        deadline = time.monotonic() + 60
        while left := [line for line in processes() if line not in others]:
            assert time.monotonic() < deadline, left
            time.sleep(0.5)
        print("nothing is left after the parent was killed")


if __name__ == "__main__":
    main()

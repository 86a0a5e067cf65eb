"""The server of `fake_engine.py`, which loads nothing, not even torch.

The file named by FAKE_ENGINE says what the server does, one word for each start: `serve` answers /health; `slow`
packs until it may serve; `crash` serves until it may crash; `early` crashes before it serves; `deaf` ignores SIGTERM.
The last word holds for all later starts. The server "may" go on once a file of the same name with the suffix `.go`
exists, which it then removes. `deaf` creates a file with the suffix `.deaf` when it gets SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from ktft.serve.front.processes import follow
from ktft.serve.runtime.progress import Progress, StatusFile


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    settings = json.loads(os.environ["KTFT_SERVE"])
    follow(settings["parent"])
    plan = Path(os.environ["FAKE_ENGINE"])
    words = plan.read_text().split()
    plan.write_text(" ".join(words[1:] or words))
    record = {
        "pid": os.getpid(),
        "arguments": sys.argv[1:],
        "environment": os.environ["FAKE_NAME"],
        "adapters": settings["adapters"],
        "key": os.environ["VLLM_API_KEY"],
        "admin_key": os.environ.get("KTFT_ADMIN_KEY"),
        "hosts": settings.get("hosts"),
        "origins": settings.get("origins"),
        "command": Path("/proc/self/cmdline").read_bytes().decode(),
    }
    with plan.with_suffix(".starts").open("a") as starts:
        starts.write(json.dumps(record) + "\n")
    child = subprocess.Popen(["sleep", "600"])  # stands for an engine's worker
    status = StatusFile(settings["status_path"])
    status.write(Progress("Packing experts (int8)", 1, 2))
    if words[0] == "early":
        print("ERROR something\nValueError: layer 3 lacks a tensor", flush=True)
        os._exit(0)
    if words[0] == "deaf":
        signal.signal(signal.SIGTERM, lambda *_: plan.with_suffix(".deaf").touch())
    else:
        signal.signal(signal.SIGTERM, lambda *_: (child.kill(), os._exit(0)))
    if words[0] == "crash":
        threading.Thread(target=crash, args=(plan,), daemon=True).start()
    if words[0] == "slow":
        wait_for_leave(plan)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


def wait_for_leave(plan: Path) -> None:
    while not plan.with_suffix(".go").exists():
        time.sleep(0.05)
    plan.with_suffix(".go").unlink()


def crash(plan: Path) -> None:
    """End as vLLM's server does after its engine has died: with exit code 0, leaving the child behind."""
    wait_for_leave(plan)
    print("(EngineCore) ERROR ValueError: hidden states hold NaN\nEngineDeadError: see above", flush=True)
    print("nanobind: leaked 40 functions!", *[f' - leaked function "{i}"' for i in range(40)], sep="\n", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()

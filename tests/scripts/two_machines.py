"""Train on two "machines" of one host: `python tests/scripts/two_machines.py`, as root, with iproute2.

Each is a network namespace with a torchrun agent of its own; a pair of virtual interfaces joins them. They train a tiny
model, save it, and resume it. Then the connection is cut in the middle of a run: both agents must end within 60 seconds
and say why. Prints what was seen, and exits 1 if something else was.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from ranks import ENVIRONMENT, results  # noqa: E402
from tiny import write_checkpoint  # noqa: E402

NAMES, ADDRESSES, PORT = ("ktft0", "ktft1"), ("10.77.0.1", "10.77.0.2"), "29517"
MOST_SECONDS = 60


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, stderr=subprocess.DEVNULL if not check else None)


def join() -> None:
    """Make the machines and the connection between them."""
    leave()
    for name in NAMES:
        ip("netns", "add", name)
    ip("link", "add", "veth0", "netns", NAMES[0], "type", "veth", "peer", "name", "veth1", "netns", NAMES[1])
    for number, name in enumerate(NAMES):
        ip("-n", name, "addr", "add", f"{ADDRESSES[number]}/24", "dev", f"veth{number}")
        for device in (f"veth{number}", "lo"):
            ip("-n", name, "link", "set", device, "up")


def leave() -> None:
    for name in NAMES:
        ip("netns", "del", name, check=False)


def start(folder: Path, jobs: list[dict[str, Any]]) -> list[subprocess.Popen[str]]:
    """One agent on each machine, with one process each."""
    file = folder / "jobs.json"
    file.write_text(json.dumps(jobs))
    agents = []
    for number, name in enumerate(NAMES):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}"]
        launcher += ["--nproc-per-node=1", f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}"]
        command = ["ip", "netns", "exec", name, *launcher, str(TESTS / "rank_program.py"), str(file)]
        variables = os.environ | ENVIRONMENT | {"GLOO_SOCKET_IFNAME": f"veth{number}"}
        out = (folder / f"machine{number}.log").open("w")
        agents.append(subprocess.Popen(command, env=variables, stdout=out, stderr=subprocess.STDOUT, text=True))
    return agents


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        base = write_checkpoint("qwen3moe", folder / "base")
        job = {"base": str(base), "output": str(folder / "out"), "per_device_train_batch_size": 1, "save_steps": 2}
        problems = []
        join()
        try:
            for number, more in enumerate(({"max_steps": 4}, {"max_steps": 6, "resume": True})):
                codes = [agent.wait(200) for agent in start(folder, [job | more])]
                seen = results(folder / "out")["losses"] if codes == [0, 0] else None
                print(f"run {number}: exit {codes}, losses {seen}")
                problems += [] if codes == [0, 0] else [f"run {number} failed"]
            cut = job | {"output": str(folder / "cut"), "max_steps": 100000, "logging_steps": 1000}
            agents = start(folder, [cut])
            while not (folder / "cut" / "checkpoint-2").is_dir():
                time.sleep(0.2)
            ip("-n", NAMES[0], "link", "set", "veth0", "down")
            began = time.monotonic()
            for number, agent in enumerate(agents):
                code = agent.wait(200)
                seconds = time.monotonic() - began
                print(f"cut: machine {number} ended with {code} after {seconds:.0f} s")
                problems += [f"machine {number} took {seconds:.0f} s"] if seconds > MOST_SECONDS or code == 0 else []
            for number in range(2):
                said = (folder / f"machine{number}.log").read_text().splitlines()
                told = [line for line in said if "ends because" in line or "cannot go on because" in line]
                print(*told[:2], sep="\n")
                problems += [] if told else [f"machine {number} said nothing", *said[-25:]]
        finally:
            leave()
        print("; ".join(problems) or "OK")
        return bool(problems)


if __name__ == "__main__":
    sys.exit(main())

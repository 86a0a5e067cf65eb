"""`ktft serve` under mixed load: many clients, bad requests, disconnects, and adapters that come and go all the time.

    python tests/scripts/serve_load.py --minutes 30 --clients 16

Serves a tiny Qwen3-MoE with the `ktft serve` of this environment. Requests name the base and several adapters at the
same time; adapters are loaded and unloaded meanwhile, and one name stands for one adapter after another. Every answer
must provably come from the model that was asked for: prompts are chosen whose first greedy token differs between the
models and, by transformers in fp32, is clear for each, and an answer must begin with its own model's token. A model's
name may be refused only while that model may not be served. Bad requests must get a 4xx with a message; no request may
get a 5xx or hang. The memory of all the server's processes is sampled. Ctrl-C ends the load early, with its report.
Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))
from bad_requests import BAD_REQUESTS, BadRequest
from clear_answers import Prompt, clear_prompts

BASE = "base"
ADAPTERS = ("first", "second", "third", "fourth")
ALIAS, STANDS_FOR = "changing", ADAPTERS[:2]
NAMES = (BASE, *ADAPTERS, ALIAS)
SHAPE = {"head_dim": 32, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64}
VOCABULARY, MOST_TOKENS = 320, 512
HANG_SECONDS = 120.0
GROWTH_LIMIT = 0.05
SHOWN = 20


@dataclass
class Findings:
    """What happened under the load."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)

    def fail(self, message: str) -> None:
        self.outcomes["FAILED"] += 1
        self.failures.append(message)
        if len(self.failures) <= SHOWN:  # at once, for a run may be cut off
            print(f"FAILED: {message}", flush=True)


class Served:
    """What each name stood for, and when: a model, or None if it was not served. During a change either may be."""

    def __init__(self) -> None:
        self._history: dict[str, list[tuple[str | None, float, float]]] = {
            name: [(BASE if name == BASE else None, 0.0, float("inf"))] for name in NAMES
        }

    def now(self, name: str) -> str | None:
        """What it stands for since the last change."""
        return self._history[name][-1][0]

    def begin(self, name: str, model: str | None) -> None:
        """A change begins: from now on it may stand for this, too."""
        self._history[name] = [*self._history[name][-8:], (model, time.monotonic(), float("inf"))]

    def end(self, name: str) -> None:
        """The change is done: from now on it does not stand any more for what it did before."""
        before, since, _ = self._history[name][-2]
        self._history[name][-2] = before, since, time.monotonic()

    def possible(self, name: str, begin: float, end: float) -> set[str | None]:
        """What it may have stood for at some time from `begin` to `end`."""
        return {model for model, since, until in self._history[name] if since <= end and begin <= until}


def tree_memory(root: int) -> int:
    """Resident bytes of a process and all its descendants."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, rest = stat.read_text().rpartition(") ")
        except OSError:
            continue
        parents[int(head.partition(" ")[0])] = int(rest.split()[1])
    found, total = {root}, 0
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    for pid in found:
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            continue
    return total


class Load:
    """The load on one server.

    Args:
        http: of the server.
        models: directories of the base and the adapters, by name.
        prompts: those of `clear_prompts`.
        args: of the command line.
    """

    def __init__(
        self, http: httpx.AsyncClient, models: dict[str, Path], prompts: list[Prompt], args: argparse.Namespace
    ) -> None:
        self.http, self.models, self.args = http, models, args
        self.found = Findings()
        self.served = Served()
        self.random = random.Random(args.seed)
        self.prompts = prompts
        self.began = self.end = 0.0

    # --- changing adapters ------------------------------------------------------------------------------------------

    async def serve(self, name: str, model: str | None) -> None:
        """Let a name stand for an adapter, or for none."""
        self.served.begin(name, model)
        if model is None:
            answer = await self.http.post("/v1/unload_lora_adapter", json={"lora_name": name})
        else:
            body = {"lora_name": name, "lora_path": str(self.models[model])}
            answer = await self.http.post("/v1/load_lora_adapter", json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{name} for {model}: {answer.status_code} {answer.text[:300]}")
        self.served.end(name)
        self.found.outcomes["changes of adapters"] += 1

    async def _keep_changing(self) -> None:
        while time.monotonic() < self.end:
            await asyncio.sleep(self.random.uniform(0.5, 1.5) * self.args.swap_seconds)
            name = self.random.choice(NAMES[1:])
            if name == ALIAS:  # it is replaced while it is served
                await self.serve(name, self.random.choice(STANDS_FOR))
            else:
                await self.serve(name, name if self.served.now(name) is None else None)

    # --- what each model answers ------------------------------------------------------------------------------------

    async def begin_serving(self) -> None:
        """Serve all names, and see that the server answers as transformers does, in mixed batches."""
        for name in NAMES[1:]:
            await self.serve(name, STANDS_FOR[0] if name == ALIAS else name)
        await self._compare()

    async def _compare(self) -> None:
        """Every prompt to every model whose answer is known, before the load."""
        asked = [(prompt, name) for prompt in self.prompts for name in prompt.first]
        self.random.shuffle(asked)
        for begin in range(0, len(asked), self.args.clients):
            some = asked[begin : begin + self.args.clients]
            await asyncio.gather(*(self._guarded(lambda each: self._plain(*each[::-1]), each) for each in some))
        print(f"answers of transformers, compared before the load: {_in_words(self.found)}", flush=True)

    def _drawn(self, name: str) -> Prompt:
        """A prompt whose answer is known of all that a name may stand for."""
        models = STANDS_FOR if name == ALIAS else (name,)
        return self.random.choice([prompt for prompt in self.prompts if all(m in prompt.first for m in models)])

    # --- clients ----------------------------------------------------------------------------------------------------

    async def run(self, memory: Callable[[], int]) -> None:
        """Run the whole load for the given time, or until Ctrl-C."""
        self.began = time.monotonic()
        self.end = self.began + 60 * self.args.minutes
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._end_now)
        tasks = [self._client() for _ in range(self.args.clients)]
        await asyncio.gather(self._keep_changing(), self._watch(memory), *tasks)

    def _end_now(self) -> None:
        self.end = time.monotonic()

    async def _watch(self, memory: Callable[[], int]) -> None:
        """Sample memory, and check that health, metrics and models are answered."""
        while time.monotonic() < self.end:
            now = time.monotonic() - self.began
            self.found.memory.append((now, memory()))
            for path in ("/health", "/metrics", "/v1/models"):
                answer = await self.http.get(path)
                if answer.status_code != 200:
                    self.found.fail(f"{path} answers {answer.status_code}")
            if len(self.found.memory) % 30 == 0:
                print(f"{now:.0f} s: {_in_words(self.found)}", flush=True)
            await asyncio.sleep(min(2.0, 60 * self.args.minutes / 100))

    async def _client(self) -> None:
        while time.monotonic() < self.end:
            draw = self.random.random()
            if draw < self.args.bad:
                await self._guarded(self._bad, self.random.choice(BAD_REQUESTS))
            elif draw < self.args.bad + self.args.disconnects:
                await self._guarded(self._disconnect, self.random.choice(NAMES))
            else:
                kind = self.random.choice((self._plain, self._plain, self._stream))
                await self._guarded(kind, self.random.choice(NAMES))

    async def _guarded(self, act: Callable[[Any], Awaitable[None]], what: Any) -> None:
        begin = time.monotonic()
        try:
            await asyncio.wait_for(act(what), HANG_SECONDS)
        except TimeoutError:
            self.found.fail(f"{act.__name__.strip('_')} hung for {HANG_SECONDS:.0f} s: {what}")
        except httpx.HTTPError as error:
            self.found.fail(f"{act.__name__.strip('_')}: {type(error).__name__} {error}")
        self.found.seconds.append(time.monotonic() - begin)

    def _request(self, prompt: Prompt, name: str) -> dict[str, Any]:
        body = {"model": name, "max_tokens": self.random.choice((1, 8, 24)), "temperature": 0, "return_token_ids": True}
        if self.random.random() < 0.3:
            body["logprobs"] = True if prompt.path.startswith("/v1/chat") else 2
        if self.random.random() < 0.1 and not prompt.path.startswith("/v1/chat"):
            body["prompt_logprobs"] = 1
        return body | prompt.content

    async def _plain(self, name: str, prompt: Prompt | None = None) -> None:
        prompt, begin = prompt or self._drawn(name), time.monotonic()
        answer = await self.http.post(prompt.path, json=self._request(prompt, name))
        if answer.status_code == 200:
            content = answer.json()
            self._judge(prompt, name, begin, content["model"], content["choices"][0]["token_ids"][0], "answered")
        else:
            self._judge_refusal(name, begin, answer.status_code, answer.text)

    async def _stream(self, name: str) -> None:
        prompt, begin = self._drawn(name), time.monotonic()
        body = self._request(prompt, name) | {"stream": True}
        body.pop("prompt_logprobs", None)
        async with self.http.stream("POST", prompt.path, json=body) as answer:
            if answer.status_code != 200:
                self._judge_refusal(name, begin, answer.status_code, (await answer.aread()).decode())
                return
            lines = [line[5:].strip() async for line in answer.aiter_lines() if line.startswith("data:")]
        if not lines or lines[-1] != "[DONE]":
            self.found.fail(f"a stream ended without [DONE]: {lines[-1:]}")
            return
        chunks = [httpx.Response(200, content=line).json() for line in lines[:-1]]
        if broken := [chunk for chunk in chunks if "error" in chunk]:
            self.found.fail(f"a stream broke off: {broken[0]}")
            return
        tokens = [t for chunk in chunks for choice in chunk["choices"] for t in choice.get("token_ids") or ()]
        self._judge(prompt, name, begin, chunks[0]["model"], tokens[0], "streamed")

    async def _disconnect(self, name: str) -> None:
        """Disconnect in the middle of a long answer."""
        prompt = self._drawn(name)
        body = self._request(prompt, name) | {"stream": self.random.random() < 0.7, "max_tokens": 200}
        body = {**body, "ignore_eos": True}
        body.pop("prompt_logprobs", None)
        try:
            async with asyncio.timeout(self.random.uniform(0.05, 1.0)):
                async with self.http.stream("POST", prompt.path, json=body) as answer:
                    if answer.status_code >= 500:
                        self.found.fail(f"{answer.status_code} before a disconnect")
                    async for _ in answer.aiter_lines():
                        if self.random.random() < 0.2:
                            break
        except TimeoutError:
            pass
        self.found.outcomes["disconnected"] += 1

    async def _bad(self, bad: BadRequest) -> None:
        request = bad.request(BASE, MOST_TOKENS)
        answer = await self.http.request(**request)
        if not 400 <= answer.status_code < 500:
            self.found.fail(f"bad request ({bad.name}) got {answer.status_code}: {answer.text[:200]}")
        elif len(answer.text) < 10:
            self.found.fail(f"bad request ({bad.name}) got {answer.status_code} without a message")
        else:
            self.found.outcomes["bad requests refused"] += 1

    def _judge(self, prompt: Prompt, name: str, begin: float, said: str, token: int, outcome: str) -> None:
        """Check that an answer came from the model that was asked for."""
        possible = self.served.possible(name, begin, time.monotonic())
        if said != name:
            self.found.fail(f"asked for {name}, the answer says {said}")
        elif token not in {prompt.first[model] for model in possible if model is not None}:
            owner = next((each for each, known in prompt.first.items() if known == token), "no model that is known")
            self.found.fail(f"WRONG MODEL: asked for {name}, the answer is that of {owner}: {token}, {prompt}")
        else:
            self.found.outcomes[outcome] += 1

    def _judge_refusal(self, name: str, begin: float, status: int, text: str) -> None:
        if status == 404 and None in self.served.possible(name, begin, time.monotonic()):
            self.found.outcomes["refused while not served"] += 1
        else:
            self.found.fail(f"asked for {name}: {status} {text[:200]}")


def _in_words(found: Findings) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(found.outcomes.items()))


def growth(memory: list[tuple[float, int]]) -> tuple[int, int]:
    """Memory after warming up (a quarter of the time, at most five minutes) and at the end: medians of a tenth each."""
    warm = min(300.0, memory[-1][0] / 4)
    later = [size for at, size in memory if at >= warm]
    some = max(1, len(later) // 10)
    return int(statistics.median(later[:some])), int(statistics.median(later[-some:]))


def make_models(folder: Path) -> dict[str, Path]:
    from adapters import random_adapter
    from tiny import write_checkpoint

    base = write_checkpoint("qwen3moe", folder / BASE, **SHAPE)
    made = {name: random_adapter(base, folder / name, 0.4, seed) for seed, name in enumerate(ADAPTERS)}
    return {BASE: base} | made


def start(models: dict[str, Path], port: int, log: Path, options: list[str]) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).parent / "ktft"), "serve", str(models[BASE]), "--port", str(port)]
    # All of the cache is soon in use, since no prefix is dropped: its pages count as memory from their first use
    command += ["--adapter-swap", "--max-model-len", str(MOST_TOKENS), "--kv-cache-memory", "48M", *options]
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


async def load(
    server: subprocess.Popen[bytes], url: str, models: dict[str, Path], prompts: list[Prompt], args: argparse.Namespace
) -> Findings:
    """Wait for the server, then load it."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=args.clients)
    async with httpx.AsyncClient(base_url=url, timeout=HANG_SECONDS, limits=limits) as http:
        while True:
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with {server.returncode}")
            try:
                if (await http.get("/health")).status_code == 200:
                    break
            except httpx.HTTPError:
                await asyncio.sleep(0.5)
        it = Load(http, models, prompts, args)
        for bad in BAD_REQUESTS:
            await it._bad(bad)
        await it.begin_serving()
        await it.run(lambda: tree_memory(server.pid))
        for name in NAMES:
            await it._plain(name)
        return it.found


def report(found: Findings, code: int, args: argparse.Namespace) -> bool:
    """Print what was found; True if all is well."""
    if code != 0:
        found.fail(f"the server ended with {code} after SIGTERM")
    before, after = growth(found.memory)
    grown = after / before - 1
    if grown > GROWTH_LIMIT:
        found.fail(f"memory grew by {grown:.1%}, the limit is {GROWTH_LIMIT:.0%}")
    ordered = sorted(found.seconds)
    print(f"{found.memory[-1][0] / 60:.1f} minutes, {args.clients} clients: {_in_words(found)}")
    print(f"seconds a request: median {ordered[len(ordered) // 2]:.2f}, largest {ordered[-1]:.2f}")
    print(f"memory of all processes: {before / 1e6:.0f} MB warm, {after / 1e6:.0f} MB at the end ({grown:+.1%})")
    if len(found.failures) > SHOWN:
        print(f"{len(found.failures) - SHOWN} more failures than those above")
    return not found.failures


def main() -> None:
    """Start the server, load it, end it; exit with 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--bad", type=float, default=0.05, help="share of bad requests")
    parser.add_argument("--disconnects", type=float, default=0.05, help="share of clients that disconnect")
    parser.add_argument("--swap-seconds", type=float, default=4.0, help="between changes of adapters, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--option", action="append", default=[], help="further option of ktft serve; repeatable")
    args = parser.parse_args()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as scratch:
        models, log = make_models(Path(scratch)), Path(scratch) / "server.log"
        prompts = clear_prompts(models[BASE], {name: models[name] for name in ADAPTERS}, args.seed)
        server = start(models, port, log, args.option)
        try:
            found = asyncio.run(load(server, f"http://127.0.0.1:{port}", models, prompts, args))
            server.send_signal(signal.SIGTERM)
            code = server.wait(60)
        except BaseException:
            print(log.read_text(errors="replace")[-4000:])
            raise
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
                server.wait(60)
    sys.exit(int(not report(found, code, args)))


if __name__ == "__main__":
    main()

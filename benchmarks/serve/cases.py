"""The timed cases: one load on one server, and its figures. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Load:
    """The requests of one round: each client sends one, all at the same moment.

    Attributes:
        clients: the number of clients that wait at the same time.
        prompt_tokens, output_tokens: the lengths of each prompt, of random ids below `vocabulary`, and of its answer.
    """

    clients: int
    prompt_tokens: int
    output_tokens: int
    vocabulary: int = 1000


@dataclass(frozen=True)
class Job:
    """The settings that servers are started with.

    Attributes:
        model: directory of the checkpoint; None if no server is started.
        gguf: the same model for llama.cpp, if there is one.
        clients: the most clients at once.
        length: the most tokens of prompt and answer together.
        options: more arguments of `ktft serve`.
        threads: the number of threads; None leaves it to the server.
        peer_options: name of a peer -> more arguments of its server.
    """

    model: Path | None
    gguf: Path | None
    clients: int
    length: int
    options: tuple[str, ...] = ()
    threads: int | None = None
    peer_options: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Timing:
    """The times of one request's tokens, in seconds since its round began.

    Attributes:
        prompt_tokens: the number that the server counted, or else that was sent.
        arrivals: the arrival of every token of the answer, including the first.
    """

    prompt_tokens: int
    arrivals: list[float]

    @property
    def gaps(self) -> list[float]:
        """Seconds from each token to the next."""
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True)
class ServeRecord:
    """Medians over rounds, as printed; docs/reference/measuring.md, "Serving", says what each is."""

    server: str
    model: str
    layers: int | None
    device: str
    cpu: str
    clients: int
    prompt_tokens: int
    output_tokens: int
    rounds: int
    ttft_ms: float
    ttft_p95_ms: float
    itl_ms: float
    itl_p95_ms: float
    prefill_tokens_per_second: float
    decode_tokens_per_second: float | None
    output_tokens_per_second: float
    note: str = ""
    absent_peers: dict[str, str] = field(default_factory=dict)

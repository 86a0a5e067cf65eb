"""What is timed: one load on one server, and what came of it. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Load:
    """Requests of one round: so many clients send one each, at the same moment.

    Attributes:
        clients: that wait at the same time.
        prompt_tokens: of each prompt, drawn at random, so that no prompt cache helps.
        output_tokens: of each answer.
        vocabulary: ids of prompts are below it.
    """

    clients: int
    prompt_tokens: int
    output_tokens: int
    vocabulary: int = 1000


@dataclass(frozen=True)
class Job:
    """What servers are started with.

    Attributes:
        model: directory of the checkpoint; None where no server is started.
        gguf: the same model for llama.cpp, if there is one.
        clients: the most at once.
        length: tokens of prompt and answer at most.
        options: more arguments of `ktft serve`.
        threads: None leaves it to the server.
    """

    model: Path | None
    gguf: Path | None
    clients: int
    length: int
    options: tuple[str, ...] = ()
    threads: int | None = None


@dataclass(frozen=True)
class Timing:
    """One request: when its tokens came, in seconds since its round began.

    Attributes:
        prompt_tokens: what the server counted, or what was sent.
        arrivals: of every token of the answer, the first included.
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

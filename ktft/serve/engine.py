"""What a serving engine is to `ktft serve`: a row of data and functions, a running server, and a client of it.

An engine is a folder beside this file and its row in `ktft.serve.engines`. `ktft.serve.front` knows an engine by the
types of this file alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ktft.serve.runtime.settings import ServeSettings

DRAIN = 15
"""Seconds that requests in flight have to finish after the server was told to end."""


@dataclass(frozen=True)
class Options:
    """What a server is started with, beside `ServeSettings`.

    Attributes:
        host, port: the address to listen at.
        max_model_len: tokens of a prompt and its answer; None takes what the model allows and the KV cache holds.
        max_num_seqs: sequences that are computed at once.
        kv_cache: bytes of KV cache; None takes a part of the memory that is left.
        api_key: the key that requests must give; None asks for none.
        admin_key: the key that changes of the adapter, and the engine's `Paths.admin`, must give; None takes `api_key`
            for them too.
        allowed_hosts: names of this server, besides its address, that requests may give.
        extra: further arguments of the engine.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_model_len: int | None = None
    max_num_seqs: int = 32
    kv_cache: int | None = None
    api_key: str | None = None
    admin_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class Findings:
    """What the checks before the start have settled.

    `max_model_len` and `kv_cache` are as in `Options`; None leaves them to the engine. `notes` are lines for the user.
    """

    engine: Engine
    model_type: str
    gpu: bool
    max_model_len: int | None
    kv_cache: int | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Engine:
    """One row of `ktft.serve.engines.ENGINES`.

    The server that `module` starts has to:

    - read `ServeSettings.from_env()`, load the model by `ktft.serve.runtime`, and write its progress to the settings'
      status file;
    - end with its parent (`ktft.serve.front.processes.follow`), and within `DRAIN` seconds of SIGTERM;
    - answer `GET /health` with 200 once it serves;
    - put a `ktft.serve.front.gate.Gate` before its HTTP application;
    - compute each request with the adapter of its model's name, and let no prompt use KV cache
      of another number than its own adapter's.

    Attributes:
        name: what messages call the engine.
        module: what `python -m` runs as the server.
        packages: "gpu" and "cpu" -> the package that computes there, a row of `ktft.versions.TESTED_SERVERS`.
        families: values of `model_type` whose log-probabilities were measured to be training's.
        drafts: those of them whose prediction layer was measured to draft tokens as it should, on a CPU.
        install: "gpu" or "cpu" -> the command that installs the engine for it.
        check_extra: raises ValueError for an argument of the user's that ktft sets itself or does not work with. The
            message names the argument.
        allowed_origins: the web pages that the user's argument `--allowed-origins`, a JSON list, lets use the server.
            It raises ValueError if that is no list of texts.
        arguments: the server's command line.
        environment: the server's environment, made from the one given.
        server_memory: bytes of CPU memory that its processes take besides the model and its KV cache.
        kv_block: tokens of a block of KV cache in CPU memory.
        latent_on_cpu: whether the KV cache of multi-head latent attention holds the latent vectors on a CPU too, where
            it would otherwise hold keys and values. On a GPU every engine keeps the latent vectors.
    """

    name: str
    module: str
    packages: Mapping[str, str]
    families: tuple[str, ...]
    drafts: tuple[str, ...]
    install: Callable[[str], str]
    check_extra: Callable[[Iterable[str]], None]
    allowed_origins: Callable[[Sequence[str]], tuple[str, ...]]
    arguments: Callable[[ServeSettings, Options, Findings], list[str]]
    environment: Callable[[Mapping[str, str], ServeSettings, Findings], dict[str, str]]
    server_memory: int
    kv_block: int
    latent_on_cpu: bool


@dataclass(frozen=True)
class Paths:
    """The paths of an engine's HTTP application that take a POST. The gate refuses all others.

    Attributes:
        computes: paths that take a request for a model -> whether the request has to name it, on a server that has
            adapters or may get some.
        admin: paths that change what every user gets, for which the admin key is needed.
        passed: paths that need no check.
        reserved: names that no adapter can have.
        reads: the paths that may be read, where reading others changes something; other methods than GET, HEAD and
            OPTIONS are then refused too. None lets all be read.
    """

    computes: Mapping[str, bool]
    admin: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    reserved: tuple[str, ...] = ()
    reads: tuple[str, ...] | None = None


class EngineError(Exception):
    """The engine did not do what it was asked. The message is its reason; `dead`: it will do nothing any more."""

    def __init__(self, message: str, *, dead: bool) -> None:
        super().__init__(message)
        self.dead = dead


class Client(Protocol):
    """A running engine, as the gate in front of its HTTP application asks it."""

    async def add_adapter(self, number: int, path: str) -> dict[str, Any]:
        """Load the adapter in this directory beside those that are served; see `ktft.serve.runtime.slots.add_adapter`.

        Returns:
            What the answer to the request says besides the model's name.

        Raises:
            EngineError: it did not work. Nothing has changed.
        """

    async def remove_adapter(self, number: int) -> None:
        """Serve an adapter no longer. No request for it is in flight. Raises EngineError; it then is still there."""

    def announce(self, adapters: Mapping[str, tuple[int, str]]) -> None:
        """From now on these names stand for these adapters: number, and directory."""

    async def status(self) -> dict[str, Any]:
        """`ktft.serve.runtime.served_model.ServedModel.status`. It raises any exception if the engine is dead."""

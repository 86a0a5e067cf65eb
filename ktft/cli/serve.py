"""`ktft serve`: its options, refusals, progress and messages. torch is imported when the command runs."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from ktft.checkpoint.routing_profile import find_routing
from ktft.cli.progress import Phases
from ktft.config import ADMIN_KEY_ENV, API_KEY_ENV, DEFAULT_EXPERT_FORMAT, EXPERT_FORMATS, MAX_ADAPTERS
from ktft.sizes import parse_size

if TYPE_CHECKING:
    from ktft.serve.engine import Findings, Options
    from ktft.serve.front.launch import Failed, ServerPlace, Watcher
    from ktft.serve.runtime.settings import ServeSettings

FORMATS = f"{', '.join(EXPERT_FORMATS[:-1])} or {EXPERT_FORMATS[-1]}. [a converted MODEL's own, else "
FORMATS += f"{DEFAULT_EXPERT_FORMAT}]"


def serve(
    model: Annotated[Path, typer.Argument(help="Directory of a model, as released, merged or converted.")],
    extra: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ENGINE ARGUMENTS]", help="Further arguments of vLLM, or SGLang."),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]DIR", help="An adapter to serve, unmerged; again for more. [NAME: that of DIR]"),
    ] = None,
    adapter_name: Annotated[str | None, typer.Option(help="What requests call it, if there is one.")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What requests call the base model. [its directory's name]")
    ] = None,
    expert_format: Annotated[str | None, typer.Option(help=FORMATS)] = None,
    dense_format: Annotated[
        str | None, typer.Option(help="Format of the weights around the experts: int8 or k4. [bf16]")
    ] = None,
    expert_checkpoint: Annotated[Path | None, typer.Option(help="Where the experts are, if not in MODEL.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar=API_KEY_ENV, help="Key that requests must give. [none is needed]")
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(envvar=ADMIN_KEY_ENV, help="Key that changes of the adapter must give. [that of requests]"),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A name of this server that requests may give; again for more. [those of --host]"),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt and its answer. [the model's, if they fit]")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that are computed at once.")] = 32,
    kv_cache_memory: Annotated[str | None, typer.Option(help="For the KV cache, as 8G. [part of what is left]")] = None,
    adapter_swap: Annotated[
        bool, typer.Option("--adapter-swap", help="Let adapters be loaded while it runs; --adapter does too.")
    ] = False,
    max_adapters: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"Adapters that are served at once. [{MAX_ADAPTERS}; with a GPU as many as are given]"
        ),
    ] = None,
    max_lora_rank: Annotated[int, typer.Option(min=1, help="Largest rank of an adapter.")] = 64,
    swap_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that requests and a change of the adapter wait for each other.")
    ] = 60.0,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads. [one per physical core]")] = None,
    numa_nodes: Annotated[int | None, typer.Option(min=1, help="NUMA nodes to split experts over. [all]")] = None,
    gpu_expert_memory: Annotated[str, typer.Option(help="GPU memory for experts that stay there, as 8G, or auto.")] = (
        "0"
    ),
    routing_profile: Annotated[
        Path | None, typer.Option(help="Counts that choose those experts. [expert_routing.json of adapter or MODEL]")
    ] = None,
    speculative_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens that the model's own prediction layer drafts a step, on a CPU.")
    ] = 0,
    deferral: Annotated[
        int,
        typer.Option(min=0, help="Experts of a token that decode on a GPU may add one layer late; changes results."),
    ] = 0,
    activation_bits: Annotated[
        int, typer.Option(help="16; or 8: faster, less exact, for 4-bit formats, and int8 on AMX or AVX-512 BF16.")
    ] = 16,
    supervise: Annotated[bool, typer.Option("--supervise", help="Start again after a crash.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the engine's log, which otherwise goes to a file.")
    ] = False,
) -> None:
    """Serve a model with an OpenAI-compatible API, its experts computed by ktft, with or without an adapter.

    Exits with 0 when it was told to end (Ctrl-C, SIGTERM), 1 if the server could not start or died, 2 on bad input.
    """
    from ktft.serve.engine import Options
    from ktft.serve.front import launch
    from ktft.serve.runtime.settings import ServeSettings

    adapters = named_adapters(adapter or (), adapter_name)
    routing = routing_profile or find_routing(Path(adapters[0][1]) if adapters else None, model)
    settings = ServeSettings(
        checkpoint=str(model),
        served_name=served_model_name,
        adapters=adapters,
        adapter_swap=adapter_swap or bool(adapters),
        max_adapters=max_adapters,
        expert_format=expert_format,
        dense_format=None if dense_format == "bf16" else dense_format,
        expert_checkpoint=str(expert_checkpoint) if expert_checkpoint else None,
        threads=threads,
        numa_nodes=numa_nodes,
        gpu_expert_memory=gpu_expert_memory,
        routing=str(routing) if routing else None,
        speculative_tokens=speculative_tokens,
        deferral=deferral,
        activation_bits=activation_bits,
        max_lora_rank=max_lora_rank,
        swap_timeout=swap_timeout,
    )
    options = Options(
        host,
        port,
        max_model_len,
        max_num_seqs,
        None if kv_cache_memory is None else parse_size(kv_cache_memory),
        api_key or None,
        admin_key or None,
        tuple(allowed_host or ()),
        tuple(extra or ()),
    )
    console = Console(stderr=True)
    found = _checked(settings, options, console)
    with _files(console, verbose) as (place, progress):
        watcher = _watcher(console, progress, options)
        launch.run(settings, options, found, place, watcher, verbose=verbose, supervise=supervise)


def named_adapters(given: Sequence[str], name: str | None = None) -> tuple[tuple[str, str], ...]:
    """Names and directories of adapters that are given as `DIR` or `NAME=DIR`; `name` is that of the only one.

    Raises:
        ValueError: there is a `name`, but not one adapter.
    """
    if name is not None and len(given) != 1:
        raise ValueError(
            f"--adapter-name is {name}, and there are {len(given)} adapters; give --adapter NAME=DIR for each"
        )
    found = []
    for text in given:
        own, _, path = ("", "", text) if "=" not in text or Path(text).is_dir() else text.partition("=")
        found.append((name or own or Path(path).resolve().name, str(Path(path).absolute())))
    return tuple(found)


@contextmanager
def started(settings: ServeSettings, options: Options, console: Console) -> Iterator[str]:
    """Run a server for the duration of the block. Yields its address. The user is told if it fails."""
    from ktft.serve.front.launch import Server, url

    found, never = _checked(settings, options, console), threading.Event()
    with _files(console, verbose=False) as (place, progress):
        server = Server(settings, options, found, place)
        try:
            server.wait_ready(never, _watcher(console, progress, options).loading)
            progress.end()
            yield url(options)
        finally:
            server.end(never)


def _checked(settings: ServeSettings, options: Options, console: Console) -> Findings:
    from ktft.serve.engines import installed
    from ktft.serve.front.checks import check

    with console.status(f"checking {settings.checkpoint} ..."):
        found = check(installed(), settings, options)
    for note in found.notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    return found


def _watcher(console: Console, progress: Phases, options: Options) -> Watcher:
    from ktft.serve.front.launch import Watcher, url
    from ktft.serve.runtime.progress import READY, Progress

    def loading(state: Progress) -> None:
        phase = "Starting the engine" if state.phase == READY else state.phase
        progress(phase, *((0, 0) if state.phase == READY else (state.done, state.total)))

    def ready(settings: ServeSettings) -> None:
        progress.end()
        names = ", ".join(name for name, _ in settings.adapters)
        name = f"{settings.base_name} and its adapters {names}" if names else settings.base_name
        console.print(Text(f"serving {name} at {url(options)}/v1; Ctrl-C ends it", style="green"), soft_wrap=True)

    def crashed(failure: Failed, pause: float) -> None:
        progress.end()
        _tell(console, failure)
        console.print(Text(f"starting it again in {pause:.0f} s", style="yellow"), soft_wrap=True)

    return Watcher(loading, ready, crashed)


def _tell(console: Console, failure: Failed) -> None:
    for line in failure.lines:
        console.print(Text(line, style="dim"), soft_wrap=True)
    console.print(Text(str(failure), style="red"), soft_wrap=True)


@contextmanager
def _files(console: Console, verbose: bool) -> Iterator[tuple[ServerPlace, Phases]]:
    """A directory for a server's files, which is kept only if the server fails, and a bar that shows its progress."""
    from ktft.serve.front.launch import Failed, ServerPlace

    place, progress = ServerPlace(Path(tempfile.mkdtemp(prefix="ktft-serve-"))), Phases(console)
    keep = False
    try:
        yield place, progress
    except Failed as failure:
        keep = True
        progress.end()
        _tell(console, failure)
        if not verbose:
            console.print(Text(f"all of its log: {place.log}"), soft_wrap=True)
        raise typer.Exit(1) from None
    finally:
        progress.end()
        if not keep:
            shutil.rmtree(place.directory, ignore_errors=True)

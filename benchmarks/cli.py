"""The commands of `ktft bench`. torch is imported when a command runs."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.text import Text

from benchmarks.cases import ROUTINGS, SHAPES, parse_shape
from benchmarks.step.cases import ORDERS, parse_step_shape
from benchmarks.step.cases import SHAPES as STEP_SHAPES
from ktft.config import EXPERT_FORMATS, PLACEMENTS, Settings
from ktft.sizes import parse_count

app = typer.Typer(no_args_is_help=True, help="Time ktft on this machine.")

LARGEST_RANK = 256
TABLE_WIDTH = 120
STEP_TABLE_WIDTH = 160

Output = Annotated[Path | None, typer.Option(help="File for the JSON lines. [stdout, if that is no terminal]")]
Peers = Annotated[
    list[str] | None, typer.Option(help="What to time beside ktft, by name, or none; repeatable. [what runs here]")
]
Routings = Annotated[list[str] | None, typer.Option(help=f"{' or '.join(ROUTINGS)}; repeatable.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads. [one per physical core]")]


def _chosen(option: str, given: list[str] | None, known: tuple[str, ...], default: tuple[str, ...]) -> list[str]:
    for name in given or ():
        if name not in known:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}", param_hint=option)
    return given or list(default)


def _peers(given: list[str] | None, known: Iterable[str], default: Iterable[str]) -> list[str]:
    return [] if given == ["none"] else _chosen("--peer", given, tuple(known), tuple(default))


def _peer_options(given: list[str] | None, peers: list[str]) -> dict[str, list[str]]:
    """Name of a peer -> its words, of `NAME=WORDS`, quoted as in a shell."""
    found: dict[str, list[str]] = {}
    for each in given or ():
        name, _, words = each.partition("=")
        if name not in peers:
            timed = ", ".join(peers) or "none"
            raise typer.BadParameter(
                f"{name!r} is not timed here, of peers {timed}; give --peer {name}", param_hint="--peer-option"
            )
        with _refusing("--peer-option"):
            found.setdefault(name, []).extend(shlex.split(words))
    return found


@contextmanager
def _refusing(option: str | None = None, errors: tuple[type[Exception], ...] = (ValueError,)) -> Iterator[None]:
    """Show errors within the block as those of a wrong option."""
    try:
        yield
    except errors as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def _console(width: int = TABLE_WIDTH) -> Console:
    return Console(stderr=True, width=None if sys.stderr.isatty() else width)


def _require_matplotlib(plot: Path | None) -> None:
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise typer.BadParameter("needs matplotlib: pip install matplotlib", param_hint="--plot")


@contextmanager
def _lines(output: Path | None) -> Iterator[TextIO]:
    """The file for JSON lines. They are dropped if they would appear in a terminal between the lines of the table.

    Peers' native code writes to descriptor 1. Within the block that is stderr, and JSON lines go to a copy of stdout.
    """
    if output is not None or sys.stdout.isatty():
        with (output or Path(os.devnull)).open("w") as file:
            yield file
        return
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as file:
        os.dup2(2, 1)
        try:
            yield file
        finally:
            os.dup2(file.fileno(), 1)


@contextmanager
def _saying(console: Console) -> Iterator[Callable[[str], None]]:
    """What shows a line about the work at hand: in a terminal's last line, in a file below those before, with the time.

    So whoever reads a log knows what a measurement of minutes is at, and since when.
    """
    if console.is_terminal:
        with console.status("starting ...") as status:
            yield status.update
    else:
        yield lambda words: console.print(f"{datetime.now():%H:%M:%S} {words}", highlight=False, markup=False)


def _recorded(
    console: Console, output: Path | None, run: Callable[[Callable[[str], None]], Iterator[Any]]
) -> tuple[list[Any], list[str]]:
    """What `run` yields: records, printed as JSON lines as they come, and what could not be measured, as text."""
    from benchmarks.report import json_line

    records: list[Any] = []
    failed: list[str] = []
    with _lines(output) as file, _saying(console) as say:
        for found in run(say):
            if isinstance(found, str):
                failed.append(found)
            else:
                records.append(found)
                print(json_line(found), file=file, flush=True)
    return records, failed


def _show(console: Console, report: Any, records: list[Any], plot: Path | None = None) -> None:
    """Show records as `report`, a module, does: a table, lines below it, and a picture if `plot` names a file."""
    console.print(report.make_table(records))
    for line in report.explain(records):
        console.print(line, highlight=False, markup=False)
    if plot is not None:
        report.plot(records, plot)


@app.command()
def kernels(
    shape: Annotated[list[str] | None, typer.Option(help=f"{', '.join(SHAPES)}, or E,k,H,I; repeatable.")] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="Tokens in the batch; repeatable.")] = None,
    fmt: Annotated[list[str] | None, typer.Option("--format", help="Expert format; repeatable. [all]")] = None,
    routing: Routings = None,
    rank: Annotated[int, typer.Option(min=0, max=LARGEST_RANK, help="LoRA rank, 0 for none.")] = 8,
    runs: Annotated[int, typer.Option(min=1, help="Timed runs a case; medians are reported.")] = 7,
    threads: Threads = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="Another library to time beside ktft, or none; repeatable. [those found]")
    ] = None,
    w8a8: Annotated[
        bool, typer.Option("--w8a8", help="Format int8's forward with 8-bit activations too; needs AMX.")
    ] = False,
    output: Output = None,
    plot: Annotated[Path | None, typer.Option(help="Picture of TFLOPS over tokens; needs matplotlib.")] = None,
) -> None:
    """Time one layer's experts, forward and backward, beside the machine's ceilings and the peers installed."""
    console = _console()
    _require_matplotlib(plot)
    with _refusing("--shape"):
        shapes = [parse_shape(text) for text in shape or ["small"]]

    from benchmarks import report
    from benchmarks.kernels import LIBRARIES, PEERS, run
    from ktft import native

    measured = partial(
        run,
        shapes=shapes,
        tokens=tokens or [64, 1024],
        routings=_chosen("--routing", routing, ROUTINGS, ROUTINGS[:1]),
        formats=_chosen("--format", fmt, native.FORMATS, native.FORMATS),
        rank=rank,
        runs=runs,
        threads=threads,
        w8a8=w8a8,
        peers=_peers(peer, (each.name for each in PEERS), (each.name for each in LIBRARIES)),
    )
    with _refusing():
        records, _ = _recorded(console, output, measured)
    _show(console, report, records, plot)


@app.command()
def optimizer(
    shape: Annotated[str, typer.Option(help=f"{', '.join(SHAPES)}, or E,k,H,I.")] = "deepseek-v3",
    rank: Annotated[int, typer.Option(min=1, max=LARGEST_RANK, help="LoRA rank.")] = 8,
    parameters: Annotated[
        str, typer.Option(help="LoRA parameters, rounded up to whole layers: 16 bytes each, for instance 500M.")
    ] = "200M",
    runs: Annotated[int, typer.Option(min=1, help="Timed steps of each; medians are reported.")] = 7,
    threads: Threads = None,
    peer: Peers = None,
    output: Output = None,
) -> None:
    """Time one AdamW step over expert LoRA on the CPU, beside memory bandwidth and other AdamWs."""
    console = _console()
    with _refusing():
        chosen, count = parse_shape(shape), parse_count(parameters)

    from benchmarks import optimizer as bench

    ours, *others = bench.OPTIMIZERS
    wanted = [ours, *_peers(peer, others, others)]
    with _refusing():
        records, absent = _recorded(console, output, partial(bench.run, chosen, rank, count, threads, runs, wanted))
    _show(console, bench, records)
    for line in absent:
        console.print(f"without {line}", highlight=False, markup=False)


@app.command()
def step(
    shape: Annotated[list[str] | None, typer.Option(help=f"{', '.join(STEP_SHAPES)}, or E,k,H,I; repeatable.")] = None,
    layers: Annotated[list[int] | None, typer.Option(min=1, help="Layers of the model; repeatable. [2]")] = None,
    gpus: Annotated[list[int] | None, typer.Option(min=1, help="GPUs that train together; repeatable. [1]")] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=2, help="Tokens in a GPU's batch; repeatable.")] = None,
    micro_batches: Annotated[int, typer.Option(min=1, help="Batches in an optimizer step.")] = 1,
    order: Annotated[
        list[str] | None, typer.Option(help=f"Of several: {', '.join(ORDERS)}; repeatable. [{ORDERS[0]}]")
    ] = None,
    fmt: Annotated[list[str] | None, typer.Option("--format", help="Expert format; repeatable. [k4, int8]")] = None,
    placement: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(PLACEMENTS)}: where experts run; repeatable. [auto]")
    ] = None,
    gpu_expert_memory: Annotated[str, typer.Option(help="For experts that stay on the GPU: a size, or auto.")] = "0",
    gpu_activation_memory: Annotated[
        list[str] | None, typer.Option(help="For layers that are not run again: a size, or auto; repeatable. [auto]")
    ] = None,
    routing: Routings = None,
    rank: Annotated[int, typer.Option(min=1, max=LARGEST_RANK, help="LoRA rank.")] = 8,
    checkpointing: Annotated[bool, typer.Option(help="Gradient checkpointing, as LLaMA-Factory does.")] = True,
    runs: Annotated[int, typer.Option(min=1, help="Timed steps a case; medians are reported.")] = 5,
    threads: Threads = None,
    peer: Peers = None,
    output: Output = None,
    plot: Annotated[Path | None, typer.Option(help="Picture of ms a layer over tokens; needs matplotlib.")] = None,
) -> None:
    """Time training steps of a few layers beside the machine's limits and other ways to train them."""
    console = _console(STEP_TABLE_WIDTH)
    _require_matplotlib(plot)
    formats = _chosen("--format", fmt, EXPERT_FORMATS, ("k4", "int8"))
    placements = _chosen("--placement", placement, PLACEMENTS, ("auto",))
    routings = _chosen("--routing", routing, ROUTINGS, ROUTINGS[:1])
    orders = _chosen("--order", order, ORDERS, ORDERS[:1]) if micro_batches > 1 else [""]
    with _refusing():
        shapes = [parse_step_shape(text) for text in shape or STEP_SHAPES[:1]]
        memory = Settings(gpu_expert_memory=gpu_expert_memory).gpu_expert_memory
        stored = [
            Settings(gpu_activation_memory=each).gpu_activation_memory for each in gpu_activation_memory or ["auto"]
        ]

    from benchmarks.step import report
    from benchmarks.step.peers import PEERS
    from benchmarks.step.process import WorkerError
    from benchmarks.step.run import Plan, run

    names = [each.name for each in PEERS]
    plan = Plan(shapes, layers or [2], sorted(set(gpus or [1])), tokens or [512, 4096], micro_batches, orders, routings,
                formats, placements, memory, stored, rank, checkpointing, runs, threads,
                _peers(peer, names, names))  # fmt: skip
    with _refusing(errors=(ValueError, WorkerError)):
        records, failed = _recorded(console, output, partial(run, plan))
    for line in failed:
        console.print(f"failed: {line}", style="red", highlight=False, markup=False)
    if records:
        _show(console, report, records, plot)
    if failed:
        raise typer.Exit(1)


@app.command()
def serve(
    model: Annotated[
        Path | None, typer.Argument(help="Directory of a checkpoint. [--shape's]", file_okay=False)
    ] = None,
    shape: Annotated[
        str, typer.Option(help=f"Random weights instead: {', '.join(STEP_SHAPES)}, or E,k,H,I.")
    ] = STEP_SHAPES[0],
    layers: Annotated[int, typer.Option(min=1, help="Layers of --shape.")] = 4,
    url: Annotated[str | None, typer.Option(help="A server that runs already. [ktft serve is started]")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What --url calls the model. [its first]")] = None,
    gguf: Annotated[Path | None, typer.Option(help="MODEL for llama.cpp.", exists=True, dir_okay=False)] = None,
    clients: Annotated[list[int] | None, typer.Option(min=1, help="At the same time; repeatable. [1, 4, 16]")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of prompts.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=2, help="Length of answers.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; medians are reported.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of servers that can be told.")] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="For ktft serve, as --option=--format=k4; repeatable.")
    ] = None,
    peer: Peers = None,
    peer_option: Annotated[
        list[str] | None, typer.Option(help="For a peer, as 'llama.cpp=--n-cpu-moe 28'; repeatable.")
    ] = None,
    together: Annotated[
        bool | None,
        typer.Option("--together/--one-by-one", help="All servers at once, taking turns. [unless there is a GPU]"),
    ] = None,
    output: Output = None,
    plot: Annotated[Path | None, typer.Option(help="Picture over the number of clients; needs matplotlib.")] = None,
) -> None:
    """Time a server: prefill, decode, time to first token, time between tokens; beside other servers."""
    console = _console()
    _require_matplotlib(plot)
    with _refusing("--shape"):
        chosen = parse_step_shape(shape)

    from benchmarks.serve import report
    from benchmarks.serve.cases import Job, Load, ServeRecord
    from benchmarks.serve.checkpoint import describe, write_checkpoint
    from benchmarks.serve.client import ServerFailed
    from benchmarks.serve.run import Plan, run, take_turns
    from benchmarks.serve.servers import PEERS, running

    names = [each.name for each in PEERS]
    peers = _peers(peer, names, names if url is None else ())
    words = _peer_options(peer_option, peers)
    counts = sorted(set(clients or [1, 4, 16]))

    def measured(scratch: Path, say: Callable[[str], None]) -> Iterator[ServeRecord]:
        directory, held, vocabulary = model, None, Load.vocabulary
        if directory is None and (url is None or peers):
            say(f"writing {layers} layers of {shape} ...")
            directory = write_checkpoint(chosen, layers, scratch)
        if directory is not None:
            held, vocabulary = describe(directory)
            title = chosen.name if model is None else model.name
        else:
            title = running(str(url), served_model_name).models[0]
        loads = [Load(count, prompt_tokens, output_tokens, vocabulary) for count in counts]
        job = Job(directory, gguf, counts[-1], prompt_tokens + output_tokens + 64, tuple(option or ()), threads, words)
        plan = Plan(job, url, served_model_name, peers, loads, rounds, take_turns(together), title, held)
        yield from run(plan, say)

    try:
        with _refusing(), tempfile.TemporaryDirectory() as scratch:
            records, _ = _recorded(console, output, partial(measured, Path(scratch)))
    except ServerFailed as error:
        console.print(Text(str(error), style="red"), soft_wrap=True)
        raise typer.Exit(1) from None
    _show(console, report, records, plot)

"""Shows servers: a table for 120 columns, a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.report import NOT_ASKED, gpu_words, short
from benchmarks.serve.cases import ServeRecord

LEGEND = (
    "in, out: tokens of a prompt and of an answer; TTFT: time to the first token; ITL: time between tokens; p95: of "
    "the slowest twentieth; prefill, decode, output: tokens a second of all clients. docs/reference/measuring.md"
)


def make_table(records: Sequence[ServeRecord]) -> Table:
    """A row a server and number of clients."""
    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False, header_style="bold")
    table.add_column("server", overflow="ellipsis", no_wrap=True, max_width=24)
    headings = ("clients", "in", "out", "TTFT ms", "p95", "ITL ms", "p95", "prefill tok/s", "decode", "output", "ITL x")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    ours = {record.clients: record.itl_ms for record in records if record.server == records[0].server}
    for r in sorted(records, key=lambda record: record.clients):
        counts = (str(value) for value in (r.clients, r.prompt_tokens, r.output_tokens))
        times = (short(value) for value in (r.ttft_ms, r.ttft_p95_ms, r.itl_ms, r.itl_p95_ms))
        decode = "-" if r.decode_tokens_per_second is None else short(r.decode_tokens_per_second)
        rates = (short(r.prefill_tokens_per_second), decode, short(r.output_tokens_per_second))
        ratio = f"{r.itl_ms / ours[r.clients]:.2f}" if ours.get(r.clients) else "-"
        table.add_row(r.server, *counts, *times, *rates, ratio)
    return table


def explain(records: Sequence[ServeRecord], console: Console) -> None:
    """The machine, the model, and the peers, below the table."""
    first = records[0]
    layers = f", {first.layers} layers" if first.layers is not None else ""
    console.print(
        f"{first.model}{layers}; {first.cpu}, {gpu_words(first.device)}; {first.rounds} rounds; ITL x: the "
        "peer's over the first server's, above 1 that one is faster",
        highlight=False,
    )
    console.print(LEGEND, highlight=False, markup=False)
    for name, note in {record.server: record.note for record in records if record.note}.items():
        console.print(f"{name}: {note}", highlight=False, markup=False)
    for name, reason in first.absent_peers.items():
        if reason != NOT_ASKED:
            console.print(f"without {name}: {reason}", highlight=False, markup=False)


def plot(records: Sequence[ServeRecord], path: Path) -> None:
    """Inter-token latency and output tokens a second over clients, a line a server. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    panels = figure.subplots(1, 2)
    for name in dict.fromkeys(record.server for record in records):
        line = sorted((record for record in records if record.server == name), key=lambda record: record.clients)
        clients = [record.clients for record in line]
        panels[0].plot(clients, [record.itl_ms for record in line], "-o", label=name)
        panels[1].plot(clients, [record.output_tokens_per_second for record in line], "-o", label=name)
    titles = ("time between tokens, median", "output tokens of all clients")
    for axes, title, label in zip(panels, titles, ("ms", "tokens/s"), strict=True):
        axes.set(title=title, xlabel="clients", ylabel=label, ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)

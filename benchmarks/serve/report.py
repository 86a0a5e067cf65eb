"""Shows servers: a table for 120 columns, a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.report import absent, gpu_words, new_table, short
from benchmarks.serve.cases import ServeRecord

LEGEND = (
    "in, out: tokens of a prompt and of an answer; TTFT: time to the first token; ITL: time between tokens; p95: of "
    "the slowest twentieth; prefill, decode, output: tokens a second of all clients. docs/reference/measuring.md"
)


def make_table(records: Sequence[ServeRecord]) -> Table:
    """A row a server and number of clients."""
    headings = ("clients", "in", "out", "TTFT ms", "p95", "ITL ms", "p95", "prefill tok/s", "decode", "output", "ITL x")
    table = new_table("server", (), headings, width=24)
    ours = {record.clients: record.itl_ms for record in records if record.server == records[0].server}
    for r in sorted(records, key=lambda record: record.clients):
        counts = (str(value) for value in (r.clients, r.prompt_tokens, r.output_tokens))
        times = (short(value) for value in (r.ttft_ms, r.ttft_p95_ms, r.itl_ms, r.itl_p95_ms))
        decode = "-" if r.decode_tokens_per_second is None else short(r.decode_tokens_per_second)
        rates = (short(r.prefill_tokens_per_second), decode, short(r.output_tokens_per_second))
        ratio = f"{r.itl_ms / ours[r.clients]:.2f}" if ours.get(r.clients) else "-"
        table.add_row(r.server, *counts, *times, *rates, ratio)
    return table


def explain(records: Sequence[ServeRecord]) -> Iterator[str]:
    """Lines below the table: the machine, the model, and the peers."""
    first = records[0]
    layers = f", {first.layers} layers" if first.layers is not None else ""
    yield (
        f"{first.model}{layers}; {first.cpu}, {gpu_words(first.device)}; {first.rounds} rounds; ITL x: the "
        "peer's over the first server's, above 1 that one is faster"
    )
    yield LEGEND
    notes = {record.server: record.note for record in records if record.note}
    yield from (f"{name}: {note}" for name, note in notes.items())
    yield from absent(records)


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

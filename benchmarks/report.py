"""Shows the records: JSON lines, a table for 120 columns, a plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.cases import W8A8_STEP, Record

STEP_NAMES = {"forward": "fwd", "backward": "bwd", "forward+backward": "both", W8A8_STEP: "w8a8"}
NOT_ASKED = "not asked for"
LEGEND = (
    "T tokens; both: forward and backward. %P, %H, %S: of what products reach on registers, in the kernel's own loop "
    "and with weights from memory. GB/s: packed weights over the time; %read: of the memory's rate; reads: times "
    "that products read them, 1 is the least. err%: against fp32. NAME x: its time over ktft's. "
    "docs/reference/measuring.md"
)
PEER_NAMES = {"torch-eager": "eager", "torch-grouped": "grouped", "kt-kernel": "kt"}  # short enough for a column


def json_line(record: Any) -> str:
    """One record, a dataclass, without a line break."""
    return json.dumps(_rounded(asdict(record)))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.1 else f"{value:.3f}"


def gpu_words(device: str) -> str:
    """The GPU that a benchmark ran on."""
    return "no GPU" if device == "cpu" else f"GPU: {device}"


def new_table(first: str, texts: Sequence[str], numbers: Sequence[str], width: int = 16) -> Table:
    """A table without rows: a first column of at most `width` characters, then columns of texts and of numbers."""
    table = Table(box=None, padding=(0, 1), collapse_padding=True, pad_edge=False, header_style="bold")
    table.add_column(first, overflow="ellipsis", no_wrap=True, max_width=width)
    for heading in texts:
        table.add_column(heading, no_wrap=True)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def ratios(peers: dict[str, Any], names: Sequence[str]) -> list[str]:
    """The cells of a record's peers: their times over ktft's."""
    return [f"{peers[name].ratio:.2f}" if name in peers else "-" for name in names]


def absent(records: Iterable[Any]) -> list[str]:
    """Lines about the peers that were asked for and did not run."""
    reasons = {(name, reason) for record in records for name, reason in record.absent_peers.items()}
    return [f"without {name}: {reason}" for name, reason in sorted(reasons) if reason != NOT_ASKED]


def make_table(records: Sequence[Record]) -> Table:
    """A row a record; the last columns are the peers' times over ktft's."""
    peers = sorted({name for r in records for name in r.peers}, key=lambda name: (name not in PEER_NAMES, name))
    figures = ("ms", "TFLOPS", "%P", "%H", "%S", "GB/s", "%read", "reads", "err%")
    headings = [*figures, *(f"{PEER_NAMES.get(name, name)} x" for name in peers)]
    table = new_table("shape", ("T", "routing", "format", "step"), headings)
    for r in records:
        ceilings = (r.percent_of_registers, r.percent_of_hot, r.percent_of_streamed)
        speeds = (r.ms, r.tflops, *ceilings, r.gbs, r.percent_of_read, r.weight_reads)
        cells = (*(short(value) for value in speeds), f"{100 * r.max_error:.2f}", *ratios(r.peers, peers))
        table.add_row(r.shape, str(r.tokens), r.routing, r.format, STEP_NAMES[r.step], *cells)
    return table


def explain(records: Sequence[Record]) -> Iterator[str]:
    """Lines below the table: the machine, the ceilings' medians, and the peers that did not run."""
    first = records[0]
    registers, hot, streamed, read = (
        statistics.median(getattr(record, name) for record in records)
        for name in ("registers_tflops", "hot_tflops", "streamed_tflops", "read_gbs")
    )
    yield (
        f"{first.cpu}, {first.isa}, {first.threads} threads, {first.nodes} NUMA nodes, rank {first.rank}: "
        f"P {registers:.3g} TFLOPS, H {hot:.3g} TFLOPS, S {streamed:.3g} TFLOPS, read {read:.3g} GB/s"
    )
    yield LEGEND
    yield from absent(records)


def plot(records: Iterable[Record], path: Path) -> None:
    """TFLOPS over tokens, a panel a shape and routing, a line a format and pass. Needs matplotlib."""
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str], dict[tuple[str, str], list[Record]]] = {}
    for record in records:
        if record.step in ("forward", "backward"):
            lines = panels.setdefault((record.shape, record.routing), {})
            lines.setdefault((record.format, record.step), []).append(record)
    figure = Figure(figsize=(6 * len(panels), 4.5), layout="constrained")
    for panel, axes in zip(panels.items(), figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        (shape, routing), lines = panel
        for (name, step), line in lines.items():
            line.sort(key=lambda record: record.tokens)
            tokens, style = [record.tokens for record in line], "-o" if step == "forward" else "--o"
            axes.plot(tokens, [record.tflops for record in line], style, label=f"{name} {step}")
        hot = [record.hot_tflops for line in lines.values() for record in line]
        axes.axhline(sorted(hot)[len(hot) // 2], color="gray", linestyle=":", label="H")
        axes.set(title=f"{shape}, {routing}", xlabel="tokens", ylabel="TFLOPS", ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)

"""Shows steps: a table for 120 columns, a plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.report import absent, gpu_words, new_table, ratios, short
from benchmarks.step.cases import StepRecord

PEER_NAMES = {"zero3-offload": "zero3", "fsdp2-offload": "fsdp2", "kt-kernel": "kt", "hf-resident": "hf"}
FLOOR = ", floor"
LEGEND = (
    "L layers, T tokens of each GPU; lanes: where experts run, and the order of micro-batches. margin: ms of one more "
    "layer; x floor: forward and backward over the least this machine allows. experts': of VRAM, RSS: memory. NAME x: "
    "its time over ktft's. docs/reference/measuring.md"
)


def make_table(records: Sequence[StepRecord]) -> Table:
    """A row a record; the last columns are the peers' times over ktft's."""
    peers = [name for name in PEER_NAMES if any(name in record.peers for record in records)]
    numbers = ("fwd ms", "bwd", "opt", "ms/layer", "margin", "tok/s", "x floor", "VRAM", "experts'", "RSS")
    headings = [*numbers, *(f"{PEER_NAMES[name]} x" for name in peers)]
    table = new_table("shape", ("L", "GPUs", "T", "routing", "format", "lanes"), headings)
    for r in records:
        marginal = "-" if r.marginal_ms_per_layer is None else short(r.marginal_ms_per_layer)
        times = (short(value) for value in (r.forward_ms, r.backward_ms, r.optimizer_ms, r.ms_per_layer))
        memory = (f"{value / 1e9:.2f}" for value in (r.vram_bytes, r.vram_experts_bytes, r.rss_bytes))
        speed = f"{r.tokens_per_second:.0f}", f"{r.over_floor:.2f}"
        cells = (*times, marginal, *speed, *memory, *ratios(r.peers, peers))
        tokens = str(r.tokens) if r.micro_batches == 1 else f"{r.micro_batches} x {r.tokens}"
        stored = "" if r.gpu_activation_memory == "auto" else f"stored {r.gpu_activation_memory}"
        lanes = " ".join(part for part in (r.placement, r.order, stored) if part)
        table.add_row(r.shape, str(r.layers), str(r.gpus), tokens, r.routing, r.format, lanes, *cells)
    return table


def explain(records: Sequence[StepRecord]) -> Iterator[str]:
    """Lines below the table: the machine, what it could do, and the peers."""
    first = records[0]
    pcie, read, cpu, gpu = (
        statistics.median(getattr(record, name) for record in records)
        for name in ("pcie_gbs", "read_gbs", "registers_tflops", "gpu_tflops")
    )
    yield (
        f"{first.cpu}, {first.isa}, {first.threads} threads, {gpu_words(first.device)}; rank {first.rank}, gradient "
        f"checkpointing {'on' if first.checkpointing else 'off'}; to the GPU {pcie:.3g} GB/s, read {read:.3g} GB/s, "
        f"P {cpu:.3g} TFLOPS, GPU {gpu:.3g} TFLOPS; memory in GB"
    )
    yield LEGEND
    notes = {name: figure.note for record in records for name, figure in record.peers.items()}
    yield from (f"{name}: {note}" for name, note in notes.items())
    yield from absent(records)


def plot(records: Iterable[StepRecord], path: Path) -> None:
    """Milliseconds a layer over tokens, a panel a shape, routing and number of layers. Needs matplotlib."""
    from matplotlib.figure import Figure

    panels: dict[tuple[str, str, int], list[StepRecord]] = {}
    for record in records:
        panels.setdefault((record.shape, record.routing, record.layers), []).append(record)
    figure = Figure(figsize=(6 * len(panels), 4.5), layout="constrained")
    for panel, axes in zip(panels.items(), figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        (shape, routing, layers), found = panel
        lines = _lines(found)
        colors = {
            name: f"C{number}" for number, name in enumerate(sorted({name.removesuffix(FLOOR) for name in lines}))
        }
        for label, (tokens, ms, style) in sorted(lines.items()):
            axes.plot(tokens, ms, style, label=label, color=colors[label.removesuffix(FLOOR)])
        axes.set(title=f"{shape}, {layers} layers, {routing}", xlabel="tokens", ylabel="ms a layer")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=150)


def _lines(records: Sequence[StepRecord]) -> dict[str, tuple[list[int], list[float], Any]]:
    """Map each label to its tokens, milliseconds a layer and style: ktft's models, their floors and the peers."""
    points: dict[str, dict[int, float]] = {}
    styles: dict[str, str] = {}
    for r in records:
        name = f"{r.format} {r.placement} {r.order}".rstrip()
        points.setdefault(name, {})[r.tokens] = r.ms_per_layer
        styles[name] = "-o"
        points.setdefault(name + FLOOR, {})[r.tokens] = r.floor_ms / r.layers
        styles[name + FLOOR] = ":"
        for peer, figure in r.peers.items():
            points.setdefault(peer, {})[r.tokens] = figure.ms_per_layer
            styles[peer] = "--s"
    return {
        name: (sorted(line), [line[tokens] for tokens in sorted(line)], styles[name]) for name, line in points.items()
    }

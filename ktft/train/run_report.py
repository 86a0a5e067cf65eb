"""The training report: a run's setting, course and results, as `ktft_report.json` and a page, `ktft_report.html`."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME

from ktft.checkpoint.files import write_whole
from ktft.checkpoint.routing_profile import ROUTING_NAME, Routing
from ktft.train.guards import WINDOW, Guards
from ktft.train.manifest import describe
from ktft.train.report import logger
from ktft.train.run_times import BUSY, ROOM, TIMES, Row, RunSums, lane_rates

JSON_NAME, PAGE_NAME = "ktft_report.json", "ktft_report.html"
LAYOUT = 2
MAX_ROWS = 4096
"""The most rows of a series. Beyond it, neighbours are merged in pairs, so the file stays at about 2 MB at most."""


@dataclass
class Series:
    """A bounded number of rows over steps. Beyond `MAX_ROWS`, each row stands for 2, 4, 8, ... added rows.

    `step` is the number of a row's last step, `merged` the number of added rows it stands for, `stride` that of the
    next row. A merged row has the sum, the largest or the smallest of the values that `sums`, `peaks` and `lows` name,
    and the mean of all others.
    """

    sums: frozenset[str] = frozenset()
    peaks: frozenset[str] = frozenset()
    lows: frozenset[str] = frozenset()
    rows: list[Row] = field(default_factory=list)
    stride: int = 1

    def add(self, row: Row) -> None:
        """Add the values measured at `row["step"]`, or from the last row's step up to it."""
        row = {**row, "merged": 1}
        if self.rows and (self.rows[-1]["merged"] or 1) < self.stride:
            self.rows[-1] = self._merge(self.rows[-1], row)
        else:
            self.rows.append(row)
        if len(self.rows) > MAX_ROWS:
            pairs = [self.rows[i : i + 2] for i in range(0, len(self.rows), 2)]
            self.rows = [self._merge(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
            self.stride *= 2

    def _merge(self, one: Row, two: Row) -> Row:
        return {name: self._merged(name, one, two) for name in {**one, **two}}

    def _merged(self, name: str, one: Row, two: Row) -> float | None:
        a, b = one.get(name), two.get(name)
        if a is None or b is None or name == "step":
            return a if b is None else b
        if name in self.peaks:
            return max(a, b)
        if name in self.lows:
            return min(a, b)
        if name in self.sums or name == "merged":
            return a + b
        weights = one["merged"] or 1, two["merged"] or 1
        return (a * weights[0] + b * weights[1]) / sum(weights)

    def columns(self) -> dict[str, list[float | None]]:
        """Name -> one value per row."""
        names = dict.fromkeys(name for row in self.rows for name in row)
        return {name: [_finite(row.get(name)) for row in self.rows] for name in names}

    def load(self, columns: Mapping[str, list[float | None]]) -> None:
        """Replace the rows by those that `columns` gave."""
        self.rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        self.stride = int(self.rows[0]["merged"] or 1) if self.rows else 1


def _finite(value: float | None) -> float | None:
    """The value, or None for NaN and infinity, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def _steps() -> Series:
    return Series(
        frozenset({"seconds", "tokens", *TIMES, *BUSY}), frozenset({"rss_bytes", "gpu_bytes"}), frozenset(ROOM)
    )


@dataclass
class RunReport:
    """The report of a run so far.

    Attributes:
        steps: one row per optimizer step: seconds in all and by `TIMES` and `BUSY`, tokens, memory.
        logged: one row each time the Trainer logs: loss, learning rate, and gradient norm in all and by group.
        evaluated: one row per evaluation of the Trainer: its measures without those of speed.
        resumed: the checkpoints from which this run resumed, and the source of the values of earlier steps.
        ranks: what each of several processes did, by rank, as of the last save or the end; empty for one process.
    """

    facts: dict[str, Any]  # see `ktft.train.facts`
    layers: list[int]  # the numbers of the layers with experts
    expert_tokens: Tensor  # [layers, experts] int64, counts of (token, expert) pairs
    steps: Series = field(default_factory=_steps)
    spans: RunSums = field(default_factory=RunSums)
    logged: Series = field(default_factory=Series)
    evaluated: Series = field(default_factory=Series)
    resumed: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    guards: dict[str, Any] = field(default_factory=dict)
    ended: str = "running"

    def content(self) -> dict[str, Any]:
        """The whole report as values of JSON."""
        spans, steps = self.spans.content(), self.steps.columns()
        return {
            "layout": LAYOUT,
            "ended": self.ended,
            **self.facts,
            "guards": self.guards,
            "resumed": self.resumed,
            "ranks": self.ranks,
            "steps": steps,
            "spans": spans,
            "rates": lane_rates(spans, sum(value or 0.0 for value in steps.get("seconds", []))),
            "logged": self.logged.columns(),
            "evaluated": self.evaluated.columns(),
            "expert_tokens": {"layers": self.layers, "tokens": self.expert_tokens.tolist()},
        }

    def resume(self, checkpoint: Path, step: int, log_history: list[dict[str, Any]]) -> None:
        """Take over the steps before a checkpoint from its report, or else from the Trainer's log."""
        origin: dict[str, Any] = {"step": step, "checkpoint": str(checkpoint)}
        earlier = _earlier(checkpoint / JSON_NAME, self)
        if earlier is not None:
            self.steps.load(earlier["steps"])
            self.spans.load(earlier["spans"])
            self.logged.load(earlier["logged"])
            self.evaluated.load(earlier.get("evaluated", {}))
            self.expert_tokens += torch.tensor(earlier["expert_tokens"]["tokens"], dtype=torch.int64)
            self.resumed = [*earlier["resumed"], {**origin, "from": JSON_NAME}]
            return
        for entry in log_history:
            if "loss" in entry:
                self.log(int(entry["step"]), entry, {})
            self.evaluate(int(entry["step"]), entry)
        self.resumed = [{**origin, "from": "trainer_state.json, which has no times, tokens or norms by group"}]
        logger().warning(
            "%s has no %s that fits: the training report has loss, learning rate and gradient norm of steps up to %d, "
            "and all else from there on",
            checkpoint,
            JSON_NAME,
            step,
        )

    def log(self, step: int, logs: Mapping[str, Any], norms: Mapping[str, float]) -> None:
        """Add the Trainer's log entry of a step."""
        row: Row = {"step": step}
        for name in ("loss", "learning_rate", "grad_norm"):
            row[name] = None if logs.get(name) is None else float(logs[name])
        self.logged.add(row | {f"grad_norm of {group}": norm for group, norm in norms.items()})

    def evaluate(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the measures of the Trainer's evaluation after a step."""
        speed = ("_runtime", "_per_second", "_preparation_time", "_compilation_time")
        names = [name for name in metrics if name.startswith("eval_") and not name.endswith(speed)]
        if found := {name: float(metrics[name]) for name in names if isinstance(metrics[name], Real)}:
            self.evaluated.add({"step": step, **found})

    def note_guards(self, guards: Guards) -> None:
        """Record the guards' findings."""
        self.guards = {
            "groups": {group: asdict(proof) for group, proof in guards.proofs.items()},
            "experts_updated": guards.experts_updated,
            "window": WINDOW,
            "steps_checked": guards.steps,
            "closed_step": guards.closed_step,
            "failure": guards.failure,
        }

    def note_adapter(self, directory: Path) -> None:
        """Record size and SHA-256 of the adapter in a directory."""
        path = directory / ADAPTER_SAFE_WEIGHTS_NAME
        if path.is_file():
            self.facts["adapter"]["file"] = {"name": path.name, **describe(path)}

    def write(self, directory: Path, page: bool = True) -> bool:
        """Write the report, each file whole or not at all. An error is logged, because it must not end the training.

        Returns whether the report was written.
        """
        try:
            self._write(directory, page)
        except Exception as error:
            logger().warning(
                "the training report %s could not be written: %s: %s. The adapter and the checkpoints are not affected",
                directory / JSON_NAME,
                type(error).__name__,
                error,
            )
            return False
        return True

    def _write(self, directory: Path, page: bool) -> None:
        content = self.content()
        write_whole(directory / JSON_NAME, _lines(content))
        Routing(dict(zip(self.layers, self.expert_tokens.tolist(), strict=True))).save(directory / ROUTING_NAME)
        if not page:
            return
        if importlib.util.find_spec("matplotlib") is None:
            logger().info("no %s: matplotlib is not installed (pip install matplotlib)", directory / PAGE_NAME)
            return
        from ktft.train.run_report_page import page_of

        write_whole(directory / PAGE_NAME, page_of(content).encode())


def _earlier(path: Path, now: RunReport) -> dict[str, Any] | None:
    """An earlier report that this run can continue; None if there is none."""
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        tokens = found["expert_tokens"]
        same = found["layout"] == LAYOUT and tokens["layers"] == now.layers
        return found if same and len(tokens["tokens"][0]) == now.expert_tokens.shape[1] else None
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _lines(content: Mapping[str, Any]) -> bytes:
    """JSON with one line for each entry of the outer mappings, so that it is small and people can read it."""

    def entry(key: str, value: Any) -> str:
        if key in ("steps", "spans", "rates", "logged", "evaluated") and value:
            inner = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in value.items())
            return f" {json.dumps(key)}: {{\n{inner}\n }}"
        return f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}"

    return ("{\n" + ",\n".join(entry(key, value) for key, value in content.items()) + "\n}\n").encode()

"""The training report as one HTML file: a summary and plots, drawn by matplotlib as inline SVG. No external resources.

Plots have no background and take the page's text colour, so that they follow its light and dark theme.
"""

from __future__ import annotations

import html
import io
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ktft.spans import KINDS, PARALLEL
from ktft.system import readable
from ktft.train.run_times import ROOM, TIMES

_INK = "#123457"  # becomes the page's text colour
_COLOURS = ("#4c8dd6", "#e08a3c", "#4fa870", "#b36bc4", "#8a94a0", "#d65f5f")  # legible on white and on near-black
_STYLE: Any = {
    **{f"axes.{name}": _INK for name in ("edgecolor", "labelcolor", "titlecolor")},
    **{name: _INK for name in ("text.color", "xtick.color", "ytick.color")},
    **{f"axes.spines.{side}": False for side in ("top", "right")},
    "axes.grid": True,
    "axes.prop_cycle": cycler(color=_COLOURS),
    "axes.linewidth": 0.8,
    "axes.labelsize": 9,
    "grid.color": "#8a94a0",
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}
_MANY = 60  # with more rows than this, lines and areas replace markers and bars
_MOST = 300  # the most rows drawn; more are averaged
_TIME_STYLES = {name: (kind.label, kind.colour) for name, kind in KINDS.items()} | {
    "other": ("other modules", _COLOURS[4])
}
"""The label and colour of each part of a step's time."""
_MISSING = "-"

Columns = Mapping[str, list[float | None]]
Drawn = Mapping[str, np.ndarray]


def page_of(content: Mapping[str, Any]) -> str:
    """The page for the result of `RunReport.content`."""
    steps, logged = _thinned(content["steps"]), _thinned(content["logged"])
    with matplotlib.rc_context(_STYLE):
        plots = [
            (
                "Loss",
                "mean over the steps since the one logged before; evaluations",
                _loss(logged, _thinned(content.get("evaluated", {}))),
            ),
            ("Throughput", "padding included", _throughput(steps)),
            ("Where the time goes", "as training waits for it; evaluating and saving left out", _times(steps)),
            (
                "Time by layer",
                "how long each lane was busy; lanes may overlap",
                _layers(content["spans"], sum(content["steps"].get("merged", []))),
            ),
            ("Gradient norms", "before clipping, at logged steps", _norms(logged)),
        ]
        load = _load(content["expert_tokens"])
    cards = "".join(_card(*plot) for plot in plots)
    wide = _card("Expert load", "tokens of an expert, relative to an even spread over its layer; grey: none", load)
    model = content["model"]
    title = html.escape(f"Training report: {model['name'].rstrip('/').rpartition('/')[2] or model['family']}")
    failure = "" if content["ended"] == "finished" else f"<p class=failed>Ended by {html.escape(content['ended'])}</p>"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{title}</title><style>{_CSS}</style><h1>{title}</h1>{failure}"
        f"{_summary(content)}<h2>What trained</h2>{_groups(content)}"
        f"{_rates(content['rates'])}{_ranks(content['ranks'])}"
        f"<div class=plots>{cards}</div><div class=wide>{wide}</div>{_footer(content)}</html>\n"
    )


# --- plots ------------------------------------------------------------------------------------------------------------


def _thinned(columns: Columns) -> Drawn:
    """At most `_MOST` rows. A row that stands for several has their last `step` and the means of all other values."""
    size = max((-(-len(column) // _MOST) for column in columns.values()), default=1)
    drawn = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nanmean warns of rows without a value
        for name, column in columns.items():
            values = [math.nan if value is None else value for value in column] + [math.nan] * (-len(column) % size)
            drawn[name] = (np.nanmax if name == "step" else np.nanmean)(np.reshape(values, (-1, size)), axis=1)
    return drawn


def _axes(ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.2, 3.0), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="optimizer step", ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02)
    return figure, axes


def _marker(rows: int) -> str:
    return "o" if rows <= _MANY else ""


def _loss(logged: Drawn, evaluated: Drawn) -> Figure | None:
    if not logged:
        return None
    steps, loss = logged["step"], logged["loss"]
    figure, axes = _axes("loss")
    losses = [name for name in evaluated if name.endswith("_loss")]
    for name, colour in zip(losses, cycle(_COLOURS[1:]), strict=False):
        label = name.removesuffix("_loss").replace("_", " ", 1)
        axes.plot(evaluated["step"], evaluated[name], marker="s", markersize=4, color=colour, label=label)
    smooth = len(steps) > _MANY
    style: Any = {"marker": _marker(len(steps)), "markersize": 3, "alpha": 0.35 if smooth else 1, "color": _COLOURS[0]}
    axes.plot(steps, loss, label=None if smooth else "training", **style)
    if smooth:
        width = max(len(steps) // 30, 2)
        mean = np.convolve(loss, np.ones(width) / width, "valid")
        axes.plot(steps[width - 1 :], mean, color=_COLOURS[0], label=f"training, mean of {width}")
    if smooth or losses:
        axes.legend()
    return figure


def _throughput(steps: Drawn) -> Figure | None:
    if not steps:
        return None
    rate = steps["tokens"] / np.maximum(steps["seconds"], 1e-9)
    figure, axes = _axes("tokens/s")
    axes.plot(steps["step"], rate, marker=_marker(len(rate)), markersize=3, color=_COLOURS[2])
    axes.set_ylim(0, np.nanmax(rate) * 1.1 or 1)
    return figure


def _times(steps: Drawn) -> Figure | None:
    if not steps:
        return None
    numbers = steps["step"]
    least = np.nansum(steps["seconds"]) / 1000
    drawn = {n: np.maximum(steps[n] / steps["merged"], 0) for n in TIMES if np.nansum(steps[n]) > least}
    scale, unit = _unit(sum(drawn.values(), np.zeros(len(numbers))))
    figure, axes = _axes(f"{unit} a step")
    parts = {name: part * scale for name, part in drawn.items()}
    if len(numbers) > _MANY:
        labels, colours = zip(*(_TIME_STYLES[name] for name in parts), strict=True)
        axes.stackplot(numbers, list(parts.values()), labels=labels, colors=colours, linewidth=0)
    else:
        _stack(axes, numbers, parts)
    return _with_legend(figure, axes)


def _unit(seconds: np.ndarray) -> tuple[float, str]:
    return (1e3, "ms") if np.nanmax(seconds, initial=0.0) < 1 else (1.0, "s")


def _stack(axes: Axes, places: np.ndarray, parts: Drawn) -> None:
    below = np.zeros(len(places))
    for name, part in parts.items():
        label, colour = _TIME_STYLES[name]
        axes.bar(places, part, 0.8, bottom=below, label=label, color=colour)
        below += np.nan_to_num(part)


def _with_legend(figure: Figure, axes: Axes) -> Figure:
    axes.grid(axis="x", visible=False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _layers(spans: Mapping[str, Any], count: float) -> Figure | None:
    """Stacked bars of each layer's seconds per step, by lane."""
    layers = sorted(
        {layer for name in PARALLEL for layer in spans.get(name, {}).get("layers", []) if layer is not None}
    )
    if not layers or not count:
        return None
    parts = {}
    for name in PARALLEL:
        by_layer = dict(zip(*(spans.get(name, {}).get(key, []) for key in ("layers", "seconds")), strict=True))
        if any(by_layer.values()):
            parts[name] = np.array([by_layer.get(layer, 0.0) for layer in layers]) / count
    scale, unit = _unit(sum(parts.values(), np.zeros(len(layers))))
    figure, axes = _axes(f"{unit} a step")
    axes.set(xlabel="layer")
    _stack(axes, np.array(layers), {name: part * scale for name, part in parts.items()})
    return _with_legend(figure, axes)


def _norms(logged: Drawn) -> Figure | None:
    groups = {name.removeprefix("grad_norm of "): column for name, column in logged.items() if " of " in name}
    groups["all"] = logged.get("grad_norm", np.zeros(0))
    drawn = {name: values for name, values in groups.items() if (values > 0).any()}
    if not drawn:
        return None
    figure, axes = _axes("norm")
    steps = logged["step"]
    for name, values in drawn.items():
        style: Any = {"color": _INK, "linestyle": "--", "linewidth": 1.0} if name == "all" else {}
        axes.plot(steps, np.where(values > 0, values, math.nan), marker=_marker(len(steps)), ms=3, label=name, **style)
    axes.set_yscale("log")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _load(expert_tokens: Mapping[str, Any]) -> Figure | None:
    tokens = np.array(expert_tokens["tokens"], dtype=float)
    if not tokens.any():
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        load = np.log2(tokens / tokens.mean(axis=1, keepdims=True))
    height = min(max(0.16 * len(tokens) + 0.9, 1.9), 9.0)
    figure = Figure(figsize=(12.8, height), layout="constrained")
    axes = figure.subplots()
    colours = matplotlib.colormaps["RdBu_r"].with_extremes(bad="#8a94a0")
    image = axes.imshow(
        np.ma.masked_invalid(load), colours, aspect="auto", interpolation="none", vmin=-3, vmax=3, origin="lower"
    )
    axes.grid(visible=False)
    axes.set(xlabel="expert", ylabel="layer")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True))
    rows = np.unique(np.linspace(0, len(tokens) - 1, min(len(tokens), 12)).round().astype(int))
    axes.set_yticks(rows, [str(expert_tokens["layers"][row]) for row in rows])
    bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.03, extend="both")
    bar.set_ticks([-3, -2, -1, 0, 1, 2, 3], labels=["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    if bar.solids is not None:
        bar.solids.set_rasterized(True)
    bar.outline.set_visible(False)
    return figure


def _svg(figure: Figure, salt: str) -> str:
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "path"}):
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = out.getvalue()
    return text[text.index("<svg") :].replace(_INK, "currentColor")


# --- words ------------------------------------------------------------------------------------------------------------


def _card(title: str, note: str, figure: Figure | None) -> str:
    plot = _svg(figure, title) if figure is not None else "<p class=note>nothing was recorded</p>"
    return f"<figure><figcaption>{title} <span class=note>{note}</span></figcaption>{plot}</figure>"


def _summary(content: Mapping[str, Any]) -> str:
    steps, logged, experts, machine = (content[key] for key in ("steps", "logged", "experts", "machine"))
    losses = [loss for loss in logged.get("loss", []) if loss is not None]
    seconds, tokens = sum(steps.get("seconds", [])), sum(steps.get("tokens", []))
    number = int(max([*steps.get("step", []), *logged.get("step", []), 0]))
    count = sum(steps.get("merged", []))
    rss, gpu = (max((v for v in steps.get(key, []) if v), default=None) for key in ("rss_bytes", "gpu_bytes"))
    lows = [min((v for v in steps.get(key, []) if v is not None), default=None) for key in ROOM]
    left = [f"{readable(low)} {of}" for low, of in zip(lows, ("RAM", "GPU"), strict=True) if low is not None]
    file = content["adapter"]["file"]
    resumed = ", ".join(str(each["step"]) for each in content["resumed"])
    trainable = sum(group["trainable"] for group in content["adapter"]["groups"])
    gpus = f", {', '.join(machine['gpus'])}" if machine["gpus"] else ", no GPU"
    rows = {
        "Loss": f"{losses[0]:.4g} → {losses[-1]:.4g}" if losses else _MISSING,
        "Evaluation": _evaluation(content.get("evaluated", {})),
        "Steps": f"{number:,}" + (f", resumed after {resumed}" if resumed else ""),
        "Tokens": f"{tokens:,.0f}, {tokens / seconds:,.0f} tokens/s" if seconds else _MISSING,
        "A step": f"{_duration(seconds / count)}, {_duration(seconds)} in all" if count else _MISSING,
        "Peak memory": f"{readable(rss)} RAM" + (f", {readable(gpu)} GPU" if gpu else "") if rss else _MISSING,
        "Memory left": ", ".join(left) or _MISSING,
        "Trained": f"{trainable:,} parameters",
        "LoRA": _lora(content["adapter"].get("lora", {})),
        "Data": _named(content.get("data", {})),
        "Model": f"{content['model']['family']}, {content['model']['name']}",
        "Experts": f"{experts['layers']} layers x {experts['experts']}, {experts['format']}, "
        f"{readable(experts['packed_bytes'])} packed",
        "Kernels": f"{experts['isa']}, threads: {experts['threads']}, NUMA nodes: {experts['numa_nodes']}",
        "Machine": f"{machine['cpu']}, {machine['cores']} cores, {readable(machine['memory_bytes'])}{gpus}",
        "Adapter": f"{file['name']}, {readable(file['bytes'])}, SHA-256 {file['sha256']}" if file else "not saved yet",
    }
    return _table([(f"<th>{name}</th>", f"<td>{html.escape(value)}</td>") for name, value in rows.items()], "summary")


def _named(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items()) or _MISSING


def _lora(adapters: Mapping[str, Mapping[str, Any]]) -> str:
    """Each adapter's rank, alpha, dropout and modules."""
    parts = []
    for own in adapters.values():
        settings = {name: value for name, value in own.items() if value not in (None, False) and name != "modules"}
        parts.append(f"{_named(settings)}, on {', '.join(own['modules'])}")
    return "; ".join(parts) or _MISSING


def _evaluation(evaluated: Columns) -> str:
    """The first and the last value of each measure."""
    parts = []
    for name, column in evaluated.items():
        values = [value for value in column if value is not None]
        if values and name not in ("step", "merged"):
            ends = " → ".join(f"{value:.4g}" for value in dict.fromkeys((values[0], values[-1])))
            parts.append(f"{name.removeprefix('eval_')} {ends}")
    return ", ".join(parts) or _MISSING


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 3600:.1f} h" if seconds >= 7200 else f"{seconds / 60:.1f} min"


def _groups(content: Mapping[str, Any]) -> str:
    guards, last = content["guards"], {}
    for name, column in content["logged"].items():
        last[name] = next((value for value in reversed(column) if value is not None), None)
    names = ("Group", "Parameters", "Of these on the CPU", "First gradient", "First update", "A's first update")
    rows = [[f"<th>{name}</th>" for name in (*names, "Gradient norm, last")]]
    for group in content["adapter"]["groups"]:
        proof = guards.get("groups", {}).get(group["name"], {})
        norm = last.get(f"grad_norm of {group['name']}")
        seen = [proof.get(key) for key in ("gradient_step", "update_step", "late_update_step")]
        cells = [f"{group['trainable']:,}", f"{group['on_cpu']:,}"]
        cells += [_MISSING if step is None else f"step {step}" for step in seen]
        cells.append(_MISSING if norm is None else f"{norm:.3g}")
        rows.append([f"<th>{html.escape(group['name'])}</th>", *(f"<td>{cell}</td>" for cell in cells)])
    total = content["experts"]["layers"] * content["experts"]["experts"]
    note = (
        f"In the {guards.get('steps_checked', 0)} steps that were checked in full, {guards.get('experts_updated', 0)} "
        f"of {total} experts were updated; an expert without tokens is not."
    )
    return _table(rows, "groups") + f"<p class=note>{note}</p>"


def _rates(rates: Mapping[str, Mapping[str, float | None]]) -> str:
    """The table with a row for each lane that ran; empty if none did."""
    if not rates:
        return ""
    names = ("Lane", "Busy", "Expected", "Of all steps", "GB/s", "TFLOPS")
    rows = [[f"<th>{name}</th>" for name in names]]
    for name, rate in rates.items():
        expected, share = rate["expected_seconds"], rate["share"]
        cells = [_duration(rate["seconds"] or 0.0), _MISSING if expected is None else _duration(expected)]
        cells.append(_MISSING if share is None else f"{share:.1%}")
        cells += [_rate(rate[key]) for key in ("gb_per_s", "tflops")]
        rows.append([f"<th>{_TIME_STYLES[name][0]}</th>", *(f"<td>{cell}</td>" for cell in cells)])
    note = "Lanes run at once, so that shares may add up to more than all. Rates are of the time that a lane was busy."
    return f"<h2>Lanes</h2>{_table(rows, 'groups')}<p class=note>{note}</p>"


def _ranks(ranks: Sequence[Mapping[str, Any]]) -> str:
    """The table with a row for each of several processes; empty if there was one."""
    if not ranks:
        return ""
    spent = [name for name in _TIME_STYLES if any(rank.get(name) for rank in ranks)]
    names = ["Rank", "Machine", "Device", "Tokens of its experts", "A step"]
    names += [*(_TIME_STYLES[name][0] for name in spent), "Peak of RAM", "Of GPU memory"]
    rows = [[f"<th>{name}</th>" for name in names]]
    for number, rank in enumerate(ranks):
        cells = [html.escape(rank["machine"]), html.escape(rank["device"]), f"{rank['expert_tokens']:,}"]
        cells += [_duration(rank[name]) for name in ("seconds", *spent)]
        cells += [readable(rank[key]) if rank[key] else _MISSING for key in ("rss_bytes", "gpu_bytes")]
        rows.append([f"<th>{number}</th>", *(f"<td>{cell}</td>" for cell in cells)])
    note = "Means of a step since the processes began; the rest of this page has rank 0's times and memory."
    return f"<h2>Processes</h2>{_table(rows, 'groups')}<p class=note>{note}</p>"


def _rate(value: float | None) -> str:
    return _MISSING if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(rows: Iterable[Iterable[str]], name: str) -> str:
    lines = (f"<tr>{''.join(cells)}</tr>" for cells in rows)
    return f"<table class={name}>{''.join(lines)}</table>"


def _footer(content: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    lines = (f"Started {content['started']}. {_named(content['training'])}.", f"{versions}.")
    return f"<footer>{''.join(f'<p class=note>{html.escape(line)}</p>' for line in lines)}</footer>"


_CSS = """
:root{color-scheme:light dark;--page:#fff;--ink:#1f2328;--faint:#667079;--line:#d5dbe1;--card:#f7f9fb}
@media(prefers-color-scheme:dark){
:root{--page:#14171a;--ink:#dfe4e8;--faint:#96a0a9;--line:#333a41;--card:#1b1f23}}
body{background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif;
max-width:1180px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0 0 1rem}h2{font-size:1.1rem;margin:1.6rem 0 .5rem}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;font-weight:400;padding:.28rem .8rem .28rem 0;border-bottom:1px solid var(--line);
vertical-align:top;overflow-wrap:anywhere}
.summary th{color:var(--faint);width:8rem}
.groups td,.groups tr:first-child th:not(:first-child){text-align:right;font-variant-numeric:tabular-nums}
.groups tr:first-child th{color:var(--faint)}
.note{color:var(--faint);font-size:.85rem}.failed{color:#d65f5f;font-weight:600;overflow-wrap:anywhere}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(430px,1fr));gap:1rem;margin:1.6rem 0 1rem}
figure{margin:0;padding:.8rem 1rem;background:var(--card);border:1px solid var(--line);border-radius:8px}
figcaption{font-weight:600;margin-bottom:.4rem}figcaption .note{font-weight:400;margin-left:.4rem}
svg{width:100%;height:auto;display:block}footer{margin:1.5rem 0}
"""

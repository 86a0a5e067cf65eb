"""`ktft verify`: progress, tables and the verdict. torch is imported when the command runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ktft.cli.progress import show
from ktft.config import PROJECTIONS, Settings
from ktft.formats import FORMAT_TRAITS
from ktft.system import available_memory, readable

if TYPE_CHECKING:
    from ktft.checkpoint.quantization_error import ProjectionError
    from ktft.verify.layers import LayerResult, LayerVerifier
    from ktft.verify.problem import Problem
    from ktft.verify.whole import WholeResult


@dataclass(frozen=True)
class Request:
    """The user's options. If `whole` is None, the whole model is compared if it fits in memory."""

    directory: Path
    settings: Settings
    layers: list[int] | None
    tokens: int
    adapter: Path | None
    source: Path | None
    whole: bool | None


@dataclass
class Report:
    """The findings. `notes` say what was not compared, and why."""

    format: str
    isa: str
    threads: int
    numa_nodes: int
    layers: list[LayerResult] = field(default_factory=list)
    whole: WholeResult | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[Problem]:
        """All problems found."""
        whole = self.whole.problems if self.whole is not None else []
        return [*(problem for layer in self.layers for problem in layer.problems), *whole]

    def to_dict(self) -> dict[str, Any]:
        """The values that `--json` prints."""
        problems = [asdict(problem) | {"text": problem.text} for problem in self.problems]
        return _finite({"passed": not problems, "problems": problems} | asdict(self))


def _finite(value: Any) -> Any:
    """The value with NaN and infinity as strings, because JSON has neither."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def parse_layers(text: str | None) -> list[int] | None:
    """Parse layer numbers, such as `3,7`.

    Raises:
        ValueError: the text is not a list of numbers.
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--layers is {text!r}; give layer numbers, as in 3,7")
    return [int(part) for part in parts]


def verify(request: Request, console: Console) -> Report:
    """Run the comparisons, with progress on `console`.

    Raises:
        FileNotFoundError, ValueError: the request cannot be done; the message is for the user.
    """
    if not (request.directory / "config.json").is_file():
        raise ValueError(f"{request.directory} is not a directory with a config.json; download the checkpoint first")
    from ktft.adapters.below import holds, paths_of
    from ktft.verify.layers import LayerVerifier
    from ktft.verify.whole import whole_bytes

    with console.status(f"reading headers of {request.directory} ..."):
        verifier = LayerVerifier(
            request.directory, request.settings, request.layers, request.tokens, request.adapter, request.source
        )
        needed = whole_bytes(verifier.plan.layers, request.directory)
    runtime = verifier.runtime
    report = Report(verifier.format, runtime.isa, runtime.threads, runtime.nodes)
    if verifier.source is None:
        report.notes.append(
            "the source is not where it was when it was converted, or has changed, so the packed weights were not "
            "compared with it: give --source"
        )
    adapter = verifier.adapter
    if adapter is not None and adapter.below and not holds(request.directory, adapter.below):
        report.notes.append(
            f"{adapter.directory} was trained on top of {paths_of(adapter.below)}, which {request.directory} does not "
            "hold: compared was the adapter alone on this model, which is not what was trained"
        )
    show(verifier.run(report.layers), verifier.nbytes, console)
    if _whole_wanted(request, needed, report):
        _show_whole(verifier, request, report, console)
    return report


def _whole_wanted(request: Request, needed: int, report: Report) -> bool:
    if request.whole is not None:
        return request.whole
    if report.problems:
        report.notes.append("the whole model was not compared, because layers are off already; --whole does it")
        return False
    if request.layers is not None:
        return False
    free = available_memory()
    if needed > free:
        report.notes.append(
            f"the whole model was not compared: that takes {readable(needed)} of memory, {readable(free)} are free; "
            "--whole tries"
        )
    return needed <= free


def _show_whole(verifier: LayerVerifier, request: Request, report: Report, console: Console) -> None:
    from ktft.verify.whole import WholeResult, verify_whole

    with console.status("whole model ...") as status:
        for step in verify_whole(request.directory, request.settings, request.tokens, request.adapter, verifier.source):
            if isinstance(step, WholeResult):
                report.whole = step
            else:
                status.update(f"whole model: {step} ...")


def show_deferral(
    model: Path,
    settings: Settings,
    deferral: int,
    tokens: int,
    prompts: Path | None,
    adapter: Path | None,
    as_json: bool,
) -> None:
    """Measure the effect of deferral and print it.

    Raises:
        OSError, ValueError: the request cannot be done; the message is for the user.
    """
    from ktft.verify.deferral import verify_deferral
    from ktft.verify.problem import percent

    with Console(stderr=True).status("the model with and without deferral ..."):
        effect = verify_deferral(model, settings, deferral, tokens, prompts, adapter)
    if as_json:
        print(json.dumps(_finite(asdict(effect)), indent=2))
        return
    print(
        f"{model}: {effect.deferred} of {effect.top_k} experts one layer late, {effect.tokens} tokens of "
        f"{prompts or 'random text'}\n"
        f"logits change by {percent(effect.logits)}, KL {effect.kl:.3g} nats, same top token {percent(effect.top1)}, "
        f"perplexity {effect.perplexity:.4g} -> {effect.deferred_perplexity:.4g}"
    )


# --- tables -----------------------------------------------------------------------------------------------------------


def tables(report: Report) -> list[Table | Text]:
    """The tables and notes for a person to read."""
    shown: list[Table | Text] = [_layer_table(report)]
    if report.whole is not None:
        shown.append(_whole_table(report.whole))
    return shown + [Text(f"note: {note}", style="yellow") for note in report.notes]


def _layer_table(report: Report) -> Table:
    from ktft.verify.contract import GRADIENT_LIMIT, OUTPUT, OUTPUT_LIMIT, comparable
    from ktft.verify.problem import percent

    limits = (OUTPUT_LIMIT, GRADIENT_LIMIT, FORMAT_TRAITS[report.format].error_limit)
    heads = ("output", "gradients", f"{report.format} weights")
    table = Table(
        "layer",
        "",
        *(f"{head}\n(limit {percent(limit)})" for head, limit in zip(heads, limits, strict=True)),
        title="Relative errors of all experts and of the worst one, layer by layer",
        box=None,
    )
    for result in report.layers:
        output, *gradients = sorted(result.contract, key=lambda error: error.quantity != OUTPUT)
        worst = max(gradients, key=lambda error: comparable(error.worst_relative))
        table.add_row(
            str(result.layer),
            _verdict(not result.problems),
            f"{percent(output.relative)}\nexpert {output.worst_expert}: {percent(output.worst_relative)}",
            f"{percent(worst.relative)} {worst.quantity.removesuffix(' gradient')}\n"
            f"expert {worst.worst_expert}: {percent(worst.worst_relative)}",
            _weights(result.quantization),
        )
    return table


def _weights(errors: Mapping[str, ProjectionError] | None) -> str:
    from ktft.verify.problem import percent

    if errors is None:
        return "not compared"
    name = max(PROJECTIONS, key=lambda name: errors[name].worst_relative_rms)
    error = errors[name]
    return f"{percent(error.relative_rms)} {name}\nexpert {error.worst_expert}: {percent(error.worst_relative_rms)}"


def _whole_table(whole: WholeResult) -> Table:
    from ktft.verify.problem import percent

    table = Table(
        "",
        "logits",
        "gradient",
        "KL, nats",
        "same top",
        title="The whole model, against transformers' own experts",
        box=None,
    )
    rows = [
        ("packed weights", whole.arithmetic, whole.arithmetic_limit, whole.gradient_limit),
        ("source's weights", whole.quantization, whole.quantization_limit, None),
        ("source's, routed freely", whole.free, None, None),
        ("bf16 alone", whole.noise, None, None),
    ]
    for name, distance, limit, gradient_limit in rows:
        if distance is not None:
            table.add_row(
                name,
                percent(distance.logits) + (f" (limit {percent(limit)})" if limit else ""),
                percent(distance.gradient) + (f" (limit {percent(gradient_limit)})" if gradient_limit else ""),
                f"{distance.kl:.3g}",
                percent(distance.top1),
            )
    return table


def _verdict(passed: bool) -> Text:
    return Text("pass", style="green") if passed else Text("off", style="bold red")

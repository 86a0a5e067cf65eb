"""`ktft verify`: progress, tables and the verdict. torch is imported when the command runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ktft.cli import verify_dense, verify_server
from ktft.cli.progress import show
from ktft.config import DEFAULT_EXPERT_FORMAT, DENSE_FORMATS, EXPERT_FORMATS, Settings
from ktft.formats import FORMAT_TRAITS
from ktft.system import available_memory, readable
from ktft.verify.problem import Problem, finite, percent

if TYPE_CHECKING:
    from ktft.checkpoint.quantization_error import ProjectionError
    from ktft.verify.layers import LayerResult, LayerVerifier
    from ktft.verify.whole import WholeResult

TOKENS, SERVE_TOKENS = 64, 16


@dataclass
class VerifyReport:
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
        return finite({"passed": not problems, "problems": problems} | asdict(self))


def verify(
    model: Annotated[Path, typer.Argument(help="Directory of a checkpoint, as released or converted.")],
    expert_format: Annotated[
        str | None, typer.Option("--format", help=f"{', '.join(EXPERT_FORMATS)}. [{DEFAULT_EXPERT_FORMAT}]")
    ] = None,
    isa: Annotated[str | None, typer.Option(help="Kernels' instruction set. [best of this CPU]")] = None,
    numa_nodes: Annotated[int | None, typer.Option(min=1, help="NUMA nodes to split experts over. [all]")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads. [one per physical core]")] = None,
    layers: Annotated[str | None, typer.Option(help="Numbers of the layers to verify, as in 3,7. [all]")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens that go through; of each continuation with --serve. [64; 16]")
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="Directory of an adapter. [random LoRA; none with --serve]")
    ] = None,
    source: Annotated[Path | None, typer.Option(help="What MODEL was converted from. [where it was then]")] = None,
    whole: Annotated[
        bool | None, typer.Option("--whole/--layers-only", help="The whole model too. [if it fits in memory]")
    ] = None,
    serve: Annotated[
        str | None, typer.Option(metavar="URL", help="Compare the server there with training's model instead.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The server's name for MODEL, or with --adapter for both. [its only one]")
    ] = None,
    deferral: Annotated[
        int | None, typer.Option(min=1, help="Report what deferring so many experts a token changes, nothing else.")
    ] = None,
    dense_format: Annotated[
        str | None,
        typer.Option(
            help=f"Compare these formats of the weights outside the routed experts, nothing else: "
            f"{', '.join(DENSE_FORMATS)}, several with commas, or all. With --serve: the one that the server has."
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Text for --serve, --deferral, --dense-format, a prompt a line. [short texts, random tokens]"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Compare a model's logits and gradients with a reference; say pass, or which layer and expert is off.

    With --serve: compare log-probabilities and greedy continuations of a server with those of training's model, MODEL
    alone or with --adapter; say whether the server applies it. Exits with 0 on a pass, 1 if something is off, 2 on bad
    input.
    """
    settings = Settings(
        expert_format=expert_format,
        threads=threads,
        numa_nodes=numa_nodes,
        isa=isa,
        dense_format=None if serve is None else dense_format,
    )
    of_layers = {"--layers": layers, "--source": source, "--whole": whole, "--deferral": deferral}
    verify_server.require_fitting(
        serve, {"--served-model-name": served_model_name,
                "--prompts": prompts if deferral is None and dense_format is None else None},
        of_layers,
    )  # fmt: skip
    if serve is not None:
        length = tokens or SERVE_TOKENS
        raise typer.Exit(
            verify_server.verify(serve, served_model_name, model, settings, adapter, prompts, length, as_json)
        )
    verify_dense.require_fitting(dense_format, of_layers)
    tokens = tokens or TOKENS
    if dense_format is not None:
        raise typer.Exit(verify_dense.verify(dense_format, model, settings, tokens, prompts, adapter, as_json))
    if deferral is not None:
        _show_deferral(model, settings, deferral, tokens, prompts, adapter, as_json)
        return
    numbers = _numbers(layers)
    if not (model / "config.json").is_file():
        raise ValueError(f"{model} is not a directory with a config.json; download the checkpoint first")
    from ktft.verify.layers import LayerVerifier
    from ktft.verify.whole import verify_whole, whole_bytes

    console = Console(stderr=True)
    with console.status(f"reading headers of {model} ..."):
        verifier = LayerVerifier(model, settings, numbers, tokens, adapter, source)
        needed = whole_bytes(verifier.plan.layers, model)
    runtime = verifier.runtime
    report = VerifyReport(verifier.format, runtime.isa, runtime.threads, runtime.nodes, notes=_notes(model, verifier))
    show(verifier.run(report.layers), verifier.nbytes, console)
    if whole or (whole is None and _whole_wanted(numbers, needed, report)):
        with console.status("whole model ...") as status:
            for step in verify_whole(model, settings, tokens, adapter, verifier.source):
                if isinstance(step, str):
                    status.update(f"whole model: {step} ...")
                else:
                    report.whole = step
    _print(report, model, as_json)
    raise typer.Exit(int(bool(report.problems)))


def _numbers(layers: str | None) -> list[int] | None:
    if layers is None:
        return None
    parts = [part.strip() for part in layers.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"--layers is {layers!r}; give layer numbers, as in 3,7")
    return [int(part) for part in parts]


def _notes(directory: Path, verifier: LayerVerifier) -> list[str]:
    from ktft.adapters.below import holds, paths_of

    notes, adapter = [], verifier.adapter
    if verifier.source is None:
        notes.append(
            "the source is not where it was when it was converted, or has changed, so the packed weights were not "
            "compared with it: give --source"
        )
    if adapter is not None and adapter.below and not holds(directory, adapter.below):
        notes.append(
            f"{adapter.directory} was trained on top of {paths_of(adapter.below)}, which {directory} does not "
            "hold: compared was the adapter alone on this model, which is not what was trained"
        )
    return notes


def _whole_wanted(numbers: list[int] | None, needed: int, report: VerifyReport) -> bool:
    if report.problems:
        report.notes.append("the whole model was not compared, because layers are off already; --whole does it")
        return False
    if numbers is not None:
        return False
    free = available_memory()
    if needed > free:
        report.notes.append(
            f"the whole model was not compared: that takes {readable(needed)} of memory, {readable(free)} are free; "
            "--whole tries"
        )
    return needed <= free


def _show_deferral(
    model: Path,
    settings: Settings,
    deferral: int,
    tokens: int,
    prompts: Path | None,
    adapter: Path | None,
    as_json: bool,
) -> None:
    from ktft.verify.deferral import verify_deferral

    with Console(stderr=True).status("the model with and without deferral ..."):
        effect = verify_deferral(model, settings, deferral, tokens, prompts, adapter)
    if as_json:
        print(json.dumps(finite(asdict(effect)), indent=2))
        return
    print(
        f"{model}: {effect.deferred} of {effect.top_k} experts one layer late, {effect.tokens} tokens of "
        f"{prompts or 'random text'}\n"
        f"logits change by {percent(effect.logits)}, KL {effect.kl:.3g} nats, same top token {percent(effect.top1)}, "
        f"perplexity {effect.perplexity:.4g} -> {effect.deferred_perplexity:.4g}"
    )


# --- tables -----------------------------------------------------------------------------------------------------------


def _print(report: VerifyReport, model: Path, as_json: bool) -> None:
    problems = report.problems
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        console = Console(soft_wrap=True)
        console.print(_layer_table(report))
        if report.whole is not None:
            console.print(_whole_table(report.whole))
        for note in report.notes:
            console.print(Text(f"note: {note}", style="yellow"))
    for problem in problems:
        Console(stderr=True).print(Text(problem.text, style="red"), soft_wrap=True)
    if not as_json:
        verdict = f"off, {len(problems)} over the limit" if problems else "pass"
        typer.echo(f"{model} in {report.format}, {report.isa}, {report.numa_nodes} NUMA nodes: {verdict}")


def _layer_table(report: VerifyReport) -> Table:
    from ktft.verify.contract import GRADIENT_LIMIT, OUTPUT, OUTPUT_LIMIT, comparable

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
            Text("off", style="bold red") if result.problems else Text("pass", style="green"),
            f"{percent(output.relative)}\nexpert {output.worst_expert}: {percent(output.worst_relative)}",
            f"{percent(worst.relative)} {worst.quantity.removesuffix(' gradient')}\n"
            f"expert {worst.worst_expert}: {percent(worst.worst_relative)}",
            _weights(result.quantization),
        )
    return table


def _weights(errors: Mapping[str, ProjectionError] | None) -> str:
    if errors is None:
        return "not compared"
    name = max(errors, key=lambda name: errors[name].worst_relative_rms)
    error = errors[name]
    return f"{percent(error.relative_rms)} {name}\nexpert {error.worst_expert}: {percent(error.worst_relative_rms)}"


def _whole_table(whole: WholeResult) -> Table:
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

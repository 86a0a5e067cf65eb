"""`ktft plan`: the memory and time that a training needs, estimated before anything is loaded."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ktft.plan.description import CORE_FLOPS, Machine, Together
from ktft.system import readable

if TYPE_CHECKING:
    from ktft.plan.description import Description
    from ktft.plan.plan import Plan

TABLE_WIDTH = 120


def plan(
    model: Annotated[
        Path,
        typer.Argument(
            help="A model's directory, as released or converted; its config.json; or its name on the Hugging Face Hub, "
            "from where its config.json alone is fetched."
        ),
    ],
    recipe: Annotated[
        Path | None, typer.Argument(help="LLaMA-Factory's YAML file. [its defaults]", exists=True, dir_okay=False)
    ] = None,
    ram: Annotated[str | None, typer.Option(help="Memory of the machine, as 512G. [this machine]")] = None,
    gpu: Annotated[str | None, typer.Option(help="Memory of its GPU, as 24G, or none.")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of a machine; a process for each trains.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Machines like this one that train together.")] = 1,
    network: Annotated[
        str | None, typer.Option(help="Bytes a second that a machine receives from others. [12.5G, of 100 Gbit/s]")
    ] = None,
    gpu_tflops: Annotated[float | None, typer.Option(min=0.1, help="Dense bf16 TFLOPS of the GPU.")] = None,
    pcie: Annotated[
        str | None, typer.Option(help="PCIe generation of the GPU, 3 to 5, or bytes a second, as 25G.")
    ] = None,
    cores: Annotated[int | None, typer.Option(min=1, help="Physical cores, all sockets together.")] = None,
    sockets: Annotated[int | None, typer.Option(min=1, max=64, help="NUMA nodes.")] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Bytes a second all cores read from memory, as 400G.")] = None,
    isa: Annotated[str | None, typer.Option(help=f"{', '.join(CORE_FLOPS)}.")] = None,
    disk_rate: Annotated[str | None, typer.Option(help="Bytes a second the disk is read at, as 3G.")] = None,
    routing: Annotated[
        Literal["uniform", "zipf"],
        typer.Option(help="How tokens choose experts: evenly, or most of them the same few."),
    ] = "uniform",
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Say whether a model can be trained on this machine, or a described one: memory, time, and what to change.

    Nothing is loaded: config.json is enough, shards' headers are read where they are. Exits with 1 if nothing fits.
    """
    # Refuse all that can be refused without torch before importing torch, which takes seconds.
    from ktft.checkpoint.hub import model_path
    from ktft.plan.description import Description

    description = Description(ram, gpu, gpu_tflops, pcie, cores, sockets, bandwidth, isa, disk_rate, network)
    machine, rate = description.machine() if description.given else None, description.size("disk_rate", 1000)
    with Console(stderr=True).status("planning ..."):
        path = model_path("MODEL", model)
        together = Together(gpus * nodes, gpus)
        result = _make(
            path, None if model.exists() else str(model), recipe, machine, rate, routing, together, description
        )
    if as_json:
        from ktft.plan.plan import to_json

        typer.echo(json.dumps(to_json(result), indent=2))
    else:
        show(result, Console(width=None if sys.stdout.isatty() else TABLE_WIDTH))
    raise typer.Exit(int(not result.fits))


def _make(
    path: Path,
    name: str | None,
    recipe_file: Path | None,
    machine: Machine | None,
    rate: int | None,
    routing: str,
    together: Together,
    description: Description,
) -> Plan:
    """The plan for the model called `name` at `path` on a machine; None for `machine` means this one."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    from ktft.plan.machine import this_machine
    from ktft.plan.planner import Planner
    from ktft.plan.source import disk_rate, read_source
    from ktft.train.recipe import read_recipe

    recipe, notes = read_recipe(recipe_file)
    source = read_source(path, recipe.settings, name, together.ranks)
    if machine is None:
        measured = rate or (disk_rate(source.shard) if source.shard else None)
        settings = recipe.settings
        machine = this_machine(settings.threads, settings.numa_nodes, gpu=not recipe.use_cpu, disk_rate=measured)
    own = machine.of_rank(together.local_ranks)
    own = replace(own, network_rate=description.size("network", 1000) or own.network_rate)
    return Planner(source, own, recipe, routing, together).plan(tuple(notes))


def show(plan: Plan, console: Console) -> None:
    """Print the table, the verdict, what to change, and the sources of the numbers."""
    from ktft.plan.plan import advice, to_json, verdict

    facts = to_json(plan)
    model, adapter, disk, machine = facts["model"], facts["adapter"], facts["disk"], plan.machine
    gpu = f"one GPU: {machine.gpu.name}" if machine.gpu else "no GPU"
    console.print(
        f"{model['name']} ({model['model_type']}): {model['expert_parameters'] / 1e9:,.1f} billion parameters in "
        f"routed experts, {model['other_parameters'] / 1e9:,.1f} billion elsewhere; "
        f"{readable(disk['checkpoint_bytes'])} on disk "
        f"({_how_stored(model)}, from its {model['sizes_from']})\n"
        f"machine: {readable(machine.ram_bytes)} usable on {machine.nodes} NUMA node{'s' * (machine.nodes > 1)}, "
        f"{machine.threads} threads, {machine.isa}, {machine.bandwidth / 1e9:,.0f} GB/s; {gpu}\n"
        f"step: {plan.work.accumulation} x {plan.work.batch} sequences of {plan.work.sequence} tokens; LoRA: "
        f"{adapter['parameters'] / 1e6:,.1f} million parameters, {adapter['expert_parameters'] / 1e6:,.1f} of them on "
        f"experts; with gradients and moments {readable(adapter['training_bytes'])}; an adapter on disk "
        f"{readable(disk['adapter_bytes'])}, a training checkpoint {readable(disk['training_checkpoint_bytes'])}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_table(plan))
    console.print(Text(verdict(plan), style="green" if plan.fits else "bold red"), soft_wrap=True)
    lines = advice(plan)
    if not plan.fits:
        console.print("What would change that:" if lines else "Nothing tried here makes it fit.")
    for title, rows in (("", lines), ("warning: ", machine.warnings), ("note: ", plan.notes)):
        for row in rows:
            console.print(Text(f"  {title}{row}", style="yellow" if title == "warning: " else ""), soft_wrap=True)
    if machine.assumptions:
        console.print(Text(f"Assumed: {'; '.join(machine.assumptions)}.", style="dim"), soft_wrap=True)
    described = "from docs/guide/benchmarks.md and published figures"
    kind = "timed here on parts of the model" if machine.measured else described
    console.print(Text(f"Packed experts and LoRA are exact; all else is an estimate, times {kind}.", style="dim"))


def _how_stored(model: dict[str, Any]) -> str:
    stored = model["quantization"] or "not quantized"
    return f"{stored}, experts converted to {model['converted_to']}" if model["converted_to"] else stored


def _table(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("experts")
    for title in ("memory", "a NUMA node", "GPU memory", "loading", "a step", "tokens/s"):
        table.add_column(title, justify="right")
    table.add_column("fits")
    for row in plan.formats:
        need = row.footprint
        words = ("tight" if row.tight else "yes") if row.fits else "no"
        own = row.format == plan.wished
        table.add_row(
            f"{row.format}{' *' if own else ''}",
            readable(need.ram_bytes),
            readable(max(need.node_bytes)),
            readable(need.vram_bytes) if need.vram else "none",
            f"{row.load_seconds:,.0f} s",
            f"{row.step.total:,.2f} s",
            f"{row.tokens_per_second:,.0f}",
            Text(words, style="green" if row.fits else "red"),
        )
    table.caption = "* the recipe's"
    table.caption_justify = "left"
    return table

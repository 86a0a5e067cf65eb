"""Writes the generated parts of the pages: `python docs/tables.py`.

A part stands between `<!-- docs/tables.py NAME -->` and `<!-- end -->`. NAME is a function of `TABLES`, or
`benchmark FILE` for a record in docs/benchmarks. tests/test_docs.py fails while a page differs from what this makes.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import typer

from ktft import native
from ktft.checkpoint.families import ROWS
from ktft.checkpoint.schemes import Scheme
from ktft.cli.main import app
from ktft.config import DEFAULT_EXPERT_FORMAT, EXPERT_FORMATS, SETTINGS
from ktft.formats import FORMAT_TRAITS
from ktft.hosts import PATCHES
from ktft.kt_keys import KT_KEYS, KtKey
from ktft.native.packed import PACKED_FORMATS, PackedFormat
from ktft.plan.description import Description
from ktft.plan.planner import Planner
from ktft.plan.source import read_source
from ktft.serve.vllm.families import SERVED
from ktft.system import readable
from ktft.train.recipe import Recipe
from ktft.versions import STACKS, TESTED_SERVERS, TESTED_VERSIONS

DOCS = Path(__file__).parent
PART = re.compile(r"(<!-- docs/tables\.py (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; None is an empty cell."""
    head, *body = (
        "| " + " | ".join("" if cell is None else str(cell) for cell in line) + " |" for line in (headings, *rows)
    )
    return "\n".join((head, "|" + "---|" * len(headings), *body))


def code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def benchmark(name: str) -> str:
    """One record: its commands, where and when they ran, and the table of its columns; rows may hold more."""
    record = json.loads((DOCS / "benchmarks" / f"{name}.json").read_text())
    columns: dict[str, str] = record["columns"]
    if empty := set(columns) - {field for row in record["rows"] for field in row}:
        raise ValueError(f"docs/benchmarks/{name}.json: columns {sorted(empty)} are in none of its rows")
    commands = "\n".join(record["commands"])
    rows = table(list(columns.values()), ([row.get(field) for field in columns] for row in record["rows"]))
    where = f"{record['machine']} Recorded {record['date']}, commit {record['commit']}."
    return f"```\n{commands}\n```\n{where}\n\n{rows}"


def families() -> str:
    return table(
        ("Family", "`model_type`", "LLaMA-Factory", "Trainer API and TRL", "`ktft serve`"),
        (
            (
                row.name,
                code(row.model_types),
                "no" if row.newest_only else "yes",
                "yes",
                "yes" if {*row.model_types} & {*SERVED} else "no",
            )
            for row in ROWS
        ),
    )


def formats() -> str:
    experts = ", ".join(f"`{name}`" + " (default)" * (name == DEFAULT_EXPERT_FORMAT) for name in EXPERT_FORMATS)
    sets = dict.fromkeys(str(row["isa"]) for row in native.kernels())
    return table(
        ("", "Supported"),
        (
            ("Expert formats in memory, each for training and serving", experts),
            ("Checkpoints, in safetensors", ", ".join(_schemes(Scheme))),
            ("Instruction sets of the kernels, chosen at run time, each with every format", code(sets)),
        ),
    )


def limits() -> str:
    """The largest error of an expert's weights, for each format."""
    rows = ["relative RMS", *(f"{100 * traits.error_limit:.3g}%" for traits in FORMAT_TRAITS.values())]
    return table(("Limit of weights", *(f"`{name}`" for name in FORMAT_TRAITS)), [rows])


def tiles() -> str:
    """The sizes by which a packed weight is cut."""
    forms = PACKED_FORMATS.values()
    return table(
        ("", *(f"`{form.name}`" for form in forms)),
        (
            ("c, columns of a tile", *(form.tile_cols for form in forms)),
            ("b, bytes of a tile", *(form.tile_bytes for form in forms)),
            ("scales outside of tiles", *(_scales(form) for form in forms)),
        ),
    )


def _scales(form: PackedFormat) -> str:
    return "of rows" if form.row_scaled else "of blocks" if form.block_scaled else "none"


def _schemes(scheme: type[Scheme]) -> list[str]:
    own = [each for each in scheme.__subclasses__() if each.container == "safetensors"]
    return [scheme.name, *(name for each in own for name in _schemes(each))]


def versions() -> str:
    asked = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]["requires-python"]
    python = {"python": tuple(re.findall(r"[\d.]+", asked))}
    every, own = python | TESTED_VERSIONS | TESTED_SERVERS, [each.versions | each.optional for each in STACKS]
    rows = ((name, *(_span(stack.get(name, _shared(name, every, own))) for stack in own)) for name in every)
    return table(("Package", *(f"*{each.name}*: {each.users}" for each in STACKS)), rows)


def _shared(name: str, every: dict[str, tuple[str, ...]], own: list[dict[str, tuple[str, str]]]) -> Any:
    """The versions of a package that no stack has for itself."""
    return None if any(name in stack for stack in own) else every[name]


def _span(tested: tuple[str, ...] | None) -> str | None:
    return tested and f"{tested[0]} to below {tested[1]}"


def commands() -> str:
    group: Any = typer.main.get_command(app)
    names = group.list_commands(None)
    return table(("Command", "What it does"), ((f"`ktft {name}`", _summary(group.commands[name])) for name in names))


def _summary(command: Any) -> str:
    first = (command.help or "").split("\n\n")[0].replace("\n", " ").strip()
    below = getattr(command, "commands", None)
    return f"{first} Subcommands: {code(below)}." if below else first


def imports() -> str:
    """The order that tests/test_layout.py keeps: a part imports parts to its right."""
    tree = ast.parse((DOCS.parent / "tests/test_layout.py").read_text())
    named = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    chains = (ast.literal_eval(named[ranks]) for ranks in ("PYTHON_RANKS", "CPP_RANKS"))
    python, cpp = (
        " → ".join(", ".join(part for part in ranks if ranks[part] == rank) for rank in sorted({*ranks.values()})[::-1])
        for ranks in chains
    )
    return f"```\nPython: {python}\nC++:    {cpp}\n```"


def kt_keys() -> str:
    """KTransformers' keys: what each sets, or under what condition it is accepted, or that it has no effect."""
    effects: dict[str, list[str]] = {}
    for name, key in KT_KEYS.items():
        if name not in SETTINGS:
            effects.setdefault(_effect(key), []).append(name)
    return table(("Keys", "Here"), ((code(names), effect) for effect, names in effects.items()))


def _effect(key: KtKey) -> str:
    if key.setting is not None:
        return f"sets `{key.setting}`"
    return "no effect; the log says why" if key.note else _condition(key.convert)


def _condition(convert: Callable[[Any], Any]) -> str:
    """Of a key that sets nothing: the one value that it accepts, or that it is an error."""
    accepted, refusal = None, ""
    for value in (True, False, 0, "lora"):
        try:
            convert(value)
            accepted = json.dumps(value)
        except ValueError as error:
            refusal = str(error).rpartition(" is not supported; ")[2]
    return f"an error: {refusal}" if accepted is None else f"accepts `{accepted}` alone; {refusal}"


def patches() -> str:
    """One table for each library that ktft patches."""
    parts = []
    for package, rows in groupby(PATCHES, lambda patch: patch.package):
        found = [*rows]
        cells = (
            (
                f"`{patch.owner.partition('.')[2]}.{patch.name}`",
                f"`{patch.wrapper}`",
                "single objects" if patch.on_instances else "process",
                patch.why,
            )
            for patch in found
        )
        head = f"## {package}\nTested with {found[0].tested_versions}."
        parts.append(f"{head}\n\n{table(('Name', 'Replaced by', 'Where', 'Why'), cells)}")
    return "\n\n".join(parts)


CARD_MODELS = (
    ("DeepSeek-V3, R1", "deepseek-v3", "k4"),
    ("Kimi-K2", "kimi-k2", "k4"),
    ("GLM-4.5", "glm-4.5", "k4"),
    ("Qwen3-235B-A22B", "qwen3-235b-a22b", "k4"),
    ("gpt-oss-120b", "gpt-oss-120b", "mxfp4"),
    ("MiniMax-M2", "minimax-m2", "k4"),
)
"""Models by name, the folder of tests/data that has their config.json, the experts' format."""


def cards() -> str:
    """What `ktft plan` says of large models on one small GPU, by published rates alone."""
    recipe = Recipe(per_device_train_batch_size=1, gradient_accumulation_steps=8, cutoff_len=2048, bf16=True)
    rows = []
    for title, folder, experts in CARD_MODELS:
        source = read_source(DOCS.parent / "tests/data" / folder, recipe.settings)
        planner = Planner(source, Description(ram="4T", gpu="24G").machine(), recipe)
        for card in ("16G", "24G", "48G"):
            machines = (Description(ram="4T", gpu=card, pcie=pcie).machine() for pcie in ("4", "5"))
            own, _ = plans = [planner.format_plan(experts, machine) for machine in machines]
            speeds = (f"{each.tokens_per_second:,.0f}" if each.fits else "does not fit" for each in plans)
            sizes = (readable(size) for size in (own.footprint.vram_bytes, own.footprint.ram_bytes))
            waiting = "host memory" if own.work.away else "the GPU"
            rows.append((title, card, experts, own.work.dense, waiting, own.work.together, *sizes, *speeds))
    heads = "Model", "GPU", "Experts", "Weights around them", "Waiting activations", "Together", "GPU memory", "Memory"
    return table((*heads, "tokens/s, PCIe 4", "PCIe 5"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "families": families,
    "formats": formats,
    "limits": limits,
    "tiles": tiles,
    "versions": versions,
    "cards": cards,
    "commands": commands,
    "imports": imports,
    "patches": patches,
    "kt_keys": kt_keys,
}


def made(name: str) -> str:
    """What stands between the two comments of a part."""
    kind, _, argument = name.partition(" ")
    return benchmark(argument) if kind == "benchmark" else TABLES[name]()


def filled(page: str) -> str:
    """A page's text with all its parts made anew."""
    return PART.sub(lambda part: f"{part[1]}\n{made(part[2])}\n\n{part[3]}", page)


if __name__ == "__main__":
    for path in sorted(DOCS.rglob("*.md")):
        before = path.read_text()
        if (after := filled(before)) != before:
            path.write_text(after)
            print(f"{path.relative_to(DOCS.parent)}: written anew")

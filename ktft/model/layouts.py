"""Where checkpoints hold a model's routed experts, derived from the conversions by which transformers loads them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ktft.checkpoint.layouts import Layout
from ktft.config import PROJECTIONS
from ktft.model.experts import layer_number

KINDS = ("gate_up_proj", "down_proj")
MERGES = (["MergeModulelist"], ["MergeModulelist", "Concatenate"])
"""The operations by which transformers stacks experts that a checkpoint holds one by one."""
ALIGNMENT = "Force16BytesAlignment"
"""One more of them in transformers 5.3, which changes no value."""
PREFIXES = ("", "model.", "language_model.", "model.language_model.", "language_model.model.", "thinker.model.")
"""What checkpoints have before the list of layers, among other things."""


def layouts_of(model: PreTrainedModel, name: str, transposed: bool) -> tuple[Layout, ...]:
    """The layouts on disk of the experts in module `name`, whose stacked matrices are `[in, out]` if `transposed`.

    Raises:
        ValueError: transformers reads these experts in a way that ktft cannot tell.
    """
    model_type = model.config.model_type
    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    separate = _separate(model_type, name, conversions)
    stems = separate or [f"{name}.{kind}" for kind in KINDS]
    readable = [list(_on_disk(stem, ".weight" if separate else "", renamings)) for stem in stems]
    layer, layouts = f".{layer_number(name)}.", []
    for together in zip(*readable, strict=False):
        parts = zip(*(each.split(".") for each in together), strict=False)
        start = ".".join(same[0] for same in itertools.takewhile(lambda same: len({*same}) == 1, parts))
        if layer not in f"{start}." or bool(separate) != (start.count("*") == 1):
            continue
        names = [each.removeprefix(f"{start}.") for each in together]
        gate, up, down = names if separate else (names[0], *names)
        stem = f"{start}.".replace(layer, ".{layer}.", 1).replace(".*.", ".{expert}.", 1)
        layouts.append(Layout(f"{stem}{{projection}}", (gate, up, down), transposed=transposed and not separate))
    if not layouts:
        raise ValueError(
            f"cannot tell where checkpoints of model_type {model_type!r} hold {name}, as transformers reads no name "
            "that it would save; add a row to ktft's families (docs/dev/add-a-model.md)"
        )
    return tuple(dict.fromkeys(layouts))


def _separate(model_type: str, name: str, conversions: list[Any]) -> list[str]:
    """The names in the model of gate, up and down that transformers stacks, * for the expert; none if it does not."""
    found: dict[str, list[str]] = {}
    for conversion in conversions:
        for kind in KINDS:
            stem = f"{name}.{kind}"
            if not isinstance(conversion, WeightConverter) or not stem.endswith(conversion.target_patterns[0]):
                continue
            operations = [type(operation).__name__ for operation in conversion.operations]
            if [each for each in operations if each != ALIGNMENT] not in MERGES:
                raise ValueError(
                    f"the experts of model_type {model_type!r} are converted on loading by {', '.join(operations)}; "
                    "add a row with their layout to ktft's families (docs/dev/add-a-model.md)"
                )
            start = stem.removesuffix(conversion.target_patterns[0])
            # transformers 5.3 and 5.4 keep the patterns of a conversion as they were given, regular expressions or not
            sources = getattr(conversion, "_original_source_patterns", conversion.source_patterns)
            found[kind] = [start + source.replace("\\.", ".").removesuffix(".weight") for source in sources]
    stems = [stem for kind in KINDS for stem in found.get(kind, [])]
    if stems and len(stems) != len(PROJECTIONS):
        raise ValueError(
            f"transformers makes the experts of model_type {model_type!r} from {', '.join(stems)}, and ktft reads "
            "gate, up and down; add a row to ktft's families (docs/dev/add-a-model.md)"
        )
    return stems


def _on_disk(stem: str, suffix: str, renamings: list[WeightRenaming]) -> Iterator[str]:
    """The names that transformers reads as `stem`: what it would save it as, itself, and both after other prefixes."""
    saved = stem
    for renaming in reversed(renamings):
        saved, _ = renaming.reverse_transform().rename_source_key(saved)
    names = {saved: None, stem: None}
    for each in (saved, stem):
        _, found, rest = each.partition("layers.")
        names |= {f"{prefix}layers.{rest}": None for prefix in PREFIXES if found}
    for name in names:
        if rename_source_key(f"{name}{suffix}", renamings, [])[0] == f"{stem}{suffix}":
            yield name

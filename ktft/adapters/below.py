"""Adapters beneath another one, which was trained on top of them; its file describes them, and a base may hold them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peft.utils.constants import SAFETENSORS_WEIGHTS_NAME

from ktft.checkpoint.identity import identify_shard

BELOW = "base_adapters"
"""Metadata key in an adapter file: the `describe` results of the adapters below, in the order of their training."""
REPORT = "merge_report.json"
"""File beside a merged model. Its `adapters` lists the merged adapters in order, with the identity of their files."""

Below = Sequence[Mapping[str, Any]]


def describe(path: str, directory: Path) -> dict[str, Any]:
    """The record of an adapter below: its absolute path, and the identity of its tensors."""
    return {
        "path": os.path.abspath(path) if os.path.isdir(path) else path,
        **identify_shard(directory / SAFETENSORS_WEIGHTS_NAME),
    }


def paths_of(below: Below) -> str:
    """The paths in a list of `describe` results, separated by commas, for messages."""
    return ", ".join(str(each["path"]) for each in below)


def stands_on(below: Below) -> str:
    """The sentence that tells a user how to load an adapter that was trained on top of others."""
    chain = ",".join(str(each["path"]) for each in below)
    return (
        f"trained on top of {paths_of(below)}: it belongs there, and alone its effect is another; in LLaMA-Factory "
        f"give adapter_name_or_path: {chain},THIS_DIRECTORY, elsewhere use ktft.adapters.several.stand_on"
    )


def merged_into(base: Path) -> list[dict[str, Any]]:
    """The adapters that `ktft merge` put into a checkpoint, in order. Raises ValueError if its report is damaged."""
    file = base / REPORT
    if not file.is_file():
        return []
    try:
        return [dict(adapter) for adapter in json.loads(file.read_bytes())["adapters"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"{file} is not what ktft merge writes; restore it, or merge again") from None


def holds(base: Path, below: Below) -> bool:
    """Whether the adapters in `below` are the last ones that were merged into the checkpoint."""
    wanted = [{key: value for key, value in each.items() if key != "path"} for each in below]
    merged = [adapter.get(SAFETENSORS_WEIGHTS_NAME) for adapter in merged_into(base)]
    return merged[max(0, len(merged) - len(wanted)) :] == wanted


def require_merged(adapter: Path, below: Below, base: Path, command: str) -> None:
    """Raise ValueError, with the commands to run, if a base model lacks the adapters that one was trained on top of.

    `command` is the one to run once the others are merged; its {base} stands for the merged model's directory.
    """
    if holds(base, below):
        return
    report = base / REPORT
    merged = report.is_file()
    steps, at = [], "BASE" if merged else str(base)
    for number, each in enumerate(below, 1):
        steps.append(f"ktft merge {at} {each['path']} OUT{number}")
        at = f"OUT{number}"
    raise ValueError(
        f"{adapter} was trained on top of {paths_of(below)}, and {base} does not hold "
        f"{'these: ' + str(report) + ' tells of others' if merged else 'them: it has no ' + REPORT}. "
        f"Merge them first: {', '.join(steps)}; then {command.format(base=at)}"
    )

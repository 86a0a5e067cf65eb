"""Adapters beneath another adapter, which was trained on top of them.

The upper adapter's file describes the ones below it, and a base model may already hold them merged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peft.utils.constants import SAFETENSORS_WEIGHTS_NAME

from ktft.checkpoint.identity import identify_shard

BELOW = "base_adapters"
"""Metadata key in an adapter file. Its value is a list of `describe` results, one per adapter below, in the order in
which they were trained.
"""
REPORT = "merge_report.json"
"""File that stands beside a merged model. Its `adapters` lists the merged adapters in order, with the identity of each
of their files.
"""

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
    """The adapters that `ktft merge` put into a checkpoint, in order; empty if `ktft merge` did not write it.

    Raises:
        ValueError: the report is damaged.
    """
    file = base / REPORT
    if not file.is_file():
        return []
    try:
        adapters = json.loads(file.read_bytes())["adapters"]
        return [dict(adapter) for adapter in adapters]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ValueError(f"{file} is not what ktft merge writes; restore it, or merge again") from None


def holds(base: Path, below: Below) -> bool:
    """Whether the adapters in `below` are the last ones that were merged into the checkpoint."""
    wanted = [{key: value for key, value in each.items() if key != "path"} for each in below]
    merged = [adapter.get(SAFETENSORS_WEIGHTS_NAME) for adapter in merged_into(base)]
    return merged[max(0, len(merged) - len(wanted)) :] == wanted


def require_merged(adapter: Path, below: Below, base: Path, command: str) -> None:
    """Refuse an adapter if its base model lacks the adapters that it was trained on top of.

    Args:
        command: the command to run once the others are merged; its {base} is replaced by the merged model's directory.

    Raises:
        ValueError: `base` does not hold `below`; the message lists the commands to run.
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

"""Adapters that another one was trained on top of: what its file says of them, and whether a base model holds them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peft.utils.constants import SAFETENSORS_WEIGHTS_NAME

from ktft.checkpoint.identity import identify_shard

BELOW = "base_adapters"
"""Key of what ktft writes into an adapter file's metadata: `describe` of each adapter below, in order of training."""
REPORT = "merge_report.json"
"""Beside a merged model. `adapters` are those that went in, in order; of each file what tells it from others."""

Below = Sequence[Mapping[str, Any]]


def describe(path: str, directory: Path) -> dict[str, Any]:
    """What an adapter's file says of one below it: its path, absolute, and what tells its tensors from others."""
    return {
        "path": os.path.abspath(path) if os.path.isdir(path) else path,
        **identify_shard(directory / SAFETENSORS_WEIGHTS_NAME),
    }


def paths_of(below: Below) -> str:
    """Of a list of `describe`, as a person writes them."""
    return ", ".join(str(each["path"]) for each in below)


def stands_on(below: Below) -> str:
    """What to tell of an adapter that was trained on top of others."""
    chain = ",".join(str(each["path"]) for each in below)
    return (
        f"trained on top of {paths_of(below)}: it belongs there, and alone its effect is another; in LLaMA-Factory "
        f"give adapter_name_or_path: {chain},THIS_DIRECTORY, elsewhere use ktft.adapters.several.stand_on"
    )


def merged_into(base: Path) -> list[dict[str, Any]]:
    """The adapters that `ktft merge` put into a checkpoint, in order. None went into one that it did not write.

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
    """Whether the last adapters that were merged into a checkpoint are these."""
    wanted = [{key: value for key, value in each.items() if key != "path"} for each in below]
    merged = [adapter.get(SAFETENSORS_WEIGHTS_NAME) for adapter in merged_into(base)]
    return merged[max(0, len(merged) - len(wanted)) :] == wanted


def require_merged(adapter: Path, below: Below, base: Path, command: str) -> None:
    """Refuse an adapter whose base model lacks what the adapter was trained on top of.

    Args:
        command: what to run when the others are merged, with {base} in braces for the result.

    Raises:
        ValueError: `base` does not hold `below`; the message has the commands.
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

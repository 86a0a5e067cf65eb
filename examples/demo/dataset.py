"""Stage 4: instruction data in LLaMA-Factory's alpaca format, from real functions and their real docstrings."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import corpus

INSTRUCTION = "Write the docstring of this Python function."
MAX_CODE, MIN_DOCSTRING, MAX_DOCSTRING = 320, 16, 200  # characters
DATASETS = {"train": "docstrings", "heldout": "docstrings_heldout"}  # the names that the YAML uses


def first_paragraph(docstring: str) -> str:
    """The summary of a docstring, on one line."""
    return " ".join(docstring.split("\n\n", 1)[0].split())


def records(source: str) -> Iterator[dict[str, str]]:
    """One alpaca record per documented function of a source: its code without the docstring, and the summary."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old sources
        try:
            tree = ast.parse(source)
        except SyntaxError:  # a few sources are templates
            return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = first_paragraph(ast.get_docstring(node) or "")
        if not MIN_DOCSTRING <= len(docstring) <= MAX_DOCSTRING or len(node.body) < 2:
            continue
        node.body = node.body[1:]
        code = ast.unparse(node)
        if len(code) > MAX_CODE:
            code = code[:MAX_CODE].rpartition("\n")[0] or code[:MAX_CODE]  # cut at a line
        yield {"instruction": INSTRUCTION, "input": code, "output": docstring}


def build(corpus_folder: Path, out: Path, max_train: int, max_heldout: int) -> dict[str, Any]:
    """Writes both splits and `dataset_info.json`; a function's summary occurs once, and in one split only."""
    seen: set[str] = set()
    figures: dict[str, Any] = {}
    for split, limit in (("heldout", max_heldout), ("train", max_train)):
        rows = []
        for file in corpus.read(corpus_folder, split):
            for record in records(file["text"]):
                if record["output"] not in seen:
                    seen.add(record["output"])
                    rows.append(record)
        if not rows:
            raise RuntimeError(f"No documented function in the {split} split of {corpus_folder}.")
        kept = min(limit, len(rows))
        rows = [rows[index * len(rows) // kept] for index in range(kept)]  # from all files, not from the first ones
        (out / f"{DATASETS[split]}.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
        figures[f"{split}_records"] = len(rows)
    info = {name: {"file_name": f"{name}.json"} for name in DATASETS.values()}  # alpaca's columns are the default
    (out / "dataset_info.json").write_text(json.dumps(info, indent=1), encoding="utf-8")
    return figures


def read(folder: Path, split: str) -> list[dict[str, str]]:
    """The records of one split, as `build` wrote them."""
    return json.loads((folder / f"{DATASETS[split]}.json").read_text(encoding="utf-8"))

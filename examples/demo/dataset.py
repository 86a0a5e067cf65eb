"""Stage 1: instruction data in LLaMA-Factory's alpaca format: real functions, and a sentence on what each does.

The sentence follows from the function's syntax tree, so whether an answer is right is not a matter of taste.
"""

from __future__ import annotations

import ast
import json
import random
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import corpus

INSTRUCTION = "Describe this Python function in one sentence."
MIN_CODE, MAX_CODE = 60, 280  # characters
DATASETS = {"train": "functions", "heldout": "functions_heldout"}  # the names that the YAML uses
MAX_ALIKE = {"train": 400, "heldout": 12}  # functions with the same sentence: a guess is seldom right
HELDOUT_EVERY = 16  # the functions of one file in sixteen are held out, from pretraining and from LoRA alike
# A function that contains one of these nodes does what the clause says.
CLAUSES: dict[str, tuple[type[ast.AST], ...]] = {
    "checks a condition": (ast.If, ast.IfExp),
    "loops": (ast.For, ast.AsyncFor, ast.While, ast.comprehension),
    "catches exceptions": (ast.Try,),
}
NESTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def raised(node: ast.Raise) -> str:
    """The name of the exception class that is raised; empty if the statement does not name one."""
    exception = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    name = exception.attr if isinstance(exception, ast.Attribute) else getattr(exception, "id", "")
    return name if name[:1].isupper() else ""


def describe(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """One sentence on a function without its docstring; empty where one sentence would not tell the truth."""
    arguments = function.args.posonlyargs + function.args.args
    method = bool(arguments) and arguments[0].arg in ("self", "cls")
    nodes = [node for statement in function.body for node in ast.walk(statement)]
    raises = {raised(node) for node in nodes if isinstance(node, ast.Raise)}
    if len(raises) > 1 or "" in raises or any(isinstance(node, NESTED) for node in nodes):
        return ""
    clauses = [clause for clause, kinds in CLAUSES.items() if any(isinstance(node, kinds) for node in nodes)]
    clauses += [f"raises {name}" for name in raises]
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in nodes):
        clauses.append("yields values")
    elif any(isinstance(node, ast.Return) and node.value is not None for node in nodes):
        clauses.append("returns a value")
    else:
        clauses.append("returns nothing")
    first, last = clauses[:-1], clauses[-1]
    return f"This {'method' if method else 'function'} {' and '.join(filter(None, (', '.join(first), last)))}."


def records(source: str) -> Iterator[dict[str, str]]:
    """One alpaca record per short function of a source: its code without decorators and docstring, and the sentence."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old sources
        try:
            tree = ast.parse(source)
        except SyntaxError:  # a few sources are templates
            return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        node.decorator_list = []
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        if node.body and (sentence := describe(node)) and MIN_CODE <= len(code := ast.unparse(node)) <= MAX_CODE:
            yield {"instruction": INSTRUCTION, "input": code, "output": sentence}


def build(out: Path, max_bytes: int, max_heldout: int) -> dict[str, Any]:
    """Writes both splits, from `max_bytes` of sources, and `dataset_info.json`; a function occurs once, in one split.

    Raises:
        RuntimeError: the standard library has too few sources, as where it is a zip file.
    """
    rows: dict[str, list[dict[str, str]]] = {split: [] for split in DATASETS}
    seen: set[str] = set()
    often: Counter[tuple[str, str]] = Counter()
    total = 0
    for index, (path, text) in enumerate(corpus.sources()):
        if total + len(text) > max_bytes:
            break
        total += len(text)
        split = "heldout" if index % HELDOUT_EVERY == 0 else "train"
        for record in records(text):
            often[split, record["output"]] += 1
            if record["input"] not in seen and often[split, record["output"]] <= MAX_ALIKE[split]:
                seen.add(record["input"])
                rows[split].append(record | {"path": path})
    if not all(rows.values()):
        raise RuntimeError(f"Found only {total} bytes of Python sources in {sysconfig.get_paths()['stdlib']}.")
    kept = min(max_heldout, len(rows["heldout"]))  # from all files, not from the first ones
    rows["heldout"] = [rows["heldout"][index * len(rows["heldout"]) // kept] for index in range(kept)]
    random.Random(0).shuffle(rows["train"])
    for split, name in DATASETS.items():
        (out / f"{name}.json").write_text(json.dumps(rows[split], indent=1), encoding="utf-8")
    info = {name: {"file_name": f"{name}.json"} for name in DATASETS.values()}  # alpaca's columns are the default
    (out / "dataset_info.json").write_text(json.dumps(info, indent=1), encoding="utf-8")
    return {"bytes": total, **{f"{split}_records": len(rows[split]) for split in DATASETS}}


def text_of(record: dict[str, str]) -> str:
    """What pretraining reads of a record: no instruction and no chat, a function with a comment behind."""
    return f"{record['input']}\n# {record['output']}"


def read(folder: Path, split: str) -> list[dict[str, str]]:
    """The records of one split, as `build` wrote them."""
    return json.loads((folder / f"{DATASETS[split]}.json").read_text(encoding="utf-8"))

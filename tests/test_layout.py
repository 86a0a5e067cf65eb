"""The layout of docs/architecture.md, kept by tests: file sizes, who may import whom, and what starts without torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ktft"
MAX_LINES = 450


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# A part may import from parts of a lower rank, and from itself.
PYTHON_RANKS = {
    "sizes": -1,
    "config": 0,
    "errors": 1,
    "deferral": 0,
    "lora": 1,
    "swiglu": 0,
    "versions": 0,
    "hosts": 1,
    "spans": 1,
    "system": 1,
    "native": 2,
    "reference": 2,
    "checkpoint": 3,
    "lanes": 4,
    "model": 5,
    "adapters": 6,
    "verify": 7,
    "train": 8,
    "_autoload": 9,
    "serve": 9,
    "plan": 10,
    "bench": 11,
    "cli": 12,
}
CPP_RANKS = {
    "base": 0,
    "cuda": 1,
    "isa": 1,
    "quant": 2,
    "numa": 3,
    "kernels": 3,
    "moe": 4,
    "hybrid": 5,
    "optim": 5,
    "bench": 5,
    "bind": 6,
}
# The files that may import a module which the rest must reach through them.
GATEWAYS = {
    "ktft._C": {"ktft/native/extension.py"},
    "llamafactory": {"ktft/train/llamafactory.py"},
    "vllm": {name_of(path) for path in (PACKAGE / "serve/vllm").rglob("*.py")},
}

PYTHON_FILES = sorted(PACKAGE.rglob("*.py"))
CPP_FILES = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".cc", ".h", ".inc"})
SOURCES = PYTHON_FILES + CPP_FILES + sorted((ROOT / "tests").rglob("*.py")) + sorted((ROOT / "examples").rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Every module the file imports, at any depth; `from a import b` counts as `a.b`, for b may be a module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import; write the module's full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(module: str) -> str | None:
    """`ktft.model.experts` -> `model`; None outside ktft and for ktft itself."""
    names = module.split(".")
    return names[1] if names[0] == "ktft" and len(names) > 1 and names[1] in PYTHON_RANKS else None


def test_files_are_short() -> None:
    lines = {name_of(path): len(path.read_text().splitlines()) for path in SOURCES}
    long = {name: count for name, count in lines.items() if count > MAX_LINES}
    assert not long, f"more than {MAX_LINES} lines: split by noun"


def test_python_imports_point_down() -> None:
    wrong = []
    for path in PYTHON_FILES:
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if own == "__init__":
            continue
        assert own in PYTHON_RANKS, f"{name_of(path)}: give the new part a rank in this test and a line in the docs"
        parts = {module: part_of(module) for module in imports(path)}
        above = [m for m, part in parts.items() if part not in (None, own) and PYTHON_RANKS[part] >= PYTHON_RANKS[own]]
        wrong += [f"{name_of(path)} imports {module}, which lies above or beside it" for module in above]
    assert not wrong


def test_cpp_includes_point_down() -> None:
    wrong = []
    for path in CPP_FILES:
        own = path.relative_to(ROOT / "csrc").parts[0]
        parts = re.findall(r'^#include "(\w+)/', path.read_text(), re.MULTILINE)
        above = [part for part in parts if part != own and CPP_RANKS[part] >= CPP_RANKS[own]]
        wrong += [f"{name_of(path)} includes {part}/, which lies above or beside it" for part in above]
    assert not wrong


@pytest.mark.parametrize("module", GATEWAYS)
def test_only_the_gateway_imports(module: str) -> None:
    users = {name_of(p) for p in PYTHON_FILES if any(f"{i}.".startswith(f"{module}.") for i in imports(p))}
    assert users <= GATEWAYS[module]


def test_autoload_needs_only_the_standard_library() -> None:
    """It runs inside `import torch`, in every process: an import that can fail there breaks torch itself."""
    tree = ast.parse((ROOT / "ktft_autoload/__init__.py").read_text())
    top = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [n.module or "" if isinstance(n, ast.ImportFrom) else alias.name for n in top for alias in n.names]
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names | {"__future__"}


@pytest.mark.parametrize(
    "statement", ["import ktft", "import ktft_autoload", "from ktft.cli.main import app; app(['--help'])"]
)
def test_starts_without_torch(statement: str) -> None:
    code = f"import sys, atexit\natexit.register(lambda: print('torch' in sys.modules))\n{statement}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "False"

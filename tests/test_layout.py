"""The layout of docs/dev/architecture.md, kept by tests: file sizes, who may import whom, what starts without torch."""

from __future__ import annotations

import ast
import fnmatch
import graphlib
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ktft"
MAX_LINES = 450
MAX_BODY = 60


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# A part may import from parts of a lower rank, and from itself.
PYTHON_RANKS = {
    "sizes": -1,
    "formats": -1,
    "sources": -1,
    "config": 0,
    "kt_keys": 1,
    "device": 1,
    "errors": 1,
    "deferral": 0,
    "held": 0,
    "late": 0,
    "lora": 1,
    "swiglu": 1,
    "versions": 0,
    "hosts": 1,
    "system": 1,
    "native": 2,
    "ranks": 2,
    "reference": 2,
    "spans": 2,
    "checkpoint": 3,
    "lanes": 4,
    "dense": 5,
    "model": 6,
    "adapters": 7,
    "verify": 8,
    "train": 9,
    "_autoload": 10,
    "serve": 10,
    "plan": 11,
    "cli": 13,
    "__main__": 14,
}
# The same within the rooms that have an order of their own. Each serving engine has a folder of rank 3, which nothing
# but the list of engines imports.
SUB_RANKS = {
    "lanes": {
        "terms": 0,
        "record": 1,
        "routes": 1,
        "kept": 2,
        "decide": 2,
        "ops": 2,
        "gpu": 3,
        "passes": 4,
        "lanes": 5,
        "steady_call": 6,
        "layer": 7,
    },
    "serve": {"runtime": 0, "engine": 1, "front": 2, "sglang": 3, "vllm": 3, "engines": 4},
}
ROOMS = {"ktft": PYTHON_RANKS} | {f"ktft.{room}": ranks for room, ranks in SUB_RANKS.items()}
CPP_RANKS = {
    "base": 0,
    "cuda": 1,
    "isa": 1,
    "quant": 2,
    "numa": 3,
    "kernels": 3,
    "runtime": 4,
    "dense": 5,
    "moe": 5,
    "optim": 5,
    "bench": 5,
    "attention": 6,
    "hybrid": 6,
    "decoder": 7,
    "bind": 8,
}
# The files that may import a module which the rest must reach through them.
GATEWAYS = {
    "ktft._C": {"ktft/native/extension.py"},
    "llamafactory": {"ktft/train/llamafactory.py"},
    "torch.distributed": {"ktft/ranks/group.py", "ktft/ranks/sharded.py"},
    "sglang": {name_of(path) for path in (PACKAGE / "serve/sglang").rglob("*.py")},
    "vllm": {name_of(path) for path in (PACKAGE / "serve/vllm").rglob("*.py")},
}
# The files that may name torch.cuda, or have "cuda" as a whole string, as a device's type is. Others ask ktft.device.
NAMING_CUDA = (
    "ktft/device.py",
    "ktft/model/memory.py",  # a row's name in the table of memory
)

PYTHON_FILES = sorted(PACKAGE.rglob("*.py"))
CPP_FILES = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".cc", ".h", ".inc"})
OTHERS = sorted(path for folder in ("tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
SOURCES = PYTHON_FILES + CPP_FILES + OTHERS


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Every module the file imports, at any depth; `from a import b` counts as `a.b`, for b may be a module."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: relative import; write the module's full name"
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


def part_of(module: str, package: str, ranks: dict[str, int]) -> str | None:
    """In `ktft`, `ktft.model.experts` -> `model`; None outside the package and for the package itself."""
    part = module.removeprefix(f"{package}.").partition(".")[0]
    return part if module.startswith(f"{package}.") and part in ranks else None


def test_files_are_short() -> None:
    lines = {name_of(path): len(path.read_text().splitlines()) for path in SOURCES}
    long = {name: count for name, count in lines.items() if count > MAX_LINES}
    assert not long, f"more than {MAX_LINES} lines: split by noun"


@pytest.mark.parametrize(("package", "ranks"), ROOMS.items())
def test_python_imports_point_down(package: str, ranks: dict[str, int]) -> None:
    folder, wrong = ROOT / package.replace(".", "/"), []
    for path in sorted(folder.rglob("*.py")):
        own = path.relative_to(folder).with_suffix("").parts[0]
        if own == "__init__":
            continue
        assert own in ranks, f"{name_of(path)}: give the new part a rank in this test and a line in the docs"
        parts = {module: part_of(module, package, ranks) for module in imports(path)}
        above = [m for m, part in parts.items() if part not in (None, own) and ranks[part] >= ranks[own]]
        wrong += [f"{name_of(path)} imports {module}, which lies above or beside it" for module in above]
    assert not wrong


def test_functions_are_short() -> None:
    """Lines of the body, without signature and docstring."""
    long = []
    for path in PYTHON_FILES + sorted((ROOT / "benchmarks").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[min(ast.get_docstring(node) is not None, len(node.body) - 1)]
                if (node.end_lineno or 0) - first.lineno >= MAX_BODY:
                    long.append(f"{name_of(path)}:{node.lineno}: {node.name}")
    assert not long, f"more than {MAX_BODY} lines: give its parts names of their own"


def test_no_import_goes_in_a_circle() -> None:
    modules = {name_of(path).removesuffix(".py").replace("/", "."): path for path in PYTHON_FILES}
    graph = {}
    for module, path in modules.items():
        names = {name for each in imports(path) for name in (each, each.rpartition(".")[0])}
        graph[module] = names & modules.keys() - {module}
    graphlib.TopologicalSorter(graph).prepare()  # raises, with the circle


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


def test_every_script_is_in_the_index() -> None:
    """`tests/scripts/README.md`, one row each."""
    scripts = ROOT / "tests" / "scripts"
    listed = re.findall(r"^\| `(\w+\.py)`", (scripts / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in scripts.glob("*.py"))


def names_cuda(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and re.fullmatch(r"cuda(:\d*)?", node.value) is not None
    if isinstance(node, ast.Attribute):
        return node.attr in ("is_cuda", "cuda_stream") or ast.unparse(node) == "torch.cuda"
    return False


def test_only_the_device_seam_names_cuda() -> None:
    found = []
    for path in PYTHON_FILES:
        if any(fnmatch.fnmatch(name_of(path), allowed) for allowed in NAMING_CUDA):
            continue
        nodes = ast.walk(ast.parse(path.read_text()))
        found += [f"{name_of(path)}:{node.lineno}" for node in nodes if names_cuda(node)]
        found += [f"{name_of(path)} imports {each}" for each in imports(path) if f"{each}.".startswith("torch.cuda.")]
    assert not found, "ask ktft.device: device_of(device), accelerator() or ACCELERATORS"


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


def test_public_classes_have_names_of_their_own() -> None:
    homes: dict[str, list[str]] = {}
    for path in PYTHON_FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name_of(path))
    twice = {name: files for name, files in homes.items() if len(files) > 1}
    assert not twice, "one name, one meaning"

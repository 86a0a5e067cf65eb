"""Load adapters that ktft trained with transformers 4.57 and PEFT 0.18, in an environment of their own.

    python tests/scripts/second_environment.py [--environment DIR] [--steps 8]

Trains LoRA on tiny Qwen3-MoE, DeepSeek-V2 and DeepSeek-V3 models and saves it. Another process with that transformers
and without ktft loads the directory with PeftModel.from_pretrained. Its logits are compared with those of ktft's
kernels, which take bf16 activations, and with those of ktft's fp32 reference on the same model, which show how exactly
the adapter was loaded. Exits with 1 if either differs by more than 1e-3, or if PEFT warns of missing tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGES = ("transformers==4.57.6", "huggingface_hub==0.36.2", "tokenizers==0.22.2", "peft==0.18.1")
"""Installed without their dependencies; torch and the rest come from this environment."""
FAMILIES: dict[str, dict[str, Any]] = {"qwen3moe": {}, "dsv2": {}, "dsv3": {"topk_group": 4}}
"""Every token goes to every expert, so all adapters matter and rounding cannot change the choice of experts."""
LIMIT = 1e-3

OTHER = """
import json, sys, warnings
import torch, transformers, peft
from safetensors.torch import save_file
base, adapter, out = sys.argv[1:]
assert transformers.__version__.startswith("4.57."), transformers.__version__
ids = torch.arange(3, 43).reshape(2, 20)
model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
with torch.no_grad():
    plain = model(input_ids=ids).logits
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    adapted = peft.PeftModel.from_pretrained(model, adapter).eval()
missing = [str(w.message) for w in caught if "missing" in str(w.message)]
assert not missing, missing
with torch.no_grad():
    save_file({"plain": plain, "adapted": adapted(input_ids=ids).logits}, out)
assert "ktft" not in sys.modules
print(json.dumps({"transformers": transformers.__version__, "peft": peft.__version__}))
"""


def make_environment(directory: Path) -> None:
    """Install `PACKAGES` into a directory. Raises SubprocessError if pip cannot."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--retries", "1", "--timeout", "15"]
    command = [*pip, "--no-deps", "--target", str(directory), *PACKAGES]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=180)


@contextmanager
def reference_experts() -> Iterator[None]:
    """Compute ktft's experts with `ktft.reference`, in fp32 from the packed weights."""
    import torch

    from ktft import reference
    from ktft.config import PROJECTIONS
    from ktft.model import experts

    def compute(layer: Any, hidden: Any, index: Any, weights: Any, lora: Any, *_: Any) -> Any:
        every = range(layer.num_experts)
        matrices = [torch.stack([layer.dequantize(e, name) for e in every]) for name in PROJECTIONS]
        biases = None
        if layer.biases:
            biases = {name: torch.stack([layer.bias(e, name) for e in every]) for name in PROJECTIONS}
        return reference.moe(hidden, index, weights, *matrices, lora=lora, swiglu=layer.swiglu, biases=biases)

    kernels = experts.routed_experts
    experts.routed_experts = compute  # type: ignore[assignment]
    try:
        yield
    finally:
        experts.routed_experts = kernels


def train(family: str, folder: Path, steps: int) -> tuple[Any, Any]:
    """Train LoRA on all layers and save it in `folder/adapter`. Returns the logits of kernels and of the reference."""
    import torch
    from peft import LoraConfig
    from tiny import write_checkpoint
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    import ktft

    settings = {"initializer_range": 0.02, "num_experts_per_tok": 8} | FAMILIES[family]
    base = write_checkpoint(family, folder / "base", **settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=ktft.KtftConfig(expert_format="bf16", threads=1), dtype=torch.float32
    )
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = ktft.get_peft_model(model, lora)
    args = TrainingArguments(
        str(folder / "adapter"),
        use_cpu=True,
        max_steps=steps,
        learning_rate=5e-3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    data = [{"input_ids": ids, "labels": ids} for ids in torch.arange(3, 131).reshape(8, 16)]
    trainer = Trainer(model, args, train_dataset=data)
    trainer.train()
    trainer.save_model()
    ids = torch.arange(3, 43).reshape(2, 20)
    model.eval()
    with torch.no_grad():
        kernels = model(input_ids=ids).logits
        with reference_experts():
            reference = model(input_ids=ids).logits
    config = json.loads((base / "config.json").read_text())
    if "num_local_experts" in config:  # transformers 5's word for what released checkpoints call num_experts
        (base / "config.json").write_text(json.dumps(config | {"num_experts": config["num_local_experts"]}))
    return kernels, reference


def compare(family: str, environment: Path, folder: Path, steps: int = 8) -> dict[str, float]:
    """Train, save, load in the other environment and compare.

    Returns:
        The largest difference of the other environment's logits from those of ktft's kernels (`kernels`) and of its
        fp32 reference (`reference`), and how much the adapter changed them (`effect`).
    """
    from safetensors.torch import load_file

    kernels, reference = train(family, folder, steps)
    out = folder / "logits.safetensors"
    env = os.environ | {"PYTHONPATH": str(environment), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", OTHER, str(folder / "base"), str(folder / "adapter"), str(out)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"the other environment failed:\n{done.stdout}{done.stderr}")
    found = load_file(out)
    adapted = found["adapted"]
    others = {"kernels": kernels, "reference": reference, "effect": found["plain"]}
    return {name: float((adapted - other).abs().max()) for name, other in others.items()}


def main() -> None:
    """Compare all families; exit with 1 if one differs too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--environment", type=Path, help="Where the packages are or will be installed. [a temporary folder]"
    )
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1]))
    scratch = Path(tempfile.mkdtemp())
    try:
        environment = args.environment or scratch / "environment"
        if not environment.is_dir():
            make_environment(environment)
        off = False
        for family in FAMILIES:
            figures = compare(family, environment, scratch / family, args.steps)
            off |= max(figures["kernels"], figures["reference"]) > LIMIT
            print(
                f"{family:9} off ktft's kernels {figures['kernels']:.1e}, off its fp32 reference "
                f"{figures['reference']:.1e}; the adapter changed logits by {figures['effect']:.2f}"
            )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    sys.exit(int(off))


if __name__ == "__main__":
    main()

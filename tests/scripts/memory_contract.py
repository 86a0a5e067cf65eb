"""Check the memory contract on a random checkpoint of over 2 GB: `python tests/scripts/memory_contract.py`.

For each expert format a fresh process loads the checkpoint with `from_pretrained`, trains two steps of LoRA on every
linear layer and every routed expert through transformers' Trainer, and compares its peak RSS (VmHWM, file-mapped
pages included) with what it has to hold. Exits 1 if the peak exceeds that.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from measuring import in_a_process, make_model, memory

SLACK = 1.15


def measure(path: Path, expert_format: str) -> tuple[bool, str]:
    """Load and train two steps. Returns whether the peak is within the contract, and a line that says so."""
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    import ktft
    from ktft.model.experts import find_experts

    imports = memory("VmRSS")
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, quantization_config=ktft.KtftConfig(expert_format=expert_format)
    )
    loaded = memory("VmHWM")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = ktft.get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    rows = [{"input_ids": list(range(64)), "labels": list(range(64))}] * 2
    settings = {"max_steps": 2, "per_device_train_batch_size": 1, "use_cpu": True, "save_strategy": "no"}
    arguments = TrainingArguments(str(path / "out"), report_to="none", **settings)
    Trainer(model, arguments, train_dataset=rows).train()

    layers = [experts.layer for experts in find_experts(model).values()]
    packed, workspace = sum(layer.packed_bytes for layer in layers), layers[0].runtime.workspace_bytes
    lora = sum(4 * p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)  # grad, two moments
    other = sum(p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad)
    peak, needed = memory("VmHWM"), packed + lora + workspace + other
    allowed = imports + SLACK * needed
    parts = {"imports": imports, "packed experts": packed, "LoRA state": lora, "workspace": workspace}
    parts |= {"other weights": other}
    parts |= {"peak after loading": loaded, "peak": peak, "allowed": int(allowed)}
    figures = ", ".join(f"{name} {value / 2**20:.0f} MiB" for name, value in parts.items())
    return peak <= allowed, f"{expert_format}: {(peak - imports) / needed:.3f}x of what it holds; {figures}"


def main() -> int:
    kept = True
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        in_a_process(make_model, path, 64, 8, 11)
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        print(f"checkpoint: {size / 2**30:.2f} GiB")
        for expert_format in ("int8", "bf16"):
            within, line = in_a_process(measure, path, expert_format)
            print("ok  " if within else "OVER", line)
            kept = kept and within
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())

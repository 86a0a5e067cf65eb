"""Resume training on a GPU in a new process and compare all bits: `python tests/scripts/cuda_resume.py [PLACEMENT]`.

A tiny model trains eight steps with attention on CUDA, in torch's deterministic mode, with LoRA dropout on attention
and experts and two batches a step; then a new process resumes from step 3. Losses, adapter, optimizer, scheduler and
random states must be the same bytes, for each placement that does not depend on timings. Exits 1 if they differ.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
STATE = ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")
STEPS = 8
PLACEMENTS = "cpu", "stream"


def train(base: str, output: str, resume: str, placement: str) -> None:
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, TrainingArguments

    import ktft

    config = ktft.KtftConfig(expert_format="int8", placement=placement)
    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=config, dtype=torch.bfloat16, device_map={"": 0}
    )
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
    args = TrainingArguments(
        output_dir=output,
        max_steps=STEPS,
        save_steps=3,
        logging_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        bf16=True,
        full_determinism=True,
        report_to="none",
        disable_tqdm=True,
    )
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 300, (24, 32))]
    trainer = ktft.Trainer(ktft.get_peft_model(model, lora), args, train_dataset=data)
    trainer.train(resume_from_checkpoint=resume or None)
    devices = {p.device.type for p in trainer.optimizer.state}
    assert devices == {"cpu", "cuda"}, devices


def losses(output: Path) -> list[tuple[float, ...]]:
    """Step, loss and gradient norm of each logged step."""
    history = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["log_history"]
    return [(e["step"], e["loss"], e["grad_norm"]) for e in history if "loss" in e]


def main() -> int:
    if len(sys.argv) > 2:
        train(*sys.argv[1:5])
        return 0
    return max(map(resumed, sys.argv[1:] or PLACEMENTS))


def resumed(placement: str) -> bool:
    """Whether a resumed run differs from an uninterrupted one."""
    from tiny import write_checkpoint

    with tempfile.TemporaryDirectory() as name:
        base = write_checkpoint("dsv3", Path(name, "model"), n_routed_experts=32, num_experts_per_tok=4)
        whole, rest = Path(name, "whole"), Path(name, "rest")
        for output, resume in ((whole, ""), (rest, str(rest / "checkpoint-3"))):
            if resume:
                shutil.copytree(whole / "checkpoint-3", resume)
            subprocess.run([sys.executable, __file__, str(base), str(output), resume, placement], check=True)
        different = [
            name
            for name in STATE
            if (whole / f"checkpoint-{STEPS}" / name).read_bytes() != (rest / f"checkpoint-{STEPS}" / name).read_bytes()
        ]
        different += ["losses"] * (losses(whole) != losses(rest))
    print(f"{placement}: {', '.join(different)} differ" if different else f"{placement}: the same losses and bytes")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())

"""TRL's trainers on the newest stack: each trains LoRA on experts, saves it, loads it and resumes with equal bits."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from adapted import lora_config
from given import Checkpoint
from runs import losses
from safetensors.torch import load_file
from tiny import tokenizer

import ktft
from ktft.versions import NEWEST, stack

if stack() is not NEWEST:
    pytest.skip("TRL 1 belongs to the newest stack", allow_module_level=True)

import trl
from datasets import Dataset

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = [f"{n} and {n} make" for n in range(12)]
RIGHT, WRONG = ([f" {factor * n}." for n in range(12)] for factor in (2, 3))
PAIRS = {"prompt": PROMPTS, "chosen": RIGHT, "rejected": WRONG}
LABELED = {"prompt": PROMPTS, "completion": RIGHT[:6] + WRONG[6:], "label": [n < 6 for n in range(12)]}
WAYS: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "sft": (trl.SFTTrainer, trl.SFTConfig, {"prompt": PROMPTS, "completion": RIGHT}, "CAUSAL_LM"),
    "dpo": (trl.DPOTrainer, trl.DPOConfig, PAIRS, "CAUSAL_LM"),
    "kto": (trl.KTOTrainer, trl.KTOConfig, LABELED, "CAUSAL_LM"),
    "reward": (trl.RewardTrainer, trl.RewardConfig, {"chosen": RIGHT, "rejected": WRONG}, "SEQ_CLS"),
}
"""Trainer, its configuration, a small data set and PEFT's task."""


def base(path: Path, task: str, **settings: Any) -> Any:
    options: dict[str, Any] = {"quantization_config": ktft.KtftConfig(expert_format="bf16", threads=1, **settings)}
    options |= {"dtype": torch.float32, "pad_token_id": 0}
    if task == "SEQ_CLS":
        torch.manual_seed(1)  # the new head
        return transformers.AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, **options)
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options)


def trainer(
    way: str, path: Path, output: Path, micro_batches: int = 1, together: Any = "auto", **overrides: Any
) -> Any:
    cls, config, data, task = WAYS[way]
    settings = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, "save_total_limit": 2}
    options = {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": way == "sft"}
    args = config(str(output), per_device_train_batch_size=2, max_length=32, disable_tqdm=True, **settings, **options)
    options["gradient_accumulation_steps"] = micro_batches
    torch.manual_seed(0)
    return cls(
        model=base(path, task, micro_batches_together=together), args=args, train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer(), peft_config=lora_config(task_type=task, **overrides),
    )  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_it_trains_saves_loads_and_resumes(way: str, tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tiny_checkpoint("qwen3moe")
    whole = trainer(way, path, tmp_path / "whole")
    whole.train()
    assert len(losses(whole)) == 4 and losses(whole)[-1] != losses(whole)[0]
    saved = load_file(tmp_path / "whole" / "checkpoint-4" / "adapter_model.safetensors")
    experts = [tensor for name, tensor in saved.items() if ".mlp.experts." in name and "lora_B" in name]
    assert len(experts) == 3 * 8 * 3 and all(tensor.any() for tensor in experts[:: 3 * 8])

    resumed = trainer(way, path, tmp_path / "whole")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert losses(resumed) == losses(whole)
    again = load_file(tmp_path / "whole" / "checkpoint-4" / "adapter_model.safetensors")
    assert all(torch.equal(saved[name], again[name]) for name in saved)

    loaded = peft.PeftModel.from_pretrained(base(path, WAYS[way][3]), tmp_path / "whole" / "checkpoint-4")
    ids = torch.arange(3, 19).reshape(1, 16)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, whole.model.eval()(ids).logits)


@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_together_train_like_one_after_the_other(
    way: str, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    path, ends = tiny_checkpoint("qwen3moe"), []
    for together in (1, "auto"):
        run = trainer(way, path, tmp_path / str(together), 3, together)
        run.train()
        ends.append((losses(run), load_file(tmp_path / str(together) / "checkpoint-4" / "adapter_model.safetensors")))
    (alone, adapter), (same, other) = ends
    assert same == pytest.approx(alone, rel=1e-3)
    assert all(torch.allclose(other[name], adapter[name], rtol=0.02, atol=2e-3) for name in adapter)


def test_a_packed_output_layer_is_refused(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """TRL would multiply by its bytes."""
    model = base(tiny_checkpoint("qwen3moe"), "CAUSAL_LM", dense_format="k4")
    config = trl.SFTConfig(str(tmp_path), report_to="none", use_cpu=True, bf16=False)
    data = Dataset.from_dict({"prompt": PROMPTS, "completion": RIGHT})
    with pytest.raises(ValueError, match="which dense_format 'k4' packs; set dense_format to fp8 or bf16"):
        trl.SFTTrainer(model, config, train_dataset=data, processing_class=tokenizer(), peft_config=lora_config())


def test_dora_on_attention_and_a_head_that_is_trained_whole(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """As PEFT has them, beside each other; on experts DoRA is refused by name."""
    path, options = tiny_checkpoint("qwen3moe"), {"use_dora": True, "modules_to_save": ["lm_head"]}
    run = trainer("sft", path, tmp_path, target_modules=["q_proj", "v_proj"], **options)
    run.train()
    saved = load_file(tmp_path / "checkpoint-4" / "adapter_model.safetensors")
    assert {name.rpartition("lora_")[2] for name in saved} >= {"magnitude_vector"}
    loaded = peft.PeftModel.from_pretrained(base(path, "CAUSAL_LM"), tmp_path / "checkpoint-4")
    with torch.no_grad():
        ids = torch.arange(3, 19).reshape(1, 16)
        assert torch.equal(loaded.eval()(ids).logits, run.model.eval()(ids).logits)
    with pytest.raises(ValueError, match="DoRA on routed experts is not supported"):
        trainer("sft", path, tmp_path / "refused", target_modules="all-linear", use_dora=True)


def test_the_examples(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    records = [{"instruction": "Add.", "input": f"{n} + {n}", "output": f"The sum is {2 * n}."} for n in range(16)]
    (tmp_path / "functions.json").write_text(json.dumps(records))
    sft, dpo = tmp_path / "sft", tmp_path / "dpo"

    def run(script: str, *options: str) -> None:
        shared = ["--model", str(tiny_checkpoint("dsv3")), "--data", str(tmp_path), *options]
        monkeypatch.setattr(sys, "argv", [script, *shared])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
        assert not ended.value.code

    run("trl_sft.py", "--out", str(sft), "--steps", "2")
    run("trl_sft.py", "--out", str(sft), "--steps", "3", "--resume")
    assert (sft / "checkpoint-3").is_dir()
    run("trl_dpo.py", "--out", str(dpo), "--adapter", str(sft), "--steps", "2")
    assert f"the adapter is in {dpo}" in capfd.readouterr().out
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in (sft, dpo))
    assert any(not torch.equal(first[name], second[name]) for name in first if ".mlp.experts." in name)

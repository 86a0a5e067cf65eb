"""Whichever way PEFT reaches a model with ktft's experts, they are trained, saved and loaded, or it is refused."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from adapted import load, logits, lora_config, randomize
from datasets import Dataset
from given import Checkpoint, RunPython
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file
from stacks import shown_by_the_first_stack
from tiny import tokenizer
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

import ktft
from ktft.config import PROJECTIONS

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def expert_tensors(directory: Path) -> set[str]:
    """Projections of routed experts that a saved adapter holds under their standard names."""
    names = load_file(directory / "adapter_model.safetensors")
    return {name.split(".")[-3] for name in names if ".mlp.experts.3." in name}


def expert_parameters(model: torch.nn.Module) -> int:
    named = model.named_parameters()
    return sum(p.numel() for name, p in named if ".experts.lora_" in name and p.requires_grad)


@pytest.mark.parametrize(
    ("targets", "projections"),
    [
        ("all-linear", set(PROJECTIONS)),
        ([*ATTENTION, *PROJECTIONS], set(PROJECTIONS)),
        (["q_proj", "down_proj"], {"down_proj"}),
        (r".*\.(o_proj|up_proj)", {"up_proj"}),
        (["experts"], set(PROJECTIONS)),
        (["experts.down_proj", "q_proj"], {"down_proj"}),
        (r".*experts\.\d+\.(gate|up)_proj", {"gate_proj", "up_proj"}),
        ([r".*experts\.\d+\.(gate|up)_proj"], {"gate_proj", "up_proj"}),
        (r".*\.mlp\.experts", set(PROJECTIONS)),
        (ATTENTION, set()),
    ],
    ids=lambda value: "" if isinstance(value, set) else str(value),
)
def test_get_peft_model_of_peft_itself(base: Path, tmp_path: Path, targets: Any, projections: set[str]) -> None:
    """Targets as anybody writes them; saved by PEFT's method, loaded by each of PEFT's ways with the same logits."""
    model = peft.get_peft_model(load(base), lora_config(target_modules=targets))
    assert bool(expert_parameters(model)) == bool(projections)
    trained = logits(randomize(model))
    model.save_pretrained(tmp_path)
    assert expert_tensors(tmp_path) == projections
    # other software finds the same modules by the same rule
    config = peft.LoraConfig.from_pretrained(tmp_path)
    found = {p for p in PROJECTIONS if check_target_module_exists(config, f"model.layers.1.mlp.experts.3.{p}")}
    attention = bool(check_target_module_exists(config, "model.layers.1.self_attn.q_proj"))
    assert found == projections
    assert attention == any(".q_proj.lora_A" in name for name, _ in model.named_parameters())
    assert attention == (targets == "all-linear" or "q_proj" in targets)
    loaded = [
        peft.PeftModel.from_pretrained(load(base), tmp_path),
        peft.PeftModel.from_pretrained(
            load(base), str(tmp_path), config=peft.PeftConfig.from_pretrained(tmp_path), low_cpu_mem_usage=True
        ),
        peft.AutoPeftModelForCausalLM.from_pretrained(
            str(tmp_path),
            quantization_config=ktft.KtftConfig(expert_format="bf16", threads=1),
            dtype=torch.float32,
        ),
        ktft.load_adapter(load(base), tmp_path),
    ]
    for again in loaded:
        assert torch.equal(logits(again), trained)
        assert not any(parameter.requires_grad for parameter in again.parameters())
    further = peft.PeftModel.from_pretrained(load(base), tmp_path, is_trainable=True)
    assert expert_parameters(further) == expert_parameters(model)


def test_inject_adapter_in_model(tiny_checkpoint: Checkpoint) -> None:
    checkpoint = tiny_checkpoint("dsv3")
    model = randomize(peft.inject_adapter_in_model(lora_config(), load(checkpoint)))
    assert expert_parameters(model)
    trained, state = logits(model), peft.get_peft_model_state_dict(model)
    again = peft.inject_adapter_in_model(lora_config(), load(checkpoint))
    assert not peft.set_peft_model_state_dict(again, state).unexpected_keys
    assert torch.equal(logits(again), trained)


def test_a_configuration_keeps_the_modules_that_its_user_registered(base: Path) -> None:
    config = lora_config()
    config._register_custom_module({torch.nn.Bilinear: torch.nn.Identity})
    assert expert_parameters(peft.get_peft_model(load(base), config))
    assert config._custom_modules == {torch.nn.Bilinear: torch.nn.Identity}


def test_trls_peft_config_trains_and_saves_experts(base: Path, tmp_path: Path) -> None:
    args = SFTConfig(
        str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=2, learning_rate=1e-2, use_cpu=True, bf16=False,
        report_to="none", max_length=64, gradient_checkpointing=False,
    )  # fmt: skip
    texts = Dataset.from_dict({"text": [f"{i} and {i} are {2 * i}" for i in range(8)]})
    trainer = SFTTrainer(load(base), args, train_dataset=texts, processing_class=tokenizer(), peft_config=lora_config())
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in saved.items() if ".mlp.experts." in name and "lora_B" in name)
    again = peft.PeftModel.from_pretrained(load(base), tmp_path / "adapter")
    assert torch.equal(logits(again), logits(trainer.model))


@shown_by_the_first_stack
def test_a_program_that_names_ktft_only_to_load_the_model(base: Path, fork_python: RunPython) -> None:
    """No other import of ktft is needed for PEFT to reach experts."""
    program = f"""
        import ktft, peft
        from transformers import AutoModelForCausalLM
        config = ktft.KtftConfig(expert_format="bf16", threads=1)
        model = AutoModelForCausalLM.from_pretrained({str(base)!r}, quantization_config=config)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
        print("experts:", sum(".experts.lora_" in name for name, _ in model.named_parameters()))
    """
    done = fork_python(textwrap.dedent(program))
    assert "experts: 18" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (peft.LoKrConfig(target_modules="all-linear"), {}, "trains LoRA, not PEFT's LOKR"),
        (peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]), {}, "trains LoRA, not PEFT's IA3"),
        (peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), {}, "not PEFT's PROMPT_TUNING"),
        (lora_config(target_modules=None), {}, "name what LoRA shall train"),
        (lora_config(target_modules=["q_proj", "w1"]), {}, "'w1' matches nothing"),
        (lora_config(target_modules=["gate"]), {}, "would never train"),
        (lora_config(target_parameters=["mlp.experts.down_proj"]), {}, "name experts or their projections"),
        (lora_config(use_dora=True), {}, "DoRA on routed experts"),
        (lora_config(), {"mixed": True}, "not MixedModel"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_leave_experts_out_is_refused(
    base: Path, config: Any, options: dict[str, Any], message: str
) -> None:
    model = load(base)
    with pytest.raises(ValueError, match=message):
        peft.get_peft_model(model, config, **options)
    assert expert_parameters(peft.get_peft_model(model, lora_config()))  # the refusal left the model as it was


def test_other_doors_are_shut_with_the_way_to_the_open_one(base: Path, tmp_path: Path) -> None:
    model = load(base)
    with pytest.raises(ValueError, match=r"peft\.get_peft_model"):
        model.add_adapter(lora_config())
    with pytest.raises(ValueError, match=r"PeftModel\.from_pretrained"):
        model.load_adapter(str(tmp_path))
    adapted = peft.get_peft_model(model, lora_config())
    with pytest.raises(ValueError, match="has adapters already"):
        peft.get_peft_model(adapted, lora_config())
    adapted.save_pretrained(tmp_path)
    other = peft.PeftConfig.from_pretrained(tmp_path)
    other.lora_alpha = 99
    with pytest.raises(ValueError, match="lora_alpha=99"):
        peft.PeftModel.from_pretrained(load(base), tmp_path, config=other)


def test_stock_models_are_pefts_own(base: Path, tmp_path: Path) -> None:
    stock = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.get_peft_model(stock, lora_config(target_modules=["q_proj"]))
    assert type(model) is peft.PeftModelForCausalLM
    model.save_pretrained(tmp_path)
    fresh = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert type(peft.PeftModel.from_pretrained(fresh, tmp_path)) is peft.PeftModelForCausalLM

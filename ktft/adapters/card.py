"""The README.md of an adapter directory: what was trained, and how each program loads it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from ktft.adapters.below import stands_on
from ktft.adapters.files import absolute
from ktft.adapters.lora import KtftExpertsLora
from ktft.adapters.several import base_adapters_of
from ktft.checkpoint.families import GROUPS, group_of
from ktft.checkpoint.layouts import SEPARATE
from ktft.config import SHARED_OUTER
from ktft.model.experts import experts_family

NEW_CARD = "---\nlibrary_name: peft\n---\n# LoRA adapter\n\n"
"""The beginning of a new card, for a directory that has none yet."""

_BEGIN, _END = "<!-- written by ktft, and again at each save -->", "<!-- end of what ktft writes -->"

_LOADING = """\
## Loading
In ktft, beside the base model with quantized experts:
```python
model = AutoModelForCausalLM.from_pretrained("{base}", quantization_config=ktft.KtftConfig())
model = ktft.load_adapter(model, "THIS_DIRECTORY")
```
In LLaMA-Factory: `use_kt: true` and `adapter_name_or_path: THIS_DIRECTORY`, to train it further or to chat."""

_MODULES = """
In PEFT on transformers 4.57, where each expert is a module, as it is:
```python
model = PeftModel.from_pretrained(model, "THIS_DIRECTORY")
```"""

_SHARED = """
> **Do not load this directory with PEFT.** All experts of a layer share a part of their LoRA (`expert_lora: \
shared_outer`), in tensors whose names PEFT does not know. SGLang and Megatron-Bridge do. An ordinary copy, in which
> each expert has its own: `ktft export THIS_DIRECTORY --to vllm OUT`, for PEFT on transformers 4.57 too."""

_STACKED = """
> **On transformers 5, do not load this directory with PEFT.** Its experts are stacked tensors there. PEFT 0.18 finds no
> module for {tensors:,} of this adapter's tensors and leaves them out, without a message: the model answers as if its
> experts had not been trained. Later versions of PEFT convert some adapters and get others wrong. Make a copy in the
> layout that the installed PEFT has for stacked experts, and load that one:
> ```
> ktft export THIS_DIRECTORY --to peft OUT
> ```

For vLLM, SGLang and llama.cpp: `ktft export THIS_DIRECTORY --to vllm|sglang|gguf OUT`."""

_ELSEWHERE = """
In PEFT: `PeftModel.from_pretrained(model, "THIS_DIRECTORY")`. For vLLM, SGLang and llama.cpp: \
`ktft export THIS_DIRECTORY --to vllm|sglang|gguf OUT`."""


def update_card(file: Path, model: Any) -> None:
    """Write ktft's section about a PEFT model's adapters into its model card, or replace the section that is there."""
    text = file.read_text(encoding="utf-8")
    head, _, rest = text.partition(_BEGIN)
    tail = rest.partition(_END)[2] if rest else ""
    if not rest and (at := text.find("### Framework versions")) >= 0:
        head, tail = text[:at], "\n" + text[at:]
    file.write_text(f"{head.rstrip()}\n\n{_BEGIN}\n{_section(model)}\n{_END}\n{tail}", encoding="utf-8")


def _section(model: Any) -> str:
    layers = [module for module in model.modules() if isinstance(module, KtftExpertsLora)]
    stacks = (t for layer in layers for name in layer.lora_A for *_, t in layer.tensors(name))
    tensors = sum(map(len, stacks))
    base = absolute(model.config.name_or_path) or "BASE_MODEL"
    lines = [f"Base model: `{base}` ({model.config.model_type})", "", "## What was trained", *_counts(model), ""]
    if layers:
        lines += [f"LoRA on {len(layers)} layers x {layers[0].experts.num_experts} routed experts.", ""]
    if below := list(base_adapters_of(model).values()):
        lines += [f"The adapter was {stands_on(below)}.", ""]
    lines.append(_LOADING.format(base=base))
    forms = {form for layer in layers for name, form in layer.forms.items() if name not in base_adapters_of(model)}
    if SHARED_OUTER in forms:
        lines.append(_SHARED)
    elif layers and experts_family(model).layouts[0] == SEPARATE:  # others have other names there, or no modules
        lines.append(_MODULES)
    lines.append(_STACKED.format(tensors=tensors) if layers else _ELSEWHERE)
    return "\n".join(lines)


def _counts(model: Any) -> list[str]:
    """A table of parameter counts by adapter and group, including modules that are saved whole."""
    family, lines = experts_family(model), []
    for adapter, config in model.peft_config.items():
        if adapter in base_adapters_of(model):
            continue
        counts: Counter[str] = Counter()
        for name, parameter in model.named_parameters():
            if f".{adapter}." in name and (".lora_" in name or ".modules_to_save." in name):
                counts[group_of(name, family)] += parameter.numel()
        rank = f"r = {config.r}, alpha = {config.lora_alpha}" + (", rank-stabilized" if config.use_rslora else "")
        lines += ["", f"| {adapter} ({rank}) | parameters |", "|---|---:|"]
        lines += [f"| {group} | {counts[group]:,} |" for group in GROUPS if counts[group]]
    return lines

"""The MoE families that ktft supports, one row each. To add a family, add a row: see docs/dev/add-a-model.md."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ktft.checkpoint.layouts import (
    DEEPSEEK_V4,
    GEMMA,
    LLAMA,
    LLAMA_STACKED,
    MIXTRAL,
    NEMOTRON,
    SEPARATE,
    STACKED,
    STEP,
    Layout,
    beside_vision,
    in_language_model,
)
from ktft.swiglu import GELU_TANH, RELU2, SILU, Swiglu, clamped_after


@dataclass(frozen=True)
class Gguf:
    """llama.cpp's graph for a family: one that was read, and which keeps the checkpoint's order of rows and columns.

    Attributes:
        unapplied: the modules that it multiplies by without LoRA.
    """

    unapplied: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """Where a model family keeps its experts, in transformers' module tree and in its checkpoints.

    Everything that has no column here, such as the router's function, shared experts and dense layers, is
    transformers' own code.

    Attributes:
        model_types: values of `model_type` in config.json; a text model within another model may have its own.
        experts_class: transformers' class of one layer's stacked routed experts, which ktft replaces; if versions of
            transformers differ, the names are separated by |.
        layouts: how its checkpoints hold the experts; several if releases and re-saved checkpoints differ.
        swiglu: the activation that `hidden_act: silu` means; its alpha and limit are replaced by the config's
            `swiglu_alpha` and `swiglu_limit`. Of experts without a gate it is `RELU2`.
        clamps_after: whether a limit clamps what SiLU returns instead of its argument.
        biases: whether the experts' projections have biases.
        call: how a block calls its experts, if not as transformers 5 usually does; `ktft.model.calls` has a row for it.
        zero_experts: the setting for the number of experts without weights, which return their input; None: no model of
            the family has such experts.
        attention, shared_experts, router: module names, as they appear in parameter names.
        without_lora: modules on which LoRA would get no gradient and could not be trained: forward reads the router's
            weight directly, or uses only the indices that a module returns. Also linear modules whose forward is not
            that of a linear layer, to which PEFT's LoRA would not fit.
        architecture: llama.cpp's name of the family, `general.architecture` of its GGUF files. All hold a layer's
            experts in one way, `ktft.checkpoint.gguf_source.STACKED`. None refuses them.
        gguf: for `ktft export` to GGUF; None refuses it.
        newest_only: whether transformers lacks it in the versions that LLaMA-Factory allows.
    """

    name: str
    model_types: tuple[str, ...]
    experts_class: str
    layouts: tuple[Layout, ...] = (SEPARATE,)
    swiglu: Swiglu = SILU
    clamps_after: bool = False
    biases: bool = False
    call: str | None = None
    zero_experts: str | None = None
    attention: tuple[str, ...] = ("self_attn",)
    shared_experts: tuple[str, ...] = ("shared_experts",)
    router: str = "gate"
    without_lora: tuple[str, ...] = ("gate",)
    architecture: str | None = None
    gguf: Gguf | None = None
    newest_only: bool = False

    @property
    def experts_classes(self) -> tuple[str, ...]:
        """The names in `experts_class`."""
        return tuple(self.experts_class.split("|"))

    def layout(self, names: Iterable[str]) -> Layout:
        """The layout of a checkpoint with these tensor names; the first layout if none matches."""
        patterns = [(layout, layout.pattern()) for layout in self.layouts]
        return next((layout for name in names for layout, pattern in patterns if pattern.match(name)), self.layouts[0])

    def expert_pattern(self) -> re.Pattern[str]:
        """Matches the name of any tensor that belongs to routed experts, in any layout."""
        return re.compile(rf"^(?:{'|'.join(dict.fromkeys(layout.family_pattern() for layout in self.layouts))})")

    def zero_experts_of(self, config: Any) -> int:
        """How many experts without weights a model with this config (the text model's) has in each layer."""
        return (getattr(config, self.zero_experts, None) or 0) if self.zero_experts else 0

    def activation(self, config: Any, layer: int) -> Swiglu:
        """The activation of the experts in a layer of a model with this config, the text model's.

        The config may set `swiglu_alpha`, and `swiglu_limit` or, by layer, `swiglu_limits`.

        Raises:
            ValueError: the kernels do not compute this activation.
        """
        key = next((key for key in ACTIVATION_KEYS if getattr(config, key, None)), ACTIVATION_KEYS[0])
        name, known = getattr(config, key, None) or "silu", (UNGATED, GATED)[self.swiglu.gated]
        if name not in known:
            raise ValueError(
                f"{key} is {name!r}; ktft computes the experts of {self.name} with {' and '.join(map(repr, known))} "
                "only: give a model whose config.json has one of these"
            )
        base = known[name] or self.swiglu
        if base is not self.swiglu or not base.gated:
            return base
        limit = _limit(config, layer) or self.swiglu.limit
        alpha = getattr(config, "swiglu_alpha", None) or self.swiglu.alpha
        return clamped_after(limit) if self.clamps_after else replace(self.swiglu, alpha=alpha, limit=limit)


def _limit(config: Any, layer: int) -> float | None:
    """The limit that a config sets for a layer's activation; None or 0 if it sets none.

    Raises:
        ValueError: it is no limit, or there is none for the layer in a list by layers.
    """
    key, found = "swiglu_limit", getattr(config, "swiglu_limit", None)
    if limits := getattr(config, "swiglu_limits", None):
        key = f"swiglu_limits[{layer}]"
        if not isinstance(limits, list | tuple) or layer >= len(limits):
            raise ValueError(
                f"swiglu_limits is {limits!r}, which has none for layer {layer}: config.json must list one for each of "
                f"the {config.num_hidden_layers} layers, or null where nothing is clamped"
            )
        found = limits[layer]
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not found >= 0:
        raise ValueError(f"{key} is {found!r}; config.json must have a positive number there, or null for no limit")
    return float(found)


ACTIVATION_KEYS = ("hidden_act", "hidden_activation", "mlp_hidden_act")
"""The config keys, across families, for the experts' activation."""
GATED: dict[str, Swiglu | None] = {"silu": None, "swish": None, "gelu_pytorch_tanh": GELU_TANH}
"""The activations of experts with a gate, by their names in configurations; None: the family's own."""
UNGATED: dict[str, Swiglu | None] = {"relu2": RELU2}
"""The activations of experts without a gate."""
SCALED_INPUTS = "scaled inputs"
"""A `call` of experts on every token for each of them, its hidden state times the router's score, without weights."""
QWEN_SHARED = ("shared_expert", "shared_expert_gate")
LINEAR_ATTENTION = ("self_attn", "linear_attn")
INDEXED = ("gate", "indexer")
DEEPSEEK2 = Gguf(("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "lm_head"))

ROWS = (
    Family(
        "Qwen2-MoE", ("qwen2_moe",), "Qwen2MoeExperts", shared_experts=QWEN_SHARED, architecture="qwen2moe", gguf=Gguf()
    ),
    Family("Qwen3-MoE", ("qwen3_moe",), "Qwen3MoeExperts", architecture="qwen3moe", gguf=Gguf()),
    Family(
        "Qwen3-Next",
        ("qwen3_next",),
        "Qwen3NextExperts",
        attention=LINEAR_ATTENTION,
        shared_experts=QWEN_SHARED,
        architecture="qwen3next",
    ),
    Family(
        "Qwen3.5-MoE",
        ("qwen3_5_moe", "qwen3_5_moe_text"),
        "Qwen3_5MoeExperts",
        layouts=(in_language_model(STACKED), in_language_model(SEPARATE), STACKED, SEPARATE),
        attention=LINEAR_ATTENTION,
        shared_experts=QWEN_SHARED,
        architecture="qwen35moe",
    ),
    Family(
        "Qwen3-VL-MoE",
        ("qwen3_vl_moe", "qwen3_vl_moe_text"),
        "Qwen3VLMoeTextExperts",
        # The release has them transposed; transformers 5 writes them in their memory layout.
        layouts=(replace(in_language_model(STACKED), transposed=None), in_language_model(SEPARATE)),
        architecture="qwen3vlmoe",
    ),
    Family("DeepSeek-V2", ("deepseek_v2",), "DeepseekV2Experts", architecture="deepseek2", gguf=DEEPSEEK2),
    Family(
        "DeepSeek-V3",
        ("deepseek_v3",),
        "DeepseekV3NaiveMoe|DeepseekV3Experts",
        architecture="deepseek2",
        gguf=DEEPSEEK2,
    ),
    Family("Kimi-K2", ("kimi_k2",), "DeepseekV3NaiveMoe|DeepseekV3Experts", architecture="deepseek2", gguf=DEEPSEEK2),
    Family("GLM-4-MoE", ("glm4_moe",), "Glm4MoeNaiveMoe|Glm4MoeExperts", architecture="glm4moe"),
    Family(
        "GLM-5",
        ("glm_moe_dsa",),
        "GlmMoeDsaNaiveMoe|GlmMoeDsaExperts",
        without_lora=INDEXED,
        architecture="glm-dsa",
    ),
    Family("MiniMax-M2", ("minimax_m2",), "MiniMaxM2Experts", layouts=(MIXTRAL,), architecture="minimax-m2"),
    Family(
        "gpt-oss",
        ("gpt_oss",),
        "GptOssExperts",
        layouts=(replace(STACKED, interleaved=True, transposed=True),),
        swiglu=Swiglu(alpha=1.702, limit=7.0, shift=1.0),
        biases=True,
        router="router",
        without_lora=("router",),
        architecture="gpt-oss",
    ),
    Family("Mixtral", ("mixtral",), "MixtralExperts", layouts=(MIXTRAL,), architecture="llama"),
    Family("OLMoE", ("olmoe",), "OlmoeExperts", architecture="olmoe"),
    Family("Ernie-4.5-MoE", ("ernie4_5_moe",), "Ernie4_5_MoeExperts", architecture="ernie4_5-moe"),
    Family("DeepSeek-V3.2", ("deepseek_v32",), "DeepseekV32Experts", without_lora=INDEXED, newest_only=True),
    Family(
        "DeepSeek-V4",
        ("deepseek_v4",),
        "DeepseekV4Experts",
        layouts=(DEEPSEEK_V4, replace(DEEPSEEK_V4, stem=f"model.{DEEPSEEK_V4.stem}")),
        swiglu=Swiglu(limit=10.0),
        without_lora=(*INDEXED, "o_a_proj"),
        newest_only=True,
    ),
    Family(
        "Kimi-K2.5",
        ("kimi_k25",),
        "DeepseekV3Experts",
        # transformers 5.23 calls the layers blocks when it saves them, as it does those of the vision model
        layouts=(beside_vision(SEPARATE), beside_vision(SEPARATE, "blocks")),
        newest_only=True,
    ),
    Family("Kimi-Linear", ("kimi_linear",), "KimiLinearExperts", layouts=(MIXTRAL,), newest_only=True),
    Family("GLM-4.7-Flash", ("glm4_moe_lite",), "Glm4MoeLiteNaiveMoe|Glm4MoeLiteExperts"),
    Family(
        "GLM-5.3-Flash",
        ("glm5_next", "glm5_next_text"),
        "Glm5NextTextExperts",
        layouts=(in_language_model(SEPARATE), SEPARATE),
        swiglu=Swiglu(limit=10.0),
        without_lora=INDEXED,
        newest_only=True,
    ),
    Family(
        "MiniMax-M3",
        ("minimax_m3_vl", "minimax_m3_vl_text"),
        "MiniMaxM3VLExperts",
        layouts=(beside_vision(MIXTRAL), MIXTRAL),
        swiglu=Swiglu(alpha=1.702, limit=7.0, shift=1.0),
        without_lora=INDEXED,
        newest_only=True,
    ),
    Family("Hunyuan-V3", ("hy_v3",), "HYV3Experts"),
    Family(
        "Hunyuan-V4",
        ("hy_v4",),
        "HYV4Experts",
        layouts=(STACKED,),
        swiglu=Swiglu(limit=10.0),
        without_lora=INDEXED,
        newest_only=True,
    ),
    Family("MiMo-V2-Flash", ("mimo_v2_flash",), "MiMoV2FlashNaiveMoe|MiMoV2FlashExperts", newest_only=True),
    Family("Ling-3", ("bailing_hybrid",), "BailingHybridExperts", newest_only=True),
    Family(
        "Mistral-4",
        ("mistral4",),
        "Mistral4NaiveMoe|Mistral4Experts",
        layouts=(beside_vision(STACKED), in_language_model(STACKED), STACKED),
    ),
    Family(
        "Mistral-Large-4",
        ("mistral_large4", "mistral_large4_text"),
        "MistralLarge4TextExperts",
        layouts=(replace(MIXTRAL, stem="layers.{layer}.experts.{expert}.{projection}"),),
        without_lora=INDEXED,
        newest_only=True,
    ),
    Family(
        "Gemma-4",
        ("gemma4", "gemma4_text"),
        "Gemma4TextExperts",
        layouts=(in_language_model(GEMMA), GEMMA),
        router="router",
        without_lora=("router",),
    ),
    Family(
        "Nemotron-3",
        ("nemotron_h",),
        "NemotronHExperts",
        layouts=(NEMOTRON, replace(NEMOTRON, stem=NEMOTRON.stem.replace("backbone.", "model."))),
        swiglu=RELU2,
        attention=("q_proj", "k_proj", "v_proj", "o_proj", "in_proj"),
        # Mamba's kernels on a GPU multiply by out_proj's weight themselves
        without_lora=("gate", "out_proj"),
    ),
    Family(
        "Step-3.7",
        ("step3p7", "step3p5"),
        "Step3p7Experts",
        layouts=(STEP, in_language_model(STEP)),
        clamps_after=True,
        newest_only=True,
    ),
    Family("Trinity", ("afmoe",), "AfmoeExperts", router="router", without_lora=("router",)),
    Family(
        "Qwen3.8-Flash-Next",
        ("qwen4_exp", "qwen4_exp_text"),
        "Qwen4ExpTextExperts",
        layouts=(in_language_model(SEPARATE), in_language_model(STACKED), SEPARATE, STACKED),
        attention=LINEAR_ATTENTION,
        shared_experts=QWEN_SHARED,
        without_lora=INDEXED,
        newest_only=True,
    ),
    Family(
        "Llama-4",
        ("llama4", "llama4_text"),
        "Llama4TextExperts",
        # FP8 releases have one tensor an expert
        layouts=(beside_vision(LLAMA_STACKED), beside_vision(LLAMA), LLAMA_STACKED, LLAMA),
        call=SCALED_INPUTS,
        shared_experts=("shared_expert",),
        router="router",
        without_lora=("router",),
    ),
    Family(
        "LongCat-Flash",
        ("longcat_flash",),
        "LongcatFlashExperts",
        zero_experts="zero_expert_num",
        shared_experts=(),
        router="router",
        without_lora=("router",),
    ),
)

FAMILIES: dict[str, Family] = {model_type: family for family in ROWS for model_type in family.model_types}

GROUPS = ("attention", "shared experts", "routed experts", "router", "other")


def group_of(parameter_name: str, family: Family) -> str:
    """The one of `GROUPS` that a parameter, or its LoRA tensor, belongs to."""
    path = set(parameter_name.split("."))
    modules = (family.attention, family.shared_experts, ("experts",), (family.router,))
    return next((group for group, names in zip(GROUPS, modules, strict=False) if path & set(names)), "other")

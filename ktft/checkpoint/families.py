"""The MoE families that ktft supports, one row each. To add a family, add a row: see docs/dev/add-a-model.md."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ktft.config import PROJECTIONS
from ktft.swiglu import GELU_TANH, SILU, Swiglu


@dataclass(frozen=True)
class ExpertSource:
    """Where a checkpoint holds one projection of one expert.

    Attributes:
        stem: the tensor's name without the suffix of a quantization scheme: the plain tensor of one expert is called
            `stem.weight`, a stacked one `stem`.
        expert: index into the first dimension of a stacked tensor; None if every expert has its own tensor.
        rows: the rows of the `[out_features, in_features]` matrix that are this projection, if gate and up share one.
        bias: what the name of a stacked bias has after the stem.
        transposed: whether it is stored as `[in_features, out_features]`; None: it is if it does not fit untransposed.
    """

    stem: str
    expert: int | None = None
    rows: slice = field(default_factory=lambda: slice(None))
    transposed: bool | None = False
    bias: str = "_bias"

    @property
    def tensor(self) -> str:
        """The name of the plain weight."""
        return self.stem if self.expert is not None else f"{self.stem}.weight"

    @property
    def bias_tensor(self) -> str:
        """The name of the bias, a vector that is stacked like the weight; `rows` of it are this projection's."""
        return f"{self.stem}{self.bias}" if self.expert is not None else f"{self.stem}.bias"

    def is_transposed(self, stored: tuple[int, ...], shape: tuple[int, int]) -> bool:
        """Whether a matrix stored with this shape must be transposed to get `shape`.

        Raises:
            ValueError: the matrix fits neither way, or not the way that the layout says.
        """
        transposed = stored != shape if self.transposed is None else self.transposed
        expected = shape[::-1] if transposed else shape
        if stored != expected:
            raise ValueError(f"has matrices {list(stored)}, the model's config needs {list(expected)}")
        return transposed

    def take(self, tensor: Any, shape: tuple[int, int]) -> Any:
        """The projection `[out_features, in_features]`, a view into a plain tensor.

        Args:
            tensor: the tensor that the property `tensor` names.
            shape: the shape of the matrix that holds the projection, from `Layout.matrix_shape`.
        """
        matrix = tensor if self.expert is None else tensor[self.expert]
        return (matrix.T if self.is_transposed(tuple(matrix.shape), shape) else matrix)[self.rows]

    def take_bias(self, tensor: Any) -> Any:
        """The bias `[out_features]`, a view into the tensor that `bias_tensor` names."""
        return (tensor if self.expert is None else tensor[self.expert])[self.rows]


@dataclass(frozen=True)
class Layout:
    """How checkpoints name a family's expert tensors, and how gate and up are arranged in them.

    Attributes:
        stem: as `ExpertSource.stem`, with the fields {layer}, {projection} and, if every expert has its own tensors,
            {expert}.
        names: the names of gate, up and down in the stem. Gate and up have the same name if they share a matrix.
        interleaved: a shared matrix has gate in its even rows and up in its odd rows; otherwise gate is the first half.
        transposed, bias: as those of `ExpertSource`.
    """

    stem: str
    names: tuple[str, str, str] = PROJECTIONS
    interleaved: bool = False
    transposed: bool | None = False
    bias: str = "_bias"

    @property
    def stacked(self) -> bool:
        """Whether one tensor holds all experts of a layer."""
        return "{expert}" not in self.stem

    def source(self, layer: int, expert: int, projection: str, intermediate_size: int) -> ExpertSource:
        """Where the checkpoint holds one expert's projection."""
        gate, up, _ = self.names
        rows = slice(None)
        if gate == up and projection != "down_proj":
            number = PROJECTIONS.index(projection)
            halves = slice(number * intermediate_size, (number + 1) * intermediate_size)
            rows = slice(number, None, 2) if self.interleaved else halves
        name = self.names[PROJECTIONS.index(projection)]
        stem = self.stem.format(layer=layer, expert=expert, projection=name)
        return ExpertSource(stem, expert if self.stacked else None, rows, self.transposed, self.bias)

    def matrix_shape(self, projection: str, hidden_size: int, intermediate_size: int) -> tuple[int, int]:
        """The shape `[out_features, in_features]` of the matrix that holds a projection, alone or with another one."""
        if projection == "down_proj":
            return hidden_size, intermediate_size
        return intermediate_size * (2 if self.names[0] == self.names[1] else 1), hidden_size

    def pattern(self) -> re.Pattern[str]:
        """Matches the start of the name of any tensor of a routed expert in this layout, its bias and scales too."""
        start = self.stem.format(layer="\0", expert="\1", projection="\2")
        names = "|".join(dict.fromkeys(self.names))
        pattern = re.escape(start).replace("\0", r"\d+").replace("\1", r"\d+").replace("\2", f"(?:{names})")
        return re.compile(pattern + r"(?![A-Za-z0-9])")


SEPARATE = Layout("model.layers.{layer}.mlp.experts.{expert}.{projection}")
MIXTRAL = Layout("model.layers.{layer}.block_sparse_moe.experts.{expert}.{projection}", names=("w1", "w3", "w2"))
STACKED = Layout("model.layers.{layer}.mlp.experts.{projection}", names=("gate_up_proj", "gate_up_proj", "down_proj"))

DEEPSEEK_V4 = replace(MIXTRAL, stem="layers.{layer}.ffn.experts.{expert}.{projection}")


GEMMA = replace(STACKED, stem=STACKED.stem.replace("mlp.", ""))


def in_language_model(layout: Layout) -> Layout:
    """The layout of the text model within a vision-language model."""
    return replace(layout, stem=layout.stem.replace("model.", "model.language_model.", 1))


def beside_vision(layout: Layout, layers: str = "layers") -> Layout:
    """The layout of a text model that lies beside the vision model instead of within one model."""
    return replace(layout, stem=layout.stem.replace("model.layers.", f"language_model.model.{layers}.", 1))


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
            `swiglu_alpha` and `swiglu_limit`.
        biases: whether the experts' projections have biases.
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
    biases: bool = False
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
        stems = dict.fromkeys(layout.stem.partition("experts.")[0] for layout in self.layouts)
        starts = (re.escape(stem.format(layer="\0")).replace("\0", r"\d+") for stem in stems)
        return re.compile(rf"^(?:{'|'.join(starts)})experts\.")

    def activation(self, config: Any) -> Swiglu:
        """The activation of a model with this config (the text model's), which may set `swiglu_alpha`, `swiglu_limit`.

        Raises:
            ValueError: the kernels do not compute this activation.
        """
        name = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None) or "silu"
        if name in GELU:
            return GELU_TANH
        if name not in ("silu", "swish"):
            known = " and ".join(map(repr, ("silu", *GELU)))
            raise ValueError(f"hidden_act is {name!r}; ktft's experts compute {known} only")
        own = {
            name: getattr(config, f"swiglu_{name}", None) or getattr(self.swiglu, name) for name in ("alpha", "limit")
        }
        return replace(self.swiglu, **own)


GELU = ("gelu_pytorch_tanh",)
"""Names of `GELU_TANH` in configurations."""
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
)

FAMILIES: dict[str, Family] = {model_type: family for family in ROWS for model_type in family.model_types}

GROUPS = ("attention", "shared experts", "routed experts", "router", "other")


def group_of(parameter_name: str, family: Family) -> str:
    """The one of `GROUPS` that a parameter, or its LoRA tensor, belongs to."""
    path = set(parameter_name.split("."))
    modules = (family.attention, family.shared_experts, ("experts",), (family.router,))
    return next((group for group, names in zip(GROUPS, modules, strict=False) if path & set(names)), "other")

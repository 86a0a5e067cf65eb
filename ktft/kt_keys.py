"""The keys of `kt_config` in LLaMA-Factory's YAML: ktft's own settings, and what KTransformers' integration calls them.

Standard library only, because LLaMA-Factory's hook loads it before torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ktft.config import EXPERT_FORMATS, SETTINGS, Settings, checked, unknown_key

_KT_FORMATS = {"amxbf16": "bf16", "amxint8": "int8", "amxfp8": "fp8", "amxint4": "k4", "rawint4": "int4"}
"""KTransformers' names of formats -> the nearest of `EXPERT_FORMATS`. FP8 and MXFP4 have the same names here."""
_AMXINT4 = {"amxint4": "becomes k4: also 4 bits, with a scale for each 32 inputs and not one a row, so more accurate"}


def _format(value: Any) -> str | None:
    name = str(value).lower()
    if name == "auto":
        return None
    name = _KT_FORMATS.get(name, name)
    if name not in EXPERT_FORMATS:
        raise ValueError(f"{value!r} is not a supported expert format; supported: {', '.join(EXPERT_FORMATS)}")
    return name


def _written_size(value: Any) -> Any:
    """Turns a number into text, so that `parse_size` checks its unit: a person who writes 8 in YAML forgot the unit."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) and value > 0 else value


def _one_node_if_false(value: Any) -> int | None:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return None if value else 1


def _only(accepted: Any, cure: str) -> Callable[[Any], None]:
    """A converter for keys that accept one value only. The value sets nothing in ktft."""

    def convert(value: Any) -> None:
        if value != accepted or isinstance(value, bool) != isinstance(accepted, bool):
            raise ValueError(f"{value!r} is not supported; {cure}")

    return convert


def _refused(cure: str) -> Callable[[Any], None]:
    def convert(value: Any) -> None:
        raise ValueError(cure)

    return convert


@dataclass(frozen=True)
class KtKey:
    """What one key does in ktft.

    Attributes:
        setting: the setting that the key sets; None if it sets nothing.
        convert: turns the key's value into the setting's value; a result of None sets nothing.
        note: why the key has no effect; empty if it has one.
        remarks: lower-case values whose meaning here differs -> what the user is told about it.
    """

    setting: str | None = None
    convert: Callable[[Any], Any] = lambda value: value
    note: str = ""
    remarks: Mapping[str, str] = field(default_factory=dict)


_ELSEWHERE = "set {} at the top level of the YAML, where LLaMA-Factory reads it"
_ONE_PACKING = "one packed copy serves forward and backward"
_BY_MEMORY = (
    "experts that stay on the GPU are chosen by memory: set gpu_expert_memory to a size, for instance 8G, or auto"
)
_DENSE_LORA = "ktft has no dense LoRA experts; LoRA goes on the routed experts themselves"

KT_KEYS: dict[str, KtKey] = {
    **{name: KtKey(name) for name in SETTINGS},
    "gpu_expert_memory": KtKey("gpu_expert_memory", _written_size),
    "gpu_activation_memory": KtKey("gpu_activation_memory", _written_size),
    "gpu_memory": KtKey("gpu_memory", _written_size),
    # These keys of KTransformers have a meaning in ktft.
    "kt_expert_weight_format": KtKey("expert_format", _format, remarks=_AMXINT4),
    "kt_backend": KtKey("expert_format", _format, remarks=_AMXINT4),
    "kt_num_threads": KtKey("threads"),
    "kt_threadpool_count": KtKey("numa_nodes"),
    "kt_tp_enabled": KtKey("numa_nodes", _one_node_if_false),
    "kt_activation_policy": KtKey("activation"),
    "kt_cpu_activation": KtKey("activation"),
    "kt_expert_checkpoint_path": KtKey("expert_checkpoint"),
    "kt_weight_path": KtKey("expert_checkpoint"),
    "cpu_infer": KtKey("threads"),
    # These keys accept one value, which is what ktft does in any case.
    "enabled": KtKey(None, _only(True, "to train without ktft set use_kt: false")),
    "kt_skip_expert_loading": KtKey(None, _only(True, "ktft always loads the experts itself; remove the key")),
    "kt_num_gpu_experts": KtKey(None, _only(0, _BY_MEMORY)),
    "kt_train_mode": KtKey(None, _only("lora", "ktft trains LoRA; set it to lora")),
    "kt_full_weight_grad": KtKey(None, _only(False, "ktft keeps expert weights frozen; set it to false")),
    "kt_use_lora_experts": KtKey(None, _only(False, f"{_DENSE_LORA}; set it to false and use lora_target: all")),
    # These are LoRA's own settings, which LLaMA-Factory keeps out of kt_config too.
    "kt_lora_rank": KtKey(None, _refused(_ELSEWHERE.format("lora_rank"))),
    "kt_lora_alpha": KtKey(None, _refused(_ELSEWHERE.format("lora_alpha"))),
    "kt_lora_dropout": KtKey(None, _refused(_ELSEWHERE.format("lora_dropout"))),
    "lora_rank": KtKey(note="the rank is lora_rank at the top level of the YAML"),
    # These keys have no effect in ktft.
    "kt_lora_expert_num": KtKey(note=_DENSE_LORA),
    "kt_lora_expert_intermediate_size": KtKey(note=_DENSE_LORA),
    "kt_weight_lifecycle": KtKey(note="packed experts live as long as the model"),
    "kt_share_backward_bb": KtKey(note=_ONE_PACKING),
    "kt_share_cache_pool": KtKey(note="activations belong to autograd; nothing is pooled"),
    "kt_max_cache_depth": KtKey(note="activations belong to autograd; no depth to set"),
    "kt_force_fused_expert_lora": KtKey(note="expert LoRA is always fused"),
    "kt_model_max_length": KtKey(note="buffers grow with the batch; no length to set"),
    "kt_non_expert_weight_path": KtKey(note="all other weights come from model_name_or_path"),
    "kt_wrap_fn": KtKey(note="experts are wrapped by ktft"),
    "kt_wrap_kwargs": KtKey(note="experts are wrapped by ktft"),
    "kt_checkpoint_files": KtKey(note="shards are found from model_name_or_path"),
    "kt_sharded_metadata": KtKey(note="shards are found from model_name_or_path"),
    "kt_optimize_rule": KtKey(note="placement needs no rule file"),
    "chunk_size": KtKey(note="no chunk size to set"),
    "mode": KtKey(note="there is one mode"),
    "kt_mode": KtKey(note="there is one mode"),
    "kt_maxlen": KtKey(note="buffers grow with the batch; no length to set"),
    "kt_use_cuda_graph": KtKey(note="cuda_graphs decides whether layers are recorded"),
    "kt_force_think": KtKey(note="the chat template decides"),
}
"""Every key of `kt_config`: ktft's own, and those of KTransformers' integration from its first to its newest."""

TOP_LEVEL_KEYS = (
    "kt_weight_path",
    "kt_expert_checkpoint_path",
    "kt_use_lora_experts",
    "kt_lora_expert_num",
    "kt_lora_expert_intermediate_size",
)
"""Keys of `KT_KEYS` that LLaMA-Factory itself reads from the top level of the YAML."""


def parse_kt_config(
    kt_config: Mapping[str, Any], top_level: Mapping[str, Any] | None = None
) -> tuple[Settings, list[str]]:
    """Turn the YAML's `kt_config` mapping, and the `TOP_LEVEL_KEYS` beside it, into settings.

    Values that are None count as absent.

    Returns:
        The settings, and one line for each key that has no effect or whose value means something else here.

    Raises:
        ValueError: an unknown key (naming the nearest valid one), a value that is not accepted, or two keys that set
            the same setting to different values.
    """
    given = [(f"kt_config.{key}", str(key), value) for key, value in kt_config.items()]
    given += [(key, key, value) for key, value in (top_level or {}).items()]
    chosen: dict[str, tuple[str, Any]] = {}
    notes: list[str] = []
    for shown, key, value in given:
        if key not in KT_KEYS:
            raise unknown_key(key, KT_KEYS, shown)
        if value is None:
            continue
        row = KT_KEYS[key]
        try:
            converted = row.convert(value)
            if row.setting is not None and converted is not None:
                converted = checked(row.setting, converted)
        except ValueError as error:
            said = str(error)  # most of these begin with the setting's name
            where = shown.removesuffix(key) if said.startswith(f"{key} is ") else f"{shown}: "
            raise ValueError(where + said) from None
        if row.note:
            notes.append(f"{shown} has no effect: {row.note}")
        if remark := row.remarks.get(str(value).lower()):
            notes.append(f"{shown}: {value} {remark}")
        if row.setting is None or converted is None:
            continue
        other, earlier = chosen.setdefault(row.setting, (shown, converted))
        if earlier != converted:
            raise ValueError(
                f"{other} sets {row.setting} to {earlier!r}, {shown} sets it to {converted!r}; keep one of them"
            )
    return Settings(**{setting: value for setting, (_, value) in chosen.items()}), notes

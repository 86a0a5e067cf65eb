"""transformers' quantizer "ktft": `from_pretrained` loads all but the routed experts, then packs those from disk."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_enabled
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.logging import tqdm
from transformers.utils.quantization_config import QuantizationConfigMixin

from ktft import native
from ktft.checkpoint.families import Family, family_of
from ktft.checkpoint.reader import READABLE, CheckpointReader, TensorEntry
from ktft.config import PROJECTIONS, SETTINGS, Settings, unknown_key, world_size
from ktft.model.experts import KtftExperts, expert_modules, find_experts
from ktft.model.memory import require_memory

logger = logging.getLogger(__name__)


@register_quantization_config("ktft")
class KtftConfig(QuantizationConfigMixin):
    """Pass as `quantization_config` to `from_pretrained`. The arguments are those of `ktft.config.Settings`, and
    `reserve_bytes`: memory that must be left once the model is loaded, for training say; more is not loaded.

    Raises:
        ValueError: an unknown argument (naming the nearest valid one), or a value that is not accepted.
    """

    def __init__(
        self,
        expert_format: str = Settings.expert_format,
        threads: int | None = Settings.threads,
        numa_nodes: int | None = Settings.numa_nodes,
        activation: str = Settings.activation,
        expert_checkpoint: str | None = Settings.expert_checkpoint,
        reserve_bytes: int = 0,
        quant_method: str = "ktft",
        **unknown: Any,
    ) -> None:
        for key in unknown:
            raise unknown_key(key, SETTINGS)
        self.quant_method = quant_method  # type: ignore[assignment]  # the mixin lists only its own methods
        self.expert_format = expert_format
        self.threads = threads
        self.numa_nodes = numa_nodes
        self.activation = activation
        self.expert_checkpoint = expert_checkpoint
        self.reserve_bytes = reserve_bytes
        _ = self.settings  # checks the values

    @property
    def settings(self) -> Settings:
        """The validated settings."""
        return Settings(**{name: getattr(self, name) for name in SETTINGS})

    @classmethod
    def from_settings(cls, settings: Settings, reserve_bytes: int = 0) -> KtftConfig:
        """The configuration that carries these settings."""
        return cls(**{name: getattr(settings, name) for name in SETTINGS}, reserve_bytes=reserve_bytes)


def configure(config: PreTrainedConfig, settings: Settings, reserve_bytes: int = 0) -> None:
    """Make `from_pretrained(config=config)` load the routed experts with ktft.

    Raises:
        ValueError: the checkpoint is already quantized by another method.
    """
    own = getattr(config, "quantization_config", None)
    method = own.get("quant_method") if isinstance(own, dict) else getattr(own, "quant_method", None)
    if own is not None and method != "ktft":
        raise ValueError(
            f"the checkpoint is quantized with {getattr(method, 'value', method)}, which ktft cannot read yet; "
            f"give a checkpoint in {', '.join(READABLE)} (for DeepSeek-V3, a BF16 conversion)"
        )
    config.quantization_config = KtftConfig.from_settings(settings, reserve_bytes).to_dict()


@register_quantizer("ktft")
class KtftHfQuantizer(HfQuantizer):
    """Replaces experts modules while the model is on meta, and fills them once everything else is loaded."""

    quantization_config: KtftConfig
    _plan: _LoadPlan | None = None

    @property
    def is_trainable(self) -> bool:
        """LoRA can be trained on top."""
        return True

    def is_serializable(self) -> bool:
        """False: only adapters can be saved."""
        logger.warning(
            "routed experts live outside of the model's parameters, so the model cannot be saved as a whole; save the "
            "adapter (the peft model's save_pretrained), the base weights are unchanged"
        )
        return False

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse what this release cannot do, before anything is loaded."""
        if world_size() > 1:
            raise ValueError(
                f"ktft trains in one process in this release, but WORLD_SIZE is {world_size()}; start one process, "
                "with CUDA_VISIBLE_DEVICES naming one GPU"
            )
        if is_deepspeed_zero3_enabled() or is_fsdp_enabled():
            method = "DeepSpeed ZeRO-3" if is_deepspeed_zero3_enabled() else "FSDP"
            raise ValueError(f"ktft does not run under {method} in this release; remove it from the configuration")
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("device_map puts modules on disk, which ktft cannot do; give a device_map without 'disk'")

    def update_tp_plan(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Drop the experts' entries: the module returns whole outputs, which the plan would reduce once more."""
        for each in {id(c): c for c in (config, config.get_text_config())}.values():
            for name in ("base_model_tp_plan", "base_model_ep_plan"):
                plan = getattr(each, name, None)
                if plan:
                    setattr(each, name, {key: value for key, value in plan.items() if ".experts" not in key})
        return config

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        self._plan = _LoadPlan(model, checkpoint_files or [], self.quantization_config.settings)
        _check_memory(model, self.quantization_config, kwargs.get("device_map"))

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        assert self._plan is not None
        self._plan.load_experts()
        self._plan = None
        return model


def _check_memory(model: PreTrainedModel, config: KtftConfig, device_map: Any) -> None:
    """Refuse a model that would not fit, before its weights are read."""
    places = device_map.values() if isinstance(device_map, dict) else [device_map or "cpu"]
    needed = sum(module.layer.packed_bytes for module in find_experts(model).values())
    if all(str(place) == "cpu" for place in places):
        needed += sum(tensor.nbytes for tensor in model.state_dict().values())
    what = f"the model in expert_format {config.expert_format}"
    require_memory(f"{what} and training" if config.reserve_bytes else what, needed + config.reserve_bytes)


class _LoadPlan:
    """Which tensor of the checkpoint goes where, settled from headers alone before any weight is read."""

    def __init__(self, model: PreTrainedModel, checkpoint_files: list[str], settings: Settings) -> None:
        self.settings = settings
        self.family = family_of(model.config.model_type)
        activation = model.config.hidden_act
        if activation != self.family.activation:
            raise ValueError(f"hidden_act is {activation!r}; ktft's experts compute {self.family.activation!r} only")
        checkpoint = CheckpointReader(checkpoint_files)
        self.experts = swap_experts(model, self.family, settings)
        is_expert = self.family.expert_pattern()
        ignored = list(model._keys_to_ignore_on_load_unexpected or [])
        _check_other_weights(model, checkpoint, is_expert, ignored)
        self.reader = checkpoint
        if settings.expert_checkpoint is not None:
            self.reader = CheckpointReader.from_directory(settings.expert_checkpoint)
        self.targets = self._match_experts(is_expert, ignored)
        # on the instance: the class is shared with stock models. transformers sees the experts' fused names here.
        model._keys_to_ignore_on_load_unexpected = [*ignored, rf"\.{self.family.routed_experts}\."]

    def _match_experts(self, is_expert: re.Pattern[str], ignored: list[str]) -> dict[str, tuple[KtftExperts, int, str]]:
        """Tensor name -> (module, expert, projection). Everything expected is there, everything there is expected."""
        targets = {
            self.family.tensor_name(layer, expert, projection): (module, expert, projection)
            for layer, module in self.experts.items()
            for expert in range(module.num_experts)
            for projection in PROJECTIONS
        }
        tensors = self.reader.tensors
        where = f"checkpoint {next(iter(tensors.values())).file.parent}" if tensors else "checkpoint"
        _refuse(f"{where} lacks expert tensors", (name for name in targets if name not in tensors))
        _refuse(
            f"{where} holds expert tensors that this model has no place for (biases and scales have none)",
            (name for name in tensors if is_expert.match(name) and name not in targets and not _any(ignored, name)),
        )
        for name, (module, _, projection) in targets.items():
            shape = (module.intermediate_size, module.hidden_size)
            _check_entry(tensors[name], shape[::-1] if projection == "down_proj" else shape)
        return targets

    def load_experts(self) -> None:
        """Read each expert weight once, in the order of the files, and pack it."""
        total = sum(self.reader.tensors[name].nbytes for name in self.targets)
        title = f"Packing experts ({self.settings.expert_format})"
        with self.reader, tqdm(total=total, desc=title, unit="B", unit_scale=True) as progress:
            for name, weight in self.reader.read_in_file_order(list(self.targets)):
                module, expert, projection = self.targets[name]
                try:
                    module.layer.load(expert, projection, weight)
                except ValueError as error:
                    raise ValueError(f"{self.reader.tensors[name].file}: {name}: {error}") from error
                progress.update(weight.nbytes)
        for module in self.experts.values():
            assert not module.layer.missing(), module.layer.missing()[:3]


def swap_experts(model: nn.Module, family: Family, settings: Settings) -> dict[int, KtftExperts]:
    """Put an empty `KtftExperts` in place of every stacked experts module. Returns them by layer number.

    Raises:
        ValueError: the model has no such module, or dims that the kernels cannot take.
    """
    runtime = native.runtime(settings.threads, settings.numa_nodes)
    experts: dict[int, KtftExperts] = {}
    for number, name, (num_experts, hidden_size, intermediate_size) in expert_modules(model, family):
        layer = native.ExpertLayer(
            runtime,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            format=settings.expert_format,
            name=name,
        )
        experts[number] = KtftExperts(layer, settings.activation)
        model.set_submodule(name, experts[number])
    return experts


def _check_other_weights(
    model: PreTrainedModel, checkpoint: CheckpointReader, is_expert: re.Pattern[str], ignored: list[str]
) -> None:
    """The backbone must match the checkpoint both ways: transformers would fill a missing weight at random, and lets a
    quantized model take wrong shapes.

    Task heads other than the LM head are left to transformers: a new one is legitimate.
    """
    backbone = model.base_model_prefix + "."
    prefix = "" if hasattr(model, model.base_model_prefix) else backbone
    expected = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    tied = {prefix + name for name in model.all_tied_weights_keys}
    heads = {f"{name}.weight" for name, module in model.named_modules() if module is model.get_output_embeddings()}
    required = {name for name in expected.keys() - tied if name.startswith(backbone) or name in heads}
    _refuse("the checkpoint lacks tensors that the model needs", required - checkpoint.tensors.keys())
    _refuse(
        "the checkpoint holds tensors that the model has no place for",
        (
            name
            for name in checkpoint.tensors.keys() - expected.keys()
            if name.startswith(backbone)
            and not is_expert.match(name)
            and not _any([*ignored, r"rotary_emb\.inv_freq"], name)
        ),
    )
    for name in required:
        _check_entry(checkpoint.tensors[name], tuple(expected[name].shape))


def _check_entry(entry: TensorEntry, shape: tuple[int, ...]) -> None:
    if entry.shape != shape:
        raise ValueError(f"{entry.file}: {entry.name} has shape {entry.shape}, the model's config needs {shape}")
    if entry.dtype not in READABLE:
        raise ValueError(
            f"{entry.file}: {entry.name} is {entry.dtype}; weights are read from {', '.join(READABLE)}, convert the "
            "checkpoint to BF16 first"
        )


def _any(patterns: list[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _refuse(problem: str, names: Iterable[str]) -> None:
    found = sorted(names)
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ValueError(
            f"{problem}: {', '.join(found[:3])}{more}; check that config.json and the shards belong together"
        )

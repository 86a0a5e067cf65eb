"""transformers' quantizer "ktft": `from_pretrained` loads all but the routed experts, then packs those from disk."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_enabled
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.logging import tqdm
from transformers.utils.quantization_config import QuantizationConfigMixin

from ktft import native
from ktft.checkpoint.families import ExpertSource, Family
from ktft.checkpoint.reader import READABLE, CheckpointReader, TensorEntry
from ktft.config import PROJECTIONS, SETTINGS, Settings, unknown_key, world_size
from ktft.model import kimi_k2
from ktft.model.experts import KtftExperts, expert_modules
from ktft.model.generic import family_of

kimi_k2.register()

logger = logging.getLogger(__name__)


@register_quantization_config("ktft")
class KtftConfig(QuantizationConfigMixin):
    """Pass as `quantization_config` to `from_pretrained`. The arguments are those of `ktft.config.Settings`.

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
        _ = self.settings  # checks the values

    @property
    def settings(self) -> Settings:
        """The validated settings."""
        return Settings(**{name: getattr(self, name) for name in SETTINGS})

    @classmethod
    def from_settings(cls, settings: Settings) -> KtftConfig:
        """The configuration that carries these settings."""
        return cls(**{name: getattr(settings, name) for name in SETTINGS})


def configure(config: PreTrainedConfig, settings: Settings) -> None:
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
    config.quantization_config = KtftConfig.from_settings(settings).to_dict()


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

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        assert self._plan is not None
        self._plan.load_experts()
        self._plan = None
        return model


class _LoadPlan:
    """Which tensor of the checkpoint goes where, settled from headers alone before any weight is read."""

    def __init__(self, model: PreTrainedModel, checkpoint_files: list[str], settings: Settings) -> None:
        self.settings = settings
        self.family = family_of(model)
        checkpoint = CheckpointReader(checkpoint_files)
        self.experts = swap_experts(model, self.family, settings)
        is_expert = self.family.expert_pattern()
        ignored = [*(model._keys_to_ignore_on_load_unexpected or []), *_prediction_layers(model.config)]
        _check_other_weights(model, checkpoint, is_expert, ignored)
        self.reader = checkpoint
        if settings.expert_checkpoint is not None:
            self.reader = CheckpointReader.from_directory(settings.expert_checkpoint)
        self.targets = self._match_experts(is_expert, ignored)
        # on the instance: the class is shared with stock models. transformers sees the experts' fused names here.
        model._keys_to_ignore_on_load_unexpected = [*ignored, r"\.experts\."]

    def _match_experts(self, is_expert: re.Pattern[str], ignored: list[str]) -> dict[str, list[_Target]]:
        """Tensor name -> what it holds. Everything expected is there, everything there is expected."""
        tensors = self.reader.tensors
        layout = self.family.layout(tensors)
        targets: dict[str, list[_Target]] = {}
        for layer, module in self.experts.items():
            for expert, projection in itertools.product(range(module.num_experts), PROJECTIONS):
                source = layout.source(layer, expert, projection, module.intermediate_size)
                shape = layout.matrix_shape(projection, module.hidden_size, module.intermediate_size)
                targets.setdefault(source.tensor, []).append(_Weight(module, expert, projection, source, shape))
                if self.family.biases:
                    targets.setdefault(source.bias_tensor, []).append(_Bias(module, expert, projection, source, shape))
        where = f"checkpoint {next(iter(tensors.values())).file.parent}" if tensors else "checkpoint"
        _refuse(f"{where} lacks expert tensors", (name for name in targets if name not in tensors))
        _refuse(
            f"{where} holds expert tensors that this model has no place for (biases and scales have none)",
            (name for name in tensors if is_expert.match(name) and name not in targets and not _any(ignored, name)),
        )
        for name, parts in targets.items():
            for part in parts:
                part.check(tensors[name])
        return targets

    def load_experts(self) -> None:
        """Read each expert tensor once, in the order of the files, and pack it."""
        total = sum(self.reader.tensors[name].nbytes for name in self.targets)
        title = f"Packing experts ({self.settings.expert_format})"
        with self.reader, tqdm(total=total, desc=title, unit="B", unit_scale=True) as progress:
            for name, tensor in self.reader.read_in_file_order(list(self.targets)):
                for part in self.targets[name]:
                    try:
                        part.load(tensor)
                    except ValueError as error:
                        raise ValueError(f"{self.reader.tensors[name].file}: {name}: {error}") from error
                progress.update(tensor.nbytes)
        for module in self.experts.values():
            assert not module.layer.missing(), module.layer.missing()[:3]


@dataclass(frozen=True)
class _Target:
    """One projection of one expert: where it goes, where it lies, and `[out, in]` of the matrix it lies in."""

    module: KtftExperts
    expert: int
    projection: str
    source: ExpertSource
    shape: tuple[int, int]

    def check(self, entry: TensorEntry) -> None:
        raise NotImplementedError

    def load(self, tensor: Tensor) -> None:
        raise NotImplementedError

    def _stored(self, *shape: int) -> tuple[int, ...]:
        return shape if self.source.expert is None else (self.module.num_experts, *shape)


class _Weight(_Target):
    def check(self, entry: TensorEntry) -> None:
        either = self.source.transposed is None and entry.shape == self._stored(*self.shape[::-1])
        flipped = either or self.source.transposed
        _check_entry(entry, self._stored(*(self.shape[::-1] if flipped else self.shape)))

    def load(self, tensor: Tensor) -> None:
        self.module.layer.load(self.expert, self.projection, self.source.take(tensor, self.shape))


class _Bias(_Target):
    def check(self, entry: TensorEntry) -> None:
        _check_entry(entry, self._stored(self.shape[0]))

    def load(self, tensor: Tensor) -> None:
        self.module.layer.load_bias(self.expert, self.projection, self.source.take_bias(tensor))


def swap_experts(model: nn.Module, family: Family, settings: Settings) -> dict[int, KtftExperts]:
    """Put an empty `KtftExperts` in place of every stacked experts module. Returns them by layer number.

    Raises:
        ValueError: the model has no such module, or an activation or dims that the kernels cannot take.
    """
    config: Any = model.config
    swiglu = family.activation(config.get_text_config())
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
            swiglu=swiglu,
            biases=family.biases,
        )
        experts[number] = KtftExperts(layer, family, settings.activation)
        model.set_submodule(name, experts[number])
    return experts


def _prediction_layers(config: PreTrainedConfig) -> list[str]:
    """Names of the layers after the last, which predict several tokens ahead and which transformers leaves out."""
    text = config.get_text_config()
    first = text.num_hidden_layers
    return [rf"\.layers\.{n}\." for n in range(first, first + (getattr(text, "num_nextn_predict_layers", 0) or 0))]


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
    renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
    others = [name for name in checkpoint.tensors if not is_expert.match(name)]
    found = {rename_source_key(name, renamings, [])[0]: checkpoint.tensors[name] for name in others}
    _refuse("the checkpoint lacks tensors that the model needs", required - found.keys())
    allowed = [*ignored, r"rotary_emb\.inv_freq"]
    _refuse(
        "the checkpoint holds tensors that the model has no place for",
        (
            entry.name
            for name, entry in found.items()
            if name.startswith(backbone) and name not in expected and not _any(allowed, name)
        ),
    )
    for name in required:
        _check_entry(found[name], tuple(expected[name].shape))


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

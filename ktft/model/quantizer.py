"""transformers' quantizer "ktft": `from_pretrained` loads all but the routed experts, then packs these from disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.fsdp import is_fsdp_enabled
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ktft import hosts
from ktft.config import SETTINGS, SHARED_OUTER, Settings, unknown_key
from ktft.device import accelerator
from ktft.lanes.decide.placer import usable_placement
from ktft.lora import NOT_SHARED
from ktft.model.dense_linears import fitting
from ktft.model.experts import find_experts
from ktft.model.gpu_memory import hold_gpu_memory, require_gpu_memory
from ktft.model.load_plan import LoadPlan, check_memory, dense_bytes_of, has_gpu, is_on_cpu
from ktft.model.tensor_parallel import asked_tp_size, check_versions, take_over
from ktft.ranks.launch import Launch

logger = logging.getLogger(__name__)

_ASYNC_LOAD = "HF_DEACTIVATE_ASYNC_LOAD"


@register_quantization_config("ktft")
class KtftConfig(QuantizationConfigMixin):
    """The `quantization_config` to pass to `from_pretrained`.

    Arguments that are not listed here are those of `ktft.config.Settings`.

    Args:
        reserve_bytes: memory that must be left once the model is loaded, for example for training, in all or by
            purpose; a model that leaves less is refused.
        part: a range (first, end), for example (32, 64): the process reads, packs, computes, trains and saves only
            these experts of every layer, without `end`; a layer's output is then their part of the sum. By default
            processes that torchrun started share the experts, each a part of every layer's, and all get whole sums.

    Raises:
        ValueError: an argument is unknown (the message names the nearest valid one), or its value is not accepted.
    """

    def __init__(
        self,
        expert_format: str | None = Settings.expert_format,
        threads: int | None = Settings.threads,
        numa_nodes: int | None = Settings.numa_nodes,
        activation: str = Settings.activation,
        expert_checkpoint: str | None = Settings.expert_checkpoint,
        verify_checksums: bool = Settings.verify_checksums,
        isa: str | None = Settings.isa,
        placement: str = Settings.placement,
        gpu_expert_memory: int | str | None = Settings.gpu_expert_memory,
        micro_batches_together: int | str = Settings.micro_batches_together,
        cuda_graphs: bool = Settings.cuda_graphs,
        gpu_activation_memory: int | str = Settings.gpu_activation_memory,
        expert_routing: str | None = Settings.expert_routing,
        expert_lora: str | None = Settings.expert_lora,
        dense_format: str | None = Settings.dense_format,
        dense_placement: str = Settings.dense_placement,
        gpu_memory: int | str | None = Settings.gpu_memory,
        reserve_bytes: int | Mapping[str, int] = 0,
        part: Sequence[int] | None = None,
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
        self.verify_checksums = verify_checksums
        self.isa = isa
        self.placement = placement
        self.gpu_expert_memory = gpu_expert_memory
        self.micro_batches_together = micro_batches_together
        self.cuda_graphs = cuda_graphs
        self.gpu_activation_memory = gpu_activation_memory
        self.expert_routing = expert_routing
        self.expert_lora = expert_lora
        self.dense_format = dense_format
        self.dense_placement = dense_placement
        self.gpu_memory = gpu_memory
        self.reserve_bytes = reserve_bytes
        self.part = None if part is None else (int(part[0]), int(part[1]))
        _ = self.settings  # checks the values
        hosts.install_for_models()  # now, because transformers merges configurations before it makes a quantizer

    @property
    def settings(self) -> Settings:
        return Settings(**{name: getattr(self, name) for name in SETTINGS})

    @classmethod
    def from_settings(cls, settings: Settings, reserve_bytes: int | Mapping[str, int] = 0) -> KtftConfig:
        return cls(**{name: getattr(settings, name) for name in SETTINGS}, reserve_bytes=reserve_bytes)


def check_flash_attention(asked: str) -> None:
    """Refuse FlashAttention if the installed transformers cannot run it on a model without attention sinks.

    transformers 5.6.0 casts the sinks without checking whether there are any. The function itself is tried, since
    other releases are accepted too.

    Raises:
        ValueError: the setting that asks for FlashAttention, which `asked` describes for the message, cannot work.
    """
    rows = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    module = SimpleNamespace(is_causal=True, config=SimpleNamespace(_attn_implementation="flash_attention_2"))
    try:
        flash_attention_forward(module, rows, rows, rows, None)  # type: ignore[arg-type]
    except Exception as error:  # others: a GPU or a package is missing, which is not what is checked here
        if isinstance(error, AttributeError) and "'NoneType' object has no attribute 'to'" in str(error):
            raise ValueError(
                f"{asked} cannot work with transformers {transformers.__version__}: its flash attention fails in every "
                "layer without attention sinks ('NoneType' object has no attribute 'to'); run pip install "
                "transformers==5.5.4, or use torch's attention, in LLaMA-Factory flash_attn: sdpa, in from_pretrained "
                'attn_implementation="sdpa"'
            ) from None


def configure(config: PreTrainedConfig, settings: Settings, reserve_bytes: int | Mapping[str, int] = 0) -> None:
    """Make `from_pretrained(config=config)` load the routed experts with ktft.

    The checkpoint's own quantization is read from its config.json, so `config` need not keep it.
    """
    config.quantization_config = KtftConfig.from_settings(settings, reserve_bytes).to_dict()


def prefer_ktft(original: Callable[..., Any], cls: type, own: Any, given: Any) -> Any:
    """Let ktft's `quantization_config` replace the checkpoint's own method.

    transformers refuses one beside the checkpoint's own, but ktft reads checkpoints with that method.
    """
    return given if isinstance(given, KtftConfig) else original(cls, own, given)


@register_quantizer("ktft")
class KtftHfQuantizer(HfQuantizer):
    """Replaces the experts modules while the model is on the meta device, and fills them after all else is loaded."""

    quantization_config: KtftConfig
    _plan: LoadPlan | None = None
    _reads_alone = False  # whether this object told transformers to read weights one by one

    @property
    def is_trainable(self) -> bool:
        """True: LoRA can be trained on top of the model."""
        return True

    def is_serializable(self) -> bool:
        """False: only adapters can be saved."""
        logger.warning(
            "routed experts live outside of the model's parameters, so the model cannot be saved as a whole; save the "
            "adapter (the peft model's save_pretrained), the base weights are unchanged"
        )
        return False

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse settings that this release does not support, before anything is loaded."""
        if is_deepspeed_zero3_enabled():
            raise ValueError(
                "ktft does not run under DeepSpeed ZeRO-3 in this release; remove it from the configuration"
            )
        if is_fsdp_enabled():  # then rank 0 alone would load, and the others would get what FSDP1 sends them
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
            logger.info("every process loads the weights around its experts: cpu_ram_efficient_loading is off")
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("device_map puts modules on disk, which ktft cannot do; give a device_map without 'disk'")
        settings, launch = self.quantization_config.settings, Launch.of_environment()
        usable_placement(settings, cuda=has_gpu())
        if settings.expert_lora == SHARED_OUTER and launch.ranks > 1 and self.quantization_config.part is None:
            raise ValueError(NOT_SHARED.format(f"{launch.ranks} processes share the experts"))

    def update_tp_plan(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Drop the experts' entries: the module returns complete outputs, which the plan would reduce once more."""
        for each in {id(c): c for c in (config, config.get_text_config())}.values():
            for name in ("base_model_tp_plan", "base_model_ep_plan"):
                plan = getattr(each, name, None)
                if plan:
                    setattr(each, name, {key: value for key, value in plan.items() if ".experts" not in key})
        return config

    def update_parallel_plan(self, model: PreTrainedModel, plan: dict[str, str]) -> None:
        """The same for later transformers, whose plans belong to the model."""
        for key in [key for key in plan if ".experts" in key]:
            del plan[key]

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        implementation = model.config._attn_implementation or ""
        if implementation.startswith("flash_attention") and not any("sinks" in n for n, _ in model.named_parameters()):
            check_flash_attention(f"attn_implementation {implementation!r}")
        given = self.quantization_config
        tp_size = asked_tp_size(model, given.part)
        settings, files, gpu = given.settings, checkpoint_files or [], accelerator()
        if tp_size == 1 and not is_fsdp_enabled():
            free = gpu.free_bytes() if gpu is not None else None
            settings = fitting(settings, model, files, free[0] if free else None)
        self._plan = LoadPlan(model, files, settings, given.part)
        for module in find_experts(model).values():
            module.tp_size = tp_size
        check_memory(model, self._plan, given.reserve_bytes, kwargs.get("device_map"))
        if self._plan.backbone.dense is not None and (tp_size > 1 or is_fsdp_enabled()):
            raise ValueError(
                f"dense_format {given.dense_format!r} and dense_placement {given.dense_placement!r} do not work "
                "with tensor parallelism or FSDP, which divide weights; leave both out of kt_config"
            )
        weights = dense_bytes_of(model, self._plan)
        hold_gpu_memory(given.settings.gpu_memory, weights)
        if not is_on_cpu(kwargs.get("device_map")) and tp_size == 1 and not is_fsdp_enabled():
            require_gpu_memory(weights)
        if self._plan.backbone.conversions():
            if tp_size > 1:
                raise ValueError(
                    "the checkpoint's attention is quantized, and tensor parallelism would divide its weights apart "
                    "from their scales; give a checkpoint in bf16, or leave distributed_config out"
                )
            self.pre_quantized = True  # otherwise transformers casts integers and scales to the model's dtype
        # Threads would read weights to the GPU faster than they are packed. Last, because what comes before may refuse
        if self._plan.backbone.dense is not None and _ASYNC_LOAD not in os.environ:
            os.environ[_ASYNC_LOAD], self._reads_alone = "1", True

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Whether what is read has another shape than the model's weight: its packed bytes."""
        return self._plan is not None and self._plan.backbone.packs(param_name)

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        """Bytes of GPU memory that a value will take. transformers reserves so much before it reads weights."""
        nbytes = None if self._plan is None else self._plan.backbone.packed_bytes(param_name)
        return param.element_size() if nbytes is None else nbytes / param.numel()

    def get_weight_conversions(self) -> list[WeightConverter | WeightRenaming]:
        """The conversions that dequantize the weights around the experts."""
        return [] if self._plan is None else self._plan.backbone.conversions()

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        assert self._plan is not None
        check_versions(getattr(model, "_tp_size", None) or 1)  # earlier versions tell it no sooner
        take_over(model)
        self._plan.backbone.finish(model)
        if self._plan.backbone.dense is not None:
            self._plan.backbone.dense.finish()
        if self._reads_alone:
            del os.environ[_ASYNC_LOAD]
        self._plan.load_experts()
        self._plan = None
        return model

"""transformers' quantizer "ktft": `from_pretrained` loads all but the routed experts, then packs these from disk."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.fsdp import is_fsdp_enabled
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.logging import tqdm
from transformers.utils.quantization_config import QuantizationConfigMixin

from ktft import hosts, native
from ktft.checkpoint.cache import PackedCache
from ktft.checkpoint.families import Family
from ktft.checkpoint.gguf_source import GgufReader, gguf_plan
from ktft.checkpoint.load import ExpertPlan, any_match
from ktft.checkpoint.reader import CheckpointReader
from ktft.checkpoint.routing_profile import Routing
from ktft.checkpoint.schemes import IGNORED
from ktft.config import DEFAULT_EXPERT_FORMAT, SETTINGS, SHARED_OUTER, Settings, emulate_gpu, unknown_key
from ktft.device import accelerator, accelerators
from ktft.held import HeldExperts
from ktft.lanes.decide.placer import usable_placement
from ktft.lanes.lanes import Lanes
from ktft.lora import NOT_SHARED
from ktft.model.backbone import Backbone
from ktft.model.calls import call_usually
from ktft.model.dense_linears import dense_weights
from ktft.model.experts import KtftExperts, expert_modules, find_experts
from ktft.model.generic import family_of
from ktft.model.meta import meta_model
from ktft.model.norms import fuse_norms
from ktft.model.rotary import fuse_rotary
from ktft.model.shared import shared_ahead
from ktft.model.shortage import PACKED, WEIGHTS, require_memory
from ktft.model.tensor_parallel import asked_tp_size, check_versions, take_over
from ktft.ranks.cores import keep_to_own_cores
from ktft.ranks.launch import Launch
from ktft.ranks.watch import begin
from ktft.sources import is_gguf

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
        usable_placement(settings, cuda=_has_gpu())
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
        self._plan = LoadPlan(model, checkpoint_files or [], given.settings, given.part)
        for module in find_experts(model).values():
            module.tp_size = tp_size
        check_memory(model, self._plan, given.reserve_bytes, kwargs.get("device_map"))
        if self._plan.backbone.dense is not None:
            if tp_size > 1 or is_fsdp_enabled():
                raise ValueError(
                    f"dense_format {given.dense_format!r} and dense_placement {given.dense_placement!r} do not work "
                    "with tensor parallelism or FSDP, which divide weights; leave both out of kt_config"
                )
            if _ASYNC_LOAD not in os.environ:  # threads would read weights to the GPU faster than they are packed
                os.environ[_ASYNC_LOAD], self._reads_alone = "1", True
        if self._plan.backbone.conversions():
            if tp_size > 1:
                raise ValueError(
                    "the checkpoint's attention is quantized, and tensor parallelism would divide its weights apart "
                    "from their scales; give a checkpoint in bf16, or leave distributed_config out"
                )
            self.pre_quantized = True  # otherwise transformers casts integers and scales to the model's dtype

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        """Whether what is read has another shape than the model's weight: its packed bytes."""
        return self._plan is not None and self._plan.backbone.packs(param_name)

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


def check_memory(
    model: PreTrainedModel, plan: LoadPlan, reserve_bytes: int | Mapping[str, int], device_map: Any
) -> None:
    """Refuse a model that does not fit in memory, before its weights are read.

    Raises:
        ValueError: the model does not fit; the message says how much memory it needs and how much there is.
    """
    places = device_map.values() if isinstance(device_map, dict) else [device_map or "cpu"]
    reserve = {"reserve_bytes": reserve_bytes} if isinstance(reserve_bytes, int) else reserve_bytes
    causes = {PACKED: sum(layer.packed_bytes for layer in plan.layers.values())} | dict(reserve)
    if all(str(place) == "cpu" for place in places):
        causes[WEIGHTS] = sum(tensor.nbytes for tensor in model.state_dict().values())
    what = f"the model in expert_format {plan.expert_format}"
    what = f"{what} and training" if reserve_bytes else what
    if (processes := Launch.of_environment().local_ranks) > 1:  # they load at the same time
        what, causes = f"{what}, in {processes} processes,", {name: size * processes for name, size in causes.items()}
    require_memory(what, causes)


class LoadPlan:
    """The destination of each tensor of the checkpoint, determined from headers alone before any weight is read."""

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint_files: list[str],
        settings: Settings,
        part: tuple[int, int] | None = None,
    ) -> None:
        self.family, self.model_type = family_of(model), model.config.model_type
        self.checkpoint = checkpoint = CheckpointReader(checkpoint_files)
        place = Path(settings.expert_checkpoint or checkpoint.directory)
        gguf = GgufReader(place) if settings.expert_checkpoint is not None and is_gguf(place) else None
        # The converted checkpoint that the experts come from; None if they come from an ordinary one
        packed = PackedCache.find(place, settings.verify_checksums) if gguf is None else None
        if packed is not None:
            settings = replace(settings, expert_format=packed.check_format(settings.expert_format))
        elif gguf is not None:
            settings = replace(settings, expert_format=settings.expert_format or gguf.expert_format)
        experts = swap_experts(model, self.family, settings, part)
        self.layers = {number: module.layer for number, module in experts.items()}
        if packed is not None:
            packed.check_model(self.model_type, self.layers)
            packed.check_source(checkpoint.files)
        ignored = [*(model._keys_to_ignore_on_load_unexpected or []), *_prediction_layers(model.config)]
        ignored += _zero_experts(self.layers)
        self._ignored = ignored
        self.backbone = Backbone(model, checkpoint, self.family.expert_pattern(), ignored)
        runtime = next(iter(self.layers.values())).runtime
        self.backbone.dense = dense_weights(model, self.backbone, settings, find_experts(model), runtime)
        self.experts: ExpertPlan | PackedCache
        if packed is not None:
            self.experts, doing = packed, "Loading packed"
        elif gguf is not None:
            num_layers = model.config.get_text_config().num_hidden_layers
            self.experts, doing = gguf_plan(gguf, self.family, self.layers, num_layers), "Packing GGUF"
        else:
            source = checkpoint
            if settings.expert_checkpoint is not None:
                source = CheckpointReader.from_directory(settings.expert_checkpoint)
            self.experts, doing = ExpertPlan(source, self.family, self.layers, ignored), "Packing"
        self.expert_format = settings.expert_format or DEFAULT_EXPERT_FORMAT
        self.title = f"{doing} experts ({self.expert_format})"
        # Set on the instance, since the class is shared with stock models. transformers sees the experts' fused names.
        # A set since transformers 5.17
        kind = set if isinstance(model._keys_to_ignore_on_load_unexpected, set) else list
        model._keys_to_ignore_on_load_unexpected = kind([*ignored, r"\.experts\.", IGNORED.pattern])

    def replaced(self) -> set[str]:
        """The names of the checkpoint's own tensors of experts, in whose place others come with `expert_checkpoint`."""
        is_expert = self.family.expert_pattern()
        return {
            name for name in self.checkpoint.tensors if is_expert.match(name) and not any_match(self._ignored, name)
        }

    def load_experts(self) -> None:
        """Read each expert weight once, in file order, and pack it unless it is already packed."""
        share = next(iter(self.layers.values())).held.share
        total = self.experts.nbytes(share) if isinstance(self.experts, PackedCache) else self.experts.nbytes()
        with tqdm(total=total, desc=self.title, unit="B", unit_scale=True) as progress:
            for nbytes in self.experts.load(self.layers):
                progress.update(nbytes)


def swap_experts(
    model: nn.Module, family: Family, settings: Settings, part: tuple[int, int] | None = None
) -> dict[int, KtftExperts]:
    """Replace every stacked experts module by an empty `KtftExperts`. Returns these by layer number.

    Args:
        model: on the meta device.
        part: the range (first, end) of the experts of each layer that this process holds, without `end`; by default
            all of them, or this rank's share if processes train together.

    Raises:
        ValueError: the model has no such module, or the kernels do not support its activation or dimensions.
    """
    config, found = cast(Any, model.config).get_text_config(), expert_modules(model, family)
    swiglus = {number: family.activation(config, number) for number, *_ in found}
    launch = Launch.of_environment() if part is None else Launch()
    if launch.ranks > 1:
        begin()
        keep_to_own_cores(launch, [gpu.bus_id() for gpu in accelerators()])
    lanes = Lanes(settings, on_cpu=emulate_gpu()) if _has_gpu() else None
    threads = settings.threads
    if threads is None and lanes is not None:
        cores = native.topology()["cores"]
        threads = max(cores - max(cores // 8, 1), 1)  # the remaining cores launch work on the GPU
    native.check_machine(settings.threads, settings.numa_nodes)
    runtime = native.runtime(threads, settings.numa_nodes, settings.isa)
    experts: dict[int, KtftExperts] = {}
    held = _shares({number: sizes[0] for number, _, sizes in found}, settings, launch, part)
    zero = family.zero_experts_of(cast(Any, model.config).get_text_config())
    for number, name, (num_experts, hidden_size, intermediate_size) in found:
        layer = native.ExpertLayer(
            runtime,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            format=settings.expert_format or DEFAULT_EXPERT_FORMAT,
            name=name,
            swiglu=swiglus[number],
            biases=family.biases,
            held=replace(held[number], zero=zero),
        )
        experts[number] = KtftExperts(layer, family, settings.activation)
        experts[number].number = number if launch.ranks > 1 else None
        experts[number].together = settings.micro_batches_together
        experts[number].cuda_graphs = settings.cuda_graphs
        experts[number].expert_lora = settings.expert_lora
        block = model.get_submodule(name.rpartition(".")[0])
        if lanes is not None:
            # Another call gives the experts other rows than the shared experts get
            names = family.shared_experts if family.call is None else ()
            experts[number].run_in(lanes, number, shared_ahead(block, names, hidden_size))
        model.set_submodule(name, experts[number])
        call_usually(block, family)
        if not block._non_persistent_buffers_set:  # transformers would initialize stock experts through their block
            block._is_hf_initialized = True  # type: ignore[assignment]
    if lanes is not None:
        fuse_norms(model)
        fuse_rotary(model)
    return experts


def _shares(
    num_experts: Mapping[int, int], settings: Settings, launch: Launch, part: tuple[int, int] | None
) -> dict[int, HeldExperts]:
    """The experts of each layer that this process holds."""
    if launch.ranks == 1:
        return {number: HeldExperts.of(count, part) for number, count in num_experts.items()}
    tokens: Mapping[int, Sequence[int]] = {number: [0] * count for number, count in num_experts.items()}
    if settings.expert_routing is not None:
        routing = Routing.load(Path(settings.expert_routing))
        routing.check(num_experts, settings.expert_routing)
        tokens = routing.tokens
    return {number: HeldExperts.balanced(tokens[number], launch.rank, launch.ranks) for number in num_experts}


def _has_gpu() -> bool:
    return accelerator() is not None or emulate_gpu()


def outline(directory: str | os.PathLike[str], settings: Settings) -> LoadPlan:
    """Compare a checkpoint with its config as a load does, reading only headers. The returned plan's layers are empty.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: the model is not supported; shards are damaged; a tensor is missing or unexpected, or has a wrong
            shape or dtype.
    """
    files = CheckpointReader.from_directory(directory).files
    model = meta_model(AutoConfig.from_pretrained(directory))
    return LoadPlan(model, [str(file) for file in files], settings)


def _zero_experts(layers: Mapping[int, native.ExpertLayer]) -> list[str]:
    """Patterns of the names of experts without weights, which in transformers have gates and ups that nothing reads."""
    held = next(iter(layers.values())).held
    numbers = "|".join(map(str, range(held.num_experts, held.num_experts + held.zero)))
    return [rf"\.experts\.(?:{numbers})\."] if numbers else []


def _prediction_layers(config: PreTrainedConfig) -> list[str]:
    """Patterns of the names of the layers for multi-token prediction, after the last; transformers leaves them out."""
    text = config.get_text_config()
    first = text.num_hidden_layers
    return [rf"\.layers\.{n}\." for n in range(first, first + (getattr(text, "num_nextn_predict_layers", 0) or 0))]

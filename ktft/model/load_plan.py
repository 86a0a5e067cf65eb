"""What a load does with each tensor of a checkpoint, determined from headers before any weight is read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import tqdm

from ktft import native
from ktft.checkpoint.cache import PackedCache
from ktft.checkpoint.families import Family
from ktft.checkpoint.gguf_source import GgufReader, gguf_plan
from ktft.checkpoint.load import ExpertPlan, any_match
from ktft.checkpoint.reader import CheckpointReader
from ktft.checkpoint.routing_profile import Routing
from ktft.checkpoint.schemes import IGNORED
from ktft.config import DEFAULT_EXPERT_FORMAT, Settings, emulate_gpu
from ktft.device import accelerator, accelerators
from ktft.held import HeldExperts
from ktft.lanes.lanes import Lanes
from ktft.model.backbone import Backbone
from ktft.model.calls import call_usually
from ktft.model.dense_linears import dense_weights
from ktft.model.experts import KtftExperts, expert_modules, find_experts
from ktft.model.generic import family_of
from ktft.model.meta import meta_model
from ktft.model.norms import fuse_norms
from ktft.model.prediction import COUNT, patterns, prediction_layers
from ktft.model.rotary import fuse_rotary
from ktft.model.shared import shared_ahead
from ktft.model.shortage import PACKED, WEIGHTS, require_memory
from ktft.model.sinks import fuse_sinks
from ktft.ranks.cores import keep_to_own_cores
from ktft.ranks.launch import Launch
from ktft.ranks.watch import begin
from ktft.sources import is_gguf


def check_memory(
    model: PreTrainedModel, plan: LoadPlan, reserve_bytes: int | Mapping[str, int], device_map: Any, saved: int = 0
) -> None:
    """Refuse a model that does not fit in memory, before its weights are read.

    Args:
        saved: bytes that weights around the experts will need less, since they are packed once they are read.

    Raises:
        ValueError: the model does not fit; the message says how much memory it needs and how much there is.
    """
    reserve = {"reserve_bytes": reserve_bytes} if isinstance(reserve_bytes, int) else reserve_bytes
    causes = {PACKED: sum(layer.packed_bytes for layer in plan.layers.values())} | dict(reserve)
    on_host = plan.backbone.dense.host_bytes if plan.backbone.dense is not None else 0
    causes[WEIGHTS] = max(causes.get(WEIGHTS, 0), on_host)
    if is_on_cpu(device_map):
        causes[WEIGHTS] += dense_bytes_of(model, plan) - saved
    what = f"the model in expert_format {plan.expert_format}"
    what = f"{what} and training" if reserve_bytes else what
    if (processes := Launch.of_environment().local_ranks) > 1:  # they load at the same time
        what, causes = f"{what}, in {processes} processes,", {name: size * processes for name, size in causes.items()}
    require_memory(what, causes)


def is_on_cpu(device_map: Any) -> bool:
    """Whether a model of this `device_map` is loaded into host memory."""
    places = device_map.values() if isinstance(device_map, dict) else [device_map or "cpu"]
    return all(str(place) == "cpu" for place in places)


def dense_bytes_of(model: nn.Module, plan: LoadPlan) -> int:
    """Bytes of the weights outside the routed experts where products take them."""
    before = sum(tensor.nbytes for tensor in model.state_dict().values())
    return before - (plan.backbone.dense.saved_bytes if plan.backbone.dense is not None else 0)


class LoadPlan:
    """The destination of each tensor of the checkpoint, determined from headers alone before any weight is read.

    Attributes:
        layers: layer number -> its experts.
        experts: where they come from.
        prediction: where those of prediction layers come from, of `ktft.model.prediction`: the model's own checkpoint,
            in which a conversion leaves them as they were.
    """

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
        further = prediction_layers(model.config)
        own = {number: layer for number, layer in self.layers.items() if number not in further}
        if packed is not None:
            packed.check_model(self.model_type, own)
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
            num_layers = model.config.get_text_config().num_hidden_layers - len(further)
            self.experts, doing = gguf_plan(gguf, self.family, own, num_layers), "Packing GGUF"
        else:
            source = checkpoint
            if settings.expert_checkpoint is not None:
                source = CheckpointReader.from_directory(settings.expert_checkpoint)
            self.experts, doing = ExpertPlan(source, self.family, own, [*ignored, *patterns(further)]), "Packing"
        self.prediction: ExpertPlan | None = None
        if further:
            others = {number: self.layers[number] for number in further}
            self.prediction = ExpertPlan(checkpoint, self.family, others, [*ignored, *patterns(range(further[0]))])
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
    lanes = Lanes(settings, on_cpu=emulate_gpu()) if has_gpu() else None
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
        experts[number].gpu_activation_memory = settings.gpu_activation_memory
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
    if lanes is None:
        fuse_norms(model, partial(native.runtime, threads, settings.numa_nodes, settings.isa))
    else:
        fuse_norms(model)
        fuse_rotary(model)
        fuse_sinks(model)
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


def has_gpu() -> bool:
    return accelerator() is not None or emulate_gpu()


def outline(directory: str | os.PathLike[str], settings: Settings, config: PreTrainedConfig | None = None) -> LoadPlan:
    """Compare a checkpoint with its config as a load does, reading only headers. The returned plan's layers are empty.

    `config` takes the place of the checkpoint's own.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: the model is not supported; shards are damaged; a tensor is missing or unexpected, or has a wrong
            shape or dtype.
    """
    files = CheckpointReader.from_directory(directory).files
    model = meta_model(config or AutoConfig.from_pretrained(directory))
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
    return patterns(range(first, first + (getattr(text, COUNT, 0) or 0)))

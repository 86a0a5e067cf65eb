"""LoRA on one layer's routed experts: stacked parameters that live on the CPU beside the experts' weights."""

from __future__ import annotations

import itertools
import math
import operator
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from ktft.adapters.shared import Spreads, is_shared
from ktft.config import PER_EXPERT, PROJECTIONS
from ktft.late import settle
from ktft.lora import MAX_RANK, ExpertLora, LoraPair
from ktft.model.experts import KtftExperts

KINDS = ("lora_A", "lora_B")

UNSUPPORTED = {
    "use_dora": "DoRA",
    "use_qalora": "QA-LoRA",
    "use_alora": "activated LoRA",
    "lora_bias": "a LoRA bias",
    "fan_in_fan_out": "fan_in_fan_out",
    "arrow_config": "Arrow routing",
    "layer_replication": "replication of layers",
    "use_bdlora": "block-diagonal LoRA",
    "kasa_config": "KaSA",
    "lora_ga_config": "LoRA-GA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
}
"""PEFT's LoRA options that expert LoRA does not have, with their common names."""

UNMERGED = (
    "ktft keeps adapters unmerged in memory, because its experts are quantized there: write a merged checkpoint with "
    "ktft merge BASE ADAPTER OUT, or load the adapter beside the base model with ktft.load_adapter(model, path), in "
    "LLaMA-Factory with use_kt: true and adapter_name_or_path"
)

EXPERT_TENSOR = re.compile(rf"(\.(?:\d+|experts)\.(?:{'|'.join(PROJECTIONS)})\.lora_[AB])(\.weight)$")
"""The end of the standard name of one expert's LoRA, or of what all experts share, in two parts: the adapter's name
stands between them."""

_ALL = -1  # in place of an expert's number: all of them
_EXPERT_KEY = re.compile(rf"(?:(\d+)\.)?({'|'.join(PROJECTIONS)})\.lora_([AB])\.([^.]+)\.weight")


@dataclass(frozen=True)
class Rank:
    """Rank and alpha of one projection's adapter."""

    r: int
    alpha: float

    def scaling(self, rslora: bool) -> float:
        """alpha / r, or alpha / sqrt(r) for rank-stabilized LoRA."""
        return self.alpha / (math.sqrt(self.r) if rslora else self.r)


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse the PEFT LoRA options that routed experts do not have."""
    for option, what in UNSUPPORTED.items():
        if options.get(option):
            raise ValueError(f"{what} on routed experts is not supported by ktft; leave {option} out")
    if (init := options.get("init_lora_weights", True)) not in (True, False, "gaussian"):
        raise ValueError(
            f"init_lora_weights={init!r} needs the experts' full weights, which ktft keeps quantized; "
            "use True, False or 'gaussian'"
        )


class CpuParameters(nn.ParameterDict):
    """Parameters that follow a model's casts but not its moves: `model.to("cuda", torch.bfloat16)` casts them only."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CpuParameters:
        def on_cpu(tensor: Tensor) -> Tensor:
            probe = fn(tensor.new_empty(0))  # what fn would do, without copying the tensor to a GPU and back
            if probe.device == tensor.device:
                return fn(tensor)
            if tensor.is_meta:
                return torch.empty_like(tensor, device="cpu", dtype=probe.dtype)
            return tensor.to(probe.dtype)

        return super()._apply(on_cpu, recurse)


@dataclass
class _KnownPairs:
    """What a layer's active LoRA is, as long as it has the same adapters, scalings and parameters."""

    key: object
    parameters: list[Tensor]
    pairs: dict[str, LoraPair]

    def are_of(self, parameters: list[Tensor]) -> bool:
        """Whether these are the parameters, and still in CPU memory."""
        same = len(parameters) == len(self.parameters) and all(map(operator.is_, parameters, self.parameters))
        return same and all(each.is_cpu for each in parameters)


class KtftExpertsLora(nn.Module, LoraLayer):
    """PEFT's layer around `KtftExperts`: LoRA on every routed expert of one MoE layer.

    For each adapter and targeted projection it holds `lora_A.<adapter>.<projection>` `[E, r, in]` and `lora_B...`
    `[E, out, r]`, where E counts the experts that the process holds. They are fp32 unless cast, and always on the CPU.
    On disk each expert has its standard name, `<expert>.<projection>.lora_A.weight`, which `load_state_dict` accepts.
    What all experts share is `[1, ...]` here and on disk; see `ktft.adapters.shared`.

    `ranks` and `form` are the first adapter's: ranks by projection, and one of `EXPERT_LORA`; `kwargs` are PEFT's LoRA
    options, which `check_options` may refuse.

    Attributes:
        forms: adapter -> one of `EXPERT_LORA`.
        whole: (`lora_A` or `lora_B`, adapter, projection) -> the stack of all experts, while `gathered` has it.
    """

    def __init__(
        self,
        base_layer: KtftExperts,
        adapter_name: str,
        ranks: dict[str, Rank],
        form: str = PER_EXPERT,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        with warnings.catch_warnings():  # PEFT remarks that it does not know the type
            warnings.simplefilter("ignore", UserWarning)
            LoraLayer.__init__(self, base_layer)
        self.ranks, self.forms = {adapter_name: ranks}, {adapter_name: form}
        self._spreads = Spreads()
        self._known_pairs: _KnownPairs | None = None
        self.whole: dict[tuple[str, str, str], Tensor] = {}
        self._active_adapter = [adapter_name]
        self.update_layer(adapter_name, **kwargs)
        self.register_load_state_dict_pre_hook(_stack_experts)
        self.register_state_dict_pre_hook(lambda *_: settle())

    @property
    def experts(self) -> KtftExperts:
        """The layer that this one wraps."""
        experts = self.get_base_layer()
        assert isinstance(experts, KtftExperts)
        return experts

    def update_layer(  # type: ignore[override]  # peft 0.18 gives the options one by one, later ones the configuration
        self, adapter_name: str, r: int, lora_alpha: float, config: LoraConfig | None = None, **options: Any
    ) -> None:
        """Add the adapter whose ranks are in `self.ranks[adapter_name]`. PEFT calls this; see `LoraConfig`."""
        options |= vars(config) if config is not None else {}
        check_options(options)
        if adapter_name not in self.ranks:
            raise ValueError(
                f"adapter {adapter_name!r} reached the routed experts through plain peft; add adapters with "
                "ktft.get_peft_model or ktft.load_adapter"
            )
        use_rslora, init_lora_weights = options.get("use_rslora", False), options.get("init_lora_weights", True)
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.use_rslora[adapter_name] = use_rslora
        self.scaling[adapter_name] = Rank(r, lora_alpha).scaling(use_rslora)
        self.lora_dropout[adapter_name] = nn.Dropout(options.get("lora_dropout", 0.0))
        self.lora_A[adapter_name], self.lora_B[adapter_name] = CpuParameters(), CpuParameters()
        for projection, rank in self.ranks[adapter_name].items():
            self._add_pair(adapter_name, projection, rank.r, init_lora_weights)
        self.set_adapter(self.active_adapters, inference_mode=options.get("inference_mode", False))

    def _add_pair(self, adapter_name: str, projection: str, r: int, init: bool | str) -> None:
        base = self.experts
        wide, narrow = base.hidden_size, base.intermediate_size
        fan_in, fan_out = (narrow, wide) if projection == "down_proj" else (wide, narrow)
        shared = [self.is_shared(kind, adapter_name, projection) for kind in KINDS]
        of_a, of_b = (1 if each else base.num_experts for each in shared)
        a = nn.Parameter(torch.empty(of_a, r, fan_in, dtype=torch.float32, device="cpu"))
        b = nn.Parameter(torch.zeros(of_b, fan_out, r, dtype=torch.float32, device="cpu"))
        drawn = (self._drawn(each.data, one) for each, one in zip((a, b), shared, strict=True))
        for expert_a, expert_b in itertools.zip_longest(*drawn):
            if expert_a is not None and init == "gaussian":
                nn.init.normal_(expert_a, std=1 / r)
            elif expert_a is not None:
                nn.init.kaiming_uniform_(expert_a, a=math.sqrt(5))
            if expert_b is not None and init is False:
                nn.init.kaiming_uniform_(expert_b, a=math.sqrt(5))
        for kind, parameter in zip(KINDS, (a, b), strict=True):
            self.stacked(kind, adapter_name)[projection] = parameter

    def _drawn(self, stack: Tensor, shared: bool) -> Iterator[Tensor]:
        """Yield the matrices that get values, one by one, in the order in which these are drawn.

        Values are drawn for experts elsewhere too, so that those here do not depend on who holds the others.
        """
        if shared:
            yield stack[0]
            return
        held, spare = self.experts.held, torch.empty_like(stack[0])
        for number in range(held.num_experts):
            place = held.places.get(number)
            yield spare if place is None else stack[place]

    def is_shared(self, kind: str, adapter_name: str, projection: str) -> bool:
        """Whether an adapter's `lora_A` or `lora_B` of a projection is one matrix for all experts."""
        return is_shared(self.forms[adapter_name], projection, kind)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The experts' forward with the active adapter, if one is active and adapters are not disabled."""
        return self.experts(hidden_states, top_k_index, top_k_weights, lora=self.active_lora(top_k_index.shape[-1]))

    def active_lora(self, top_k: int = 1) -> ExpertLora | None:
        """The LoRA that the experts apply now. Draws a dropout seed from torch's CPU generator if dropout is on.

        Recomputation under checkpointing restores that generator, so that it applies the same dropout again. A step of
        several micro-batches has one seed instead, so that its order does not change the masks. Raises ValueError if
        active adapters cannot be applied together, or something moved the parameters off the CPU.
        """
        names = self.applied()
        if self.disable_adapters or not names:
            return None
        self.check_together(names, self.training)
        dropout = self._dropout(names[0]) if self.training else 0.0
        seed, first_route, place = 0, 0, self.experts.place
        if dropout and place is not None:
            seed, first_route = place.seed ^ zlib.crc32(self.experts.layer.name.encode()), place.first_row * top_k
        elif dropout:
            seed = int(torch.randint(2**62, (), device="cpu"))
        return ExpertLora(self._pairs(names), dropout, seed, first_route)

    def _pairs(self, names: list[str]) -> dict[str, LoraPair]:
        """The adapters as one LoRA, by projection."""
        stacks = [self.stacked(kind, name) for name in names for kind in KINDS]
        parameters: list[Tensor] = [each for stack in stacks for each in stack._parameters.values() if each is not None]
        key = names, [(self.scaling[name], self.use_rslora[name]) for name in names]
        if (known := self._known_pairs) is not None and known.key == key and known.are_of(parameters):
            return known.pairs
        pairs: dict[str, LoraPair] = {}
        for projection in PROJECTIONS:
            own = [self._pair(name, projection) for name in names if projection in self.ranks[name]]
            if own:
                pairs[projection] = own[0] if len(own) == 1 else _join(own)
        as_they_are = {id(each) for pair in pairs.values() for each in (pair.a, pair.b)} == {*map(id, parameters)}
        self._known_pairs = _KnownPairs(key, parameters, pairs) if as_they_are else None  # others follow the values
        return pairs

    def applied(self) -> list[str]:
        """The active adapters that have LoRA on these experts."""
        return [name for name in self.active_adapters if name in self.lora_A]

    def check_together(self, names: list[str], training: bool) -> None:
        """Refuse adapters that the kernels cannot apply as one LoRA: they take `MAX_RANK` and draw one dropout mask."""
        for projection in PROJECTIONS:
            ranks = [self.ranks[name][projection].r for name in names if projection in self.ranks[name]]
            if sum(ranks) > MAX_RANK:
                raise ValueError(
                    f"the active adapters {', '.join(names)} have rank {' + '.join(map(str, ranks))} together on "
                    f"{projection} of the routed experts, more than {MAX_RANK}; activate fewer, or merge one into the "
                    "base model with ktft merge BASE ADAPTER OUT"
                )
        if training and len({self._dropout(name) for name in names}) > 1:
            told = ", ".join(f"{name} {self._dropout(name):g}" for name in names)
            raise ValueError(
                f"active adapters differ in lora_dropout: {told}; on routed experts ktft trains beside other adapters "
                "only with one rate for all, and with 0 on top of frozen ones: set lora_dropout: 0, in the "
                "adapter_config.json of an adapter that is trained further"
            )

    def _dropout(self, adapter_name: str) -> float:
        return cast(nn.Dropout, self.lora_dropout[adapter_name]).p

    def _pair(self, adapter_name: str, projection: str) -> LoraPair:
        a, b = (cast(nn.Parameter, self.stacked(kind, adapter_name)[projection]) for kind in KINDS)
        if a.device.type != "cpu" or b.device.type != "cpu":
            raise ValueError(
                f"expert LoRA {adapter_name}.{projection} is on {a.device}, but it is computed on the CPU; load the "
                'model with a device_map of one device, such as {"": 0}'
            )
        # PEFT's scaling helpers change self.scaling, which belongs to the adapter's common rank and alpha
        rslora = self.use_rslora[adapter_name]
        common = Rank(self.r[adapter_name], self.lora_alpha[adapter_name]).scaling(rslora)
        own = self.ranks[adapter_name][projection].scaling(rslora)
        a_each, b_each = (
            self._spreads.of((kind, adapter_name, projection), each, self.experts.num_experts)
            if self.is_shared(kind, adapter_name, projection)
            else each
            for kind, each in zip(KINDS, (a, b), strict=True)
        )
        return LoraPair(a_each, b_each, own if common == 0 else self.scaling[adapter_name] * own / common)

    def stacked(self, kind: str, adapter_name: str) -> CpuParameters:
        """Projection -> stacked tensor of `lora_A` or `lora_B`, which no optimizer writes any more."""
        found = cast(CpuParameters, getattr(self, kind)[adapter_name])
        settle(found._parameters.values())  # type: ignore[arg-type]
        return found

    def tensors(self, adapter_name: str) -> Iterator[tuple[str, str, Tensor]]:
        """Yield kind (`lora_A` or `lora_B`), projection and stacked tensor for all that an adapter has here."""
        for kind in KINDS:
            for projection, tensor in self.stacked(kind, adapter_name).items():
                yield kind, projection, tensor

    def stacks(self, adapter_name: str) -> Iterator[tuple[str, str, Tensor]]:
        """Yield of `tensors` those that have a row for each expert, without what the experts share."""
        for kind, projection, tensor in self.tensors(adapter_name):
            if not self.is_shared(kind, adapter_name, projection):
                yield kind, projection, tensor

    def delete_adapter(self, adapter_name: str) -> None:
        super().delete_adapter(adapter_name)
        self.ranks.pop(adapter_name, None)
        self.forms.pop(adapter_name, None)
        self._spreads.drop(adapter_name)
        self._known_pairs = None

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Adapters stay on the CPU."""

    def merge(self, *_: Any, **__: Any) -> None:
        """Refused."""
        raise ValueError(UNMERGED)

    unmerge = merge


def _join(pairs: list[LoraPair]) -> LoraPair:
    """Join adapters into one: the sum of s·B·A is [s1·B1, s2·B2, ...]·[A1; A2; ...], differentiable in each."""
    a = torch.cat([pair.a for pair in pairs], dim=1)
    b = torch.cat([pair.b.float() * pair.scaling for pair in pairs], dim=2)
    return LoraPair(a, b, 1.0)


def _stack_experts(layer: KtftExpertsLora, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Move each expert's tensors, under their standard names, into the stacked parameters before a state dict loads."""
    held = layer.experts.held
    found: dict[tuple[str, str, str], dict[int, str]] = {}
    for key in list(state_dict):
        match = _EXPERT_KEY.fullmatch(key.removeprefix(prefix)) if key.startswith(prefix) else None
        if match is not None:
            expert, projection, kind, adapter = match.groups()
            number = _ALL if expert is None else int(expert)
            found.setdefault((f"lora_{kind}", adapter, projection), {})[number] = key
    for (kind, adapter, projection), keys in found.items():
        adapters = getattr(layer, kind)
        if adapter not in adapters or projection not in adapters[adapter]:
            raise ValueError(
                f"{next(iter(keys.values()))}: the model has no adapter {adapter!r} with {projection} on the experts "
                f"of {prefix.rstrip('.')}; load adapters with ktft.load_adapter"
            )
        shared = layer.is_shared(kind, adapter, projection)
        if shared != (keys.keys() == {_ALL}):
            raise ValueError(
                f"{next(iter(keys.values()))} is {'one matrix for all' if _ALL in keys else 'that of one'} of the "
                f"experts of {prefix.rstrip('.')}, the model's adapter {adapter!r} has expert_lora: "
                f"{layer.forms[adapter]}; set the form that the tensors have"
            )
        if shared:
            state_dict[f"{prefix}{kind}.{adapter}.{projection}"] = state_dict.pop(keys[_ALL])
            continue  # torch compares the shape
        for expert in keys.keys() & set(range(held.num_experts)) - set(held.numbers):
            state_dict.pop(keys.pop(expert))  # another process holds this expert
        if sorted(keys) != list(held.numbers):
            stray = sorted(set(keys) ^ set(held.numbers))[0]
            raise ValueError(
                f"{prefix}{stray}.{projection}.{kind}.{adapter}.weight is "
                f"{'left over' if stray in keys else 'missing'}: the adapter has {len(keys)} experts here, "
                f"the model has {held.count}"
            )
        stacked = adapters[adapter][projection]
        for key in keys.values():
            shape, expected = tuple(state_dict[key].shape), tuple(stacked.shape[1:])
            if shape != expected:
                raise ValueError(f"{key} has shape {shape} in the adapter and {expected} in the model")
        if stacked.is_meta:
            whole = torch.stack([state_dict.pop(keys[expert]) for expert in held.numbers])
        else:  # copied straight into place, because torch.stack would make a second copy of a large model's LoRA
            whole = stacked.data
            for place, expert in enumerate(held.numbers):
                whole[place].copy_(state_dict.pop(keys[expert]))
        state_dict[f"{prefix}{kind}.{adapter}.{projection}"] = whole

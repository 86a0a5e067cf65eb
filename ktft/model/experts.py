"""The module that replaces transformers' stacked routed experts of a layer."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ktft.checkpoint.families import Family
from ktft.checkpoint.load import LayerShape
from ktft.lanes.kept import OwnRows
from ktft.lanes.lanes import Lanes
from ktft.lanes.layer import LanedExperts
from ktft.lanes.record import Record
from ktft.lora import ExpertLora
from ktft.model import lockstep
from ktft.model.autograd import routed_experts
from ktft.model.shared import Ahead
from ktft.native import ExpertLayer
from ktft.ranks.exchange import Exchange
from ktft.ranks.group import Ranks, ranks


@dataclass
class StepPlace:
    """Where in an optimizer step of several micro-batches the model is. All of its experts have one such object.

    Attributes:
        seed: of the step's dropout on experts.
        first_row: the number of tokens of the micro-batches before.
        rows: the number of tokens of those that go through the model now; 0 until its first experts have them.
    """

    seed: int
    first_row: int = 0
    rows: int = 0


class KtftExperts(nn.Module):
    """One MoE layer's routed experts, frozen and packed in CPU memory outside torch.

    The module has no parameters, so code that walks a model's parameters (optimizer, DDP, `state_dict`, `.to`) never
    sees the expert weights. Its only buffer, `weight`, has no elements and tells peft which device the model is on.

    Args:
        layer: the packed experts, all or a part of them, or only their sizes if nothing will be computed.
        family: the model's family.
        activation: what forward keeps for backward, `retain` or `recompute`.

    Attributes:
        laned: runs the experts when hidden states are on a GPU; None if the model has no lanes.
        shared: the block's shared experts; None if it has none.
        record: receives counts in training mode; None, the initial value, counts nothing.
        num_experts: the number of experts that this process holds; `held` says which of the model's experts they are.
        number: the layer's, if the processes that train together hold the experts that this one lacks. Then tokens
            travel, and the output is the sum over all experts. It is None otherwise: if the process holds only a part,
            the output is the sum over that part only.
        tp_size: how many of these processes, neighbours by number, have the same tokens.
        together: the setting `micro_batches_together`.
        cuda_graphs, gpu_activation_memory, expert_lora: the settings of these names.
        place: where in a step the model is; None if nobody needs to know.
    """

    def __init__(self, layer: LayerShape, family: Family, activation: str = "retain") -> None:
        super().__init__()
        self.layer = cast(ExpertLayer, layer)
        self.family = family
        self.activation = activation
        self.laned: LanedExperts | None = None
        self.shared: Ahead | None = None
        self.record: Record | None = None
        self.held = layer.held
        self.num_experts = layer.held.count
        self.number: int | None = None
        self.tp_size = 1
        self.together: int | str = "auto"
        self.cuda_graphs = True
        self.gpu_activation_memory: int | str = "auto"
        self.expert_lora: str | None = None
        self.place: StepPlace | None = None
        self.hidden_size = self.in_features = self.out_features = layer.hidden_size
        self.intermediate_size = layer.intermediate_size
        self.projections = layer.projections
        self.weight: Tensor
        self.register_buffer("weight", torch.empty(0), persistent=False)
        self.register_load_state_dict_pre_hook(_refuse_lora)

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, lora: ExpertLora | None = None
    ) -> Tensor:
        """Map hidden states `[T, H]`, experts `[T, k]` and routing weights `[T, k]` to `[T, H]`.

        See `routed_experts` for their dtypes. Experts without weights return their input. Micro-batches in lockstep
        are computed together, with the LoRA of the first: they differ by the seed of dropout only.
        """
        given = hidden_states, top_k_weights
        if (member := lockstep.current()) is not None:
            out = member.meet_cut((id(self), lora is None), given, (top_k_index, lora, member.link), self._together)
        else:
            out = self._all_experts(hidden_states, top_k_index, top_k_weights, lora, self.shared)
        # Of processes that hold parts, which are added up, one adds what is nobody's
        if self.held.zero and (self.number is not None or self.held.numbers[0] == 0):
            zero = top_k_weights.masked_fill(top_k_index < self.held.num_experts, 0).sum(dim=-1, keepdim=True)
            out = out + (hidden_states * zero).to(out.dtype)
        return out

    def _together(self, values: list[tuple[Tensor, Tensor, Tensor, ExpertLora | None, object]]) -> Sequence[Tensor]:
        """The outputs of several micro-batches."""
        hidden, weights, index, loras, links = zip(*values, strict=True)
        link = links if all(each is not None for each in links) else None
        if len(values) == 1:
            return [self._all_experts(hidden[0], index[0], weights[0], loras[0], None, link)]
        out = self._all_experts(torch.cat(hidden), torch.cat(index), torch.cat(weights), loras[0], None, link)
        return cast(tuple[Tensor, ...], _Parts.apply(out, [len(each) for each in hidden]))

    def _all_experts(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        lora: ExpertLora | None,
        shared: Ahead | None,
        link: Hashable = None,
    ) -> Tensor:
        """The sum over all experts, those of other ranks included. `shared` are computed meanwhile."""
        if self.place is not None and self.place.rows == 0:
            self.place.rows = len(hidden_states)
        if self.number is None:
            given = hidden_states, top_k_index, top_k_weights
            return self._held_experts(hidden_states, *given, lora, None, shared, link)
        exchange = Exchange(self.number, hidden_states, self.tp_size)
        hidden, index, weights = exchange.gather(hidden_states, top_k_index, top_k_weights)
        own = OwnRows()
        every = self._held_experts(hidden_states, hidden, index, weights, lora, own, shared)
        out = exchange.scatter(every, own.found)
        if own.keep is not None:
            own.keep(out)
        return out

    def _held_experts(
        self,
        own_states: Tensor,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        lora: ExpertLora | None,
        own: OwnRows | None,
        shared: Ahead | None,
        link: Hashable = None,
    ) -> Tensor:
        """The sum over the held experts. `own_states` are the hidden states that the model gave to this process."""
        record = self.record if self.training else None
        top_k_index = self.held.local(top_k_index)
        if self.laned is not None and (lanes := self.laned.lanes.on(hidden_states.device)) is not None:
            ahead = None if shared is None else lambda _: shared.compute(own_states)
            if self.tp_size > 1:  # shared experts wait for other ranks, so their place must not depend on timings
                ahead = None
            given = hidden_states, top_k_index, top_k_weights
            return self.laned(lanes, *given, lora, record, self.training, ahead, own, link)
        return routed_experts(self.layer, hidden_states, top_k_index, top_k_weights, lora, self.activation, record)

    def run_in(self, lanes: Lanes, number: int, shared: Ahead | None = None) -> None:
        """Make forward use these lanes for hidden states that are on a GPU.

        Args:
            lanes: the model's lanes, to which layers must be added in order.
            number: this layer's number.
            shared: the block's shared experts.
        """
        lanes.layers.append(self.layer)
        self.laned, self.shared = LanedExperts(lanes, self.layer, number, self.activation), shared

    def extra_repr(self) -> str:
        """The text that a printout of the model shows for this module."""
        part = "" if self.held.whole else f" ({self.held} of {self.held.num_experts})"
        return (
            f"num_experts={self.num_experts}{part}, hidden_size={self.hidden_size}, "
            f"intermediate_size={self.intermediate_size}, format={self.layer.format}"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> KtftExperts:
        memo[id(self.layer)] = self.layer  # frozen, so copies of a model share it
        clone = self.__class__.__new__(self.__class__)
        memo[id(self)] = clone
        clone.__dict__ = copy.deepcopy(self.__dict__, memo)
        return clone


class _Parts(torch.autograd.Function):
    """Splits `[T, H]` into tensors of so many rows, which a model may change in place."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        return tuple(part.clone() for part in whole.split(sizes))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.cat(grads), None


def _refuse_lora(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Refuse LoRA tensors, which arrive here if no adapter layer wraps the experts; torch would drop them silently."""
    lora = [key for key in state_dict if key.startswith(prefix) and ".lora_" in key]
    if lora:
        raise ValueError(
            f"the adapter holds LoRA for routed experts ({lora[0]} and {len(lora) - 1} more), which peft alone cannot "
            "put on ktft's experts; load it with ktft.load_adapter(model, path)"
        )


def decoder_lists(model: nn.Module) -> list[str]:
    """The names of the lists of layers that have routed experts in one of them."""
    found = (re.match(r"(.*?\blayers)\.\d+\.", name) for name in find_experts(model))
    return list(dict.fromkeys(match[1] for match in found if match is not None))


def layer_of(name: str) -> int | None:
    """The number of the decoder layer that a module of this name is in; None if it is in none."""
    number = re.search(r"\blayers\.(\d+)\.", name)
    return int(number[1]) if number else None


def layer_number(name: str) -> int:
    """The number of the decoder layer that an experts module of this name is in.

    Raises:
        ValueError: the module is in no numbered layer.
    """
    if (number := layer_of(name)) is None:
        raise ValueError(f"the experts {name} are in no numbered layer; ktft finds them by layers.N in their name")
    return number


def is_transposed(stock: nn.Module) -> bool:
    """Whether stacked experts of transformers are `[E, in, out]`. Those with a forward of their own do not say so."""
    if (gate_up := getattr(stock, "gate_up_proj", None)) is None:
        return bool(getattr(stock, "is_transposed", False))
    return bool(gate_up.shape[2] != stock.get_parameter("down_proj").shape[1])


def expert_modules(model: nn.Module, family: Family) -> list[tuple[int, str, tuple[int, int, int]]]:
    """Layer number, module name and (num_experts, hidden_size, intermediate_size) of transformers' stacked experts.

    The model may be on the meta device.

    Raises:
        ValueError: the model has no experts of the family's classes, or two lists of layers with them.
    """
    found: list[tuple[int, str, tuple[int, int, int]]] = []
    config: Any = model.config
    for name, module in model.named_modules():
        if type(module).__name__ in family.experts_classes:
            experts, rows, cols = module.get_parameter("down_proj").shape
            sizes = (cols, rows) if is_transposed(module) else (rows, cols)
            found.append((layer_number(name), name, (experts, *sizes)))
            if len({number for number, _, _ in found}) < len(found):
                others = [other for number, other, _ in found if number == found[-1][0]]
                raise ValueError(
                    f"{type(model).__name__} (model_type {config.model_type!r}) has routed experts in two lists of "
                    f"layers, {' and '.join(others)}, and ktft numbers layers in one; train it without ktft (in "
                    "LLaMA-Factory use_kt: false)"
                )
    if not found:
        foreign = next((type(m).__name__ for n, m in model.named_modules() if n.endswith(".experts")), None)
        if foreign is not None:
            raise ValueError(
                f"{type(model).__name__} has {foreign} in place of {family.experts_classes[0]}: another package "
                "replaced transformers' class before the model was made; have it leave the experts alone, Liger for "
                "instance by apply_liger_kernel_to_...(swiglu=False)"
            )
        raise ValueError(
            f"{type(model).__name__} (model_type {config.model_type!r}) has no {family.experts_classes[0]} to replace; "
            "load it with transformers' own code (trust_remote_code: false) and at least one MoE layer"
        )
    return found


def generate_together(original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """transformers' `generate`; ranks that share the experts go on until the last has its answer."""
    if any(module.number is not None for module in find_experts(model).values()):
        kwargs["synced_gpus"] = True
    return original(model, *args, **kwargs)


def find_experts(model: nn.Module) -> dict[str, KtftExperts]:
    """All of a model's routed experts by module name, including those inside adapter layers."""
    return {name: module for name, module in model.named_modules() if isinstance(module, KtftExperts)}


def first_experts(model: nn.Module) -> KtftExperts | None:
    """The routed experts of the first layer that has some; None if the model has none that ktft holds."""
    return next((module for module in model.modules() if isinstance(module, KtftExperts)), None)


def ranks_of(model: nn.Module) -> Ranks | None:
    """The processes that hold the model's experts together; None if this one holds them all."""
    first = first_experts(model)
    return None if first is None or first.number is None else ranks(first.tp_size)


def experts_family(model: nn.Module) -> Family:
    """The family of a model with ktft's experts, no matter how the model is wrapped.

    Raises:
        ValueError: the model has no experts held by ktft.
    """
    if (first := first_experts(model)) is None:
        raise ValueError(f"{type(model).__name__} has no experts held by ktft")
    return first.family

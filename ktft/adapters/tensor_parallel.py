"""LoRA on projections that tensor parallelism divides: each rank trains its piece as an ordinary tensor.

A projection that is divided by its outputs (colwise) has its B divided, and one that is divided by its inputs (rowwise)
its A. PEFT divides them too, but into DTensors, which the optimizer's kernel, the guards and files of other layouts do
not take; and its LoRA misses a sum in MLA attention. So the pieces become plain parameters here, and the two sums over
the tensor parallel group that LoRA needs are hooks.

A's of colwise and B's of rowwise projections, and both on all projections whose plan gathers inputs or outputs, are
whole on every rank. With these sums every rank computes the same gradient for them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn

from ktft.model.tensor_parallel import tp_size_of
from ktft.ranks.sharded import is_sharded
from ktft.ranks.tensor_parallel import Shard, summed, with_summed_gradient

_DIVIDED = "_ktft_divided"
_PLAN = "_hf_tp_plan"  # PEFT notes a projection's style of division under this name
_whole: ContextVar[bool] = ContextVar("_whole", default=False)


class Divided:
    """What a linear layer of LoRA knows of its division.

    Attributes:
        shards: name of a parameter -> how it is divided.
        whole: the same -> the whole tensor, while `gathered` has it.
    """

    def __init__(self, shards: dict[str, Shard]) -> None:
        self.shards = shards
        self.whole: dict[str, Tensor] = {}


def divided_layers(model: nn.Module) -> dict[str, tuple[nn.Module, Divided]]:
    """Name -> the layers of LoRA that a model's ranks hold in pieces."""
    named = ((name, module, vars(module).get(_DIVIDED)) for name, module in model.named_modules())
    return {name: (module, divided) for name, module, divided in named if divided is not None}


def shards_of(model: nn.Module) -> dict[str, Shard]:
    """Name of a parameter -> how it is divided, for the parameters of which this rank has a piece."""
    return {
        f"{name}.{own}": shard
        for name, (_, divided) in divided_layers(model).items()
        for own, shard in divided.shards.items()
    }


def with_whole_shapes(model: nn.Module, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with tensors of the whole shape in place of pieces. Their values mean nothing."""
    found = dict(state_dict)
    for name, shard in shards_of(model).items():
        if name in found:
            found[name] = found[name].new_zeros(1).expand(shard.shape(found[name]))
    return found


def is_in_pieces(tensor: Tensor) -> bool:
    """Whether a tensor is transformers' own piece of a frozen weight, a DTensor."""
    return hasattr(tensor, "full_tensor") and not is_sharded(tensor)


def whole_vector(tensor: Tensor) -> Tensor:
    """A frozen tensor as a whole. All ranks must call it if it `is_in_pieces`."""
    return tensor.full_tensor() if is_in_pieces(tensor) else tensor  # type: ignore[attr-defined]


def check_request(model: nn.Module, config: Any) -> None:
    """Refuse adapters that cannot be put on a model with tensor parallel attention."""
    if tp_size_of(model) == 1:
        return
    for option in ("modules_to_save", "trainable_token_indices"):
        if getattr(config, option, None):
            raise ValueError(
                f"{option} would train weights that tensor parallelism divides, which ktft does not support; leave it "
                "out, or leave distributed_config out"
            )
    if (init := getattr(config, "init_lora_weights", True)) not in (True, False, "gaussian"):
        raise ValueError(
            f"init_lora_weights={init!r} needs whole weights, which tensor parallelism divides; use True, False or "
            "'gaussian'"
        )


@contextmanager
def dividing(model: nn.Module, adapter_name: str) -> Iterator[None]:
    """A block in which PEFT puts an adapter on a model. At its end, LoRA on divided projections is as said above."""
    tp_size = tp_size_of(model)
    before = _whole.set(tp_size > 1)
    try:
        with warnings.catch_warnings():
            if tp_size > 1:  # it is whole on every rank, as it should be
                warnings.filterwarnings("ignore", ".*adapters will be created without tensor parallel hooks")
            yield
    finally:
        _whole.reset(before)
    for name, layer in model.named_modules() if tp_size > 1 else ():
        if not isinstance(layer, LoraLayer):
            continue
        if adapter_name in layer.lora_embedding_A:
            raise ValueError(
                f"LoRA on {name} is not supported with tensor parallelism, which divides the vocabulary; leave it out "
                "of target_modules"
            )
        if adapter_name in layer.lora_A and (style := getattr(layer.get_base_layer(), _PLAN, None)) is not None:
            for half in (layer.lora_A[adapter_name], layer.lora_B[adapter_name]):
                _divide(half, tp_size)
            if style == "mla_kv_a_proj":
                _sum_rope(layer.lora_B[adapter_name], model, tp_size)


def whole_features(original: Callable[..., Any], layer: Any, module: nn.Module) -> Any:
    """PEFT's `LoraLayer._get_in_out_features`, which for ktft's models gives the features of whole projections.

    So LoRA starts with the values that it has in one process: PEFT would draw the same values for every rank's piece.
    """
    if _whole.get() and isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return original(layer, module)


def _divide(linear: nn.Module, tp_size: int) -> None:
    """Make a layer that PEFT divided hold its piece as a plain parameter."""
    shards = {}
    for name, parameter in list(linear.named_parameters(recurse=False)):
        if is_in_pieces(parameter):
            placement: Any = parameter.placements[0]  # type: ignore[attr-defined]
            own = parameter.to_local().detach().clone()  # type: ignore[attr-defined]
            shards[name] = Shard(placement.dim % own.dim(), parameter.shape[placement.dim], tp_size)
            setattr(linear, name, nn.Parameter(own, requires_grad=parameter.requires_grad))
    if not shards:
        return
    vars(linear).pop("forward", None)  # transformers' own, for DTensors
    setattr(linear, _DIVIDED, Divided(shards))
    if shards["weight"].dim == 0:
        linear.register_forward_pre_hook(lambda _, given: (with_summed_gradient(given[0], tp_size), *given[1:]))
    else:
        linear.register_forward_hook(lambda _, __, out: summed(out, tp_size))
    linear.register_state_dict_post_hook(_save_whole)
    linear.register_load_state_dict_pre_hook(_load_piece)


def _sum_rope(linear: nn.Module, model: Any, tp_size: int) -> None:
    """Sum the gradient of the last outputs of MLA's first projection, which each rank's heads use without a sum."""
    rope = model.config.get_text_config().qk_rope_head_dim

    def sum_gradient(_: nn.Module, __: Any, out: Tensor) -> Tensor:
        low, turned = out.split([out.shape[-1] - rope, rope], dim=-1)
        return torch.cat([low, with_summed_gradient(turned, tp_size)], dim=-1)

    linear.register_forward_hook(sum_gradient)


def _save_whole(linear: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    for name, whole in vars(linear)[_DIVIDED].whole.items():
        state_dict[prefix + name] = whole


def _load_piece(linear: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, shard in vars(linear)[_DIVIDED].shards.items():
        given, own = state_dict.get(prefix + name), linear.get_parameter(name)
        if isinstance(given, Tensor) and list(given.shape) == shard.shape(own):
            state_dict[prefix + name] = shard.of_this_rank(given)

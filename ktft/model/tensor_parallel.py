"""Tensor parallel attention by transformers' own plans: what is refused, and what ktft does in place of transformers.

`from_pretrained(..., distributed_config=DistributedConfig(tp_size=2))` divides the model around the experts. ktft keeps
each rank's share of the experts, and averages gradients itself, also over replicas (`dp_replicate_size`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ktft.model.experts import first_experts
from ktft.ranks.launch import Launch
from ktft.versions import TESTED_VERSIONS, is_at_least, version_of

NEEDS = {"transformers": "5.23", "peft": "0.21.2", "accelerate": "1.15"}
"""The lowest versions with which tensor parallel attention was tested. Earlier ones divide models in another way."""
_ATTENTION = ("self_attn.", "linear_attn.", ".attention.")
_DATA_PARALLEL = "leave distributed_config out, which is data parallel training"


def tp_size_of(model: nn.Module) -> int:
    """The size of the tensor parallel groups that a model, however wrapped, was loaded for; 1 without."""
    first = first_experts(model)
    return 1 if first is None else first.tp_size


def check_versions(tp_size: int) -> None:
    """Refuse tensor parallelism with versions whose way to divide a model ktft does not know."""
    for name, lowest in NEEDS.items() if tp_size > 1 else ():
        if not is_at_least(version_of(name) or "0", lowest):
            raise ValueError(
                f"tensor parallel attention needs {name} {lowest} or later, installed is {version_of(name)}; run: "
                f"pip install '{name}>={lowest},<{TESTED_VERSIONS[name][1]}', or {_DATA_PARALLEL}"
            )


def asked_tp_size(model: PreTrainedModel, part: tuple[int, int] | None = None) -> int:
    """The size of tensor parallel groups that `from_pretrained` was asked for; 1 without. No weight is needed.

    Args:
        part: the experts that `KtftConfig` names for this process.

    Raises:
        ValueError: ktft or the model does not support what was asked for; the message has the cure.
    """
    asked: Any = getattr(model.config, "distributed_config", None)
    if asked is None:
        return 1
    if isinstance(asked, dict):
        asked = type("Asked", (), asked)
    sizes = {name: int(getattr(asked, name, None) or 1) for name in _SIZES}
    for name, cure in _REFUSED.items():
        if sizes[name] > 1:
            raise ValueError(f"distributed_config has {name}={sizes[name]}, which ktft does not support; {cure}")
    tp_size = sizes["tp_size"]
    if tp_size == 1:
        if sizes["dp_replicate_size"] > 1:
            raise ValueError(f"distributed_config has tp_size=1, so it divides nothing; {_DATA_PARALLEL}")
        return 1
    check_versions(tp_size)
    launch = Launch.of_environment()
    if part is not None or launch.ranks != tp_size * sizes["dp_replicate_size"]:
        raise ValueError(
            f"distributed_config asks for {tp_size} x {sizes['dp_replicate_size']} processes (tp_size x "
            f"dp_replicate_size), and {launch.ranks} run{'' if part is None else ', with part given'}; start torchrun "
            "--nproc-per-node with that number, and leave part out"
        )
    _check_plan(model, asked, tp_size)
    return tp_size


_SIZES = ("tp_size", "dp_replicate_size", "fsdp_size", "pp_size", "ep_size")
_REFUSED = {
    "fsdp_size": "set dp_replicate_size in its place, which keeps the attention whole in each replica",
    "pp_size": "leave it out",
    "ep_size": "leave it out: ktft shares the experts among all processes in any case",
}


def _check_plan(model: PreTrainedModel, asked: Any, tp_size: int) -> None:
    given = getattr(asked, "tp_plan", None)
    given = given if isinstance(given, dict) else {}
    if experts := [key for key in given if ".experts" in key]:
        raise ValueError(f"tp_plan names {experts[0]}, which ktft shares among the processes itself; leave it out")
    plan: dict[str, str] = {**(model.tp_plan or {}), **given}
    attention = {key: style for key, style in plan.items() if any(name in key for name in _ATTENTION)}
    if not attention:
        raise ValueError(
            f"transformers {version_of('transformers')} has no tensor parallel plan for the attention of "
            f"{type(model).__name__}, so each GPU would hold all of it; {_DATA_PARALLEL}"
        )
    if not any(key.endswith("_proj") and style == "colwise" for key, style in attention.items()):
        return  # every rank computes all heads
    text: Any = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, name, None)
        if heads and heads % tp_size:
            raise ValueError(
                f"tp_size is {tp_size}, which does not divide the {heads} {name} of {type(model).__name__}; take a "
                "tp_size that does"
            )


def take_over(model: PreTrainedModel) -> None:
    """Make transformers' Trainer treat the loaded model as one that its program divided.

    Otherwise it refuses to save what resuming needs, sends rank 0's LoRA of experts to all ranks, and averages it.
    """
    if hasattr(model, _OWN):
        setattr(model, _OWN, False)


_OWN = "_is_distributed_loading_by_transformers"


def keep_replicas(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers' `apply_fully_sharded_data_parallelism`, which leaves a model with ktft's experts as it is.

    ktft averages the gradients of replicas itself: FSDP would divide parameters that LoRA then does not divide.
    """
    return model if first_experts(model) is not None else original(model, *args, **kwargs)

"""Training in several processes: what DDP must leave alone, what must be equal, and what is summed over all ranks.

Expert LoRA exists once, on the rank that holds the expert. DDP, by which every rank has the same copy of all other
parameters and the mean of their gradients, must not see it.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from ktft.adapters.peft import expert_layers
from ktft.model.experts import find_experts
from ktft.ranks.group import Ranks, ranks, same
from ktft.ranks.sharded import is_divided
from ktft.train.manifest import SETTINGS, run_facts
from ktft.versions import version_of

Value = TypeVar("Value")

PACKAGES = ("ktft", "torch", "transformers", "peft", "accelerate")
VALUES = "trained parameters outside the experts (SHA-256 of their values)"
_DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"


def ranks_of(model: nn.Module) -> Ranks | None:
    """The processes that hold the model's experts together; None if this one holds them all."""
    split = any(module.number is not None for module in find_experts(model).values())
    return ranks() if split else None


def split_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> the parameters of which each rank has its own rows: LoRA on experts that ranks share."""
    own = {
        id(tensor)
        for layer in expert_layers(model).values()
        if layer.experts.number is not None
        for adapter in layer.lora_A
        for _, _, tensor in layer.tensors(adapter)
    }
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in own}


def prepare_model(
    original: Callable[..., Any], accelerator: Any, model: Any, device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> Any:  # fmt: skip
    """accelerate's `prepare_model`, which wraps a model in DDP without the LoRA of experts that ranks share."""
    if isinstance(model, nn.Module) and ranks_of(model) is not None:
        if accelerator.is_fsdp2 and evaluation_mode and not is_divided(model):
            device_placement = True  # accelerate expects FSDP to do it, which divides what is trained only
        split = split_parameters(model)
        setattr(model, _DDP_IGNORES, [*getattr(model, _DDP_IGNORES, ()), *split])
        # DDP refuses a model without anything to average
        others = any(p.requires_grad for name, p in model.named_parameters() if name not in split)
        evaluation_mode = evaluation_mode or not others
    return original(accelerator, model, device_placement, evaluation_mode)


def check_precision(args: TrainingArguments) -> None:
    """Refuse fp16 in several processes, where each would scale and skip by its own gradients."""
    if args.world_size > 1 and args.fp16:
        raise ValueError(
            f"fp16 is on in {args.world_size} processes: each would skip steps by the gradients of its own experts; "
            "set bf16: true in place of fp16"
        )


def require_same_run(model: nn.Module, args: TrainingArguments, examples: int | None) -> None:
    """Refuse ranks that would train something else than the others. All ranks must call it.

    Raises:
        ValueError: versions, settings, the seed, the data, the base model or the adapters' shapes or values differ.
    """
    if (together := ranks_of(model)) is not None:
        same(_facts(model, args, examples), together)


def _facts(model: nn.Module, args: TrainingArguments, examples: int | None) -> Iterator[tuple[str, str]]:
    yield "Python", platform.python_version()
    yield from ((name, str(version_of(name))) for name in PACKAGES)
    yield from ((name, str(getattr(args, name, None))) for name in (*SETTINGS, "world_size", "save_strategy"))
    yield "the number of training examples", str(examples)
    yield "the seed of torch's generator", str(torch.initial_seed())
    yield from run_facts(model, str(getattr(args.optim, "value", args.optim))).items()
    split, names = split_parameters(model), hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            shape = parameter.shape[1:] if name in split else parameter.shape
            names.update(f"{name} {tuple(shape)} {parameter.dtype}".encode())
    yield "trained parameters (SHA-256 of names and shapes)", names.hexdigest()
    if not is_divided(model):  # else they were compared before
        yield VALUES, values_of(model)


def values_of(model: nn.Module) -> str:
    """A hash of the trained parameters that each rank has whole."""
    split, values = split_parameters(model), hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in split:
            values.update(parameter.detach().float().cpu().contiguous().numpy().tobytes())
    return values.hexdigest()


def over_ranks(
    together: Ranks | None, loss: float | None, norms: dict[str, float], groups: Collection[str]
) -> float | None:
    """The mean loss of all ranks; norms of these groups, of what is here of them, become those of the whole groups.

    All ranks must call it.
    """
    if together is None:
        return loss
    squares = [norms.get(group, 0.0) ** 2 for group in groups]
    sums = together.sum(torch.tensor([loss or 0.0, *squares], dtype=torch.float64))
    for group, square in zip(groups, sums[1:], strict=True):
        if group in norms:
            norms[group] = float(square.sqrt())
    return None if loss is None else float(sums[0]) / together.size


def summed(together: Ranks | None, counts: Tensor) -> Tensor:
    """The counts, on the CPU, become their sums over all ranks. All ranks must call it."""
    return counts if together is None else together.sum(counts)


def agreed(together: Ranks | None, act: Callable[[], Value]) -> Value:
    """What `act` returns. If it fails on one rank, it fails on all. All ranks must call it."""
    return act() if together is None else together.together(act)


def checked_once(together: Ranks | None, check: Callable[[], Value]) -> Value:
    """What `check` returns on rank 0, which alone runs it. All ranks must call it."""
    return check() if together is None else together.on_first(check)

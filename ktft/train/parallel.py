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
from ktft.adapters.tensor_parallel import is_in_pieces, shards_of
from ktft.model.experts import find_experts, ranks_of
from ktft.model.tensor_parallel import tp_size_of
from ktft.ranks.group import Ranks, same
from ktft.ranks.sharded import is_divided
from ktft.train.manifest import SETTINGS, run_facts
from ktft.train.optimizer import NATIVE
from ktft.versions import version_of

Value = TypeVar("Value")

PACKAGES = ("ktft", "torch", "transformers", "peft", "accelerate")
VALUES = "trained parameters outside the experts (SHA-256 of their values)"
_DDP_IGNORES = "_ddp_params_and_buffers_to_ignore"


def split_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> the parameters of which each rank has its own rows: LoRA on experts that ranks share."""
    own = {
        id(tensor)
        for layer in expert_layers(model).values()
        if layer.experts.number is not None
        for adapter in layer.lora_A
        for _, _, tensor in layer.stacks(adapter)
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


def average_gradients(model: nn.Module) -> None:
    """Average a step's gradients beside the experts over all ranks, where DDP does not.

    accelerate puts no DDP around a model whose attention is tensor parallel, and DDP sees no gradients of micro-batches
    that go through the layers together. Pieces of LoRA are averaged over the ranks that have the same piece,
    all else over all ranks: those of a tensor parallel group have equal gradients, which so can never drift apart. All
    ranks must call it.
    """
    together = ranks_of(model)
    if together is None:
        return
    split, shards = split_parameters(model), shards_of(model)
    others = {name: p for name, p in model.named_parameters() if p.requires_grad and name not in split}
    for in_pieces in (False, True):
        own = [p for name, p in others.items() if (name in shards) == in_pieces]
        if not own:
            continue
        has = torch.tensor([float(p.grad is not None) for p in own])
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in own]
        together.average([has, *grads], data_parallel=in_pieces)
        for parameter, grad, found in zip(own, grads, has.tolist(), strict=True):
            parameter.grad = grad if found else None


def check_layout(args: TrainingArguments, model: nn.Module) -> None:
    """Refuse arguments that ask accelerate for another tensor parallel layout than the model was loaded with.

    Raises:
        ValueError: the layouts differ, context or sequence parallelism is asked for, the optimizer does not treat each
            element alone, or a divided weight would train.
    """
    tp_size, asked = tp_size_of(model), getattr(args, "parallelism_config", None)
    for name in ("cp_size", "sp_size"):
        if (getattr(asked, name, None) or 1) > 1:
            raise ValueError(f"parallelism_config has {name}={getattr(asked, name)}, which ktft does not support")
    if asked is not None and (asked.tp_size or 1) not in (1, tp_size):
        raise ValueError(
            f"parallelism_config has tp_size={asked.tp_size}, and the model was loaded for {tp_size}; load it with "
            f"from_pretrained(..., distributed_config=DistributedConfig(tp_size={asked.tp_size}))"
        )
    optim = str(getattr(getattr(args, "optim", None), "value", getattr(args, "optim", None)))
    if tp_size > 1 and optim not in NATIVE:
        raise ValueError(
            f"optim is {optim!r}, which may treat a piece of a matrix otherwise than the whole, and tensor parallelism "
            "leaves each rank a piece; set optim: adamw_torch"
        )
    if whole := [name for name, p in model.named_parameters() if p.requires_grad and is_in_pieces(p)]:
        raise ValueError(
            f"{whole[0]} would be trained, which tensor parallelism divides; train LoRA only, without "
            "distributed_config anything"
        )


def check_precision(args: TrainingArguments) -> None:
    """Refuse fp16 in several processes, where each would scale and skip by its own gradients."""
    if args.world_size > 1 and args.fp16:
        raise ValueError(
            f"fp16 is on in {args.world_size} processes: each would skip steps by the gradients of its own experts; "
            "set bf16: true in place of fp16"
        )


def require_same_run(model: nn.Module, args: TrainingArguments, examples: int | None) -> None:
    """Refuse ranks that would train something else than the others. All ranks must call it.

    Pieces of LoRA that tensor parallel ranks hold are compared as wholes.

    Raises:
        ValueError: versions, settings, the seed, the data, the base model or the adapters' shapes or values differ; or
            an expert is on several ranks, or on none.
    """
    if (together := ranks_of(model)) is not None:
        same(_facts(model, args, examples), together)
        _check_shares(model, together)


def _check_shares(model: nn.Module, together: Ranks) -> None:
    """Refuse ranks whose shares do not add up. All ranks must call it."""
    by_rank = together.gather({name: module.held for name, module in find_experts(model).items()})
    for name, held in by_rank[0].items():
        numbers = sorted(number for rank in by_rank for number in rank[name].numbers)
        if numbers != list(range(held.num_experts)):
            shares = "; ".join(f"rank {rank} has {each[name]}" for rank, each in enumerate(by_rank))
            raise ValueError(
                f"the processes do not have each expert of {name} once: {shares}. Give all of them the same "
                "expert_routing file"
            )


def _facts(model: nn.Module, args: TrainingArguments, examples: int | None) -> Iterator[tuple[str, str]]:
    yield "Python", platform.python_version()
    yield from ((name, str(version_of(name))) for name in PACKAGES)
    yield from ((name, str(getattr(args, name, None))) for name in (*SETTINGS, "world_size", "save_strategy"))
    yield "the number of training examples", str(examples)
    yield "the seed of torch's generator", str(torch.initial_seed())
    yield from run_facts(model, str(getattr(args.optim, "value", args.optim))).items()
    yield "the size of tensor parallel groups", str(tp_size_of(model))
    yield "micro_batches_together", str(next(iter(find_experts(model).values())).together)
    split, names, shards = split_parameters(model), hashlib.sha256(), shards_of(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            whole = shards[name].shape(parameter) if name in shards else parameter.shape
            shape = whole[1:] if name in split else whole
            names.update(f"{name} {tuple(shape)} {parameter.dtype}".encode())
    yield "trained parameters (SHA-256 of names and shapes)", names.hexdigest()
    if not is_divided(model):  # else they were compared before
        yield VALUES, values_of(model)


def values_of(model: nn.Module) -> str:
    """A hash of the trained parameters outside the experts, of pieces as wholes. All ranks must call it."""
    split, shards, values = split_parameters(model), shards_of(model), hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in split:
            whole = shards[name].gather(parameter) if name in shards else parameter.detach()
            values.update(whole.float().cpu().contiguous().numpy().tobytes())
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


def with_shards(together: Ranks | None, norms: dict[str, Tensor], shards: Collection[str]) -> dict[str, Tensor]:
    """Norms by parameter, with those of whole parameters for the ones held in pieces. All ranks must call it."""
    if together is None or not shards:
        return norms
    zero = torch.zeros(1)
    squares = torch.stack([norms.get(name, zero).double().square().sum() for name in shards])
    whole = (together.sum(squares) / together.dp_size).sqrt().float()
    return norms | {name: norm.view(1) for name, norm in zip(shards, whole, strict=True) if name in norms}


def summed(together: Ranks | None, counts: Tensor) -> Tensor:
    """The counts, on the CPU, become their sums over all ranks. All ranks must call it."""
    return counts if together is None else together.sum(counts)


def agreed(together: Ranks | None, act: Callable[[], Value]) -> Value:
    """What `act` returns. If it fails on one rank, it fails on all. All ranks must call it."""
    return act() if together is None else together.together(act)


def checked_once(together: Ranks | None, check: Callable[[], Value]) -> Value:
    """What `check` returns on rank 0, which alone runs it. All ranks must call it."""
    return check() if together is None else together.on_first(check)

"""The parameters that a run trains, the norms of their gradients, and clipping by norm.

ktft's own threads handle gradients in CPU memory.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.state import GradientState
from torch import Tensor, nn

from ktft.adapters.lora import KtftExpertsLora
from ktft.checkpoint.families import GROUPS, group_of
from ktft.model.experts import experts_family
from ktft.native import Runtime
from ktft.native.optim import known_row_norms, note_row_norms, row_norms, scale, takes
from ktft.ranks.group import Ranks
from ktft.ranks.sharded import is_sharded, local


@dataclass(frozen=True)
class Trained:
    """A parameter that the run trains."""

    name: str
    parameter: nn.Parameter
    group: str
    late: bool  # it has no gradient until its partner has moved away from zero
    layer: str | None  # the name of the routed experts that it stacks along its first dimension, if it does

    def rows(self, tensor: Tensor) -> Tensor:
        """The tensor, or its gradient, as `[experts, elements]`, with one row if the parameter is not stacked.

        Of a parameter that ranks share by rows, it is this rank's part, which may be empty.
        """
        own = local(tensor).detach()
        return own.flatten(1) if self.layer is not None else own.reshape(1, -1)

    @property
    def here(self) -> bool:
        """Whether this rank has a part of the parameter."""
        return local(self.parameter).numel() > 0


def trained_parameters(model: nn.Module) -> dict[str, Trained]:
    """All parameters with requires_grad, by name."""
    family = experts_family(model)
    stacks: dict[int, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, KtftExpertsLora):
            stacks |= {id(t): name for adapter in module.lora_A for *_, t in module.stacks(adapter)}
    late = (".lora_A.", ".lora_embedding_B.")
    return {
        name: Trained(name, p, group_of(name, family), any(kind in name for kind in late), stacks.get(id(p)))
        for name, p in model.named_parameters()
        if p.requires_grad
    }


class GradientWatch:
    """While `on`, takes norms of gradients after an optimizer step's last backward, in its order, before clipping."""

    def __init__(self, parameters: Mapping[str, Trained], runtime: Runtime) -> None:
        self.on = False
        self._runtime, self._accumulation = runtime, GradientState()
        self._complete: dict[str, Trained] = {}  # the parameters with a gradient, in the order of backward
        self._norms: dict[str, Tensor] | None = None
        self._hooks = [
            each.parameter.register_post_accumulate_grad_hook(functools.partial(self._look, each))
            for each in parameters.values()
        ]

    def _look(self, each: Trained, parameter: Tensor) -> None:
        if self.on and self._accumulation.sync_gradients and parameter.grad is not None:
            self._complete.pop(each.name, None)
            self._complete[each.name] = each
            self._norms = None

    def measure(self) -> None:
        """Take the norms now, because the gradients are about to change."""
        if self._norms is not None:
            return
        gradients = [(each, each.parameter.grad) for each in self._complete.values()]
        pairs = [(each, gradient) for each, gradient in gradients if gradient is not None]
        unknown = [(each, gradient) for each, gradient in pairs if known_row_norms(gradient) is None]
        found = norms(self._runtime, [each.rows(gradient) for each, gradient in unknown])
        for (_, gradient), own in zip(unknown, found, strict=True):
            note_row_norms(gradient, own)
        # In the order of backward
        self._norms = {each.name: known_row_norms(gradient) for each, gradient in pairs}  # type: ignore[misc]

    def take(self, scale: float = 1.0) -> dict[str, Tensor]:
        """Name -> norms on the CPU, `[experts]` or `[1]`, of the gradients since the last call, which have this factor
        of a gradient scaler.
        """
        self.measure()
        taken, self._norms = self._norms or {}, None
        self._complete.clear()
        return taken if scale == 1 else {name: norm / scale for name, norm in taken.items()}

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def group_norms(found: Mapping[str, Tensor], parameters: Mapping[str, Trained]) -> dict[str, float]:
    """Norm of the gradients of each group that has trained parameters."""
    present = {each.group for each in parameters.values()}
    groups: dict[str, list[Tensor]] = {group: [torch.zeros(1)] for group in GROUPS if group in present}
    for name, norm in found.items():
        groups[parameters[name].group].append(norm)
    return {group: float(torch.linalg.vector_norm(torch.cat(own).double())) for group, own in groups.items()}


def rates_of(param_groups: Iterable[dict[str, Any]]) -> dict[int, float]:
    """Id of a parameter -> its learning rate."""
    return {id(parameter): float(group["lr"]) for group in param_groups for parameter in group["params"]}


def norms(runtime: Runtime, rows: Sequence[Tensor]) -> list[Tensor]:
    """Norms, fp32 `[n]` on the CPU, of the rows of each `[n, elements]` on any device. It waits for a GPU once."""
    native = [takes(each) for each in rows]
    by_kernel = iter(row_norms(runtime, [each for each, own in zip(rows, native, strict=True) if own]))
    others = [each for each, own in zip(rows, native, strict=True) if not own]
    # FSDP2 may leave a rank no row
    others = [each if each.numel() else each.new_zeros(len(each), 1) for each in others]
    flat = [each[0] for each in others if len(each) == 1]
    of_flat = iter(torch._foreach_norm(flat, dtype=torch.float32) if flat else ())
    by_torch = [
        next(of_flat).view(1) if len(each) == 1 else torch.linalg.vector_norm(each, dim=1, dtype=torch.float32)
        for each in others
    ]
    on_cpu = iter(_to_cpu(by_torch))
    return [next(by_kernel if own else on_cpu) for own in native]


def _to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU, copied once for each device."""
    found = list(tensors)
    for device in {tensor.device for tensor in tensors}:
        places = [at for at, tensor in enumerate(tensors) if tensor.device == device]
        whole = torch.cat([tensors[at] for at in places]).cpu()
        for at, part in zip(places, whole.split([len(tensors[at]) for at in places]), strict=True):
            found[at] = part
    return found


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[Tensor],
    most: float,
    runtime: Runtime,
    ranks: Ranks | None = None,
    split: Collection[int] = (),
    pieces: Collection[int] = (),
    later: Collection[int] = (),
    anew: bool = False,
) -> tuple[Tensor, float]:
    """`torch.nn.utils.clip_grad_norm_` to the norm `most`, which does not write gradients that need no clipping.

    Args:
        ranks: the processes that hold the experts together, all of which must call it; None if this one has them all.
        split: ids of the parameters of which other ranks have other rows, beside those sharded by FSDP2.
        pieces: ids of the parameters of which other ranks of the tensor parallel group have other pieces.
        later: ids of the parameters whose gradients the caller clips.
        anew: take the norms of all gradients, since those that are known may be of other values.

    Returns:
        The norm before clipping, of all ranks' gradients, on the first gradient's device; and the factor of clipping,
        at most 1.
    """
    found = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    grads = [local(grad) for _, grad in found]
    if not grads and ranks is None:
        return torch.tensor(0.0), 1.0
    known = [None if anew else known_row_norms(grad) for grad in grads]
    others = norms(runtime, [grad.reshape(1, -1) for grad, own in zip(grads, known, strict=True) if own is None])
    rest = iter(others)
    # Of parameters that every rank has, of those split over all ranks, and of those in pieces that replicas have too
    parts: list[list[Tensor]] = [[], [], []]
    for (parameter, _), own in zip(found, known, strict=True):
        divided = id(parameter) in split or is_sharded(parameter)
        parts[1 if divided else 2 if id(parameter) in pieces else 0].append(next(rest) if own is None else own)
    here = torch.stack([torch.cat([torch.zeros(1), *part]).double().square().sum() for part in parts])
    if ranks is not None:
        here[1:] = ranks.sum(here[1:].clone())
        here[2] /= ranks.dp_size
    total = here.sum().sqrt().float()
    factor = float(most / (total + 1e-6))
    if not grads or factor >= 1:
        return total.to(grads[0].device) if grads else total, 1.0
    now = [grad for (parameter, _), grad in zip(found, grads, strict=True) if id(parameter) not in later]
    scale(runtime, [grad for grad in now if takes(grad)], factor)  # also by NaN
    if on_gpu := [grad for grad in now if not takes(grad)]:
        torch._foreach_mul_(on_gpu, factor)
    return total.to(grads[0].device), factor

"""AdamW for models whose expert LoRA is on the CPU, and the table of the Trainer's optimizers that can run there."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from packaging.requirements import Requirement
from torch import Tensor, nn
from torch.optim.adam import adam
from transformers import TrainingArguments

from ktft import native
from ktft.lanes.gpu.lane import adapters_at_rest
from ktft.late import settle, write_later
from ktft.model.experts import find_experts
from ktft.native.optim import adamw, takes
from ktft.ranks.sharded import local
from ktft.versions import version_of

_TOGETHER = 6
"""Parameters that are updated at once while others may already be used: the LoRA of one layer's experts."""
_FLAGS = ("amsgrad", "maximize", "capturable", "differentiable")


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` whose CPU parameters are updated by ktft's kernel, in one pass over memory.

    Parameters that the kernel does not support (on a GPU, fp16, not contiguous) are updated by torch, with `fused` as
    given. State and state dicts are those of `torch.optim.AdamW`, so either optimizer can load the other's checkpoint.

    Args:
        runtime: threads for the CPU parameters; None uses the process's default. The others are torch's.

    Attributes:
        later: ids of CPU parameters which `step` only begins to update: `ktft.late.settle` waits for them.
        grad_factor: what the next step multiplies their gradients by, before it uses them.

    Raises:
        ValueError: a parameter group, or a state to load, with amsgrad, maximize, capturable or differentiable.
    """

    _runtime: native.Runtime | None = None
    later: frozenset[int] = frozenset()
    grad_factor = 1.0

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        fused: bool | None = None,
        runtime: native.Runtime | None = None,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, fused=fused)
        self._runtime = runtime
        self._step_supports_amp_scaling = False  # a GradScaler then unscales gradients itself, before the step

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _refuse_flags(param_group)
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`; accepts the state dict of any `torch.optim.AdamW`."""
        for group in state_dict["param_groups"]:
            _refuse_flags(group)
        settle()
        super().load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """See `torch.optim.Optimizer`."""
        settle()
        return super().state_dict()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            own = [p for p in group["params"] if takes(local(p))]
            now, later = ([p for p in own if (id(p) in self.later) == late] for late in (False, True))
            with adapters_at_rest():
                for update in self._updates(group, now, max(len(now), 1)):
                    update()
            if later:
                updates = self._updates(group, later, _TOGETHER, self.grad_factor)
                write_later([(each.args[1], each) for each in updates])
            self._step_in_torch(group, [p for p in group["params"] if not takes(local(p))])
        self.grad_factor = 1.0
        return loss

    def _updates(
        self, group: dict[str, Any], params: list[Tensor], together: int, factor: float = 1.0
    ) -> Iterator[partial[None]]:
        """Updates of so many CPU parameters each, which are the second argument of each."""
        params, grads, exp_avgs, exp_avg_sqs, _, steps, _ = self._with_state(group, params)
        for step in steps:
            step += 1
        numbers = [float(step) for step in steps]
        own = {
            "lr": float(group["lr"]),
            "betas": (float(group["betas"][0]), float(group["betas"][1])),
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
        }
        for at in range(0, len(params), together):
            piece: tuple[Any, ...] = tuple(
                each[at : at + together] for each in (params, grads, exp_avgs, exp_avg_sqs, numbers)
            )
            yield partial(adamw, self._runtime or native.runtime(), *piece, grad_factor=factor, **own)

    def _step_in_torch(self, group: dict[str, Any], params: list[Tensor]) -> None:
        *lists, has_complex = self._with_state(group, params)
        given = {name: group[name] for name in ("foreach", "fused", "amsgrad", "maximize", "lr", "weight_decay", "eps")}
        given |= {"beta1": group["betas"][0], "beta2": group["betas"][1]}
        given |= {"has_complex": has_complex, "decoupled_weight_decay": True}
        adam(*lists, **given)

    def _with_state(self, group: dict[str, Any], params: list[Tensor]) -> Any:
        """The arguments of torch's `adam`: parameters with a gradient, their state, and whether any is complex.

        Of what FSDP2 divides they are this rank's parts: torch's fast paths do not take the whole.
        """
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        has_complex = self._init_group({**group, "params": params}, *lists)
        return *([local(tensor) for tensor in each] for each in lists), has_complex


def _refuse_flags(group: dict[str, Any]) -> None:
    for flag in _FLAGS:
        if group.get(flag):
            raise ValueError(f"{flag} is {group[flag]!r}, which ktft's AdamW does not do; leave it out")


# --- the Trainer's `optim` --------------------------------------------------------------------------------------------

NATIVE = ("adamw_torch", "adamw_torch_fused")
"""Values of `optim` that mean `AdamW`."""
BUILT_IN = ("adafactor", "adagrad", "rmsprop", "sgd")
"""Values of `optim` that torch and transformers implement themselves, for parameters on any device."""
PACKAGES = {
    "bitsandbytes>=0.50": (
        *("adamw_8bit", "adamw_bnb_8bit", "ademamix", "ademamix_8bit", "lion_32bit", "lion_8bit", "paged_adamw_32bit"),
        *("paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "paged_lion_32bit", "paged_lion_8bit"),
        *("rmsprop_bnb", "rmsprop_bnb_32bit", "rmsprop_bnb_8bit"),
    ),
    "schedulefree>=1.4": ("schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd"),
    "grokadamw>=0.1.2": ("grokadamw",),
    "torch-optimi>=0.3": ("stable_adamw",),
}
"""Package requirement -> values of `optim` that also work on CPU parameters, from that version on."""
_GPU_ONLY = "it has no CPU kernels, and expert LoRA is updated on the CPU"
_TORCHAO = "torchao does not go with the peft that ktft needs; for moments in 8 bits there is adamw_8bit"
_WHOLE_WEIGHTS = "it saves memory where whole weights are trained, and works on linear layers, which expert LoRA is not"
_GALORE = ("galore_adamw", "galore_adamw_8bit", "galore_adafactor")
REFUSED = {
    **dict.fromkeys(("adamw_apex_fused", "adamw_torch_npu_fused", "adamw_torch_xla"), _GPU_ONLY),
    "adamw_anyprecision": "torchdistx, which has it, is not maintained any more",
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), _TORCHAO),
    **dict.fromkeys(("adalomo", "lomo", "apollo_adamw", "apollo_adamw_layerwise"), _WHOLE_WEIGHTS),
    **dict.fromkeys((*_GALORE, *(f"{name}_layerwise" for name in _GALORE)), _WHOLE_WEIGHTS),
}
"""Value of `optim` -> reason for refusing it."""


def check_optimizer(args: TrainingArguments) -> None:
    """Raise ValueError if `args.optim` cannot train expert LoRA, is unknown, or needs a package that is not there."""
    optim = str(getattr(args.optim, "value", args.optim))
    if optim in (*NATIVE, *BUILT_IN):
        return
    requirement = next((package for package, values in PACKAGES.items() if optim in values), None)
    if requirement is None:
        reason = REFUSED.get(optim, "nobody has tried it on expert LoRA")
        raise ValueError(f"optim is {optim!r}, which ktft does not support: {reason}; set optim: adamw_torch")
    needed = Requirement(requirement)
    installed = version_of(needed.name)
    if installed is None or not needed.specifier.contains(installed, prereleases=True):
        raise ValueError(
            f"optim is {optim!r}, which needs {requirement} for parameters on the CPU, and installed is "
            f"{installed or 'none'}; pip install '{requirement}', or set optim: adamw_torch"
        )


_models: dict[int, weakref.ref[nn.Module]] = {}


def remember_model(args: TrainingArguments, model: nn.Module) -> None:
    """Remember, by weak reference, which model these arguments train: some callers pass only them for an optimizer."""
    if id(args) not in _models:
        weakref.finalize(args, _models.pop, id(args), None)
    _models[id(args)] = weakref.ref(model)


def choose_optimizer(
    original: Callable[..., tuple[Any, Any]], args: TrainingArguments, model: Any = None
) -> tuple[Any, Any]:
    """A Trainer's optimizer, its class and keyword arguments; torch's AdamW becomes ktft's if the model has experts."""
    cls, kwargs = original(args, model)
    trained = model if model is not None else _models.get(id(args), lambda: None)()
    experts = list(find_experts(trained).values()) if trained is not None else []
    if cls is torch.optim.AdamW and experts:
        return AdamW, {**kwargs, "runtime": experts[0].layer.runtime}
    return cls, kwargs


def describe(optimizer: Any) -> str:
    """Describe the optimizer: its name and how many parameters it updates where; accelerate's wrapper is unwrapped."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    counts: Counter[str] = Counter()
    for group in optimizer.param_groups:
        for p in group["params"]:
            kernel = isinstance(optimizer, AdamW) and takes(local(p))
            counts[f"on {p.device} by ktft's kernel" if kernel else f"on {p.device}"] += p.numel()
    where = ", ".join(f"{count:,} {place}" for place, count in counts.items())
    return f"optimizer: {type(optimizer).__module__}.{type(optimizer).__qualname__}, parameters: {where}"

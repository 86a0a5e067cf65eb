"""Guards prove in a run's first steps that all that was asked for is trained. Later they watch for NaN and dead runs.

LoRA's A has no gradient while B is zero. So after the first step with a learning rate, each group of parameters must
have a gradient and each B must differ from zero; A must have moved `WINDOW` such steps later. Each routed expert whose
tokens affect the loss must have a gradient in each of its B.

The cost is norms of all gradients, in the window and at logged steps, and a sum over the bits of all trained
parameters, in the window. The guards keep numbers for each expert and tensor, and never a copy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ktft.checkpoint.families import GROUPS
from ktft.late import settle
from ktft.native import Runtime
from ktft.native import runtime as default_runtime
from ktft.native.optim import row_bits, takes
from ktft.train.dead import NOT_SAVED, LifeSigns, Look
from ktft.train.gradients import Trained, group_norms
from ktft.train.report import logger

WINDOW = 10
"""The number of steps with a learning rate in which everything is checked."""
MAX_SKIPPED = 40
"""The most steps in a row that a gradient scaler may skip. It reaches the smallest float in fewer steps."""
ROUTED = "routed experts"
_TINY = 1e-20  # an optimizer's update may vanish if the gradient's norm is below this
_PIECE = 1 << 22  # elements
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_CUT = (
    "something between it and the loss cuts the graph (detach, no_grad, a patched or wrapped module), or its scaling "
    "is 0: look for that, or leave it out of lora_target (target_modules)"
)


class GuardError(RuntimeError):
    """The run would end with an adapter that was not trained or is broken."""


@dataclass
class GroupProof:
    """The first steps at which a group had a gradient and was updated; `late` parameters are counted apart."""

    gradient_step: int | None = None
    gradient_norm: float | None = None
    update_step: int | None = None
    late_update_step: int | None = None


@dataclass
class Step:
    """One optimizer step as the guards see it."""

    number: int  # from 1
    norms: dict[str, Tensor]  # norms of gradients, see `GradientWatch`, without a gradient scaler's factor
    reached: dict[str, Tensor]  # routed experts -> for each expert, the (token, expert) pairs that the loss depends on
    rates: dict[int, float]  # id of a parameter -> its learning rate
    scaled: bool = False  # whether a gradient scaler may skip this step
    loss: float | None = None  # the mean over the step's batches, if it is known
    groups: dict[str, float] | None = None  # norms by group, over all ranks; None if this process holds all experts

    @functools.cached_property
    def every_norm(self) -> Tensor:
        """All of `norms`, one after the other, and a zero."""
        return torch.cat([torch.zeros(1), *self.norms.values()])

    @functools.cached_property
    def norm(self) -> float:
        """The norm of all gradients."""
        if self.groups is not None:
            return math.hypot(*self.groups.values())
        return float(torch.linalg.vector_norm(self.every_norm.double()))


@dataclass
class Guards:
    """The checks of one run. Call `before_step` and `after_step` around the optimizer's step, in order."""

    parameters: dict[str, Trained]
    runtime: Runtime = field(default_factory=default_runtime)
    life: LifeSigns = field(default_factory=lambda: LifeSigns(None))
    proofs: dict[str, GroupProof] = field(default_factory=dict)  # group -> what has been seen of it
    steps: int = 0  # finished ones in the window
    skipped: int = 0
    closed_step: int | None = None  # the step at which the window closed
    failure: str | None = None  # the message of the error that was raised
    _bits: dict[str, Tensor] = field(default_factory=dict)
    _moved: dict[str, Tensor] = field(default_factory=dict)  # layer -> whether a B of each expert moved
    _step: Step | None = None
    _unchecked: Step | None = None  # the last step of which the updates are still to be checked
    _rates: dict[int, float] = field(default_factory=dict)
    _overflow: str | None = None

    def __post_init__(self) -> None:
        present = {each.group for each in self.parameters.values()}
        self.proofs = {group: GroupProof() for group in GROUPS if group in present}

    @property
    def experts_updated(self) -> int:
        """The number of (layer, expert) pairs with a B that moved within the window."""
        return sum(int(moved.sum()) for moved in self._moved.values())

    @property
    def open(self) -> bool:
        """Whether every step is still checked."""
        return self.closed_step is None or self.life.doubtful

    def before_step(self, step: Step) -> None:
        """Check gradients.

        Raises GuardError if one holds NaN or Inf, a group or an expert has none, or the run no longer learns, or if a
        parameter did not move in the step before.
        """
        self._check_updates()
        self._step, self._overflow = None, None
        broken = None
        if not step.every_norm.isfinite().all():
            broken = next(name for name, norm in step.norms.items() if not norm.isfinite().all())
        if broken is not None and step.scaled:
            self._overflow = broken  # the scaler should skip this step
            return
        if broken is not None:
            self._fail(self._not_finite(step, broken))
        if dead := self.life.look(Look(step.number, step.loss, step.norm, max(step.rates.values(), default=0.0))):
            self._fail(dead)
        if not step.norm:
            return  # no sample had a label, for instance
        self._check_groups(step)
        self._check_experts(step)
        if self.closed_step is None and any(rate > 0 for rate in step.rates.values()):
            self._step = step
            if not self._bits:
                self._bits = self._bits_now()

    def after_step(self, number: int, skipped: bool) -> None:
        """Remember within the window to check that parameters moved. They may still be on their way.

        Raises GuardError if a gradient scaler skips all steps.
        """
        self.skipped = self.skipped + 1 if skipped else 0
        if self.skipped > MAX_SKIPPED:
            self._fail(
                f"step {number}: {self.skipped} steps in a row were skipped, because gradients hold NaN or Inf in fp16 "
                "at every scale; set bf16: true in place of fp16"
            )
        if skipped:
            return
        if self._overflow is not None:
            self._fail(f"step {number}: the gradient of {self._overflow} held NaN or Inf, and the step was not skipped")
        step, self._step = self._step, None
        if step is not None:
            self._rates, self._unchecked = step.rates, step
            self.steps += 1
            if self.steps == WINDOW:
                self.close(number)

    def close(self, number: int) -> None:
        """End the window, unless it has ended or is too short, with the checks that need several steps.

        Raises GuardError if a group had no gradient, or the group or LoRA's A in it was not updated.
        """
        self._check_updates()
        if self.closed_step is not None or self.steps < 3:
            return
        self.closed_step = number
        for group, proof in self.proofs.items():
            members = [each for each in self.parameters.values() if each.group == group]
            if proof.gradient_step is None:
                self._fail(
                    f"{group}: no gradient in {self.steps} steps, the first parameter is {members[0].name}; {_CUT}"
                )
            for late, seen in ((False, proof.update_step), (True, proof.late_update_step)):
                own = [each for each in members if each.late == late and each.here]
                if own and seen is None:
                    self._not_updated(group, own)
        self._bits.clear()
        logger().info(
            "%s: gradients and updates seen within %d steps; from here on gradients are checked at logged steps, "
            "parameters before they are saved",
            ", ".join(self.proofs),
            self.steps,
        )

    def end(self, number: int) -> None:
        """Make the last checks of a run. Raises GuardError as `close` does, or if the run does not learn at its end."""
        if dead := self.life.end():
            self._fail(dead)
        self.close(number)
        self.check_finite(number)

    def check_finite(self, number: int) -> None:
        """Check all trained parameters before they are saved. Raises GuardError if one holds NaN or Inf."""
        self._check_updates()
        settle()
        for name, each in self.parameters.items():
            rows = each.rows(each.parameter)
            finite = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).isfinite()
            if finite.all() or rows.isfinite().all():
                continue
            expert = f" of expert {int((~finite).nonzero()[0])}" if each.layer else ""
            self._fail(f"step {number}: parameter {name}{expert} holds NaN or Inf. {self.life.blame()}. {NOT_SAVED}")

    def _check_groups(self, step: Step) -> None:
        groups = step.groups if step.groups is not None else group_norms(step.norms, self.parameters)
        for group, norm in groups.items():
            proof = self.proofs[group]
            if norm > 0 and proof.gradient_step is None:
                proof.gradient_step, proof.gradient_norm = step.number, norm
            # Other modules may be unused in a step: a vision tower is if no sample has an image.
            if norm == 0 and group != "other":
                first = next(each.name for each in self.parameters.values() if each.group == group)
                self._fail(
                    f"step {step.number}: {group} are not trained: the gradient of all their parameters is 0 or absent "
                    f"(the first is {first}), while other groups have one; {self._cut(proof, step)}"
                )

    def _check_experts(self, step: Step) -> None:
        for name, each in self.parameters.items():
            if each.layer is None or each.late:
                continue
            # numpy, because torch takes several times as long for so few numbers, and there are many layers
            reached, norm = step.reached[each.layer].numpy(), step.norms.get(name)
            if not reached.any() and step.groups is None:
                self._fail(
                    f"step {step.number}: {each.layer}: none of its tokens has a gradient, while other layers' have; "
                    f"{self._cut(self.proofs[each.group], step)}"
                )
            # Two tokens may cancel exactly, as in the common beginning of DPO's chosen and rejected answers.
            untrained = reached % 2 == 1
            if norm is not None:
                untrained &= norm.numpy() == 0
            if untrained.any():
                expert, rows = int(untrained.argmax()), _some(torch.from_numpy(untrained))
                self._fail(
                    f"step {step.number}: routed experts are not trained: {name} has no gradient for {rows}; the loss "
                    f"depends on {reached[expert]} tokens of expert {expert}; "
                    f"{self._cut(self.proofs[each.group], step)}"
                )

    def _cut(self, proof: GroupProof, step: Step) -> str:
        """The likely reason for a missing gradient. If there was one before, the graph is not cut."""
        if proof.gradient_step is None or proof.gradient_step == step.number:
            return _CUT
        return f"there was one at step {proof.gradient_step}. {self.life.blame()}. {NOT_SAVED}"

    def _bits_now(self) -> dict[str, Tensor]:
        settle()
        return dict(zip(self.parameters, _bits(self.parameters.values(), self.runtime), strict=True))

    def _check_updates(self) -> None:
        step, self._unchecked = self._unchecked, None
        if step is None:
            return
        now = self._bits_now()
        for name, each in self.parameters.items():
            before, after = self._bits[name], now[name]
            self._bits[name], moved = after, after != before
            norm = step.norms.get(name, torch.zeros(len(after)))
            if each.layer is not None and not each.late:
                self._moved[each.layer] = self._moved.get(each.layer, moved) | moved
            proof = self.proofs[each.group]
            if moved.any() and norm.any():
                if each.late:
                    proof.late_update_step = proof.late_update_step or step.number
                else:
                    proof.update_step = proof.update_step or step.number
            # Any update of a zero shows. Other values, and fp16, may lose it in rounding: `close` checks these.
            stuck = (norm > _TINY) & ~moved & (before == 0)
            if stuck.any() and each.parameter.dtype != torch.float16:
                row = int(stuck.nonzero()[0])
                experts = f" of {_some(stuck)}" if each.layer else ""
                self._fail(
                    f"step {step.number}: {each.group} are not trained: {name}{experts} is still 0 after the "
                    f"optimizer's step, with a gradient of norm {float(norm[row]):.3g}; {_rate(each, step.rates)}"
                )

    def _not_updated(self, group: str, own: list[Trained]) -> None:
        message = (
            f"{group}: {own[0].name} and {len(own) - 1} more of its kind are the same bits as {self.steps} optimizer "
            f"steps ago; {_rate(own[0], self._rates)}"
        )
        if all(each.parameter.dtype == torch.float32 for each in own):
            self._fail(message)
        logger().warning(
            "%s. They are in %s: updates this small are lost in rounding; set bf16: true in place of pure_bf16, or "
            "raise learning_rate",
            message,
            str(own[0].parameter.dtype).removeprefix("torch."),
        )

    def _not_finite(self, step: Step, broken: str) -> str:
        count = sum(not norm.isfinite().all() for norm in step.norms.values())
        rows = (~step.norms[broken].isfinite()).nonzero()
        expert = f" of expert {int(rows[0])}" if self.parameters[broken].layer else ""
        return (
            f"step {step.number}: the gradient of {broken}{expert} holds NaN or Inf. It is the first in backward's "
            f"order, {count} of {len(step.norms)} do. Nothing was updated in this step. {self.life.blame()}; look for "
            f"samples without a label, too. {NOT_SAVED}"
        )

    def _fail(self, message: str) -> None:
        self.failure = message
        raise GuardError(message)


def _bits(parameters: Iterable[Trained], runtime: Runtime) -> list[Tensor]:
    """The sum over the bits of each parameter's rows, int64 on the CPU: 0 for zeros, another after any one update."""
    rows = [each.rows(each.parameter) for each in parameters]
    by_kernel = iter(row_bits(runtime, [each for each in rows if takes(each)]))
    return [next(by_kernel) if takes(each) else _bits_in_torch(each) for each in rows]


def _bits_in_torch(rows: Tensor) -> Tensor:
    words = rows.view(_BITS[rows.element_size()])
    parts = words.split(max(_PIECE // len(words), 1), dim=1)  # torch widens all it sums to int64 at once
    return torch.stack([part.sum(1, dtype=torch.int64) for part in parts]).sum(0).to("cpu")


def _some(rows: Tensor) -> str:
    """The experts whose entry is set, in few words."""
    found = [int(row) for row in rows.nonzero().flatten()]
    shown = ", ".join(map(str, found[:4]))
    return f"expert{'s' if len(found) > 1 else ''} {shown}{f' and {len(found) - 4} more' if len(found) > 4 else ''}"


def _rate(each: Trained, rates: Mapping[int, float]) -> str:
    """The cause and the cure, as the parameter's learning rate suggests them."""
    rate = rates.get(id(each.parameter))
    if rate is None:
        return (
            "it is in none of the optimizer's parameter groups: build the optimizer after adding LoRA, from all "
            "parameters with requires_grad"
        )
    if rate == 0:
        return (
            f"the learning rate of its parameter group is 0, that of others {max(rates.values()):.3g}: give the group "
            "one, or set requires_grad to False on its parameters"
        )
    return (
        f"its learning rate is {rate:.3g}, so the optimizer leaves it out: use the Trainer's own (optim: adamw_torch), "
        "or look at what wraps or patches its step"
    )

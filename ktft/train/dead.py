"""Decides whether a run still learns. A run that can no longer learn ends with an error and never counts as finished.

Steps whose gradients are checked are also looked at for two signs. A run that learns shows neither:

- Dead: the gradient of every trained tensor is exactly 0, while the loss is not near 0. If nothing is left to learn,
  the loss is near 0 too; a batch without labels has a loss of 0, or none.
- Lost: the loss began well below that of a guess among all tokens, ln(vocabulary), and is now at that level or above.

A sign must hold at several looks in a row, and at ten times as many if the learning rate is usual for LoRA: DPO pairs
whose answers are truncated to the same text have a loss of ln(2) and no gradient, and several may come in a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel

from ktft.train.report import logger

DEAD_STEPS, LOST_STEPS = 5, 10
"""After this many looks in a row at a dead run or a lost model, a run with a rate above `USUAL_RATE` ends."""
USUAL_RATE = 1e-2
"""Up to this learning rate, ten times as many looks are needed."""
FIRST = 3
"""The number of looks that show how a run began, and the smallest number that shows that nothing has a gradient."""
WITHOUT_GRADIENT = 10
"""A run whose first looks, this many, show neither a gradient nor a loss gets a warning."""
LEAST_LOSS = 0.01
"""A loss of more than this value shows that there is something to learn."""
KNOWING, GUESSING = 0.75, 0.9
"""Shares of ln(vocabulary). A loss below the first comes from a model that knows something, a loss above the second
from a guess. The second is below 1 because transformers divides by the number of labels, and the first label of each
sample counts although it has no loss."""

NOT_SAVED = (
    "No adapter of this run is saved; its checkpoints, if there are any, are from before. Begin anew, from the adapter "
    "of one of them if you like: set another output_dir and give adapter_name_or_path (ktft.load_adapter). Resuming "
    "would keep the learning rate"
)


def vocabulary_of(model: nn.Module) -> int | None:
    """The size of the model's vocabulary; None if no configuration states it."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            size = getattr(module.config.get_text_config(), "vocab_size", None)
            return int(size) if size is not None and size > 1 else None
    return None


@dataclass(frozen=True)
class Look:
    """One look at step `number`, from 1: its mean loss, if known, the norm of all gradients, and the largest rate."""

    number: int
    loss: float | None
    norm: float
    rate: float

    @property
    def labelled(self) -> bool:
        """Whether the loss shows that there is something to learn."""
        return self.loss is not None and math.isfinite(self.loss) and self.loss > LEAST_LOSS


@dataclass
class LifeSigns:
    """The results of a run's looks so far."""

    vocabulary: int | None  # the number of tokens, if known
    alive: Look | None = None  # the last look with a gradient
    dead: list[Look] = field(default_factory=list)  # the latest looks, without a gap, that showed a dead run
    lost: list[Look] = field(default_factory=list)  # the latest looks, without a gap, whose loss was that of a guess
    began: list[float] = field(default_factory=list)  # the losses of the first `FIRST` looks with labels
    looks: int = 0
    peak_rate: float = 0.0

    @property
    def guess(self) -> float:
        """The loss of a guess among all tokens."""
        return math.inf if self.vocabulary is None else math.log(self.vocabulary)

    @property
    def doubtful(self) -> bool:
        """Whether the last looks leave open if the run still learns: look again at once and save nothing."""
        return self._signs * 3 >= self._patience or (bool(self.dead) and self._unusual)

    @property
    def _signs(self) -> float:
        """How many times `DEAD_STEPS` or `LOST_STEPS` the latest looks are; at `_patience`, the run ends."""
        return max(len(self.dead) / DEAD_STEPS, len(self.lost) / LOST_STEPS)

    @property
    def _unusual(self) -> bool:
        return self.peak_rate > USUAL_RATE

    @property
    def _patience(self) -> int:
        return 1 if self._unusual else 10

    @property
    def _knew(self) -> bool:
        """Whether the model knew something at first. A large learning rate may spoil all looks but the first."""
        enough = self.began[:1] if self._unusual else self.began if len(self.began) == FIRST else []
        return bool(enough) and max(enough) < KNOWING * self.guess

    def look(self, look: Look) -> str | None:
        """Record a look at a step. Returns the reason why the run must end; None if it goes on."""
        self.looks += 1
        self.peak_rate = max(self.peak_rate, look.rate)
        if look.norm > 0:
            self.alive = look
            self.dead.clear()
        elif look.labelled:
            self.dead.append(look)
        if look.labelled and look.loss is not None:
            if len(self.began) < FIRST:
                self.began.append(look.loss)
            if look.loss >= GUESSING * self.guess and self._knew:
                self.lost.append(look)
            else:
                self.lost.clear()
        if self._signs >= self._patience:
            return self._reason()
        if self.alive is None and not self.dead and self.looks == WITHOUT_GRADIENT:
            logger().warning("%s", self._never())
        return None

    def end(self) -> str | None:
        """The reason why a run that ends now must not count as finished; None if it may."""
        if self.doubtful:
            return self._reason()
        return self._never() if self.alive is None and self.looks >= FIRST else None

    def _reason(self) -> str:
        return self._dead() if self.dead else self._lost()

    def _dead(self) -> str:
        first, last = self.dead[0], self.dead[-1]
        assert last.loss is not None
        since = _steps(first, last) if self.alive is not None else f"every step looked at up to {last.number}"
        return (
            f"step {last.number}: the run is dead: the gradient of every trained tensor is exactly 0 in {since}, "
            f"with a loss of {last.loss:.4g}{self._level(last.loss)}. {self._cause()}. {NOT_SAVED}"
        )

    def _lost(self) -> str:
        first, last = self.lost[0], self.lost[-1]
        assert last.loss is not None
        least = min(look.loss or 0.0 for look in self.lost)
        return (
            f"step {last.number}: the model has lost what it knew: the loss was {self.began[0]:.4g} at first and is "
            f"{last.loss:.4g} now. In {_steps(first, last)} it was never below {least:.4g}; a guess among its "
            f"{self.vocabulary:,} tokens has {self.guess:.4g}, ln({self.vocabulary}). {self._cause()}. {NOT_SAVED}"
        )

    def _never(self) -> str:
        return (
            f"no trained tensor has had a gradient in any of {self.looks} steps, and the loss was 0 or NaN: do all "
            "labels say -100? They do where cutoff_len (max_length) cuts off the answers, where the template does not "
            "fit the data, and where mask_history or completion_only_loss leaves nothing. Look at the labels of one "
            "batch. A run that ends like this ends with this error, and saves no adapter"
        )

    def _level(self, loss: float) -> str:
        if GUESSING * self.guess < loss < 1.05 * self.guess:
            level = f"ln({self.vocabulary}) is {self.guess:.4g}"
            return f", about that of a guess among its {self.vocabulary:,} tokens ({level})"
        if abs(loss - math.log(2)) < 1e-4:
            return ", ln(2), that of a model which prefers nothing"
        return ""

    def _cause(self) -> str:
        if self.alive is None:
            return (
                "There never was a gradient: something between the loss and all trained parameters cuts the graph "
                "(detach, no_grad, a patched or wrapped module), or A and B of LoRA are both 0"
            )
        if not self.dead:
            return self.blame()
        return f"At step {self.alive.number} the gradient still had a norm of {self.alive.norm:.3g}. {self.blame()}"

    def blame(self) -> str:
        """The most likely cause of the damage since the run began, as a sentence without its full stop."""
        if not self.looks:
            return "No update came before, so look for the cause in the model and the data"
        if self._unusual:
            return (
                f"The likely cause is learning_rate, which is {self.peak_rate:g}; LoRA takes 1e-5 to 1e-3. "
                "Perhaps a minus sign is lost in its exponent"
            )
        return (
            f"learning_rate is {self.peak_rate:g}, which is not unusual: try a tenth of it, and look for what else "
            "changes parameters, or for a loss that does not depend on the model any more"
        )


def _steps(first: Look, last: Look) -> str:
    return f"steps {first.number} to {last.number}" if last.number > first.number else f"step {last.number}"

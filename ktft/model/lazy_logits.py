"""Logits that are computed when somebody needs them, and for the loss only as many at a time as fit a small buffer.

The logits of 65,536 tokens over 129,280 words are 17 GB in bf16, and the loss needs their fp32 copy and gradients too.
But it needs each token's logits only once, and those of prompts never. `LazyLogits` stands for logits in a model's own
code: it keeps the hidden states and what is done to the logits. Cross entropy and argmax take a chunk of tokens at a
time; whatever else looks at them gets the real logits, so that all code stays right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Number
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 128 * 2**20
"""The most that the logits of one chunk of tokens take in fp32, unless these are the fewest tokens of a chunk."""
_FEWEST_TOKENS = 32
_CHUNK_LOGIT_BYTES = 12
"""Of a chunk's logit: itself, its fp32 copy on a CPU, its probability in fp32, and its gradient."""

Step = Callable[[Tensor], Tensor]


def chunk_tokens(width: int) -> int:
    """How many tokens have their logits at a time, of `width` each."""
    return max(CHUNK_BYTES // max(4 * width, 1), _FEWEST_TOKENS)


def loss_bytes(tokens: int, width: int, hidden_size: int, element: int) -> int:
    """Bytes that the loss takes, forward and backward, with logits that are lazy.

    Args:
        tokens: of one micro-batch, padding included.
        width: the size of the vocabulary.
        element: bytes of an element of the hidden states.
    """
    return min(tokens, chunk_tokens(width)) * width * _CHUNK_LOGIT_BYTES + 2 * tokens * hidden_size * element


@dataclass(frozen=True)
class _Recipe:
    """How logits are made of hidden states `[..., H]`.

    Attributes:
        forward: the output layer's own forward.
        autocast: what autocast was when the layer was called: device type, dtype, whether it was on.
        width: the size of the vocabulary.
        dtype: of the logits.
        steps: what the model does with each logit afterwards.
        unwidened: what makes the same numbers in a narrower dtype, if the last step only widens it.
    """

    forward: Step
    autocast: tuple[str, torch.dtype, bool]
    width: int
    dtype: torch.dtype
    steps: tuple[Step, ...] = ()
    unwidened: _Recipe | None = None

    def __call__(self, hidden: Tensor) -> Tensor:
        device_type, dtype, enabled = self.autocast
        with torch.autocast(device_type, dtype, enabled):
            logits = self.forward(hidden)
            for step in self.steps:
                logits = step(logits)
        return logits

    def then(self, step: Step, dtype: torch.dtype) -> _Recipe:
        """The recipe with one more step, whose result has a dtype."""
        return replace(self, steps=(*self.steps, step), dtype=dtype, unwidened=None)

    def pull(self, hidden: Tensor, gradient: Callable[[Tensor], Tensor]) -> Tensor:
        """The gradient of `hidden`, of that of its logits, which is made of these. It has no part of the graph."""
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            logits = self(leaf)
        return torch.autograd.grad(logits, leaf, gradient(logits.detach()))[0]

    def chunks(self, count: int) -> Iterator[slice]:
        """Slices of `count` tokens."""
        size = chunk_tokens(self.width)
        yield from (slice(first, min(first + size, count)) for first in range(0, count, size))


@dataclass(frozen=True)
class _View:
    """Logits that lazy logits are a view of."""

    of: LazyLogits
    look: Step


class LazyLogits(Tensor):
    """Logits `[..., vocabulary]` that are not computed yet.

    Shape, dtype, device and gradients are those of the real ones. What takes rows of them (slices, `view`, `split`),
    scales them, squashes them by `tanh` or converts them gives lazy logits again; `cross_entropy` and `argmax` compute
    chunk by chunk. All else gets the real ones, which are kept from then on. A large view has its real logits from
    those that it is a view of, so that they are computed once.
    """

    _hidden: Tensor
    _recipe: _Recipe
    _part_of: _View | None
    _real: Tensor | None
    _plain: Tensor | None

    @staticmethod
    def __new__(cls, hidden: Tensor, recipe: _Recipe, part_of: _View | None) -> LazyLogits:
        shape = (*hidden.shape[:-1], recipe.width)
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=recipe.dtype, device=hidden.device)
        made._hidden, made._recipe, made._part_of, made._real, made._plain = hidden, recipe, part_of, None, None
        return made

    @classmethod
    def of(cls, hidden: Tensor, recipe: _Recipe, part_of: _View | None = None) -> LazyLogits:
        """Lazy logits of `hidden` `[..., H]`, in autograd's graph if gradients are on."""
        return cast(LazyLogits, _Deferred.apply(hidden, recipe, part_of))

    @property
    def computed(self) -> bool:
        """Whether the real logits are there; somebody may have changed them since."""
        return self._real is not None or (self._part_of is not None and self._part_of.of.computed)

    @property
    def adrift(self) -> bool:
        """Whether somebody else's node of autograd's graph has made them, so that the way back leads through it."""
        made_by = self.grad_fn
        return self.requires_grad and (made_by is None or made_by.name() != f"{_Deferred.__name__}Backward")

    def compute(self) -> Tensor:
        """The real logits, with autograd's graph as if the output layer had just been called.

        Those adrift stay as they are: torch asks `__torch_dispatch__` for their values, and its graph is right.
        """
        if self.adrift:
            return self
        if self._real is None:
            large = self.numel() > chunk_tokens(self._recipe.width) * self._recipe.width
            with torch.set_grad_enabled(self.requires_grad):
                if self._part_of is not None and (large or self.computed):
                    self._real = self._part_of.look(self._part_of.of.compute())
                else:
                    self._real = self._recipe(self._hidden)
        return self._real

    def without_graph(self) -> Tensor:
        """The real logits, without a graph; for code below autograd, where none can be made."""
        if self._real is not None:
            return self._real.detach()
        if self._plain is None:
            with torch.no_grad():
                self._plain = self._recipe(self._hidden.detach())
        return self._plain

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _METADATA:
            handler, first = _HANDLERS.get(func), args[0] if args else None
            if handler is not None and isinstance(first, LazyLogits) and not first.computed and not first.adrift:
                found = handler(func, *args, **kwargs)
                if found is not NotImplemented:
                    return found
            args, kwargs = _with(LazyLogits.compute, args), _with(LazyLogits.compute, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What torch's own code does without asking `__torch_function__`, below autograd."""
        return func(*_with(LazyLogits.without_graph, args), **_with(LazyLogits.without_graph, kwargs or {}))


class _Deferred(torch.autograd.Function):
    """The output layer in autograd's graph, while its logits are lazy; for code that only torch sees, such as DDP's."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, recipe: _Recipe, part_of: _View | None) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.recipe = recipe
        return LazyLogits(hidden, recipe, part_of)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (hidden,) = ctx.saved_tensors
        rows, gradients = hidden.flatten(0, -2), gradient.flatten(0, -2)
        out = torch.empty_like(rows)
        for part in ctx.recipe.chunks(len(rows)):
            out[part] = ctx.recipe.pull(rows[part], lambda _, part=part: gradients[part])
        return out.view_as(hidden), None, None


class _RowLosses(torch.autograd.Function):
    """Hidden states `[T, H]` -> the cross entropy `[N]` of the rows that count.

    Their gradient is computed along with the loss: the logits of a chunk are there once. Backward scales it.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, recipe: _Recipe, rows: Tensor, targets: Tensor, smoothing: float, trained: bool
    ) -> Tensor:
        precise = torch.promote_types(recipe.dtype, torch.float32)
        losses = hidden.new_empty(len(rows), dtype=precise)
        gradients = hidden.new_empty((len(rows), hidden.shape[-1]) if trained else 0)
        for part in recipe.chunks(len(rows)):
            here = _Chunk(targets[part], smoothing, precise)
            chunk = hidden.index_select(0, rows[part])
            if trained:
                gradients[part] = recipe.pull(chunk, here.gradient)
            else:
                here.log_probabilities(recipe(chunk))
            losses[part] = here.losses
        ctx.save_for_backward(gradients, rows)
        ctx.tokens, ctx.recipe = len(hidden), recipe
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients, rows = ctx.saved_tensors
        out = gradients.new_zeros(ctx.tokens, gradients.shape[-1])
        for part in ctx.recipe.chunks(len(rows)):  # the product is of the loss's dtype, and never whole
            out[rows[part]] = (gradients[part] * gradient[part, None]).to(out.dtype)
        return out, None, None, None, None, None


@dataclass
class _Chunk:
    """Cross entropy of some tokens, computed in `precise`.

    Attributes:
        losses: of each token, once its logits were given.
    """

    targets: Tensor
    smoothing: float
    precise: torch.dtype
    losses: Tensor = field(init=False)

    def log_probabilities(self, logits: Tensor) -> Tensor:
        """Log-softmax of the tokens' logits; takes the losses."""
        found = torch.log_softmax(logits, -1, dtype=self.precise)
        self.losses = -found.gather(-1, self.targets[:, None]).squeeze(-1)
        if self.smoothing:
            self.losses = (1 - self.smoothing) * self.losses - self.smoothing * found.mean(-1)
        return found

    def gradient(self, logits: Tensor) -> Tensor:
        """The gradient of the sum of losses, in the logits' dtype: probabilities, less what the target says."""
        found = self.log_probabilities(logits).exp_()
        if self.smoothing:
            found -= self.smoothing / found.shape[-1]
        found[torch.arange(len(found), device=found.device), self.targets] -= 1 - self.smoothing
        return found.to(logits.dtype)


class LazyOutput:
    """The forward of an output layer that gives lazy logits where the real ones would be more than a chunk.

    The layer makes each token's logits of its hidden state alone. While one of its parameters is trained, and where
    torch compiles the model, its logits are real.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer, self._forward = layer, layer.forward
        self._known: dict[Any, tuple[int, torch.dtype]] = {}  # a kind of hidden states -> width and dtype of logits

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        plain = not args and not kwargs and hidden.dim() > 1 and hidden.is_floating_point()
        if not plain or torch.compiler.is_compiling() or any(each.requires_grad for each in self._layer.parameters()):
            return cast(Tensor, self._forward(hidden, *args, **kwargs))
        device_type = hidden.device.type
        autocast = device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
        rows, key = hidden.shape[:-1].numel(), (hidden.dtype, autocast)
        if key not in self._known and rows:
            with torch.no_grad():  # only the layer itself knows, and one token tells
                told = self._forward(hidden.detach().flatten(0, -2)[:1])
            self._known[key] = told.shape[-1], told.dtype
        if not rows or rows <= chunk_tokens(self._known[key][0]):
            return cast(Tensor, self._forward(hidden))
        return LazyLogits.of(hidden, _Recipe(self._forward, autocast, *self._known[key]))


# --- what lazy logits can do without being computed -------------------------------------------------------------------


def _with(real: Callable[[LazyLogits], Tensor], value: Any) -> Any:
    """Arguments with real logits in place of lazy ones."""
    if isinstance(value, LazyLogits):
        return real(value)
    if type(value) in (tuple, list):
        return type(value)(_with(real, each) for each in value)
    if type(value) is dict:
        return {key: _with(real, each) for key, each in value.items()}
    return value


def _each_logit(func: Any, lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Something that is done to each logit, with numbers and dtypes alone beside it."""
    if not all(
        isinstance(each, Number | torch.dtype | torch.device | str | None) for each in (*args, *kwargs.values())
    ):
        return NotImplemented
    probe = func(torch.empty(0, dtype=lazy.dtype, device=lazy.device), *args, **kwargs)
    if probe.device != lazy.device:
        return NotImplemented
    converts = func in _CONVERSIONS
    if converts and probe.dtype == lazy.dtype:
        return lazy
    before = lazy._recipe
    recipe = before.then(lambda logits: cast(Tensor, func(logits, *args, **kwargs)), probe.dtype)
    if converts and torch.promote_types(before.dtype, probe.dtype) == probe.dtype:
        recipe = replace(recipe, unwidened=before.unwidened or before)
    return LazyLogits.of(lazy._hidden, recipe)


def _part(lazy: LazyLogits, hidden: Tensor, look: Step) -> LazyLogits:
    """Lazy logits that are a view of others. `look` makes it of the real ones."""
    return LazyLogits.of(hidden, lazy._recipe, _View(lazy, look))


def _all_rows(func: Any, lazy: LazyLogits, **kwargs: Any) -> LazyLogits:
    return _part(lazy, func(lazy._hidden, **kwargs), lambda logits: cast(Tensor, func(logits, **kwargs)))


def _as_itself(func: Any, lazy: LazyLogits, other: Tensor) -> Any:
    """`view_as` of itself, by which autograd marks what a function returns as it got it."""
    return _part(lazy, lazy._hidden, lambda logits: logits.view_as(logits)) if other is lazy else NotImplemented


def _split(func: Any, lazy: LazyLogits, size: int | list[int], dim: int = 0) -> Any:
    if dim % lazy.dim() == lazy.dim() - 1:
        return NotImplemented

    def look(number: int, logits: Tensor) -> Tensor:
        return cast(Tensor, func(logits, size, dim)[number])

    return tuple(_part(lazy, each, partial(look, n)) for n, each in enumerate(func(lazy._hidden, size, dim)))


def _item(func: Any, lazy: LazyLogits, index: Any) -> Any:
    """An index that does not reach the last dimension, or takes it whole."""
    every = index if isinstance(index, tuple) else (index,)
    if not every or not all(isinstance(each, int | slice | Tensor) or each is Ellipsis for each in every):
        return NotImplemented
    reached = sum(each.dim() if _is_mask(each) else 1 for each in every if each is not Ellipsis)
    whole = isinstance(every[-1], slice) and every[-1] == slice(None)
    beyond = reached >= lazy.dim() or any(each is Ellipsis for each in every)
    if reached > lazy.dim() or (beyond and not whole):
        return NotImplemented
    return _part(lazy, lazy._hidden[index], lambda logits: logits[index])


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _shaped(func: Any, lazy: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    """Another shape with the same last dimension."""
    like = func(torch.empty(lazy.shape, dtype=lazy.dtype, device="meta"), *args, **kwargs)
    if like.shape[-1:] != lazy.shape[-1:] or like.dtype != lazy.dtype:
        return NotImplemented
    rows = lazy._hidden.reshape(*like.shape[:-1], lazy._hidden.shape[-1])
    return _part(lazy, rows, lambda logits: logits.reshape(like.shape))


def _argmax(func: Any, lazy: LazyLogits, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim not in (-1, lazy.dim() - 1):
        return NotImplemented
    rows = lazy._hidden.detach().flatten(0, -2)
    with torch.no_grad():
        found = [lazy._recipe(rows[part]).argmax(-1) for part in lazy._recipe.chunks(len(rows))]
    best = torch.cat(found).view(lazy.shape[:-1])
    return best.unsqueeze(-1) if keepdim else best


def _cross_entropy(
    func: Any,
    lazy: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """`torch.nn.functional.cross_entropy` of logits `[T, vocabulary]` and words `[T]`."""
    usual = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum", "none")
    words = lazy.dim() == 2 and target.shape == lazy.shape[:1] and not target.is_floating_point()
    if not usual or not words or target.device != lazy.device:
        return NotImplemented
    rows = (target != ignore_index).nonzero().squeeze(-1)
    recipe, trained = lazy._recipe.unwidened or lazy._recipe, torch.is_grad_enabled() and lazy.requires_grad
    losses = _RowLosses.apply(lazy._hidden, recipe, rows, target[rows], label_smoothing, trained)
    if reduction == "none":
        found = losses.new_zeros(len(target)).index_copy(0, rows, losses)
    else:
        found = losses.sum() / (len(rows) if reduction == "mean" else 1)
    return found if torch.is_autocast_enabled(lazy.device.type) else found.to(lazy.dtype)


_CONVERSIONS = {Tensor.float, Tensor.to, Tensor.double, Tensor.bfloat16, Tensor.half}
_SCALES = {Tensor.div, Tensor.true_divide, Tensor.__truediv__, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.div}
_HANDLERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_CONVERSIONS | _SCALES | {torch.mul, torch.tanh, Tensor.tanh}, _each_logit),
    **dict.fromkeys((Tensor.detach, Tensor.contiguous, Tensor.clone, torch.detach, torch.clone), _all_rows),
    **dict.fromkeys((Tensor.split, torch.split), _split),
    **dict.fromkeys((Tensor.view, Tensor.reshape, Tensor.flatten, torch.reshape, torch.flatten), _shaped),
    **dict.fromkeys((Tensor.argmax, torch.argmax), _argmax),
    Tensor.view_as: _as_itself,
    Tensor.__getitem__: _item,
    F.cross_entropy: _cross_entropy,
}
_PROPERTIES = "shape dtype device layout ndim requires_grad is_leaf grad_fn output_nr _version is_cuda is_cpu is_meta"
_METADATA = {
    *(getattr(Tensor, name).__get__ for name in (*_PROPERTIES.split(), "is_sparse", "is_quantized", "is_nested")),
    *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__),
    *(Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.is_complex, torch.numel),
    *(Tensor.get_device, Tensor.__hash__),
}
"""What is known without logits."""

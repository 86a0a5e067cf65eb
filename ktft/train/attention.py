"""Spans of attention: hooks on the attention modules of a model's decoder layers, forward and backward."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from ktft import spans
from ktft.device import device_of
from ktft.model.experts import decoder_lists, experts_family


def attention_modules(model: nn.Module) -> list[tuple[int, nn.Module]]:
    """(layer number, attention module) of every decoder layer, also of layers without experts and in wrapped models.

    A module is a decoder layer if its list of modules contains a layer with experts.
    """
    if not (lists := decoder_lists(model)):
        return []
    names = "|".join(experts_family(model).attention)
    pattern = re.compile(rf"(?:{'|'.join(map(re.escape, lists))})\.(\d+)\.(?:{names})")
    matches = ((pattern.fullmatch(name), module) for name, module in model.named_modules())
    return [(int(match[1]), module) for match, module in matches if match is not None]


def _span(layer: int, device: torch.device) -> spans.Span:
    return spans.device("attention", layer, device_of(device).current_stream())


class AttentionSpans:
    """Records a span for attention in each decoder layer of a model until `close` is called."""

    def __init__(self, model: nn.Module) -> None:
        self._handles: list[Any] = []
        for layer, module in attention_modules(model):
            watch = _Watch(layer)
            self._handles += [
                module.register_forward_pre_hook(watch.before, with_kwargs=True),
                module.register_forward_hook(watch.after, with_kwargs=True, always_call=True),
            ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


class _Watch:
    """The hooks of one module. Forward may run again before its backward, and may end with an exception."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.span: spans.Span | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (hidden := _hidden(args, kwargs)) is not None:
            self.span = _span(self.layer, hidden.device).begin()

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        span, self.span = self.span, None
        if span is None:
            return
        span.end()
        hidden, out = _hidden(args, kwargs), output[0] if isinstance(output, tuple) else output
        if hidden is not None and isinstance(out, Tensor) and out.requires_grad:
            backward = _Backward(self.layer, hidden)
            out.register_hook(backward.begin)
            if hidden.requires_grad:
                hidden.register_hook(backward.end)


class _Backward:
    """One backward pass: it begins when the output's gradient is ready and ends when the input's gradient is ready.

    Full backward hooks of modules do not see inputs passed by keyword, and transformers passes them by keyword.
    """

    def __init__(self, layer: int, hidden: Tensor) -> None:
        self.layer, self.device, self.has_end = layer, hidden.device, hidden.requires_grad
        self.span: spans.Span | None = None

    def begin(self, grad: Tensor) -> None:
        self.span = _span(self.layer, self.device).begin()
        if not self.has_end:  # no earlier layer gets a gradient, so backward ends here
            torch.autograd.Variable._execution_engine.queue_callback(self.end)

    def end(self, *_: Tensor) -> None:
        if self.span is not None:
            self.span.end()
            self.span = None


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    found = args[0] if args else kwargs.get("hidden_states")
    return found if isinstance(found, Tensor) else None

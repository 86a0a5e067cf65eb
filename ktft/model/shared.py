"""Shared experts, which the GPU computes while the CPU computes routed ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Ahead:
    """Lets one module's output be computed before the model asks for it.

    Some MoE blocks call their routed experts, which wait for the CPU, and after them their shared experts, of the same
    hidden states: until then the GPU would have nothing to do. The module's `forward` becomes this object, on the
    instance alone. Blocks that call the shared experts first are found out, and left as they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self._forward = module.forward
        self._held: tuple[Tensor, int, Tensor] | None = None
        self._asked = False  # since the routed experts last began
        module.forward = self

    def compute(self, hidden_states: Tensor) -> None:
        """Compute the output of `[T, H]` now, unless the block did; the next call of the same memory returns it."""
        if not self._asked:
            self._held = (hidden_states, hidden_states._version, self._forward(hidden_states))
        self._asked = False

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """The module's own forward, or what `compute` has of the same hidden states, whatever their shape."""
        held, self._held = self._held, None
        if held is not None:
            before, version, out = held  # it holds the memory, so no other tensor can lie there
            if before.data_ptr() == hidden_states.data_ptr() and before.numel() == hidden_states.numel():
                if hidden_states.is_contiguous() and before._version == version:
                    return out.view(*hidden_states.shape[:-1], out.shape[-1])
        self._asked = True
        found: Tensor = self._forward(hidden_states)
        return found


def shared_ahead(block: nn.Module, names: tuple[str, ...]) -> Ahead | None:
    """The shared experts, under the first of `names`, of the block that holds routed ones; None if it has none."""
    module = getattr(block, names[0], None) if names else None
    return Ahead(module) if isinstance(module, nn.Module) else None

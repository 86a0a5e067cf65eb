"""Shared experts, which the GPU computes while the CPU computes routed ones."""

from __future__ import annotations

import threading

from torch import Tensor, nn

from ktft.hosts.transformers import SHARED_EXPERTS


class Ahead:
    """Lets one module's output be computed before the model asks for it.

    Some MoE blocks call their routed experts, which wait for the CPU, and after them their shared experts, of the same
    hidden states: until then the GPU would have nothing to do. The module's `forward` becomes this object, on the
    instance alone. Blocks that call the shared experts first are found out, and left as they are. Each thread that runs
    the model has its own output waiting.
    """

    def __init__(self, module: nn.Module) -> None:
        self._forward = module.forward
        self._held: dict[int, tuple[Tensor, int, Tensor]] = {}  # by thread
        self._asked: set[int] = set()  # threads that asked since their routed experts last began
        SHARED_EXPERTS.put(module, self)

    def compute(self, hidden_states: Tensor) -> None:
        """Compute the output of `[T, H]` now, unless the block did; the next call of the same memory returns it.

        Tensors of inference mode do not tell whether they were changed since, so the block computes them itself.
        """
        thread = threading.get_ident()
        if thread not in self._asked and not hidden_states.is_inference():
            self._held[thread] = (hidden_states, hidden_states._version, self._forward(hidden_states))
        self._asked.discard(thread)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """The module's own forward, or what `compute` has of the same hidden states, whatever their shape."""
        thread = threading.get_ident()
        held = self._held.pop(thread, None)
        if held is not None and _same(held[0], hidden_states) and held[0]._version == held[1]:
            return held[2].view(*hidden_states.shape[:-1], held[2].shape[-1])
        self._asked.add(thread)
        found: Tensor = self._forward(hidden_states)
        return found


def _same(before: Tensor, now: Tensor) -> bool:
    """Whether it is the same memory; nothing else can lie there while it is held."""
    return before.data_ptr() == now.data_ptr() and before.numel() == now.numel() and now.is_contiguous()


def shared_ahead(block: nn.Module, names: tuple[str, ...]) -> Ahead | None:
    """The shared experts, under the first of `names`, of the block that holds routed ones; None if it has none."""
    module = getattr(block, names[0], None) if names else None
    return Ahead(module) if isinstance(module, nn.Module) else None

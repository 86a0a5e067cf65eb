"""Shared experts, which the GPU computes while the CPU computes the routed experts."""

from __future__ import annotations

import threading

from torch import Tensor, nn

from ktft.hosts.transformers import SHARED_EXPERTS


class Ahead:
    """Computes one module's output before the model asks for it.

    Some MoE blocks call their routed experts, which wait for the CPU, and only then their shared experts, on the same
    hidden states: the GPU would be idle until then. This object replaces the module's `forward`, on the instance only.
    Blocks that call the shared experts first are detected and left unchanged. Each thread that runs the model has its
    own waiting output.
    """

    def __init__(self, module: nn.Module) -> None:
        self._forward = module.forward
        self._held: dict[int, tuple[Tensor, int, Tensor]] = {}  # by thread
        self._asked: set[int] = set()  # threads that called the module since their routed experts last began
        SHARED_EXPERTS.put(module, self)

    def compute(self, hidden_states: Tensor) -> None:
        """Compute the output for `[T, H]` now, unless the block already did. The next call on that memory returns it.

        Tensors of inference mode do not record whether they have changed since, so the block computes theirs itself.
        """
        thread = threading.get_ident()
        if thread not in self._asked and not hidden_states.is_inference():
            self._held[thread] = (hidden_states, hidden_states._version, self._forward(hidden_states))
        self._asked.discard(thread)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """The module's own forward, or the output that `compute` has for the same hidden states, in any shape."""
        thread = threading.get_ident()
        held = self._held.pop(thread, None)
        if held is not None and _same(held[0], hidden_states) and held[0]._version == held[1]:
            return held[2].view(*hidden_states.shape[:-1], held[2].shape[-1])
        self._asked.add(thread)
        found: Tensor = self._forward(hidden_states)
        return found


def _same(before: Tensor, now: Tensor) -> bool:
    """Whether both tensors are the same memory, which cannot be reused while `before` is held."""
    return before.data_ptr() == now.data_ptr() and before.numel() == now.numel() and now.is_contiguous()


def shared_ahead(block: nn.Module, names: tuple[str, ...], hidden_size: int) -> Ahead | None:
    """Wrap the shared experts, named by the first of `names`, of a block whose routed experts take so many columns.

    Returns None if the block has no shared experts, or if these take another width: the routed experts then work on a
    projection of the hidden states, as Nemotron-3's do with `moe_latent_size`.
    """
    module = getattr(block, names[0], None) if names else None
    if not isinstance(module, nn.Module):
        return None
    first = next((each for each in module.modules() if isinstance(each, nn.Linear)), None)
    return Ahead(module) if first is None or first.in_features == hidden_size else None

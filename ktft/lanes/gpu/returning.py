"""LoRA's gradients on their way from a device to host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ktft.device import device_of
from ktft.lanes.gpu.transfer import Transfer
from ktft.lora import ExpertLora
from ktft.native import ExpertLayer
from ktft.native.cuda import Rows


class Returning:
    """Copies of gradients by one device's `transfer`. Only one thread at a time may call."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._going: list[Tensor] = []  # copies may be writing them, so nobody else may get their memory
        self._made, self._returned = transfer.event(), transfer.event()

    def check(self, layer: ExpertLayer, lora: ExpertLora | None, lora_grads: Sequence[Tensor]) -> None:
        """Whether gradients can be copied to these tensors.

        Raises:
            ValueError: a tensor has another shape or type than LoRA's gradients, or is not pinned.
        """
        wanted = [parameter.shape for parameter in lora.parameters()] if lora is not None else []
        if [grad.shape for grad in lora_grads] != wanted:
            got, expected = ([list(shape) for shape in shapes] for shapes in ([g.shape for g in lora_grads], wanted))
            raise ValueError(f"{layer.name}: LoRA's gradients have the shapes {got}, its tensors {expected}")
        for grad in lora_grads:
            if grad.dtype != torch.float32 or not grad.is_contiguous() or grad.device.type != "cpu":
                raise ValueError(
                    f"{layer.name}: LoRA's gradients must be contiguous fp32 CPU tensors, got {grad.dtype}"
                )
        if not self._transfer.locks.tensors(lora_grads):
            raise ValueError(f"{layer.name}: LoRA's gradients must be pinned: torch.empty(..., pin_memory=True)")

    def give_back(self, experts: Sequence[int], grads: Sequence[Tensor], lora_grads: Sequence[Tensor]) -> None:
        """Begin to copy gradients of these experts, made by what was queued, to their rows of `lora_grads`."""
        if not grads:
            return
        self._going += lora_grads
        self._made.record(self._transfer.compute())
        self._made.wait(self._transfer.out)
        pairs = zip(lora_grads, grads, strict=True)
        matrices = [Rows(every.data_ptr(), own.data_ptr(), own.nbytes // len(experts)) for every, own in pairs]
        self._transfer.copy_out(experts, matrices)
        self._transfer.keep(grads[:1], self._transfer.out)  # they share one storage
        self._returned.record(self._transfer.out)

    def arrival_of_all(self) -> Callable[[], None]:
        """A function that waits until all gradients are in host memory."""
        going, self._going = self._going, []

        def wait() -> None:
            self._returned.synchronize()
            going.clear()  # they had to live until here, whichever thread's they are

        return wait

    def arrival_so_far(self) -> Callable[[], None]:
        """A function that waits until the gradients of all calls so far are in host memory, and of no later ones."""
        going, event = list(self._going), device_of(self._transfer.device).event(blocking=True)
        event.record(self._transfer.out)

        def wait() -> None:
            event.synchronize()
            going.clear()  # they had to live until here

        return wait

"""Runs CPU experts in the order of a CUDA stream, so that CUDA graphs can capture them.

With the CPU as the device the same code runs without a driver.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from ktft.device import device_of
from ktft.native import cuda
from ktft.native.cuda import Driver
from ktft.native.extension import DTYPES, core
from ktft.native.layer import ExpertLayer, KeptLora
from ktft.native.machine import Runtime
from ktft.native.tensors import check_memory, described


class HostExpertsError(RuntimeError):
    """An error of a job on the experts' thread, with the layer's name."""


@dataclass(frozen=True)
class CallPlace:
    """A slot's part of the arena: host memory that the device's kernels can write and read, too.

    Attributes:
        hidden, weights: the inputs, `[max_tokens, H]` and fp32 `[max_tokens, k]`.
        index: the experts, one after the other, as bytes of int32 or int64.
        of_token: each token's adapter, int32 `[max_tokens]`.
        out: the output, `[max_tokens, H]`.
    """

    hidden: Tensor
    index: Tensor
    weights: Tensor
    of_token: Tensor
    out: Tensor


class HostExperts:
    """CPU experts that run in the order of a CUDA stream. Calls may be captured in a CUDA graph and replayed.

    A replayed graph computes with what its addresses hold at that time, the adapters included. It must not be replayed
    after `close`. The calls of one slot must be ordered by their stream, or by events between streams: a slot is free
    for another job once its wait has passed. A forked child cannot use its parent's object.

    Args:
        runtime: the threads that compute, which all layers must share. They spin for 2 ms after a job, then sleep.
        device: a CUDA device, or the CPU, where calls are done when they return.
        max_tokens: the most tokens of one call; memory for them is locked now.
        hidden_size, top_k, dtype: the sizes and the dtype of every call; the dtype is fp32, bf16 or fp16.
        slots: the number of jobs that can be in flight at the same time.
        activation_bits: see `ExpertLayer.forward`.
        driver: CUDA's driver; by default the process's own for a CUDA device, and none for the CPU.
        through: how a stream submits a job and waits for it. `words` are words of memory that the GPU writes and reads;
            `host_functions` take tens of microseconds more. The default is `words` if the driver supports them.

    Raises:
        ValueError: a size is not positive, the kernels do not take the dtype, or the driver does not support `words`.
        CudaError: there is no driver, or it refused a call.
    """

    def __init__(
        self,
        runtime: Runtime,
        device: torch.device | str | int,
        *,
        max_tokens: int,
        hidden_size: int,
        top_k: int,
        dtype: torch.dtype,
        slots: int = 2,
        activation_bits: int = 16,
        driver: Driver | None = None,
        through: str | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"hidden states must be fp32, bf16 or fp16, not {dtype}")
        self.runtime, self.device = runtime, device_of(torch.device(device)).indexed()
        self.max_tokens, self.hidden_size, self.top_k, self.dtype = max_tokens, hidden_size, top_k, dtype
        if driver is None:
            driver = cuda.driver_of(device_of(self.device))
        ordinal = self.device.index or 0
        if through is None:
            through = "words" if driver and driver.has_words(ordinal) else "host_functions"
        self.through = through
        self._native = core.HostExperts(
            runtime.handle,
            driver and driver.handle,
            ordinal,
            max_tokens,
            hidden_size,
            top_k,
            DTYPES[dtype],
            slots,
            activation_bits,
            getattr(core.Through, through),
        )
        self._layers: set[ExpertLayer] = set()  # graphs point to these layers, which must stay alive
        self._places: dict[int, CallPlace] = {}

    def submit(
        self,
        layer: ExpertLayer,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        of_token: Tensor | None = None,
        *,
        slot: int = 0,
        stream: int = 0,
    ) -> None:
        """Enqueue the copies to the host and the job. The tensors must not change until the stream has passed this.

        Args:
            hidden_states: `[T, H]` contiguous, T up to `max_tokens`; without tokens nothing is enqueued.
            top_k_index: `[T, k]` int32 or int64, contiguous; `ELSEWHERE` marks experts that add nothing here. Padding
                must be marked in the same way: otherwise its experts are read, and NaN in its hidden states is an
                error.
            top_k_weights: `[T, k]` fp32, contiguous.
            of_token: `[T]` int32, contiguous: each token's adapter, by its place; see `set_adapter`. Any other number
                stands for none, as None does for all tokens.
            slot: a free place in the arena.
            stream: the raw handle of the device's current stream.

        Raises:
            ValueError: a shape, dtype, device or layout is wrong, or the layer has another runtime.
            CudaError: the driver refused a call.
        """
        self._check(layer, hidden_states, top_k_index, top_k_weights, of_token)
        if len(hidden_states) == 0:
            return
        self._native.submit(
            layer.handle,
            hidden_states.data_ptr(),
            top_k_index.data_ptr(),
            top_k_index.element_size(),
            top_k_weights.data_ptr(),
            0 if of_token is None else of_token.data_ptr(),
            len(hidden_states),
            slot,
            stream,
        )

    def wait(self, layer: ExpertLayer, tokens: int, *, slot: int = 0, stream: int = 0) -> Tensor:
        """Enqueue the wait for the job that was last submitted to the slot, and the copy of its result.

        Args:
            layer, tokens, slot, stream: the same as in `submit`; another stream must be ordered behind that one.

        Returns:
            `[tokens, H]` on the device: each token's weighted sum over the experts that are not `ELSEWHERE`. It is zero
            after an error, which `check` raises.

        Raises:
            ValueError: the arguments are not those of the slot's last job.
            CudaError: the driver refused a call.
        """
        out = torch.empty(tokens, self.hidden_size, dtype=self.dtype, device=self.device)
        if tokens:
            self._native.wait(layer.handle, tokens, slot, out.data_ptr(), stream)
        return out

    def place(
        self,
        layer: ExpertLayer,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        of_token: Tensor | None = None,
        *,
        slot: int = 0,
        stream: int = 0,
    ) -> CallPlace:
        """Where the stream's own work writes these inputs and reads the output, in place of the copies of `submit` and
        `wait`, whose arguments they are. The slot is free for that once the stream has passed this.

        Raises:
            ValueError, CudaError: as `submit`; or there are more tokens than `max_tokens`, or none.
        """
        self._check(layer, hidden_states, top_k_index, top_k_weights, of_token)
        if not 0 < len(hidden_states) <= self.max_tokens:
            raise ValueError(f"{layer.name}: {len(hidden_states)} tokens, host experts take 1 to {self.max_tokens}")
        hidden, index, weights, numbers, out = self._native.place(slot, stream)
        if slot not in self._places:
            rows, routes = (self.max_tokens, self.hidden_size), (self.max_tokens, self.top_k)
            self._places[slot] = CallPlace(
                _tensor(hidden, rows, self.dtype),
                _tensor(index, (8 * self.max_tokens * self.top_k,), torch.uint8),
                _tensor(weights, routes, torch.float32),
                _tensor(numbers, (self.max_tokens,), torch.int32),
                _tensor(out, rows, self.dtype),
            )
        return self._places[slot]

    def submit_in_place(
        self,
        layer: ExpertLayer,
        tokens: int,
        index_dtype: torch.dtype,
        *,
        adapters: bool = False,
        slot: int = 0,
        stream: int = 0,
    ) -> None:
        """As `submit`, for inputs that the stream has written to their `place`: experts of this dtype, and, with
        `adapters`, each token's adapter.
        """
        self._native.submit_in_place(layer.handle, tokens, slot, index_dtype.itemsize, adapters, stream)

    def wait_in_place(self, layer: ExpertLayer, tokens: int, *, slot: int = 0, stream: int = 0) -> None:
        """As `wait`, for work of the stream that reads the output in the slot's `place`, before the slot's next use."""
        self._native.wait_in_place(layer.handle, tokens, slot, stream)

    def set_adapter(self, layer: ExpertLayer, place: int, kept: KeptLora | None) -> None:
        """From the next job on, in captured graphs too, tokens of this place have an adapter on the layer, or none.

        It waits until no job is queued. A job that its stream has not reached yet is not queued, so synchronize the
        stream first.

        Args:
            place: from 0 on. Few places are better: there is memory for all up to the highest.
            kept: what `ExpertLayer.keep_lora` of the layer returned.
        """
        self._native.set_adapter(layer.handle, place, None if kept is None else kept.handle)
        self._layers.add(layer)

    def check(self) -> None:
        """Raise the error of a job, if there was one. Call this once a step, after the stream was synchronized and
        before an output is used.

        Raises:
            HostExpertsError: the first error. After it nothing is computed any more, and every call raises it.
        """
        if error := self._native.error:
            raise HostExpertsError(error)

    def counts(self, layer: ExpertLayer) -> Tensor:
        """The number of tokens that each expert got here so far, `[num_experts]` int64. This does not wait."""
        return torch.tensor(self._native.counts(layer.handle), dtype=torch.int64, device="cpu")

    def seconds(self, layer: ExpertLayer) -> float:
        """Seconds that the layer's jobs took so far. This does not wait."""
        return float(self._native.seconds(layer.handle))

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena, which is locked host memory."""
        return int(self._native.arena_bytes)

    def close(self) -> None:
        """End the thread and free the memory. Call this before the process forks or ends; a second call is allowed.

        It waits for the device. Graphs that captured calls must not be replayed after it.
        """
        device_of(self.device).synchronize()
        self._native.close()

    def _check(
        self, layer: ExpertLayer, hidden_states: Tensor, index: Tensor, weights: Tensor, of_token: Tensor | None
    ) -> None:
        if layer.runtime != self.runtime:
            raise ValueError(f"{layer.name}: its runtime is another than that of the host experts")
        tokens = len(hidden_states)
        expected: list[tuple[str, Tensor, tuple[int, ...], tuple[torch.dtype, ...]]] = [
            ("hidden_states", hidden_states, (tokens, self.hidden_size), (self.dtype,)),
            ("top_k_index", index, (tokens, self.top_k), (torch.int32, torch.int64)),
            ("top_k_weights", weights, (tokens, self.top_k), (torch.float32,)),
        ]
        if of_token is not None:
            expected.append(("of_token", of_token, (tokens,), (torch.int32,)))
        for name, tensor, shape, dtypes in expected:
            fits = tensor.shape == shape and tensor.dtype in dtypes and tensor.is_contiguous()
            if not fits or tensor.device != self.device:
                wanted = " or ".join(str(dtype) for dtype in dtypes)
                raise ValueError(
                    f"{layer.name}: {name} must be contiguous {list(shape)} {wanted} on {self.device}, "
                    f"got {described(tensor)}"
                )
            check_memory(tensor, f"{layer.name}: {name}")
        self._layers.add(layer)


def _tensor(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory of the arena as a tensor, which must not be used after `close`."""
    count = torch.Size(shape).numel()
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape)

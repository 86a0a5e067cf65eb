"""What the layers of a model share to run their experts in several lanes at once."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from ktft import late, spans
from ktft.config import Settings
from ktft.device import ACCELERATORS, device_of
from ktft.lanes.gpu.call_memory import PassReport
from ktft.lanes.gpu.crossing import Crossing
from ktft.lanes.gpu.lane import GpuLane
from ktft.lanes.gpu.residents import TrainingResidents
from ktft.lanes.gpu.steady import SteadyLane
from ktft.lanes.kept import KeptOutputs
from ktft.lanes.passes import Pass, Passes
from ktft.lanes.routes import Routes
from ktft.lanes.terms import Where, Work
from ktft.lora import ExpertLora
from ktft.native import ExpertLayer
from ktft.native.optim import remember_row_norms

logger = logging.getLogger("ktft")


def tell_hooks(tensor: Tensor) -> None:
    """Call the hooks that autograd would, after a gradient that it has not seen was added to the tensor's."""
    for hook in (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(tensor)


def _add(
    layer: ExpertLayer, wait: Callable[[], None], parameters: Sequence[Tensor], grads: Sequence[Tensor]
) -> list[Tensor]:
    """Add gradients, once they are there. Returns the parameters that got some."""
    wait()
    changed = []
    for parameter, grad in zip(parameters, grads, strict=True):
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = grad.to(parameter.dtype)
        else:
            parameter.grad += grad
        changed.append(parameter)
    remember_row_norms(layer.runtime, [each.grad for each in changed if each.grad is not None])
    return changed


class Lanes:
    """The lanes of one model. They run on the device of the first hidden states that come from a GPU.

    Args:
        settings: `placement` and `gpu_expert_memory`.
        on_cpu: also run hidden states in CPU memory in lanes, with the CPU's torch in place of a GPU; for tests.

    Attributes:
        layers: of the model, in the order of its layers.
        kept: outputs of its layers that wait for checkpointing's second forward; they do not outlive a step.
        running: the lanes on the device; None until it is known.
    """

    def __init__(self, settings: Settings, on_cpu: bool = False) -> None:
        self.layers: list[ExpertLayer] = []
        self.kept: weakref.WeakSet[KeptOutputs] = weakref.WeakSet()
        self.running: DeviceLanes | None = None
        self._settings, self._on_cpu, self._owner = settings, on_cpu, os.getpid()
        self._mutex = threading.RLock()

    def on(self, device: torch.device) -> DeviceLanes | None:
        """The lanes for hidden states on this device, made on first use; None if these do not run in lanes.

        Raises:
            ValueError: the model's lanes are on another device.
            RuntimeError: this process was forked from the one that has the lanes.
        """
        if device.type not in ACCELERATORS and not self._on_cpu:
            return None
        if os.getpid() != self._owner:  # it has neither the CPU lane's thread nor the GPU, and locks may be held
            raise RuntimeError(
                f"this process ({os.getpid()}) was forked from the one that loaded the model ({self._owner}): it has "
                "neither its threads nor its GPU. Load the model in the process that computes with it, or start that "
                "process with multiprocessing's spawn method"
            )
        with self._mutex:
            if self.running is None:
                self.running = DeviceLanes(device, self._settings, self.layers)
        if device != self.running.device:
            raise ValueError(
                f"routed experts got hidden states on {device}, after others on {self.running.device}; load the model "
                'on one GPU, with a device_map such as {"": 0}'
            )
        return self.running

    def forget(self) -> None:
        """Go on like a run that resumes here: with nothing in flight to the GPU, and no pass to predict the next by.

        Prefetched experts are multiplied first, so they would change the order of sums, and with it their last bits.
        """
        if self.running is not None:
            self.running.forget()

    def begin_step(self) -> None:
        """A step of training begins; what ran since the last one, such as evaluation, is not part of its time."""
        if self.running is not None:
            self.running.begin_step()
        for kept in self.kept:  # of passes whose backward never came
            kept.clear()

    def make_room(self, tokens: int, together: int) -> None:
        """The next step has so many tokens in one micro-batch, and so many that go through layers together."""
        if self.running is not None:
            self.running.make_room(tokens, together)

    def end_step(self) -> None:
        """A step is over: learn from its time, and make the residents or let them follow the routing."""
        if self.running is not None:
            self.running.end_step()


class DeviceLanes:
    """The lanes of one model on one device, that of its hidden states. More may be appended to `layers` later.

    Any thread may call. One thread at a time places a pass, learns from passes, or changes the residents.

    Attributes:
        gpu: runs streamed and resident experts.
        cpu: the CPU lane's own thread, which does not hold the GIL while it waits.
        links: whether calls that say that they belong together are trusted to have the same inputs.
        crossing: carries hidden states, routing and gradients between host and device.
    """

    def __init__(self, device: torch.device, settings: Settings, layers: Sequence[ExpertLayer]) -> None:
        self.device, self.gpu = device, GpuLane(device)
        self.cpu, self.crossing = ThreadPoolExecutor(1, "ktft-cpu-lane"), Crossing(device)
        self._layers = layers
        self._passes, self._steady = Passes(self.gpu, settings.placement), SteadyLane(self.gpu)
        self._residents = TrainingResidents(self.gpu, settings.gpu_expert_memory)
        self.links = True
        self._differences: Tensor | None = None
        self._told: list[tuple[Tensor, Tensor, Callable[[PassReport], None]]] = []
        self._owed: list[Future[list[Tensor]]] = []
        self._gradients = ThreadPoolExecutor(1, "ktft-gradients")
        self._mutex = threading.RLock()

    # --- one pass -----------------------------------------------------------------------------------------------------

    def needs_cpu(self, layer: ExpertLayer) -> bool:
        """Whether the layer's next forward probably has work for the CPU, as its last one had."""
        before = self._passes.last.get((layer, Work.FORWARD))
        return before is None or bool(before.placement.cpu)

    def begin(
        self, layer: ExpertLayer, number: int, counts: Sequence[int], top_k: int, lora: ExpertLora | None, work: Work
    ) -> Pass:
        with self._mutex:
            run = self._passes.begin(layer, number, counts, top_k, lora, work)
        run.expect()
        return run

    def again(self, before: Pass) -> Pass:
        with self._mutex:
            run = self._passes.again(before)
        run.expect()
        return run

    def forward(self, run: Pass, routes: Routes, hidden: Tensor, top_k_weights: Tensor, out: Tensor) -> None:
        """Give the GPU its experts of a forward; the arguments are those of `GpuLane.forward`."""
        with self._given_to_gpu(run, len(run.layer.projections)):
            if run.on_gpu:
                self.gpu.forward(run.layer, run.on_gpu, routes, hidden, top_k_weights, run.lora, out)
        self._end(run, 1)
        # Copies of the other layers are done by the time the next layer has its routing. After the last layer the
        # caller may change the adapters at once
        if run.lora is not None and self._layers and self._layers[-1] is run.layer:
            self.gpu.settle()

    def backward(
        self,
        run: Pass,
        routes: Routes,
        hidden: Tensor,
        grad_output: Tensor,
        top_k_weights: Tensor,
        grad_hidden: Tensor,
        grad_weights: Tensor,
        lora_grads: Sequence[Tensor],
    ) -> None:
        """Give the GPU its experts of a backward; the arguments are those of `GpuLane.backward`."""
        with self._given_to_gpu(run, 2 * len(run.layer.projections) - 1):  # gate and up are computed again
            if run.on_gpu:
                given = routes, hidden, grad_output, top_k_weights
                self.gpu.backward(run.layer, run.on_gpu, *given, run.lora, grad_hidden, grad_weights, lora_grads)
        self._end(run, -1)

    def is_steady(self, layer: ExpertLayer, hidden: Tensor, top_k: int, lora: ExpertLora | None) -> bool:
        """Whether a layer's forward of these hidden states, and its backward, are to be steady passes."""
        with self._mutex:
            fits = self._steady.takes(layer, hidden, top_k, lora)
            return fits and self._passes.stay_on_gpu(layer, len(hidden), lora)

    @contextlib.contextmanager
    def steady_pass(
        self, layer: ExpertLayer, number: int, rows: int, work: Work, again: bool = True
    ) -> Iterator[SteadyLane]:
        """A block that gives the GPU a steady pass of decoder layer `number`, with so many rows.

        `again` says whether backward computes gate and up again. The block's work has a span, and so have
        copies to the GPU if it needs any. After it, those for the next pass begin.
        """
        streamed = self.gpu.streams(layer)
        moved = layer.packed_bytes * streamed / layer.num_experts
        each = len(layer.projections)
        products = 2 * each - 1 if work == Work.BACKWARD and again else each
        flops = 2 * products * rows * layer.hidden_size * layer.intermediate_size
        where = Where.STREAM if streamed else Where.RESIDENT
        copies = spans.device("copy_in", number, self.gpu.transfer.into, bytes=moved)
        at_work = spans.device(where, number, self.gpu.transfer.compute(), bytes=layer.packed_bytes, flops=flops)
        with copies if streamed else contextlib.nullcontext(), at_work:
            yield self._steady
        self._prefetch_all(layer, work)

    @contextlib.contextmanager
    def _given_to_gpu(self, run: Pass, products: int) -> Iterator[None]:
        """A block that gives the GPU its part of a pass, with events that time it, and spans if it has experts."""
        copies, compute = self.gpu.transfer.into, self.gpu.transfer.compute()

        def time_streams() -> None:
            for stream in (copies, compute) if self.device.type in ACCELERATORS else ():
                run.events.append(device_of(self.device).event(timing=True))
                run.events[-1].record(stream)

        time_streams()
        if run.on_gpu:
            with run.copy_span(copies), run.gpu_span(products, compute):
                yield
        else:
            yield
        time_streams()

    def _end(self, run: Pass, following: int) -> None:
        """Note that the GPU has its part of a pass, and begin to copy experts that the next pass probably streams."""
        with self._mutex:
            self._passes.end(run)
            before = self._passes.last.get(self._next(run.layer, run.work, following))
            if before is not None and before.placement.ahead:
                self.gpu.prefetch(before.layer, before.placement.ahead, before.lora)

    def _prefetch_all(self, layer: ExpertLayer, work: Work) -> None:
        """Begin to copy the experts of the pass after a steady one, which is probably steady as well. LoRA is the same
        in it, unless an optimizer's step comes between or still writes.
        """
        with self._mutex:
            before = self._steady_after(layer, work)
            if before is None:
                return
            stays = work == before.work or work == Work.FORWARD
            stays = stays and (before.lora is None or not late.writes(before.lora.parameters()))
            there = self.gpu.prefetch_steady(before.layer, before.lora, adapters=stays)
            # If PCIe has nothing to do, the pass after that one; its LoRA would come too late where it cannot go ahead
            if there and stays and (later := self._steady_after(before.layer, before.work)) is not None:
                self.gpu.prefetch_beside(later.layer, later.lora)

    def _steady_after(self, layer: ExpertLayer, work: Work) -> Pass | None:
        """How the pass after one of this layer went the last time, if all its experts ran on the GPU."""
        before = self._passes.last.get(self._next(layer, work, -1 if work == Work.BACKWARD else 1))
        return None if before is None or before.placement.cpu else before

    def _next(self, layer: ExpertLayer, work: Work, following: int) -> tuple[ExpertLayer, Work]:
        """The pass after one of this layer: that of the layer `following` places after it. But the last layer's
        backward follows its forward, and after the first layer's backward the next step begins with its forward.
        """
        if layer not in self._layers:
            return layer, Work.BOTH  # of which there is no pass
        at = self._layers.index(layer) + following
        if 0 <= at < len(self._layers):
            return self._layers[at], Work.BACKWARD if following < 0 else work
        return layer, Work.BACKWARD if following > 0 else Work.FORWARD

    # --- gradients of LoRA that come late -----------------------------------------------------------------------------

    @staticmethod
    def may_owe(parameters: Sequence[Tensor]) -> bool:
        """Whether nothing looks at the gradients of these tensors before `deliver`, so that no pass waits for them."""
        looked_at = torch.is_anomaly_enabled() or any(not p.is_leaf or p._backward_hooks for p in parameters)
        return bool(parameters) and not looked_at

    def owe(
        self, layer: ExpertLayer, wait: Callable[[], None], parameters: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> None:
        """Take gradients of a layer's LoRA, fp32, that are in host memory once `wait` returns.

        Another thread adds them to those that their parameters have, and takes their norms by expert. `deliver` waits.
        """
        self._owed.append(self._gradients.submit(_add, layer, wait, parameters, grads))

    def compare(self, first: Tensor, again: Tensor) -> None:
        """Note how often the second of a layer's two calls routes a token to another expert than the first."""
        here = (first != again).sum()
        self._differences = here if self._differences is None else self._differences + here

    def look_later(self, before: Tensor, now: Tensor, look: Callable[[PassReport], None]) -> None:
        """Let `deliver` look at what makes the `PassReport` of a steady call's backward, and of the forward before."""
        self._told.append((before, now, look))

    def deliver(self) -> None:
        """Wait until all gradients that are owed are with those that their parameters have, and tell their hooks. Look
        at what steady calls have told.

        If a call that was run again was not the same, calls are no longer trusted to be: their outputs are searched for
        by their inputs, and computed again if they are not found.

        Raises:
            ValueError: hidden states hold NaN or Inf, or a token is routed to an expert that does not exist.
        """
        differ = self._look()
        owed, self._owed = self._owed, []
        differences, self._differences = self._differences, None
        if differ or (differences is not None and bool(differences)):
            self.links = False
            logger.info(
                "checkpointing ran layers again, and tokens were routed to other experts, since their kernels round "
                "differently; from now on such layers compute their experts again"
            )
        for each in owed:
            for parameter in each.result():
                tell_hooks(parameter)
        if owed:
            self.gpu.finish()  # it lets go of what was in flight

    def _look(self) -> bool:
        """Look at what steady calls have told, in the order of the layers. Returns whether a routing has changed."""
        told, self._told = self._told, []
        if not told:
            return False
        pairs = [(before, now) for before, now, _ in told]
        numbers = iter(self._on_host(torch.cat([each for pair in pairs for each in pair])).tolist())
        found = [[PassReport.of(list(itertools.islice(numbers, len(each)))) for each in pair] for pair in pairs]
        for (_, now), (*_, look) in zip(reversed(found), reversed(told), strict=True):
            look(now)
        return any(before.routing != now.routing for before, now in found)

    def _on_host(self, tensor: Tensor) -> Tensor:
        """A tensor's copy in host memory, once the device has made it. CUDA holds a lock while it copies to memory that
        is not pinned, so the thread of gradients would wait as well.
        """
        copied, here = self.gpu.transfer.event(), tensor.to("cpu", non_blocking=True)
        copied.record(self.gpu.transfer.compute())
        copied.synchronize()
        return here

    # --- steps of training --------------------------------------------------------------------------------------------

    def observe(self, layer: ExpertLayer, counts: Sequence[int]) -> None:
        """Count a trained micro-batch's rows by expert, by which residents are chosen."""
        with self._mutex:
            self._residents.observe(layer, counts)

    def make_room(self, tokens: int, together: int) -> None:
        with self._mutex:
            self._residents.make_room(tokens, together)

    def forget(self) -> None:
        with self._mutex:
            self._passes.forget()
            self.gpu.forget()

    def begin_step(self) -> None:
        self._told.clear()
        while self._owed:  # of a step that failed
            self._owed.pop().exception()
        with self._mutex:
            self._passes.begin_step()

    def end_step(self) -> None:
        with self._mutex:
            self._passes.end_step()
            self._residents.end_step(self._layers)

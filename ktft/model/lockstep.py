"""Runs several callables side by side, one at a time, so that they can wait for each other.

The callables are stock code, such as a micro-batch's way through a model. Where one calls `meet`, it waits until all
that still run have arrived; one act then serves them all. Each has a thread of its own, because torch keeps whether
gradients are on, and autocast, by thread; only one thread runs at any time, in a fixed order, so results do not depend
on timing. Each also has random numbers of its own, so that a part which is run again, from the state that it began
with, draws the same ones.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ktft import spans
from ktft.device import device_of

Result = TypeVar("Result")
RandomState = tuple[Tensor, ...]
"""The states of torch's generators, on the CPU and on the device."""

_thread = threading.local()


def current() -> Member | None:
    """The callable that runs in this thread; None if it does not run in lockstep with others."""
    return getattr(_thread, "member", None)


def after_all(original: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call a function that changes what all share, once all have come so far."""
    if (member := current()) is not None:
        member.meet(original, None, lambda values: values)
    return original(*args, **kwargs)


class _Asked(NamedTuple):
    key: tuple[Hashable, bool]  # with whether gradients are on
    value: Any
    act: Callable[[list[Any]], Sequence[Any]]


class Cut(NamedTuple):
    """A piece that is cut out of a member's graph.

    Attributes:
        inputs: each tensor before the piece, and the leaf that the piece got in its place.
        out: what the piece made of them.
        given: the leaf that the member got in its place.
    """

    inputs: list[tuple[Tensor, Tensor]]
    out: Tensor
    given: Tensor

    def reached(self) -> list[tuple[Tensor, Tensor]]:
        """The tensors before the piece that it has sent gradients to, and these."""
        return [(before, leaf.grad) for before, leaf in self.inputs if leaf.grad is not None]


class _Abandoned(BaseException):
    """Ends a callable because another one has failed."""


class Member:
    """One of the callables.

    Attributes:
        random: the state of its random numbers, while it waits.
        data: what its callable keeps here.
        cuts: takes what is cut out of autograd's graph where members meet; None if nothing is to be cut.
        met: how often it has met others.
        link: what it runs now, if that is run again: equal in both runs. None otherwise.
    """

    def __init__(self, lockstep: Lockstep, random: RandomState, alone: bool = False) -> None:
        self.random, self.met, self.over, self.abandoned = random, 0, False, False
        self.data: Any = None
        self.cuts: list[Cut] | None = None
        self.link: Hashable = None
        self.asked: _Asked | None = None
        self.answer: Any = None
        self._lockstep, self._alone = lockstep, alone
        self._go, self._back = threading.Lock(), threading.Lock()  # released by who may go on; a semaphore is slower
        self._go.acquire()
        self._back.acquire()

    def meet(self, key: Hashable, value: Any, act: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Wait for all others. `act` gets the values of those that wait with the same key, in their order.

        It runs in the thread that called `Lockstep.run`. One that is alone does not wait. Those with gradients do not
        meet those without.

        Returns:
            This member's element of what `act` returned.
        """
        if self._alone:
            return act([value])[0]
        self.asked, self.met = _Asked((key, torch.is_grad_enabled()), value, act), self.met + 1
        self._back.release()
        self._go.acquire()
        if self.abandoned:
            raise _Abandoned
        answer, self.answer = self.answer, None
        return answer

    def meet_cut(
        self,
        key: Hashable,
        inputs: tuple[Tensor, ...],
        others: tuple[Any, ...],
        act: Callable[[list[Any]], Sequence[Tensor]],
    ) -> Tensor:
        """As `meet`, with the value `(*inputs, *others)`. If `cuts` takes it, the answer is cut out of the graph.

        So each member's own graph can go backward by itself, before and after what they have in common.
        """
        if self.cuts is None or not torch.is_grad_enabled():
            return cast(Tensor, self.meet(key, (*inputs, *others), act))
        inner = tuple(each.detach().requires_grad_(each.requires_grad) for each in inputs)
        out: Tensor = self.meet(key, (*inner, *others), act)
        if not out.requires_grad:
            return out
        self.cuts.append(Cut(list(zip(inputs, inner, strict=True)), out, out.detach().requires_grad_()))
        return self.cuts[-1].given

    def random_state(self) -> RandomState:
        """The state of the random numbers now."""
        return self._lockstep.random_state()

    def go_on(self) -> None:
        """Let it run until it waits again, or is over."""
        self._go.release()
        self._back.acquire()

    def work(self, work: Callable[[], Result]) -> Result:
        """Run the callable in this thread."""
        self._go.acquire()
        _thread.member = self
        try:
            if self.abandoned:
                raise _Abandoned
            self._lockstep.enter_thread()
            return work()
        finally:
            _thread.member = None
            self.over = True
            self._back.release()

    def work_here(self, work: Callable[[], Result]) -> Result:
        """Run the callable, the only one, in the calling thread."""
        before, _thread.member = current(), self
        try:
            return work()
        finally:
            _thread.member = before

    def abandon(self) -> None:
        """Let it end by an exception where it waits."""
        self.abandoned = True
        with contextlib.suppress(RuntimeError):  # it has not yet begun to wait
            self._go.release()


class Lockstep:
    """Runs callables on one device. Its threads stay for the next run."""

    def __init__(self, device: torch.device) -> None:
        on = dict.fromkeys((torch.device("cpu"), device_of(device).indexed()))
        self._devices = [device_of(each) for each in on]
        self._pool: ThreadPoolExecutor | None = None
        self._threads = 0

    def random_state(self) -> RandomState:
        """The present state of torch's generators."""
        return tuple(device.random_state() for device in self._devices)

    def set_random_state(self, state: RandomState) -> None:
        """Set torch's generators."""
        for device, own in zip(self._devices, state, strict=True):
            device.set_random_state(own)

    @contextlib.contextmanager
    def random_numbers(self, state: RandomState | None = None) -> Iterator[None]:
        """A block that begins with these random numbers, or else with the present ones, and leaves those outside as
        they were.
        """
        before = self.random_state()
        if state is not None:
            self.set_random_state(state)
        try:
            yield
        finally:
            self.set_random_state(before)

    @contextlib.contextmanager
    def standing_for(self, link: Hashable) -> Iterator[None]:
        """A block in which this thread is a callable without others to wait for. `link` is that of the `Member`."""
        before, _thread.member = current(), Member(self, RandomState(), alone=True)
        _thread.member.link = link
        try:
            yield
        finally:
            _thread.member = before

    def enter_thread(self) -> None:
        """Make the device the current one of a new thread, as torch keeps that by thread too. Count its spans."""
        spans.RECORDER.stand_in()
        self._devices[-1].make_current()

    def seeded(self, count: int) -> list[RandomState]:
        """States for as many callables, seeded by numbers that are drawn now."""
        seeds = torch.randint(2**62, (count,), device="cpu").tolist()
        # torch.manual_seed makes the same states, but asks backends that are not in use as well, for milliseconds
        new = [torch.Generator(device.device) for device in self._devices]
        return [tuple(each.manual_seed(seed).get_state() for each in new) for seed in seeds]

    def run(self, works: Sequence[Callable[[], Result]], states: Sequence[RandomState]) -> list[Result]:
        """Run them all, and return what they return. `states` are the random numbers that they begin with.

        Raises:
            BaseException: what the first of them raised. All others are ended before.
        """
        if len(works) == 1:  # there is nobody to wait for
            with self.random_numbers(states[0]):
                return [Member(self, states[0], alone=True).work_here(works[0])]
        before, members = self.random_state(), [Member(self, state) for state in states]
        pool = self._pool_of(len(works))
        futures = [
            pool.submit(contextvars.copy_context().run, member.work, work)
            for member, work in zip(members, works, strict=True)
        ]
        try:
            while running := [member for member in members if not member.over]:
                self._go_on(running, dict(zip(members, futures, strict=True)))
                _meet([member for member in running if not member.over])
        finally:
            for member in members:
                if not member.over:
                    member.abandon()
            wait(futures)
            self.set_random_state(before)
        return [future.result() for future in futures]

    def _go_on(self, members: list[Member], futures: dict[Member, Future[Any]]) -> None:
        """Let those that do not wait run, one after the other, until they wait or are over."""
        for member in members:
            if member.asked is None:
                self.set_random_state(member.random)
                member.go_on()
                member.random = self.random_state()
                if member.over:
                    futures[member].result()

    def _pool_of(self, count: int) -> ThreadPoolExecutor:
        if self._pool is None or self._threads < count:
            self._pool, self._threads = ThreadPoolExecutor(count, "ktft-lockstep"), count
        return self._pool


def _meet(members: list[Member]) -> None:
    """Act for those that wait with one key: that of the member which has met the fewest times."""
    if not members:
        return
    first = min(members, key=lambda member: member.met).asked
    assert first is not None
    group = [(member, member.asked) for member in members if member.asked and member.asked.key == first.key]
    with torch.set_grad_enabled(first.key[1]):
        answers = first.act([asked.value for _, asked in group])
    for (member, _), answer in zip(group, answers, strict=True):
        member.asked, member.answer = None, answer

"""The processes that train one model together, and what they send each other.

Only this file and `sharded` name torch.distributed.

Tensors on a GPU travel by NCCL, everything else by gloo over CPU memory. Every function that says so must be called by
all ranks, in the same order.
"""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ktft.device import accelerator
from ktft.ranks.launch import Launch

Value = TypeVar("Value")

LONGEST_WAIT = datetime.timedelta(hours=6)
"""How long a rank waits for others that live: one may write a checkpoint or evaluate. `ktft.ranks.watch` finds those
that do not live long before.
"""


class Ranks:
    """All processes of a run. Making one is a call that all ranks must make.

    With tensor parallel attention, each `tp_size` neighbours have the same tokens. Ranks that have the same place
    among their neighbours are data parallel: each of them has other tokens.

    Args:
        tp_size: the size of a tensor parallel group.

    Attributes:
        rank, size: the number of this process, from 0, and the number of processes.
        tp_size, tp_rank: the number of processes with this one's tokens, and its place among them.
        dp_size: the number of processes with different tokens.
        data_parallel: the numbers of these processes, of which this one is one.
    """

    def __init__(self, tp_size: int = 1) -> None:
        self.rank, self.size, self.tp_size = dist.get_rank(), dist.get_world_size(), tp_size
        if self.size % tp_size:
            raise ValueError(
                f"{self.size} processes cannot form tensor parallel groups of {tp_size}; start a multiple of {tp_size}"
            )
        self.tp_rank, self.dp_size = self.rank % tp_size, self.size // tp_size
        self.data_parallel = range(self.tp_rank, self.size, tp_size)
        self._all = self._groups([range(self.size)])
        self._data = self._tensor = self._all
        if min(tp_size, self.dp_size) > 1:  # otherwise one kind of group has all ranks, and the other only this one
            self._data = self._groups([range(first, self.size, tp_size) for first in range(tp_size)])
            self._tensor = self._groups([range(first, first + tp_size) for first in range(0, self.size, tp_size)])
        self._cpu = self._all[0]

    def _groups(self, divided: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        """The group of this rank, for tensors on the CPU and for others, of groups that divide all ranks."""
        gpu, own = accelerator(), None
        for members in divided:  # every rank must make every group
            cpu = dist.new_group(list(members), backend="gloo", timeout=LONGEST_WAIT)
            other = cpu if gpu is None else dist.new_group(list(members), backend=gpu.collectives, timeout=LONGEST_WAIT)
            own = (cpu, other) if self.rank in members else own
        assert own is not None
        return own

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes what exists once."""
        return self.rank == 0

    # --- rows of tokens -----------------------------------------------------------------------------------------------

    def numbers(self, *own: int) -> list[list[int]]:
        """The numbers that each rank gives, by rank. All ranks must call it with equally many."""
        mine = torch.tensor(own, dtype=torch.int64)
        found = torch.empty(self.size * len(own), dtype=torch.int64)
        _all_gather(found, mine, group=self._cpu)
        return found.view(self.size, len(own)).tolist()

    def gather_rows(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """The rows `[T, ...]` of the data parallel ranks, `[sum(sizes), ...]`. All ranks must call it.

        Args:
            sizes: the T of each data parallel rank.
        """
        return rows if self.dp_size == 1 else _gathered(rows, sizes, self._data)

    def sum_rows(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        """This rank's rows `[T, ...]` of the sum over all ranks of `[sum(sizes), ...]`. All ranks must call it."""
        most = max(sizes)
        if most == 0:
            return rows
        own = rows
        if self.dp_size > 1:
            if min(sizes) < most:
                rows = torch.cat([_padded(part, most) for part in rows.split(list(sizes))])
            own = rows.new_empty(most, *rows.shape[1:])
            _reduce_scatter(own, rows.contiguous(), group=_of(self._data, rows))
            own = own[: sizes[self.rank // self.tp_size]]
        return self.sum_tensor_parallel(own) if self.tp_size > 1 else own

    # --- tensor parallel groups ---------------------------------------------------------------------------------------

    def sum_tensor_parallel(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks with the same tokens; the tensor itself is unchanged. All of them must call it."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=_of(self._tensor, total))
        return total

    def gather_tensor_parallel(self, part: Tensor, sizes: Sequence[int], dim: int = 0) -> Tensor:
        """The parts of the ranks with the same tokens, of these sizes along `dim`. All of them must call it."""
        return _gathered(part.transpose(0, dim).contiguous(), sizes, self._tensor).transpose(0, dim).contiguous()

    def average(self, tensors: Sequence[Tensor], data_parallel: bool) -> None:
        """The tensors become their means over all ranks, or over the data parallel ranks. All ranks must call it."""
        groups, count = (self._data, self.dp_size) if data_parallel else (self._all, self.size)
        if count == 1:
            return
        for kind in dict.fromkeys((tensor.device, tensor.dtype) for tensor in tensors):
            same = [tensor for tensor in tensors if (tensor.device, tensor.dtype) == kind]
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            dist.all_reduce(flat, group=_of(groups, flat))
            flat /= count
            for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
                tensor.copy_(part.view_as(tensor))

    # --- numbers and objects ------------------------------------------------------------------------------------------

    def sum(self, tensor: Tensor) -> Tensor:
        """The tensor, on the CPU, becomes its sum over all ranks, in place. All ranks must call it."""
        dist.all_reduce(tensor, group=self._cpu)
        return tensor

    def gather(self, value: Value) -> list[Value]:
        """What each rank gives, by rank; it is pickled. All ranks must call it."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._cpu)
        return found

    def send_to_first(self, tensor: Tensor) -> None:
        """Send a tensor on the CPU to rank 0, which must call `receive`."""
        dist.send(tensor.contiguous(), dst=0, group=self._cpu)

    def receive(self, tensor: Tensor, rank: int) -> Tensor:
        """Fill a tensor on the CPU with what that rank sends. Only rank 0 calls it."""
        dist.recv(tensor, src=rank, group=self._cpu)
        return tensor

    # --- acting together ----------------------------------------------------------------------------------------------

    def together(self, act: Callable[[], Value]) -> Value:
        """Run `act`, and raise its error on all ranks if it fails on one. All ranks must call it.

        Raises:
            OSError, ValueError, RuntimeError: as on the first rank that failed, with its number.
        """
        error: Exception | None = None
        try:
            value = act()
        except (OSError, ValueError, RuntimeError) as found:
            error = found
        told = self.gather(None if error is None else (type(error).__name__, str(error)))
        if error is not None:
            raise error
        for rank, other in enumerate(told):
            if other is not None:
                kind = next((each for each in (OSError, ValueError) if each.__name__ == other[0]), RuntimeError)
                raise kind(f"rank {rank}: {other[1]}")
        return value

    def on_first(self, act: Callable[[], Value]) -> Value:
        """What `act` returns on rank 0, which alone runs it; errors are raised everywhere. All ranks must call it."""
        value = self.together(lambda: act() if self.first else None)
        return self.gather(value)[0]  # type: ignore[return-value]  # rank 0 ran it


def _of(groups: tuple[Any, Any], tensor: Tensor) -> Any:
    """The group that this tensor travels by."""
    return groups[tensor.device.type != "cpu"]


def _gathered(rows: Tensor, sizes: Sequence[int], groups: tuple[Any, Any]) -> Tensor:
    """The rows `[T, ...]` of a group's ranks in their order, `[sum(sizes), ...]`."""
    most = max(sizes)
    if most == 0:
        return rows
    found = rows.new_empty(len(sizes) * most, *rows.shape[1:])
    _all_gather(found, _padded(rows, most), group=_of(groups, rows))
    if min(sizes) == most:
        return found
    return torch.cat([part[:size] for part, size in zip(found.split(most), sizes, strict=True)])


def _padded(rows: Tensor, most: int) -> Tensor:
    if len(rows) == most:
        return rows.contiguous()
    return torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])


# torch 2.13 has other names for them
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def started() -> bool:
    """Whether several processes have found each other."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def ranks(tp_size: int = 1) -> Ranks:
    """The processes that train together. Its first call with a `tp_size` must be made by all ranks; see `Ranks`.

    Raises:
        RuntimeError: they have not found each other yet.
    """
    if not started():
        launch = Launch.of_environment()
        raise RuntimeError(
            f"{launch.name} holds a part of the experts, but has not joined the other {launch.ranks - 1} processes; "
            "make transformers' TrainingArguments, or call torch.distributed.init_process_group, before the model runs"
        )
    return _ranks(tp_size)


@functools.cache
def _ranks(tp_size: int) -> Ranks:
    return Ranks(tp_size)


def same(facts: Iterable[tuple[str, str]], of: Ranks) -> None:
    """Refuse ranks that differ in one of these facts: pairs of a name and a value. All ranks must call it.

    Raises:
        ValueError: the first fact that differs, with both values and ranks; on every rank.
    """
    name = Launch.of_environment().name
    told = of.gather((name, dict(facts)))
    first_name, first = told[0]
    for other_name, other in told[1:]:
        for key in first.keys() | other.keys():
            if first.get(key) != other.get(key):
                raise ValueError(
                    f"{other_name} has {key} {other.get(key, 'absent')}, {first_name} has {first.get(key, 'absent')}; "
                    "start all processes with the same files, versions, arguments and environment"
                )


def store() -> Any:
    """A connection of its own to the store by which the ranks found each other; None if that was not by address."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not started() or not host or not port:
        return None
    wait = datetime.timedelta(seconds=10)
    return dist.PrefixStore("ktft", dist.TCPStore(host, int(port), is_master=False, timeout=wait))

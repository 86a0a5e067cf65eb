"""How a step is made to fit in a machine's memory: what of the dense weights and activations lies where, and how many
micro-batches go together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ktft.model.dense_memory import DenseChoice, Tiers, choose_dense
from ktft.model.memory import Footprint, footprint, further_bytes, spare_bytes
from ktft.model.shape import ModelShape
from ktft.model.workload import Workload


@dataclass(frozen=True)
class Room:
    """The memory that one process may use, in bytes, and what its native buffers depend on; `gpu_bytes` is None
    without a GPU.
    """

    gpu_bytes: int | None
    ram_bytes: int
    threads: int
    nodes: int


@dataclass(frozen=True)
class Fit:
    """A step as it would run, and its memory; `fits` counts GPU memory alone."""

    work: Workload
    need: Footprint
    fits: bool


def fit(
    shape: ModelShape, work: Workload, expert_format: str, room: Room, tiers: Tiers, asked: int | str = "auto"
) -> Fit:
    """The step with the dense weights and activations where they leave room for most micro-batches together.

    Args:
        work: its `dense`, `away` and `together` are replaced.
        tiers: what may be chosen, as `ktft.model.dense_memory.dense_tiers` gives it.
        asked: `micro_batches_together` of the settings.

    Returns:
        The fit of the choice that fits in both memories; if none does, in the GPU's; if none does, the smallest one.
    """
    made: dict[DenseChoice, Fit] = {}

    def best(choice: DenseChoice) -> Fit:
        if choice not in made:
            made[choice] = _placed(shape, replace(work, dense=choice), expert_format, room, asked)
        return made[choice]

    def on_gpu(choice: DenseChoice) -> float:
        return best(choice).work.group if best(choice).fits else 0

    def in_both(choice: DenseChoice) -> float:
        return on_gpu(choice) if best(choice).need.ram_bytes <= room.ram_bytes else 0

    if room.gpu_bytes is None:
        return best(tiers[0][0])
    return best(choose_dense(tiers, in_both) or choose_dense(tiers, on_gpu) or _smallest(tiers, best))


def _smallest(tiers: Tiers, best: Callable[[DenseChoice], Fit]) -> DenseChoice:
    return min((each for tier in tiers for each in tier), key=lambda each: best(each).need.vram_bytes)


def _placed(shape: ModelShape, work: Workload, expert_format: str, room: Room, asked: int | str) -> Fit:
    """With all activations on the GPU if every micro-batch can go together then, otherwise with most of them away."""
    near = _grouped(shape, work, expert_format, room, asked)
    every = near.fits and (near.work.together == work.accumulation or asked != "auto")
    if room.gpu_bytes is None or not work.checkpointing or every:
        return near
    far = _grouped(shape, replace(work, away=True), expert_format, room, asked)
    return far if (far.fits, far.work.group) > (near.fits, near.work.group) else near


def _grouped(shape: ModelShape, work: Workload, expert_format: str, room: Room, asked: int | str) -> Fit:
    """As many micro-batches together as training would take."""
    gpu = room.gpu_bytes is not None

    def need(together: int) -> Footprint:
        step = replace(work, together=together)
        return footprint(shape, step, expert_format, threads=room.threads, nodes=room.nodes, gpu=gpu)

    alone = need(1)
    if asked == "auto":
        each = further_bytes(shape, work)
        if room.gpu_bytes is not None:
            free = room.gpu_bytes - alone.vram_bytes - spare_bytes(alone.vram_bytes)
        else:
            free = (room.ram_bytes - alone.ram_bytes) // 2
        count = max(1 + free // each, 1)
    else:
        count = int(asked)
    count = min(count, work.accumulation)
    whole = need(count) if count > 1 else alone
    return Fit(replace(work, together=count), whole, room.gpu_bytes is None or whole.vram_bytes <= room.gpu_bytes)

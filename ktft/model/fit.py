"""How a step is made to fit in a machine's memory: what of the dense weights and activations lies where, and how many
micro-batches go together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ktft.model.away import HOST_SHARE, host_bytes
from ktft.model.dense_memory import DenseChoice, Tiers, choose_dense
from ktft.model.memory import (
    LATER_RAM,
    RECORDINGS,
    SPARE_SHARE,
    Footprint,
    footprint,
    further_bytes,
    loss_bytes,
    score_work,
    scores_of,
    spare_bytes,
    steady_bytes,
    waiting_bytes,
    waiting_layers,
)
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
    """As many micro-batches together as training would take (`ktft.train.step_order`)."""
    gpu = room.gpu_bytes is not None

    def need(together: int) -> Footprint:
        step = replace(work, together=together)
        return footprint(shape, step, expert_format, threads=room.threads, nodes=room.nodes, gpu=gpu)

    alone = need(1)
    if asked != "auto":
        count = int(asked)
    elif room.gpu_bytes is None:
        count = (room.ram_bytes - alone.ram_bytes) // 2 // further_bytes(shape, work, gpu=False) + 1
    else:
        count = _training_count(shape, work, room.gpu_bytes, alone)
        if work.away:
            begun = alone.ram_bytes - sum(alone.ram[name] for name in LATER_RAM)
            host = host_bytes(shape.hidden_size, shape.layers, work.weight_bytes) * work.tokens
            count = min(count, int((room.ram_bytes - begun) * HOST_SHARE) // host)
    count = min(max(count, 1), work.accumulation)
    whole = need(count) if count > 1 else alone
    while asked == "auto" and count > 1 and room.gpu_bytes is not None and _required(whole) > room.gpu_bytes:
        count, whole = count - 1, need(count - 1)
    return _with_recordings(Fit(replace(work, together=count), whole, True), room.gpu_bytes)


def _training_count(shape: ModelShape, work: Workload, gpu_bytes: int, alone: Footprint) -> int:
    """How many micro-batches training lets go together, by the GPU memory that is free before the first step."""
    steady = steady_bytes(alone)
    once = max(loss_bytes(shape, work, gpu=True), score_work(shape.heads, work.batch, work.sequence, shape.eager))
    free = gpu_bytes - steady - spare_bytes(steady) - once
    layers = waiting_layers(shape.layers, work)
    scores = scores_of(shape, work)
    each = waiting_bytes(shape.hidden_size, layers, work.weight_bytes, work.checkpointing, scores)
    return free // (each * work.tokens)


def _with_recordings(made: Fit, gpu_bytes: int | None) -> Fit:
    """The fit, with as many recordings as there is memory for beside what must stay free."""
    if gpu_bytes is None:
        return made
    needed, wished = _required(made.need), made.need.vram.get(RECORDINGS, 0)
    made_of_these = min(wished, max(int(gpu_bytes / (1 + SPARE_SHARE)) - needed, 0))
    vram = made.need.vram | {RECORDINGS: made_of_these}
    return replace(made, need=replace(made.need, vram=vram), fits=needed <= gpu_bytes)


def _required(need: Footprint) -> int:
    """The bytes of VRAM without which a step does not run."""
    return need.vram_bytes - need.vram.get(RECORDINGS, 0)

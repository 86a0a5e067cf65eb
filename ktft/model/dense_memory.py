"""Where the frozen weights outside the routed experts lie, and the memory that this takes. Sizes are in bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product

from ktft.checkpoint.schemes import Fp8, Scheme
from ktft.config import DENSE_PLACEMENTS, Settings
from ktft.dense.formats import PLAIN, dense_bytes, head_format, may_pack
from ktft.dense.stream import SLOTS
from ktft.lanes.decide.costs import BF16
from ktft.model.shape import ModelShape
from ktft.native.packed import SCALE_BLOCK

_, GPU, HOST = DENSE_PLACEMENTS
COARSE = ("int8", "k4")
"""Formats that round what is released, the finer one first."""
RECORDED_COPIES = 3
"""Further copies of a layer's weights there, which recorded layers read: one a kind of layer, mostly no more."""
WEIGHTS_SHARE = 0.8
"""Of the GPU's memory the weights may take if nothing is known of what the model is loaded for: 25% more must fit."""


@dataclass(frozen=True)
class DenseChoice:
    """A format, one of `ktft.config.DENSE_FORMATS`, and a placement, `gpu` or `host`, of these weights."""

    format: str
    placement: str

    def __str__(self) -> str:
        return f"{self.format} {'in host memory' if self.placement == HOST else 'on the GPU'}"


PLAIN_ON_GPU = DenseChoice(PLAIN, GPU)


def served_dense(format: str | None) -> DenseChoice:
    """These weights in a server: in this format where products take them, or in bf16."""
    return DenseChoice(format or PLAIN, GPU)


@dataclass(frozen=True)
class DenseMemory:
    """Bytes of these weights under one choice.

    Attributes:
        gpu: what stays on the GPU; without a GPU, in memory.
        host: pinned host memory.
        transit: GPU memory for what is copied there, and for the largest matrix that is decoded for a product.
        copies: GPU memory for the weights that recordings read.
        crossing: what is copied to the GPU in each pass through all layers.
        decoded: bf16 bytes that each micro-batch decodes in each such pass.
        head: those of the output layer, which are decoded for each part of the logits.
    """

    gpu: int
    host: int
    transit: int
    copies: int
    crossing: int
    decoded: int
    head: int


@functools.lru_cache(maxsize=64)
def dense_memory(shape: ModelShape, choice: DenseChoice, value_bytes: int, *, recorded: bool) -> DenseMemory:
    """The memory of a choice. The latest are kept: a plan asks for the same few again with each expert format, machine
    and number of micro-batches.

    Args:
        value_bytes: bytes of a weight that is not packed.
        recorded: whether layers are recorded as CUDA graphs.
    """
    packed = [linear for linear in shape.linears if linear.packs]
    rest = (shape.other_parameters - sum(linear.parameters for linear in packed)) * value_bytes
    head, layers = 0, dict.fromkeys(range(shape.layers), 0)
    for linear in packed:
        sizes = linear.out_features, linear.in_features, value_bytes
        if linear.layer is None:
            head += dense_bytes(head_format(choice.format), *sizes)
        else:
            layers[linear.layer] += dense_bytes(choice.format, *sizes)
    of_kind = {True: head_format(choice.format), False: choice.format}
    coded = [
        each
        for each in packed
        if of_kind[each.layer is None] != PLAIN and may_pack(each.out_features, each.in_features)
    ]
    decoded = [sum(each.parameters * BF16 for each in coded if (each.layer is None) == last) for last in (False, True)]
    temporary = max((each.parameters * BF16 for each in coded), default=0)
    of_layers, of_kinds = sum(layers.values()), sorted(set(layers.values()), reverse=True)
    copies = sum(of_kinds[:RECORDED_COPIES]) if recorded else 0
    if choice.placement == GPU:
        return DenseMemory(of_layers + head + rest, 0, temporary, copies, 0, *decoded)
    embedding = shape.embedding * value_bytes  # looked up in host memory
    return DenseMemory(
        head + rest - embedding,
        of_layers + embedding,
        SLOTS * of_kinds[0] + temporary,
        copies,
        of_layers,
        *decoded,
    )


def released_format(scheme: Scheme) -> str | None:
    """The format that keeps what a checkpoint has of these weights exactly; None if the model's own dtype does, or none
    does: only FP8 with the format's own blocks keeps its scales.
    """
    return scheme.rounds_as if isinstance(scheme, Fp8) and scheme.block == (SCALE_BLOCK, SCALE_BLOCK) else None


Tiers = tuple[tuple[DenseChoice, ...], ...]


def dense_tiers(settings: Settings, released: str | None) -> Tiers:
    """The choices that the settings leave, the most exact ones first; those of one tier are equally exact.

    Args:
        released: the format that keeps what the checkpoint has exactly, beside the model's own dtype; None if none does
            (`released_format`).
    """
    if settings.dense_format is not None:
        formats: tuple[tuple[str, ...], ...] = ((settings.dense_format,),)
    else:
        formats = ((PLAIN, released) if released else (PLAIN,), *((each,) for each in COARSE))
    placements = (GPU, HOST) if settings.dense_placement == "auto" else (settings.dense_placement,)
    return tuple(tuple(DenseChoice(*reversed(each)) for each in product(placements, tier)) for tier in formats)


def choose_dense(tiers: Iterable[Iterable[DenseChoice]], fits: Callable[[DenseChoice], float]) -> DenseChoice | None:
    """The first choice that fits, from the first tier where any does; None if none fits.

    Args:
        fits: how well a choice fits, 0 if it does not: the micro-batches that can go together, or simply True. Within a
            tier the best one counts, and of equals the first: host memory costs less than a second copy of experts.
    """
    for tier in tiers:
        best = max(tier, key=fits)
        if fits(best):
            return best
    return None


def loaded_choice(
    shape: ModelShape, settings: Settings, released: str | None, value_bytes: int, gpu_bytes: int
) -> DenseChoice:
    """The choice for a model that is loaded for an unknown purpose: its weights and 25% more must fit on the GPU.

    Args:
        released: as in `dense_tiers`; value_bytes: as in `dense_memory`.
        gpu_bytes: the GPU's memory; `settings.gpu_memory` caps it.

    Returns:
        The smallest choice if none fits; loading then says what is missing.
    """
    tiers = dense_tiers(settings, released)

    def fits(choice: DenseChoice) -> bool:
        need = dense_memory(shape, choice, value_bytes, recorded=settings.cuda_graphs)
        return need.gpu + need.transit + need.copies <= WEIGHTS_SHARE * settings.capped(gpu_bytes)

    return choose_dense(tiers, fits) or tiers[-1][-1]

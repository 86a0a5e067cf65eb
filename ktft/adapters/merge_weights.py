"""Finds the stored tensors that an adapter changes, and computes their new values."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ktft.adapters.deltas import Delta
from ktft.adapters.merge_records import Records
from ktft.adapters.merge_survival import WEAK, Outcome, Survival
from ktft.adapters.saved import SavedAdapter
from ktft.checkpoint.addition import ADDERS, add, rounded
from ktft.checkpoint.convert import Output
from ktft.checkpoint.files import NewTensor, writing
from ktft.checkpoint.identity import read_chunks
from ktft.checkpoint.load import ExpertPlan, Matrix, locate, naming
from ktft.checkpoint.reader import CheckpointReader
from ktft.checkpoint.schemes import PLAIN_SCHEME, Shape
from ktft.model.load_plan import LoadPlan

SAME, BF16 = "same", "bf16"
NEAREST, DITHERED = "nearest", "dithered"


@dataclass(frozen=True)
class MergedPart:
    """The rows of a matrix that one delta is added to; `Outcome` explains `name` and `group`."""

    name: str
    group: tuple[str, str]
    rows: slice
    read: Callable[[], Delta]


@dataclass
class WeightChange:
    """A stored matrix, or a tensor of another shape, that is rewritten, with the deltas in `parts` added, if any.

    The storage `same` keeps the stored format; `bf16` dequantizes the matrix.
    """

    matrix: Matrix
    storage: str
    parts: list[MergedPart] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int | None]:
        """The matrix's identity: its tensor's name, and its index in a stacked tensor."""
        return self.matrix.codes.name, self.matrix.index

    @property
    def dequantized(self) -> bool:
        """Whether a quantized matrix becomes a plain one."""
        return self.storage == BF16 and self.matrix.scheme is not PLAIN_SCHEME

    def tensors(self) -> dict[str, NewTensor]:
        """Role -> the tensor to write; a stacked tensor is described whole, with all experts."""
        matrix = self.matrix
        if not self.dequantized:
            return {r: NewTensor(e.name, e.dtype, e.shape, e.nbytes) for r, e in matrix.parts.items()}
        stack: Shape = () if matrix.index is None else matrix.codes.shape[:1]
        shape = matrix.scheme.matrix_shape(matrix.codes.shape[len(stack) :])
        shape = (*stack, *(shape[::-1] if self._turned_to_plain else shape))
        name = matrix.scheme.plain_name(matrix.codes.name)
        return {"codes": NewTensor(name, "BF16", shape, 2 * torch.Size(shape).numel())}

    def nbytes_in(self, names: set[str]) -> int:
        """The number of bytes that this change reads from the tensors `names`."""
        found = (entry for entry in self.matrix.parts.values() if entry.name in names)
        return sum(e.nbytes if self.matrix.index is None else e.nbytes // e.shape[0] for e in found)

    @property
    def _turned_to_plain(self) -> bool:
        """Whether the scheme stores one row per output feature, but the plain tensor is transposed."""
        return bool(self.matrix.transposed) and not self.matrix.scheme.transposes

    def apply(self, reader: CheckpointReader) -> tuple[dict[str, Tensor], list[Outcome]]:
        """Return the tensors to write, by role, and the outcome of each part.

        Values are rounded to the nearest if the deltas survive it. If they do not, they are rounded up or down at
        random with the right mean, provided that more of the deltas survives. The random numbers depend only on the
        matrix's name.

        Raises ValueError, with file and tensor, if a value is NaN or Inf, or a sum is too large for the dtype.
        """
        matrix = self.matrix
        tensors = {role: reader.read(entry.name, matrix.index) for role, entry in matrix.parts.items()}
        turned = bool(matrix.transposed) and matrix.scheme.transposes
        with naming(matrix.codes):
            base = matrix.scheme.decode(tensors).dequantize()
            oriented = base.T if turned else base
            deltas = [(part, part.read()) for part in self.parts]
            delta = torch.zeros_like(oriented)
            for part, each in deltas:
                delta[part.rows] = each.matrix(oriented[part.rows])
            best: tuple[float, dict[str, Tensor], list[Outcome]] | None = None
            for rounding in (NEAREST, DITHERED):
                seed = zlib.crc32(repr(self.key).encode())
                dither = None if rounding == NEAREST else torch.Generator().manual_seed(seed)
                new, moved = self._store(tensors, base, delta.T if turned else delta, dither)
                moved = moved.T if turned else moved
                outcomes = []
                for part, each in deltas:
                    survival = Survival.measure(delta[part.rows], moved[part.rows], each.inputs())
                    outcomes.append(Outcome(part.name, part.group, rounding, survival))
                lost = max((outcome.survival.lost for outcome in outcomes), default=0.0)
                if best is None or lost < best[0]:
                    best = lost, new, outcomes
                if lost < WEAK:
                    break
        assert best is not None
        return best[1], best[2]

    def _store(
        self, tensors: Mapping[str, Tensor], base: Tensor, delta: Tensor, dither: torch.Generator | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the new tensors, and their dequantized difference from the stored base."""
        if not self.dequantized:
            new = add(self.matrix.scheme, tensors, delta, dither)
            return new, self.matrix.scheme.decode(new).dequantize() - base
        weight = rounded(base + delta, torch.bfloat16, dither)
        moved = weight.float() - rounded(base, torch.bfloat16).float()
        return {"codes": weight.T if self._turned_to_plain else weight}, moved


def changes_of(plan: LoadPlan, adapter: SavedAdapter, storage: str, with_experts: bool = True) -> list[WeightChange]:
    """List the changes that an adapter makes, in file order; `bf16` storage adds every other quantized matrix.

    Raises ValueError if the checkpoint lacks a weight that the adapter changes, or its format cannot be written.
    """
    assert isinstance(plan.experts, ExpertPlan)
    found: dict[tuple[str, int | None], WeightChange] = {}

    def change(matrix: Matrix) -> WeightChange:
        one = WeightChange(matrix, storage)
        return found.setdefault(one.key, one)

    stored = {place.name: f"{place.name}.weight" for place in adapter.linears} | {each: each for each in adapter.whole}
    for name, tensor in stored.items():
        layer, _, projection = name.removesuffix(".weight").rpartition(".")
        matrix = _stored(plan, tensor)
        change(matrix).parts.append(MergedPart(name, (layer, projection), slice(None), partial(adapter.delta, name)))
    for matrix in plan.experts.matrices if with_experts else ():
        for target in matrix.targets:
            module = plan.layers[target.layer].name
            name = f"{module}.{target.expert}.{target.projection}"
            if name in adapter.places:
                part = MergedPart(name, (module, target.projection), target.rows, partial(adapter.delta, name))
                change(matrix).parts.append(part)
    if storage == BF16:
        for matrix in _quantized(plan):
            change(matrix)
    for each in found.values():
        _require_writable(each)
    order = {file: number for number, file in enumerate(plan.backbone.checkpoint.files)}
    return sorted(
        found.values(), key=lambda c: (order[c.matrix.codes.file], c.matrix.codes.offset, c.matrix.index or 0)
    )


def _require_writable(change: WeightChange) -> None:
    """Raise ValueError, before anything is written, if the sum cannot be stored in the requested format."""
    scheme = change.matrix.scheme
    if not change.dequantized and type(scheme) not in ADDERS:
        raise ValueError(
            f"{change.matrix.codes.file}: {change.matrix.codes.name} is {scheme.name}, whose codes are calibrated on "
            "data: ktft does not write such codes anew. Merge with --format bf16, and quantize the result if need be"
        )


def _stored(plan: LoadPlan, name: str) -> Matrix:
    stored = plan.backbone.stored(name)
    if stored is None and plan.backbone.is_regrouped(name):
        raise ValueError(
            f"the adapter changes {name}, which transformers makes of tensors that it joins, splits or permutes; ktft "
            "does not write those: train without LoRA there, or keep the adapter unmerged"
        )
    if stored is None:
        raise ValueError(f"the adapter changes {name}, which {plan.backbone.checkpoint.directory} holds no tensor of")
    return Matrix(*stored, index=None, transposed=False)


def _quantized(plan: LoadPlan) -> Iterator[Matrix]:
    """Every quantized matrix, including those that transformers does not use (multi-token prediction)."""
    assert isinstance(plan.experts, ExpertPlan)
    checkpoint = plan.backbone.checkpoint
    scheme = checkpoint.scheme
    if scheme is PLAIN_SCHEME:
        return
    yield from (matrix for matrix in plan.experts.matrices if matrix.scheme is not PLAIN_SCHEME)
    dtypes = {dtype for each in (scheme, *scheme.beside) for dtype in each.parts["codes"].dtypes}
    for name, entry in checkpoint.tensors.items():
        stem = scheme.stem_of(name)
        if stem is None or name in plan.experts.tensor_names or entry.dtype not in dtypes:
            continue
        found, parts, missing = locate(checkpoint.tensors, scheme, stem)
        if missing:
            raise ValueError(f"{entry.file}: {name} is {scheme.name}, but {missing[0]} is missing; download it again")
        yield Matrix(found, parts, index=None, transposed=False)


def write_changed(
    target: Path, output: Output, changes: list[WeightChange], reader: CheckpointReader, records: Records
) -> Iterator[tuple[str, int]]:
    """Write a safetensors file from the source's tensors in `output.copied`: those that no change rewrites as they are.

    A matrix whose tensors are in two files is computed once for each; its outcome is recorded for that of its codes.
    Changes to a stacked tensor are in order of their index. Yields (description of the work, bytes read).
    """
    outcomes: list[Outcome] = []
    wanted, here = {tensor.name for tensor in output.tensors}, {entry.name for entry in output.copied}
    touched = {entry.name for change in changes for entry in change.matrix.parts.values()}
    with writing(target / output.name, output.tensors, output.metadata) as file:
        for entry in output.copied:
            if entry.name in touched:
                continue
            if entry.name in wanted:
                for chunk in read_chunks(entry):
                    file.append(entry.name, chunk)
            yield f"copying {output.name}", entry.nbytes
        for change in changes:
            names = {entry.name for entry in change.matrix.parts.values()} & here
            if not names:
                continue
            new, found = change.apply(reader)
            for role, tensor in change.tensors().items():
                if tensor.name in wanted:
                    file.append(tensor.name, new[role].contiguous().reshape(-1).view(torch.uint8).numpy().data)
            if change.matrix.codes.name in here:
                outcomes += found
            yield f"merging {output.name}", change.nbytes_in(names)
        records.write(output.name, outcomes)  # before the file appears under its name

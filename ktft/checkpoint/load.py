"""Loads packed experts from a checkpoint's shards.

The plan of which tensor goes where is made first, from headers alone. The bytes then stream through a bounded queue: a
few threads read and unpack ahead, in file order, and the caller's thread packs, using the runtime's threads.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, product, zip_longest
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ktft.checkpoint.encoded import Encoded
from ktft.checkpoint.families import Family
from ktft.checkpoint.layouts import ExpertSource
from ktft.checkpoint.reader import CheckpointReader, TensorEntry
from ktft.checkpoint.schemes import IGNORED, PLAIN_SCHEME, Scheme, Shape
from ktft.held import ELSEWHERE, HeldExperts
from ktft.native import ExpertLayer

logger = logging.getLogger(__name__)

READERS = 8  # threads that read, and unpack or check CRC-32, for which one core would be slower than a disk
SHARDS_AT_ONCE = 4

Content = TypeVar("Content")


class LayerShape(Protocol):
    """The properties of a layer that determine which tensors it needs."""

    @property
    def held(self) -> HeldExperts: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def biases(self) -> bool: ...
    @property
    def projections(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class LoadTarget:
    """The destination of one projection: `rows` of a matrix on disk are `projection` of `expert` in layer `layer`.

    Experts are counted from the first one that the process holds.
    """

    layer: int
    expert: int
    projection: str
    rows: slice


@dataclass
class Matrix:
    """One matrix on disk, its tensors by role, and the projections that are cut from it."""

    scheme: Scheme
    parts: dict[str, TensorEntry]
    index: int | None  # into stacked tensors
    transposed: bool | None  # None: determined by its shape
    targets: list[LoadTarget] = field(default_factory=list)

    @property
    def codes(self) -> TensorEntry:
        """The tensor that names the matrix in messages and determines when it is read."""
        return self.parts["codes"]

    @property
    def nbytes(self) -> int:
        """Bytes to read for this matrix."""
        return sum(
            entry.nbytes if self.index is None else entry.nbytes // entry.shape[0] for entry in self.parts.values()
        )

    def read(self, reader: CheckpointReader) -> Encoded:
        """Read and decode the matrix. A ValueError names file and tensor."""
        tensors = {role: reader.read(entry.name, self.index) for role, entry in self.parts.items()}
        with naming(self.codes):
            encoded = self.scheme.decode(tensors)
        return encoded.transpose() if self.transposed and self.scheme.transposes else encoded


@dataclass
class Bias:
    """A tensor with the biases of one expert or of a layer's experts, and the projections whose `rows` it holds."""

    entry: TensorEntry
    targets: list[tuple[LoadTarget, ExpertSource]] = field(default_factory=list)


@contextmanager
def naming(entry: TensorEntry) -> Iterator[None]:
    """Prefix a ValueError's message with file and tensor."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{entry.file}: {entry.name}: {error}") from error


def locate(
    tensors: Mapping[str, TensorEntry], scheme: Scheme, stem: str, stacked: bool = False
) -> tuple[Scheme, dict[str, TensorEntry], list[str]]:
    """Find how one matrix is stored: in `scheme`, or plain.

    Returns:
        The scheme that applies, its tensors by role, and the names of required tensors that are missing.

    Raises:
        ValueError: the tensor exists, but its dtype is neither the scheme's nor plain, or a part's dtype is wrong.
    """
    seen: TensorEntry | None = None
    for each in (scheme, *scheme.beside, PLAIN_SCHEME):
        names = each.tensor_names(stem, stacked)
        codes = tensors.get(names["codes"])
        if codes is None:
            continue
        seen = codes
        if codes.dtype not in each.parts["codes"].dtypes:
            continue
        parts = {role: tensors[name] for role, name in names.items() if name in tensors}
        for role, entry in parts.items():
            if entry.dtype not in each.parts[role].dtypes:
                raise ValueError(
                    f"{entry.file}: {entry.name} is {entry.dtype}; {each.name} has it in "
                    f"{', '.join(each.parts[role].dtypes)}"
                )
        return each, parts, [names[role] for role in names if role not in parts and not each.parts[role].optional]
    if seen is not None:
        codes_part = scheme.parts["codes"]
        read = dict.fromkeys(
            [*(codes_part.dtypes if codes_part.suffix == "" else ()), *PLAIN_SCHEME.parts["codes"].dtypes]
        )
        raise ValueError(
            f"{seen.file}: {seen.name} is {seen.dtype}; weights are read from {', '.join(read)} in a checkpoint whose "
            f"config.json names {'no quantization' if scheme is PLAIN_SCHEME else scheme.name}"
        )
    return scheme, {}, [scheme.tensor_names(stem, stacked)["codes"]]


def check_shapes(scheme: Scheme, parts: Mapping[str, TensorEntry], shape: Shape, experts: int | None = None) -> None:
    """Compare each tensor's shape with the one that a weight of `shape` (or a stack of `experts` weights) needs.

    Raises:
        ValueError: a shape is wrong; the message names file, tensor and both shapes.
    """
    if scheme is not PLAIN_SCHEME and len(shape) != 2:
        raise ValueError(f"{parts['codes'].file}: {parts['codes'].name} is {scheme.name}, but not a matrix")
    stack = () if experts is None else (experts,)
    expected = {"codes": (shape,)} if scheme is PLAIN_SCHEME else scheme.shapes(*shape)
    for role, entry in parts.items():
        accepted: list[Shape] = [(*stack, *each) for each in expected[role]]
        if entry.shape not in accepted:
            needed = " or ".join(str(each) for each in accepted)
            raise ValueError(f"{entry.file}: {entry.name} has shape {entry.shape}, the model's config needs {needed}")


class ExpertPlan:
    """The tensors that hold the experts of `layers`. Headers are checked: every tensor needed exists, once and in its
    shape, and every expert tensor is needed. For experts that other processes hold, only the headers are checked.

    Args:
        family: the row that says where the checkpoint holds its experts.
        layers: layer number -> its shape.
        ignored: patterns of tensor names that are not needed, such as layers for multi-token prediction.

    Attributes:
        tensor_names: the names of all tensors that the experts consist of.

    Raises:
        ValueError: an expert tensor is missing or left over, or has a wrong shape or dtype.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        family: Family,
        layers: Mapping[int, LayerShape],
        ignored: Collection[str] = (),
    ) -> None:
        self.reader = reader
        self.matrices: list[Matrix] = []
        self.biases: dict[str, Bias] = {}
        self.tensor_names: set[str] = set()
        self._layout = family.layout(reader.tensors)
        lacking: list[str] = []
        for number, shape in layers.items():
            lacking += self._match_layer(number, shape)
            if family.biases:
                lacking += self._match_biases(number, shape)
        refuse(f"{reader.described} lacks expert tensors", lacking)
        is_expert = family.expert_pattern()
        refuse(
            f"{reader.described} holds expert tensors that this model has no place for",
            (
                name
                for name in reader.tensors
                if name not in self.tensor_names and is_expert.match(name) and not any_match([*ignored, IGNORED], name)
            ),
        )

    def _match_biases(self, number: int, shape: LayerShape) -> list[str]:
        lacking: list[str] = []
        held = shape.held
        for expert, projection in product(range(held.num_experts), shape.projections):
            source = self._layout.source(number, expert, projection, shape.intermediate_size)
            name = source.bias_tensor
            entry = self.reader.tensors.get(name)
            if entry is None:
                lacking.append(name)
                continue
            rows, _ = self._layout.matrix_shape(projection, shape.hidden_size, shape.intermediate_size)
            stack = () if source.expert is None else (held.num_experts,)
            if entry.dtype not in PLAIN_SCHEME.parts["codes"].dtypes:
                raise ValueError(f"{entry.file}: {name} is {entry.dtype}; biases are read from BF16, F16, F32")
            if entry.shape != (*stack, rows):
                raise ValueError(
                    f"{entry.file}: {name} has shape {entry.shape}, the model's config needs {(*stack, rows)}"
                )
            self.tensor_names.add(name)
            if expert in held.places:
                target = LoadTarget(number, held.places[expert], projection, source.rows)
                self.biases.setdefault(name, Bias(entry)).targets.append((target, source))
        return list(dict.fromkeys(lacking))

    def load_biases(self, layers: Mapping[int, ExpertLayer]) -> Iterator[int]:
        """Fill the biases of these layers, if they have any. Yields the number of bytes read.

        Raises:
            ValueError: a bias is NaN or Inf; the message names file and tensor.
        """
        for name, bias in self.biases.items():
            if bias.targets[0][0].layer not in layers:
                continue
            tensor = self.reader.read(name)
            for target, source in bias.targets:
                with naming(bias.entry):
                    layers[target.layer].load_bias(target.expert, target.projection, source.take_bias(tensor))
            yield bias.entry.nbytes

    def _match_layer(self, number: int, shape: LayerShape) -> list[str]:
        found: dict[tuple[str, int | None], Matrix] = {}
        lacking: list[str] = []
        held = shape.held
        for expert in range(held.num_experts):
            for projection in shape.projections:
                source = self._layout.source(number, expert, projection, shape.intermediate_size)
                key = (source.stem, source.expert)
                if key not in found:
                    found[key], missing = self._matrix(source)
                    lacking += missing
                place = held.places.get(expert, ELSEWHERE)
                found[key].targets.append(LoadTarget(number, place, projection, source.rows))
        if not lacking:
            for matrix in found.values():
                _check_matrix(matrix, shape)
                self.tensor_names.update(entry.name for entry in matrix.parts.values())
                matrix.targets = [target for target in matrix.targets if target.expert != ELSEWHERE]
            self.matrices += [matrix for matrix in found.values() if matrix.targets]
        return lacking

    def _matrix(self, source: ExpertSource) -> tuple[Matrix, list[str]]:
        scheme, parts, missing = locate(
            self.reader.tensors, self.reader.scheme, source.stem, stacked=source.expert is not None
        )
        return Matrix(scheme, parts, source.expert, source.transposed), missing

    def nbytes(self, layers: Collection[int] | None = None) -> int:
        """Bytes that `load` reads for these layers; None means all layers."""
        biases = (b.entry.nbytes for b in self.biases.values() if layers is None or b.targets[0][0].layer in layers)
        return sum(matrix.nbytes for matrix in self._of(layers)) + sum(biases)

    def _of(self, layers: Collection[int] | None) -> list[Matrix]:
        return [m for m in self.matrices if layers is None or m.targets[0].layer in layers]

    def pieces(self, layer: int) -> list[tuple[str, int | None]]:
        """The tensors that `load` reads for a layer: names, each with an index into the first dimension or None."""
        matrices = [(entry.name, matrix.index) for matrix in self._of([layer]) for entry in matrix.parts.values()]
        return matrices + [(name, None) for name, bias in self.biases.items() if bias.targets[0][0].layer == layer]

    def load(self, layers: Mapping[int, ExpertLayer]) -> Iterator[int]:
        """Fill these layers, in the order of the bytes on disk. Yields the number of bytes read as they are packed.

        At most `CheckpointReader.ahead` matrices are in memory at once besides the packed ones.

        Raises:
            ValueError: a value is NaN or Inf, or a file has changed since; the message names file and tensor.
        """
        rerounded: Matrix | None = None
        with self.reader:
            yield from self.load_biases(layers)
            matrices = in_disk_order(self._of(layers.keys()))
            read = partial(Matrix.read, reader=self.reader)
            for matrix, encoded in zip(matrices, read_ahead(matrices, read, self.reader.ahead), strict=True):
                for target in matrix.targets:
                    layer = layers[target.layer]
                    part = encoded.take_rows(target.rows)
                    with naming(matrix.codes):
                        kept = layer.load(target.expert, target.projection, **part.load_arguments())
                    if not kept and part.native_format == layer.format:
                        rerounded = rerounded or matrix
                yield matrix.nbytes
        for layer in layers.values():
            assert not layer.missing(), layer.missing()[:3]
        if rerounded is not None:
            logger.warning(
                "%s weights are rounded once more: %s has scales that this format cannot hold as they are (%s)",
                next(iter(layers.values())).format,
                rerounded.codes.name,
                rerounded.scheme.name,
            )


def _check_matrix(matrix: Matrix, layer: LayerShape) -> None:
    """Check the shapes, and that the projections cut from a matrix cover each of its rows exactly once."""
    sizes = (layer.intermediate_size, layer.hidden_size)
    shapes = {(sizes[::-1] if target.projection == "down_proj" else sizes) for target in matrix.targets}
    assert len(shapes) == 1, "projections of one matrix have one shape"
    ((height, cols),) = shapes
    rows = height * len(matrix.targets)
    taken = sorted(row for target in matrix.targets for row in range(rows)[target.rows])
    assert taken == list(range(rows)), f"the family cuts {matrix.codes.name} into overlapping or missing rows"
    if matrix.transposed is None:
        matrix.transposed = matrix.codes.shape[-2:] == (cols, rows) != (rows, cols)
    stored = (cols, rows) if matrix.transposed and matrix.scheme.transposes else (rows, cols)
    check_shapes(matrix.scheme, matrix.parts, stored, experts=None if matrix.index is None else layer.held.num_experts)


def in_disk_order(matrices: Iterable[Matrix]) -> list[Matrix]:
    """Sort matrices by their position in the files, alternating between `SHARDS_AT_ONCE` files."""
    shards: dict[Path, list[tuple[int, Matrix]]] = defaultdict(list)
    for matrix in matrices:
        entry = matrix.codes
        size = entry.nbytes // entry.shape[0] if matrix.index is not None else 0
        shards[entry.file].append((entry.offset + size * (matrix.index or 0), matrix))
    queues = [[matrix for _, matrix in sorted(shards[file], key=lambda pair: pair[0])] for file in sorted(shards)]
    order: list[Matrix] = []
    for at in range(0, len(queues), SHARDS_AT_ONCE):
        for turn in zip_longest(*queues[at : at + SHARDS_AT_ONCE]):
            order += [matrix for matrix in turn if matrix is not None]
    return order


def read_ahead(items: Iterable[Any], read: Callable[[Any], Content], most: int) -> Iterator[Content]:
    """Yield what `read` returns for each item, in order. `READERS` threads read up to `most` items ahead; the first of
    them is given up before another read begins.
    """
    pending: deque[Future[Content]] = deque()
    todo = iter(items)
    pool = ThreadPoolExecutor(READERS, thread_name_prefix="ktft-read")
    try:
        while True:
            pending.extend(pool.submit(read, item) for item in islice(todo, most - len(pending)))
            if not pending:
                return
            yield pending.popleft().result()  # in no variable: it would be alive while the next one is packed
    finally:
        pool.shutdown(cancel_futures=True)


def any_match(patterns: Iterable[str | re.Pattern[str]], name: str) -> bool:
    """Whether one of the patterns occurs in `name`."""
    return any(re.search(pattern, name) for pattern in patterns)


def refuse(problem: str, names: Iterable[str]) -> None:
    """Raise a ValueError with `problem` and the first names, if there are any names."""
    found = sorted(set(names))
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ValueError(
            f"{problem}: {', '.join(found[:3])}{more}; check that config.json and the shards belong together"
        )

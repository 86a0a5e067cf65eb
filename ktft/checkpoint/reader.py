"""Lazy reader of safetensors checkpoints: all headers validated first, then tensors or slices of them by `pread`.

Not `mmap`: mapped pages count as resident memory until the kernel takes them back, and experts are read once, packed
and forgotten. For the same reason the pages that a read leaves in the page cache are given back at once.
"""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ktft.checkpoint.files import read_json
from ktft.checkpoint.schemes import PLAIN_SCHEME, Scheme, scheme_of

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_ELEMENTS = 2**63 - 1
CONFIG_NAME = "config.json"

BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
"""Bits per element of every dtype the format defines."""

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""Dtypes of tensors that `CheckpointReader.read` returns."""


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: `nbytes` bytes from `offset` of `file`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class CheckpointReader:
    """The tensors of a sharded or single-file safetensors checkpoint.

    Every header is checked on construction, so a damaged shard is reported before anything is read.

    Args:
        files: the shards. An index beside them must agree with what they hold.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: a file is truncated or not safetensors; a tensor's dtype, shape and place in the file contradict
            each other or another tensor; a tensor is in two shards; the index and the shards disagree.
    """

    ahead: ClassVar[int] = 16
    """How many matrices are read before they are packed; far fewer than a layer has."""

    def __init__(self, files: Sequence[str | os.PathLike[str]]) -> None:
        self.tensors: dict[str, TensorEntry] = {}
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        paths = [Path(file) for file in files]
        if not paths:
            raise ValueError("the checkpoint has no shards; ktft reads experts from .safetensors files")
        self.files, self.directory = paths, paths[0].parent
        self.observer: Callable[[TensorEntry, int, memoryview], None] | None = None
        """The thread that reads calls this with the tensor, the offset in the file and the content of every piece."""
        self._read_headers(paths)

    def _read_headers(self, paths: list[Path]) -> None:
        """Check all files and fill `tensors`."""
        for path in paths:
            if path.suffix != ".safetensors":
                raise ValueError(
                    f"{path} is not a .safetensors file; convert the checkpoint with save_pretrained first"
                )
            if not path.is_file():
                raise FileNotFoundError(
                    f"shard {path} is missing; the checkpoint has {len(paths)} shards, download it again"
                )
        for path in paths:
            self._add(read_header(path))
        self._check_index(paths)

    def _add(self, entries: Sequence[TensorEntry]) -> None:
        """Add one file's tensors. Raises ValueError if another file has one of them."""
        for entry in entries:
            other = self.tensors.setdefault(entry.name, entry)
            if other is not entry:
                raise ValueError(
                    f"tensor {entry.name} is in two shards, {other.file} and {entry.file}; remove one of them"
                )

    @property
    def place(self) -> Path:
        """The path by which the checkpoint is opened again."""
        return self.directory

    @property
    def described(self) -> str:
        """What messages call the checkpoint."""
        return f"checkpoint {self.directory}"

    @classmethod
    def from_directory(cls, directory: str | os.PathLike[str]) -> CheckpointReader:
        """Open the checkpoint in a directory: `model.safetensors`, or the shards its index lists."""
        directory = Path(directory)
        if (directory / SINGLE_NAME).is_file():
            return cls([directory / SINGLE_NAME])
        if not (directory / INDEX_NAME).is_file():
            raise FileNotFoundError(f"{directory} holds neither {SINGLE_NAME} nor {INDEX_NAME}")
        return cls([directory / name for name in sorted(set(_read_index(directory / INDEX_NAME).values()))])

    def _check_index(self, paths: list[Path]) -> None:
        index_path = paths[0].parent / INDEX_NAME
        if paths == [paths[0].parent / SINGLE_NAME] or not index_path.is_file():
            return
        index = _read_index(index_path)
        for name, shard in index.items():
            entry = self.tensors.get(name)
            if entry is None:
                raise ValueError(f"{index_path} lists {name} in {shard}, which does not hold it; download both again")
            if entry.file.name != shard:
                raise ValueError(
                    f"{index_path} lists {name} in {shard}, but it is in {entry.file.name}; download both again"
                )
        for name, entry in self.tensors.items():
            if name not in index:
                raise ValueError(f"{entry.file} holds {name}, which {index_path} does not list; download both again")

    @cached_property
    def scheme(self) -> Scheme:
        """How the checkpoint's weights are quantized, by the config.json beside the shards; plain without one.

        Raises:
            ValueError: config.json is damaged, or names a scheme that ktft cannot read.
        """
        path = self.directory / CONFIG_NAME
        if not path.is_file():
            return PLAIN_SCHEME
        if not isinstance(config := read_json(path, "download it again"), dict):
            raise ValueError(f"{path} is not a configuration; download it again")
        return scheme_of(config, str(path))

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Read a tensor, or element `index` of its first dimension, in its own dtype. Threads may read at once.

        Raises:
            KeyError: there is no such tensor.
            IndexError: the first dimension has no element `index`.
            ValueError: its dtype is not among `DTYPES`, or the file ends before it does.
        """
        entry = self.tensors[name]
        if entry.dtype not in DTYPES:
            raise ValueError(f"{entry.file}: tensor {name} is {entry.dtype}; ktft reads {', '.join(DTYPES)}")
        raw, shape = self._read_bytes(entry, index)
        return raw.view(DTYPES[entry.dtype]).view(shape)

    def _read_bytes(self, entry: TensorEntry, index: int | None) -> tuple[Tensor, tuple[int, ...]]:
        """The bytes of a tensor, or of element `index` of its first dimension, and the shape that they have."""
        begin, nbytes, shape = entry.offset, entry.nbytes, entry.shape
        if index is not None:
            if not (shape and 0 <= index < shape[0]):
                raise IndexError(f"{entry.file}: tensor {entry.name} has shape {shape}, so no slice {index}")
            nbytes //= shape[0]
            begin, shape = begin + index * nbytes, shape[1:]
        raw = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            self._fill(entry, begin, memoryview(raw.numpy().data))
        return raw, shape

    def _fill(self, entry: TensorEntry, begin: int, view: memoryview) -> None:
        descriptor, nbytes, done = self._descriptor(entry.file), len(view), 0
        with suppress(OSError):  # advice only: some file systems do not take it
            os.posix_fadvise(descriptor, begin, nbytes, os.POSIX_FADV_WILLNEED)
        while done < nbytes:
            count = os.preadv(descriptor, [view[done:]], begin + done)
            if count == 0:
                raise ValueError(
                    f"{entry.file} ended while tensor {entry.name} was read; the file has changed, download it again"
                )
            done += count
        with suppress(OSError):
            os.posix_fadvise(descriptor, begin, nbytes, os.POSIX_FADV_DONTNEED)
        if self.observer is not None:
            self.observer(entry, begin, view)

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                try:
                    self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    if error.errno != errno.EMFILE:
                        raise
                    raise OSError(f"{file}: {_too_many_files(len(self.files))}") from None
            return self._descriptors[file]

    def close(self) -> None:
        """Close the files. Reading again opens them again."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _too_many_files(shards: int) -> str:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return (
        f"too many open files: ulimit -n is {limit}, and the checkpoint's {shards} shards are read side by side; raise "
        f"it with ulimit -n {max(1024, shards + 512)}"
    )


def read_header(path: Path) -> list[TensorEntry]:
    """Read and validate one file's header. Returns its tensors in file order; see `CheckpointReader` for the errors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > MAX_HEADER_BYTES or 8 + length > size:
            raise ValueError(
                f"{path} is not a whole safetensors file: {size} bytes, and its header would need {8 + length}"
            )
        try:
            header = json.loads(file.read(length), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} has no valid safetensors header: {error}; download it again") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path} has no valid safetensors header; download it again")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{path}: __metadata__ of its header does not map names to texts; download it again")
    entries = [_entry(path, name, info, 8 + length) for name, info in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    end, previous = 8 + length, "the header"
    for entry in entries:
        if entry.offset != end:
            problem = "overlaps" if entry.offset < end else "leaves a gap after"
            raise ValueError(f"{path}: tensor {entry.name} begins at byte {entry.offset} and {problem} {previous}")
        end, previous = entry.offset + entry.nbytes, entry.name
        if end > size:
            raise ValueError(f"{path} is truncated: tensor {entry.name} ends at byte {end}, the file at {size}")
    if end != size:
        raise ValueError(f"{path} is {size} bytes long, but its tensors end at byte {end}; download it again")
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} appears twice")
    return mapping


def _entry(path: Path, name: str, info: Any, data_start: int) -> TensorEntry:
    if not name.isprintable():  # a lone surrogate could not even be written into a message
        raise ValueError(f"{path}: {name!r} is no name of a tensor; download it again")
    try:
        dtype, shape, (begin, end) = info["dtype"], info["shape"], info["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path}: tensor {name} has no dtype, shape and data_offsets in the header") from None
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"{path}: tensor {name} has the unknown dtype {dtype!r}; known: {', '.join(BITS)}")
    # Without its zeros: torch multiplies sizes in 64 bits whatever the number of elements
    if (
        not isinstance(shape, list)
        or not all(type(n) is int and n >= 0 for n in shape)
        or math.prod(n for n in shape if n) > MAX_ELEMENTS
    ):
        raise ValueError(f"{path}: tensor {name} has the invalid shape {shape!r}")
    if not (type(begin) is int and type(end) is int and 0 <= begin <= end):
        raise ValueError(f"{path}: tensor {name} has the invalid data_offsets {[begin, end]!r}")
    needed, odd = divmod(math.prod(shape) * BITS[dtype], 8)
    if odd:
        raise ValueError(f"{path}: tensor {name}, {dtype} of shape {shape}, does not end at a whole byte")
    if end - begin != needed:
        raise ValueError(
            f"{path}: tensor {name}, {dtype} of shape {shape}, needs {needed} bytes but has {end - begin} in the file"
        )
    return TensorEntry(name, path, dtype, tuple(shape), data_start + begin, needed)


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        # Names of files beside the index, nothing else: a path could lead anywhere
        if all(
            isinstance(shard, str) and shard == Path(shard).name and shard.isprintable()
            for shard in weight_map.values()
        ):
            return dict(weight_map)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ValueError(f"{path} is not a valid index: it needs a weight_map of tensor names to shards; download it again")

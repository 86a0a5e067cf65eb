"""Files that are whole or absent: written under a temporary name, synced, renamed, the directory synced."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEMPORARY = ".ktft-tmp"
"""Suffix of files that are being written. One that is left over comes from a process that was killed."""

CRC32 = "crc32"
"""Metadata key of files that `write_safetensors` wrote: JSON, tensor name -> CRC-32 of its bytes, 8 hex digits."""

_ALIGNMENT = 64
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of fcntl.h and linux/fs.h


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written. `dtype` as safetensors spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@contextmanager
def replacing(path: Path) -> Iterator[int]:
    """A descriptor to write `path` through; `path` appears, or changes, when the block ends without an exception. With
    one, such as the OSError of a full disk, nothing is left.
    """
    # A name of this writer's own: a second one of the same path must not write into this file, or move it away
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
        os.fsync(descriptor)
        os.replace(temporary, path)
        sync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)  # it may be what fills the disk
        raise
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    """Make renames and removals in `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Make a directory's files and subdirectories durable."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
        elif path.is_dir():
            sync_directory(path)
    sync_directory(directory)


def exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step. False where the C library or the file system cannot, and nothing was done."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    if (number := ctypes.get_errno()) in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file, unless it has this content already."""
    if path.is_file() and path.stat().st_size == len(content) and path.read_bytes() == content:
        return
    with replacing(path) as descriptor:
        _write_at(descriptor, memoryview(content), 0)


def read_json(path: Path, cure: str = "restore it from a copy") -> Any:
    """What a JSON file holds. `cure` ends the message if it holds something else.

    Raises:
        FileNotFoundError: it is missing. ValueError: it is no JSON; the message names it.
    """
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}; {cure}") from None


def to_json(value: Any) -> bytes:
    """The value as JSON. Equal values give equal bytes."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def safetensors_header(
    tensors: Sequence[NewTensor], metadata: Mapping[str, str], checksums: Mapping[str, int] | None = None
) -> bytes:
    """Length prefix and header. Its size does not depend on the checksums, which are zero where none are given."""
    crc32 = {tensor.name: f"{(checksums or {}).get(tensor.name, 0):08x}" for tensor in tensors}
    header: dict[str, Any] = {"__metadata__": {**metadata, "format": "pt", CRC32: json.dumps(crc32)}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def safetensors_bytes(tensors: Sequence[NewTensor], metadata: Mapping[str, str]) -> int:
    """The size of the file that `write_safetensors` would write."""
    return len(safetensors_header(tensors, metadata)) + sum(tensor.nbytes for tensor in tensors)


def write_safetensors(
    path: Path, tensors: Sequence[NewTensor], metadata: Mapping[str, str], content: Iterable[Iterable[memoryview]]
) -> None:
    """Write a safetensors file in one pass: `content` has the chunks of each tensor, in order.

    Raises:
        OSError: the disk is full, among others; nothing is left then.
    """
    with writing(path, tensors, metadata) as file:
        for tensor, chunks in zip(tensors, content, strict=True):
            for chunk in chunks:
                file.append(tensor.name, chunk)


@contextmanager
def writing(path: Path, tensors: Sequence[NewTensor], metadata: Mapping[str, str]) -> Iterator[TensorFile]:
    """A safetensors file whose tensors may come in any order, each from its beginning to its end; see `replacing`."""
    with replacing(path) as descriptor:
        file = TensorFile(descriptor, tensors, len(safetensors_header(tensors, metadata)))
        yield file
        _write_at(descriptor, memoryview(safetensors_header(tensors, metadata, file.checksums())), 0)


class TensorFile:
    """The open file that `writing` yields."""

    def __init__(self, descriptor: int, tensors: Sequence[NewTensor], data_start: int) -> None:
        self._descriptor = descriptor
        self._crc32 = {tensor.name: 0 for tensor in tensors}
        self._next: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        for tensor in tensors:
            self._next[tensor.name] = data_start
            data_start += tensor.nbytes
            self._ends[tensor.name] = data_start

    def append(self, name: str, chunk: memoryview) -> None:
        """Write the next bytes of a tensor."""
        self._crc32[name] = zlib.crc32(chunk, self._crc32[name])
        self._next[name] = _write_at(self._descriptor, chunk, self._next[name])
        assert self._next[name] <= self._ends[name], name

    def checksums(self) -> dict[str, int]:
        """Tensor name -> CRC-32, once all of them are written."""
        assert self._next == self._ends, [name for name, end in self._ends.items() if self._next[name] != end][:3]
        return self._crc32


def _write_at(descriptor: int, data: memoryview, at: int) -> int:
    """Returns where the data ends."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], at + done)
    return at + done

"""Identifies the source of a converted checkpoint, well enough to see quickly that it is another one or has changed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ktft.checkpoint.reader import TensorEntry

SAMPLES, SAMPLE_BYTES = 8, 4096  # of every shard, evenly spread: training or another rounding changes all weights
CHUNK_BYTES = 4 << 20


def read_prelude(path: Path) -> bytes:
    """The length prefix and the header of a safetensors file."""
    with path.open("rb") as file:
        prefix = file.read(8)
        return prefix + file.read(int.from_bytes(prefix, "little"))


def describe_file(path: Path) -> dict[str, Any]:
    """A safetensors file's size and the hash of its header, which in converted files holds its tensors' checksums."""
    return _describe(path, read_prelude(path))


def _describe(path: Path, prelude: bytes) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "header_sha256": hashlib.sha256(prelude).hexdigest()}


def identify_shard(path: Path, header_bytes: int | None = None) -> dict[str, Any]:
    """A shard's size, and hashes of its header and of samples of its data. Reads some KB, whatever the size.

    Args:
        header_bytes: the bytes before the data; None for a safetensors file, which says it itself.
    """
    with path.open("rb") as file:
        prelude = read_prelude(path) if header_bytes is None else file.read(header_bytes)
    size, data_start, samples = path.stat().st_size, len(prelude), hashlib.sha256()
    with path.open("rb") as file:
        for i in range(SAMPLES):
            file.seek(data_start + max(0, size - data_start - SAMPLE_BYTES) * i // (SAMPLES - 1))
            samples.update(file.read(SAMPLE_BYTES))
    return _describe(path, prelude) | {"samples_sha256": samples.hexdigest()}


def identify(shards: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Shard name -> `identify_shard` of it."""
    return {path.name: identify_shard(path) for path in sorted(shards)}


def difference(recorded: Mapping[str, Mapping[str, Any]], found: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The first difference between two results of `identify`, with both values; None if they are equal."""
    if missing := sorted(recorded.keys() - found.keys()):
        return f"shard {missing[0]} was converted, but the checkpoint has {', '.join(sorted(found)[:3]) or 'none'}"
    if added := sorted(found.keys() - recorded.keys()):
        return f"shard {added[0]} is in the checkpoint, but was not converted"
    for name, old in recorded.items():
        for key, value in found[name].items():
            if old.get(key) != value:
                return f"shard {name} has {key} {value}, the converted one had {old.get(key)}"
    return None


def read_chunks(entry: TensorEntry) -> Iterator[memoryview]:
    """One tensor's bytes as stored. A chunk is valid until the next one.

    Raises:
        ValueError: the file ends before the tensor does.
    """
    buffer = memoryview(bytearray(min(CHUNK_BYTES, entry.nbytes)))
    with entry.file.open("rb", buffering=0) as file:
        done = 0
        while done < entry.nbytes:
            count = os.preadv(file.fileno(), [buffer[: entry.nbytes - done]], entry.offset + done)
            if not count:
                raise ValueError(f"{entry.file} ended while tensor {entry.name} was read; the file has changed")
            yield buffer[:count]
            done += count


class ContentHash:
    """SHA-256 of pieces of tensors, whatever the order they come in and the threads that bring them."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, int], str] = {}

    def add(self, entry: TensorEntry, begin: int, content: memoryview) -> None:
        """Take a piece that lies at `begin` of the tensor's file. An observer of `CheckpointReader`."""
        digest = hashlib.sha256(content).hexdigest()
        where = begin - entry.offset
        self._lines[entry.name, where] = f"{entry.name} {entry.dtype} {list(entry.shape)} {where} {digest}\n"

    def hexdigest(self) -> str:
        """The hash of all pieces so far."""
        return hashlib.sha256("".join(self._lines[key] for key in sorted(self._lines)).encode()).hexdigest()

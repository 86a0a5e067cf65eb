"""Reads a converted checkpoint and its source whole, and compares every checksum."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from ktft.checkpoint.cache import checksums, read_metadata
from ktft.checkpoint.convert import Conversion, Output
from ktft.checkpoint.identity import read_chunks
from ktft.checkpoint.reader import TensorEntry, read_header


def check(conversion: Conversion, problems: list[str]) -> Iterator[tuple[str, int]]:
    """Compare the files with their checksums, and the source's content with what was converted. Each problem is added
    to `problems` as a line.

    Yields (what was worked on, bytes that are done with), `check_bytes` in all.
    """
    for output in conversion.outputs:
        path = conversion.target / output.name
        if not conversion.is_written(output):
            problems.append(f"{path} is missing, or not of this conversion")
            continue
        expected = checksums(path)
        for entry in read_header(path):
            if (crc := _crc32(entry)) != (recorded := expected.get(entry.name, 0)):
                problems.append(f"{path}: tensor {entry.name} is damaged: CRC-32 {crc:08x}, recorded {recorded:08x}")
            yield "checking", entry.nbytes
        for name in _changed(conversion, output, expected):
            problems.append(f"{conversion.source}: {name} changed since the conversion")
        yield "checking the source", output.source_bytes


def check_bytes(conversion: Conversion) -> int:
    """The bytes that `check` reads if nothing is missing."""
    return sum(output.source_bytes + sum(t.nbytes for t in output.tensors) for output in conversion.outputs)


def _changed(conversion: Conversion, output: Output, expected: dict[str, int]) -> list[str]:
    metadata = read_metadata(conversion.target / output.name)
    if "layer" not in metadata:
        return [entry.name for entry in output.copied if _crc32(entry) != expected.get(entry.name)]
    same = conversion.hash_source(int(metadata["layer"])) == metadata["source_sha256"]
    return [] if same else [f"layer {metadata['layer']}"]


def _crc32(entry: TensorEntry) -> int:
    crc = 0
    for chunk in read_chunks(entry):
        crc = zlib.crc32(chunk, crc)
    return crc

"""Writes a converted checkpoint with one layer in memory at a time; a killed run continues where it stopped. `check`
reads it and its source whole, and compares every checksum.

Every file is renamed into place once it is complete, and its header says which conversion it belongs to. Its bytes
depend only on the source and the format: not on threads, NUMA nodes, or how often a run was interrupted.
"""

from __future__ import annotations

import errno
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from ktft.checkpoint.cache import (
    BIAS,
    EXPERTS,
    MANIFEST,
    UNFINISHED,
    ExpertShape,
    Manifest,
    checksums,
    layer_file,
    layer_metadata,
    layer_tensors,
    load_layer,
    read_metadata,
    sha256,
)
from ktft.checkpoint.files import (
    TEMPORARY,
    NewTensor,
    read_json,
    safetensors_bytes,
    sync_directory,
    to_json,
    write_safetensors,
    write_whole,
)
from ktft.checkpoint.gguf_source import GgufReader
from ktft.checkpoint.identity import ContentHash, describe_file, difference, identify, read_chunks
from ktft.checkpoint.load import READERS, ExpertPlan
from ktft.checkpoint.lock import LOCK, locked
from ktft.checkpoint.quantization_error import REPORT, ErrorMeter, ProjectionError
from ktft.checkpoint.reader import CONFIG_NAME, INDEX_NAME, CheckpointReader, TensorEntry, read_header
from ktft.native import ExpertLayer

SHARD_BYTES = 5 << 30  # size of a shard of tensors that are copied unchanged
COPIED = (".json", ".jinja", ".model", ".txt", ".py", ".tiktoken", ".md")
"""Suffixes of the files that are copied beside the weights: configuration, tokenizer, chat template, remote code."""
TEMPLATES = "additional_chat_templates"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Output:
    """A safetensors file to write.

    Attributes:
        tensors, metadata: the content of its header.
        source_bytes: the number of source bytes that are read to write it.
        copied: the source's tensors that are copied into it; empty for packed experts.
    """

    name: str
    tensors: tuple[NewTensor, ...]
    metadata: dict[str, str]
    source_bytes: int
    copied: tuple[TensorEntry, ...] = ()

    @property
    def nbytes(self) -> int:
        """The file's size in bytes."""
        return safetensors_bytes(self.tensors, self.metadata)


class Conversion:
    """A conversion of one source into one target directory and one format.

    Args:
        experts: the source's experts, checked.
        layers: layer number -> an empty layer for its experts. Each is taken out of the mapping and filled in its turn.
        model_type: `model_type` of the source's config.json.
        added: other files that the experts are made from, described as `identify` describes shards; the manifest
            names them.
        rest: the checkpoint with all other tensors, if the experts do not come from it.
        replaced: the names of the tensors in `rest` that are left out, for experts take their place.
    """

    def __init__(
        self,
        experts: ExpertPlan,
        layers: dict[int, ExpertLayer],
        model_type: str,
        target: Path,
        added: Mapping[str, dict[str, Any]] | None = None,
        rest: CheckpointReader | None = None,
        replaced: Collection[str] = (),
    ) -> None:
        self.experts, self.layers, self.target = experts, layers, target
        self.reader, self.packed = (experts.reader, experts.tensor_names) if rest is None else (rest, replaced)
        self.source = self.reader.directory
        (expert_format,) = {layer.format for layer in layers.values()}
        shapes = {number: ExpertShape.of(layer) for number, layer in layers.items()}
        config = sha256(self.source / CONFIG_NAME)
        source = identify(self.reader.files) | dict(added or {})
        if rest is not None:
            source |= {EXPERTS + name: each for name, each in identity_of(experts.reader).items()}
        where = "" if added else str(experts.reader.place.absolute())  # with an adapter merged in, none is the source
        self.manifest = Manifest(expert_format, model_type, source, shapes, {}, config, source_directory=where)
        self.layer_outputs = self._layer_outputs()
        self.copy_outputs = self._copy_outputs()
        self.outputs = [*self.copy_outputs, *self.layer_outputs.values()]

    # --- files to write -------------------------------------------------------------------------------------------

    def _layer_outputs(self) -> dict[int, Output]:
        """Layer number -> the file of its packed experts."""
        outputs = {}
        for number, layer in sorted(self.layers.items()):
            metadata = layer_metadata(self.manifest, number, "0" * 64)
            outputs[number] = Output(
                layer_file(number), tuple(layer_tensors(layer)), metadata, self.experts.nbytes([number])
            )
        return outputs

    def _copy_outputs(self) -> list[Output]:
        """The shards with all other tensors, in the source's order."""
        shards: list[list[TensorEntry]] = []
        size = SHARD_BYTES
        for entry in sorted(self.reader.tensors.values(), key=lambda entry: (entry.file.name, entry.offset)):
            if entry.name in self.packed:
                continue
            if size + entry.nbytes > SHARD_BYTES:
                shards.append([])
                size = 0
            shards[-1].append(entry)
            size += entry.nbytes
        return [
            Output(
                f"model-{i:05d}-of-{len(shards):05d}.safetensors",
                tuple(NewTensor(entry.name, entry.dtype, entry.shape, entry.nbytes) for entry in shard),
                {"manifest_id": self.manifest.id},
                sum(entry.nbytes for entry in shard),
                tuple(shard),
            )
            for i, shard in enumerate(shards, 1)
        ]

    def is_written(self, output: Output) -> bool:
        """Whether the file exists, is whole, and belongs to this conversion."""
        fixed = {key: value for key, value in output.metadata.items() if key != "source_sha256"}
        return is_whole(self.target / output.name, output.tensors, output.metadata, fixed)

    def source_bytes(self, report: bool) -> int:
        """The total number of bytes that `run` will yield."""
        done = set(self._reported()) if report else set(self.manifest.layers)
        measured = sum(output.source_bytes for number, output in self.layer_outputs.items() if number not in done)
        return measured + sum(output.source_bytes for output in self.outputs if not self.is_written(output))

    # --- writing --------------------------------------------------------------------------------------------------

    @contextmanager
    def opened(self, write: bool = True) -> Iterator[None]:
        """Check the target directory; with `write`, also lock it and remove files that a killed run left half written.

        Raises:
            ValueError: the directory holds something else or another conversion, or another process uses it.
        """
        target = self.target
        if target.exists() and not target.is_dir():
            raise ValueError(f"{target} is not a directory; give one that is empty or does not exist")
        with locked(target, "converting") if write else nullcontext():  # a directory that is only read may be read-only
            existing = next((target / name for name in (MANIFEST, UNFINISHED) if (target / name).is_file()), None)
            if existing is not None:
                self._check_same(existing)
            elif left := sorted(
                path.name for path in target.iterdir() if path.suffix != TEMPORARY and path.name != LOCK
            ):
                raise ValueError(
                    f"{target} is not empty ({', '.join(left[:3])}) and no conversion; give a directory that is empty "
                    "or does not exist"
                )
            if write:
                for path in (*target.glob(f"*{TEMPORARY}"), *target.glob(f"*/*{TEMPORARY}")):
                    path.unlink()
            yield

    def _check_same(self, path: Path) -> None:
        old, new = Manifest.read(path), self.manifest
        cure = "give another directory, or remove this one to convert anew"
        for name in ("expert_format", "model_type"):
            if getattr(old, name) != getattr(new, name):
                raise ValueError(f"{path} has {name} {getattr(old, name)}, asked for is {getattr(new, name)}; {cure}")
        for number in sorted(old.layers.keys() | new.layers.keys()):
            if old.layers.get(number) != new.layers.get(number):
                were, are = old.layers.get(number, "none"), new.layers.get(number, "none")
                raise ValueError(f"{path} has experts of layer {number}: {were}, the source's are: {are}; {cure}")
        if (problem := difference(old.source, new.source)) is not None:
            raise ValueError(f"{path} was made from another source, or {self.source} has changed: {problem}; {cure}")

    def run(self, report: bool = False) -> Iterator[tuple[str, int]]:
        """Write the missing files. Yields (description of the work, number of source bytes processed).

        Args:
            report: also measure the packed experts against the source and write `quantization_error.json`.

        Raises:
            ValueError: the source is damaged, or the disk is full; all files finished before are kept.
        """
        todo = {output.name for output in self.outputs if not self.is_written(output)}
        check_space(self.target, sum(output.nbytes for output in self.outputs if output.name in todo))
        with explained(self.target, self._left):
            if not (self.target / MANIFEST).is_file():
                write_whole(self.target / UNFINISHED, to_json(self.manifest.to_dict()))
            copy_files(self.source, self.target)
            for output in self.copy_outputs:
                if output.name in todo:
                    yield from self._copy(output)
            self._write_index()
            reported = self._reported() if report else {}
            for number, output in self.layer_outputs.items():
                yield from self._finish_layer(number, output.name in todo, report and number not in reported)
            files = {output.name: describe_file(self.target / output.name) for output in self.outputs}
            write_whole(self.target / MANIFEST, to_json(replace(self.manifest, files=files).to_dict()))
            (self.target / UNFINISHED).unlink(missing_ok=True)
            sync_directory(self.target)

    def _copy(self, output: Output) -> Iterator[tuple[str, int]]:
        content = (read_chunks(entry) for entry in output.copied)
        write_safetensors(self.target / output.name, output.tensors, output.metadata, content)
        yield "copying", output.source_bytes

    def _finish_layer(self, number: int, write: bool, measure: bool) -> Iterator[tuple[str, int]]:
        if not (write or measure):
            return
        layer, output = self.layers.pop(number), self.layer_outputs[number]
        path = self.target / output.name
        if write:
            content = ContentHash()
            self.experts.reader.observer = content.add
            for nbytes in self.experts.load({number: layer}):
                yield f"packing layer {number}", nbytes
            self.experts.reader.observer = None
            metadata = layer_metadata(self.manifest, number, content.hexdigest())
            stored = (
                layer.bias(*place) if tensor.name.endswith(BIAS) else layer.export_packed(*place)
                for tensor, place in layer_tensors(layer).items()
            )
            content_of = ([tensor.view(torch.uint8).numpy().data] for tensor in stored)
            write_safetensors(path, output.tensors, metadata, content_of)
        else:
            for _ in load_layer(path, layer):
                pass
        if measure:
            meter = ErrorMeter(layer)
            for nbytes in self.experts.load({number: cast(ExpertLayer, meter)}):
                yield f"measuring layer {number}", nbytes
            self._add_report(number, meter.result())

    def hash_source(self, number: int) -> str:
        """The content hash of one layer's experts as they are in the source now."""
        content, reader = ContentHash(), self.experts.reader
        with reader, ThreadPoolExecutor(READERS) as pool:
            reader.observer = content.add
            for _ in pool.map(lambda piece: bool(reader.read(*piece).numel()), self.experts.pieces(number)):
                pass
            reader.observer = None
        return content.hexdigest()

    def _write_index(self) -> None:
        weight_map = {tensor.name: output.name for output in self.copy_outputs for tensor in output.tensors}
        size = sum(tensor.nbytes for output in self.copy_outputs for tensor in output.tensors)
        write_whole(self.target / INDEX_NAME, to_json({"metadata": {"total_size": size}, "weight_map": weight_map}))

    def _left(self) -> int:
        return sum(output.nbytes for output in self.outputs if not self.is_written(output))

    # --- report and check -----------------------------------------------------------------------------------------

    def _reported(self) -> dict[int, dict[str, ProjectionError]]:
        """Layer number -> projection -> error, for the layers that this conversion has measured so far."""
        path = self.target / REPORT
        try:
            content = read_json(path)
            if content["manifest_id"] != self.manifest.id:
                return {}
            return {
                int(number): {name: ProjectionError(**error) for name, error in errors.items()}
                for number, errors in content["layers"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}  # the report is absent or was edited: measure again

    def report(self) -> dict[int, dict[str, ProjectionError]]:
        """Layer number -> projection -> error, from a run with `report`."""
        return dict(sorted(self._reported().items()))

    def _add_report(self, number: int, errors: Mapping[str, ProjectionError]) -> None:
        layers = {**self._reported(), number: errors}
        content = {
            "manifest_id": self.manifest.id,
            "expert_format": self.manifest.expert_format,
            "layers": {str(n): {name: asdict(error) for name, error in each.items()} for n, each in layers.items()},
        }
        write_whole(self.target / REPORT, to_json(content))


def identity_of(reader: CheckpointReader) -> dict[str, dict[str, Any]]:
    """File name -> what `identify` says of it, for a checkpoint of either kind."""
    return reader.identity() if isinstance(reader, GgufReader) else identify(reader.files)


def is_whole(
    path: Path, tensors: Sequence[NewTensor], metadata: Mapping[str, str], fixed: Mapping[str, str] | None = None
) -> bool:
    """Whether a file exists as `write_safetensors` would write it, judged by its header and size.

    Args:
        fixed: the part of the metadata that must match; None for all of it.
    """
    if not path.is_file() or path.stat().st_size != safetensors_bytes(tensors, metadata):
        return False
    try:
        found = {entry.name: (entry.dtype, entry.shape) for entry in read_header(path)}
    except ValueError:
        return False
    expected = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
    return found == expected and (metadata if fixed is None else fixed).items() <= read_metadata(path).items()


def copy_files(source: Path, target: Path) -> None:
    """Copy the files beside the weights: those with a suffix in `COPIED`, and chat templates."""
    folder = source / TEMPLATES
    for path in (*source.iterdir(), *(folder.iterdir() if folder.is_dir() else ())):
        if path.is_file() and path.suffix in COPIED and not path.name.endswith(".index.json"):
            write_whole(target / path.relative_to(source), path.read_bytes())


def check_space(target: Path, needed: int) -> None:
    """Refuse to begin writing files that do not fit on the disk.

    Raises:
        ValueError: the disk has too little space; the message has both numbers.
    """
    free = shutil.disk_usage(target).free
    if needed > free:
        raise ValueError(
            f"{target}: {needed:,} bytes are still to be written, {free:,} are free there; free {needed - free:,} "
            "bytes, or write onto another disk"
        )


@contextmanager
def explained(target: Path, left: Callable[[], int]) -> Iterator[None]:
    """Turn the OSError of a full disk into a ValueError that says how many bytes are `left` to write."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        free = shutil.disk_usage(target).free
        raise ValueError(
            f"{target}: {error.strerror}; {left():,} bytes are still to be written, {free:,} are free there. "
            "What is finished is kept: make room, then run the same command again"
        ) from error


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

"""A converted checkpoint: the files that `ktft convert` writes, and how their packed experts are loaded.

`ktft.json` describes the checkpoint and is written last: without it the conversion is unfinished.
docs/reference/convert.md describes the layout.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path, PurePosixPath
from textwrap import shorten
from typing import Any

import torch

from ktft.checkpoint.files import CRC32, NewTensor, read_json, to_json
from ktft.checkpoint.identity import describe_file, difference, identify, read_prelude
from ktft.checkpoint.load import READERS, LayerShape, read_ahead
from ktft.checkpoint.reader import CONFIG_NAME, TensorEntry, read_header
from ktft.config import EXPERT_FORMATS
from ktft.native import ExpertLayer

logger = logging.getLogger(__name__)

MANIFEST, UNFINISHED = "ktft.json", "ktft.unfinished.json"
FORMAT_VERSION = 1  # version of the directory: the manifest, names of files and tensors
LAYOUT_VERSION = 1  # version of the packed bytes: ExpertLayer.export_packed
BIAS = ".bias"
EXPERTS = "experts/"
"""In a manifest's `source`, the start of the names of files that only the experts come from."""


@dataclass(frozen=True)
class ExpertShape:
    """The shape of one layer's routed experts."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    biases: bool

    @classmethod
    def of(cls, layer: LayerShape) -> ExpertShape:
        """The shape of a native layer, or of an object that describes one."""
        return cls(layer.held.num_experts, layer.hidden_size, layer.intermediate_size, layer.biases)


@dataclass(frozen=True)
class Manifest:
    """The content of `ktft.json`.

    Attributes:
        expert_format: the packed experts' format.
        model_type: the `model_type` of config.json.
        source: the source's shards, as `ktft.checkpoint.identity.identify` describes them, and after `EXPERTS` the
            files of the experts if they come from elsewhere.
        layers: layer number -> its experts' shape.
        files: name of a safetensors file within the directory -> `describe_file`; empty in `ktft.unfinished.json`.
        config_sha256: the SHA-256 of config.json as it was copied. Editing it is allowed, for a longer context say.
        source_directory: the absolute path of the experts' source; empty if it was not recorded.
    """

    expert_format: str
    model_type: str
    source: dict[str, dict[str, Any]]
    layers: dict[int, ExpertShape]
    files: dict[str, dict[str, Any]]
    config_sha256: str
    format_version: int = FORMAT_VERSION
    layout_version: int = LAYOUT_VERSION
    source_directory: str = ""

    @property
    def id(self) -> str:
        """The hash of source, model, format and versions. Every safetensors file repeats it."""
        fixed = {key: value for key, value in self.to_dict().items() if key != "source_directory"}
        return hashlib.sha256(to_json(fixed | {"files": {}, "config_sha256": ""})).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The content of the JSON file."""
        return asdict(self) | {"layers": {str(number): asdict(shape) for number, shape in self.layers.items()}}

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a manifest.

        Raises:
            ValueError: the file is not a manifest, or has another version.
        """
        content = read_json(path, _AGAIN)
        if not isinstance(content, dict):
            raise ValueError(f"{path} is not what ktft convert wrote; {_AGAIN}")
        for key, known in (("format_version", FORMAT_VERSION), ("layout_version", LAYOUT_VERSION)):
            if content.get(key) != known:
                raise ValueError(f"{path} has {key} {content.get(key)!r}, this ktft knows {known}; {_AGAIN}")
        for key, is_valid in _FIELDS.items():
            if not is_valid(content.get(key)):
                raise ValueError(f"{path}: {key} is {shorten(repr(content.get(key)), 200)}; {_AGAIN}")
        if unknown := sorted(content.keys() - {field.name for field in fields(cls)}):
            raise ValueError(f"{path} has the unknown key {unknown[0]!r}; {_AGAIN}")
        layers = {int(number): ExpertShape(**shape) for number, shape in content["layers"].items()}
        return cls(**content | {"layers": layers})


def _is_map(key: Callable[[str], bool], value: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda found: isinstance(found, dict) and all(key(k) and value(v) for k, v in found.items())


def _is_shape(found: Any) -> bool:
    sizes = ("num_experts", "hidden_size", "intermediate_size")
    return (
        isinstance(found, dict)
        and found.keys() == {*sizes, "biases"}
        and all(type(found[name]) is int and found[name] > 0 for name in sizes)
        and type(found["biases"]) is bool
    )


def _is_file(found: Any) -> bool:
    return isinstance(found, dict) and type(found.get("bytes")) is int and isinstance(found.get("header_sha256"), str)


def _is_inside(name: str) -> bool:
    """Whether a file name can only refer to a file within the directory."""
    path = PurePosixPath(name)
    return name.isprintable() and not path.is_absolute() and ".." not in path.parts


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "expert_format": lambda found: found in EXPERT_FORMATS,
    "model_type": lambda found: isinstance(found, str),
    "source": _is_map(str.isprintable, lambda found: isinstance(found, dict)),
    "layers": _is_map(lambda number: number.isascii() and number.isdecimal(), _is_shape),
    "files": _is_map(_is_inside, _is_file),
    "config_sha256": lambda found: isinstance(found, str),
    "source_directory": lambda found: found is None or isinstance(found, str),  # earlier manifests lack it
}
"""Key of a manifest -> check of whether a value is valid."""

_AGAIN = "convert the original checkpoint again, into another directory: ktft convert SRC DST"


def sha256(path: Path) -> str:
    """The SHA-256 of a small file, as hex digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def layer_file(number: int) -> str:
    """The name within the directory of the file with one layer's experts."""
    return f"experts/layer-{number:05d}.safetensors"


def layer_tensors(layer: ExpertLayer) -> dict[NewTensor, tuple[int, str]]:
    """The tensors of a layer's file in order, each with its expert's number in the model and its projection.

    `E.PROJECTION.packed` is uint8 `[ExpertLayer.canonical_bytes]`; in a layer with biases `E.PROJECTION.bias` is fp32
    `[out_features]`.
    """
    tensors = {}
    for place in product(range(layer.held.num_experts), layer.projections):
        stem, nbytes = "{}.{}".format(*place), layer.canonical_bytes(place[1])
        tensors[NewTensor(f"{stem}.packed", "U8", (nbytes,), nbytes)] = place
        if layer.biases:
            rows = layer.hidden_size if place[1] == "down_proj" else layer.intermediate_size
            tensors[NewTensor(f"{stem}{BIAS}", "F32", (rows,), 4 * rows)] = place
    return tensors


def layer_metadata(manifest: Manifest, number: int, source_sha256: str) -> dict[str, str]:
    """The metadata of a layer's file. `source_sha256` is the `hash_content` of the tensors that it was packed from."""
    shape = {name: json.dumps(value) for name, value in asdict(manifest.layers[number]).items()}
    return shape | {
        "format_version": str(manifest.format_version),
        "layout_version": str(manifest.layout_version),
        "expert_format": manifest.expert_format,
        "layer": str(number),
        "manifest_id": manifest.id,
        "source_sha256": source_sha256,
    }


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file that `read_header` accepts."""
    metadata: dict[str, str] = json.loads(read_prelude(path)[8:]).get("__metadata__", {})
    return metadata


def checksums(path: Path) -> dict[str, int]:
    """Tensor name -> CRC-32, from the metadata of a file that `write_safetensors` wrote.

    Raises:
        ValueError: the metadata has no checksums.
    """
    try:
        return {name: int(value, 16) for name, value in json.loads(read_metadata(path)[CRC32]).items()}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        raise ValueError(f"{path} has no checksums in its header: ktft convert did not write it; {_REDO}") from None


_REDO = "delete it and run the same ktft convert SRC DST again, which makes what is missing"


class PackedCache:
    """A finished converted checkpoint, whose files are checked against `ktft.json` by size and header.

    Args:
        verify: compare the tensors' checksums while they load.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is not the one that the conversion wrote.
    """

    def __init__(self, directory: Path, verify: bool = True) -> None:
        self.directory, self.verify = directory, verify
        self.manifest = Manifest.read(directory / MANIFEST)
        expected = {layer_file(number) for number in self.manifest.layers}
        listed = {name for name in self.manifest.files if name.startswith("experts/")}
        if listed != expected:
            odd = sorted(listed ^ expected)[0]
            raise ValueError(f"{directory / MANIFEST}: files and layers disagree about {odd}; {_AGAIN}")
        for name, recorded in self.manifest.files.items():
            self._check_file(directory / name, recorded)
        config = directory / CONFIG_NAME
        if config.is_file() and (found := sha256(config)) != self.manifest.config_sha256:
            logger.warning(
                "%s was edited since the conversion: its SHA-256 is %s, it was %s",
                config,
                found,
                self.manifest.config_sha256,
            )

    @classmethod
    def find(cls, directory: Path, verify: bool = True) -> PackedCache | None:
        """Open `directory` if it is a converted checkpoint.

        Raises:
            ValueError: the conversion has not finished, or a file is not the one that it wrote.
        """
        if (directory / MANIFEST).is_file():
            return cls(directory, verify)
        if (directory / UNFINISHED).is_file():
            raise ValueError(
                f"{directory} is a conversion that has not finished; run the same ktft convert SRC DST again, which "
                "goes on where it stopped"
            )
        return None

    def _check_file(self, path: Path, recorded: Mapping[str, Any]) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; run the same ktft convert SRC DST again, which makes it")
        if path.stat().st_size != recorded["bytes"]:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, {MANIFEST} says {recorded['bytes']}; {_REDO}")
        read_header(path)
        found = describe_file(path)["header_sha256"]
        if found != recorded["header_sha256"]:
            raise ValueError(
                f"{path} has header_sha256 {found}, {MANIFEST} says {recorded['header_sha256']}: it is of another "
                f"conversion or was edited; {_REDO}"
            )

    def check_format(self, expert_format: str | None) -> str:
        """Return the packed experts' format; `expert_format`, from the settings, must be None or name this format.

        Raises:
            ValueError: the settings name another format.
        """
        own = self.manifest.expert_format
        if expert_format not in (None, own):
            raise ValueError(
                f"{self.directory} holds experts in {own}, but expert_format is {expert_format}; leave expert_format "
                "out, or convert the original checkpoint to that format"
            )
        return own

    def check_model(self, model_type: str, layers: Mapping[int, LayerShape]) -> None:
        """Compare with the model that the experts will be loaded into.

        Raises:
            ValueError: the model has another type, or other layers or shapes.
        """
        path, own = self.directory / MANIFEST, self.manifest
        cure = "config.json and the experts are of different models: give the directory that belongs to the model"
        if model_type != own.model_type:
            raise ValueError(f"{path} is of model_type {own.model_type!r}, config.json of {model_type!r}; {cure}")
        if layers.keys() != own.layers.keys():
            odd = sorted(layers.keys() ^ own.layers.keys())[0]
            has = "lacks" if odd in layers else "has"
            raise ValueError(
                f"{path} has experts of {len(own.layers)} layers, the model of {len(layers)}: it {has} layer {odd}; "
                f"{cure}"
            )
        for number, layer in layers.items():
            if (shape := ExpertShape.of(layer)) != own.layers[number]:
                raise ValueError(f"{path}: layer {number} is {own.layers[number]}, the model's is {shape}; {cure}")

    def check_source(self, shards: Sequence[Path]) -> None:
        """Compare with the checkpoint that the model's other weights come from.

        Raises:
            ValueError: the checkpoint is not the one that was converted, or it has changed since.
        """
        if all(shard.parent.resolve() == self.directory.resolve() for shard in shards):
            return
        recorded = {name: each for name, each in self.manifest.source.items() if not name.startswith(EXPERTS)}
        if (problem := difference(recorded, identify(shards))) is not None:
            raise ValueError(
                f"{self.directory} was not converted from {shards[0].parent} as that is now: {problem}; convert it "
                f"again, or take the whole model from {self.directory}"
            )

    @property
    def expert_source(self) -> dict[str, dict[str, Any]]:
        """The files that only the experts come from, described as those of `Manifest.source`; empty without any."""
        return {
            name.removeprefix(EXPERTS): each for name, each in self.manifest.source.items() if name.startswith(EXPERTS)
        }

    def nbytes(self, share: float = 1.0) -> int:
        """Bytes of the experts' files that a process reads if it holds the fraction `share` of each layer's experts."""
        return round(share * sum(self.manifest.files[layer_file(number)]["bytes"] for number in self.manifest.layers))

    def load(self, layers: Mapping[int, ExpertLayer]) -> Iterator[int]:
        """Fill empty layers of the packed format and shape. Yields the bytes loaded since the previous yield.

        Raises:
            ValueError: a tensor is missing, left over or damaged.
        """
        for number, layer in sorted(layers.items()):
            yield from load_layer(self.directory / layer_file(number), layer, self.verify)


def load_layer(path: Path, layer: ExpertLayer, verify: bool = True) -> Iterator[int]:
    """Fill one layer from its file; see `PackedCache.load`."""
    entries = {entry.name: entry for entry in read_header(path)}
    expected = {tensor.name: (tensor, place) for tensor, place in layer_tensors(layer).items()}
    if odd := sorted(entries.keys() ^ expected.keys()):
        raise ValueError(f"{path} {'lacks' if odd[0] in expected else 'holds an unknown'} tensor {odd[0]}; {_REDO}")
    recorded = checksums(path) if verify else {}
    needed = [entry for entry in entries.values() if expected[entry.name][1][0] in layer.held.places]
    for entry, data, crc in _read_all(needed, verify):
        if verify and crc != recorded.get(entry.name):
            raise ValueError(
                f"{path}: tensor {entry.name} is damaged, its CRC-32 is {crc:08x}, the header says "
                f"{recorded.get(entry.name, 0):08x}; {_REDO}"
            )
        tensor, (expert, projection) = expected[entry.name]
        place = layer.held.places[expert], projection
        try:
            if (entry.dtype, entry.shape) != (tensor.dtype, tensor.shape):
                raise ValueError(f"it is {entry.dtype} {entry.shape}, expected {tensor.dtype} {tensor.shape}")
            if entry.name.endswith(BIAS):
                layer.load_bias(*place, torch.frombuffer(data, dtype=torch.float32))
            else:
                layer.import_packed(*place, torch.frombuffer(data, dtype=torch.uint8))
        except ValueError as error:
            raise ValueError(f"{path}: {entry.name}: {error}; {_REDO}") from error
        yield entry.nbytes


def _read_all(entries: Sequence[TensorEntry], verify: bool) -> Iterator[tuple[TensorEntry, memoryview, int]]:
    """Yield (tensor, its bytes, their CRC-32) in order. The bytes are valid until the next iteration."""
    if not entries:
        return
    buffers = [memoryview(bytearray(max(entry.nbytes for entry in entries))) for _ in range(READERS)]
    descriptor = os.open(entries[0].file, os.O_RDONLY | os.O_CLOEXEC)

    def read(number: int) -> tuple[TensorEntry, memoryview, int]:
        entry = entries[number]
        data, done = buffers[number % READERS][: entry.nbytes], 0
        while done < entry.nbytes:
            count = os.preadv(descriptor, [data[done:]], entry.offset + done)
            if not count:
                raise ValueError(f"{entry.file} ended while tensor {entry.name} was read; the file has changed")
            done += count
        with suppress(OSError):  # a page cache that fills a node would push packed experts to another
            os.posix_fadvise(descriptor, entry.offset, entry.nbytes, os.POSIX_FADV_DONTNEED)
        return entry, data, zlib.crc32(data) if verify else 0

    try:
        yield from read_ahead(range(len(entries)), read, READERS)
    finally:
        os.close(descriptor)

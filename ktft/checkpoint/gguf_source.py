"""Experts from GGUF files: their tensors under llama.cpp's names, their values through the package gguf.

llama.cpp holds the experts of every family in one way: a layer's experts stacked, `[experts, out, in]`, gate and up
apart or gate's rows before up's; in old files one tensor an expert. So a family's own layouts do not matter here.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from torch import Tensor

from ktft.checkpoint.families import Family
from ktft.checkpoint.identity import identify_shard
from ktft.checkpoint.layouts import Layout
from ktft.checkpoint.load import ExpertPlan, LayerShape, any_match
from ktft.checkpoint.reader import DTYPES, CheckpointReader
from ktft.checkpoint.schemes import PLAIN, Part, Scheme
from ktft.config import DEFAULT_EXPERT_FORMAT
from ktft.sources import gguf_files, require_gguf
from ktft.versions import version_of

STACKED = Layout("blk.{layer}.{projection}", ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), bias=".bias")
MERGED = Layout("blk.{layer}.{projection}", ("ffn_gate_up_exps", "ffn_gate_up_exps", "ffn_down_exps"), bias=".bias")
SEPARATE = Layout("blk.{layer}.{projection}.{expert}", ("ffn_gate", "ffn_up", "ffn_down"))
EXPERT = re.compile(r"^blk\.\d+\.ffn_(gate|up|down|gate_up)(_exps|\.\d+)\.")

TYPES = (
    *PLAIN,
    *("Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0", "Q3_K", "Q2_K", "MXFP4", "NVFP4"),
    *("IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "TQ2_0", "TQ1_0"),
)
"""The types of tensors that are read, as far as the installed gguf dequantizes them."""
_EXACT = {**dict.fromkeys(PLAIN, "bf16"), "MXFP4": "mxfp4"}
_INT8_ABOVE = 5.0  # bits a weight: types below have about as many levels as k4


def nearest_format(kind: str) -> str:
    """The expert format nearest to a type of GGUF's."""
    from ktft.checkpoint.gguf_format import bits_per_weight

    return _EXACT.get(kind) or ("int8" if bits_per_weight(kind) > _INT8_ABOVE else "k4")


@dataclass(frozen=True)
class GgufScheme(Scheme):
    """Tensors whose values `GgufReader.read` gives, whatever their type."""

    name: ClassVar[str] = "GGUF"
    parts: ClassVar[Mapping[str, Part]] = {"codes": Part(".weight", TYPES)}
    transposes: ClassVar[bool] = False
    container: ClassVar[str] = "GGUF"


class GgufReader(CheckpointReader):
    """The tensors of routed experts in a GGUF model, in one file or several. The others are not needed.

    Args:
        path: as that of `ktft.sources.gguf_files`.

    Raises:
        ValueError: the package gguf is missing; a part is missing, truncated or of another model; a tensor is in two.
    """

    ahead: ClassVar[int] = 8  # fp32 takes twice the memory of what most checkpoints hold

    def __init__(self, path: str | os.PathLike[str]) -> None:
        require_gguf()
        self.fields: dict[str, Any] = {}
        self._header_bytes: dict[Path, int] = {}
        super().__init__(gguf_files(Path(path)))

    def _read_headers(self, paths: list[Path]) -> None:
        count = 0
        for number, path in enumerate(paths):
            if not path.is_file():
                raise ValueError(f"{path} is missing; give a GGUF file")
            header = self._format.read_gguf_header(path)
            self._check_part(path, number, header.fields)
            self.fields = header.fields | self.fields  # the first part has those of the model
            self._header_bytes[path] = header.nbytes
            self._add([entry for entry in header.tensors if EXPERT.match(entry.name)])
            count += len(header.tensors)
        expected = self.fields.get("split.tensors.count", count)
        if count != expected:
            raise ValueError(f"{self.described} holds {count} tensors, its header says {expected}; download it again")

    def _check_part(self, path: Path, number: int, found: Mapping[str, Any]) -> None:
        own = found.get("split.no", 0), found.get("split.count") or 1
        if own != (number, len(self.files)):
            raise ValueError(
                f"{path} is part {own[0] + 1} of {own[1]} by its header, and part {number + 1} of {len(self.files)} by "
                "its name; give all parts the names that llama.cpp gave them, as model-00001-of-00002.gguf"
            )

    @property
    def _format(self) -> ModuleType:
        from ktft.checkpoint import gguf_format

        return gguf_format

    @property
    def place(self) -> Path:
        return self.files[0]

    @property
    def described(self) -> str:
        more = len(self.files) - 1
        return f"{self.files[0]}{f' with its {more} other parts' if more else ''}"

    @cached_property
    def scheme(self) -> Scheme:
        return GgufScheme()

    def read(self, name: str, index: int | None = None) -> Tensor:
        entry = self.tensors[name]
        raw, shape = self._read_bytes(entry, index)
        if entry.dtype in PLAIN:
            return raw.view(DTYPES[entry.dtype]).view(shape)
        values: Tensor = self._format.dequantize(raw, entry.dtype, shape)
        return values

    def identity(self) -> dict[str, dict[str, Any]]:
        """File name -> `identify_shard` of it."""
        return {path.name: identify_shard(path, self._header_bytes[path]) for path in self.files}

    @property
    def types(self) -> dict[str, float]:
        """Each type of the experts' matrices, and the share of the weights that has it; the largest share first."""
        counts: Counter[str] = Counter()
        for name, entry in self.tensors.items():
            if name.endswith(".weight"):
                counts[entry.dtype] += math.prod(entry.shape)
        total = max(1, counts.total())
        return {kind: count / total for kind, count in counts.most_common()}

    @property
    def expert_format(self) -> str:
        """The format for the experts if none is asked for: the nearest to the types that most of the weights have."""
        shares: dict[str, float] = defaultdict(float)
        for kind, share in self.types.items():
            if kind in self.readable:
                shares[nearest_format(kind)] += share
        return max(shares, key=lambda name: shares[name], default=DEFAULT_EXPERT_FORMAT)

    @property
    def readable(self) -> list[str]:
        """The types that are read here."""
        return [kind for kind in TYPES if kind in self._format.readable_types()]


@dataclass(frozen=True)
class _GgufFamily(Family):
    """A family whose experts lie as llama.cpp has them."""

    def expert_pattern(self) -> re.Pattern[str]:
        return EXPERT


def gguf_plan(reader: GgufReader, family: Family, layers: Mapping[int, LayerShape], num_layers: int) -> ExpertPlan:
    """The experts of `layers` in a GGUF model, checked against the model's own config.

    Args:
        family: the model's.
        num_layers: the number of the model's decoder layers, those without routed experts included.

    Raises:
        ValueError: the file is of another architecture or size; a tensor is missing or left over, or has a wrong shape
            or a type that cannot be read.
    """
    ignored = _check_model(reader, family, layers, num_layers)
    for name, entry in reader.tensors.items():
        if entry.dtype not in reader.readable and not any_match(ignored, name):
            raise ValueError(
                f"{entry.file}: {name} is {entry.dtype}; with gguf {version_of('gguf')} ktft reads "
                f"{', '.join(reader.readable)}: take the model in one of these types, or install a newer gguf"
            )
    layout = STACKED
    if any(".ffn_gate_up_exps." in name for name in reader.tensors):
        layout = MERGED
    elif reader.tensors and not any("_exps." in name for name in reader.tensors):
        layout = SEPARATE
    own = {each.name: getattr(family, each.name) for each in fields(family)}
    return ExpertPlan(reader, _GgufFamily(**own | {"layouts": (layout,)}), layers, ignored)


def _check_model(
    reader: GgufReader, family: Family, layers: Mapping[int, LayerShape], num_layers: int
) -> tuple[str, ...]:
    """Compare what the header says of the model. Returns patterns of tensors for multi-token prediction."""
    name, found = reader.described, reader.fields
    if family.architecture is None:
        raise ValueError(
            f"{name}: ktft does not know llama.cpp's name of the family {family.name}, so it cannot read its GGUF "
            "files; take the model's safetensors"
        )
    architecture = found.get("general.architecture")
    if architecture != family.architecture:
        raise ValueError(
            f"{name}: general.architecture is {architecture!r}, that of the model ({family.name}) is "
            f"{family.architecture!r}; give a GGUF file of the model in model_name_or_path"
        )
    shape = next(iter(layers.values()))
    sizes = {
        "expert_count": ("experts a layer", shape.held.num_experts),
        "embedding_length": ("hidden size", shape.hidden_size),
        "expert_feed_forward_length": ("intermediate size of an expert", shape.intermediate_size),
    }
    cure = "give a GGUF file of the model in model_name_or_path"
    for key, (what, own) in sizes.items():
        value = found.get(f"{architecture}.{key}", own)  # not in old files; the tensors' shapes are checked too
        if value != own:
            raise ValueError(f"{name}: {architecture}.{key} is {value}, the model's config has {own} ({what}); {cure}")
    blocks = found.get(f"{architecture}.block_count", num_layers)
    predicting = found.get(f"{architecture}.nextn_predict_layers") or 0
    if type(predicting) is not int or blocks not in (num_layers, num_layers + predicting):
        raise ValueError(
            f"{name}: {architecture}.block_count is {blocks}, the model's config has {num_layers} layers; {cure}"
        )
    numbers = {int(name.split(".")[1]) for name in reader.tensors}
    return tuple(rf"^blk\.{number}\." for number in sorted(numbers) if num_layers <= number < blocks)

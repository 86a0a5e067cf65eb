"""Source formats: the tensors in which a quantization scheme stores a weight matrix, and how to decode them.

The scheme is chosen by config.json's `quantization_config`. The shards show whether a given matrix is quantized or
plain: modules that the config excludes (`ignore`, `modules_to_not_convert`) simply have plain tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ktft.checkpoint.encoded import INT4_ZERO, Encoded, pack_nibbles, unpack_nibbles

Shape = tuple[int, ...]
PLAIN, _FLOAT_SCALES = ("BF16", "F16", "F32"), ("F32", "BF16", "F16")
# Scales of activations and of the key-value cache are not needed: ktft computes both in bf16.
IGNORED = re.compile(r"\.(input_scale|activation_scale|[kv]_scale|[kv]_proj\.output_scale|[kv]_zero_point)$")


@dataclass(frozen=True)
class Part:
    """One of the tensors that store a matrix.

    Attributes:
        suffix: appended to the stem if it begins with a dot, otherwise to the plain tensor's name.
        dtypes: the accepted dtypes, as safetensors spells them.
    """

    suffix: str
    dtypes: tuple[str, ...]
    optional: bool = False

    def tensor_name(self, stem: str, stacked: bool) -> str:
        """The tensor's name in the checkpoint; see `ktft.checkpoint.families.ExpertSource` for stems."""
        if self.suffix.startswith("."):
            return stem + self.suffix
        return (stem if stacked else stem + ".weight") + self.suffix


@dataclass(frozen=True)
class Scheme:
    """The scheme of plain tensors, and the base class of all other schemes.

    Attributes:
        parts: role -> part; a matrix is in this scheme if its part `codes` is there.
        transposes: whether `ExpertSource.transposed` applies; it does not if the scheme itself defines the orientation.
        rounds_as: the expert format with the same typical error; None for plain weights, and for codes that ktft does
            not write (`ktft.checkpoint.addition`).
        dense_bytes: bytes a parameter of what is not a routed expert, as released models in the scheme have it; None if
            that part is plain.
        container: the kind of files that have it.
    """

    name: ClassVar[str] = "plain"
    parts: ClassVar[Mapping[str, Part]] = {"codes": Part("", PLAIN)}
    transposes: ClassVar[bool] = True
    rounds_as: ClassVar[str | None] = None
    dense_bytes: ClassVar[int | None] = None
    container: ClassVar[str] = "safetensors"

    @property
    def beside(self) -> tuple[Scheme, ...]:
        """The schemes of other matrices of the same checkpoints, told apart by the dtype of their codes."""
        return ()

    def tensor_names(self, stem: str, stacked: bool = False) -> dict[str, str]:
        """Role -> tensor name."""
        return {role: part.tensor_name(stem, stacked) for role, part in self.parts.items()}

    def stem_of(self, codes: str) -> str | None:
        """The stem of an unstacked matrix whose codes have this name; None if the name is not that of codes."""
        suffix = self.parts["codes"].suffix
        end = suffix if suffix.startswith(".") else ".weight" + suffix
        return codes.removesuffix(end) if codes.endswith(end) else None

    def plain_name(self, codes: str) -> str:
        """The name of the plain weight that the codes of this name decode to."""
        suffix = self.parts["codes"].suffix
        return codes.removesuffix(suffix) + (".weight" if suffix.startswith(".") else "")

    def matrix_shape(self, codes: Shape) -> Shape:
        """The shape `[rows, cols]` of the matrix that `decode` returns for codes of this shape."""
        return codes

    def shapes(self, rows: int, cols: int) -> dict[str, tuple[Shape, ...]]:
        """Role -> the shapes that the tensor of this role may have for a `[rows, cols]` matrix."""
        return {"codes": ((rows, cols),)}

    def decode(self, tensors: Mapping[str, Tensor]) -> Encoded:
        """Decode a matrix from its tensors (by role), whose shapes and dtypes have been checked.

        Raises:
            ValueError: the tensors hold invalid values.
        """
        return Encoded(tensors["codes"])


@dataclass(frozen=True)
class Fp8(Scheme):
    """E4M3 codes with one scale per block: DeepSeek, GLM, MiniMax, Qwen (`weight_block_size`).

    Attributes:
        block: rows and columns that share a scale; None means the whole dimension.
    """

    name: ClassVar[str] = "fp8"
    parts: ClassVar[Mapping[str, Part]] = {
        "codes": Part("", ("F8_E4M3",)),
        "scales": Part("_scale_inv", (*_FLOAT_SCALES, "F8_E8M0")),
    }
    rounds_as: ClassVar[str | None] = "fp8"
    dense_bytes: ClassVar[int | None] = 1
    block: tuple[int | None, int | None] = (128, 128)

    def shapes(self, rows: int, cols: int) -> dict[str, tuple[Shape, ...]]:
        scales = tuple(
            1 if size is None else -(-dim // size) for size, dim in zip(self.block, (rows, cols), strict=True)
        )
        spellings: tuple[Shape, ...] = (scales,)
        if self.block == (None, None):
            spellings = ((), (1,), (1, 1))
        elif self.block == (1, None):
            spellings = ((rows, 1), (rows,))
        return {"codes": ((rows, cols),), "scales": spellings}

    def decode(self, tensors: Mapping[str, Tensor]) -> Encoded:
        codes, scales = tensors["codes"], tensors["scales"].float()
        if scales.dim() < 2:
            scales = scales.reshape(-1, 1)
        rows, cols = codes.shape
        return Encoded(codes, scales, (self.block[0] or rows, self.block[1] or cols))


@dataclass(frozen=True)
class CompressedFp8(Fp8):
    """compressed-tensors `float-quantized`: one scale per row, per tensor or per block."""

    name: ClassVar[str] = "compressed-tensors float-quantized"
    parts: ClassVar[Mapping[str, Part]] = {
        "codes": Part("", ("F8_E4M3",)),
        "scales": Part("_scale", _FLOAT_SCALES),
    }


@dataclass(frozen=True)
class DeepSeekFp8(Fp8):
    """The same as DeepSeek-V4 names it, beside experts in `DeepSeekFp4`."""

    name: ClassVar[str] = "fp8 (DeepSeek-V4)"
    parts: ClassVar[Mapping[str, Part]] = {
        "codes": Part("", ("F8_E4M3",)),
        "scales": Part(".scale", ("F8_E8M0", *_FLOAT_SCALES)),
    }

    @property
    def beside(self) -> tuple[Scheme, ...]:
        return (DeepSeekFp4(),)


@dataclass(frozen=True)
class PackedInt4(Scheme):
    """compressed-tensors `pack-quantized`, symmetric (Kimi-K2): eight codes q + 8 per int32, the first in the low bits.

    Attributes:
        group: columns that share a scale; None for all columns.
    """

    name: ClassVar[str] = "compressed-tensors pack-quantized"
    parts: ClassVar[Mapping[str, Part]] = {
        "codes": Part("_packed", ("I32",)),
        "scales": Part("_scale", _FLOAT_SCALES),
        "shape": Part("_shape", ("I64", "I32")),
    }
    transposes: ClassVar[bool] = False
    rounds_as: ClassVar[str | None] = "int4"
    group: int | None = 32

    def matrix_shape(self, codes: Shape) -> Shape:
        return codes[0], codes[1] * 8

    def shapes(self, rows: int, cols: int) -> dict[str, tuple[Shape, ...]]:
        scales = (rows, -(-cols // (self.group or cols)))
        return {"codes": ((rows, -(-cols // 8)),), "scales": (scales,), "shape": ((2,),)}

    def decode(self, tensors: Mapping[str, Tensor]) -> Encoded:
        packed = tensors["codes"].contiguous().view(torch.uint8)
        shape = [packed.shape[0], packed.shape[1] * 2]
        if tensors["shape"].tolist() != shape:
            raise ValueError(f"its weight_shape says {tensors['shape'].tolist()}, its codes are {shape}")
        return Encoded(packed, tensors["scales"].float(), (1, self.group or shape[1]))


@dataclass(frozen=True)
class Mxfp4(Scheme):
    """OCP MXFP4 as in gpt-oss, by output rows: two E2M1 codes per byte, 16 bytes and one E8M0 scale per block."""

    name: ClassVar[str] = "mxfp4"
    parts: ClassVar[Mapping[str, Part]] = {"codes": Part("_blocks", ("U8",)), "scales": Part("_scales", ("U8",))}
    transposes: ClassVar[bool] = False
    rounds_as: ClassVar[str | None] = "mxfp4"

    def matrix_shape(self, codes: Shape) -> Shape:
        return codes[0], codes[1] * 32

    def shapes(self, rows: int, cols: int) -> dict[str, tuple[Shape, ...]]:
        return {"codes": ((rows, cols // 32, 16),), "scales": ((rows, cols // 32),)}

    def decode(self, tensors: Mapping[str, Tensor]) -> Encoded:
        return Encoded(tensors["codes"].flatten(1), tensors["scales"], (1, 32))


@dataclass(frozen=True)
class DeepSeekFp4(Mxfp4):
    """The same codes and scales in DeepSeek-V4's experts: a matrix `[out, in / 2]`, scales `[out, in / 32]`."""

    name: ClassVar[str] = "fp4 (DeepSeek-V4)"
    parts: ClassVar[Mapping[str, Part]] = {"codes": Part("", ("I8", "U8")), "scales": Part(".scale", ("F8_E8M0", "U8"))}

    def matrix_shape(self, codes: Shape) -> Shape:
        return codes[0], codes[1] * 2

    def shapes(self, rows: int, cols: int) -> dict[str, tuple[Shape, ...]]:
        return {"codes": ((rows, cols // 2),), "scales": ((rows, cols // 32),)}

    def decode(self, tensors: Mapping[str, Tensor]) -> Encoded:
        return Encoded(tensors["codes"].view(torch.uint8), tensors["scales"].view(torch.uint8), (1, 32))


@dataclass(frozen=True)
class Gptq(Scheme):
    """GPTQ INT4: `[in / 8, out]` int32 with eight inputs each, zero points per group, inputs possibly reordered.

    Attributes:
        group: inputs that share a scale; None for all inputs.
        zero_offset: the number added to stored zero points: 1, or 0 for `checkpoint_format: gptq_v2`.
    """

    name: ClassVar[str] = "gptq"
    parts: ClassVar[Mapping[str, Part]] = {
        "codes": Part(".qweight", ("I32",)),
        "zeros": Part(".qzeros", ("I32",)),
        "scales": Part(".scales", _FLOAT_SCALES),
        "order": Part(".g_idx", ("I32", "I64"), optional=True),
    }
    transposes: ClassVar[bool] = False
    group: int | None = 128
    zero_offset: int = 1

    def matrix_shape(self, codes: Shape) -> Shape:
        return codes[1], codes[0] * 8

    def shapes(self, rows: int, cols: int) -> dict[str, tuple[Shape, ...]]:
        groups = -(-cols // (self.group or cols))
        return {
            "codes": ((cols // 8, rows),),
            "zeros": ((groups, rows // 8),),
            "scales": ((groups, rows),),
            "order": ((cols,),),
        }

    def decode(self, tensors: Mapping[str, Tensor]) -> Encoded:
        qweight = tensors["codes"]
        rows, cols = qweight.shape[1], qweight.shape[0] * 8
        codes = (
            qweight.contiguous().view(torch.uint8).view(cols // 8, rows, 4).permute(1, 0, 2).reshape(rows, cols // 2)
        )
        # Some writers store a zero point of 0, less one, as 15: the sum is taken in four bits, as GPTQ's kernels do.
        zeros = unpack_nibbles(tensors["zeros"].contiguous().view(torch.uint8)) + self.zero_offset & 15
        scales, group = tensors["scales"].float(), self.group or cols
        order = tensors.get("order")
        if order is not None and not torch.equal(order, torch.arange(cols, device=order.device) // group):
            return self._reordered(codes, scales, zeros, order.long())
        symmetric = bool((zeros == INT4_ZERO).all())
        return Encoded(codes, scales.T, (1, group), None if symmetric else zeros.T)

    @staticmethod
    def _reordered(codes: Tensor, scales: Tensor, zeros: Tensor, order: Tensor) -> Encoded:
        if int(order.min()) < 0 or int(order.max()) >= len(scales):
            raise ValueError(f"its g_idx holds {int(order.min())} to {int(order.max())}, it has {len(scales)} groups")
        q = unpack_nibbles(codes).float() - zeros.T[:, order].float()
        return Encoded(q * scales.T[:, order])


@dataclass(frozen=True)
class Awq(Scheme):
    """AWQ INT4 (`version: gemm`): `[in, out / 8]` int32 with eight outputs each, in AWQ's order, with zero points."""

    name: ClassVar[str] = "awq"
    parts: ClassVar[Mapping[str, Part]] = {
        "codes": Part(".qweight", ("I32",)),
        "zeros": Part(".qzeros", ("I32",)),
        "scales": Part(".scales", _FLOAT_SCALES),
    }
    transposes: ClassVar[bool] = False
    # For each output, the four bits of a word that hold it, counted from the lowest: the inverse of AWQ's order.
    PLACES: ClassVar[tuple[int, ...]] = (0, 4, 1, 5, 2, 6, 3, 7)
    group: int | None = 128

    def matrix_shape(self, codes: Shape) -> Shape:
        return codes[1] * 8, codes[0]

    def shapes(self, rows: int, cols: int) -> dict[str, tuple[Shape, ...]]:
        groups = -(-cols // (self.group or cols))
        return {"codes": ((cols, rows // 8),), "zeros": ((groups, rows // 8),), "scales": ((groups, rows),)}

    def _by_output(self, words: Tensor) -> Tensor:
        """Unpack `[n, out / 8]` int32 into codes `[out, n]`."""
        codes = unpack_nibbles(words.contiguous().view(torch.uint8)).view(len(words), -1, 8)
        return codes[:, :, list(self.PLACES)].flatten(1).T

    def decode(self, tensors: Mapping[str, Tensor]) -> Encoded:
        codes, zeros = self._by_output(tensors["codes"]), self._by_output(tensors["zeros"])
        return Encoded(
            pack_nibbles(codes.contiguous()),
            tensors["scales"].float().T,
            (1, self.group or codes.shape[1]),
            zeros,
        )


PLAIN_SCHEME = Scheme()


# --- config.json ------------------------------------------------------------------------------------------------------


@dataclass
class _Config:
    """A mapping in config.json. Every value read from it is checked, and errors name its place in the file."""

    values: Mapping[str, Any]
    where: str

    def one_of(self, key: str, accepted: tuple[Any, ...], default: Any = None) -> Any:
        value = self.values.get(key, default)
        value = value.lower() if isinstance(value, str) else value
        if not any(value == each and type(value) is type(each) for each in accepted):
            shown = ", ".join("null" if each is None else str(each) for each in accepted)
            raise ValueError(f"{self.where}: {key} is {self.values.get(key)!r}; ktft reads {shown}")
        return value

    def group(self, key: str) -> int | None:
        """A group size: a multiple of 32, or None for all columns."""
        value = self.values.get(key)
        if value in (None, -1):
            return None
        if type(value) is not int or value < 32 or value % 32:
            raise ValueError(
                f"{self.where}: {key} is {value!r}; ktft reads multiples of 32, and -1 for one group a row"
            )
        return value

    def block(self, key: str) -> tuple[int, int] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not (isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)):
            raise ValueError(f"{self.where}: {key} is {value!r}; it must be two positive numbers, rows and columns")
        return value[0], value[1]


def _fp8(config: _Config) -> Scheme:
    config.one_of("fmt", ("e4m3", "float8_e4m3fn", "float8_e4m3", None))
    kind = DeepSeekFp8 if config.one_of("expert_dtype", ("fp4", "fp8", None)) else Fp8
    return kind(config.block("weight_block_size") or (None, None))


def _compressed(config: _Config) -> Scheme:
    groups = config.values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ValueError(f"{config.where}: it has no config_groups")
    found = {}
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        where = f"{config.where}.config_groups.{name}"
        if not isinstance(weights, Mapping):
            raise ValueError(f"{where}: it has no weights")
        layout = _Config({"format": group.get("format") or config.values.get("format")}, where)
        found[name] = _compressed_weights(layout, _Config(weights, f"{where}.weights"))
    first, *others = found.values()
    if any(other != first for other in others):
        raise ValueError(f"{config.where}: config_groups {', '.join(found)} differ; ktft reads one scheme a checkpoint")
    return first


def _compressed_weights(layout: _Config, weights: _Config) -> Scheme:
    kind = layout.one_of("format", ("float-quantized", "pack-quantized"))
    if kind == "float-quantized":
        weights.one_of("type", ("float",))
        weights.one_of("num_bits", (8,))
        strategy = weights.one_of("strategy", ("channel", "tensor", "block"))
        if strategy == "block":
            return CompressedFp8(weights.block("block_structure") or (128, 128))
        return CompressedFp8((1, None) if strategy == "channel" else (None, None))
    weights.one_of("type", ("int",), "int")
    weights.one_of("num_bits", (4,))
    weights.one_of("symmetric", (True,), True)
    weights.one_of("actorder", (None, False, "weight", "static"))
    strategy = weights.one_of("strategy", ("group", "channel"))
    return PackedInt4(weights.group("group_size") if strategy == "group" else None)


def _gptq(config: _Config) -> Scheme:
    config.one_of("bits", (4,))
    written = config.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    config.one_of("pack_dtype", ("int32",), "int32")
    return Gptq(config.group("group_size"), zero_offset=0 if written == "gptq_v2" else 1)


def _awq(config: _Config) -> Scheme:
    renamed = {"bits": "w_bit", "group_size": "q_group_size"}  # AutoAWQ's own spellings
    values = {key: config.values.get(old) for key, old in renamed.items() if old in config.values}
    config = _Config(values | dict(config.values), config.where)
    config.one_of("bits", (4,))
    config.one_of("version", ("gemm",), "gemm")
    config.one_of("zero_point", (True,), True)
    return Awq(config.group("group_size"))


METHODS = {"fp8": _fp8, "compressed-tensors": _compressed, "mxfp4": lambda _: Mxfp4(), "gptq": _gptq, "awq": _awq}
"""`quant_method` of config.json -> function that reads the rest of the quantization config."""


def scheme_of(config: Mapping[str, Any], where: str) -> Scheme:
    """The scheme of a checkpoint whose config.json holds `config`; plain if the config names no scheme.

    Args:
        where: the file's path, for messages.

    Raises:
        ValueError: ktft cannot read the scheme, width, group size or layout; the message says what it can read.
    """
    text = config.get("text_config")
    quantization = config.get("quantization_config") or (
        text.get("quantization_config") if isinstance(text, Mapping) else None
    )
    if not quantization:
        return PLAIN_SCHEME
    if not isinstance(quantization, Mapping):
        raise ValueError(f"{where}: quantization_config is {quantization!r}; it must be a mapping")
    if "expert_dtype" in config:  # DeepSeek-V4 has it around its quantization_config
        quantization = {"expert_dtype": config["expert_dtype"], **quantization}
    found = _Config(quantization, f"{where}: quantization_config")
    method = found.one_of("quant_method", (*METHODS, "ktft"))
    return PLAIN_SCHEME if method == "ktft" else METHODS[method](found)

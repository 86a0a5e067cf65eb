"""The weights outside the routed experts: checked against the shards, and dequantized while transformers loads them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming

from ktft.checkpoint.load import any_match, check_shapes, locate, naming, refuse
from ktft.checkpoint.reader import CheckpointReader, TensorEntry
from ktft.checkpoint.schemes import IGNORED, PLAIN_SCHEME, Scheme, Shape
from ktft.dense.model import DenseWeights
from ktft.model.regroupings import Regroupings

INTEGERS = ("I64", "I32", "U8")
"""Dtypes of tables of numbers, such as the experts of each token where a hash chooses them."""


class Backbone:
    """All of a model except its routed experts.

    The model and the checkpoint must match in both directions, because transformers would initialize a missing weight
    at random, and accepts wrong shapes in a quantized model. Task heads other than the LM head are left to
    transformers: a new one is legitimate.

    Args:
        model: on the meta device.
        is_expert: a pattern that matches the names of routed experts' tensors.
        ignored: patterns of the names that transformers ignores.

    Attributes:
        dense: the linear layers whose weights are packed as they are read; None if there are none.

    Raises:
        ValueError: a tensor is missing or unexpected, or has a wrong shape or dtype.
    """

    def __init__(
        self, model: PreTrainedModel, checkpoint: CheckpointReader, is_expert: re.Pattern[str], ignored: list[str]
    ) -> None:
        backbone = self._base = model.base_model_prefix + "."
        self._prefix = "" if hasattr(model, model.base_model_prefix) else backbone
        self.checkpoint = checkpoint
        self.dense: DenseWeights | None = None
        self._problems: list[str] = []
        expected = {self._prefix + name: tensor for name, tensor in model.state_dict().items()}
        tied = {self._prefix + name for name in model.all_tied_weights_keys}
        heads = {f"{name}.weight" for name, module in model.named_modules() if module is model.get_output_embeddings()}
        required = {name for name in expected.keys() - tied if name.startswith(backbone) or name in heads}
        self._dtypes = {name: tensor.dtype for name, tensor in expected.items()}
        self._tensors: dict[str, TensorEntry] = {}  # by names in the model, because transformers renames some tensors
        self._misnamed: dict[str, str] = {}  # what transformers would rename a tensor to -> its name, which is right
        regroupings = Regroupings(model, expected, backbone)
        for name in (name for name in checkpoint.tensors if not is_expert.match(name)):
            if regroupings.take(checkpoint.tensors[name]):
                continue
            renamed = regroupings.rename(name)
            # transformers 5.4 and 5.5 apply renamings for a text model within one with images to the latter too
            weight, renamed_weight = (_weight_of(checkpoint.scheme, each) for each in (name, renamed))
            short = {renamed, renamed_weight}
            if short.isdisjoint(expected) and any(backbone + each in expected for each in short):
                renamed, renamed_weight = backbone + renamed, backbone + renamed_weight
            if weight in expected and renamed_weight not in expected:
                self._misnamed[renamed] = name
            self._tensors[self._misnamed.get(renamed, renamed)] = checkpoint.tensors[name]
        self._sources: dict[str, tuple[Scheme, dict[str, TensorEntry]]] = {}
        self._regrouped = list(regroupings.found.values())
        lacking = [missing for each in self._regrouped for missing in each.lacking()]
        regrouped = {target for each in self._regrouped for target in each.targets}
        for name in sorted(required - regrouped):
            scheme, parts, missing = self._locate(name, expected[name])
            lacking += missing
            if not missing:
                self._sources[name] = scheme, parts
        where = f"checkpoint {checkpoint.directory}"
        refuse(f"{where} lacks tensors that the model needs", lacking)
        used = {entry.name for _, parts in self._sources.values() for entry in parts.values()}
        refuse(
            f"{where} holds tensors that the model has no place for",
            (
                entry.name
                for name, entry in self._tensors.items()
                if name.startswith(backbone)
                and name not in expected
                and entry.name not in used
                and not any_match([*ignored, IGNORED, r"rotary_emb\.inv_freq"], name)
            ),
        )
        for name, (scheme, parts) in self._sources.items():
            check_shapes(scheme, parts, tuple(expected[name].shape))
        for each in self._regrouped:
            each.check(expected)

    def _locate(self, name: str, weight: Tensor) -> tuple[Scheme, dict[str, TensorEntry], list[str]]:
        """`ktft.checkpoint.load.locate` for a weight, a bias or a buffer of the model."""
        if name.endswith(".weight"):
            return locate(self._tensors, self.checkpoint.scheme, name.removesuffix(".weight"))
        if weight.is_floating_point():  # the name of a bias or a buffer has no stem
            return locate(self._tensors, PLAIN_SCHEME, name, stacked=True)
        if (entry := self._tensors.get(name)) is None:
            return PLAIN_SCHEME, {}, [name]
        if entry.dtype not in INTEGERS:
            raise ValueError(f"{entry.file}: {entry.name} is {entry.dtype}; the model has integers there")
        return PLAIN_SCHEME, {"codes": entry}, []

    def stored(self, name: str) -> tuple[Scheme, dict[str, TensorEntry]] | None:
        """The scheme of a model's weight, and its tensors by role; None if the checkpoint does not store the weight."""
        return self._sources.get(name, self._sources.get(self._prefix + name))

    def is_regrouped(self, name: str) -> bool:
        """Whether transformers makes this weight of tensors that are no weights of the model."""
        return any(target in (name, self._prefix + name) for each in self._regrouped for target in each.targets)

    def read(
        self, dtype: torch.dtype, chosen: Callable[[str], bool] = lambda name: True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight under its name in a plain checkpoint; quantized weights are dequantized to `dtype`.

        Only those are read whose tensors have names that are `chosen`.

        Raises:
            ValueError: a weight holds NaN or Inf; the message names file and tensor.
        """
        with self.checkpoint:
            for scheme, parts in self._sources.values():
                codes = parts["codes"]
                if not chosen(codes.name):
                    continue
                tensors = {role: self.checkpoint.read(entry.name) for role, entry in parts.items()}
                if scheme is PLAIN_SCHEME:
                    refuse_not_finite(tensors["codes"], codes)
                    yield codes.name, tensors["codes"]
                    continue
                with naming(codes):
                    yield f"{scheme.stem_of(codes.name)}.weight", scheme.decode(tensors).dequantize().to(dtype)
            for entry in (entry for each in self._regrouped for entry in each.sources if chosen(entry.name)):
                tensor = self.checkpoint.read(entry.name)
                refuse_not_finite(tensor, entry)
                yield entry.name, tensor

    def conversions(self) -> list[WeightConverter | WeightRenaming]:
        """What makes transformers turn the scheme's tensors into weights; empty for plain weights that stay so."""
        scheme = self.checkpoint.scheme
        if self.is_plain and self.dense is None:
            return []
        roles = {re.escape(part.tensor_name("", stacked=False)) + "$": role for role, part in scheme.parts.items()}
        names = [_NamesBack(self._misnamed)] if self._misnamed else []
        return [*names, _Dequantizing(list(roles), ".weight", operations=[_Dequantize(self, roles)])]

    @property
    def is_plain(self) -> bool:
        """Whether the checkpoint has no quantized weights."""
        return all(scheme is PLAIN_SCHEME for scheme, _ in self._sources.values())

    def packs(self, name: str) -> bool:
        """Whether this is the name of a weight that is packed, with or without the model's prefix."""
        return self._packed(name) is not None

    def packed_bytes(self, name: str) -> int | None:
        """Bytes of this packed weight on the device of the products; None if it is not packed."""
        module = self._packed(name)
        return None if module is None or self.dense is None else self.dense.device_bytes(module)

    def _packed(self, name: str) -> str | None:
        """The name of the module whose weight of this name is packed."""
        modules = () if self.dense is None else self.dense.modules
        stem = name.removesuffix(".weight")
        return next(
            (each for each in (stem, stem.removeprefix(self._base), self._base + stem) if each in modules), None
        )

    def is_no_weight(self, name: str) -> bool:
        """Whether this is the name of a plain tensor in the model, such as a bias, even if it ends like a scale's."""
        return not name.endswith(".weight") and not self._sources.keys().isdisjoint({name, self._base + name})

    def dequantize(self, name: str, tensors: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype) -> Tensor:
        """Decode or pack the weight, from its tensors by role. `finish` reports errors in them."""
        module = self._packed(name)
        name = name if name in self._sources else self._prefix + name
        scheme, parts = self._sources[name]
        if scheme is PLAIN_SCHEME and module is None:
            return tensors["codes"]
        try:
            if module is not None and self.dense is not None:
                return self.dense.pack(module, scheme.decode(tensors), tensors["codes"].device)
            return scheme.decode(tensors).dequantize().to(dtype)
        except ValueError as error:
            # Raised here, it would end up in a report by transformers that does not name the file
            self._problems.append(f"{parts['codes'].file}: {parts['codes'].name}: {error}")
            return torch.zeros(shape, dtype=dtype, device=tensors["codes"].device)

    def finish(self, model: PreTrainedModel) -> None:
        """Refuse NaN, Inf and the problems that `dequantize` found, and cast each weight to the requested dtype.

        The cast is needed because transformers keeps the checkpoint's dtype if it renames a quantized model's tensor.

        Raises:
            ValueError: a weight is damaged; the message names file and tensor.
        """
        if self._problems:
            raise ValueError(self._problems[0])
        for name, tensor in model.state_dict().items():
            source = self._sources.get(self._prefix + name)
            if source is None or not tensor.is_floating_point() or not tensor.numel():
                continue
            if tensor.dtype != self._dtypes[self._prefix + name]:
                weight = model.get_parameter_or_buffer(name)
                weight.data = weight.data.to(self._dtypes[self._prefix + name])
            refuse_not_finite(tensor, source[1]["codes"])
        for each in self._regrouped:
            for target in each.targets:
                refuse_not_finite(model.get_parameter_or_buffer(target.removeprefix(self._prefix)), each.sources[0])


def refuse_not_finite(tensor: Tensor, entry: TensorEntry) -> None:
    """Raise ValueError, which names file and tensor, if the tensor holds NaN or Inf."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    if not all(math.isfinite(bound) for bound in tensor.aminmax()):  # NaN makes both bounds NaN
        raise ValueError(f"{entry.file}: {entry.name} holds NaN or Inf; download the file again")


def _weight_of(scheme: Scheme, name: str) -> str:
    """The name of the weight that a tensor of the scheme belongs to; the name itself for a bias or a buffer."""
    endings = [part.tensor_name("", stacked=False) for part in scheme.parts.values()]
    return next((name.removesuffix(end) + ".weight" for end in endings if name.endswith(end)), name)


class _NamesBack(WeightRenaming):
    """Gives tensors their names back after transformers renamed them to what the model does not have.

    transformers does so itself for a tensor whose own name is in the model, which a quantized weight's is not: its
    scales would be left out, and its codes would be taken for the weight.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__(*next(iter(names.items())))  # patterns, of which `rename_source_key` makes no use
        self.names = names

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        return self.names.get(source_key, source_key), None


class _Dequantize(ConversionOps):
    """The conversion by which transformers calls `Backbone.dequantize`."""

    hf_quantizer = True
    """By this, later transformers leave the checkpoint's dtype to the operation; they would round scales to BF16."""

    def __init__(self, backbone: Backbone, roles: dict[str, str]) -> None:
        self.backbone, self.roles = backbone, roles

    def __deepcopy__(self, memo: dict[int, Any]) -> _Dequantize:
        return self  # transformers copies the converter for each weight

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        name, model = kwargs["full_layer_name"], kwargs["model"]
        tensors = {self.roles[p]: found[0] if isinstance(found, list) else found for p, found in input_dict.items()}
        weight = model.get_parameter_or_buffer(name)
        return {name: self.backbone.dequantize(name, tensors, weight.shape, weight.dtype)}


class _Dequantizing(WeightConverter):
    """Leaves alone what only ends like a scale: DeepSeek-V4 calls scales `scale`, and some parameters too."""

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        (dequantize,) = self.operations
        assert isinstance(dequantize, _Dequantize)
        backbone = dequantize.backbone
        if backbone.is_no_weight(source_key) or (backbone.is_plain and not backbone.packs(source_key)):
            return source_key, None
        return super().rename_source_key(source_key)

"""The weights around the experts: checked against the shards, and dequantized while transformers loads them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, rename_source_key

from ktft.checkpoint.load import any_match, check_shapes, locate, naming, refuse
from ktft.checkpoint.reader import CheckpointReader, TensorEntry
from ktft.checkpoint.schemes import IGNORED, PLAIN_SCHEME, Scheme, Shape


class Backbone:
    """All of a model but its routed experts.

    It must match the checkpoint both ways: transformers would fill a missing weight at random, and lets a quantized
    model take wrong shapes. Task heads other than the LM head are left to transformers: a new one is legitimate.

    Args:
        model: on meta.
        checkpoint: its opened checkpoint.
        is_expert: matches names of routed experts' tensors.
        ignored: patterns of names that transformers ignores.

    Raises:
        ValueError: a tensor is missing or left over, or has a wrong shape or dtype.
    """

    def __init__(
        self, model: PreTrainedModel, checkpoint: CheckpointReader, is_expert: re.Pattern[str], ignored: list[str]
    ) -> None:
        backbone = model.base_model_prefix + "."
        self._prefix = "" if hasattr(model, model.base_model_prefix) else backbone
        self.checkpoint = checkpoint
        self._problems: list[str] = []
        expected = {self._prefix + name: tensor for name, tensor in model.state_dict().items()}
        tied = {self._prefix + name for name in model.all_tied_weights_keys}
        heads = {f"{name}.weight" for name, module in model.named_modules() if module is model.get_output_embeddings()}
        required = {name for name in expected.keys() - tied if name.startswith(backbone) or name in heads}
        self._dtypes = {name: tensor.dtype for name, tensor in expected.items()}
        renamings = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightRenaming)]
        others = (name for name in checkpoint.tensors if not is_expert.match(name))
        # by their names in the model: transformers renames some of them
        self._tensors = {rename_source_key(name, renamings, [])[0]: checkpoint.tensors[name] for name in others}
        self._sources: dict[str, tuple[Scheme, dict[str, TensorEntry]]] = {}
        lacking: list[str] = []
        for name in sorted(required):
            scheme, parts, missing = self._locate(name)
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
            shape = tuple(expected[name].shape)
            check_shapes(scheme, parts, shape)

    def _locate(self, name: str) -> tuple[Scheme, dict[str, TensorEntry], list[str]]:
        stem = name.removesuffix(".weight")
        if stem != name:
            return locate(self._tensors, self.checkpoint.scheme, stem)
        return locate(self._tensors, PLAIN_SCHEME, name, stacked=True)  # a bias or a buffer: the name itself

    def stored(self, name: str) -> tuple[Scheme, dict[str, TensorEntry]] | None:
        """Scheme and tensors by role of one of the model's weights; None if the checkpoint has none of its own."""
        return self._sources.get(name, self._sources.get(self._prefix + name))

    def read(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Each weight by the name that a plain checkpoint has; those that are quantized dequantized to `dtype`.

        Raises:
            ValueError: NaN or Inf; the message names file and tensor.
        """
        with self.checkpoint:
            for scheme, parts in self._sources.values():
                codes = parts["codes"]
                tensors = {role: self.checkpoint.read(entry.name) for role, entry in parts.items()}
                if scheme is PLAIN_SCHEME:
                    refuse_not_finite(tensors["codes"], codes)
                    yield codes.name, tensors["codes"]
                    continue
                with naming(codes):
                    yield f"{scheme.stem_of(codes.name)}.weight", scheme.decode(tensors).dequantize().to(dtype)

    def conversions(self) -> list[WeightConverter]:
        """For transformers: how the scheme's tensors become weights. None of a plain checkpoint."""
        scheme = self.checkpoint.scheme
        if all(scheme is PLAIN_SCHEME for scheme, _ in self._sources.values()):
            return []
        roles = {
            re.escape(part.suffix if part.suffix.startswith(".") else ".weight" + part.suffix) + "$": role
            for role, part in scheme.parts.items()
        }
        return [WeightConverter(list(roles), ".weight", [_Dequantize(self, roles)])]

    def dequantize(self, name: str, tensors: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype) -> Tensor:
        """The weight of these tensors by role. What is wrong with them is told by `finish`."""
        name = name if name in self._sources else self._prefix + name
        scheme, parts = self._sources[name]
        if scheme is PLAIN_SCHEME:
            return tensors["codes"]
        try:
            return scheme.decode(tensors).dequantize().to(dtype)
        except ValueError as error:
            # Raised here it would end in a report of transformers, without the file
            self._problems.append(f"{parts['codes'].file}: {parts['codes'].name}: {error}")
            return torch.zeros(shape, dtype=dtype, device=tensors["codes"].device)

    def finish(self, model: PreTrainedModel) -> None:
        """Refuse NaN, Inf and what `dequantize` found, and give each weight the dtype that was asked for.

        transformers keeps a checkpoint's dtype where it renames a tensor of a quantized model.

        Raises:
            ValueError: naming file and tensor.
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


def refuse_not_finite(tensor: Tensor, entry: TensorEntry) -> None:
    """Raise ValueError, which names file and tensor, if there is NaN or Inf in it."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    if not all(math.isfinite(bound) for bound in tensor.aminmax()):  # NaN spreads to both
        raise ValueError(f"{entry.file}: {entry.name} holds NaN or Inf; download the file again")


class _Dequantize(ConversionOps):
    """transformers' side of `Backbone.dequantize`."""

    def __init__(self, backbone: Backbone, roles: dict[str, str]) -> None:
        self.backbone, self.roles = backbone, roles

    def __deepcopy__(self, memo: dict[int, Any]) -> _Dequantize:
        return self  # transformers copies converters, one a weight

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        name, model = kwargs["full_layer_name"], kwargs["model"]
        tensors = {self.roles[p]: found[0] if isinstance(found, list) else found for p, found in input_dict.items()}
        weight = model.get_parameter_or_buffer(name)
        return {name: self.backbone.dequantize(name, tensors, weight.shape, weight.dtype)}

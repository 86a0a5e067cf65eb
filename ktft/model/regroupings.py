"""The tensors that transformers joins, splits or permutes while it loads them, except those of routed experts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ktft.checkpoint.reader import TensorEntry
from ktft.checkpoint.schemes import PLAIN


@dataclass
class Regrouping:
    """The checkpoint's tensors that become some weights of the model.

    Attributes:
        targets: the weights.
        wanted: transformers' patterns of the names of the tensors.
        sources: the tensors found so far; `seen` are the patterns that they match.
    """

    targets: list[str]
    wanted: list[str]
    sources: list[TensorEntry] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def add(self, entry: TensorEntry, pattern: str) -> None:
        """Take a tensor.

        Raises:
            ValueError: the tensor is quantized.
        """
        if entry.dtype not in PLAIN:
            raise ValueError(
                f"{entry.file}: {entry.name} is {entry.dtype}; transformers makes {', '.join(self.targets)} of it, "
                f"which it does with {', '.join(PLAIN)} alone; give a checkpoint that has it so"
            )
        self.sources.append(entry)
        self.seen.add(pattern)

    def lacking(self) -> Iterator[str]:
        """What the checkpoint lacks of it, in words."""
        for pattern in self.wanted:
            if pattern not in self.seen:
                yield f"{pattern} for {self.targets[0]}"

    def check(self, expected: Mapping[str, Tensor]) -> None:
        """Compare sizes. Joining, splitting and permuting keep the number of elements.

        Raises:
            ValueError: the numbers differ.
        """
        stored = sum(math.prod(entry.shape) for entry in self.sources)
        needed = sum(expected[target].numel() for target in self.targets)
        if stored != needed:
            first = self.sources[0]
            raise ValueError(
                f"{first.file}: {first.name} and what goes with it have {stored} elements, {', '.join(self.targets)} "
                f"{needed} by the model's config"
            )


class Regroupings:
    """What transformers does to a checkpoint's names and tensors while it loads them.

    Args:
        model: on the meta device.
        expected: the model's weights, their names with the prefix `base`, which checkpoints may leave out.
    """

    def __init__(self, model: PreTrainedModel, expected: Mapping[str, Tensor], base: str) -> None:
        transforms = get_model_conversion_mapping(model)
        self._expected, self._base = expected, base
        self._renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self._converters = [
            each
            for each in transforms
            if isinstance(each, WeightConverter) and not any("experts." in target for target in each.target_patterns)
        ]
        self.found: dict[str, Regrouping] = {}  # by the first target

    def rename(self, name: str) -> str:
        """The name in the model of what is not converted."""
        renamed, _ = rename_source_key(name, self._renamings, [])
        return renamed

    def take(self, entry: TensorEntry) -> bool:
        """Take a tensor if transformers converts it. It does not if the model lacks what would become of it.

        Raises:
            ValueError: the tensor is to be converted, but quantized.
        """
        renamed = self.rename(entry.name)
        for converter in self._converters:
            target, pattern = rename_source_key(renamed, [], [converter])
            if pattern is None:
                continue
            first, *others = converter.target_patterns
            names = [target, *(target.replace(first, other) for other in others)]
            targets = [name if name in self._expected else self._base + name for name in names]
            if all(name in self._expected for name in targets):
                regrouping = self.found.setdefault(targets[0], Regrouping(targets, [*converter.source_patterns]))
                regrouping.add(entry, pattern)
                return True
        return False

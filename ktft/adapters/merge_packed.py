"""Merges into a converted checkpoint. Experts are packed with their deltas; all else keeps its format, deltas added."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from ktft.adapters.deltas import LoraDelta
from ktft.adapters.merge_records import Records
from ktft.adapters.merge_survival import Outcome, Survival
from ktft.adapters.merge_weights import NEAREST, SAME, changes_of, write_changed
from ktft.adapters.saved import SavedAdapter
from ktft.checkpoint.cache import layer_file
from ktft.checkpoint.convert import Conversion, Output
from ktft.checkpoint.encoded import Encoded
from ktft.checkpoint.load import ExpertPlan
from ktft.model.load_plan import LoadPlan
from ktft.native import ExpertLayer


class MergedConversion(Conversion):
    """The conversion of a base model, whose `plan` has empty layers of the format to pack, with an adapter.

    `added` of `Conversion` names the adapter, so that merged experts are never taken for the base model's.
    """

    def __init__(
        self, plan: LoadPlan, adapter: SavedAdapter, target: Path, added: Mapping[str, dict[str, Any]], records: Records
    ) -> None:
        assert isinstance(plan.experts, ExpertPlan)
        self._records = records
        self._changes = changes_of(plan, adapter, SAME, with_experts=False)
        merged = cast(ExpertPlan, _MergedExperts(plan.experts, adapter, records))
        super().__init__(merged, plan.layers, plan.model_type, target, added)

    @property
    def total_bytes(self) -> int:
        """The sum of the bytes that `run` will yield."""
        return self.source_bytes(report=False)

    def is_written(self, output: Output) -> bool:
        """Whether both the file and its record are there."""
        return super().is_written(output) and self._records.has(output.name)

    def _copy(self, output: Output) -> Iterator[tuple[str, int]]:
        return write_changed(self.target, output, self._changes, self.reader, self._records)


class _MergedExperts:
    """An `ExpertPlan` whose `load` adds the deltas."""

    def __init__(self, experts: ExpertPlan, adapter: SavedAdapter, records: Records) -> None:
        self._experts, self._adapter, self._records = experts, adapter, records

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)

    def load(self, layers: Mapping[int, ExpertLayer]) -> Iterator[int]:
        """Load as `ExpertPlan.load` does, and record the outcomes at the end of each call."""
        merging = {number: _MergingLayer(layer, self._adapter) for number, layer in layers.items()}
        yield from self._experts.load({number: cast(ExpertLayer, each) for number, each in merging.items()})
        for number, each in merging.items():
            each.outcomes.sort(key=lambda outcome: outcome.name)
            self._records.write(layer_file(number), each.outcomes)


class _MergingLayer:
    """Takes the base model's weights as an `ExpertLayer` does, adds each weight's delta and packs the sum."""

    def __init__(self, layer: ExpertLayer, adapter: SavedAdapter) -> None:
        self.layer, self.adapter = layer, adapter
        self.outcomes: list[Outcome] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def load(self, expert: int, projection: str, weight: Tensor, **codes: Any) -> bool:
        """Add the delta and pack the sum. Arguments and result are those of `ExpertLayer.load`."""
        encoded = Encoded(weight, **codes)
        name = f"{self.layer.name}.{expert}.{projection}"
        lora = self.adapter.delta(name) if name in self.adapter.places else None
        if not isinstance(lora, LoraDelta) or not bool(lora.b.any()):
            return self.layer.load(expert, projection, **encoded.load_arguments())
        base = encoded.dequantize()
        delta = lora.matrix(base)
        self.layer.load(expert, projection, base + delta)
        moved = self.layer.dequantize(expert, projection).sub_(self._packed_alone(projection, encoded))
        survival = Survival.measure(delta, moved, lora.inputs())
        self.outcomes.append(Outcome(name, (self.layer.name, projection), NEAREST, survival))
        return True

    def _packed_alone(self, projection: str, base: Encoded) -> Tensor:
        """The base weight without its delta, packed in this format and dequantized."""
        layer = self.layer
        one = ExpertLayer(
            layer.runtime,
            num_experts=1,
            hidden_size=layer.hidden_size,
            intermediate_size=layer.intermediate_size,
            format=layer.format,
            name=layer.name,
            swiglu=layer.swiglu,
        )
        one.load(0, projection, **base.load_arguments())
        return one.dequantize(0, projection)

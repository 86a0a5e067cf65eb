"""Verifies a model layer by layer, so that only one layer's experts have to fit in memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig

from ktft.adapters.saved import SavedAdapter
from ktft.checkpoint.cache import PackedCache
from ktft.checkpoint.convert import identity_of
from ktft.checkpoint.identity import difference
from ktft.checkpoint.load import ExpertPlan
from ktft.checkpoint.quantization_error import ErrorMeter, ProjectionError
from ktft.config import Settings
from ktft.formats import FORMAT_TRAITS
from ktft.model.load_plan import outline
from ktft.model.shape import top_k_of
from ktft.native import ExpertLayer
from ktft.verify.contract import ContractError, check_contract, comparable, random_lora
from ktft.verify.problem import Problem

SEED = 20
FAR_FROM_OTHERS = 3.0
"""An expert is off, even within its format's limit, if its error is this many times the median of its layer."""


@dataclass(frozen=True)
class LayerResult:
    """The results for one layer.

    Attributes:
        contract: errors of the kernels against the reference, on the packed weights.
        quantization: projection -> error of the packed weights against the source's; None without a source.
        problems: the comparisons over their limits.
    """

    layer: int
    contract: list[ContractError]
    quantization: dict[str, ProjectionError] | None
    problems: list[Problem] = field(default_factory=list)


class LayerVerifier:
    """The layers of one checkpoint in one format, ISA and NUMA split.

    Args:
        directory: a checkpoint, as released or converted.
        settings: format, threads, NUMA nodes, ISA.
        layers: the numbers of the layers to verify; None for all.
        adapter: directory of an adapter whose LoRA is used; None for random LoRA.
        source: the original of a converted checkpoint, to compare weights with; None takes the recorded directory.

    Raises:
        FileNotFoundError, ValueError: `outline` refuses, a layer does not exist, or the source is not the original.
    """

    def __init__(
        self,
        directory: Path,
        settings: Settings,
        layers: list[int] | None = None,
        tokens: int = 64,
        adapter: Path | None = None,
        source: Path | None = None,
    ) -> None:
        self.directory, self.tokens = directory, tokens
        plan = self.plan = outline(directory, settings)
        self.packed = plan.experts
        config = AutoConfig.from_pretrained(directory)
        self.adapter = SavedAdapter(adapter, config) if adapter is not None else None
        self.source = self._source(source, settings)
        known = sorted(plan.layers)
        for number in layers or ():
            if number not in plan.layers:
                raise ValueError(
                    f"layer {number} of {directory} has no routed experts; {len(known)} layers have, "
                    f"{known[0]} to {known[-1]}"
                )
        self.numbers = known if layers is None else sorted(set(layers))
        self.top_k = top_k_of(config.get_text_config())
        first = plan.layers[known[0]]
        self.format, self.runtime = first.format, first.runtime

    def _source(self, source: Path | None, settings: Settings) -> ExpertPlan | None:
        if isinstance(self.packed, ExpertPlan):
            if source is not None:
                raise ValueError(f"{self.directory} is no conversion: it is its own source, leave --source out")
            return self.packed
        if source is None:
            return self._recorded_source(settings)
        packing = replace(settings, expert_format=self.packed.manifest.expert_format)
        apart = self.packed.expert_source  # the experts' own files: only they are compared, and config.json is here
        if apart:
            plan = outline(self.directory, replace(packing, expert_checkpoint=str(source)))
        else:
            plan = outline(source, packing)
        if not isinstance(plan.experts, ExpertPlan):
            raise ValueError(f"--source {source} is a conversion itself; give the original checkpoint")
        if not apart:
            self.packed.check_source(plan.experts.reader.files)
        elif (problem := difference(apart, identity_of(plan.experts.reader))) is not None:
            raise ValueError(f"{self.directory} has other experts than --source {source}: {problem}; give their source")
        self.packed.check_model(plan.model_type, plan.layers)
        return plan.experts

    def _recorded_source(self, settings: Settings) -> ExpertPlan | None:
        """The source that the conversion recorded; None if it is gone or has changed."""
        assert isinstance(self.packed, PackedCache)
        recorded = self.packed.manifest.source_directory
        try:
            return self._source(Path(recorded), settings) if recorded and Path(recorded).exists() else None
        except (OSError, ValueError):
            return None

    @property
    def nbytes(self) -> int:
        """Bytes that `run` will read."""
        return sum(map(self._nbytes, self.numbers)) + (self.adapter.nbytes if self.adapter is not None else 0)

    def _nbytes(self, number: int) -> int:
        total = 0
        if isinstance(self.packed, PackedCache):
            total += self.packed.nbytes() // len(self.packed.manifest.layers)
        if self.source is not None:
            total += self.source.nbytes([number])
        return total

    def run(self, results: list[LayerResult]) -> Iterator[tuple[str, int]]:
        """Verify layer after layer, adding to `results`. Yields (what was done, bytes that are done with).

        Raises:
            ValueError: the checkpoint is damaged; or the adapter does not fit.
        """
        for nbytes in self.adapter.check_values() if self.adapter is not None else ():
            yield "adapter", nbytes
        for number in self.numbers:
            layer = self.plan.layers.pop(number)
            left = self._nbytes(number)
            meter = self._meter(layer)
            for nbytes in self._fill(number, layer, meter):
                left -= nbytes
                yield f"layer {number}: weights", nbytes
            yield f"layer {number}: kernels", 0
            results.append(self._verify(number, layer, meter))
            yield f"layer {number}: done", left

    def _meter(self, layer: ExpertLayer) -> ErrorMeter | None:
        """The meter that compares a layer with its source and packs it if needed; None without a source."""
        if self.source is None:
            return None
        return PackingMeter(layer) if self.source is self.packed else ErrorMeter(layer)

    def _fill(self, number: int, layer: ExpertLayer, meter: ErrorMeter | None) -> Iterator[int]:
        if isinstance(self.packed, PackedCache):
            yield from self.packed.load({number: layer})
        if self.source is not None:
            yield from self.source.load({number: cast(ExpertLayer, meter)})

    def _verify(self, number: int, layer: ExpertLayer, meter: ErrorMeter | None) -> LayerResult:
        lora = (
            random_lora(layer, torch.Generator().manual_seed(SEED + number))
            if self.adapter is None
            else self.adapter.lora(layer.name)
        )
        contract = check_contract(layer, lora, self.top_k, self.tokens, SEED + number)
        problems = [each.problem(number) for each in contract if not each.passed]
        problems.sort(key=lambda problem: -comparable(problem.error / problem.limit))
        if meter is not None:
            problems += outliers(meter, layer, number)
        return LayerResult(number, contract, meter.result() if meter else None, problems)


class PackingMeter(ErrorMeter):
    """Packs each weight into `layer` and compares it at once, so that a source is read once."""

    def load(self, expert: int, projection: str, weight: Any, scales: Any = None, **more: Any) -> bool:
        """Pack and compare one weight; see `ExpertLayer.load`."""
        kept = self.layer.load(expert, projection, weight, scales, **more)
        super().load(expert, projection, weight, scales, **more)
        return kept

    def load_bias(self, expert: int, projection: str, bias: Any) -> None:
        """Load one bias; see `ExpertLayer.load_bias`."""
        self.layer.load_bias(expert, projection, bias)


def outliers(meter: ErrorMeter, layer: ExpertLayer, number: int) -> list[Problem]:
    """The experts of layer `number` whose error their format does not explain, the worst first."""
    found, traits = [], FORMAT_TRAITS[layer.format]
    for projection, errors in meter.by_expert().items():
        far = max(FAR_FROM_OTHERS * statistics.median(errors.values()), traits.error)
        limit = min(far, traits.error_limit)
        found += [
            Problem("quantization", f"{projection} against its source", error, limit, number, expert, projection)
            for expert, error in errors.items()
            if not error <= limit
        ]
    return sorted(found, key=lambda problem: -comparable(problem.error))

"""Compares formats of the dense weights, the frozen linear weights outside the routed experts, on one model.

The models have the model's own dtype and one format of experts, so only the dense weights differ. One of them is in
memory at a time; logits and gradients of the one with plain weights are kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from ktft.adapters.peft import load_adapter
from ktft.config import Settings
from ktft.dense.formats import PLAIN
from ktft.dense.linear import PackedLinear
from ktft.formats import FORMAT_TRAITS
from ktft.model.experts import layer_of
from ktft.model.load_plan import outline
from ktft.verify.problem import Problem
from ktft.verify.whole import Distance, ModelRun, load_model, prompt_tokens, random_tokens, run_model

CONTRACT_LIMIT = 2.0**-8
"""The limit of the relative error of logits and gradient against the decoded weights: one rounding to bf16."""

ATTENTION, SHARED, DENSE, OUTPUT = GROUPS = ("attention", "shared experts", "dense layers", "output layer")
_FEED_FORWARD = re.compile(r"\.(mlp|feed_forward|ffn)\b")


@dataclass(frozen=True)
class GroupError:
    """The weights of one group in a format, against the same weights in the model's dtype.

    Attributes:
        weights: how many matrices there are.
        bytes, plain_bytes: their memory, in the format and in the model's dtype.
        relative_rms: the relative RMS error of all of them together.
        worst, worst_relative_rms: the name of the weight with the largest error, and that error.
    """

    weights: int
    bytes: int
    plain_bytes: int
    relative_rms: float
    worst: str
    worst_relative_rms: float


@dataclass(frozen=True)
class DenseEffect:
    """What one format of dense weights changes.

    Attributes:
        bytes: memory of the dense weights in it.
        groups: the weights' errors, by the names of `GROUPS` that the model has.
        effect: the distance from the model with dense weights in its own dtype. It has no limit.
        contract: the distance from the model with the decoded weights in ordinary linear layers.
        problems: weights over the format's limit, and a contract that is broken.
    """

    format: str
    bytes: int
    groups: dict[str, GroupError]
    effect: Distance
    contract: Distance
    problems: list[Problem] = field(default_factory=list)


def verify_dense(
    directory: Path, settings: Settings, formats: Sequence[str], tokens: int, prompts: Path | None, adapter: Path | None
) -> Iterator[str | DenseEffect]:
    """Compare formats. Yields the name of each next step, and each format's result.

    Args:
        directory, settings, adapter: see `ktft.verify.layers.LayerVerifier`.
        formats: of `DENSE_FORMATS`.
        tokens: the length of the random sequence that is used without prompts, and the most tokens of a prompt.
        prompts: a text file with one prompt per line.

    Raises:
        OSError, ValueError: the checkpoint, the adapter or the prompts cannot be used, or no weight can be packed.
    """
    yield "reading headers"
    comparison = _Comparison(directory, settings, adapter)
    yield "the model in its own dtype"
    comparison.take_exact(tokens, prompts)
    for each in formats:
        yield f"dense weights in {each}"
        yield comparison.compare(each)


class _Comparison:
    """One model in several formats of its dense weights."""

    def __init__(self, directory: Path, settings: Settings, adapter: Path | None) -> None:
        self.directory, self.settings, self.adapter = directory, settings, adapter
        self.dtype = own_dtype(AutoConfig.from_pretrained(directory))
        self.weights = DenseSources(directory, settings, self.dtype)

    def take_exact(self, tokens: int, prompts: Path | None) -> None:
        """Run the model with dense weights in its own dtype."""
        model = self._load(PLAIN)
        self.sequences = (
            [random_tokens(model, tokens)] if prompts is None else prompt_tokens(self.directory, prompts, tokens)
        )
        self.exact = self._run(self._adapted(model))

    def compare(self, format: str) -> DenseEffect:
        """Load the model with dense weights in a format, and compare weights, logits and gradient."""
        model = self._load(format)
        errors = self.weights.errors(model)
        model = self._adapted(model)
        packed = self._run(model)
        unpack(model)
        contract = packed.distance(self._run(model))
        groups = {group: _grouped(errors, group) for group in GROUPS if any(e.group == group for e in errors)}
        return DenseEffect(
            format,
            sum(each.bytes for each in groups.values()),
            groups,
            packed.distance(self.exact),
            contract,
            [*_weights_off(errors, format), *_contract_broken(contract, format)],
        )

    def _load(self, format: str) -> Any:
        settings = replace(self.settings, dense_format=format, dense_placement="gpu")
        return load_model(self.directory, settings, None, self.dtype)

    def _adapted(self, model: Any) -> Any:
        if self.adapter is None:
            return model
        return load_adapter(model, self.adapter).eval().requires_grad_(False)

    def _run(self, model: Any) -> ModelRun:
        return ModelRun.joined([run_model(model, ids) for ids in self.sequences])


def own_dtype(config: Any) -> torch.dtype:
    """The dtype that a checkpoint's config names, or bf16 if it names none that a linear layer computes in."""
    named = config.dtype or config.get_text_config().dtype
    return named if named in (torch.float32, torch.float16) else torch.bfloat16


def unpack(model: nn.Module) -> None:
    """Put ordinary layers with the decoded weights in the place of packed ones."""
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedLinear):
            model.set_submodule(name, module.to_linear())


# --- weights ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _WeightError:
    name: str
    group: str
    bytes: int
    plain_bytes: int
    off: float  # squared norms, of the difference and of the weight
    size: float

    @property
    def relative_rms(self) -> float:
        return _root(self.off, self.size)


class DenseSources:
    """The weights that formats of dense weights are about, as the checkpoint has them. One is read at a time.

    Args:
        dtype: that of the model.

    Raises:
        FileNotFoundError, ValueError: `ktft.model.load_plan.outline` refuses, or no weight can be packed.
    """

    def __init__(self, directory: Path, settings: Settings, dtype: torch.dtype) -> None:
        # A format that packs every weight which any of them does
        plan = outline(directory, replace(settings, dense_format="k4", dense_placement="gpu"))
        blocks = [layer.name.rpartition(".")[0] for layer in plan.layers.values()]
        self._backbone, self._dtype = plan.backbone, dtype
        dense = plan.backbone.dense
        self.groups = {name: group_of(name, blocks) for name in (dense.modules if dense is not None else ())}
        if not self.groups:
            raise ValueError(f"{directory} has no weight outside its routed experts that dense_format is about")

    def errors(self, model: nn.Module) -> list[_WeightError]:
        """Compare the weights of a model, packed or not, with the checkpoint's in the model's dtype."""
        found = []
        with self._backbone.checkpoint:
            for name, group in self.groups.items():
                module, plain = model.get_submodule(name), self._read(name)
                assert isinstance(module, nn.Linear)
                weight, size = module.weight.detach(), plain.nbytes
                if isinstance(module, PackedLinear):
                    weight, size = module.decoded(), module.nbytes
                off = _squares(weight.float() - plain.float())
                found.append(_WeightError(name, group, size, plain.nbytes, off, _squares(plain)))
        return found

    def _read(self, name: str) -> Tensor:
        stored = self._backbone.stored(f"{name}.weight")
        assert stored is not None
        scheme, parts = stored
        tensors = {role: self._backbone.checkpoint.read(entry.name) for role, entry in parts.items()}
        return scheme.decode(tensors).dequantize().to(self._dtype)


def group_of(name: str, blocks: Sequence[str]) -> str:
    """The group of a linear layer's name. `blocks` are the names of the model's MoE blocks.

    Whatever mixes tokens counts as attention, also linear attention and state spaces.
    """
    if layer_of(name) is None:
        return OUTPUT
    if any(name.startswith(f"{block}.") for block in blocks):
        return SHARED
    return DENSE if _FEED_FORWARD.search(name) else ATTENTION


def _grouped(errors: Sequence[_WeightError], group: str) -> GroupError:
    own = [each for each in errors if each.group == group]
    worst = max(own, key=lambda each: each.relative_rms)
    return GroupError(
        len(own),
        sum(each.bytes for each in own),
        sum(each.plain_bytes for each in own),
        _root(sum(each.off for each in own), sum(each.size for each in own)),
        worst.name,
        worst.relative_rms,
    )


def _squares(values: Tensor) -> float:
    return float(values.norm(dtype=torch.float64)) ** 2


def _root(off: float, size: float) -> float:
    return math.sqrt(off / size) if size else (0.0 if off == 0 else math.inf)


# --- problems ---------------------------------------------------------------------------------------------------------


def _weights_off(errors: Sequence[_WeightError], format: str) -> list[Problem]:
    """The weights whose error is over the format's limit, the worst first."""
    limit = FORMAT_TRAITS[format].error_limit
    found = [
        Problem("dense weights", f"{each.name} in {format}", each.relative_rms, limit, layer_of(each.name))
        for each in errors
        if not each.relative_rms <= limit
    ]
    return sorted(found, key=lambda problem: -problem.error)


def _contract_broken(contract: Distance, format: str) -> list[Problem]:
    quantities = {"logits": contract.logits, "gradient of the embeddings": contract.gradient}
    return [
        Problem("dense contract", f"{name} with weights in {format} against the decoded ones", error, CONTRACT_LIMIT)
        for name, error in quantities.items()
        if not error <= CONTRACT_LIMIT
    ]

"""Where checkpoints hold routed experts: the names, stacks and order of their tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from ktft.config import PROJECTIONS


@dataclass(frozen=True)
class ExpertSource:
    """Where a checkpoint holds one projection of one expert.

    Attributes:
        stem: the tensor's name without the suffix of a quantization scheme: the plain tensor of one expert is called
            `stem.weight`, a stacked one `stem`.
        expert: index into the first dimension of a stacked tensor; None if every expert has its own tensor.
        rows: the rows of the `[out_features, in_features]` matrix that are this projection, if gate and up share one.
        bias: what the name of a stacked bias has after the stem.
        transposed: whether it is stored as `[in_features, out_features]`; None: it is if it does not fit untransposed.
    """

    stem: str
    expert: int | None = None
    rows: slice = field(default_factory=lambda: slice(None))
    transposed: bool | None = False
    bias: str = "_bias"

    @property
    def tensor(self) -> str:
        """The name of the plain weight."""
        return self.stem if self.expert is not None else f"{self.stem}.weight"

    @property
    def bias_tensor(self) -> str:
        """The name of the bias, a vector that is stacked like the weight; `rows` of it are this projection's."""
        return f"{self.stem}{self.bias}" if self.expert is not None else f"{self.stem}.bias"

    def is_transposed(self, stored: tuple[int, ...], shape: tuple[int, int]) -> bool:
        """Whether a matrix stored with this shape must be transposed to get `shape`.

        Raises:
            ValueError: the matrix fits neither way, or not the way that the layout says.
        """
        transposed = stored != shape if self.transposed is None else self.transposed
        expected = shape[::-1] if transposed else shape
        if stored != expected:
            raise ValueError(f"has matrices {list(stored)}, the model's config needs {list(expected)}")
        return transposed

    def take(self, tensor: Any, shape: tuple[int, int]) -> Any:
        """The projection `[out_features, in_features]`, a view into a plain tensor.

        Args:
            tensor: the tensor that the property `tensor` names.
            shape: the shape of the matrix that holds the projection, from `Layout.matrix_shape`.
        """
        matrix = tensor if self.expert is None else tensor[self.expert]
        return (matrix.T if self.is_transposed(tuple(matrix.shape), shape) else matrix)[self.rows]

    def take_bias(self, tensor: Any) -> Any:
        """The bias `[out_features]`, a view into the tensor that `bias_tensor` names."""
        return (tensor if self.expert is None else tensor[self.expert])[self.rows]


@dataclass(frozen=True)
class Layout:
    """How checkpoints name a family's expert tensors, and how gate and up are arranged in them.

    Attributes:
        stem: as `ExpertSource.stem`, with the fields {layer}, {projection} and, if every expert has its own tensors,
            {expert}.
        names: the names of gate, up and down in the stem. Gate and up have the same name if they share a matrix. That
            of a gate that experts lack is not used.
        interleaved: a shared matrix has gate in its even rows and up in its odd rows; otherwise gate is the first half.
        transposed, bias: as those of `ExpertSource`.
    """

    stem: str
    names: tuple[str, str, str] = PROJECTIONS
    interleaved: bool = False
    transposed: bool | None = False
    bias: str = "_bias"

    @property
    def stacked(self) -> bool:
        """Whether one tensor holds all experts of a layer."""
        return "{expert}" not in self.stem

    def source(self, layer: int, expert: int, projection: str, intermediate_size: int) -> ExpertSource:
        """Where the checkpoint holds one expert's projection."""
        gate, up, _ = self.names
        rows = slice(None)
        if gate == up and projection != "down_proj":
            number = PROJECTIONS.index(projection)
            halves = slice(number * intermediate_size, (number + 1) * intermediate_size)
            rows = slice(number, None, 2) if self.interleaved else halves
        name = self.names[PROJECTIONS.index(projection)]
        stem = self.stem.format(layer=layer, expert=expert, projection=name)
        return ExpertSource(stem, expert if self.stacked else None, rows, self.transposed, self.bias)

    def matrix_shape(self, projection: str, hidden_size: int, intermediate_size: int) -> tuple[int, int]:
        """The shape `[out_features, in_features]` of the matrix that holds a projection, alone or with another one."""
        if projection == "down_proj":
            return hidden_size, intermediate_size
        return intermediate_size * (2 if self.names[0] == self.names[1] else 1), hidden_size

    def family_pattern(self) -> str:
        """A regular expression for the start of a routed expert's name, in this layout or with other projections; where
        no module `experts` is in the names, in this layout alone.

        Some checkpoints have a bias of the router's scores (`e_score_correction_bias`) in that module.
        """
        start, experts, _ = self.stem.partition("experts.")
        if not experts:
            return self.pattern().pattern
        return re.escape(f"{start}{experts}").replace(r"\{layer\}", r"\d+") + "(?!e_score)"

    def pattern(self) -> re.Pattern[str]:
        """Matches the start of the name of any tensor of a routed expert in this layout, its bias and scales too."""
        start = self.stem.format(layer="\0", expert="\1", projection="\2")
        names = "|".join(map(re.escape, dict.fromkeys(self.names)))
        pattern = re.escape(start).replace("\0", r"\d+").replace("\1", r"\d+").replace("\2", f"(?:{names})")
        return re.compile(pattern + r"(?![A-Za-z0-9])")


SEPARATE = Layout("model.layers.{layer}.mlp.experts.{expert}.{projection}")
MIXTRAL = Layout("model.layers.{layer}.block_sparse_moe.experts.{expert}.{projection}", names=("w1", "w3", "w2"))
STACKED = Layout("model.layers.{layer}.mlp.experts.{projection}", names=("gate_up_proj", "gate_up_proj", "down_proj"))

DEEPSEEK_V4 = replace(MIXTRAL, stem="layers.{layer}.ffn.experts.{expert}.{projection}")
NEMOTRON = Layout("backbone.layers.{layer}.mixer.experts.{expert}.{projection}")
STEP = Layout("model.layers.{layer}.moe.{projection}.weight")


LLAMA = replace(SEPARATE, stem=SEPARATE.stem.replace("mlp.", "feed_forward."))
LLAMA_STACKED = replace(STACKED, stem=STACKED.stem.replace("mlp.", "feed_forward."), transposed=True)
GEMMA = replace(STACKED, stem=STACKED.stem.replace("mlp.", ""))


def in_language_model(layout: Layout) -> Layout:
    """The layout of the text model within a vision-language model."""
    return replace(layout, stem=layout.stem.replace("model.", "model.language_model.", 1))


def beside_vision(layout: Layout, layers: str = "layers") -> Layout:
    """The layout of a text model that lies beside the vision model instead of within one model."""
    return replace(layout, stem=layout.stem.replace("model.layers.", f"language_model.model.{layers}.", 1))

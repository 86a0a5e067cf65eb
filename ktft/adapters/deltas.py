"""What an adapter adds to a model's weights: compared with the model as a whole, then read one matrix at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft.utils.constants import SAFETENSORS_WEIGHTS_NAME
from peft.utils.other import get_pattern_key
from torch import Tensor, nn

from ktft.adapters.lora import KINDS, Rank
from ktft.adapters.peft import planned_reach
from ktft.adapters.saved import SavedAdapter
from ktft.checkpoint.reader import CheckpointReader

PREFIX = "base_model.model."
INITS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base weights as they are."""

REFUSED = {
    "bias": ("none", "biases trained beside LoRA"),
    "trainable_token_indices": (None, "trainable tokens"),
    "layer_replication": (None, "layer replication"),
    "alora_invocation_tokens": (None, "activated LoRA"),
}
"""Option -> the value that can be merged, and what people call the others."""


@dataclass(frozen=True)
class LoraDelta:
    """scaling x B A, of one matrix `[out_features, in_features]`."""

    a: Tensor
    b: Tensor
    scaling: float

    def matrix(self, base: Tensor) -> Tensor:
        """fp32; `base`, the weight that it is added to, does not matter."""
        return self.scaling * (self.b @ self.a)

    def inputs(self) -> Tensor | None:
        """`[in_features, r]`: an orthonormal basis of the inputs that the adapter reacts to."""
        return torch.linalg.qr(self.a.T).Q


@dataclass(frozen=True)
class Replacement:
    """A tensor that the adapter holds whole (`modules_to_save`)."""

    tensor: Tensor

    def matrix(self, base: Tensor) -> Tensor:
        """What turns `base` into it."""
        return self.tensor - base

    def inputs(self) -> Tensor | None:
        """All of them."""
        return None


Delta = LoraDelta | Replacement


class AdapterDeltas:
    """A saved adapter, every tensor of which has its place in a model.

    Args:
        saved: the adapter.
        model: on meta, with `KtftExperts`.

    Attributes:
        linears: module name -> rank, of the linear layers that have LoRA.
        experts: the same of routed experts: module name -> projection -> rank.
        replaced: names of the model's tensors that the adapter holds whole.

    Raises:
        ValueError: a tensor is missing, left over or misshapen; the file is damaged; or an option that cannot be
            merged.
    """

    def __init__(self, saved: SavedAdapter, model: Any) -> None:
        self.config = config = saved.config
        self.file = saved.directory / SAFETENSORS_WEIGHTS_NAME
        self._check_options()
        self.reader = CheckpointReader([self.file])
        reach = planned_reach(model, config, saved=True)
        self.experts = reach.ranks
        self.linears = {name: _rank_of(config, name) for name in sorted(reach.modules - reach.ranks.keys())}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, rank in self.linears.items():
            module = model.get_submodule(name)
            if not isinstance(module, nn.Linear):
                raise ValueError(
                    f"{self.file}: {name} is {type(module).__name__}; LoRA is merged on linear layers only"
                )
            shapes |= _pair_shapes(name, rank, module.in_features, module.out_features)
        for name, ranks in self.experts.items():
            layer = model.get_submodule(name)
            for projection, rank in ranks.items():
                dims = (layer.hidden_size, layer.intermediate_size)
                for expert in range(layer.num_experts):
                    place = f"{name}.{expert}.{projection}"
                    shapes |= _pair_shapes(place, rank, *(dims[::-1] if projection == "down_proj" else dims))
        replaced = dict(_saved_modules(model, config.modules_to_save or ()))
        self.replaced = set(replaced)
        self._check_tied(model)
        self._check_tensors(shapes | {PREFIX + name: shape for name, shape in replaced.items()})

    def _check_options(self) -> None:
        where = self.file.with_name("adapter_config.json")
        for option, (accepted, what) in REFUSED.items():
            if getattr(self.config, option, accepted) != accepted:
                raise ValueError(f"{where}: {what} ({option}) cannot be merged by ktft")
        if self.config.init_lora_weights not in INITS:
            raise ValueError(
                f"{where}: init_lora_weights={self.config.init_lora_weights!r} changed the base weights before "
                "training, so the adapter does not belong on BASE; save it with PEFT's "
                "path_initial_model_for_weight_conversion first"
            )

    def _check_tied(self, model: Any) -> None:
        tied = model.all_tied_weights_keys
        for name in (*self.replaced, *(f"{linear}.weight" for linear in self.linears)):
            if name in tied or name in tied.values():
                raise ValueError(
                    f"{self.file} changes {name}, which is tied to another weight (tie_word_embeddings); untie them in "
                    "BASE first"
                )

    def _check_tensors(self, expected: dict[str, tuple[int, ...]]) -> None:
        found = self.reader.tensors
        problems = [
            f"{len(names)} tensors {what}, the first is {names[0]}"
            for what, names in (
                ("of the model are missing", sorted(expected.keys() - found.keys())),
                ("are left over", sorted(found.keys() - expected.keys())),
            )
            if names
        ]
        problems += [
            f"{name} has shape {entry.shape} in the adapter, the model needs {expected[name]}"
            for name, entry in sorted(found.items())
            if expected.get(name, entry.shape) != entry.shape
        ][:1]
        if problems:
            raise ValueError(f"{self.file} does not fit the model, it may be of another: {'; '.join(problems)}")

    @property
    def nbytes(self) -> int:
        """Bytes that `check_values` reads."""
        return sum(entry.nbytes for entry in self.reader.tensors.values())

    def check_values(self) -> Iterator[int]:
        """Read the adapter once. Yields bytes.

        Raises:
            ValueError: NaN or Inf; the message names the tensor.
        """
        for name, entry in self.reader.tensors.items():
            self._read(name)
            yield entry.nbytes

    def lora(self, name: str, rank: Rank) -> LoraDelta:
        """The pair of a linear layer, or of one expert's projection (`<experts>.<number>.<projection>`)."""
        a, b = (self._read(f"{PREFIX}{name}.{kind}.weight") for kind in KINDS)
        return LoraDelta(a, b, rank.scaling(self.config.use_rslora))

    def replacement(self, name: str) -> Replacement:
        """What stands in place of the model's tensor `name`."""
        return Replacement(self._read(PREFIX + name))

    def _read(self, name: str) -> Tensor:
        tensor = self.reader.read(name).float()
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{self.file}: {name} holds NaN or Inf")
        return tensor


def _rank_of(config: Any, name: str) -> Rank:
    def by_pattern(patterns: dict[str, Any], default: Any) -> Any:
        return patterns.get(get_pattern_key(list(patterns), name), default) if patterns else default

    return Rank(by_pattern(config.rank_pattern, config.r), by_pattern(config.alpha_pattern, config.lora_alpha))


def _pair_shapes(name: str, rank: Rank, fan_in: int, fan_out: int) -> dict[str, tuple[int, ...]]:
    shapes = ((rank.r, fan_in), (fan_out, rank.r))
    return {f"{PREFIX}{name}.{kind}.weight": shape for kind, shape in zip(KINDS, shapes, strict=True)}


def _saved_modules(model: nn.Module, names: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor in modules that PEFT's `modules_to_save` matches, by the end of their names."""
    for path, module in model.named_modules():
        if path and any(path.endswith(name) for name in names):
            for tensor, value in module.state_dict().items():
                yield f"{path}.{tensor}", tuple(value.shape)

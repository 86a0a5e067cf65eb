"""A saved adapter's LoRA on routed experts, one layer at a time and without the model."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

import torch
from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists
from peft.utils.constants import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from torch import Tensor

from ktft.adapters.lora import UNSUPPORTED, Rank
from ktft.adapters.peft import expert_ranks, local_directory, read_config
from ktft.config import PROJECTIONS
from ktft.lora import ExpertLora, LoraPair
from ktft.native import ExpertLayer

_EXPERT_TENSOR = re.compile(rf"base_model\.model\.(.+)\.\d+\.(?:{'|'.join(PROJECTIONS)})\.lora_[AB]\.weight")


class SavedAdapter:
    """An adapter directory as `save_pretrained` writes it.

    Args:
        directory: a path, or a repository of the Hugging Face Hub.

    Raises:
        ValueError: not an adapter, not LoRA, or an option that experts do not have.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(local_directory(directory))
        self.config = read_config(self.directory)
        for option, what in UNSUPPORTED.items():
            if getattr(self.config, option, None):
                raise ValueError(f"{self.directory}: {what} on routed experts is not supported by ktft")

    def check_layers(self, names: Collection[str]) -> None:
        """Compare with the model whose layers' experts have these names.

        Raises:
            ValueError: the adapter has LoRA on other experts.
        """
        file = self.directory / SAFETENSORS_WEIGHTS_NAME
        with safe_open(file, framework="pt", device="cpu") as tensors:
            found = [_EXPERT_TENSOR.fullmatch(name) for name in tensors.keys()]  # noqa: SIM118
        for match in found:
            if match is not None and match[1] not in names:
                raise ValueError(f"{file} holds {match[0]}, which the model has no place for: it is of another model")

    def lora(self, layer: ExpertLayer) -> ExpertLora | None:
        """The LoRA on this layer's experts, which are called `layer.name` in the model. None if it has none.

        Raises:
            ValueError: a tensor is missing, or has a wrong shape.
        """
        match = check_target_module_exists(self.config, layer.name)
        if isinstance(match, _ExcludedModule):
            return None
        ranks = expert_ranks(self.config, layer.name, layer, bool(match))
        pairs = {name: self._pair(layer, name, rank) for name, rank in ranks.items()}
        return ExpertLora(pairs) if pairs else None

    def _pair(self, layer: ExpertLayer, projection: str, rank: Rank) -> LoraPair:
        wide, narrow = layer.hidden_size, layer.intermediate_size
        fan_in, fan_out = (narrow, wide) if projection == "down_proj" else (wide, narrow)
        a = self._stack(layer, f"{projection}.lora_A.weight", (rank.r, fan_in))
        b = self._stack(layer, f"{projection}.lora_B.weight", (fan_out, rank.r))
        return LoraPair(a, b, rank.scaling(self.config.use_rslora))

    def _stack(self, layer: ExpertLayer, tensor: str, shape: tuple[int, int]) -> Tensor:
        stacked = torch.empty(layer.num_experts, *shape)
        file = self.directory / SAFETENSORS_WEIGHTS_NAME
        with safe_open(file, framework="pt", device="cpu") as tensors:
            held = set(tensors.keys())
            for expert, out in enumerate(stacked):
                name = f"base_model.model.{layer.name}.{expert}.{tensor}"
                if name not in held:
                    raise ValueError(f"{file} lacks {name}: the adapter is of another model")
                found = tensors.get_tensor(name)
                if tuple(found.shape) != shape:
                    raise ValueError(f"{file}: {name} has shape {tuple(found.shape)}, the model needs {shape}")
                if not found.isfinite().all():
                    raise ValueError(f"{file}: {name} holds NaN or Inf")
                out.copy_(found)
        return stacked

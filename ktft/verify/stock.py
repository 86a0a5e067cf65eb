"""transformers' own experts modules, filled with given weights: the reference for a whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig

from ktft.checkpoint.encoded import Encoded
from ktft.checkpoint.families import Family
from ktft.config import PROJECTIONS
from ktft.lora import ExpertLora
from ktft.model.experts import expert_modules
from ktft.model.meta import meta_model
from ktft.native import ExpertLayer


class StockExperts:
    """One layer's stacked experts in fp32, taking weights as `ExpertLayer` does.

    Args:
        module: transformers' experts module, on meta.
        lora: the adapter that `merge` merges into the weights.
    """

    format = "fp32"

    def __init__(self, module: nn.Module, layer: ExpertLayer, lora: ExpertLora | None) -> None:
        self.module = module.to_empty(device="cpu").float().requires_grad_(False).eval()
        self.layer, self.lora = layer, lora

    def _pick(self, stem: str, projection: str) -> Tensor:
        """One projection's part of a stacked tensor, with out_features before any in_features."""
        stacked: Tensor = self.module.get_parameter(
            ("down_proj" if projection == "down_proj" else "gate_up_proj") + stem
        )
        transposed = bool(getattr(self.module, "is_transposed", False))
        if transposed and stacked.dim() == 3:
            stacked = stacked.mT
        if projection == "down_proj":
            return stacked
        number = PROJECTIONS.index(projection)
        return stacked[:, number::2] if transposed else stacked.chunk(2, dim=1)[number]

    def load(self, expert: int, projection: str, weight: Tensor, scales: Tensor | None = None, **more: Any) -> bool:
        """Copy one weight. The arguments are those of `ExpertLayer.load`."""
        self._pick("", projection)[expert].copy_(Encoded(weight, scales, **more).dequantize())
        return True

    def load_bias(self, expert: int, projection: str, bias: Tensor) -> None:
        """Copy one bias."""
        self._pick("_bias", projection)[expert].copy_(bias)

    def missing(self) -> list[tuple[int, str]]:
        """Always empty, because the plan that fills the layer has counted its weights."""
        return []

    def load_packed(self) -> None:
        """Copy the dequantized weights and the biases of the packed layer."""
        for expert in range(self.layer.num_experts):
            for projection in PROJECTIONS:
                self.load(expert, projection, self.layer.dequantize(expert, projection))
                if self.layer.biases:
                    self.load_bias(expert, projection, self.layer.bias(expert, projection))

    def merge(self) -> None:
        """Add the adapter to the weights."""
        for projection, pair in self.lora.pairs.items() if self.lora is not None else ():
            for expert, weight in enumerate(self._pick("", projection)):
                weight += pair.scaling * pair.b[expert].detach().float() @ pair.a[expert].detach().float()


def stock_modules(directory: Path, family: Family) -> dict[str, nn.Module]:
    """Name -> experts module of transformers' own model, on meta."""
    model = meta_model(AutoConfig.from_pretrained(directory))
    return {name: model.get_submodule(name) for _, name, _ in expert_modules(model, family)}

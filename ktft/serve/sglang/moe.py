"""SGLang's quantization method `ktft`, which says what computes each layer, and its method for routed experts.

The latter has no parameters, since ktft computes the experts.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase, QuantizationConfig
from torch import nn

from ktft.serve.runtime.served_model import current
from ktft.serve.sglang.lora_linear import SglangLinearMethod


class SglangMoEMethod(FusedMoEMethodBase):
    """Computes SGLang's `FusedMoE` with the process's `ServedModel`, which `SglangModelLoader` makes.

    Raises:
        ValueError: the layer asks for something that the kernels do not compute.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.number, config = layer.layer_id, layer.moe_runner_config
        for what, asked in (
            ("routing weights on the experts' input", config.apply_router_weight_on_input),
            ("tensor parallelism", layer.moe_tp_size > 1),
            ("expert parallelism", layer.moe_ep_size > 1),
            ("shared experts among the routed ones", (config.num_fused_shared_experts or 0) > 0),
            ("experts' outputs that are not summed", config.no_combine),
            ("experts without a gate", not config.is_gated),
            ("a factor on the routed experts' sum", (config.routed_scaling_factor or 1.0) != 1.0),
            (f"the activation {config.activation!r}", config.activation != "silu"),
        ):
            if asked:
                raise ValueError(f"{layer.layer_name}: SGLang asks for {what}, which ktft's experts do not do")

    def create_weights(self, layer: nn.Module, *_: Any, **__: Any) -> None:
        """It creates none: the experts' weights are not torch tensors."""

    def create_moe_runner(self, layer: nn.Module, moe_runner_config: Any) -> None:
        """There is none: it is for SGLang's own kernels."""

    def apply(self, layer: nn.Module, dispatch_output: StandardDispatchOutput) -> StandardCombineInput:
        """The weighted sum of the routed experts, `[T, H]`. SGLang computes shared experts."""
        hidden, chosen = dispatch_output.hidden_states, dispatch_output.topk_output
        experts = current().layers[self.number]
        return StandardCombineInput(experts(hidden, chosen.topk_ids, chosen.topk_weights))


class SglangQuantization(QuantizationConfig):
    """ktft's kernels compute routed experts; SGLang computes everything else in the model's dtype."""

    def get_name(self) -> str:
        """The value of `--quantization`."""
        return "ktft"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """The dtypes that hidden states may have."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """The lowest compute capability of a GPU; 0 stands for any."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """There are none: the settings come in the environment, see `ktft.serve.runtime.settings`."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SglangQuantization:
        """The method. It ignores the checkpoint's own quantization, which the loader decodes."""
        return cls()

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: dict[str, Any], user_quant: str | None) -> str | None:
        """SGLang asks whether another method may serve a checkpoint with this quantization; ktft may."""
        return "ktft" if user_quant == "ktft" else None

    def get_scaled_act_names(self) -> list[str]:
        """Activations whose outputs are scaled: none."""
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """The method of a layer; None leaves the layer to SGLang."""
        if isinstance(layer, FusedMoE):
            return SglangMoEMethod(layer)
        return SglangLinearMethod() if isinstance(layer, LinearBase) else None

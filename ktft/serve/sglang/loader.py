"""SGLang's model loader `ktft`. Weights around the experts go to SGLang's model, the experts go to ktft's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.runtime_context import get_server_args
from torch import Tensor, nn

from ktft.checkpoint.load import refuse
from ktft.device import ACCELERATORS
from ktft.serve.runtime.agreement import RoutedSizes, check_agreement
from ktft.serve.runtime.hybrid_experts import HybridModel
from ktft.serve.runtime.progress import READY, Progress, StatusFile
from ktft.serve.runtime.served_model import serve
from ktft.serve.runtime.served_weights import ServedWeights
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.runtime.torch_defaults import with_torch_defaults
from ktft.serve.sglang.lora_linear import add_slots
from ktft.serve.sglang.lora_manager import add
from ktft.serve.sglang.moe import SglangMoEMethod


class SglangModelLoader(DefaultModelLoader):
    """It reads each weight once. Routed experts never become torch parameters."""

    def download_model(self, model_config: Any) -> None:
        """Downloads nothing: a checkpoint is a directory here."""

    def load_model(self, *, model_config: Any, device_config: Any) -> nn.Module:
        """Make SGLang's model, load everything, and make the experts the process's `current` model.

        Raises:
            ValueError: the checkpoint does not belong to SGLang's model, or a file is damaged.
        """
        self._settings = ServeSettings.from_env()
        self._status = StatusFile(self._settings.status_path)
        try:
            model = self._load(model_config, device_config)
        except Exception as error:
            self._status.write(Progress("failed", error=str(error)))
            raise
        self._status.write(Progress(READY))
        return model

    def _load(self, model_config: Any, device_config: Any) -> nn.Module:
        settings, status = self._settings, self._status
        status.write(Progress("Reading the checkpoint's headers"))
        self._weights = ServedWeights(settings)
        model = super().load_model(model_config=model_config, device_config=device_config)
        refuse(f"SGLang's {type(model).__name__} got no weights for", _marked(model))
        served = self._weights.load_experts(status.advance)
        device = torch.device(device_config.device)
        if device.type in ACCELERATORS:
            status.write(Progress("Taking GPU memory for experts"))
            served = self._beside(device, model, model_config.dtype)
        serve(served)
        if settings.adapter_slots:
            add_slots(model, settings, served.step)
        for number, (name, path) in enumerate(settings.adapters, start=1):
            status.write(Progress(f"Loading the adapter {name}"))
            add(model, number, path)
        return model

    def _beside(self, device: torch.device, model: nn.Module, dtype: torch.dtype) -> HybridModel:
        """The experts where hidden states are on a GPU."""
        top_k = next(module.top_k for module in model.modules() if isinstance(module, FusedMoE))
        arguments = get_server_args()
        longest = (arguments.max_prefill_tokens, arguments.chunked_prefill_size, arguments.context_length)
        tokens = max(each or 0 for each in longest)
        made = HybridModel.of(self._settings, self._weights.layers, device, top_k, dtype, tokens)
        made.warm_up()
        return made

    def _get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """The weights that SGLang puts into its model, which it has made by now: those around the experts."""
        _check_experts(model, self._weights)
        self._status.write(Progress("Loading the weights around the experts"))
        _mark(model)
        return with_torch_defaults(self._weights.dense(model_config.dtype))


def _mark(model: nn.Module) -> None:
    """Fill all parameters with NaN, which no weight holds: what is NaN after loading got no weight.

    SGLang's models skip a weight for which they have no place, and do not tell which places they have filled.
    """
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))


def _marked(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if bool(parameter.isnan().any())]


def _check_experts(model: nn.Module, weights: ServedWeights) -> None:
    """Raise ValueError if SGLang's and transformers' models differ in layers, sizes or activation of routed experts."""
    found = {}
    for module in model.modules():
        if isinstance(module, FusedMoE):
            assert isinstance(module.quant_method, SglangMoEMethod)
            found[module.quant_method.number] = RoutedSizes(
                module.num_experts,
                module.hidden_size,
                module.intermediate_size_per_partition,
                module.with_bias,
                module.moe_runner_config.swiglu_limit or module.moe_runner_config.gemm1_clamp_limit,
            )
    check_agreement("SGLang", type(model).__name__, found, weights.layers)

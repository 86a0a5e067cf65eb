"""vLLM's model loader `ktft`. Weights around the experts go to vLLM's model, the experts go to ktft's kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn
from vllm.config import CompilationMode, ModelConfig, get_current_vllm_config
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from ktft.checkpoint.load import refuse
from ktft.device import ACCELERATORS
from ktft.native import ExpertLayer
from ktft.serve.runtime.agreement import RoutedSizes, check_agreement
from ktft.serve.runtime.hybrid_experts import HybridModel
from ktft.serve.runtime.progress import READY, Progress, StatusFile
from ktft.serve.runtime.served_model import serve
from ktft.serve.runtime.served_weights import ServedWeights
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.runtime.torch_defaults import torch_defaults, with_torch_defaults
from ktft.serve.vllm.command import GPU_WORKER
from ktft.serve.vllm.dense_linear import forget, pack_linears
from ktft.serve.vllm.lora_linear import add_slots
from ktft.serve.vllm.moe import ACTIVATIONS, KtftMoEMethod
from ktft.serve.vllm.worker import add


class KtftModelLoader(BaseModelLoader):
    """It reads each weight once. Routed experts never become torch parameters.

    vLLM loads the model, then, if tokens are drafted, a second one of the prediction layers, by a loader of its own.
    """

    _drafts: ClassVar[ServedWeights | None] = None
    """What of a model is left to load for its prediction layers."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Downloads nothing: a checkpoint is a directory here."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Load everything, and make the experts the process's `ktft.serve.runtime.served_model.current`.

        Raises:
            ValueError: the checkpoint does not belong to vLLM's model, or a file is damaged.
        """
        settings = ServeSettings.from_env()
        status = StatusFile(settings.status_path)
        try:
            if model_config.runner_type == "draft":
                self._load_prediction(model, model_config, settings, status)
            else:
                self._load(model, model_config, settings, status)
        except Exception as error:
            status.write(Progress("failed", error=str(error)))
            raise
        status.write(Progress(READY))

    def _load(self, model: nn.Module, model_config: ModelConfig, settings: ServeSettings, status: StatusFile) -> None:
        device = torch.empty(0, device=get_current_vllm_config().device_config.device).device
        if device.type in ACCELERATORS:
            _check_worker()
        status.write(Progress("Reading the checkpoint's headers"))
        with torch_defaults():
            weights = ServedWeights(settings)
        _check_experts(model, {n: each for n, each in weights.layers.items() if n not in weights.prediction})
        status.write(Progress("Loading the weights around the experts"))
        _load_dense(model, weights.dense(model_config.dtype))
        with torch_defaults():
            if settings.dense_format is not None:
                status.write(Progress(f"Packing the weights around the experts in {settings.dense_format}"))
                forget()
                pack_linears(model, weights.runtime, settings.dense_format, device, settings.activation_bits)
            served = weights.load_experts(status.advance)
            if device.type in ACCELERATORS:
                status.write(Progress("Taking GPU memory for experts"))
                first = next(module for module in model.modules() if isinstance(module, RoutedExperts))
                top_k = first.moe_config.experts_per_token
                tokens = get_current_vllm_config().scheduler_config.max_num_batched_tokens
                served = HybridModel.of(settings, weights.layers, device, top_k, model_config.dtype, tokens)
                served.warm_up()
            serve(served)
            if weights.prediction:
                KtftModelLoader._drafts = weights
            if settings.adapter_slots:
                add_slots(model, get_current_vllm_config(), settings, served.step)
            if device.type == "cpu" and get_current_vllm_config().compilation_config.mode == CompilationMode.NONE:
                from ktft.serve.vllm.short_paths import shorten  # vLLM 0.24, for GPUs, has other layers

                shorten(model)
            for number, (name, path) in enumerate(settings.adapters, start=1):
                status.write(Progress(f"Loading the adapter {name}"))
                add(model, number, path)

    def _load_prediction(
        self, model: nn.Module, model_config: ModelConfig, settings: ServeSettings, status: StatusFile
    ) -> None:
        """Load what lies around the experts of prediction layers. These were loaded with all others."""
        weights, KtftModelLoader._drafts = self._drafts, None
        if weights is None:
            raise ValueError(
                "vLLM loads a model that drafts tokens, and ktft none of its experts; give --speculative-tokens"
            )
        _check_experts(model, {number: weights.layers[number] for number in weights.prediction})
        status.write(Progress("Loading the layer that drafts tokens"))
        _load_dense(model, weights.dense_of_prediction(model_config.dtype))
        if settings.dense_format is not None:
            with torch_defaults():
                cpu = torch.device("cpu")
                pack_linears(model, weights.runtime, settings.dense_format, cpu, settings.activation_bits)


def _load_dense(model: nn.Module, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Give a model of vLLM its weights around the experts. Raises ValueError if it has other ones."""
    try:
        loaded = model.load_weights(with_torch_defaults(weights))  # type: ignore[operator]
    except KeyError as error:
        raise ValueError(
            f"vLLM's {type(model).__name__} has no place for the weight {error} of transformers' model: the two "
            "read config.json differently"
        ) from error
    lacking = dict(model.named_parameters()).keys() - (loaded or set())
    refuse(f"vLLM's {type(model).__name__} got no weights for", lacking)


def _check_worker() -> None:
    """Raise ValueError if nothing would raise what experts meet in a CUDA graph."""
    worker = get_current_vllm_config().parallel_config.worker_cls
    if worker != GPU_WORKER:
        raise ValueError(
            f"vLLM's worker_cls is {worker!r}, which would serve on after an error in ktft's experts; start vLLM by "
            f"`ktft serve`, or with worker_cls={GPU_WORKER!r}"
        )


def _check_experts(model: nn.Module, layers: Mapping[int, ExpertLayer]) -> None:
    """Raise ValueError if vLLM's and transformers' models differ in layers, sizes or activation of routed experts."""
    found = {}
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            assert isinstance(module.quant_method, KtftMoEMethod)
            found[module.quant_method.number] = RoutedSizes(
                module.global_num_experts,
                module.hidden_size,
                module.intermediate_size_per_partition,
                module.moe_config.has_bias,
                module.swiglu_limit or ACTIVATIONS.get(module.activation.value),
            )
    check_agreement("vLLM", type(model).__name__, found, layers)

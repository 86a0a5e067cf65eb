"""Linear layers of vLLM whose weights ktft holds packed and multiplies.

vLLM makes and loads its model with its own methods. `pack_linears` then packs each weight that may be packed. The
packed weights are those of training with the same `dense_format`, also where vLLM fuses layers: each row has its own
scales. For a GPU vLLM loads them into host memory (`LinearOnHost`, `EmbeddingOnHost`), so that the GPU never holds them
plain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.utils.torch_utils import direct_register_custom_op, get_accelerator_view_from_cpu_tensor

from ktft.dense.formats import PLAIN, may_pack, stays
from ktft.hosts.vllm import QUANT_METHOD
from ktft.native.dense import ROWS, HostDense, pack_dense
from ktft.native.machine import Runtime
from ktft.serve.runtime.packed_weight import PackedWeight
from ktft.serve.vllm.lora_linear import SHORTCUTS, absorbed, linear_layers, refusal


class _CpuWeight(HostDense):
    """A weight whose inputs and outputs have the model's dtype."""

    def product(self, x: Tensor, biased: bool = True) -> Tensor:
        """Inputs are rounded to bf16, sums are fp32, and rounded once."""
        if x.dtype == torch.bfloat16:
            return super().product(x, biased)
        return super().product(x.to(torch.bfloat16), biased).to(x.dtype)


_weights: list[_CpuWeight | PackedWeight] = []
"""Those of the process. An operator takes numbers and tensors only, so it takes a weight's place here."""


def _product(x: Tensor, place: int, biased: bool) -> Tensor:
    return _weights[place].product(x, biased)


def _like(x: Tensor, place: int, biased: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], _weights[place].shape[0])


# It is an operator so that torch.compile, to which vLLM's CPU backend gives its MoE code, does not trace the kernels
direct_register_custom_op(op_name="ktft_dense_product", op_func=_product, fake_impl=_like)


class KtftDenseMethod(UnquantizedLinearMethod):
    """The product of a layer whose weight is packed.

    Args:
        layer: a loaded layer, whose own weight goes unless it is `shared` with another layer.
        device: of the products.
        activation_bits: of products on the CPU, see `HostDense`.
    """

    def __init__(
        self,
        layer: Any,
        runtime: Runtime,
        format: str,
        device: torch.device,
        activation_bits: int = 16,
        shared: bool = False,
    ) -> None:
        super().__init__()
        weight, bias = layer.weight.data, None if layer.bias is None else layer.bias.data.float()
        self._place = len(_weights)
        if _on_cpu(device):
            packed = pack_dense(runtime, format, weight)
            _weights.append(_CpuWeight(runtime, format, packed, tuple(weight.shape), bias, activation_bits))
        else:
            _weights.append(PackedWeight.of(runtime, format, weight, bias, device))
        if not shared:
            layer.weight = nn.Parameter(weight.new_empty(0, device=device), requires_grad=False)

    @property
    def weight(self) -> _CpuWeight | PackedWeight:
        """The packed weight."""
        return _weights[self._place]

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing is left to do: the weight is packed."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """From inputs `[..., input_size]` to outputs `[..., output_size]`. The bias is the layer's own, or none."""
        product = torch.ops.vllm.ktft_dense_product if torch.compiler.is_compiling() else _product
        out: Tensor = product(x, self._place, bias is not None)
        return out

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Rows of a weight that is the table of embeddings too."""
        return nn.functional.embedding(input_, layer.weight)


def forget() -> None:
    """Drop the packed weights of a model that this process served before."""
    _weights.clear()


class _OnHost:
    """Before a method of vLLM: its weight is read into host memory."""

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"):
            super().create_weights(*args, **kwargs)  # type: ignore[misc]


class LinearOnHost(_OnHost, UnquantizedLinearMethod):
    """vLLM's own method for a linear layer, whose weight it reads into host memory."""


class EmbeddingOnHost(_OnHost, UnquantizedEmbeddingMethod):
    """vLLM's own method for a table of embeddings or an output layer, whose weight it reads into host memory."""


PLAIN_METHODS = UnquantizedLinearMethod, UnquantizedEmbeddingMethod, LinearOnHost, EmbeddingOnHost


def pack_linears(
    model: nn.Module, runtime: Runtime, format: str, device: torch.device, activation_bits: int = 16
) -> None:
    """Pack the weights of a loaded model's linear layers and of its output layer, in place.

    Routers keep their values. Layers whose weights something else than their method reads stay as they are. Beside a
    GPU tables of embeddings stay in host memory, from which the GPU reads the rows of a step's tokens.
    """
    on_cpu = _on_cpu(device)
    tables: list[Any] = [each for each in model.modules() if type(each) is VocabParallelEmbedding]
    for layer, own in list(_layers(model, format)):
        if own == PLAIN and not on_cpu:  # vLLM has kernels of its own for it
            continue
        if flag := SHORTCUTS.get(type(layer).__name__):
            setattr(layer, flag, False)
        shared = any(layer.weight is table.weight for table in tables)
        QUANT_METHOD.put(layer, KtftDenseMethod(layer, runtime, own, device, activation_bits, shared))
    if not on_cpu:
        for table in tables:
            table.weight.data = _seen_by_gpu(table.weight.data)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(device)


def _on_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def _seen_by_gpu(table: Tensor) -> Tensor:
    """The same values in locked host memory, as a tensor of the GPU, which reads them over PCIe."""
    return get_accelerator_view_from_cpu_tensor(table.pin_memory())


def _layers(model: nn.Module, format: str) -> Iterator[tuple[Any, str]]:
    """The layers that are packed, each with its format."""
    blocks = {
        name.partition(".experts")[0] + ".": module.global_num_experts
        for name, module in model.named_modules()
        if isinstance(module, RoutedExperts)
    }
    left = absorbed(model)
    for name, layer in linear_layers(model):
        experts = next((count for block, count in blocks.items() if name.startswith(block)), None)
        router = experts is not None and stays(layer.output_size, experts)
        alone = refusal(layer) is None or isinstance(layer, GateLinear)
        if name not in left and alone and _packs(layer):
            yield layer, PLAIN if router else format
    for head in model.modules():
        if isinstance(head, ParallelLMHead) and _packs(head):
            yield head, format


def _packs(layer: Any) -> bool:
    method, weight = type(layer.quant_method), layer.weight
    plain = method in PLAIN_METHODS and weight.dtype == torch.bfloat16
    return plain and weight.dim() == 2 and may_pack(*weight.shape) and weight.shape[0] % ROWS == 0

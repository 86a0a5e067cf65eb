"""Linear layers of vLLM on the CPU whose weights ktft holds packed and multiplies.

vLLM makes and loads its model with its own methods. `pack_linears` then packs each weight that may be packed. The packed
weights are those of training with the same `dense_format`, also where vLLM fuses layers: each row has its own scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.utils.torch_utils import direct_register_custom_op

from ktft.dense.formats import may_pack, stays
from ktft.hosts.vllm import QUANT_METHOD
from ktft.native.dense import ROWS, dense_product, pack_dense
from ktft.native.machine import Runtime
from ktft.serve.vllm.lora_linear import absorbed, linear_layers, refusal


@dataclass(frozen=True)
class _Weight:
    """A packed weight `[rows, cols]` and the layer's fp32 bias, if it has one."""

    runtime: Runtime
    format: str
    bytes: Tensor
    shape: tuple[int, int]
    bias: Tensor | None

    def product(self, x: Tensor) -> Tensor:
        """Inputs are rounded to bf16, sums are fp32, and rounded once."""
        out = dense_product(self.runtime, self.format, self.bytes, self.shape, x.to(torch.bfloat16), self.bias)
        return out.to(x.dtype)


_weights: list[_Weight] = []
"""Those of the process. An operator takes numbers and tensors only, so it takes a weight's place here."""


def _product(x: Tensor, place: int) -> Tensor:
    return _weights[place].product(x)


def _like(x: Tensor, place: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], _weights[place].shape[0])


# It is an operator so that torch.compile, to which vLLM's CPU backend gives its MoE code, does not trace the kernels
direct_register_custom_op(op_name="ktft_dense_product", op_func=_product, fake_impl=_like)


class KtftDenseMethod(UnquantizedLinearMethod):
    """The product of a layer whose weight is packed.

    Args:
        layer: a loaded layer, whose own weight goes unless it is `shared` with another layer.
    """

    def __init__(self, layer: Any, runtime: Runtime, format: str, shared: bool = False) -> None:
        super().__init__()
        weight = layer.weight.data
        bias = None if layer.bias is None else layer.bias.data.float()
        packed = _Weight(runtime, format, pack_dense(runtime, format, weight), tuple(weight.shape), bias)
        self._place = len(_weights)
        _weights.append(packed)
        if not shared:
            layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)

    @property
    def weight(self) -> _Weight:
        """The packed weight."""
        return _weights[self._place]

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing is left to do: the weight is packed."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """From inputs `[..., input_size]` to outputs `[..., output_size]`. The bias is the layer's own, or none."""
        if torch.compiler.is_compiling():
            out: Tensor = torch.ops.vllm.ktft_dense_product(x, self._place)
        else:
            out = _product(x, self._place)
        return out if bias is not None or self.weight.bias is None else out - layer.bias

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Rows of a weight that is the table of embeddings too."""
        return nn.functional.embedding(input_, layer.weight)


def pack_linears(model: nn.Module, runtime: Runtime, format: str) -> None:
    """Pack the weights of a loaded model's linear layers and of its output layer, in place.

    Routers, and the gates of shared experts, stay as they are, and so do layers whose weights something else than
    their method reads.
    """
    _weights.clear()  # of a model that this process served before
    tables = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    for layer in _layers(model):
        QUANT_METHOD.put(layer, KtftDenseMethod(layer, runtime, format, id(layer.weight) in tables))


def _layers(model: nn.Module) -> Iterator[Any]:
    blocks = {
        name.partition(".experts")[0] + ".": module.global_num_experts
        for name, module in model.named_modules()
        if isinstance(module, RoutedExperts)
    }
    left = absorbed(model)
    for name, layer in linear_layers(model):
        experts = next((count for block, count in blocks.items() if name.startswith(block)), None)
        router = experts is not None and stays(layer.output_size, experts)
        if name not in left and not router and refusal(layer) is None and _packs(layer.weight):
            yield layer
    for head in model.modules():
        if isinstance(head, ParallelLMHead) and type(head.quant_method) is UnquantizedEmbeddingMethod:
            if _packs(head.weight):
                yield head


def _packs(weight: Tensor) -> bool:
    return weight.dim() == 2 and may_pack(*weight.shape) and weight.shape[0] % ROWS == 0

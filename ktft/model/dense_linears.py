"""The linear layers outside a model's routed experts whose weights the settings have packed or in host memory."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedModel

from ktft.checkpoint.schemes import PLAIN_SCHEME, Fp8
from ktft.config import Settings
from ktft.dense.formats import PLAIN
from ktft.dense.model import DenseWeights, linears
from ktft.model.backbone import Backbone
from ktft.model.experts import KtftExperts, decoder_lists
from ktft.native import Runtime


def dense_weights(
    model: PreTrainedModel, backbone: Backbone, settings: Settings, experts: Mapping[str, KtftExperts], runtime: Runtime
) -> DenseWeights | None:
    """Replace the linear layers that `dense_format` and `dense_placement` are about; None if they stay as they are.

    These are the ones of the decoder layers, and the output layer unless it shares its weight with the embeddings. A
    weight that transformers computes from several tensors of the checkpoint stays too, and with `fp8` a weight that a
    checkpoint in FP8 has in another form.

    Args:
        model: on the meta device; experts: its routed experts, by name.
    """
    format, on_host = settings.dense_format or PLAIN, settings.dense_placement == "host"
    if format == PLAIN and not on_host:
        return None
    routed = {
        name.rpartition(".")[0]: module.layer.held.num_experts + module.layer.held.zero
        for name, module in experts.items()
    }

    def may_change(name: str) -> bool:
        stored = backbone.stored(f"{name}.weight")
        as_released = format == "fp8" and isinstance(backbone.checkpoint.scheme, Fp8)
        return stored is not None and not (as_released and stored[0] is PLAIN_SCHEME and not on_host)

    layers = [
        [each for each in linears(layer, f"{name}.{number}", routed) if may_change(each)]
        for name in decoder_lists(model)
        for number, layer in model.get_submodule(name).named_children()
    ]
    head = [
        name
        for name, module in model.named_modules()
        if module is model.get_output_embeddings() and backbone.stored(f"{name}.weight") is not None
    ]
    return DenseWeights(model, layers, head, format, on_host, runtime)

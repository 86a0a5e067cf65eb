"""The linear layers outside a model's routed experts whose weights the settings have packed or in host memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from transformers import PreTrainedModel

from ktft.checkpoint.reader import CheckpointReader
from ktft.checkpoint.schemes import PLAIN_SCHEME, Fp8
from ktft.config import Settings
from ktft.dense.formats import PLAIN
from ktft.dense.model import DenseWeights, linears
from ktft.formats import FORMAT_TRAITS
from ktft.model.backbone import Backbone
from ktft.model.dense_memory import GPU, WEIGHTS_SHARE, DenseChoice, loaded_choice, released_format
from ktft.model.experts import KtftExperts, decoder_lists
from ktft.model.shape import shape_of
from ktft.native import Runtime

logger = logging.getLogger("ktft")


def fitting(settings: Settings, model: PreTrainedModel, files: Sequence[str], free: int | None) -> Settings:
    """The settings, with format and place of the dense weights chosen if they and 25% more do not fit on the GPU.

    Args:
        model: on the meta device, with transformers' own experts; files: the checkpoint's.
        free: bytes of the GPU that are free; None without a GPU.
    """
    if settings.dense_placement != "auto" or free is None:
        return settings
    weights = {name: tensor for name, tensor in model.state_dict().items() if ".experts." not in name}
    if sum(tensor.nbytes for tensor in weights.values()) <= WEIGHTS_SHARE * settings.capped(free):
        return settings
    released, (shape, _) = released_format(CheckpointReader(files).scheme), shape_of(model.config)
    value_bytes = next(iter(weights.values())).element_size()
    return with_choice(settings, loaded_choice(shape, settings, released, value_bytes, free))


def with_choice(settings: Settings, choice: DenseChoice) -> Settings:
    """The settings with a choice in place of what they leave open; the log says it where it is not the usual one."""
    usual = DenseChoice(settings.dense_format or PLAIN, GPU)
    if choice != usual and settings.dense_placement == "auto":
        logger.info("linear weights outside the routed experts are %s, since GPU memory is short", choice)
    return replace(settings, dense_format=choice.format, dense_placement=choice.placement)


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
        as_released = FORMAT_TRAITS[format].released and isinstance(backbone.checkpoint.scheme, Fp8)
        return stored is not None and not (as_released and stored[0] is PLAIN_SCHEME)

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

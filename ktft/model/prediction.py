"""The layers with which a model predicts tokens after the next, which transformers leaves out.

DeepSeek-V3 and GLM-4.5 have one (DeepSeek-V3's report, arXiv 2412.19437, section 2.2). It is a decoder layer, whose
number follows the last one's. Before it lie norms of the next token's embedding and of the hidden state, and a
projection of both; behind it lie a norm and an output layer of its own.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

COUNT = "num_nextn_predict_layers"
_AMONG = "num_predict_layers_among_hidden"


def with_prediction(config: PreTrainedConfig) -> PreTrainedConfig:
    """A copy of a text model's config in which its prediction layers are the last of its decoder layers.

    Raises:
        ValueError: the model has none.
    """
    count = getattr(config, COUNT, None) or 0
    if not count:
        raise ValueError(
            f"the model predicts no further tokens: {COUNT} is {count} in its config.json, so it has no layer that "
            "could draft them"
        )
    own: Any = copy.deepcopy(config)
    own.num_hidden_layers += count
    setattr(own, COUNT, 0)
    setattr(own, _AMONG, count)
    return own


def prediction_layers(config: PreTrainedConfig) -> range:
    """The numbers of the prediction layers in a config of `with_prediction`; none in any other."""
    last: int = config.get_text_config().num_hidden_layers
    return range(last - getattr(config, _AMONG, 0), last)


def patterns(numbers: range) -> list[str]:
    """Patterns of the names of the tensors in layers of these numbers."""
    return [rf"\.layers\.{number}\." for number in numbers]


def add_prediction(model: PreTrainedModel) -> None:
    """Add what prediction layers have beside a decoder layer, to a model of a config of `with_prediction`.

    The model is on the meta device, to be compared with a checkpoint. It computes nothing right.
    """
    config: Any = model.config
    if not (numbers := prediction_layers(config)):
        return
    hidden, words = config.hidden_size, config.vocab_size
    with torch.device("meta"):
        for number in numbers:
            head = nn.Module()
            head.norm, head.head = nn.RMSNorm(hidden), nn.Linear(hidden, words, bias=False)
            more = {
                "embed_tokens": nn.Embedding(words, hidden),
                "enorm": nn.RMSNorm(hidden),
                "hnorm": nn.RMSNorm(hidden),
                "eh_proj": nn.Linear(2 * hidden, hidden, bias=False),
                "shared_head": head,
            }
            layer = model.get_submodule(f"{model.base_model_prefix}.layers.{number}")
            for name, module in more.items():
                layer.add_module(name, module.to(model.dtype))
    # transformers ignores the layers by the numbers that released models have
    model._keys_to_ignore_on_load_unexpected = None

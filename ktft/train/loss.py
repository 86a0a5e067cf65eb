"""The loss in chunks of tokens: a run never holds the logits of all tokens, unless somebody other than the loss asks.

While a run trains or evaluates, the model's output layer gives lazy logits; see `ktft/model/lazy_logits.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel, TrainingArguments

from ktft.hosts.transformers import OUTPUT_LAYER
from ktft.model.experts import first_experts
from ktft.model.lazy_logits import LazyOutput, loss_bytes
from ktft.model.tensor_parallel import tp_size_of
from ktft.ranks.sharded import is_divided
from ktft.train.report import logger

_LOGIT_BYTES = 16  # of a logit, while the loss is computed and goes backward for all tokens at once
_ONLY_THE_LOSS = (
    "transformers.trainer",
    "trl.trainer.sft_trainer",
    "llamafactory.train.pt.trainer",
    "llamafactory.train.sft.trainer",
)
"""The modules whose `compute_loss` needs no logits beside the model's own loss."""


class LossInChunks:
    """Lets a model's output layer give lazy logits, until `close`.

    Where that cannot be, the layer stays as it is; with `told`, a line of the log says why.
    """

    def __init__(self, model: nn.Module, args: TrainingArguments, told: bool = False) -> None:
        self._layer: nn.Module | None = None
        layer = _output_layer(model)
        if layer is not None and _is_lazy(layer):
            return  # an evaluation within training
        why = "the model names no output layer" if layer is None else _obstacle(model, layer, args)
        if layer is None or why is not None:
            if told:
                logger().info("the loss holds the logits of all tokens of a micro-batch: %s", why)
            return
        self._layer, self._before = layer, vars(layer).get("forward")
        OUTPUT_LAYER.put(layer, LazyOutput(layer))

    def close(self) -> None:
        """Let the output layer compute its logits again."""
        if self._layer is None:
            return
        if self._before is None:
            OUTPUT_LAYER.take_off(self._layer)
        else:
            OUTPUT_LAYER.put(self._layer, self._before)
        self._layer = None


def evaluation_loop(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """A Trainer's `evaluation_loop`, with the loss in chunks."""
    if first_experts(trainer.model) is None:
        return original(trainer, *args, **kwargs)
    with closing(LossInChunks(trainer.model, trainer.args)):
        return original(trainer, *args, **kwargs)


def loss_room(trainer: Any, tokens: int) -> int:
    """Bytes that the loss of a micro-batch takes, forward and backward, while a run trains."""
    model = trainer.model
    config, layer = model.config.get_text_config(), _output_layer(model)
    of_model = trainer.compute_loss_func is None and trainer.label_smoother is None
    if (
        layer is None
        or not _is_lazy(layer)
        or not of_model
        or type(trainer).compute_loss.__module__ not in _ONLY_THE_LOSS
    ):
        return tokens * int(config.vocab_size) * _LOGIT_BYTES
    return loss_bytes(tokens, config.vocab_size, config.hidden_size, next(model.parameters()).element_size())


def _output_layer(model: nn.Module) -> nn.Module | None:
    """The layer that makes a model's logits, whatever is wrapped around the model."""
    for each in model.modules():
        if isinstance(each, PreTrainedModel):
            found = each.get_output_embeddings()
            return found if isinstance(found, nn.Module) else None
    return None


def _is_lazy(layer: nn.Module) -> bool:
    return isinstance(vars(layer).get("forward"), LazyOutput)


def _obstacle(model: nn.Module, layer: nn.Module, args: TrainingArguments) -> str | None:
    """Why the logits of some tokens cannot be computed by themselves; None if they can."""
    adapted = any(isinstance(each, BaseTunerLayer | AuxiliaryTrainingWrapper) for each in layer.modules())
    reasons = (
        (adapted or any(each.requires_grad for each in layer.parameters()), "the output layer is trained"),
        (is_divided(model), "the model is divided by FSDP2"),
        (tp_size_of(model) > 1, "the attention is tensor parallel"),
        (bool(args.torch_compile), "torch_compile is on"),
        (_has_liger(model, args), "Liger's kernels compute it"),
    )
    return next((why for holds, why in reasons if holds), None)


def _has_liger(model: nn.Module, args: TrainingArguments) -> bool:
    """Whether Liger computes the loss, whoever put it there: its kernels read memory, which lazy logits do not have."""
    models = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    makers = [F.cross_entropy, *(each.forward for each in models)]
    return args.use_liger_kernel or any(str(each.__module__).startswith("liger_kernel.") for each in makers)

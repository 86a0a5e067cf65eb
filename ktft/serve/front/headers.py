"""What can be wrong with a model or an adapter, as far as their headers tell, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktft.checkpoint.routing_profile import Routing
from ktft.serve.engine import Engine
from ktft.serve.runtime.settings import ServeSettings


@dataclass(frozen=True)
class Model:
    """What a model's headers tell: its config, its sizes, and the format in which its experts will be held.

    `computed` are config and sizes with the prediction layers that the server computes too.
    """

    config: Any
    shape: Any
    expert_format: str
    computed: tuple[Any, Any]


def read_model(settings: ServeSettings) -> Model:
    """Compare a checkpoint's headers with its config, as loading does.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: it is no MoE model that ktft knows, it is damaged, its conversion has not finished, or its experts
            are packed in another format than asked for.
    """
    from transformers import AutoConfig
    from transformers.utils import logging

    from ktft.model.load_plan import outline
    from ktft.model.prediction import prediction_layers, with_prediction
    from ktft.model.shape import shape_of

    logging.set_verbosity_error()
    try:
        model_config = AutoConfig.from_pretrained(settings.checkpoint, trust_remote_code=False)
    except (OSError, KeyError, TypeError, ValueError) as error:
        where = Path(settings.checkpoint) / "config.json"
        raise ValueError(f"{where} is no config that transformers can read: {str(error).splitlines()[0]}") from None
    shape, _ = shape_of(model_config)
    computed = model_config, shape
    if settings.speculative_tokens:
        config = with_prediction(model_config)
        _require_prediction(settings, prediction_layers(config))
        computed = config, shape_of(config)[0]
    plan = outline(settings.checkpoint, settings.experts, computed[0])
    return Model(model_config, shape, plan.expert_format, computed)


def _require_prediction(settings: ServeSettings, numbers: range) -> None:
    """Raise ValueError if the checkpoint has no tensors of the layers that predict further tokens."""
    from ktft.checkpoint.load import any_match
    from ktft.checkpoint.reader import CheckpointReader
    from ktft.model.prediction import patterns

    stored = CheckpointReader.from_directory(settings.checkpoint).tensors
    if not any(any_match(patterns(numbers), name) for name in stored):
        raise ValueError(
            f"{settings.checkpoint} has no tensors of layer {numbers[0]}, which predicts further tokens; transformers "
            "leaves it out when it writes a model. Serve the released checkpoint, merged or converted, or leave out "
            "--speculative-tokens"
        )


def check_family(engine: Engine, settings: ServeSettings, model: Model) -> None:
    """Raise ValueError if it was not measured that the engine computes the model's family as training does."""
    if (model_type := model.config.model_type) not in engine.families:
        raise ValueError(
            f"{settings.checkpoint} is of model_type {model_type!r}, which {engine.name} was not shown to compute as "
            f"in training. It serves {', '.join(engine.families)}"
        )


def check_drafts(engine: Engine, settings: ServeSettings, model: Model) -> None:
    """Raise ValueError if it was not measured that the engine drafts tokens by the prediction layer of the family."""
    if settings.speculative_tokens and (model_type := model.config.model_type) not in engine.drafts:
        raise ValueError(
            f"--speculative-tokens is {settings.speculative_tokens}; {engine.name} was shown to draft tokens for "
            f"{', '.join(engine.drafts) or 'no family'}, and {settings.checkpoint} is of model_type {model_type!r}: "
            "leave it out"
        )


def check_routing(settings: ServeSettings, model: Model) -> None:
    """Raise ValueError if the routing profile is of another model, or if all experts of a token would be deferred."""
    layers = model.shape.moe
    if settings.routing is not None:
        path = Path(settings.routing)
        Routing.load(path).check({number: layer.num_experts for number, layer in layers.items()}, path)
    if settings.deferral >= (top_k := min(layer.top_k for layer in layers.values())):
        raise ValueError(
            f"--deferral is {settings.deferral}; a token has {top_k} experts, of which one at least must be on time"
        )


def check_adapter(settings: ServeSettings, model: Model, adapter: str) -> None:
    """Raise ValueError if an adapter cannot be served on this model, as far as its headers tell."""
    from ktft.adapters.saved import SavedAdapter

    saved = SavedAdapter(adapter, model.config)
    cure = f"merge it: ktft merge {settings.checkpoint} {adapter} OUT, and serve OUT"
    for name in saved.whole:
        raise ValueError(f"{adapter} has {name} trained whole, which cannot be served unmerged; {cure}")
    rank = max((place.r for place in saved.linears), default=0)
    if rank > settings.max_lora_rank:
        raise ValueError(
            f"{adapter} has rank {rank}, --max-lora-rank is {settings.max_lora_rank}; give --max-lora-rank "
            f"{rank}, or {cure}"
        )

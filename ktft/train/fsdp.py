"""FSDP2 beside experts that ranks share: ktft divides the model itself, by accelerate's configuration.

accelerate wants all of a model in its units, casts frozen weights to fp32 or adapters to bf16, and leaves FSDP out on
CPUs; transformers saves the parts of what FSDP divides, which PEFT cannot load. So the Trainer saves and loads as it
does without FSDP, from whole tensors (`ktft.adapters.gathered`), and accelerate has this file's `prepare`. Parameters
keep their dtypes and autocast computes, both as under DDP. Expert LoRA is left as it is, on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn

from ktft.adapters.lora import KtftExpertsLora
from ktft.model.experts import find_experts, first_experts, layer_of
from ktft.ranks.group import ranks, same
from ktft.ranks.launch import FSDP_CURE, fsdp_version
from ktft.ranks.sharded import is_divided, shard
from ktft.system import readable
from ktft.train.optimizer import AdamW
from ktft.train.parallel import VALUES, values_of
from ktft.train.report import logger

ADDED = "_ktft_fsdp2"
"""The attribute of a Trainer whose model FSDP2 divides."""


def create_accelerator(original: Callable[..., None], trainer: Any) -> None:
    """`Trainer.create_accelerator_and_postprocess`, after which the Trainer acts as it does without FSDP.

    Raises:
        ValueError: the configuration asks for FSDP1, or for what ktft does not do under FSDP2.
    """
    original(trainer)
    plugin = _plugin(trainer) if isinstance(trainer.model, nn.Module) and find_experts(trainer.model) else None
    if plugin is None:
        return
    if plugin.fsdp_version != 2:
        raise ValueError(FSDP_CURE)
    if plugin.activation_checkpointing:
        raise ValueError(
            "activation_checkpointing in the configuration of FSDP renames the modules that adapters are saved by; "
            "leave it out there, and set gradient_checkpointing: true in the arguments of training"
        )
    if trainer.args.gradient_checkpointing:
        asked = trainer.args.gradient_checkpointing_kwargs or {}
        trainer.args.gradient_checkpointing_kwargs = {**asked, "use_reentrant": False}
    os.environ["FSDP_VERSION"] = "2"  # accelerate sets ACCELERATE_USE_FSDP itself, of which the version is then 1
    trainer.is_fsdp_enabled = False
    setattr(trainer, ADDED, True)


def _plugin(trainer: Any) -> Any:
    """What accelerate knows of FSDP; None without it. On CPUs accelerate forgets it, and learns it again here."""
    state = trainer.accelerator.state
    found = getattr(state, "fsdp_plugin", None)
    asked = trainer.args.fsdp_plugin_args is not None or fsdp_version() is not None
    if found is None and asked and state.distributed_type == DistributedType.MULTI_CPU:
        found = FullyShardedDataParallelPlugin(**(trainer.args.fsdp_plugin_args or {}))
        state._shared_state["fsdp_plugin"] = state.fsdp_plugin = found
        state.distributed_type = DistributedType.FSDP
    return found


def keep_place(original: Callable[..., None], trainer: Any, model: nn.Module, device: Any) -> None:
    """`Trainer._move_model_to_device`, which leaves a model where it is until FSDP2 has divided it."""
    if not getattr(trainer, ADDED, False):
        original(trainer, model, device)


def prepare(original: Callable[..., Any], accelerator: Any, model: nn.Module) -> Any:
    """accelerate's `fsdp2_prepare_model`: divide a model's parameters among the ranks, but for LoRA on experts.

    Raises:
        ValueError: the ranks begin with different adapters.
    """
    if first_experts(model) is None:
        return original(accelerator, model)
    if is_divided(model):
        return model
    together, plugin = ranks(), accelerator.state.fsdp_plugin
    same([(VALUES, values_of(model))], together)
    _checkpoint_without_reentry(model)
    units, ignored = _units(model, plugin.transformer_cls_names_to_wrap), _on_cpu(model)
    if together.first:
        nbytes = sum(each.nbytes for each in model.parameters()) - sum(each.nbytes for each in ignored)
        logger().info(
            "FSDP2 divides %s of parameters among %d processes, in %d units; LoRA on experts is not among them",
            readable(nbytes),
            together.size,
            len(units) + 1,
        )
    shard(
        model,
        units,
        ignored,
        accelerator.device.type,
        together,
        reshard=bool(plugin.reshard_after_forward),
        offload=plugin.cpu_offload,
    )
    # Autocast as under DDP; in this mode nothing is wrapped
    return accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)


def _units(model: nn.Module, named: list[str] | None) -> list[nn.Module]:
    """The modules whose parameters are made whole together: decoder layers, those of a tower too, and an embedding.

    The output layer is made whole with the model, because fused losses read its weight and never call it.
    """
    inner: Any = next((each for each in model.modules() if hasattr(each, "get_input_embeddings")), None)
    classes = set(named or getattr(inner, "_no_split_modules", None) or ())
    layers = {name.rpartition(".layers.")[0] + f".layers.{layer_of(name)}" for name in find_experts(model)}
    units = [
        module
        for name, module in model.named_modules()
        if type(module).__name__ in classes or (not named and name in layers)
    ]
    embedding, head = (getattr(inner, f"get_{which}_embeddings", lambda: None)() for which in ("input", "output"))
    shared = {id(p) for p in head.parameters()} if isinstance(head, nn.Module) else set()
    if isinstance(embedding, nn.Module) and shared.isdisjoint(map(id, embedding.parameters())):
        units.append(embedding)
    return units


def _on_cpu(model: nn.Module) -> list[Tensor]:
    """All LoRA on routed experts, of adapters beneath the trained one too."""
    layers = (module for module in model.modules() if isinstance(module, KtftExpertsLora))
    return [tensor for layer in layers for name in layer.lora_A for *_, tensor in layer.tensors(name)]


def _checkpoint_without_reentry(model: nn.Module) -> None:
    """Reentrant checkpointing ends FSDP2's backward at the first layer: switch it off where it is still on."""
    changed = False
    for module in model.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        keywords = getattr(function, "keywords", None) or {}
        if keywords.get("use_reentrant", False):
            keywords["use_reentrant"], changed = False, True
    if changed:
        logger().info("gradient checkpointing is not reentrant under FSDP2: use_reentrant is False")


def check_divided(model: nn.Module, optimizer: Any) -> None:
    """Refuse optimizers other than ktft's AdamW on what FSDP2 divides: they would see parts as whole matrices."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    if optimizer is not None and is_divided(model) and not isinstance(optimizer, AdamW):
        raise ValueError(
            f"{type(optimizer).__name__} does not work on parameters that FSDP2 divides; set optim: adamw_torch and "
            "leave other optimizers out, or train without FSDP"
        )

"""Checks and the report around transformers' Trainer, for `ktft.Trainer` and every other Trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from peft import PeftModel
from torch import nn
from transformers import TrainerCallback, TrainerState, TrainingArguments

from ktft import config
from ktft.adapters.elsewhere import said_before_training
from ktft.adapters.reach import reach_of
from ktft.dense.linear import PackedLinear
from ktft.model.experts import find_experts, first_experts
from ktft.ranks import launch
from ktft.train import run
from ktft.train.checkpoints import clear_leftovers
from ktft.train.fsdp import check_divided
from ktft.train.gradients import rates_of
from ktft.train.guards import ROUTED
from ktft.train.optimizer import check_optimizer, describe, remember_model
from ktft.train.parallel import check_layout, check_precision, require_same_run
from ktft.train.report import Report, examine, format_report, logger
from ktft.train.run_times import LOGGED
from ktft.train.trace import require_writable


def check_launch(*, fsdp: int | None = None, deepspeed: bool = False, gpus: int = 1) -> None:
    """Raise ValueError if the arguments or the environment ask for what this release does not support.

    Args:
        fsdp: the version that the arguments ask for.
    """
    if fsdp == 1 or launch.fsdp_version() == 1:
        raise ValueError(launch.FSDP_CURE)
    if (asked := launch.launched_as()) is not None:
        variable, setting = asked
        how = "start the program without accelerate launch"
        if variable == launch.LAUNCHED_LAYOUT:
            how = (
                "start it by torchrun; for tensor parallelism load the model with from_pretrained(..., "
                "distributed_config=DistributedConfig(tp_size=...))"
            )
        raise ValueError(
            f"ktft does not support {launch.LAUNCHES[variable]} in this release, which the environment asks for by "
            f"{setting}; unset {variable}, and {how}"
        )
    unsupported = (
        (deepspeed, "DeepSpeed (ZeRO-2 and ZeRO-3 included)", "remove deepspeed: the experts are off the GPU already"),
        (
            gpus > 1,
            f"DataParallel over {gpus} GPUs",
            f"start a process for each, torchrun --nproc-per-node {gpus} ..., or set CUDA_VISIBLE_DEVICES to one GPU",
        ),
    )
    for used, what, cure in unsupported:
        if used:
            raise ValueError(f"ktft does not support {what} in this release; {cure}")


def check_arguments(args: TrainingArguments, model: nn.Module | None = None) -> None:
    """Check the optimizer, `KTFT_TRACE` and, by `check_launch`, the launch of transformers, accelerate and torchrun.

    With a model, also that it was loaded for the processes that the arguments ask for.
    """
    if model is not None:
        check_layout(args, model)
        check_output_layer(args, model)
    check_optimizer(args)
    if args.use_liger_kernel and (args.liger_kernel_config or {}).get("swiglu", True):
        raise ValueError(
            "use_liger_kernel would put Liger's code in place of ktft's experts; take its norms, rotation and loss by "
            "liger_kernel_config={'swiglu': False}"
        )
    if (path := config.trace_file()) is not None:
        require_writable(path)
    check_launch(
        fsdp=(args.fsdp_plugin_args or {}).get("fsdp_version"), deepspeed=args.deepspeed is not None, gpus=args.n_gpu
    )
    check_precision(args)


def check_output_layer(args: TrainingArguments, model: nn.Module) -> None:
    """Refuse a packed output layer where TRL would read its weight.

    Raises:
        ValueError: the arguments are TRL's, and the layer is packed.
    """
    head = cast(Any, model).get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if isinstance(head, PackedLinear) and type(args).__module__.startswith("trl."):
        raise ValueError(
            f"TRL multiplies by the output layer's weight itself, which dense_format {head.format!r} packs; set "
            "dense_format to fp8 or bf16, which leave the output layer as it is"
        )


class KtftCallback(TrainerCallback):
    """Checks and reports a run on a model with ktft's experts before its first step; ignores all other models."""

    def on_init_end(self, args: TrainingArguments, *_: Any, **kwargs: Any) -> None:
        """Check what can be known before training starts."""
        model = kwargs.get("model")
        if model is not None and find_experts(model):
            check_arguments(args, model)
            remember_model(args, model)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Log the report; refuse a run that would leave out parameters it was asked to train."""
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        report = examine(model)
        if report is None:
            return
        check_trained(model, report, optimizer)
        check_divided(model, optimizer)
        dataset: Any = getattr(kwargs.get("train_dataloader"), "dataset", None)
        require_same_run(model, args, len(dataset) if hasattr(dataset, "__len__") else None)
        if args.should_save:
            clear_leftovers(Path(str(args.output_dir)))
        left = state.global_step < state.max_steps  # a resumed run may have no step left
        when = f"before step {state.global_step + 1}" if left else f"after step {state.global_step}, the last"
        logger().info("%s\n%s\n%s\n%s", when, format_report(report), describe(optimizer), LOGGED)
        for name in ("fp16", "fp8"):
            if getattr(args, name, False) and args.device.type == "cpu":
                logger().warning(
                    "%s: true has no effect on a CPU, where training runs in the model's own precision; set bf16: "
                    "true, or leave it out",
                    name,
                )
        if refused := said_before_training(model):
            logger().info(refused)


def check_trained(model: nn.Module, report: Report, optimizer: torch.optim.Optimizer | None) -> None:
    """Check that everything with LoRA is trained, the parameters on the CPU included.

    Raises:
        ValueError: nothing is trainable, a group's LoRA is frozen, the experts lack LoRA that was asked for, or the
            optimizer lacks trainable parameters.
    """
    if not any(group.trainable for group in report.groups):
        raise ValueError("no parameter is trainable; add LoRA with ktft.get_peft_model(model, LoraConfig(...))")
    frozen = [group.name for group in report.groups if group.adapter and not group.trainable]
    if frozen:
        raise ValueError(
            f"LoRA was requested on {', '.join(frozen)}, but none of it is trainable; load the adapter with "
            "is_trainable=True, or leave its requires_grad on"
        )
    for name in _adapters_without_experts(model, report):
        raise ValueError(
            f"adapter {name!r}: its target_modules name projections of the routed experts, but no LoRA is on them, so "
            "no expert would train; put it on the model with ktft.get_peft_model. To train other modules alone, name "
            "these, such as q_proj"
        )
    if optimizer is None:
        return
    held = rates_of(optimizer.param_groups)
    if missing := [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]:
        raise ValueError(
            f"the optimizer lacks {len(missing)} trainable parameters, the first is {missing[0]}; build it after "
            "adding LoRA, from all parameters with requires_grad"
        )


def _adapters_without_experts(model: nn.Module, report: Report) -> list[str]:
    """Adapters whose targets match experts by PEFT's rule, in a model whose experts have no LoRA to train."""
    if any(group.name == ROUTED and group.adapter for group in report.groups):
        return []
    adapted = next((module for module in model.modules() if isinstance(module, PeftModel)), None)
    if adapted is None:
        return []
    base: Any = adapted.base_model.model
    names = set(adapted.active_adapters) - set(getattr(adapted, "base_adapters", ()))  # put on by `stand_on`
    return [name for name in sorted(names) if reach_of(base, copy.copy(adapted.peft_config[name])).ranks]


class Trainer(transformers.Trainer):
    """transformers' Trainer for models with ktft's experts. Raises ValueError for others, and as `check_arguments`."""

    def __init__(self, model: nn.Module | None = None, args: TrainingArguments | None = None, **kwargs: Any) -> None:
        if model is None or first_experts(model) is None:
            raise ValueError(
                "the model has no experts held by ktft; load it with "
                "from_pretrained(..., quantization_config=ktft.KtftConfig())"
            )
        if args is not None:
            check_arguments(args, model)
        super().__init__(model, args, **kwargs)


def add_callbacks(original: list[Any]) -> list[Any]:
    """The callbacks that every Trainer starts with, plus ktft's."""
    return [*original, KtftCallback, run.RunCallback]

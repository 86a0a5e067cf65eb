"""The report before a run's first step: how the experts are held, and exactly which parameters will be trained."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from torch import nn

from ktft.adapters.several import base_adapters_of
from ktft.checkpoint.families import GROUPS, group_of
from ktft.model.experts import experts_family, find_experts


@dataclass(frozen=True)
class Group:
    """Parameter counts of one of `GROUPS`: all trainable, trainable on the CPU, and those with LoRA's names."""

    name: str
    trainable: int
    on_cpu: int
    adapter: int


@dataclass(frozen=True)
class Report:
    """Facts of a model with ktft's experts."""

    layers: int
    num_experts: int
    format: str
    packed_bytes: int
    isa: str
    threads: int
    nodes: int
    warnings: tuple[str, ...]
    groups: tuple[Group, ...]


def examine(model: nn.Module) -> Report | None:
    """The report on a model, which PEFT, TRL or accelerate may wrap; None if the model has no ktft experts."""
    experts = list(find_experts(model).values())
    if not experts:
        return None
    first = experts[0].layer
    return Report(
        layers=len(experts),
        num_experts=first.held.num_experts,
        format=first.format,
        packed_bytes=sum(module.layer.packed_bytes for module in experts),
        isa=first.runtime.isa,
        threads=first.runtime.threads,
        nodes=first.runtime.nodes,
        warnings=tuple(first.runtime.warnings),
        groups=_groups(model),
    )


def _groups(model: nn.Module) -> tuple[Group, ...]:
    family = experts_family(model)
    counts = {group: [0, 0, 0] for group in GROUPS}
    base = base_adapters_of(model)  # frozen, as the base model is
    for name, parameter in model.named_parameters():
        count = counts[group_of(name, family)]
        count[0] += parameter.numel() * parameter.requires_grad
        count[1] += parameter.numel() * (parameter.requires_grad and parameter.device.type == "cpu")
        count[2] += parameter.numel() * (".lora_" in name and base.keys().isdisjoint(name.split(".")))
    return tuple(Group(name, *count) for name, count in counts.items())


def format_report(report: Report) -> str:
    """The report as lines of text."""
    lines = [
        f"routed experts: {report.layers} layers x {report.num_experts}, {report.format}, "
        f"{report.packed_bytes / 2**20:,.1f} MiB packed in CPU memory",
        f"kernels: {report.isa}, threads: {report.threads}, NUMA nodes: {report.nodes}",
        *(f"warning: {warning}" for warning in report.warnings),
        "trainable parameters:",
        *(f"  {g.name:<15}{g.trainable:>16,}  ({g.on_cpu:,} on the CPU)" for g in report.groups),
        f"  {'total':<15}{sum(g.trainable for g in report.groups):>16,}",
    ]
    return "\n".join(lines)


def logger() -> logging.Logger:
    """ktft's logger, which prints to the console even if logging is not configured."""
    log = logging.getLogger("ktft")
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(levelname)s|ktft] %(message)s"))
        log.addHandler(handler)
        log.propagate = False  # a root logger configured later would print each line a second time
    return log

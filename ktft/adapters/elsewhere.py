"""A warning before training starts: which targets of `ktft export` would refuse the adapter."""

from __future__ import annotations

from collections.abc import Iterator

from peft.tuners.lora.layer import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn

from ktft.adapters.export_serving import SGLANG, VLLM, ServerRules
from ktft.adapters.lora import KtftExpertsLora
from ktft.checkpoint.families import Family
from ktft.checkpoint.layouts import SEPARATE
from ktft.config import PROJECTIONS
from ktft.model.experts import experts_family

SERVERS = {"vllm": VLLM, "sglang": SGLANG}


def said_before_training(model: nn.Module) -> str:
    """One line that names the `ktft export` targets that could not hold the model's adapter; empty if all can."""
    reasons = dict(reasons_against(model))
    if not reasons:
        return ""
    refused = "; ".join(f"{target}: {reason}" for target, reason in reasons.items())
    return (
        f"ktft export would refuse this adapter for {refused}. To have it there unmerged, train without these "
        "(docs/guide/adapters.md); ktft merge takes it as it is"
    )


def reasons_against(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield each `ktft export` target that could not hold the model's present LoRA, with the reason."""
    family, leaves = experts_family(model), _leaves(model)
    whole = any(isinstance(module, ModulesToSaveWrapper) for module in model.modules())
    for target, server in SERVERS.items():
        if reason := _of_server(model, server, family, leaves, whole):
            yield target, reason
    row = family.gguf
    if row is None:
        yield "gguf", f"the family {family.name}"
    elif whole:
        yield "gguf", "modules trained whole"
    elif unapplied := leaves.keys() & set(row.unapplied):
        yield "gguf", f"LoRA on {', '.join(sorted(unapplied))}"


def _leaves(model: nn.Module) -> dict[str, set[str]]:
    """Map the last name of each module with LoRA to the names of its parent modules; experts' projections have none."""
    found: dict[str, set[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, KtftExpertsLora):
            for projection in (projection for ranks in module.ranks.values() for projection in ranks):
                found.setdefault(projection, set())
        elif isinstance(module, LoraLayer):
            parent, _, leaf = name.rpartition(".")
            found.setdefault(leaf, set()).add(parent)
    return found


def _of_server(model: nn.Module, server: ServerRules, family: Family, leaves: dict[str, set[str]], whole: bool) -> str:
    if whole:
        return "modules trained whole"
    if family.layouts[0] != SEPARATE:
        return f"the family {family.name}"
    unknown = set() if server.known is None else leaves.keys() - server.known - set(PROJECTIONS)
    bad = unknown | (leaves.keys() & server.ignored.keys())
    for group in server.together:
        for leaf in leaves.keys() & set(group):
            if any(not all(_child(model, p, each) for each in group) for p in leaves[leaf]):
                bad.add(leaf)
    return f"LoRA on {', '.join(sorted(bad))}" if bad else ""


def _child(model: nn.Module, parent: str, name: str) -> bool:
    """Whether a module has a module of this name; transformers gives some an attribute that is None."""
    return isinstance(getattr(model.get_submodule(parent), name, None), nn.Module)

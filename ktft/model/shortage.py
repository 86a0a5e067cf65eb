"""Insufficient memory: the messages, the causes, and the check before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from ktft import config, native, system


def shortage(what: str, needed: int, available: int, of: str = "memory", limit: str = "") -> str:
    """The message for insufficient memory, which `ktft plan` and training share."""
    return (
        f"{what} needs {system.readable(needed)} of {of}, {system.readable(available)} are available{limit}: "
        f"{system.readable(needed - available)} too few"
    )


PACKED, WEIGHTS, LORA, ACTIVATIONS = "packed experts", "other weights", "LoRA", "activations"
RESIDENT = "resident experts"
_CAUSES = {
    "experts": PACKED,
    "other weights": WEIGHTS,
    "other weights in use": WEIGHTS,
    "expert LoRA": LORA,
    "its gradients and moments": LORA,
    "other LoRA, gradients, moments": LORA,
    "expert activations": ACTIVATIONS,
    "activations": ACTIVATIONS,
    "activations that wait": ACTIVATIONS,
    "micro-batches together": ACTIVATIONS,
    "fragments": ACTIVATIONS,
    "expert outputs": ACTIVATIONS,
    "resident experts": RESIDENT,
}
_CURES = {
    PACKED: "choose a smaller expert_format ({formats}, smallest first)",
    WEIGHTS: "choose a smaller dense_format (k4, int8 or fp8), or dense_placement: host beside a GPU",
    LORA: "lower lora_rank, or name fewer modules in lora_target",
    ACTIVATIONS: "lower cutoff_len or per_device_train_batch_size",
    RESIDENT: "lower gpu_expert_memory",
}
"""Cause -> the advice that reduces it, in terms of the keys of LLaMA-Factory's YAML."""


def by_cause(parts: Mapping[str, int]) -> dict[str, int]:
    """The parts of a footprint, summed by the cause that a user can change; parts without one are left out."""
    causes: dict[str, int] = {}
    for part, size in parts.items():
        if part in _CAUSES:
            causes[_CAUSES[part]] = causes.get(_CAUSES[part], 0) + size
    return causes


def largest_cause(causes: Mapping[str, int]) -> str:
    """The message for the cause that takes the most memory, and the advice that reduces it."""
    name = max(causes, key=lambda each: causes[each])
    by_size = sorted(config.EXPERT_FORMATS, key=lambda each: native.packed_bytes(1, 1024, 1024, each, 1)[0])
    cure = _CURES.get(name, "ask for less of it").format(formats=", ".join(by_size))
    return f"the largest part, {system.readable(causes[name])}, is for {name}: {cure}"


def _limit_words() -> str:
    if config.memory_limit() is not None:
        return " (KTFT_MEMORY_LIMIT is set)"
    limit, total = system.cgroup_memory_limit(), system.memory().get("MemTotal", 0)
    return f" (a cgroup allows {system.readable(limit)})" if limit is not None and limit < total else ""


def require_memory(what: str, causes: Mapping[str, int]) -> None:
    """Refuse a request that exceeds the memory that this process can still take.

    Args:
        what: the subject of the message, which needs the memory.
        causes: bytes by cause, as returned by `by_cause`.

    Raises:
        ValueError: the memory does not suffice; the message has both sizes, the largest cause and the advice.
    """
    needed = sum(causes.values())
    available = system.available_memory()
    if needed <= available or config.skip_memory_check():
        return
    raise ValueError(
        f"{shortage(what, needed, available, limit=_limit_words())}; {largest_cause(causes)}. `ktft plan MODEL "
        "train.yaml` says what fits; KTFT_SKIP_MEMORY_CHECK=1 loads all the same"
    )

"""Insufficient memory: the messages, the causes, and the check before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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


# --- a GPU that runs out of memory ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GpuUse:
    """What a training has on its GPU when memory runs out, in bytes, and the settings that decide about it.

    Attributes:
        weights: outside the routed experts.
        lora: LoRA and other trained weights, their gradients and what the optimizer keeps.
        recordings: of layers.
        residents: experts that stay.
        buffers: of streamed experts.
        waiting: inputs of layers and outputs of their experts, which wait for backward.
        stored: activations of layers that are not run again.
        working: all else: activations of the layer at work, and the loss.
        layers: the number of decoder layers.
        together: micro-batches that go through each layer together.
        batch: sequences in a micro-batch.
        dense_on_host: whether the weights are in host memory already, as far as they can be.
    """

    weights: int
    lora: int
    recordings: int
    residents: int
    buffers: int
    waiting: int
    stored: int
    working: int
    layers: int = 1
    together: int = 1
    batch: int = 1
    dense_on_host: bool = False

    def table(self) -> str:
        """A line for each part that takes memory."""
        rows = {
            "weights outside the routed experts": self.weights,
            "LoRA, its gradients, the optimizer's state": self.lora,
            "recorded layers": self.recordings,
            "resident experts": self.residents,
            "buffers of streamed experts": self.buffers,
            "activations that wait for backward": self.waiting,
            "activations of layers that are not run again": self.stored,
            "the layer at work, and the loss": self.working,
        }
        return "\n".join(f"  {name:<45} {system.readable(size):>12}" for name, size in rows.items() if size)

    def best_change(self) -> str:
        """The change of one setting that frees most, and how much."""
        tokens, half = self.waiting + self.working, self.together // 2
        # In this order where two free as much: first those that change neither what is learned nor its speed much
        changes = {
            "set gpu_activation_memory: 0 in kt_config": self.stored,
            "set gpu_expert_memory: 0 in kt_config": self.residents,
            "set dense_placement: host in kt_config": (
                0 if self.dense_on_host else self.weights * max(self.layers - 2, 0) // self.layers
            ),
            f"set micro_batches_together: {half} in kt_config": tokens - tokens * half // self.together if half else 0,
            "set cuda_graphs: false in kt_config": self.recordings,
            f"lower per_device_train_batch_size to {self.batch // 2}": tokens // 2 if self.batch > 1 else 0,
            "halve cutoff_len (in TRL max_length)": tokens // 2 if self.batch == 1 else 0,
            "halve lora_rank": self.lora // 2,
        }
        best = max(changes, key=lambda each: changes[each])
        return f"{best}, which frees about {system.readable(changes[best])}: more than any other change"


def out_of_gpu_memory(what: str, use: GpuUse, limit: int | None, kept: str) -> str:
    """The message for a GPU without memory for the next tensor.

    Args:
        what: what was asked for, and where.
        limit: the bytes that the process may use, if that is known.
        kept: what is not lost.
    """
    of = "" if limit is None else f" of {system.readable(limit)}"
    return f"{what}. What takes the GPU's memory{of}:\n{use.table()}\nTo go on, {use.best_change()}. {kept}"

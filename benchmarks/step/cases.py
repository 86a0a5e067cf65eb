"""The timed cases: whole training steps of small models with a large model's layers. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.cases import Shape, parse_shape
from ktft.config import Settings

VOCABULARY = 1024
"""A small vocabulary keeps logits out of the figures; with a real one, those of 16,384 tokens fill 10 GB."""
SHAPES = ("qwen3-30b-a3b", "deepseek-v2-lite")
LORA_ATTENTION = {
    "qwen3_moe": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "deepseek_v2": ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
}
"""model_type -> names of attention's projections."""


ORDERS = ("together", "alone")
"""Whether all micro-batches go through a layer together, or each through the whole model before the next."""


def parse_step_shape(text: str) -> Shape:
    """Parse one of `SHAPES`, or `E,k,H,I`, which uses Qwen3-MoE's layers. Raises ValueError."""
    if text not in SHAPES and "," not in text:
        raise ValueError(f"unknown shape {text!r}: one of {', '.join(SHAPES)}, or E,k,H,I")
    return parse_shape(text)


@dataclass(frozen=True)
class Job:
    """One model and its runner, as sent to a worker process.

    Attributes:
        runner: a row of `benchmarks.step.runners.RUNNERS`.
        shape, layers: the model; every layer has experts.
        tokens: the sizes of the batches to time, of one sequence each.
        routing: `uniform` or `zipf`.
        rank, checkpointing: LoRA's rank, and whether backward recomputes activations.
        format, placement, gpu_expert_memory, gpu_activation_memory, threads: ktft's settings, for runners that use
            them.
        gpus: how many GPUs train together, a process for each, with batches of their own.
        micro_batches: of each step, with `tokens` each.
        order: of ktft's step if there are several, one of `ORDERS`.
    """

    runner: str
    shape: Shape
    layers: int
    tokens: tuple[int, ...]
    routing: str
    rank: int
    checkpointing: bool
    format: str = ""
    placement: str = ""
    gpu_expert_memory: int | str = 0
    gpu_activation_memory: int | str = "auto"
    threads: int | None = None
    gpus: int = 1
    micro_batches: int = 1
    order: str = ""

    @property
    def name(self) -> str:
        """The job's name for a person."""
        together = f"on {self.gpus} GPUs" if self.gpus > 1 else ""
        stored = "" if self.gpu_activation_memory == "auto" else f"stored {self.gpu_activation_memory}"
        parts = self.runner, self.format, self.placement, self.order, stored, together
        return " ".join(part for part in parts if part)

    def settings(self) -> Settings:
        """ktft's settings. Experts stay on the GPU only if asked for; `resident` keeps all that fit.

        Raises:
            ValueError: a value is not accepted.
        """
        memory: int | str = self.gpu_expert_memory if self.placement in ("auto", "resident") else 0
        if self.placement == "resident" and memory == 0:
            memory = "auto"
        return Settings(
            expert_format=self.format,
            threads=self.threads,
            placement=self.placement,
            gpu_expert_memory=memory,
            gpu_activation_memory=self.gpu_activation_memory,
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Job:
        """The job from the result of `asdict`, which may have been JSON."""
        return cls(**values | {"shape": Shape(**values["shape"]), "tokens": tuple(values["tokens"])})


@dataclass(frozen=True)
class Times:
    """One step: seconds of its parts, and memory of the process at its end (`vram`: the most during the step).

    With several micro-batches, which go forward and backward in turns, `forward` has the seconds of both.
    """

    forward: float
    backward: float
    optimizer: float
    vram: int
    rss: int

    @property
    def passes(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward

    @property
    def step(self) -> float:
        """Seconds of the whole step."""
        return self.passes + self.optimizer


@dataclass(frozen=True)
class Rates:
    """The machine's rates: FLOP/s of the CPU's registers (P) and of the GPU's bf16 products, bytes/s that all threads
    read from memory, and bytes/s of copies from pinned memory to the GPU.
    """

    registers: float
    gpu: float
    read: float
    pcie: float


@dataclass(frozen=True)
class PeerFigure:
    """A peer's medians, and its step over ktft's, timed before and after it: above 1, ktft is faster."""

    ms_per_layer: float
    marginal_ms_per_layer: float | None
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    ratio: float
    vram_bytes: int
    rss_bytes: int
    note: str


@dataclass(frozen=True)
class StepRecord:
    """Medians of one case, as printed; docs/reference/measuring.md, "A training step", says what each is."""

    shape: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    layers: int
    gpus: int
    tokens: int
    micro_batches: int
    order: str
    routing: str
    rank: int
    checkpointing: bool
    format: str
    placement: str
    gpu_expert_memory: int | str
    gpu_activation_memory: int | str
    device: str
    cpu: str
    isa: str
    threads: int
    runs: int
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    step_ms: float
    spread: float
    ms_per_layer: float
    marginal_ms_per_layer: float | None
    tokens_per_second: float
    without_experts_ms: float
    floor_ms: float
    over_floor: float
    vram_bytes: int
    vram_experts_bytes: int
    rss_bytes: int
    pcie_gbs: float
    read_gbs: float
    registers_tflops: float
    gpu_tflops: float
    peers: dict[str, PeerFigure] = field(default_factory=dict)
    absent_peers: dict[str, str] = field(default_factory=dict)

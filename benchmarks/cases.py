"""The timed cases: shapes, routings and one case's figures. Nothing here needs torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The shape of one layer: experts held here, experts per token, and sizes."""

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int

    def dims(self, projection: str) -> tuple[int, int]:
        """`[out_features, in_features]` of one expert's projection."""
        dims = (self.intermediate_size, self.hidden_size)
        return dims[::-1] if projection == "down_proj" else dims

    def in_record(self) -> dict[str, Any]:
        """The shape as fields of a record."""
        sizes = asdict(self)
        return {"shape": sizes.pop("name")} | sizes


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("deepseek-v3", 32, 8, 7168, 2048),  # 32 of the model's 256 experts
        Shape("qwen3-30b-a3b", 128, 8, 2048, 768),
        Shape("deepseek-v2-lite", 64, 6, 2048, 1408),
        Shape("small", 16, 4, 1024, 512),
    )
}
ROUTINGS = ("uniform", "zipf")
# Step -> number of passes, each of 6·T·k·H·I FLOPs. Forward alone keeps nothing for backward; the other two belong to
# one training step.
STEPS = {"forward": 1, "backward": 1, "forward+backward": 2}
# Forward with 8-bit activations, timed on request for format int8. It is one pass, as forward.
W8A8_STEP = "forward-w8a8"


def parse_shape(text: str) -> Shape:
    """Parse a name of `SHAPES`, or `E,k,H,I`. Raises ValueError."""
    if text in SHAPES:
        return SHAPES[text]
    try:
        experts, top_k, hidden, intermediate = (int(part) for part in text.split(","))
    except ValueError:
        names = ", ".join(SHAPES)
        raise ValueError(
            f"unknown shape {text!r}: one of {names}, or E,k,H,I (experts, experts per token, sizes)"
        ) from None
    if not 1 <= top_k <= experts:
        raise ValueError(f"shape {text!r}: {top_k} experts per token of {experts}")
    return Shape(text, experts, top_k, hidden, intermediate)


@dataclass(frozen=True)
class Case:
    """One call of a layer: its shape, the number of tokens, their routing, the expert format, and the LoRA rank."""

    shape: Shape
    tokens: int
    routing: str
    format: str
    rank: int

    @property
    def pass_flops(self) -> int:
        """Useful FLOPs of one pass, forward or backward. LoRA and packing add time but do not count as FLOPs."""
        return 6 * self.tokens * self.shape.top_k * self.shape.hidden_size * self.shape.intermediate_size


@dataclass(frozen=True)
class PeerFigure:
    """A peer's median time, and the median over pairs of peer time / ktft time. Above 1, ktft is faster."""

    ms: float
    ratio: float


@dataclass(frozen=True)
class Record:
    """Medians of one step of one case, as printed; docs/reference/measuring.md, "Kernels", says what each is."""

    shape: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    tokens: int
    routing: str
    format: str
    rank: int
    step: str
    cpu: str
    isa: str
    threads: int
    nodes: int
    runs: int
    copies: int
    rotated_bytes: int
    ms: float
    tflops: float
    registers_tflops: float
    hot_tflops: float
    streamed_tflops: float
    percent_of_registers: float
    percent_of_hot: float
    percent_of_streamed: float
    gbs: float
    read_gbs: float
    percent_of_read: float
    weight_reads: float
    max_error: float
    peers: dict[str, PeerFigure]
    absent_peers: dict[str, str]

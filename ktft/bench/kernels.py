"""Times the routed experts of one layer, forward and forward+backward, beside torch's own bf16 matmul per expert.

    python -m ktft.bench.kernels --help

Each case prints one JSON line on stdout and ends in a table on stderr. Useful FLOPs are 6·T·k·H·I forward and as many
again backward; LoRA and packing are inside the time, not inside the FLOPs. ktft and torch take turns, the figures are
medians of the paired runs.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table

from ktft import native
from ktft.config import PROJECTIONS
from ktft.lora import ExpertLora, LoraPair
from ktft.model.autograd import routed_experts


@dataclass(frozen=True)
class Shape:
    """One layer: experts held here, experts per token, sizes."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int


SHAPES = {
    "deepseek-v3": Shape(32, 8, 7168, 2048),  # 32 of the model's 256 experts
    "qwen3-30b-a3b": Shape(128, 8, 2048, 768),
    "deepseek-v2-lite": Shape(64, 6, 2048, 1408),
    "small": Shape(16, 4, 1024, 512),
}


@dataclass(frozen=True)
class Result:
    """Medians of one case; `speedup` is torch's time over ktft's, run by run."""

    shape: str
    tokens: int
    format: str
    isa: str
    threads: int
    rank: int
    step: str
    ms: float
    tflops: float
    torch_ms: float
    speedup: float


def _layer(shape: Shape, fmt: str, runtime: native.Runtime) -> native.ExpertLayer:
    layer = native.ExpertLayer(
        runtime,
        num_experts=shape.num_experts,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        format=fmt,
    )
    for expert in range(shape.num_experts):
        for name in PROJECTIONS:
            layer.load(expert, name, torch.randn(_dims(shape, name), dtype=torch.bfloat16) / 64)
    return layer


def _dims(shape: Shape, projection: str) -> tuple[int, int]:
    dims = (shape.intermediate_size, shape.hidden_size)
    return dims[::-1] if projection == "down_proj" else dims


def _lora(shape: Shape, rank: int) -> ExpertLora | None:
    if rank == 0:
        return None
    pairs = {}
    for name in PROJECTIONS:
        outputs, inputs = _dims(shape, name)
        a = torch.randn(shape.num_experts, rank, inputs) / inputs**0.5
        b = torch.randn(shape.num_experts, outputs, rank) / rank**0.5
        pairs[name] = LoraPair(a.requires_grad_(), b.requires_grad_(), 1.0)
    return ExpertLora(pairs)


def _torch_experts(shape: Shape) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Frozen bf16 experts as stock torch code computes them, without LoRA."""
    w = {n: torch.randn(shape.num_experts, *_dims(shape, n), dtype=torch.bfloat16) / 64 for n in PROJECTIONS}

    def run(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in index.unique().tolist():
            token, slot = torch.where(index == expert)
            rows = x[token]
            h = F.silu(F.linear(rows, w["gate_proj"][expert])) * F.linear(rows, w["up_proj"][expert])
            y = F.linear(h, w["down_proj"][expert]) * weights[token, slot, None].to(x.dtype)
            out = out.index_add(0, token, y)
        return out

    return run


def _time(run: Callable[[], torch.Tensor], backward: bool) -> float:
    start = time.perf_counter()
    out = run()
    if backward:
        out.backward(torch.ones_like(out))
    return time.perf_counter() - start


def measure(name: str, shape: Shape, tokens: int, fmt: str, rank: int, runs: int) -> list[Result]:
    """Forward and forward+backward of one case."""
    runtime = native.runtime()
    layer, lora, stock = _layer(shape, fmt, runtime), _lora(shape, rank), _torch_experts(shape)
    x = torch.randn(tokens, shape.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    index = torch.rand(tokens, shape.num_experts).topk(shape.top_k).indices
    weights = torch.full(index.shape, 1 / shape.top_k)
    flops = 6 * tokens * shape.top_k * shape.hidden_size * shape.intermediate_size
    results = []
    for step, backward in (("forward", False), ("forward+backward", True)):
        pairs = [
            (
                _time(lambda: routed_experts(layer, x, index, weights, lora), backward),
                _time(lambda: stock(x, index, weights), backward),
            )
            for _ in range(runs + 1)
        ][1:]
        ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        tflops = flops * (2 if backward else 1) / ours / 1e12
        speedup = statistics.median(b / a for a, b in pairs)
        results.append(
            Result(
                name, tokens, fmt, runtime.isa, runtime.threads, rank, step, ours * 1e3, tflops, theirs * 1e3, speedup
            )
        )
    return results


def main(
    shape: Annotated[list[str] | None, typer.Option(help=f"one of {', '.join(SHAPES)}; repeatable")] = None,
    tokens: Annotated[list[int] | None, typer.Option(help="tokens in the batch; repeatable")] = None,
    fmt: Annotated[list[str] | None, typer.Option("--format", help="expert format; repeatable")] = None,
    rank: Annotated[int, typer.Option(help="LoRA rank, 0 for none")] = 8,
    runs: Annotated[int, typer.Option(help="timed runs a case")] = 7,
) -> None:
    """Time the expert kernels on this machine."""
    torch.set_num_threads(native.runtime().threads)
    table = Table("shape", "tokens", "format", "step", "ms", "TFLOPS", "torch bf16 ms", "torch / ktft")
    for name in shape or ["small"]:
        for count in tokens or [64, 1024]:
            for kind in fmt or native.FORMATS:
                for r in measure(name, SHAPES[name], count, kind, rank, runs):
                    print(json.dumps(asdict(r)), flush=True)
                    table.add_row(
                        r.shape,
                        str(r.tokens),
                        r.format,
                        r.step,
                        f"{r.ms:.2f}",
                        f"{r.tflops:.3f}",
                        f"{r.torch_ms:.2f}",
                        f"{r.speedup:.2f}",
                    )
    Console(stderr=True).print(table)


if __name__ == "__main__":
    typer.run(main)

"""Check and time the arithmetic of experts on a GPU: the numeric contract for every format, rates at a real shape.

    python tests/scripts/cuda_lanes.py [--device cuda] [--skip-times] [--hidden 2048 --intermediate 768 --experts 16]

Prints the relative L2 errors of the output and of every gradient against the fp32 reference, with Triton's kernels and
with torch's operations. Then, for decoding, forward and backward of one chunk, it prints the device's time, the host's
time for launching, GB/s and TFLOP/s. A call that waits for the device is an error. A failed case is printed with its
traceback and the others still run; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measuring import attempt, end, failed, part, random_layer, random_lora

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import contract as kernels
from lanes import Lane, adapters, blocks

from ktft import native, reference
from ktft.config import EXPERT_FORMATS
from ktft.lanes.ops import torch_ops
from ktft.lanes.ops.chunk import chunk_backward, chunk_forward, decode, place
from ktft.lanes.ops.interface import Operations, has_triton
from ktft.lanes.ops.weights import ChunkWeights
from ktft.lanes.routes import Routes, lay_out
from ktft.swiglu import GELU_TANH, RELU2, Swiglu, clamped_after

ISA = native.default_isa()
ACTIVATIONS = {"GELU": GELU_TANH, "clamped after SiLU": clamped_after(7.0), "no gate": RELU2}
ROWS = (300, 17, 0, 65, 128)
Case = tuple[native.ExpertLayer, Any, tuple[Any, ...], Callable[..., Any]]


def implementations(device: str) -> dict[str, Operations]:
    """The implementations that run on a device, by name."""
    found: dict[str, Operations] = {}
    if device == "cuda" and has_triton():
        from ktft.lanes.ops import triton_ops

        found["triton"] = triton_ops
    return found | {"torch": torch_ops}


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """The name of each case, and a function that makes its layer, LoRA, inputs and oracle."""

    def plain(fmt: str, hidden: int, intermediate: int, rank: int, nodes: int, dtype: torch.dtype) -> Case:
        layer = kernels.make_layer(hidden, intermediate, fmt, ISA, nodes=nodes)
        lora = kernels.make_lora(hidden, intermediate, rank, torch.float32) if rank else None
        return layer, lora, kernels.inputs_for(ROWS, hidden, dtype), reference.moe

    def dropping(fmt: str) -> Case:
        layer = kernels.make_layer(160, 288, fmt, ISA, nodes=2)
        lora = kernels.make_lora(160, 288, 33, torch.float32, dropout=0.2, seed=2**63 + 5)
        return layer, lora, kernels.inputs_for(ROWS, 160), kernels.dropout_oracle

    def gpt_oss(fmt: str) -> Case:
        layer = kernels.make_gated(160, 288, fmt, ISA, nodes=2, swiglu=kernels.GPT_OSS)
        lora = kernels.small_lora(160, 288, 8, torch.float32)
        return layer, lora, kernels.inputs_for(ROWS, 160), kernels.gated_oracle(layer)

    def activated(fmt: str, swiglu: Swiglu) -> Case:
        layer = kernels.make_layer(160, 288, fmt, ISA, nodes=2, swiglu=swiglu)
        lora = kernels.small_lora(160, 288, 8, torch.float32, names=layer.projections)
        return layer, lora, kernels.inputs_for(ROWS, 160), kernels.gated_oracle(layer)

    bf16 = torch.bfloat16
    for fmt in EXPERT_FORMATS:
        yield f"{fmt} no LoRA", functools.partial(plain, fmt, 160, 288, 0, 3, bf16)
        yield f"{fmt} r=8", functools.partial(plain, fmt, 512, 384, 8, 1, bf16)
        yield f"{fmt} r=33 dropout", functools.partial(dropping, fmt)
        yield f"{fmt} gpt-oss", functools.partial(gpt_oss, fmt)
        for name, swiglu in ACTIVATIONS.items():
            yield f"{fmt} {name}", functools.partial(activated, fmt, swiglu)
    yield "int8 r=256", functools.partial(plain, "int8", 256, 128, 256, 1, bf16)
    yield "int8 r=1 fp16", functools.partial(plain, "int8", 64, 160, 1, 2, torch.float16)
    yield "int8 r=16 fp32", functools.partial(plain, "int8", 64, 160, 16, 2, torch.float32)


def check(device: str) -> None:
    """Print the errors of every case."""
    names = ("output", "hidden_states", "top_k_weights", *(f"{p}.lora_{m}" for p in kernels.PROJECTIONS for m in "AB"))
    print("relative L2 error, %", " ".join(n.replace("_proj.lora_", ".").replace("_states", "") for n in names))
    for name, make in cases():
        for kind, ops in implementations(device).items():
            with attempt(f"{name} {kind}"):
                layer, lora, inputs, oracle = make()
                errors = kernels.compare(layer, lora, *inputs, oracle=oracle, forward=Lane(device, ops, piece_rows=200))
                over = any(not error <= kernels.limits(errors)[n] for n, error in errors.items())
                shown = " ".join(f"{100 * errors[n]:6.3f}" if n in errors else "     -" for n in names)
                print(f"{name:22} {kind:7} {shown} {'OVER THE CONTRACT' if over else ''}", flush=True)
                failed.extend([f"{name} {kind}"] if over else [])


def timed(call: Callable[[], Any], repeats: int = 10) -> tuple[float, float]:
    """Milliseconds on the device and on the host, the least of several calls."""
    for _ in range(3):
        call()
    device, host = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.set_sync_debug_mode("error")
        try:
            first.record()
            began = time.perf_counter()
            call()
            host.append((time.perf_counter() - began) * 1e3)
            last.record()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        device.append(first.elapsed_time(last))
    return min(device), min(host)


def time_format(fmt: str, args: argparse.Namespace) -> None:
    """Print the rates of a chunk in one format."""
    hidden, intermediate, experts = args.hidden, args.intermediate, list(range(args.experts))
    device = torch.device("cuda")
    layer = random_layer(native.runtime(), fmt, len(experts), hidden, intermediate)
    packed, parts = blocks(layer, experts, device), layer.slices()
    lora = adapters(random_lora(layer, args.rank), experts, device)
    for kind, ops in implementations("cuda").items():
        weights = ChunkWeights.empty(layer, len(experts), lora, device)
        ms, host = timed(lambda w=weights, o=ops: decode(fmt, parts, packed, w, o))
        place(lora, weights, ops)
        moved = weights.gate_up.values.nbytes + weights.down.values.nbytes + sum(block.nbytes for block in packed)
        print(f"{fmt:6} {kind:7} decode             {ms:8.3f} ms  host {host:6.3f} ms  {moved / ms / 1e6:7.0f} GB/s")
        for rows in args.rows:
            index = torch.arange(rows * len(experts)).view(-1, 1) % len(experts)
            laid = lay_out(Routes(index.to(device), [rows] * len(experts)), [experts])[0]
            x = torch.randn(len(index), hidden, dtype=torch.bfloat16, device=device)
            routing = torch.rand(index.shape, device=device)
            out, grad_weights = torch.zeros(x.shape, device=device), torch.zeros_like(routing)
            common = weights, lora, laid, x, routing, layer.swiglu
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            passes = {
                "forward": (6, lambda c=common, o=ops, y=out: chunk_forward(*c, y, o)),
                "backward": (10, lambda c=common, o=ops, y=out, g=grad_weights, dy=x: chunk_backward(*c, dy, y, g, o)),
            }
            for name, (products, call) in passes.items():
                ms, host = timed(call)
                flops = products * len(index) * hidden * intermediate
                peak = (torch.cuda.max_memory_allocated() - before) / 2**20
                print(
                    f"{fmt:6} {kind:7} {name:8} {rows:5} rows {ms:8.3f} ms  host {host:6.3f} ms  "
                    f"{flops / ms / 1e9:7.1f} TFLOP/s  {peak:6.0f} MiB",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cpu checks the script itself, without times")
    parser.add_argument("--skip-times", action="store_true")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--experts", type=int, default=16, help="in the timed chunk")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256, 1024], help="rows of an expert")
    parser.add_argument("--formats", nargs="+", default=list(EXPERT_FORMATS))
    args = parser.parse_args()
    if not args.skip_checks:
        check(args.device)
    for fmt in [] if args.skip_times or args.device == "cpu" else args.formats:
        with part(f"times of {fmt}"):
            time_format(fmt, args)
    end()


if __name__ == "__main__":
    main()

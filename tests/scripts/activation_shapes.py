"""The numeric contract at released models' sizes where experts do not compute SiLU(gate) · up.

    python tests/scripts/activation_shapes.py [--device cpu] [--isas avx2,amx_bf16] [--formats k4,int8]

For each shape, every ISA of this CPU and, on a GPU, both implementations of the lanes there are compared
with the fp32 reference: output and all gradients, with LoRA on every projection. Emulated tiles are left out where the
CPU has native ones, which run the same code. Exits 1 if an error is over the contract.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import end, failed, part

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import contract as kernels
from cuda_lanes import implementations
from lanes import Lane

from ktft import native
from ktft.swiglu import GELU_TANH, RELU2

SHAPES = {
    "gpt-oss": (2880, 2880, kernels.GPT_OSS),
    "Gemma-4 26B-A4B": (2816, 704, GELU_TANH),
    "Nemotron-3 Nano": (2688, 1856, RELU2),
}
ROWS = (300, 17, 0, 65, 128)


def show(name: str, way: str, errors: dict[str, float]) -> None:
    over = any(not error <= kernels.limits(errors)[key] for key, error in errors.items())
    worst = max((key for key in errors if key != "output"), key=errors.__getitem__)
    print(
        f"{name:24} {way:12} output {100 * errors['output']:.3f}%, worst gradient {100 * errors[worst]:.3f}% ({worst})"
        f"{' OVER THE CONTRACT' if over else ''}",
        flush=True,
    )
    failed.extend([f"{name} {way}"] if over else [])


def check(name: str, fmt: str, isas: list[str], device: str, threads: int) -> None:
    hidden, intermediate, swiglu = SHAPES[name]
    lora = kernels.small_lora(hidden, intermediate, 8, torch.float32, names=swiglu.projections)
    inputs = kernels.inputs_for(ROWS, hidden)
    make: Callable[..., Any] = kernels.make_gated if name == "gpt-oss" else kernels.make_layer
    for isa in isas:
        layer = make(hidden, intermediate, fmt, isa, threads, 1, swiglu=swiglu)
        oracle = kernels.gated_oracle(layer)
        show(f"{name} {fmt}", isa, kernels.compare(layer, lora, *inputs, "recompute", oracle))
    for kind, ops in implementations(device).items():
        errors = kernels.compare(layer, lora, *inputs, oracle=oracle, forward=Lane(device, ops))
        show(f"{name} {fmt}", f"{device} {kind}", errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    best = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=best, help="of the lanes [%(default)s]")
    all_isas = [isa for isa in native.isas() if not (isa == "amx_emu" and kernels.NATIVE_TILES)]
    parser.add_argument("--isas", default=",".join(all_isas), help="[%(default)s]")
    parser.add_argument("--formats", default="bf16,int8,k4", help="[%(default)s]")
    parser.add_argument("--threads", type=int, default=native.runtime().threads)
    args = parser.parse_args()
    for fmt in args.formats.split(","):
        for name in SHAPES:
            with part(f"{name}, {fmt}"):
                check(name, fmt, args.isas.split(","), args.device, args.threads)
    end()


if __name__ == "__main__":
    main()

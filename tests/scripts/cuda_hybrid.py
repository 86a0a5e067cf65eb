"""CPU experts in the order of a CUDA stream: their results, costs and rates, printed part by part.

    python tests/scripts/cuda_hybrid.py [--out hybrid.json] [--formats int8 k4] [--layers 12] [--threads 8 15 16]

Needs a CUDA GPU, torch and ktft's core, and about 8 GB of host memory for 12 layers. Parts: (1) eager calls and
replayed graphs give exactly the native layer's bits at 1 to 32 tokens, with and without LoRA, through changes of
adapters and errors; (2) microseconds that a layer without experts costs in a replayed graph, for its copies alone and
with submit and wait, in each way; (3) a layer's time in a replayed graph at the shape of Qwen3-30B-A3B, compared with
direct calls, with the job itself and with the time needed to read the chosen experts.
A failed part is reported and the others still run; the exit status is 1 if any part failed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from measuring import end, failed, milliseconds, part, random_layer, random_lora
from torch import Tensor

from ktft import native
from ktft.lora import ExpertLora
from ktft.native import ELSEWHERE, ExpertLayer, HostExperts, HostExpertsError, StreamedMemory

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K, RANK = 128, 2048, 768, 8, 8
WAYS = ("words", "host_functions")
EMPTY_LAYERS = 48
found: dict[str, Any] = {}


class Inputs:
    """A call's inputs on the device. `draw` replaces their values in place."""

    def __init__(self, tokens: int, experts: int, hidden: int, index_dtype: torch.dtype = torch.int64) -> None:
        self.experts = experts
        self.x = torch.empty(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        self.index = torch.empty(tokens, TOP_K, device="cuda", dtype=index_dtype)
        self.weights = torch.empty(tokens, TOP_K, device="cuda")
        self.of_token = torch.zeros(tokens, device="cuda", dtype=torch.int32)
        self.draw(0)

    def draw(self, seed: int, elsewhere: float = 0.0) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        tokens, drawn = len(self.x), {"generator": generator, "device": "cuda"}
        self.x.copy_(torch.randn(self.x.shape, **drawn))
        index = torch.rand(tokens, self.experts, **drawn).argsort(1)[:, :TOP_K]
        self.index.copy_(index.masked_fill(torch.rand(index.shape, **drawn) < elsewhere, ELSEWHERE))
        self.weights.copy_(torch.rand(self.weights.shape, **drawn))

    def direct(self, layer: ExpertLayer, lora: ExpertLora | None) -> Tensor:
        return layer.forward(self.x.cpu(), self.index.cpu(), self.weights.cpu(), lora, "none")[0]


def host_of(runtime: native.Runtime, hidden: int, **options: Any) -> HostExperts:
    sizes = {"max_tokens": 32, "hidden_size": hidden, "top_k": TOP_K, "dtype": torch.bfloat16}
    return HostExperts(runtime, "cuda", **sizes, **options)


def through(host: HostExperts, layer: ExpertLayer, at: Inputs, between: Callable[[], None] = lambda: None) -> Tensor:
    stream = torch.cuda.current_stream().cuda_stream
    host.submit(layer, at.x, at.index, at.weights, at.of_token, stream=stream)
    between()
    return host.wait(layer, len(at.x), stream=stream)


def captured(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = work()
    return graph, out


def same(name: str, actual: Tensor, expected: Tensor) -> None:
    if not torch.equal(actual.cpu(), expected):
        error = (actual.cpu().float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-9)
        raise AssertionError(f"{name}: not the native layer's bits, relative difference {error:.2e}")


def compare(host: HostExperts, layer: ExpertLayer, tokens: int, loras: list[ExpertLora | None]) -> int:
    """Compare eager calls and replays with direct calls at one size, changing adapters. Returns how many were equal."""
    square = torch.randn(1024, 1024, device="cuda")
    at = Inputs(tokens, layer.num_experts, layer.hidden_size, torch.int32 if tokens % 2 else torch.int64)

    def work() -> Tensor:
        return through(host, layer, at, lambda: square @ square)

    work()
    graph, out = captured(work)
    for seed, lora in enumerate(loras):
        torch.cuda.synchronize()
        host.set_adapter(layer, 0, None if lora is None else layer.keep_lora(lora))
        at.draw(seed + 10 * tokens, elsewhere=(0.0, 0.5, 1.0)[(seed + tokens) % 3])
        eager = work()
        graph.replay()
        torch.cuda.synchronize()
        host.check()
        expected = at.direct(layer, lora)
        same(f"{layer.format}, {tokens} tokens, eager", eager, expected)
        same(f"{layer.format}, {tokens} tokens, graph", out, expected)
    return 2 * len(loras)


def refuse(host: HostExperts, layer: ExpertLayer) -> None:
    """A replay with an expert out of range raises an error, and outputs are zero from then on."""
    at = Inputs(8, layer.num_experts, layer.hidden_size)
    graph, out = captured(lambda: through(host, layer, at))
    at.index[3, 2] = layer.num_experts
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        try:
            host.check()
        except HostExpertsError as error:
            print(f"   raised: {error}")
        else:
            raise AssertionError("an expert out of range in a replay was not noticed")
        if out.any():
            raise AssertionError("after an error outputs must be zero")
        at.draw(1)


def correctness(runtime: native.Runtime, way: str) -> None:
    """Compare every format, number of tokens and adapter."""
    shape, compared = (16, 512, 256), 0
    for fmt in ("bf16", "int8", "k4"):
        layer = random_layer(runtime, fmt, *shape)
        loras = [None, random_lora(layer, RANK), random_lora(layer, RANK)]
        host = host_of(runtime, shape[1], through=way)
        compared += sum(compare(host, layer, tokens, loras) for tokens in range(1, 33))
        refuse(host, layer)
        host.close()
    print(f"   {compared} outputs are the native layer's bits, 1 to 32 tokens, eager and replayed, through {way}")


def overhead(runtime: native.Runtime, way: str) -> None:
    """Time layers without local experts, all in one graph."""
    shape = (16, HIDDEN, 256)
    layer = random_layer(runtime, "k4", *shape)
    host = host_of(runtime, HIDDEN, through=way)
    for tokens in (1, 8, 32):
        at = Inputs(tokens, shape[0], HIDDEN, torch.int32)
        at.index.fill_(ELSEWHERE)
        graph, _ = captured(lambda at=at: [through(host, layer, at) for _ in range(EMPTY_LAYERS)])
        replayed = milliseconds(graph.replay, 50) / EMPTY_LAYERS * 1e3
        eager = milliseconds(lambda at=at: [through(host, layer, at) for _ in range(EMPTY_LAYERS)], 20)
        eager *= 1e3 / EMPTY_LAYERS
        before = host.seconds(layer)
        graph.replay()
        torch.cuda.synchronize()
        job = (host.seconds(layer) - before) / EMPTY_LAYERS * 1e6
        print(
            f"   {way:14} {tokens:2} tokens: {replayed:6.1f} us a layer replayed, of which the empty job {job:5.1f}; "
            f"{eager:6.1f} eager",
            flush=True,
        )
        found.setdefault("overhead_us", {}).setdefault(way, {})[tokens] = {"layer": replayed, "job": job}
        host.check()
        del graph
    host.close()


def copies_alone() -> None:
    """Time the copies of a layer in a graph without any host function."""
    host_x, host_index, host_weights = (
        torch.empty(1, n, dtype=d, pin_memory=True)
        for n, d in ((HIDDEN, torch.bfloat16), (TOP_K, torch.int32), (TOP_K, torch.float32))
    )
    at = Inputs(1, EXPERTS, HIDDEN, torch.int32)

    def work() -> None:
        for _ in range(EMPTY_LAYERS):
            for to, source in ((host_x, at.x), (host_index, at.index), (host_weights, at.weights), (at.x, host_x)):
                to.copy_(source, non_blocking=True)

    graph, _ = captured(work)
    taken = milliseconds(graph.replay, 50) / EMPTY_LAYERS * 1e3
    print(f"   four copies of a layer at 1 token: {taken:.1f} us")
    found["copies_us"] = taken


def overlap(runtime: native.Runtime, layers: list[ExpertLayer]) -> None:
    """Check that GPU work between submit and wait overlaps the CPU's work."""
    host, at = host_of(runtime, HIDDEN), Inputs(8, EXPERTS, HIDDEN)
    square, out = torch.randn(4096, 4096, device="cuda"), torch.empty(4096, 4096, device="cuda")

    def multiply() -> None:
        torch.mm(square, square, out=out)

    both, _ = captured(lambda: [through(host, layer, at, multiply) for layer in layers])
    cpu, _ = captured(lambda: [through(host, layer, at) for layer in layers])
    gpu, _ = captured(lambda: [multiply() for _ in layers])
    times = {name: milliseconds(graph.replay, 10) for name, graph in (("both", both), ("cpu", cpu), ("gpu", gpu))}
    print(f"   CPU experts {times['cpu']:.2f} ms, GPU products {times['gpu']:.2f} ms, both {times['both']:.2f} ms")
    found["overlap_ms"] = times
    if times["both"] > 0.85 * (times["cpu"] + times["gpu"]):
        raise AssertionError("the GPU's work between submit and wait does not overlap the CPU's")
    del both, cpu, gpu
    host.close()


def bandwidth(fmt: str, threads: int, layers: list[ExpertLayer], lora: bool, tokens_of: list[int]) -> None:
    """Compare a layer's time, replayed and called directly, with the time needed to read its chosen experts."""
    runtime = layers[0].runtime
    read = max(StreamedMemory(runtime, 1 << 30).read() for _ in range(2))
    host = host_of(runtime, HIDDEN)
    adapters = random_lora(layers[0], RANK) if lora else None
    for layer in layers:
        host.set_adapter(layer, 0, None if adapters is None else layer.keep_lora(adapters))
    for tokens in tokens_of:
        calls = [Inputs(tokens, EXPERTS, HIDDEN, torch.int32) for _ in layers]
        for number, at in enumerate(calls):
            at.draw(number)
        graph, _ = captured(lambda calls=calls: [through(host, la, at) for la, at in zip(layers, calls, strict=True)])
        graph.replay()
        torch.cuda.synchronize()
        runtime.take_phases()
        before = sum(host.seconds(layer) for layer in layers)
        graph.replay()
        torch.cuda.synchronize()
        busy = (sum(host.seconds(layer) for layer in layers) - before) / len(layers) * 1e6
        phases = {name: round(s / len(layers) * 1e6, 1) for name, s in runtime.take_phases().items()}
        replayed = milliseconds(graph.replay, 12) / len(layers) * 1e3
        on_cpu = [(at.x.cpu(), at.index.long().cpu(), at.weights.cpu()) for at in calls]

        def direct(on_cpu: list[tuple[Tensor, ...]] = on_cpu) -> None:
            for layer, call in zip(layers, on_cpu, strict=True):
                layer.forward(*call, adapters, "none")

        alone = milliseconds(direct, 12) / len(layers) * 1e3
        chosen = statistics.mean(len(at.index.unique()) for at in calls)
        size = chosen * layers[0].packed_bytes / EXPERTS
        bound = size / read * 1e6
        row = {"format": fmt, "threads": runtime.threads, "through": host.through, "lora": lora, "tokens": tokens,
               "experts": chosen, "us": replayed, "direct_us": alone, "busy_us": busy, "bound_us": bound,
               "percent": 100 * bound / replayed, "read_gb_s": read / 1e9, "phases_us": phases}  # fmt: skip
        found.setdefault("bandwidth", []).append(row)
        print(
            f"   {fmt} {runtime.threads:2} threads {host.through} {'LoRA' if lora else '    '} {tokens:2} tokens "
            f"{chosen:5.1f} experts {size / 1e6:6.1f} MB: {replayed:7.1f} us a layer, {row['percent']:5.1f}% of "
            f"the bound {bound:6.1f} us at {read / 1e9:.0f} GB/s; job {busy:.1f}, "
            f"beyond it {replayed - busy:.1f}, direct {alone:.1f} us; {phases}",
            flush=True,
        )
        del graph
    host.check()
    host.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="where to write everything found, as JSON")
    parser.add_argument("--formats", nargs="+", default=["k4", "int8"])
    parser.add_argument("--layers", type=int, default=12, help="enough of Qwen3-30B-A3B's shape to exceed every cache")
    parser.add_argument("--threads", type=int, nargs="+", help="by default the physical cores, and one fewer")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    args = parser.parse_args()
    cores = native.topology()["cores"]
    cpus = sum(len(node["cpus"]) for node in native.topology()["nodes"])
    counts = args.threads or sorted({max(n, 1) for n in (cores, cores - 1)}, reverse=True)
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(f"{device}, {native.default_isa()}, {cores} cores, {cpus} CPUs")
    runtime = native.runtime(max(cores - 1, 1))
    for way in WAYS:
        with part(f"1. the native layer's bits, through {way}"):
            correctness(runtime, way)
    with part("2. a layer without experts"):
        copies_alone()
        for way in WAYS:
            overhead(runtime, way)
    for fmt in args.formats:
        with part(f"3. {fmt} at Qwen3-30B-A3B's shape, {args.layers} layers"):
            for number, threads in enumerate(counts):
                shape = (fmt, EXPERTS, HIDDEN, INTERMEDIATE)
                layers = [random_layer(native.runtime(threads), *shape) for _ in range(args.layers)]
                print(f"   {args.layers} layers of {layers[0].packed_bytes / 1e9:.2f} GB are in memory", flush=True)
                if number == 0 and fmt == args.formats[0]:
                    overlap(layers[0].runtime, layers)
                bandwidth(fmt, threads, layers, False, args.tokens)
                bandwidth(fmt, threads, layers, True, [1])
                del layers
    if args.out:
        with open(args.out, "w") as file:
            json.dump(found | {"failed": failed}, file, indent=1)
    end()


if __name__ == "__main__":
    main()

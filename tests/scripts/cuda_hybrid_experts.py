"""Check and time the routed experts of serving on a GPU: CPU, residents, prefill lanes, deferral, CUDA graphs.

    python tests/scripts/cuda_hybrid_experts.py [--device cuda] [--skip-times] [--layers 8 --formats k4 int8]

First come relative L2 errors against the fp32 reference for 1 to 32 tokens and a prefill, by format, adapter and number
of residents. Then replays of a CUDA graph of three layers must equal eager calls bit for bit, with other inputs,
adapters and residents than the graph was captured with, and with deferral. Then decoding is timed at a real shape
through graphs of all layers: milliseconds a layer without residents and with the hottest 20% of the experts resident,
whose share of the routing is printed. Prefill is timed last. A failed case is printed with its traceback and the others
still run; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measuring import attempt, end, failed, milliseconds, part, random_layer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import contract as kernels

from ktft import native, reference
from ktft.checkpoint.routing_profile import Routing
from ktft.lanes import passes
from ktft.lanes.decide.costs import Rate, Rates
from ktft.lora import ExpertLora
from ktft.native import ExpertLayer
from ktft.serve.runtime.hybrid_experts import HybridModel

TOP_K, LAYERS = 3, 3
TOLERANCE = 0.005
GOAL = 1.3
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def small_layer(fmt: str, hidden: int, intermediate: int) -> ExpertLayer:
    """A layer of five experts, split over all NUMA nodes."""
    runtime = native.runtime()
    return kernels.make_layer(hidden, intermediate, fmt, native.default_isa(), runtime.threads, runtime.nodes)


def on(device: str, given: Batch) -> Batch:
    """Move a batch to a device."""
    x, index, weights = given
    return x.to(device), index.to(device), weights.to(device)


def profile(layers: dict[int, ExpertLayer], residents: int) -> Routing:
    """A profile that makes this many experts of each layer resident."""
    return Routing({n: [int(e < residents) for e in range(layer.num_experts)] for n, layer in layers.items()})


def make(layers: dict[int, ExpertLayer], device: str, residents: int, rank: int = 0, **options: Any) -> HybridModel:
    """A model with this many residents in each layer."""
    given: dict[str, Any] = {"top_k": TOP_K, "dtype": torch.bfloat16, "adaptive": False, **options}
    if residents:
        width = -(-rank // 16) * 16
        each = max(layer.packed_bytes // layer.num_experts for layer in layers.values()) + 512
        sizes = [3 * (layer.hidden_size + layer.intermediate_size) for layer in layers.values()]
        given["gpu_expert_memory"] = (each + 2 * width * max(sizes)) * residents * len(layers)
        given["routing"] = profile(layers, residents)
    return HybridModel(layers, device, max_lora_rank=rank, **given)


def wear(model: HybridModel, loras: dict[int, ExpertLora] | None, tokens: int) -> None:
    """Serve this adapter, or none, and begin a step of its tokens."""
    model.remove_adapter(1)
    if loras is not None:
        model.add_adapter(1, dict(loras), {})
    model.step.set([1] * tokens, model.adapters)


def check_contract(device: str, fmt: str, rank: int) -> None:
    """Check every number of tokens with every number of residents."""
    layer = small_layer(fmt, 512, 384)
    lora = kernels.make_lora(512, 384, rank, torch.float32) if rank else None
    weights = [w.to(device) for w in kernels.dequantized(layer)]
    there = lora and ExpertLora(
        {n: type(p)(p.a.detach().to(device), p.b.detach().to(device), p.scaling) for n, p in lora.pairs.items()}
    )
    worst = {}
    for residents in (0, 2, kernels.EXPERTS):
        for placement in ("stream", "auto") if residents == 2 else ("auto",):
            model = make({0: layer}, device, residents, rank, placement=placement)
            for tokens in (*(range(1, 33) if placement == "auto" else ()), 256):
                if lora:
                    wear(model, {0: lora}, tokens)
                given = on(device, kernels.random_inputs(tokens, 512, TOP_K, tokens))
                expected = reference.moe(given[0].float(), *given[1:], *weights, there)
                error = kernels.relative(model.layers[0](*given), expected)
                name = f"{residents} resident, {placement if tokens > 32 else 'few'}"
                worst[name] = max(worst.get(name, 0.0), error)
            if device == "cuda":
                torch.cuda.synchronize()
            model.check()
            found = {lane: each["pairs"] for lane, each in model.status()["lanes"].items()}
            worst[f"{residents} resident, few"] = worst.get(f"{residents} resident, few", 0.0)
            if residents and not found["resident"]:
                raise AssertionError(f"no resident was used: {found}")
            model.close()
    shown = "  ".join(f"{name} {100 * error:.3f}" for name, error in worst.items())
    print(f"{fmt:6} r={rank:<3} {shown}", flush=True)
    if not max(worst.values()) < TOLERANCE:
        raise AssertionError(f"over {100 * TOLERANCE}%")


class Captured:
    """A CUDA graph of all layers of a model, each with its own inputs. On the CPU, plain calls."""

    def __init__(self, model: HybridModel, batches: list[Batch]) -> None:
        self.model, self.batches = model, batches
        self.eager()
        self.graph = None
        if model.device.type == "cuda":
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.outs = self.eager()

    def eager(self) -> list[torch.Tensor]:
        """Call the layers in order."""
        return [experts(*given) for experts, given in zip(self.model.layers.values(), self.batches, strict=True)]

    def replay(self) -> list[torch.Tensor]:
        """Replay the graph and copy its outputs."""
        if self.graph is None:
            return self.eager()
        self.graph.replay()
        torch.cuda.synchronize()
        self.model.check()
        return [out.clone() for out in self.outs]

    def refill(self, batches: list[Batch]) -> None:
        """Replace the inputs in place."""
        for mine, theirs in zip(self.batches, batches, strict=True):
            for tensor, value in zip(mine, theirs, strict=True):
                tensor.copy_(value)


def check_capture(device: str, fmt: str, deferral: int) -> None:
    """Replays equal eager calls, whatever has changed since the capture."""
    layers = {n: small_layer(fmt, 512, 384) for n in range(LAYERS)}
    model = make(layers, device, 2, 16, deferral=deferral)
    model.decoding = lambda: True
    torch.manual_seed(0)
    loras = [None, *({n: kernels.make_lora(512, 384, rank, torch.float32) for n in layers} for rank in (16, 5))]
    done = 0
    for tokens in (1, 2, 7, 16, 32):
        wear(model, None, tokens)
        graph = Captured(model, [on(device, kernels.random_inputs(tokens, 512, TOP_K, n)) for n in layers])
        for seed, lora in enumerate(loras):
            wear(model, lora, tokens)
            graph.refill([kernels.random_inputs(tokens, 512, TOP_K, 100 * seed + n) for n in layers])
            if seed == 1:  # other experts come, between two replays
                model.hot.residents.observe(layers[0], [0, 0, 0, 0, 1000])
                model.hot.adapt(1 << 30)
                if device == "cuda":
                    torch.cuda.synchronize()
                model.hot.follow()
            for replayed, eager in zip(graph.replay(), graph.eager(), strict=True):
                if not torch.equal(replayed, eager):
                    raise AssertionError(f"{tokens} tokens, adapter {seed}: replay differs from eager")
                done += 1
    print(f"{fmt:6} deferral {deferral}: {done} outputs of replays are those of eager calls, bit for bit", flush=True)
    model.close()


def zipf(tokens: int, experts: int, top_k: int, exponent: float, generator: torch.Generator) -> torch.Tensor:
    """`[T, k]`, different experts for each token; expert e is drawn with weight (e + 1)^-exponent."""
    popularity = torch.arange(1, experts + 1, dtype=torch.float64) ** -exponent
    return torch.multinomial(popularity.expand(tokens, -1), top_k, generator=generator)


def big_batch(args: argparse.Namespace, tokens: int, generator: torch.Generator) -> Batch:
    """A batch of the timed shape on the GPU."""
    index = zipf(tokens, args.experts, args.top_k, args.zipf, generator).int()
    x = torch.randn(tokens, args.hidden, generator=generator).bfloat16()
    return on("cuda", (x, index, torch.rand(tokens, args.top_k, generator=generator)))


def decode_graphs(model: HybridModel, args: argparse.Namespace, tokens: int) -> Iterator[Captured]:
    """Graphs of all layers, each with its own routing, and enough of them that no CPU cache holds the experts."""
    generator = torch.Generator().manual_seed(tokens)
    for _ in range(args.graphs):
        yield Captured(model, [big_batch(args, tokens, generator) for _ in model.layers])


def time_decode(args: argparse.Namespace, layers: dict[int, ExpertLayer], fmt: str) -> None:
    """Print the time of decoding a layer, with and without residents."""
    resident = args.experts // 5
    share = zipf(4096, args.experts, args.top_k, args.zipf, torch.Generator().manual_seed(0)).lt(resident)
    print(
        f"{fmt}: the hottest {resident} of {args.experts} experts take {100 * share.double().mean():.0f}% of the pairs"
    )
    options = {"top_k": args.top_k, "max_tokens": 32}
    models = {0: make(layers, "cuda", 0, **options), resident: make(layers, "cuda", resident, **options)}
    for tokens in args.tokens:
        found = {}
        for count, model in models.items():
            graphs = itertools.cycle(list(decode_graphs(model, args, tokens)))
            found[count] = milliseconds(lambda g=graphs: next(g).graph.replay(), seconds=args.seconds) / len(layers)
            model.check()
        alone = hot_alone(models[resident], args, tokens)
        gain = found[0] / found[resident]
        print(
            f"{fmt:6} decode {tokens:3} tokens  all on the CPU {1e3 * found[0]:7.1f} µs a layer  {resident} resident "
            f"{1e3 * found[resident]:7.1f} µs, {gain:.2f}x  residents' kernels alone {1e3 * alone:6.1f} µs"
            f"{'' if gain >= GOAL else '  UNDER ' + str(GOAL)}",
            flush=True,
        )
        failed.extend([] if gain >= GOAL else [f"{fmt} decode {tokens}"])
    for model in models.values():
        model.close()


def hot_alone(model: HybridModel, args: argparse.Namespace, tokens: int) -> float:
    """Milliseconds a layer for splitting the routing and for the residents' products, without the CPU."""
    x, index, weights = big_batch(args, tokens, torch.Generator().manual_seed(1))

    def run() -> None:
        for hot in model.hot.layers:
            blocks, _ = model.ops.route(hot, index)
            model.ops.forward(hot, x, blocks, weights)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return milliseconds(graph.replay, seconds=0.2) / len(model.layers)


def time_prefill(args: argparse.Namespace, layers: dict[int, ExpertLayer], fmt: str) -> None:
    """Print the time of a layer's prefill under `auto`, and where its experts ran."""
    model = make(layers, "cuda", args.experts // 5, top_k=args.top_k)
    model.warm_up()
    for tokens in args.prefill:
        given = big_batch(args, tokens, torch.Generator().manual_seed(tokens))

        def step(given: Batch = given) -> None:
            for experts in model.layers.values():
                experts(*given)

        for _ in range(8):  # auto tries its modes first
            step()
        before = model.status()["lanes"]
        spent = milliseconds(step, seconds=args.seconds) / len(layers)
        after = model.status()["lanes"]
        pairs = {lane: after[lane]["pairs"] - before[lane]["pairs"] for lane in after}
        shares = ", ".join(f"{lane} {100 * n / sum(pairs.values()):.0f}%" for lane, n in pairs.items())
        print(f"{fmt:6} prefill {tokens:5} tokens {spent:7.2f} ms a layer, pairs: {shares}", flush=True)
    model.close()


def _made_up_rates(*_: Any) -> Rates:
    """Made-up rates that mix the lanes. Measuring takes seconds, and the checks do not depend on it."""
    slow, quick = (
        {work: Rate(*rate) for work in ("forward", "backward")} for rate in ((1e11, 1e11, 0), (1e12, 1e11, 0))
    )
    return Rates(slow, quick, 1e11, 1e11, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cpu checks the script itself, without times")
    parser.add_argument("--skip-times", action="store_true")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--graphs", type=int, default=3, help="with different routing, replayed in turn")
    parser.add_argument("--zipf", type=float, default=0.9, help="exponent of the routing's popularity")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--prefill", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--seconds", type=float, default=1.0, help="of each timing")
    parser.add_argument("--check-formats", nargs="+", default=native.FORMATS)
    parser.add_argument("--formats", nargs="+", default=["k4", "int8"])
    args = parser.parse_args()
    if not args.skip_checks:
        measured, passes.measured_rates = passes.measured_rates, _made_up_rates
        print("worst relative L2 error, %, of 1 to 32 tokens (few) and 256")
        for fmt, rank in itertools.product(args.check_formats, (0, 20)):
            with attempt(f"{fmt} r={rank}"):
                check_contract(args.device, fmt, rank)
        for fmt, deferral in (("k4", 0), ("int8", 0), ("k4", 1)):
            with attempt(f"capture {fmt} deferral {deferral}"):
                check_capture(args.device, fmt, deferral)
        passes.measured_rates = measured
    for fmt in [] if args.skip_times or args.device == "cpu" else args.formats:
        layers: dict[int, ExpertLayer] = {}
        shape = (args.experts, args.hidden, args.intermediate)
        with part(f"layers of {fmt}"):
            layers |= {number: random_layer(native.runtime(), fmt, *shape) for number in range(args.layers)}
        with part(f"decode {fmt}"):
            time_decode(args, layers, fmt)
        with part(f"prefill {fmt}"):
            time_prefill(args, layers, fmt)
    end()


if __name__ == "__main__":
    main()

"""One model in two threads on a GPU: `python tests/scripts/cuda_threads.py [--calls 10000]`.

Two threads call layers whose experts are streamed, resident, on the CPU or placed by `auto`. First both only evaluate,
then the first one trains; every output is compared with that of a single thread. Then two threads generate with one
tiny model and must get the same text as one thread. Last, adapters change right after a forward without gradients,
which must have copied them by then. Exits 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import contract

from ktft import native
from ktft.checkpoint.families import FAMILIES
from ktft.config import PROJECTIONS, Settings
from ktft.lanes.lanes import Lanes
from ktft.lora import ExpertLora
from ktft.model.experts import KtftExperts

DEVICE = torch.device("cuda", 0)
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, LAYERS = 32, 4, 512, 256, 4
WRONG = 1e-2
"""Relative error. Rounding depends on which chunks are multiplied first."""


def make_layers(settings: Settings) -> list[KtftExperts]:
    """The layers of a model that share lanes."""
    runtime, lanes, found = native.runtime(4, 1), Lanes(settings), []
    for number in range(LAYERS):
        generator = torch.Generator().manual_seed(number)
        sizes = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
        layer = native.ExpertLayer(runtime, format="int8", name=f"layers.{number}.mlp.experts", **sizes)
        for expert in range(EXPERTS):
            for name in PROJECTIONS:
                shape = (HIDDEN, INTERMEDIATE) if name == "down_proj" else (INTERMEDIATE, HIDDEN)
                layer.load(expert, name, torch.randn(shape, generator=generator) / shape[1] ** 0.5)
        experts = KtftExperts(layer, FAMILIES["qwen3_moe"])
        experts.run_in(lanes, number)
        found.append(experts)
    return found


def make_lora(rank: int, seed: int) -> ExpertLora:
    """Adapters on all projections."""
    torch.manual_seed(seed)
    return contract.make_lora(HIDDEN, INTERMEDIATE, rank, torch.float32, experts=EXPERTS)


def batch(seed: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, experts and routing weights on the GPU."""
    hidden, index, weights = contract.random_inputs(tokens, HIDDEN, TOP_K, seed, experts=EXPERTS)
    return hidden.to(DEVICE), index.to(DEVICE), weights.to(DEVICE)


def evaluated(experts: KtftExperts, lora: ExpertLora, given: tuple[Tensor, ...]) -> list[Tensor]:
    with torch.no_grad():
        return [experts(*given, lora)]


def trained(experts: KtftExperts, lora: ExpertLora, given: tuple[Tensor, ...]) -> list[Tensor]:
    hidden, index, weights = given
    hidden = hidden.detach().requires_grad_()
    out = experts(hidden, index, weights, lora)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), [hidden, *lora.parameters()])]


def together(works: list[Callable[[], None]]) -> float:
    """Run each in a thread of its own. Returns the seconds until all have ended."""
    threads = [threading.Thread(target=work) for work in works]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def check_layers(name: str, settings: Settings, first: Callable[..., list[Tensor]], calls: int) -> int:
    """Count wrong outputs while each of two threads makes `calls` layer calls."""
    model, loras = make_layers(settings), [make_lora(8, 1), make_lora(8, 2)]
    works = [(first, loras[0], [batch(1, 1), batch(2, 24)]), (evaluated, loras[1], [batch(3, 1), batch(4, 24)])]
    expected = [[[work(e, lora, given) for given in batches] for e in model] for work, lora, batches in works]
    lanes = model[0].laned.lanes if model[0].laned is not None else None
    wrong, done, errors = [0, 0], [0, 0], list[str]()

    def run(number: int) -> None:
        work, lora, batches = works[number]
        try:
            while done[number] < calls:
                for experts, truths in zip(model, expected[number], strict=True):
                    given = done[number] // LAYERS % len(batches)
                    pairs = zip(work(experts, lora, batches[given]), truths[given], strict=True)
                    wrong[number] += any(
                        float((found - true).norm()) > WRONG * float(true.norm()) for found, true in pairs
                    )
                    done[number] += 1
                if number == 0 and lanes is not None:
                    lanes.end_step()  # residents change meanwhile
                    lanes.begin_step()
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    seconds = together([lambda: run(0), lambda: run(1)])
    print(f"{name}: {done} calls in {seconds:.0f} s, wrong {wrong}, errors {errors[:2]}", flush=True)
    return sum(wrong) + len(errors)


def check_generation(tokens: int) -> int:
    """Count answers of two threads that differ from those of one thread."""
    from tiny import write_checkpoint
    from transformers import AutoModelForCausalLM

    import ktft

    with tempfile.TemporaryDirectory() as directory:
        base = write_checkpoint("dsv3", Path(directory, "model"))
        config = ktft.KtftConfig(expert_format="int8", placement="stream")
        model = AutoModelForCausalLM.from_pretrained(
            base, quantization_config=config, dtype=torch.float32, device_map={"": 0}
        ).eval()
    prompts = [torch.arange(3 + 20 * n, 19 + 20 * n, device=DEVICE)[None] for n in range(2)]
    step = 100

    def say(prompt: Tensor) -> list[int]:
        found = model.generate(prompt, max_new_tokens=step, min_new_tokens=step, do_sample=False)
        return found[0].tolist()

    expected, wrong = [say(prompt) for prompt in prompts], [0, 0]

    def run(number: int) -> None:
        for _ in range(tokens // step):
            wrong[number] += say(prompts[number]) != expected[number]

    seconds = together([lambda: run(0), lambda: run(1)])
    print(f"generation: {tokens // step} answers of {step} tokens each in {seconds:.0f} s, wrong {wrong}", flush=True)
    return sum(wrong)


def check_adapters_after(calls: int = 50) -> int:
    """Count outputs that are wrong because the adapters changed right after the call."""
    (*_, last) = make_layers(Settings(placement="stream"))
    given, wrong = batch(5, 64), 0
    true = evaluated(last, make_lora(64, 3), given)[0]
    for _ in range(calls):
        lora = make_lora(64, 3)
        (found,) = evaluated(last, lora, given)
        with torch.no_grad():
            for parameter in lora.parameters():
                parameter.zero_()
        wrong += float((found - true).norm()) > WRONG * float(true.norm())
    print(f"adapters changed after a call: {wrong} of {calls} outputs wrong", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=10_000)
    calls = parser.parse_args().calls
    torch.manual_seed(0)
    found = check_layers("stream, both generate", Settings(placement="stream"), evaluated, calls)
    for name, settings in {
        "stream": Settings(placement="stream"),
        "resident": Settings(placement="resident", gpu_expert_memory=10 << 20),
        "auto": Settings(placement="auto", gpu_expert_memory=10 << 20),
        "cpu": Settings(placement="cpu"),
    }.items():
        found += check_layers(f"{name}, one trains", settings, trained, calls // 10)
    found += check_adapters_after()
    found += check_generation(calls // 2)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())

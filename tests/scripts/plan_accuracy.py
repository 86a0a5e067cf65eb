"""What `ktft plan` says beside what training then takes: `python tests/scripts/plan_accuracy.py [--cuda] [CASE ...]`.

Each case writes a random checkpoint, asks `ktft plan --json`, trains some steps in a process of its own through
transformers' Trainer with LLaMA-Factory's settings, and compares peak RSS (VmHWM), GPU memory and seconds a step.
`--cuda` runs what is outside of the experts on the GPU. Exits 1 when memory is off by more than 10% or time by more
than 30%. Needs no network; a quiet machine, for the times.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

MEMORY_TOLERANCE, TIME_TOLERANCE = 0.10, 0.30
WARM_STEPS = 2
WIDE: dict[str, Any] = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16}
QWEN = WIDE | {"moe_intermediate_size": 512, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 8,
               "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip
DEEPSEEK = WIDE | {"moe_intermediate_size": 704, "n_routed_experts": 48, "num_experts_per_tok": 6,
                   "num_hidden_layers": 7, "num_key_value_heads": 16, "kv_lora_rank": 256, "qk_rope_head_dim": 32,
                   "qk_nope_head_dim": 64, "v_head_dim": 64}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One training: which checkpoint, and LLaMA-Factory's keys."""

    name: str
    family: str
    sizes: dict[str, Any]
    recipe: dict[str, Any]
    kt_config: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("qwen3moe bf16", "qwen3moe", QWEN, {"cutoff_len": 256, "per_device_train_batch_size": 4},
         {"expert_format": "bf16"}),
    Case("qwen3moe int8, recompute, no checkpointing", "qwen3moe", QWEN,
         {"cutoff_len": 256, "per_device_train_batch_size": 2, "disable_gradient_checkpointing": True},
         {"expert_format": "int8", "activation": "recompute"}),
    Case("deepseek-v3 k4, rank 16", "dsv3", DEEPSEEK | {"q_lora_rank": 512},
         {"cutoff_len": 512, "per_device_train_batch_size": 2, "lora_rank": 16}, {"expert_format": "k4"}),
    Case("deepseek-v2 mxfp4, 2 passes, retain, no checkpointing", "dsv2", DEEPSEEK,
         {"cutoff_len": 512, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2,
          "disable_gradient_checkpointing": True}, {"expert_format": "mxfp4"}),
    Case("qwen3moe fp8, long, wide vocabulary, experts alone", "qwen3moe", QWEN | {"vocab_size": 96000},
         {"cutoff_len": 1024, "per_device_train_batch_size": 2, "lora_target": "experts"}, {"expert_format": "fp8"}),
)  # fmt: skip


def make(case: Case, path: Path) -> None:
    """Write the case's checkpoint, quickly: a short run of random numbers, repeated."""
    import torch
    from tiny import COMMON, FAMILIES
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config_class, own = FAMILIES[case.family]
    torch.set_default_dtype(torch.bfloat16)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config_class(**COMMON | own | case.sizes))
    noise = torch.randn(1 << 20).mul_(0.02).to(torch.bfloat16)
    for tensor in model.state_dict().values():
        flat = tensor.view(-1)
        for at in range(0, flat.numel(), noise.numel()):
            flat[at : at + noise.numel()] = noise[: flat.numel() - at]
    model.save_pretrained(path)


def memory(name: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (peak) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def train(case: Case, path: Path, cuda: bool, steps: int, result: multiprocessing.Queue[dict[str, Any]]) -> None:
    """Train, and report what it took."""
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments

    import ktft
    from ktft.adapters.peft import linear_names

    recipe, times = case.recipe, []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize() if cuda else None
            times.append(time.perf_counter() - self.start)

    begin = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.bfloat16,
        quantization_config=ktft.KtftConfig(**case.kt_config),
        device_map={"": 0 if cuda else "cpu"},
    )
    loading, loaded = time.perf_counter() - begin, memory("VmHWM")
    checkpointing = not recipe.get("disable_gradient_checkpointing", False)
    if checkpointing:
        model.enable_input_require_grads()
    target = recipe.get("lora_target", "all")
    rank = recipe.get("lora_rank", 8)
    targets = sorted(linear_names(model)) if target == "all" else target.split(",")
    model = ktft.get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
    length, vocab = recipe["cutoff_len"], case.sizes["vocab_size"]
    batch, passes = recipe["per_device_train_batch_size"], recipe.get("gradient_accumulation_steps", 1)
    rows = [{"input_ids": torch.randint(3, vocab, (length,)).tolist()} for _ in range(batch * passes)]
    rows = [row | {"labels": row["input_ids"]} for row in rows]
    arguments = TrainingArguments(
        str(path / "out"),
        max_steps=steps,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=passes,
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": True} if checkpointing else None,
        use_cpu=not cuda,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    ktft.Trainer(model, arguments, train_dataset=rows, callbacks=[Clock()]).train()
    free, total = torch.cuda.mem_get_info() if cuda else (0, 0)
    from ktft.model.experts import find_experts

    runtime = next(iter(find_experts(model).values())).layer.runtime
    result.put(
        {
            "ram": memory("VmHWM"),
            "loaded": loaded,
            "vram": total - free,
            "allocated": torch.cuda.max_memory_allocated() if cuda else 0,
            "step": statistics.median(times[min(WARM_STEPS, steps - 1) :]),
            "load": loading,
            "workspace": runtime.workspace_bytes,
        }
    )


def plan(case: Case, path: Path, cuda: bool) -> dict[str, Any]:
    """What `ktft plan` says of the case: the whole, and the row of its format."""
    yaml_file = path / "train.yaml"
    values = case.recipe | {"kt_config": case.kt_config, "use_cpu": not cuda}
    yaml_file.write_text(json.dumps(values))  # JSON is YAML
    command = [str(Path(sys.executable).parent / "ktft"), "plan", str(path), str(yaml_file), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode == 2:
        sys.exit(f"{' '.join(command)} failed")
    told = json.loads(done.stdout)
    wanted = case.kt_config["expert_format"]
    return told | {"row": next(row for row in told["formats"] if row["format"] == wanted)}


def off(predicted: float, measured: float) -> float:
    """How far the prediction is off, as a share of what was measured."""
    return predicted / measured - 1 if measured else 0.0


def run(case: Case, cuda: bool, steps: int) -> bool:
    """Run one case and print its lines. Returns whether the plan was near enough."""
    spawn = multiprocessing.get_context("spawn")
    result: multiprocessing.Queue[dict[str, Any]] = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        maker = spawn.Process(target=make, args=(case, path))
        maker.start()
        maker.join()
        told = plan(case, path, cuda)
        process = spawn.Process(target=train, args=(case, path, cuda, steps, result))
        process.start()
        process.join()
        if process.exitcode:
            return False
    measured, row, near = result.get(), told["row"], True
    print(f"\n{case.name}: {told['model']['expert_parameters'] / 1e6:,.0f} million parameters in experts")
    lines = [
        ("peak RSS, MiB", row["ram_bytes"] / 2**20, measured["ram"] / 2**20, MEMORY_TOLERANCE),
        ("s a step", row["step_seconds"], measured["step"], TIME_TOLERANCE),
    ]
    if cuda:
        lines.insert(1, ("GPU memory, MiB", row["vram_bytes"] / 2**20, measured["vram"] / 2**20, MEMORY_TOLERANCE))
    for what, predicted, got, tolerance in lines:
        share = off(predicted, got)
        near = near and abs(share) <= tolerance
        print(f"  {what:<16} predicted {predicted:10,.3f}  measured {got:10,.3f}  {share:+.1%}  "
              f"{'ok' if abs(share) <= tolerance else 'OFF'}")  # fmt: skip
    parts = {**row["ram"], **{f"GPU {name}": size for name, size in row["vram"].items()}}
    print("  planned, MiB: " + ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in parts.items()))
    print("  planned, s: " + ", ".join(f"{name} {seconds:.3f}" for name, seconds in row["step"].items()))
    seen = {"native workspace": measured["workspace"], "after loading": measured["loaded"]}
    seen |= {"allocated on the GPU": measured["allocated"]} if cuda else {}
    print("  measured, MiB: " + ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in seen.items()))
    print(f"  loading {measured['load']:.1f} s, predicted {row['load_seconds']:.1f}", flush=True)
    return near


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", action="store_true", help="run everything but the experts on the GPU")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps of each case")
    parser.add_argument("case", nargs="*", type=int, help=f"numbers of cases, 0 to {len(CASES) - 1}; all by default")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = os.environ["TQDM_DISABLE"] = "1"
    # Else torch's idle threads spin on the cores that the experts use: docs/install.md.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    chosen = [CASES[number] for number in arguments.case] or CASES
    near = [run(case, arguments.cuda, arguments.steps) for case in chosen]
    print(
        f"\n{sum(near)} of {len(near)} cases within {MEMORY_TOLERANCE:.0%} of memory and {TIME_TOLERANCE:.0%} of time"
    )
    return int(not all(near))


if __name__ == "__main__":
    sys.exit(main())

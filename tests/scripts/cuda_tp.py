"""Tensor parallel attention over two GPUs beside one GPU: `python tests/scripts/cuda_tp.py`.

A random model of Qwen3-MoE's shape in bf16, which the script makes, trains 50 steps of the same batches in one process
on one GPU, and in two that torchrun starts, with tp_size=2 and half of the experts each. It prints PASS or FAIL for
each of: losses within 0.2% of one process; the attention's memory on each GPU at most 0.6 of one GPU's; copies of LoRA
that both ranks hold have equal bits after training; the adapter that two wrote loads in one process, with the same
loss. Needs two CUDA GPUs and the newest stack of the docs' page on versions; takes three minutes. Exits 1 on a FAIL.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS, BATCH, LENGTH, RATE = 50, 4, 128, 2e-4
PLACEMENTS = "cpu", "stream"
MOST_LOSS, MOST_MEMORY, MOST_RELOADED = 0.002, 0.6, 0.005


def make_model(path: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=1024,
        moe_intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)


def load(base: str, placement: str, processes: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    import ktft

    where: dict[str, Any] = {"device_map": {"": 0}}
    if processes > 1:
        where = {"distributed_config": DistributedConfig(tp_size=processes)}
    config = ktft.KtftConfig(expert_format="bf16", placement=placement)
    return AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype=torch.bfloat16, **where)


def attention_bytes(model: Any) -> int:
    """The bytes of the attention's frozen weights on this GPU."""
    local = (p.to_local() if hasattr(p, "to_local") else p for n, p in model.named_parameters() if ".self_attn." in n)
    return sum(tensor.nbytes for tensor in local)


def loss_on(model: Any, ids: Any) -> float:
    import torch

    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        return float(model.eval()(input_ids=ids.cuda(), labels=ids.cuda()).loss)


def train(base: str, output: str, placement: str) -> None:
    """One process of a run. Each writes `rank-N.json` into `output`."""
    import torch
    from peft import LoraConfig
    from transformers import TrainingArguments

    import ktft

    rank, processes = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    model = load(base, placement, processes)
    found: dict[str, Any] = {"attention": attention_bytes(model), "gpu": torch.cuda.memory_allocated()}
    torch.manual_seed(0)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = ktft.get_peft_model(model, lora)
    args = TrainingArguments(
        output_dir=output,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        seed=1,
        bf16=True,
        report_to="none",
        disable_tqdm=True,
    )
    data = torch.randint(3, 4000, (STEPS * BATCH // 2, LENGTH), generator=torch.Generator().manual_seed(2))
    trainer = ktft.Trainer(adapted, args, train_dataset=[{"input_ids": ids, "labels": ids} for ids in data])
    began = time.perf_counter()
    trainer.train()
    found["seconds"] = time.perf_counter() - began
    trainer.save_model()
    found["losses"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found["loss"] = loss_on(adapted, data[:BATCH])
    found["copies"] = copies(adapted)
    Path(output, f"rank-{rank}.json").write_text(json.dumps(found))


def copies(model: Any) -> dict[str, str]:
    """SHA-256 of the LoRA that every rank of a tensor parallel group holds as a whole."""
    import hashlib

    from ktft.adapters.tensor_parallel import shards_of

    pieces = shards_of(model)
    named = (
        (n, p) for n, p in model.named_parameters() if p.requires_grad and n not in pieces and ".experts." not in n
    )
    return {n: hashlib.sha256(p.detach().float().cpu().numpy().tobytes()).hexdigest() for n, p in named}


def reload(base: str, adapter: str, placement: str) -> None:
    """The loss of the adapter that two processes wrote, in one: into `reloaded.json` beside it."""
    import torch

    import ktft

    model = ktft.load_adapter(load(base, placement, 1), adapter)
    data = torch.randint(3, 4000, (STEPS * BATCH // 2, LENGTH), generator=torch.Generator().manual_seed(2))
    Path(adapter, "reloaded.json").write_text(json.dumps(loss_on(model, data[:BATCH])))


def run(processes: int, *command: object) -> None:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(processes)))}
    done = subprocess.run(
        [*launcher, __file__, *map(str, command)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        print(done.stdout[-6000:])
        raise SystemExit(f"FAIL: {' '.join(map(str, command))} in {processes} processes exited with {done.returncode}")


def compare(base: Path, folder: Path, placement: str) -> bool:
    one, two = folder / f"one-{placement}", folder / f"two-{placement}"
    run(1, "train", base, one, placement)
    run(2, "train", base, two, placement)
    run(1, "reload", base, two, placement)
    alone = json.loads((one / "rank-0.json").read_text())
    ranks = [json.loads((two / f"rank-{rank}.json").read_text()) for rank in range(2)]
    apart = max(abs(a - b) / a for a, b in zip(alone["losses"], ranks[0]["losses"], strict=True))
    memory = max(rank["attention"] for rank in ranks) / alone["attention"]
    differ = [name for name, value in ranks[0]["copies"].items() if ranks[1]["copies"][name] != value]
    reloaded = json.loads((two / "reloaded.json").read_text())
    off = abs(reloaded - ranks[0]["loss"]) / ranks[0]["loss"]
    print(f"{placement}: loss {alone['losses'][0]:.4f} to {alone['losses'][-1]:.4f} in one process")
    print(f"{placement}: {alone['seconds']:.1f} s in one process, {ranks[0]['seconds']:.1f} s in two")
    gpu = [f"{each['gpu'] / 2**20:.0f}" for each in (alone, *ranks)]
    print(f"{placement}: MiB on the GPU once loaded: one process {gpu[0]}, two {gpu[1]} and {gpu[2]}")
    checks = (
        (apart <= MOST_LOSS, f"losses of {STEPS} steps differ by at most {apart:.3%} (limit {MOST_LOSS:.1%})"),
        (memory <= MOST_MEMORY, f"attention weights on each GPU: {memory:.3f} of one GPU's (limit {MOST_MEMORY})"),
        (not differ, f"{len(ranks[0]['copies'])} tensors that both ranks hold: {len(differ)} have other bits"),
        (
            off <= MOST_RELOADED,
            f"loss {ranks[0]['loss']:.4f} in two, adapter reloaded in one {reloaded:.4f}: {off:.3%}",
        ),
    )
    for good, text in checks:
        print(f"{'PASS' if good else 'FAIL'} {placement}: {text}")
    return all(good for good, _ in checks)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder, "base"))
        good = [compare(Path(folder, "base"), Path(folder), placement) for placement in PLACEMENTS]
    raise SystemExit(0 if all(good) else 1)


if __name__ == "__main__":
    part, *given = sys.argv[1:] or ["main"]
    {"main": main, "train": train, "reload": reload}[part](*given)

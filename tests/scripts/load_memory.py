"""Load an FP8 checkpoint with DeepSeek-V3's layer shapes into each format; compare memory and speed with limits.

    python tests/scripts/load_memory.py [--gigabytes 6] [--formats k4,int8] [--folder DIR]

For each format, a fresh process loads the checkpoint with `from_pretrained` after its files were dropped from the page
cache. Peak RSS (VmHWM, file-mapped pages included) may be at most what the model holds, plus two layers of experts and
1 GB. The experts must be read at 60% of the rate that the same number of threads reach by only reading, or at 90% of
the rate at which the processor packs from memory. Exits 1 if a limit is missed.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer
from measuring import in_a_process, memory
from rich.console import Console
from rich.table import Table

HIDDEN, INTER, EXPERTS = 7168, 2048, 16
SHARE_OF_DISK, SHARE_OF_PACKING, SLACK = 0.6, 0.9, 10**9
CHUNK = 16 << 20


def make(folder: Path, layers: int) -> None:
    """Write the checkpoint, one shard a layer. Attention is small; routed and shared experts have their real size."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    config = DeepseekV3Config(
        vocab_size=320,
        hidden_size=HIDDEN,
        intermediate_size=INTER,
        moe_intermediate_size=INTER,
        n_routed_experts=EXPERTS,
        num_hidden_layers=layers,
        first_k_dense_replace=0,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=128,
        kv_lora_rank=64,
        n_group=4,
        topk_group=2,
    )
    with torch.device("meta"):
        names = AutoModelForCausalLM.from_config(config).state_dict()
    generator = torch.Generator().manual_seed(0)
    index: dict[str, str] = {}

    def quantized(rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
        bytes_ = torch.empty(rows, cols // 8, dtype=torch.int64).random_(generator=generator).view(torch.uint8)
        codes = bytes_ & 0xBF  # |value| < 2, and no NaN
        return codes.view(torch.float8_e4m3fn), torch.full((-(-rows // 128), -(-cols // 128)), 0.02)

    shards: list[dict[str, torch.Tensor]] = [{} for _ in range(layers)]
    for name, tensor in names.items():
        number = int(name.split(".")[2]) if ".layers." in name else 0
        if ".experts." not in name:
            value = (
                torch.ones(tensor.shape) if tensor.dim() < 2 else torch.randn(tensor.shape, generator=generator) / 90
            )
            shards[number][name] = value.bfloat16()
    for number, shard in enumerate(shards):
        for expert in range(EXPERTS):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                name = f"model.layers.{number}.mlp.experts.{expert}.{projection}.weight"
                shape = (HIDDEN, INTER) if projection == "down_proj" else (INTER, HIDDEN)
                shard[name], shard[f"{name}_scale_inv"] = quantized(*shape)
        file = f"model-{number + 1:05}-of-{layers:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
        shard.clear()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    settings = config.to_dict() | {"architectures": ["DeepseekV3ForCausalLM"], "dtype": "bfloat16"}
    settings["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(settings))


def drop_cache(folder: Path) -> None:
    """Write the shards back and take them out of the page cache."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def disk_rate(folder: Path, threads: int) -> float:
    """Bytes per second that threads read from the shards when they do nothing else."""
    drop_cache(folder)
    chunks = [(f, at) for f in sorted(folder.glob("*.safetensors")) for at in range(0, f.stat().st_size, CHUNK)]

    def read(chunk: tuple[Path, int]) -> int:
        descriptor = os.open(chunk[0], os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, chunk[1], CHUNK, os.POSIX_FADV_WILLNEED)
            return len(os.pread(descriptor, CHUNK, chunk[1]))
        finally:
            os.close(descriptor)

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(read, chunks))
    return total / (time.perf_counter() - start)


def packing_rate(expert_format: str) -> float:
    """Bytes of codes that are packed from memory in a second."""
    import torch

    from ktft import native

    layer = native.ExpertLayer(
        native.runtime(), num_experts=9, hidden_size=HIDDEN, intermediate_size=INTER, format=expert_format
    )
    codes = torch.randint(0, 64, (INTER, HIDDEN), dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.full((INTER // 128, HIDDEN // 128), 0.02)
    layer.load(8, "up_proj", codes, scales)
    start = time.perf_counter()
    for expert in range(8):
        layer.load(expert, "gate_proj", codes, scales)
    return 8 * codes.numel() / (time.perf_counter() - start)


def measure(folder: Path, expert_format: str) -> dict[str, float]:
    """Load, and report bytes and seconds."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    import ktft
    from ktft.checkpoint.load import ExpertPlan
    from ktft.model.experts import find_experts

    spent: list[float] = []
    read: list[int] = []
    original = ExpertPlan.load

    def timed(plan: ExpertPlan, layers: Any) -> Iterator[int]:
        start = time.perf_counter()
        for nbytes in original(plan, layers):
            read.append(nbytes)
            yield nbytes
        spent.append(time.perf_counter() - start)

    ExpertPlan.load = timed  # type: ignore[method-assign]
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=ktft.KtftConfig(expert_format=expert_format)
    )
    peak = memory("VmHWM")
    packed = sum(experts.layer.packed_bytes for experts in find_experts(model).values())
    held = packed + sum(p.numel() * p.element_size() for p in model.parameters())
    layer = 3 * EXPERTS * HIDDEN * INTER
    return {
        "packed": packed,
        "held": held,
        "peak": peak,
        "allowed": held + 2 * layer + SLACK,
        "rate": sum(read) / spent[0],
        "packing": packing_rate(expert_format),
    }


def main(
    gigabytes: Annotated[float, typer.Option(help="Size of the checkpoint.")] = 6,
    formats: Annotated[str, typer.Option(help="Expert formats, with commas.")] = "k4,int8",
    folder: Annotated[Path | None, typer.Option(help="Where to write it; a temporary folder by default.")] = None,
) -> None:
    """Make the checkpoint, load it into each format, compare."""
    from ktft.checkpoint.load import READERS

    layers = max(2, round(gigabytes * 1e9 / (3 * EXPERTS * HIDDEN * INTER)))
    table = Table("format", "packed", "held", "peak RSS", "allowed", "read/s", "disk/s", "pack/s", "", title="GB")
    kept = True
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path = Path(name)
        in_a_process(make, path, layers)
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        console = Console()
        console.print(f"checkpoint: {size / 1e9:.2f} GB, {layers} layers of {EXPERTS} experts")
        for expert_format in formats.split(","):
            disk = disk_rate(path, READERS)
            drop_cache(path)
            got = in_a_process(measure, path, expert_format)
            enough = min(SHARE_OF_DISK * disk, SHARE_OF_PACKING * got["packing"])
            good = got["peak"] <= got["allowed"] and got["rate"] >= enough
            kept = kept and good
            figures = [got[key] for key in ("packed", "held", "peak", "allowed", "rate")] + [disk, got["packing"]]
            table.add_row(expert_format, *(f"{value / 1e9:.2f}" for value in figures), "ok" if good else "MISSED")
        console.print(table)
    raise typer.Exit(0 if kept else 1)


if __name__ == "__main__":
    typer.run(main)

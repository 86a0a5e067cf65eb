r"""Train a model of a real size under a VRAM cap: `python tests/scripts/train_large.py --directory DIR`.

The shape is Qwen3-30B-A3B's, or that of `--model`. With `--gpus 2`, a process for each GPU trains.

Writes a converted checkpoint with random weights (a file for each layer, all of the same few experts), a byte-level
tokenizer and a data set whose rows fill `--cutoff`. Then `llamafactory-cli train` runs with `use_kt` and LoRA on all
layers, in a process whose torch may take at most `--vram` of GPU memory. Prints the time of each part, tokens/s, memory
and the time split of `ktft_report.json`. Without a GPU it trains on the CPU. Exits 1 if training fails, a loss is not
finite, or the VRAM cap is exceeded. If the directory already has a checkpoint, that one is trained.

    python tests/scripts/train_large.py --directory /tmp/l --layers 2 --hidden-size 64 --intermediate-size 64 \
        --experts 8 --top-k 2 --vocabulary 320 --cutoff 64 --steps 3
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import yaml
from safetensors.torch import save_file
from tiny import factory_settings, tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_utils import local_torch_dtype

from benchmarks.cases import Shape
from benchmarks.step.models import DISTINCT, SCALE, SkippedExperts, empty_model, fill, pack_some
from ktft import native
from ktft.checkpoint import cache
from ktft.checkpoint.convert import check_space
from ktft.checkpoint.families import Family
from ktft.checkpoint.files import to_json, write_safetensors, write_whole
from ktft.checkpoint.identity import identify
from ktft.model.experts import expert_modules
from ktft.model.generic import family_of

SHARD = "model-00001-of-00001.safetensors"
CAPPED = """
import sys, torch
if torch.cuda.is_available():
    torch.cuda.set_per_process_memory_fraction(min(1.0, float(sys.argv.pop(1)) / torch.cuda.mem_get_info()[1]))
else:
    sys.argv.pop(1)
from llamafactory.cli import main
main()
"""
"""`llamafactory-cli` with a cap on what torch takes of the GPU's memory."""
CAPPED_RANK = """
import os
if "LOCAL_RANK" in os.environ:
    import torch
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, float(os.environ["VRAM_CAP"]) / total))
"""
"""The same for every process that torchrun starts."""
TOKENIZER_SIZE = 320
DATA = Path(__file__).parents[1] / "data"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
FP8_SCALE = 2.0**-12
LEFT_FREE = 6 << 30  # bytes of the disk, with --overflow: for data, adapter and what else is written


@contextmanager
def part(name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)


def released(args: argparse.Namespace) -> Any:
    """A released model with `--layers` of its layers and, if given, `--experts` a layer, on the meta device."""
    config = AutoConfig.from_pretrained(DATA / args.model)
    config.num_hidden_layers = args.layers
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = kinds[: args.layers]
    if args.experts is not None:
        name = "num_local_experts" if hasattr(config, "num_local_experts") else "n_routed_experts"
        setattr(config, name, args.experts)
    vars(config).pop("quantization_config", None)
    with local_torch_dtype(torch.bfloat16), no_init_weights(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def qwen(args: argparse.Namespace) -> Any:
    """A Qwen3-MoE of the sizes that were given, on the meta device."""
    shape = Shape("large", args.experts or 128, args.top_k, args.hidden_size, args.intermediate_size)
    with torch.device("meta"):
        return empty_model(shape, args.layers, args.vocabulary)


MODELS = {"qwen3-30b-a3b": qwen, "glm-4.5-air": released, "deepseek-v3": released, "gpt-oss-120b": released}


def write_checkpoint(args: argparse.Namespace, path: Path) -> None:
    """Write the converted checkpoint."""
    path.mkdir(parents=True)
    (path / "experts").mkdir()
    with part("weights around the experts"):
        numbers, shape, family = write_backbone(args, path)
    layer = native.ExpertLayer(
        native.runtime(args.threads),
        num_experts=shape.num_experts,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        format=args.format,
        swiglu=family.swiglu,
        biases=family.biases,
    )
    with part(f"packing {DISTINCT} experts"):
        packed = {place: tensor.numpy().data for place, tensor in pack_some(layer).items()}
    model_type = json.loads((path / "config.json").read_text())["model_type"]
    shapes = {number: cache.ExpertShape.of(layer) for number in numbers}
    source = identify([path / SHARD])
    manifest = cache.Manifest(args.format, model_type, source, shapes, {}, cache.sha256(path / "config.json"))
    tensors = cache.layer_tensors(layer)
    bias = (SCALE * torch.randn(max(shape.hidden_size, shape.intermediate_size))).numpy().data.cast("B")
    nbytes = sum(tensor.nbytes for tensor in tensors)
    size = nbytes * len(numbers)
    there: set[int] = set()
    if args.overflow is None:
        check_space(path, size)
    else:
        (args.overflow / "experts").mkdir(parents=True)
        room = shutil.disk_usage(path).free - LEFT_FREE
        there = set(numbers[max(0, room // nbytes) :])
        check_space(args.overflow, len(there) * nbytes)

    def write(number: int) -> None:
        content = (
            [bias[: tensor.nbytes]] if tensor.name.endswith(cache.BIAS) else [packed[expert % DISTINCT, name]]
            for tensor, (expert, name) in tensors.items()
        )
        metadata = cache.layer_metadata(manifest, number, "0" * 64)
        file = (args.overflow if number in there else path) / cache.layer_file(number)
        write_safetensors(file, list(tensors), metadata, content)
        if number in there:
            (path / cache.layer_file(number)).symlink_to(file.resolve())

    with part(f"packed experts, {size / 1e9:.1f} GB, {len(there)} layers of {len(numbers)} in --overflow"):
        with ThreadPoolExecutor(layer.runtime.threads) as pool:
            list(pool.map(write, numbers))
            names = (SHARD, *map(cache.layer_file, numbers))
            files = dict(zip(names, pool.map(lambda name: cache.describe_file(path / name), names), strict=True))
        write_whole(path / cache.MANIFEST, to_json(replace(manifest, files=files).to_dict()))


def write_backbone(args: argparse.Namespace, path: Path) -> tuple[list[int], Shape, Family]:
    """Write the weights other than the experts, and the tokenizer. Returns the layers with experts, their sizes, and
    the model's family.
    """
    torch.manual_seed(0)
    model = MODELS[args.model](args)
    family = family_of(model)
    found = expert_modules(model, family)
    for _, name, _ in found:
        model.set_submodule(name, SkippedExperts())
    nbytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    fits = torch.cuda.is_available() and torch.cuda.mem_get_info()[0] > 2 * nbytes
    model.to_empty(device="cuda" if fits else "cpu")
    for buffer in model.buffers():
        buffer.zero_()
    fill(model)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if args.fp8:
        tensors = in_fp8(tensors)
        model.config.quantization_config = FP8
    tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
    save_file(tensors, path / SHARD, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(tensors, SHARD)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    tokens = tokenizer()
    tokens.model_max_length = args.cutoff
    tokens.save_pretrained(path)
    config = model.config
    config.eos_token_id, config.pad_token_id = tokens.eos_token_id, tokens.pad_token_id
    config.architectures, config.dtype = [type(model).__name__], torch.bfloat16
    config.save_pretrained(path)
    del model
    torch.cuda.empty_cache()  # nothing without a GPU
    shape = Shape("large", found[0][2][0], config.num_experts_per_tok, *found[0][2][1:])
    return [number for number, *_ in found], shape, family


def in_fp8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The linear weights of decoder layers in FP8 blocks, as DeepSeek-V3 is released."""
    found = {}
    for name, tensor in tensors.items():
        if not (".layers." in name and "_proj" in name and name.endswith(".weight")):
            found[name] = tensor
            continue
        found[name] = (tensor / FP8_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn)
        found[f"{name}_scale_inv"] = torch.full([-(-size // 128) for size in tensor.shape], FP8_SCALE)
    return found


def write_data(args: argparse.Namespace, path: Path) -> None:
    """Write a data set whose rows are longer than the cutoff: random letters, so that tokens go to many experts."""
    path.mkdir(parents=True, exist_ok=True)
    rows = args.steps * args.batch * args.micro_batches * args.gpus
    draw = random.Random(0)
    answers = ["".join(draw.choices(string.ascii_letters + string.digits + " ", k=args.cutoff)) for _ in range(rows)]
    samples = [{"instruction": f"count {row}", "input": "", "output": text} for row, text in enumerate(answers)]
    (path / "sft.json").write_text(json.dumps(samples))
    (path / "dataset_info.json").write_text(json.dumps({"sft": {"file_name": "sft.json"}}))


def settings(args: argparse.Namespace, root: Path) -> dict[str, Any]:
    """LLaMA-Factory's settings."""
    on_gpu = torch.cuda.is_available()
    kt_config = {"threads": args.threads, "verify_checksums": args.verify}
    kt_config |= {"placement": args.placement, "gpu_expert_memory": args.gpu_expert_memory}
    kt_config |= yaml.safe_load("{" + ", ".join(args.setting) + "}")
    own = {
        "lora_rank": args.rank,
        "lora_alpha": 2 * args.rank,
        "kt_config": kt_config,
        "cutoff_len": args.cutoff,
        "overwrite_output_dir": True,
        "per_device_train_batch_size": args.batch,
        "gradient_accumulation_steps": args.micro_batches,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "max_steps": args.steps,
        "disable_gradient_checkpointing": not args.checkpointing,
        "logging_steps": 1,
        "save_strategy": "no",
        "bf16": on_gpu,
        "use_cpu": False,
    } | yaml.safe_load("{" + ", ".join(args.factory) + "}")
    return factory_settings(root / "model", root / "data", root / "out", **own)


def train(args: argparse.Namespace, root: Path) -> bool:
    """Run `llamafactory-cli train`. Returns whether it ended well."""
    path = root / "train.yaml"
    path.write_text(yaml.safe_dump(settings(args, root)))
    command = [sys.executable, "-c", CAPPED, str(args.vram * 1e9), "train", str(path)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(root / "cache")}
    if args.gpus > 1:  # torchrun starts the processes: each reads this on its start
        (root / "site").mkdir(exist_ok=True)
        (root / "site" / "sitecustomize.py").write_text(CAPPED_RANK)
        command = ["llamafactory-cli", "train", str(path)]
        paths = [str(root / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment |= {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(args.gpus), "PYTHONPATH": os.pathsep.join(paths)}
        environment |= {"VRAM_CAP": str(args.vram * 1e9)}
    with part("llamafactory-cli train, loading and saving included"):
        return subprocess.run(command, env=environment).returncode == 0


def show(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Print what the report says; returns what is wrong with it."""
    steps, losses = report["steps"], report["logged"]["loss"]
    first = min(2, args.steps - 1)  # the first steps grow buffers
    seconds, tokens = statistics.median(steps["seconds"][first:]), statistics.median(steps["tokens"][first:])
    print(f"steps {len(steps['seconds'])}, all of them {sum(steps['seconds']):.1f} s; then medians without {first}:")
    print(f"  {tokens:.0f} tokens a step, {seconds:.3f} s, {tokens / seconds:.0f} tokens/s")
    for name, values in steps.items():
        known = [value for value in values[first:] if value is not None]
        if known and name not in ("step", "merged", "seconds", "tokens"):
            middle = statistics.median(known)
            share = f", {100 * middle / seconds:.1f}% of the step" if not name.endswith("bytes") else ""
            print(f"  {name}: {middle / 1e9:.2f} GB" if not share else f"  {name}: {middle:.3f} s{share}")
    rss, vram = max(steps["rss_bytes"]), max(value or 0 for value in steps.get("gpu_bytes") or [0])
    print(f"  peak RSS of rank 0 {rss / 1e9:.1f} GB, peak VRAM {vram / 1e9:.2f} GB of {args.vram:g}")
    print(f"  loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")
    problems = [f"{len(losses)} steps logged of {args.steps}"] if len(losses) != args.steps else []
    problems += ["a loss is not finite"] if not all(x is not None and math.isfinite(x) for x in losses) else []
    return problems + ([f"VRAM {vram / 1e9:.2f} GB is over the cap"] if vram > args.vram * 1e9 else [])


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Arguments of the command line, or those given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="for checkpoint, data and adapter: 20 GB for k4")
    for name, value in (("layers", 48), ("experts", None), ("top-k", 8), ("hidden-size", 2048)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, value in (("intermediate-size", 768), ("vocabulary", 151936), ("cutoff", 2048), ("batch", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b-a3b")
    parser.add_argument("--fp8", action="store_true", help="weights around the experts in FP8 blocks")
    parser.add_argument("--overflow", type=Path, help="an empty directory for layers that --directory has no room for")
    parser.add_argument("--micro-batches", type=int, default=1, help="of a step")
    parser.add_argument("--setting", action="append", default=[], help="of kt_config, as 'cuda_graphs: false'")
    parser.add_argument("--factory", action="append", default=[], help="of LLaMA-Factory, as 'stage: pt'")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--format", default="k4")
    parser.add_argument("--placement", default="auto")
    parser.add_argument("--gpu-expert-memory", default="auto")
    parser.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=True, help="of activations")
    parser.add_argument("--vram", type=float, default=24.0, help="GB that torch may take")
    parser.add_argument("--verify", action=argparse.BooleanOptionalAction, default=True, help="checksums on loading")
    args = parser.parse_args(given)
    if args.vocabulary < TOKENIZER_SIZE:
        parser.error(f"--vocabulary must be at least {TOKENIZER_SIZE}")
    return args


def main() -> int:
    args = arguments()
    root = args.directory
    if not (root / "model" / cache.MANIFEST).is_file():
        write_checkpoint(args, root / "model")
    write_data(args, root / "data")
    report = root / "out" / "ktft_report.json"
    report.unlink(missing_ok=True)
    if not train(args, root):
        print("FAILED: llamafactory-cli")
        return 1
    problems = show(args, json.loads(report.read_text()))
    subprocess.run(["ktft", "plan", str(root / "model"), str(root / "train.yaml"), f"--gpus={args.gpus}"])
    print(f"FAILED: {'; '.join(problems)}" if problems else "OK")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())

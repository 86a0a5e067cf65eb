"""Damage tiny valid checkpoints at random and load them: headers, offsets, dtypes, shapes, index, config, bytes.

    python tests/scripts/fuzz_reader.py [--cases 10000] [--seed 0]

Each checkpoint must either be refused with a ValueError or FileNotFoundError that names one of its files, or load with
every weight unchanged, except those whose own bytes, dtype, shape or place were damaged. The safetensors library, not
ktft, decides which these are. One case in fifty goes through `from_pretrained`. Anything else is printed with its seed
and case, and the script exits 1.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import quantize as q
from contract import empty_layer
from tiny import write_checkpoint

import ktft
from ktft import native
from ktft.checkpoint.families import FAMILIES
from ktft.checkpoint.load import ExpertPlan
from ktft.checkpoint.reader import BITS, INDEX_NAME, CheckpointReader
from ktft.config import PROJECTIONS
from ktft.model.backbone import Backbone
from ktft.model.experts import find_experts

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_experts": 2, "vocab_size": 32, "intermediate_size": 32}
SCHEMES = (None, "fp8", "fp8-channel", "int4-32", "gptq-asym", "gptq-order", "awq")
Weights = dict[tuple[int, str], Tensor]


@dataclass
class Source:
    """A valid checkpoint: its files, its tensors and its experts' weights."""

    name: str
    files: dict[str, bytes]
    tensors: dict[str, Tensor]
    experts: Weights


class Model:
    """The model that checkpoints are loaded into, made once."""

    def __init__(self, folder: Path) -> None:
        with torch.device("meta"):
            self.meta = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        self.meta.model.layers[0].mlp.experts = torch.nn.Identity()
        self.family = FAMILIES["qwen3_moe"]

    def load(self, folder: Path) -> Weights:
        """Load as the quantizer does, without transformers."""
        reader = CheckpointReader.from_directory(folder)
        Backbone(self.meta, reader, self.family.expert_pattern(), [])
        layer = empty_layer(32, 32, "bf16", num_experts=2)
        for _ in ExpertPlan(reader, self.family, {0: layer}).load({0: layer}):
            pass
        return weights_of(layer)


def load_whole(folder: Path) -> Weights:
    """Through `from_pretrained`."""
    config = ktft.KtftConfig(expert_format="bf16", threads=1, numa_nodes=1)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)
    assert all(tensor.isfinite().all() for tensor in model.parameters()), "NaN or Inf in a weight"
    return weights_of(next(iter(find_experts(model).values())).layer)


def weights_of(layer: native.ExpertLayer) -> Weights:
    """Every expert's projections, by expert and name."""
    return {(e, name): layer.dequantize(e, name) for e in range(2) for name in PROJECTIONS}


# --- damage -----------------------------------------------------------------------------------------------------------


def split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """A shard's header and data."""
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def odd_value(rng: random.Random, value: Any) -> Any:
    """A value close to `value`, or one of another kind."""
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.6:
        return value + rng.choice([-1, 1, 8, -8, 32, -32, value, -2 * value, 2**31, 2**63, 10**30])
    odd = [None, True, -1, 0, 1, 2**64, 1.5, float("nan"), "", "x", "\0", "\ud800", [], [[]], {}, [value], "F16", "I32"]
    return rng.choice(odd)


def damage_field(rng: random.Random, raw: bytes) -> bytes:
    """Damage one field of one tensor's entry."""
    header, data = split(raw)
    entry = header[rng.choice([name for name in header if name != "__metadata__"])]
    key = rng.choice(["dtype", "shape", "data_offsets"])
    if rng.random() < 0.1:
        entry.pop(key)
    elif key == "dtype":
        entry[key] = rng.choice([*BITS, *BITS, odd_value(rng, entry[key])])
    elif rng.random() < 0.7 and entry[key]:
        entry[key][rng.randrange(len(entry[key]))] = odd_value(rng, rng.choice(entry[key]))
    else:
        entry[key] = rng.choice([entry[key][::-1], [*entry[key], 1], entry[key][:-1], odd_value(rng, entry[key])])
    return join(header, data)


def damage_entries(rng: random.Random, raw: bytes) -> bytes:
    """Exchange, rename, drop or duplicate tensors."""
    header, data = split(raw)
    names = [name for name in header if name != "__metadata__"]
    a, b = rng.choice(names), rng.choice(names)
    kind = rng.randrange(6)
    if kind == 0:
        header[a], header[b] = header[b], header[a]
    elif kind == 1:
        header[a]["data_offsets"], header[b]["data_offsets"] = header[b]["data_offsets"], header[a]["data_offsets"]
    elif kind == 2:
        header[rng.choice([a + "x", a.replace("0", "1"), a.rpartition(".")[0], "", "\ud800", b])] = header.pop(a)
    elif kind == 3:
        del header[a]
    elif kind == 4:
        header[a] = odd_value(rng, header[a])
    else:
        text = json.dumps(header)
        return join((text[:-1] + f", {json.dumps(a)}: {json.dumps(header[b])}}}").encode(), data)
    return join(header, data)


def damage_bytes(rng: random.Random, raw: bytes) -> bytes:
    """Damage bits of the header or the data, the header's length, or the end."""
    length, kind = int.from_bytes(raw[:8], "little"), rng.randrange(7)
    changed = bytearray(raw)
    if kind == 0:
        for _ in range(rng.choice([1, 1, 2, 8])):
            changed[8 + rng.randrange(length)] ^= 1 << rng.randrange(8)
    elif kind <= 2:
        for _ in range(rng.choice([1, 2, 64])):
            changed[8 + length + rng.randrange(len(raw) - 8 - length)] = rng.choice([0, 0x7F, 0xFF, rng.randrange(256)])
    elif kind == 3:
        changed[:8] = rng.choice([0, 1, length - 1, length + 1, 2**32, 2**63, 2**64 - 1]).to_bytes(8, "little")
    elif kind == 4:
        del changed[rng.randrange(len(changed)) :]
    elif kind == 5:
        changed += bytes(rng.choice([1, 8, 4096]))
    else:
        changed = bytearray(
            join(rng.choice([b"[" * 100_000, b"{}", b"null", b'"', b"\xff\xfe", b""]), raw[8 + length :])
        )
    return bytes(changed)


def damage_json(rng: random.Random, raw: bytes, under: str) -> bytes:
    """Damage a value anywhere below a key of the index or the config, or the text itself."""
    if rng.random() < 0.1:
        return rng.choice([b"", b"[]", b"{", b"\xff", b"[" * 100_000, raw[: rng.randrange(len(raw))]])
    tree = json.loads(raw)
    parent, key = tree, under
    while isinstance(parent.get(key), dict) and parent[key] and rng.random() < 0.85:
        parent, key = parent[key], rng.choice(list(parent[key]))
    if rng.random() < 0.2:
        parent.pop(key, None)
    elif rng.random() < 0.4:
        files = ["", ".", "..", "/", "../x.safetensors", "x.safetensors", "\0.safetensors"]
        parent[key] = rng.choice([*files, "fp8", "gptq", "awq", "mxfp4"])
    else:
        parent[key] = odd_value(rng, parent.get(key))
    return json.dumps(tree).encode()


def damage_files(rng: random.Random, files: dict[str, bytes]) -> None:
    """Remove, exchange, duplicate or empty shards."""
    one, two = sorted(name for name in files if name.endswith(".safetensors"))
    kind = rng.randrange(6)
    if kind == 0:
        del files[one]
    elif kind == 1:
        files[one], files[two] = files[two], files[one]
    elif kind == 2:
        files[one] = files[two]
    elif kind == 3:
        files[one] = b""
    elif kind == 4:
        del files[INDEX_NAME]
    else:
        files["model.safetensors"] = files[one]


def damage(rng: random.Random, files: dict[str, bytes]) -> tuple[str, bool]:
    """Damage `files`. Returns the kind of damage, and whether it may change the meaning of all weights."""
    kind = rng.choices(["field", "entries", "bytes", "index", "config", "files"], weights=[30, 20, 30, 10, 6, 4])[0]
    shard = rng.choice([name for name in files if name.endswith(".safetensors")])
    shards: dict[str, Callable[[random.Random, bytes], bytes]] = {
        "field": damage_field,
        "entries": damage_entries,
        "bytes": damage_bytes,
    }
    if kind in shards:
        files[shard] = shards[kind](rng, files[shard])
    elif kind == "files":
        damage_files(rng, files)
    elif kind == "index":
        files[INDEX_NAME] = damage_json(rng, files[INDEX_NAME], "weight_map")
    else:
        files["config.json"] = damage_json(rng, files["config.json"], "quantization_config")
    return kind, kind == "config"


# --- judgement --------------------------------------------------------------------------------------------------------


def changed_tensors(source: Source, folder: Path, files: dict[str, bytes]) -> set[str]:
    """Names of tensors that the safetensors library finds changed. Tensors of a shard it refuses may not be used."""
    found: dict[str, Tensor] = {}
    for name in files:
        if name.endswith(".safetensors"):
            try:
                found |= load_file(folder / name)
            except (SafetensorError, OSError, ValueError, KeyError):
                continue
    return {
        name
        for name, tensor in source.tensors.items()
        if name in found
        and (
            found[name].dtype != tensor.dtype
            or found[name].shape != tensor.shape
            or not torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        )
    }


def judge(source: Source, folder: Path, files: dict[str, bytes], anything: bool, load: Any) -> tuple[str, str]:
    """("refused" | "loaded" | "loaded, changed", "") or ("failed", why)."""
    try:
        weights = load(folder)
    except (ValueError, FileNotFoundError) as error:
        return ("refused", "") if str(folder) in str(error) else ("failed", f"names no file: {error!r}")
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"
    changed = changed_tensors(source, folder, files)
    result = "loaded"
    for (expert, projection), weight in weights.items():
        if not weight.isfinite().all():
            return "failed", f"NaN or Inf in {expert}.{projection}"
        if torch.equal(weight, source.experts[expert, projection]):
            continue
        stem = f"model.layers.0.mlp.experts.{expert}.{projection}."
        if not anything and not any(name.startswith(stem) for name in changed):
            return "failed", f"{expert}.{projection} differs, its tensors are unchanged"
        result = "loaded, changed"
    return result, ""


def sources(folder: Path) -> list[Source]:
    """One checkpoint for each of `SCHEMES`."""
    plain = write_checkpoint("qwen3moe", folder / "plain", **SIZES)
    model, made = Model(plain), []
    for scheme in SCHEMES:
        path = q.write(plain, folder / "two", q.read_all(plain), None) if scheme is None else None
        path = path or q.quantize(plain, folder / scheme, scheme)[0]
        files = {file.name: file.read_bytes() for file in path.iterdir() if file.suffix in (".safetensors", ".json")}
        made.append(Source(scheme or "plain", files, q.read_all(path), model.load(path)))
    return made


def run(cases: int, seed: int, folder: Path, whole_every: int = 50) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Counts of (kind of damage, outcome), and a description of each failure."""
    valid = sources(folder)
    model = Model(folder / "plain")
    counts: Counter[tuple[str, str]] = Counter()
    failures: list[str] = []
    target = folder / "case"
    for case in track(range(cases), description="Damaging checkpoints", disable=cases < 1000):
        rng = random.Random(seed * 1_000_003 + case)
        source = rng.choice(valid)
        files = dict(source.files)
        kind, anything = damage(rng, files)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for name, content in files.items():
            (target / name).write_bytes(content)
        # index, config and the list of files go through transformers before ktft sees them
        whole = case % whole_every == 0 and kind not in ("index", "config", "files")
        outcome, why = judge(source, target, files, anything, load_whole if whole else model.load)
        counts[kind, outcome] += 1
        if why:
            failures.append(f"--seed {seed}, case {case}: {source.name}, {kind}, whole={whole}: {why}")
    return counts, failures


def main(
    cases: Annotated[int, typer.Option(help="Checkpoints to damage.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the damage.")] = 0,
) -> None:
    """Damage, load, count."""
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        counts, failures = run(cases, seed, Path(folder))
    console = Console()
    for (kind, outcome), count in sorted(counts.items()):
        console.print(f"{kind:<10}{outcome:<18}{count:>7,}")
    for failure in failures[:20]:
        console.print(f"[red]{failure}[/red]", markup=True, soft_wrap=True)
    console.print(f"{cases:,} inputs, {len(failures)} failures")
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

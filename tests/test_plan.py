"""`ktft plan`: the answer for DeepSeek-V3, this machine, converted checkpoints, bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import refused, run
from given import Checkpoint
from host_graphs import HostGraph, record_on_host
from planning import DEEPSEEK, by_format, plan, recipe
from safetensors import safe_open
from tiny import FAMILIES, MORE_FAMILIES, make_config, write_checkpoint

from ktft import config, native, system
from ktft.config import EXPERT_FORMATS, Settings
from ktft.model.shape import shape_of
from ktft.model.workload import PlannedAdapters
from ktft.plan import backbone, machine, planner, rates
from ktft.plan.description import Description
from ktft.plan.source import read_source
from ktft.sizes import parse_size
from ktft.system import GIB
from ktft.train.recipe import Recipe, read_recipe, recipe_of

__all__ = ["recipe"]

Recipes = Callable[..., Path]


@pytest.fixture
def untimed_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan for this machine with published rates: what a test that is not about times needs."""

    def published(runtime: Any, machine: Any, moe: Any, name: str, tokens: int, lora: Any, activation: str) -> Any:
        return rates.published_expert_rate(machine, moe, name, lora)

    monkeypatch.setattr(machine, "_measure", lambda runtime: (1e12, 100e9))
    monkeypatch.setattr(rates, "timed_expert_rate", published)
    monkeypatch.setattr(rates, "timed_torch_rate", lambda shape, work: rates.TorchRate(1e12, 1e12, 1e-9, 1e-9))


@pytest.fixture
def untimed(untimed_experts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with rates of attention."""
    monkeypatch.setattr(planner, "timed_layers", lambda model, shape, work, device: rates.LayerRate(1.0, 1.0))


# --- layers timed in the model's own code -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(FAMILIES | MORE_FAMILIES))
def test_every_family_s_layers_can_be_timed(family: str) -> None:
    shape, model = shape_of(make_config(family))
    before = [name for name, _ in model.named_modules()]
    work = Recipe(cutoff_len=16, lora_rank=4).workload(Recipe().adapters(shape, model), 2)
    rate = backbone.timed_layers(model, shape, work, torch.device("cpu"))
    assert rate.forward > 0 and rate.backward > 0
    assert [name for name, _ in model.named_modules()] == before
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize("can", [True, False])
def test_layers_are_timed_as_they_are_played_back(can: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, model = shape_of(make_config("dsv3"))
    work = Recipe(cutoff_len=16, lora_rank=4).workload(Recipe().adapters(shape, model), 2)
    made = record_on_host(monkeypatch.setattr)
    if not can:
        monkeypatch.setattr(HostGraph, "__torch_dispatch__", cannot)
    rate = backbone.timed_layers(model, shape, work, torch.device("cpu"))
    assert rate.forward > 0 and rate.backward > 0
    assert made and all((graph.replays > 0) == can for graph in made)


def cannot(*_: object) -> None:
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("every", [0.0, 0.1])
def test_slow_layers_are_timed_on_fewer_tokens(every: float) -> None:
    """A machine that takes `every` seconds for a token, after a first pass that sets up."""
    passes: list[int] = []

    def seconds(tokens: int) -> float:
        passes.append(tokens)
        return 100.0 if len(passes) == 1 else every * tokens

    assert rates.affordable(rates.sizes_up_to(1000), seconds) == (16 if every else 1000)
    assert passes == ([16, 16] if every else [16, 16, 64, 256])


@pytest.mark.usefixtures("untimed_experts")
def test_a_plan_says_that_layers_are_slow(base: Path, recipe: Recipes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_LONGEST", 1e-9)
    (note,) = plan(base, recipe("cutoff_len: 256\nuse_cpu: true\n"))["notes"]
    assert note.startswith("the time of attention follows from that of 16 tokens")


@pytest.mark.usefixtures("untimed_experts")
def test_layers_that_do_not_fit_are_estimated(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backbone, "available_memory", lambda: 1000)
    told = plan(base)
    (note,) = told["notes"]
    assert note.startswith("the time of attention is estimated, not measured: it would take ")
    assert all(row["step"]["other"] > 0 for row in told["formats"])


# --- the command ------------------------------------------------------------------------------------------------------


def test_deepseek_v3_in_512_gb_with_a_24_gb_gpu(recipe: Recipes) -> None:
    told = plan(DEEPSEEK, recipe(), "--ram", "512G", "--gpu", "24G")
    assert told["model"]["quantization"] == "fp8"
    assert told["model"]["expert_parameters"] == 58 * 256 * 3 * 7168 * 2048
    assert told["adapter"]["expert_parameters"] == 58 * 256 * 3 * 8 * (7168 + 2048)
    rows = by_format(told)
    assert set(rows) == set(EXPERT_FORMATS)
    assert sum(rows["k4"]["packed_bytes"]) == 58 * sum(native.packed_bytes(256, 7168, 2048, "k4", 1))
    assert rows["k4"]["ram_bytes"] < 512 * GIB < rows["int8"]["ram_bytes"]
    # 34 GB of other weights cannot be in 24 GB, but in host memory; the experts in 4 bits can be in 512
    assert {name for name, row in rows.items() if row["fits"]} == {"k4", "int4", "mxfp4"}
    k4 = rows["k4"]
    assert (k4["dense_format"], k4["dense_placement"]) == ("bf16", "host")
    assert k4["ram"]["other weights"] > 30e9 and k4["vram_bytes"] < 24 * GIB
    assert k4["step"]["copying"] > 1 and k4["step"]["decoding"] == 0
    assert any("weights outside the experts are bf16 in host memory" in note for note in told["notes"])
    assert any("--cores" in line for line in told["assumptions"])


def test_deepseek_v3_within_22_gb(recipe: Recipes) -> None:
    """A limit on GPU memory counts like a smaller GPU, in every message."""
    settings = {
        "gradient_accumulation_steps": 8,
        "bf16": True,
        "kt_config": {"expert_format": "k4", "gpu_memory": "22G"},
    }
    chosen = recipe(**settings)
    told = plan(DEEPSEEK, chosen, "--ram", "512G", "--gpu", "80G")
    k4 = by_format(told)["k4"]
    assert k4["fits"] and k4["vram_bytes"] <= 22 * GIB == told["machine"]["gpu"]["memory_bytes"]
    assert k4["activations_away"] and k4["ram"]["activations that wait"] > 0
    assert any("activations that wait for backward do so in host memory" in note for note in told["notes"])
    assert "of which gpu_memory allows 22.0 GiB" in run("plan", DEEPSEEK, chosen, "--ram", "512G", "--gpu", "80G")[1]


@pytest.mark.parametrize(
    ("keys", "chosen"),
    [
        ({"dense_format": "int8"}, ("int8", "gpu")),
        ({"dense_format": "k4", "dense_placement": "host"}, ("k4", "host")),
        ({"dense_placement": "host"}, ("bf16", "host")),
        ({"dense_placement": "gpu"}, ("fp8", "gpu")),
        ({}, ("fp8", "gpu")),
    ],
    ids=str,
)
def test_dense_keys_restrict_what_is_chosen(keys: dict[str, str], chosen: tuple[str, str], recipe: Recipes) -> None:
    path = recipe(bf16=True, kt_config={"expert_format": "k4"} | keys)
    k4 = by_format(plan(DEEPSEEK, path, "--ram", "512G", "--gpu", "32G"))["k4"]
    assert (k4["dense_format"], k4["dense_placement"]) == chosen
    assert (k4["step"]["decoding"] > 0) == (chosen[0] != "bf16")
    assert (k4["step"]["copying"] > 0) == (chosen[1] == "host")


def test_what_asks_for_too_much_gpu_memory_is_named(recipe: Recipes) -> None:
    options = ("--ram", "512G", "--gpu", "24G")
    told = plan(DEEPSEEK, recipe(kt_config={"dense_placement": "gpu", "dense_format": "bf16"}), *options, code=1)
    assert "choose a smaller dense_format (k4, int8 or fp8), or dense_placement: host" in told["verdict"]
    words = "no kt_config.dense_format and no dense_placement, so that they are chosen"
    assert next(each for each in told["changes"] if each["change"] == words)["fits"]
    told = plan(DEEPSEEK, recipe(kt_config={"gpu_memory": "6G"}), *options, code=1)
    assert "6.0 GiB are available" in told["verdict"]
    assert next(each for each in told["changes"] if each["change"] == "no kt_config.gpu_memory")["fits"]


def test_a_machine_that_suffices(recipe: Recipes) -> None:
    chosen = recipe(kt_config={"expert_format": "k4"})
    big = ["--ram", "512G", "--gpu", "48G", "--sockets", "2", "--cores", "64", "--bandwidth", "400G"]
    told = plan(DEEPSEEK, chosen, *big)
    assert told["fits"]
    assert "k4 experts" in told["verdict"]
    assert told["changes"] == []
    k4 = by_format(told)["k4"]
    assert len(k4["node_bytes"]) == 2
    assert sum(k4["ram"].values()) == k4["ram_bytes"]
    assert told["machine"]["bandwidth"] == 400e9
    faster = plan(DEEPSEEK, chosen, *big[:-4], "--cores", "128", "--bandwidth", "800G")
    assert by_format(faster)["k4"]["step_seconds"] < k4["step_seconds"]


def test_this_machine_from_shards(base: Path, recipe: Recipes) -> None:
    path, generator = base, torch.get_rng_state()
    told = plan(path, recipe("cutoff_len: 64\nuse_cpu: true\nkt_config: {expert_format: bf16, kt_num_threads: 1}\n"))
    assert torch.equal(torch.get_rng_state(), generator), "what is timed draws from a generator of its own"
    assert told["fits"]
    assert told["model"]["sizes_from"] == "shards"
    tensors = [safe_open(file, "pt").keys() for file in path.glob("*.safetensors")]
    assert sum(map(len, tensors)) > 0
    assert 0 < told["disk"]["checkpoint_bytes"] <= sum(f.stat().st_size for f in path.glob("*.safetensors"))
    assert told["machine"]["measured"]
    assert told["machine"]["threads"] == 1
    assert told["machine"]["ram_bytes"] <= system.memory()["MemTotal"]


@pytest.mark.usefixtures("untimed")
def test_the_table(base: Path, recipe: Recipes) -> None:
    chosen = recipe("cutoff_len: 64\nkt_config: {expert_format: bf16}\n")
    status, table = run("plan", base, chosen)
    assert status == 0 and "bf16 *" in table and "estimate" in table
    # without a word about the format it is the default
    assert f"{config.DEFAULT_EXPERT_FORMAT} *" in run("plan", base)[1]


@pytest.mark.usefixtures("untimed")
def test_a_converted_checkpoint(base: Path, tmp_path: Path, recipe: Recipes) -> None:
    source, target = base, tmp_path / "packed"
    assert run("convert", source, target, "--format", "k4")[0] == 0
    told = plan(target)
    assert told["model"]["converted_to"] == "k4"
    assert [row["format"] for row in told["formats"]] == ["k4"]
    files = sum(file.stat().st_size for file in target.glob("experts/*.safetensors"))
    others = plan(source)["disk"]["checkpoint_bytes"] - read_source(source, Settings()).expert_bytes
    assert told["disk"]["checkpoint_bytes"] == files + others
    # the same experts for the original's other weights
    told = plan(source, recipe(f"kt_config: {{expert_checkpoint: {target}}}"))
    assert told["model"]["converted_to"] == "k4"
    assert told["disk"]["checkpoint_bytes"] == files + others
    assert "experts converted to k4" in run("plan", target)[1]
    said = refused("plan", target, recipe("kt_config: {expert_format: int8}"))
    assert "holds experts in k4, but expert_format is int8" in said
    next(target.glob("experts/*.safetensors")).unlink()
    assert "is missing; run the same ktft convert" in refused("plan", target)


def test_a_quantization_that_ktft_cannot_read(tmp_path: Path) -> None:
    values = json.loads((DEEPSEEK / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "gptq", "bits": 3, "group_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert "bits is 3; ktft reads 4" in refused("plan", tmp_path, "--ram", "64G")


@pytest.mark.usefixtures("untimed")
def test_nothing_fits(tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTFT_MEMORY_LIMIT", "300M")
    told = plan(tiny_checkpoint("dsv3"), code=1)
    assert not told["fits"]
    assert "300.0 MiB are available" in told["verdict"]
    assert any("GiB of memory" in change["change"] for change in told["changes"])
    assert any("KTFT_MEMORY_LIMIT" in line for line in told["warnings"])
    status, shown = run("plan", tiny_checkpoint("dsv3"))
    assert status == 1 and "What would change that" in shown


@pytest.mark.usefixtures("untimed")
def test_warnings_of_the_machine(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "cgroup_memory_limit", lambda: 8 * GIB)
    monkeypatch.setattr(system, "transparent_hugepages", lambda: "never")
    real = native.topology()
    monkeypatch.setattr(native, "topology", lambda: real | {"cgroup_cpus": 0.5})
    told = " ".join(plan(base)["warnings"])
    for words in ("a cgroup allows 8.0 GiB", "huge pages are never", "0.5 of"):
        assert words in told


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--ram", "512X"), "--ram: '512X' is not a size"),
        (("--ram", "64G", "--gpu", "24"), "--gpu: 24 without a unit is 24 bytes; write 24G"),
        (("--ram", "64G", "--bandwidth", "400"), "--bandwidth: 400 without a unit"),
        (("--ram", "0"), "--ram is '0'; it must be more than 0"),
        (("--ram", "64G", "--gpu", "big"), "--gpu: 'big' is not a size"),
        (("--ram", "64G", "--bandwidth", "-1G"), "--bandwidth: '-1G'"),
        (("--ram", "64G", "--isa", "neon"), "--isa is 'neon'; known: amx_bf16"),
    ],
)
def test_bad_options(args: tuple[str, ...], words: str) -> None:
    assert words in refused("plan", DEEPSEEK, *args)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kt_config: {expert_fromat: k4}", "nearest valid key is 'expert_format'"),
        ("kt_config: {expert_format: int3}", "int3"),
        ("cutoff_len: lots", "cutoff_len is 'lots'"),
        ("stage: ppo", "ppo"),
        ("per_device_train_batch_size: 0", "per_device_train_batch_size is 0"),
        ("finetuning_type: full", "ktft trains lora"),
        ("lora_target: no_such_layer", "matches nothing"),
        ("- a list", "holds no keys"),
        ("{", "is not a YAML file"),
    ],
)
def test_bad_recipes(text: str, words: str, recipe: Recipes) -> None:
    assert words in refused("plan", DEEPSEEK, recipe(text), "--ram", "64G")


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, "has no config.json"), ("{", "no config that transformers can read"), ('{"model_type": "bert"}', "bert")],
)
def test_bad_models(text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert words in refused("plan", tmp_path, "--ram", "64G")


# --- what it reads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("512G", 512 << 30), ("1.5T", 3 << 39), ("24 GiB", 24 << 30), ("80gb", 80 << 30), ("8K", 8192), ("17B", 17)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert parse_size("400G", 1000) == 400_000_000_000


def test_recipe_follows_llamafactorys_keys_and_defaults(tmp_path: Path) -> None:
    assert read_recipe(None)[0] == Recipe()
    recipe, notes = recipe_of(
        {
            "stage": "dpo",
            "lora_rank": 32,
            "cutoff_len": 4096,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "pure_bf16": True,
            "optim": "adafactor",
            "learning_rate": "1e-4",
            "kt_config": {"kt_backend": "AMXINT8", "activation": "recompute", "kt_max_cache_depth": 2},
        }
    )
    assert (recipe.settings.expert_format, recipe.settings.activation) == ("int8", "recompute")
    assert any("kt_max_cache_depth" in note for note in notes)
    work = recipe.workload(PlannedAdapters(), 2)
    assert (work.batch, work.sequence, work.accumulation) == (4, 4096, 4)
    assert (work.mixed, work.states, work.activation) == (False, 0.0, "recompute")


def test_defaults_are_llamafactorys() -> None:
    from llamafactory.hparams import DataArguments, FinetuningArguments, ModelArguments, TrainingArguments

    theirs: dict[str, Any] = {}
    for arguments in (DataArguments, FinetuningArguments, ModelArguments, TrainingArguments):
        theirs |= {name: each.default for name, each in arguments.__dataclass_fields__.items()}
    own = {name: value for name, value in vars(Recipe()).items() if name != "settings"}
    assert own == {name: theirs[name] for name in own}


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        (None, 16),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4.15625),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "strategy": "group"}}},
            },
            4.5,
        ),
    ],
)
def test_bytes_on_disk_from_the_config(quantization: dict[str, Any] | None, bits: float, tmp_path: Path) -> None:
    values = json.loads((DEEPSEEK / "config.json").read_text())
    values.pop("quantization_config")
    if quantization:
        values["quantization_config"] = quantization
    (tmp_path / "config.json").write_text(json.dumps(values))
    source = read_source(tmp_path / "config.json", Settings())
    assert source.expert_bytes == pytest.approx(source.shape.expert_parameters * bits / 8, rel=0.001)


def test_a_described_machine_needs_no_gpu() -> None:
    described = Description(ram="64G", gpu="none").machine()
    assert described.gpu is None
    assert described.ram_bytes < 64 * GIB


def test_a_model_whose_shards_are_still_to_come_is_planned_from_its_config(tmp_path: Path) -> None:
    path = write_checkpoint("qwen3moe", tmp_path / "model")
    next(path.glob("model-*.safetensors")).unlink()
    assert not read_source(path, Settings()).from_shards

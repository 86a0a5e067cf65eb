"""What `ktft plan` says of steps beside a GPU, and what was measured: records of docs/benchmarks, and larger layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planning import CONFIGS, GLM_AIR, QWEN_30B, by_format, plan, recipe
from transformers import AutoConfig

from benchmarks.cases import Shape
from benchmarks.step.models import make_config
from ktft.config import Settings
from ktft.model.dense_memory import DenseChoice
from ktft.model.memory import footprint
from ktft.model.shape import shape_of
from ktft.plan import rates
from ktft.plan.description import Description
from ktft.plan.steptime import STEP_SECONDS, simulated_lanes, step_time
from ktft.train.recipe import Recipe

__all__ = ["recipe"]

RECORDS = Path(__file__).parents[1] / "docs" / "benchmarks"
OPTIMIZER = 24 / 36  # of the planned optimizer's step is AdamW, which is all that the benchmark has


def step_of(
    tokens: int, experts: tuple[int, int, int, int], layers: int, gpus: int = 1, *, cuda_graphs: bool = False,
    optimizer: float = OPTIMIZER, **settings: Any,
) -> float:  # fmt: skip
    """Planned seconds a layer of `ktft bench step` on the machine of its records: one H200 for each 16 CPUs. There the
    optimizer ends before the next step begins; most records are older than recorded layers.
    """
    shape = Shape("", *experts)
    sizes, model = shape_of(make_config(shape, layers), ranks=gpus)
    own = Description(ram="256G", gpu="141G", cores=16 * gpus, bandwidth=f"{95 * gpus}G", pcie="55G").machine()
    kt_config = Settings(expert_format=settings.pop("format"), placement="stream", cuda_graphs=cuda_graphs)
    machine = own.of_rank(gpus)
    recipe = Recipe(per_device_train_batch_size=1, cutoff_len=tokens, bf16=True, settings=kt_config, **settings)
    work = recipe.workload(recipe.adapters(sizes, model), 2)
    work = replace(work, ranks=gpus, together=work.accumulation, deferred=False)
    others = rates.OtherRates(rates.published_torch_rate(machine, work), None)
    cpu = rates.published_expert_rate(machine, sizes.moe[0], kt_config.expert_format or "", work.on_experts(0))
    lanes = simulated_lanes(sizes, work, machine, cpu, others, kt_config.expert_format or "", 0, "uniform")
    step = step_time(sizes, work, machine, cpu, others, 0, lanes)
    return (step.total - (1 - optimizer) * step.optimizer - STEP_SECONDS) / layers


def test_streamed_steps_take_what_was_measured() -> None:
    for name, off in (("step", False), ("step-no-checkpointing", True)):
        for row in json.loads((RECORDS / f"{name}.json").read_text())["rows"]:
            if row.get("lanes", "stream") == "stream":
                layers = row.get("layers", 2 if row["tokens"] > 8192 else 4)
                how = {"format": row["format"], "disable_gradient_checkpointing": off}
                planned = step_of(row["tokens"], (128, 8, 2048, 768), layers, **how)
                assert planned * 1e3 == pytest.approx(row["ms_layer"], rel=0.15), row


@pytest.mark.parametrize(
    ("tokens", "experts", "gpus", "ms"),
    [
        (1024, (128, 8, 4096, 1408), 1, 54.7),
        (4096, (256, 8, 7168, 2048), 1, 250),
        (16384, (256, 8, 7168, 2048), 1, 337),  # attention takes longer than the copies that go on in it
        (8192, (128, 4, 7168, 2048), 1, 153),
        (4096, (256, 8, 7168, 2048), 2, 148),
    ],
)
def test_large_layers_take_what_was_measured(
    tokens: int, experts: tuple[int, int, int, int], gpus: int, ms: float
) -> None:
    assert step_of(tokens, experts, 2, gpus, format="k4") * 1e3 == pytest.approx(ms, rel=0.15)


@pytest.mark.parametrize(
    ("count", "experts", "layers", "ms"),
    [
        (1, (128, 8, 2048, 768), 4, 12.1),
        (8, (128, 8, 2048, 768), 4, 8 * 5.85),
        (8, (256, 8, 7168, 2048), 2, 318),
    ],
)
def test_recorded_layers_take_what_was_measured(
    count: int, experts: tuple[int, int, int, int], layers: int, ms: float
) -> None:
    """Micro-batches of 2,048 tokens that go together, forward and backward: docs/guide/step.md."""
    how: dict[str, Any] = {"format": "k4", "cuda_graphs": True, "gradient_accumulation_steps": count}
    assert step_of(2048, experts, layers, optimizer=0.0, **how) * 1e3 == pytest.approx(ms, rel=0.2)


@pytest.mark.parametrize(("count", "rate"), [(1, 3676), (8, 8665)])
def test_qwen3_30b_takes_what_was_measured(count: int, rate: float, recipe: Callable[..., Path]) -> None:
    """The whole model within 24 GB of an H200: docs/guide/step.md."""
    kt_config = {"placement": "stream", "expert_format": "k4", "gpu_memory": "24G"}
    path = recipe(cutoff_len=2048, bf16=True, gradient_accumulation_steps=count, kt_config=kt_config)
    machine = ("--ram", "128G", "--gpu", "141G", "--cores", "16", "--bandwidth", "95G", "--pcie", "55G")
    told = by_format(plan(QWEN_30B, path, *machine))["k4"]
    assert told["micro_batches_together"] == count
    assert told["tokens_per_second"] == pytest.approx(rate, rel=0.2)
    assert (told["dense_format"], told["dense_placement"]) == ("bf16", "gpu")


@pytest.mark.parametrize(
    ("model", "experts", "count", "held", "rate", "bandwidth"),
    [
        ("deepseek-v3", 24, 8, "20.4G", 1545, "114G"),
        ("glm-4.5-air", None, 4, "14.9G", 3453, "97G"),
        ("gpt-oss-120b", None, 4, "14.9G", 2331, "90G"),
    ],
)
def test_large_models_on_a_small_card_take_what_was_measured(
    model: str, experts: int | None, count: int, held: str, rate: float, bandwidth: str, recipe: Callable[..., Path],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """An H200 of which a process may use a part: docs/guide/plan.md. gpt-oss kept attention's scores then."""
    monkeypatch.setattr("ktft.model.shape.keeps_scores", lambda model: model.config._attn_implementation == "eager")
    config = json.loads((CONFIGS / model / "config.json").read_text())
    if experts is not None:
        config["n_routed_experts"] = experts
    (tmp_path / "config.json").write_text(json.dumps(config))
    kt_config = {"expert_format": "k4", "gpu_memory": held}
    path = recipe(cutoff_len=2048, bf16=True, gradient_accumulation_steps=count, kt_config=kt_config)
    machine = ("--ram", "123G", "--gpu", "141G", "--cores", "16", "--bandwidth", bandwidth, "--pcie", "55G")
    told = by_format(plan(tmp_path, path, *machine))["k4"]
    assert told["micro_batches_together"] == count
    assert told["tokens_per_second"] == pytest.approx(rate, rel=0.2)
    assert (told["dense_format"], told["dense_placement"]) == ("bf16", "host")
    if model == "deepseek-v3":
        assert told["activations_away"] and told["ram_bytes"] == pytest.approx(104.6e9, rel=0.1)
        tensors = told["vram_bytes"] - told["vram"]["cuda"] - told["vram"]["fragments"]
        assert tensors == pytest.approx(16.4e9, rel=0.1)


@pytest.mark.parametrize(
    ("model", "together", "tensors"),
    [("glm-4.5-air", 4, 6.43e9), ("gpt-oss-120b", 2, 9.47e9), ("deepseek-v3", 8, 14.44e9)],
)
def test_the_first_step_takes_the_gpu_memory_that_was_measured(
    model: str, together: int, tensors: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of these runs, before layers are recorded and residents come."""
    monkeypatch.setattr("ktft.model.shape.keeps_scores", lambda model: model.config._attn_implementation == "eager")
    config = AutoConfig.from_pretrained(CONFIGS / model)
    if model == "deepseek-v3":
        config.n_routed_experts = 24
    shape, made = shape_of(config)
    recipe = Recipe(per_device_train_batch_size=1, cutoff_len=2048, gradient_accumulation_steps=together, bf16=True)
    work = recipe.workload(recipe.adapters(shape, made), 2)
    work = replace(work, dense=DenseChoice("bf16", "host"), away=True, together=together)
    vram = footprint(shape, work, "k4", threads=14, nodes=1, gpu=True).vram
    found = sum(size for name, size in vram.items() if name not in ("cuda", "fragments", "recordings"))
    assert found == pytest.approx(tensors, rel=0.1)


def test_glm_air_on_two_gpus_takes_what_was_measured(
    recipe: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/scripts/train_large.py trained it, two H200 of one host, 1,024 tokens each, before chunked losses."""
    monkeypatch.setattr("ktft.train.recipe.CHUNKED_STAGES", ())
    kt_config = {"placement": "stream", "cuda_graphs": False, "gpu_activation_memory": 0}
    path = recipe(cutoff_len=1024, bf16=True, kt_config=kt_config)
    machine = ("--ram", "256G", "--gpu", "141G", "--cores", "32", "--bandwidth", "163G", "--pcie", "55G")
    told = by_format(plan(GLM_AIR, path, *machine, "--gpus", "2"))["k4"]
    tensors = told["vram_bytes"] - told["vram"]["cuda"] - told["vram"]["fragments"]
    assert told["step_seconds"] == pytest.approx(1.256, rel=0.15)
    assert tensors == pytest.approx(18.7e9, rel=0.05)
    assert 2 * told["ram_bytes"] == pytest.approx(76.8e9, rel=0.15)

"""How much memory a model and its training take, to the byte where native allocates; and the check before loading."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import empty_layer, make_lora
from given import Checkpoint, RunCli, TrainYaml
from peft import LoraConfig
from stock import load
from tiny import FAMILIES, MORE_FAMILIES
from transformers import AutoConfig, AutoModelForCausalLM

import ktft
from ktft import native, system
from ktft.adapters.reach import linear_names
from ktft.config import EXPERT_FORMATS, PROJECTIONS
from ktft.model.experts import find_experts
from ktft.model.memory import active_experts, expert_buffers, packed_per_node, torch_activations
from ktft.model.shape import MoeShape, shape_of
from ktft.model.shortage import by_cause, require_memory
from ktft.model.workload import Adapter, PlannedAdapters, Workload
from ktft.train.recipe import Recipe

DEEPSEEK = Path(__file__).parent / "data" / "deepseek-v3"


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("expert_format", EXPERT_FORMATS)
def test_packed_bytes_are_what_native_allocates(expert_format: str, nodes: int, biases: bool) -> None:
    for experts, hidden, intermediate in ((3, 96, 320), (2, 64, 32), (1, 160, 288)):
        layer = empty_layer(hidden, intermediate, expert_format, nodes=nodes, num_experts=experts, biases=biases)
        shape = MoeShape(experts, 1, hidden, intermediate, biases)
        per_node = packed_per_node([shape], expert_format, nodes)
        assert len(per_node) == nodes
        assert sum(per_node) == layer.packed_bytes


def test_packed_bytes_refuses_what_the_kernels_cannot_take() -> None:
    with pytest.raises(ValueError, match="hidden_size is 100"):
        native.packed_bytes(2, 100, 64, "int8", 1)
    with pytest.raises(ValueError, match="unknown expert format 'int3'"):
        native.packed_bytes(2, 64, 64, "int3", 1)


@pytest.mark.parametrize("activation", ["retain", "recompute"])
@pytest.mark.parametrize(
    ("threads", "nodes", "experts", "tokens"),
    [(1, 1, 8, 700), (2, 1, 8, 700), (1, 2, 8, 700), (1, 2, 8, 40), (1, 1, 8, 6000)],
    ids=["by expert", "two threads", "two nodes", "few tokens", "many tokens"],
)
def test_expert_buffers_are_near_what_native_allocates(
    activation: str, threads: int, nodes: int, experts: int, tokens: int
) -> None:
    """The same layer calls as in training, in a runtime of their own. Only the routing is left to chance."""
    moe, rank = MoeShape(experts, 2, 512, 256, biases=True), 8
    runtime = native.runtime.__wrapped__(threads, nodes)
    sizes = {"num_experts": experts, "hidden_size": 512, "intermediate_size": 256}
    layer = native.ExpertLayer(runtime, **sizes, format="int8", biases=True)
    lora = make_lora(512, 256, rank, torch.float32, experts=experts)
    adapters = []
    for name in PROJECTIONS:
        cols, rows = moe.projection(name)
        adapters.append(Adapter(cols, rows, rank=rank, count=experts, layer=0, projection=name))
        for expert in range(experts):
            layer.load(expert, name, torch.zeros(rows, cols))
            layer.load_bias(expert, name, torch.zeros(rows))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, 512)
    index = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(tokens)])
    weights = torch.ones(tokens, 2)
    _, saved = layer.forward(x, index, weights, lora, activation)
    layer.backward(saved, x, x, index, weights, lora)
    told = expert_buffers(moe, tokens, adapters, threads=threads, nodes=nodes, activation=activation)
    assert told.workspace == pytest.approx(runtime.workspace_bytes, rel=0.05)
    assert told.retained == pytest.approx(saved.bytes, rel=0.05)


def test_active_experts() -> None:
    assert active_experts(MoeShape(64, 8, 64, 64), 1) == pytest.approx(8)
    assert active_experts(MoeShape(64, 8, 64, 64), 10_000) == pytest.approx(64)


@pytest.mark.parametrize("family", FAMILIES | MORE_FAMILIES)
def test_adapters_are_those_that_training_makes(tiny_checkpoint: Checkpoint, family: str) -> None:
    """The plan of a checkpoint beside the model that was loaded from it, and what LoRA then trains."""
    path = tiny_checkpoint(family)
    model = load(path, "int8")
    packed = sum(experts.layer.packed_bytes for experts in find_experts(model).values())
    others = sum({id(t): t.numel() for t in (*model.parameters(), *model.buffers())}.values())
    sees_images = any(name.endswith(("visual", "vision_tower", "vision_model")) for name, _ in model.named_modules())
    # LLaMA-Factory leaves these alone
    excluded = r".*\b(visual|vision_tower|vision_model|multi_modal_projector)\..*" if sees_images else None
    lora = LoraConfig(r=4, target_modules=sorted(linear_names(model)), exclude_modules=excluded)
    model = ktft.get_peft_model(model, lora)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    shape, meta = shape_of(AutoConfig.from_pretrained(path))
    adapters = Recipe(lora_rank=4).adapters(shape, meta)
    assert sum(a.parameters for a in adapters) == trained
    assert shape.other_parameters == others
    assert packed_per_node(shape.moe.values(), "int8", 1) == (packed,)


def test_memory_grows_with_what_the_recipe_asks() -> None:
    shape, _ = shape_of(AutoConfig.from_pretrained(DEEPSEEK))
    recipe = Recipe(per_device_train_batch_size=1)

    def work(**changes: Any) -> Workload:
        return replace(recipe, **changes).workload(PlannedAdapters(), 2)

    least = torch_activations(shape, work(), gpu=True)
    for changes in ({"cutoff_len": 4096}, {"disable_gradient_checkpointing": True}, {"per_device_train_batch_size": 2}):
        assert torch_activations(shape, work(**changes), gpu=True) > least
    # without fused attention its scores count too
    assert torch_activations(shape, work(), gpu=False) > least


def test_available_memory_follows_the_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "proc/meminfo": "MemTotal: 8192 kB\nMemAvailable: 4096 kB\n",
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": "3145728\n",
        "sys/fs/cgroup/job/memory.current": "2097152\n",
        "sys/fs/cgroup/job/memory.stat": "anon 1\ninactive_file 524288\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert system.available_memory(tmp_path) == 1048576 + 524288
    monkeypatch.setenv("KTFT_MEMORY_LIMIT", "1M")
    assert system.available_memory(tmp_path) == 1 << 20
    monkeypatch.setenv("KTFT_MEMORY_LIMIT", "lots")
    with pytest.raises(ValueError, match="KTFT_MEMORY_LIMIT: 'lots' is not a size"):
        system.available_memory(tmp_path)


# --- the check before loading -----------------------------------------------------------------------------------------


def test_training_refuses_what_does_not_fit(train_yaml: TrainYaml, fork_cli: RunCli) -> None:
    settings = train_yaml("qwen3moe")
    done = fork_cli(["llamafactory-cli", "train"], settings, check=False, env={"KTFT_MEMORY_LIMIT": "1M"})
    assert done.returncode != 0
    assert "and training needs" in done.stdout
    assert "1.0 MiB are available (KTFT_MEMORY_LIMIT is set)" in done.stdout
    assert "Packing experts" not in done.stdout


def test_loading_refuses_and_can_be_told_not_to(tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_checkpoint("dsv3")

    def load(**options: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, quantization_config=ktft.KtftConfig(threads=1, **options))

    monkeypatch.setenv("KTFT_MEMORY_LIMIT", "100K")
    with pytest.raises(ValueError, match="expert_format int8 needs .* too few; the largest part, .*, is for "):
        load()
    monkeypatch.setenv("KTFT_SKIP_MEMORY_CHECK", "1")
    load()
    monkeypatch.delenv("KTFT_SKIP_MEMORY_CHECK")
    monkeypatch.delenv("KTFT_MEMORY_LIMIT")
    with pytest.raises(ValueError, match="and training needs .* is for reserve_bytes"):
        load(reserve_bytes=1 << 50)


@pytest.mark.parametrize("change", [{"cutoff_len": 100_000_000}, {"per_device_train_batch_size": 1 << 20}], ids=str)
def test_training_names_the_key_that_asks_for_most(
    train_yaml: TrainYaml, fork_cli: RunCli, change: dict[str, int]
) -> None:
    done = fork_cli(["llamafactory-cli", "train"], train_yaml("qwen3moe", **change), check=False)
    assert done.returncode == 2
    assert "is for activations: lower cutoff_len or per_device_train_batch_size." in done.stdout
    assert "expert_format (" not in done.stdout


def test_packed_experts_name_their_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTFT_MEMORY_LIMIT", "1M")
    with pytest.raises(ValueError, match=r"packed experts: choose a smaller expert_format \(mxfp4, k4, int4"):
        require_memory("all", by_cause({"experts": 5 << 20, "python": 9 << 20, "activations": 2 << 20}))

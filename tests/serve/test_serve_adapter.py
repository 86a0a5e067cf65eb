"""An unmerged adapter at run time: every part takes effect, swaps are exact, bad adapters change nothing."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import edit_json, flip
from safetensors.torch import load_file, save_file
from tiny import write_checkpoint
from torch import Tensor

pytest.importorskip("vllm")

from adapters import random_adapter
from effects import DSV3, error_of_effect, expected
from in_process import Served, served

from ktft.adapters.below import describe
from ktft.adapters.files import CONFIG
from ktft.serve.runtime.served_adapter import ServedAdapter, Slot, Target
from ktft.serve.runtime.served_model import current
from ktft.serve.vllm.lora_linear import slots_of

FILE = "adapter_model.safetensors"
SIZES: dict[str, dict[str, Any]] = {"qwen2moe": {"hidden_size": 128}, "dsv3": DSV3}
"""With these sizes, attention has heads that vLLM takes on the CPU."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_checkpoint(family, tmp_path_factory.mktemp(family), **SIZES[family]) for family in SIZES}


@pytest.fixture(scope="module")
def base(bases: dict[str, Path]) -> Path:
    return bases["qwen2moe"]


@pytest.fixture(scope="module")
def qwen(base: Path) -> Iterator[Served]:
    with served(base, options={"dtype": "float32"}) as running:
        yield running


# --- what is applied --------------------------------------------------------------------------------------------------


def test_every_kind_of_module_takes_effect(qwen: Served, base: Path, tmp_path: Path) -> None:
    """An adapter for each kind of module: attention, shared experts and their gate, routed experts. Then one on all."""
    qwen.use(None)
    plain = qwen.logprobs()
    assert (plain - expected(base)).norm() < 1e-2 * plain.norm()
    attention, shared = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
    mixed = {"rank_pattern": {"k_proj": 2, "down_proj": 8}, "alpha_pattern": {"v_proj": 5}, "use_rslora": True}
    for number, (targets, options) in enumerate(
        [([each], {}) for each in (*attention, *shared, "experts", "shared_expert_gate")] + [("all-linear", mixed)]
    ):
        adapter = random_adapter(base, tmp_path / str(number), std=0.3, target_modules=targets, **options)
        told = qwen.use(adapter)
        assert told is not None
        assert error_of_effect(qwen, base, adapter, plain) < 0.1, targets
        assert sum(told["tensors"].values()) == len(load_file(adapter / FILE))
        assert all(each["modules"] == each["nonzero"] > 0 for each in told["applied"].values()), told
    assert told["applied"].keys() == {"attention", "shared experts", "routed experts"}
    assert told["ranks"] == [2, 4, 8] and told["name"] == adapter.name


def test_what_experts_share_takes_effect(qwen: Served, base: Path, tmp_path: Path) -> None:
    """Every expert gets the matrix that the file has once."""
    qwen.use(None)
    plain = qwen.logprobs()
    adapter = random_adapter(base, tmp_path / "a", std=0.3, form="shared_outer", target_modules=["experts", "o_proj"])
    told = qwen.use(adapter)
    assert error_of_effect(qwen, base, adapter, plain) < 0.1
    assert told is not None and told["tensors"]["routed experts"] == 3 * (3 + 3 * 8)


# --- swapping ---------------------------------------------------------------------------------------------------------


def test_changes_are_exact_and_free_the_old_tensors(qwen: Served, base: Path, tmp_path: Path) -> None:
    one, two = (random_adapter(base, tmp_path / str(seed), seed=seed) for seed in (1, 2))
    said = {}
    for adapter in (None, one, two):
        qwen.use(adapter)
        said[adapter] = qwen.greedy(), qwen.logprobs().tolist()
    assert len({str(each) for each in said.values()}) == 3
    left: list[weakref.ref[Any]] = []
    for adapter in (one, None, two, one, two, None, one):
        told = qwen.use(adapter)
        assert (told and told["path"]) == (adapter and str(adapter)) and qwen.adapter == told
        assert (qwen.greedy(), qwen.logprobs().tolist()) == said[adapter]
        gc.collect()
        assert not [each for each in left if each() is not None], "tensors of the one before are still in memory"
        shared = [slot.shared for slot in slots_of(qwen.model).values() if slot.shared is not None]
        kept = [each for experts in current().layers.values() for each in experts.kept.values()]
        assert bool(shared) == bool(kept) == (adapter is not None)
        left = [weakref.ref(each.a) for each in shared]
        del shared, kept


def test_a_bad_adapter_leaves_the_current_one(qwen: Served, base: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    good = random_adapter(base, tmp_path / "good", seed=3)
    qwen.use(good)
    before, status = qwen.logprobs(), qwen.adapter

    def broken(change: Callable[[dict[str, Tensor]], Any]) -> Path:
        """A copy of `good` with changed tensors and no checksums."""
        path = tmp_path / f"broken{len(list(tmp_path.iterdir()))}"
        shutil.copytree(good, path)
        tensors = load_file(path / FILE)
        change(tensors)
        save_file(tensors, path / FILE)
        return path

    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    flipped = tmp_path / "flipped"
    shutil.copytree(good, flipped)
    flip(flipped / FILE, -3)
    pissa = random_adapter(base, tmp_path / "pissa", target_modules=["o_proj"])
    edit_json(pissa / CONFIG, init_lora_weights="pissa")
    below = [describe("elsewhere/first", good)]
    for path, message in (
        (tmp_path / "nowhere", "no such directory"),
        (flipped, "is damaged, its CRC-32 is"),
        (broken(lambda t: t[name].view(-1)[3:4].fill_(torch.nan)), f"{name} holds NaN or Inf"),
        (broken(lambda t: t.pop(name)), f"of the model are missing, the first is {name}"),
        (broken(lambda t: t.update({"x.weight": t[name].clone()})), "are left over, the first is x.weight"),
        (pissa, "init_lora_weights='pissa' changed the base weights"),
        (random_adapter(bases["dsv3"], tmp_path / "other", target_modules=["o_proj"]), "of type deepseek_v3"),
        (random_adapter(base, tmp_path / "whole", modules_to_save=["lm_head"]), "trained whole .*ktft merge BASE"),
        (random_adapter(base, tmp_path / "head", target_modules=["lm_head"]), "no linear layer lm_head; merge it"),
        (random_adapter(base, tmp_path / "top", below=below), "Merge them first: .*ktft serve OUT1 --adapter"),
        (random_adapter(base, tmp_path / "wide", r=65, target_modules=["v_proj"]), "has rank 65.*--max-lora-rank 65"),
    ):
        with pytest.raises(Exception, match=message):
            qwen.use(path)
        assert qwen.adapter == status
    qwen.llm.reset_prefix_cache()
    assert torch.equal(qwen.logprobs(), before)


def test_too_little_memory_is_refused_before_anything_changes(
    qwen: Served, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktft.serve.runtime.served_adapter.available_memory", lambda: 1 << 16)
    with pytest.raises(ValueError, match=r"MiB of memory, 0.1 MiB are free .*unload an adapter first"):
        qwen.use(random_adapter(base, tmp_path / "big"))


# --- places, without a server -----------------------------------------------------------------------------------------

EXPERTS = {number: (8, 64, 32) for number in (1, 2)}
FUSED = {"fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"], "gate_up_proj": ["gate_proj", "up_proj"]}


def target(slots: dict[str, Slot], refused: dict[str, str] | None = None, **changes: Any) -> Target:
    rename = changes.get("rename", lambda name: name)
    return Target(slots, refused or {}, changes.get("packed", FUSED), rename, 64, changes.get("experts", EXPERTS))


def test_places_in_fused_and_renamed_layers(bases: dict[str, Path], tmp_path: Path) -> None:
    """A layer of another name that fuses parts which are separate layers in transformers."""
    base = bases["dsv3"]
    adapter = random_adapter(base, tmp_path / "a", r=2, target_modules=["kv_a_proj_with_mqa"], lora_alpha=6)
    slots = {f"text.layers.{n}.self_attn.fused_qkv_a_proj": Slot(64, (16, 16, 256, 64)) for n in range(3)}
    placed = ServedAdapter(adapter, base, target(slots, rename=lambda name: name.replace("model.", "text.", 1))).read()
    assert not placed.experts and placed.linears.keys() == slots.keys()
    tensors = load_file(adapter / FILE)
    for name, (only,) in placed.linears.items():
        prefix = f"base_model.{name.replace('text.', 'model.model.')}".replace("fused_qkv_a_proj", "kv_a_proj_with_mqa")
        assert (only.start, only.stop) == (32, 352)
        assert torch.equal(only.a, tensors[f"{prefix}.lora_A.weight"])
        assert torch.equal(only.b, tensors[f"{prefix}.lora_B.weight"] * 3)


def test_tensors_without_a_place_are_refused_by_name(bases: dict[str, Path], tmp_path: Path) -> None:
    base, name = bases["dsv3"], "model.layers.0.self_attn.o_proj"
    on_output = random_adapter(base, tmp_path / "o", target_modules=["o_proj"])
    on_experts = random_adapter(base, tmp_path / "experts", target_modules=["experts"])
    on_input = random_adapter(base, tmp_path / "q", target_modules=["q_a_proj"])
    fused = {f"model.layers.{n}.self_attn.fused_qkv_a_proj": Slot(64, (32, 319)) for n in range(3)}
    for adapter, made_for, message in (
        (on_output, target({}), f"not apply base_model.model.{name}.lora_A.weight: its model has no linear layer"),
        (on_output, target({}, {name: "it is computed by a spell"}), "computed by a spell; merge it"),
        (on_output, target({name: Slot(127, (64,))}), r"128 inputs and rows 0 to 64 of 64; the server's .* 127 inputs"),
        (on_input, target(fused), r"rows 0 to 32 of 352; the server's .*parts of \(32, 319\)"),
        (on_experts, target({}, experts={1: (8, 64, 32)}), "the server's layer 2 has no routed experts"),
        (on_experts, target({}, experts=EXPERTS | {2: (4, 64, 32)}), r"\(8, 64, 32\), the server's layer 2 has \(4,"),
    ):
        with pytest.raises(ValueError, match=message):
            ServedAdapter(adapter, base, made_for)

"""`ktft plan` for a machine with a GPU: where experts run, what limits them, and the GPU memory that this takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_plan import DEEPSEEK, app, by_format, plan, runner

from ktft import config
from ktft.config import Settings
from ktft.system import GIB
from ktft.train.recipe import Recipe

BIG = ("--ram", "768G", "--gpu", "80G", "--cores", "32", "--bandwidth", "230G")


def lanes_of(*args: str, recipe: Path | None = None, name: str = "k4") -> dict[str, Any]:
    told = plan(DEEPSEEK, *([recipe] if recipe else []), *BIG, *args)
    return by_format(told)[name] | {"notes": told["notes"], "machine": told["machine"], "told": told["assumptions"]}


@pytest.fixture
def lane_recipe(tmp_path: Path) -> Callable[..., Path]:
    def write(**kt_config: Any) -> Path:
        path = tmp_path / "train.yaml"
        path.write_text(json.dumps({"per_device_train_batch_size": 1, "kt_config": kt_config}))
        return path

    return write


def test_lanes_of_a_described_machine(lane_recipe: Callable[..., Path]) -> None:
    recipe = lane_recipe(expert_format="k4")
    by_pcie = [lanes_of("--pcie", each, recipe=recipe) for each in ("3", "4", "5", "60G")]
    steps = [each["step_seconds"] for each in by_pcie]
    assert steps == sorted(steps, reverse=True)
    assert [each["machine"]["gpu"]["pcie_rate"] for each in by_pcie] == [13.5e9, 27e9, 54e9, 60e9]
    streamed = [each["lanes"]["row_shares"]["stream"] for each in by_pcie]
    assert streamed == sorted(streamed) and streamed[0] > 0
    for each in by_pcie:
        lanes = each["lanes"]
        assert sum(lanes["row_shares"].values()) == pytest.approx(1)
        assert each["step"]["experts"] == pytest.approx(lanes["forward_seconds"] + lanes["backward_seconds"])
        assert lanes["limited_by"] in ("cpu", "copy", "gpu")
        assert each["vram"]["expert lanes"] == config.LANE_BYTES
        assert each["vram"]["resident experts"] == 0
        assert each["vram"]["expert outputs"] == 58 * 2048 * 7168 * 2
    assert any("k4 experts: of their rows" in note and "PCIe" in note for note in by_pcie[0]["notes"])
    assert any("expert lanes 1.5 GiB, expert outputs 1.6 GiB" in note for note in by_pcie[0]["notes"])
    assert any("--pcie 54G, pinned, of 80 GiB" in line for line in lanes_of(recipe=recipe)["told"])


def test_a_gpu_with_room_is_told_to_train_without_checkpointing(lane_recipe: Callable[..., Path]) -> None:
    def notes(*args: str, **recipe: Any) -> list[str]:
        path = lane_recipe(expert_format="k4")
        path.write_text(json.dumps(json.loads(path.read_text()) | {"bf16": True} | recipe))
        told = lanes_of(*args, recipe=path)
        return [note for note in told["notes"] if "disable_gradient_checkpointing" in note]

    (note,) = notes(cutoff_len=1024)
    assert re.search(r"true fits too, in [\d.]+ GiB of GPU memory, at about [\d.]+ s a step", note)
    assert not notes()
    assert not notes(cutoff_len=1024, disable_gradient_checkpointing=True)


def test_forced_lanes_and_residents(lane_recipe: Callable[..., Path]) -> None:
    auto = lanes_of(recipe=lane_recipe(expert_format="k4"))
    for placement in ("cpu", "stream"):
        forced = lanes_of(recipe=lane_recipe(expert_format="k4", placement=placement))
        assert forced["lanes"]["row_shares"][placement] == 1
        assert forced["step_seconds"] > auto["step_seconds"]
        assert (forced["vram"]["expert lanes"] == 0) == (placement == "cpu")
    some = lanes_of("--routing", "zipf", recipe=lane_recipe(expert_format="k4", gpu_expert_memory="24G"))
    without = lanes_of("--routing", "zipf", recipe=lane_recipe(expert_format="k4"))
    assert some["vram"]["resident experts"] == 24 * GIB
    assert some["vram_bytes"] == without["vram_bytes"] + 24 * GIB
    assert some["step_seconds"] < without["step_seconds"]
    assert some["lanes"]["row_shares"]["resident"] > 24 * GIB / sum(some["packed_bytes"])
    every = lanes_of(recipe=lane_recipe(expert_format="k4", gpu_expert_memory="auto", placement="resident"))
    others = every["vram_bytes"] - every["vram"]["resident experts"]
    assert every["vram"]["resident experts"] > 5 * GIB
    assert every["machine"]["gpu"]["memory_bytes"] - every["vram_bytes"] == pytest.approx(others / 4, abs=2)
    assert every["fits"] and not every["tight"]


def test_residents_that_do_not_fit(lane_recipe: Callable[..., Path]) -> None:
    told = plan(DEEPSEEK, lane_recipe(expert_format="k4", gpu_expert_memory="60G"), *BIG, code=1)
    assert "GPU memory" in told["verdict"]
    change = next(each for each in told["changes"] if each["change"].startswith("kt_config.gpu_expert_memory: 0"))
    assert change["fits"]


def test_checkpointing_beside_a_gpu_keeps_outputs_and_not_activations(tmp_path: Path) -> None:
    rows = []
    for disabled in ("false", "true"):
        recipe = tmp_path / "train.yaml"
        recipe.write_text(
            f"per_device_train_batch_size: 1\ncutoff_len: 512\ndisable_gradient_checkpointing: {disabled}\n"
        )
        rows.append(by_format(plan(DEEPSEEK, recipe, *BIG[:3], "192G"))["k4"])
    kept, retained = rows
    assert kept["vram"]["expert outputs"] == 58 * 512 * 7168 * 2 and not retained["vram"]["expert outputs"]
    assert kept["ram"]["expert activations"] < retained["ram"]["expert activations"]
    # two forwards would take more than gate and up computed again in backward
    assert kept["lanes"]["forward_seconds"] == pytest.approx(retained["lanes"]["forward_seconds"])
    assert kept["lanes"]["backward_seconds"] < 2 * retained["lanes"]["backward_seconds"]


@pytest.mark.parametrize(
    ("options", "kt_config", "words"),
    [
        ((*BIG, "--pcie", "6"), {}, "--pcie is '6'; give a generation (3, 4, 5) or bytes a second"),
        ((*BIG, "--pcie", "fast"), {}, "--pcie: 'fast' is not a size"),
        ((*BIG, "--routing", "even"), {}, "'even' is not one of"),
        (("--ram", "64G"), {"placement": "stream"}, "placement is 'stream', but the machine has no GPU; describe one"),
        (BIG, {"gpu_expert_memory": "8X"}, "gpu_expert_memory is '8X'; give a size"),
    ],
)
def test_bad_lanes(
    options: tuple[str, ...], kt_config: dict[str, Any], words: str, lane_recipe: Callable[..., Path]
) -> None:
    done = runner.invoke(app, ["plan", str(DEEPSEEK), str(lane_recipe(**kt_config)), *options])
    assert done.exit_code == 2
    assert words in done.output


def test_use_cpu_and_a_lane_that_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="use_cpu is true, but placement is 'stream', which needs a GPU"):
        Recipe(use_cpu=True, settings=Settings(placement="stream"))


def test_experts_of_a_described_cpu_take_what_was_measured(tmp_path: Path) -> None:
    values = json.loads((DEEPSEEK / "config.json").read_text())
    qwen = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "torch_dtype": values["torch_dtype"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(qwen))
    recipe = tmp_path / "train.yaml"
    recipe.write_text(
        "per_device_train_batch_size: 1\ncutoff_len: 4096\ndisable_gradient_checkpointing: true\n"
        "kt_config: {placement: cpu}\n"
    )
    own = ("--ram", "256G", "--gpu", "192G", "--pcie", "5", "--cores", "16", "--bandwidth", "76G")
    lanes = by_format(plan(tmp_path, recipe, *own))["int8"]["lanes"]
    # 16 vCPUs with AMX: 24 and 28 ms a layer
    assert lanes["forward_seconds"] / 48 == pytest.approx(24e-3, rel=0.12)
    assert lanes["backward_seconds"] / 48 == pytest.approx(28e-3, rel=0.12)

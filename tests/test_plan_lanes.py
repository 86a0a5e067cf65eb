"""`ktft plan` for a machine with a GPU: where experts run, what limits them, and the GPU memory that this takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import refused
from planning import DEEPSEEK, QWEN_30B, by_format, plan, recipe

from ktft import config
from ktft.config import Settings
from ktft.system import GIB
from ktft.train.recipe import Recipe

__all__ = ["recipe"]

Recipes = Callable[..., Path]
BIG = ("--ram", "768G", "--gpu", "80G", "--cores", "32", "--bandwidth", "230G")


@pytest.fixture
def lanes_of(recipe: Recipes) -> Callable[..., dict[str, Any]]:
    """`lanes_of(*options, **kt_config)`: the row of k4, without residents by default, and what is told beside it."""

    def ask(*options: str, settings: dict[str, Any] | None = None, **kt_config: Any) -> dict[str, Any]:
        path = recipe(kt_config={"expert_format": "k4", "gpu_expert_memory": 0} | kt_config, **settings or {})
        told = plan(DEEPSEEK, path, *BIG, *options)
        return by_format(told)["k4"] | {name: told[name] for name in ("notes", "machine", "assumptions")}

    return ask


def test_lanes_of_a_described_machine(lanes_of: Callable[..., dict[str, Any]]) -> None:
    by_pcie = [lanes_of("--pcie", each) for each in ("3", "4", "5", "60G")]
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
        assert 0.95 * config.LANE_BYTES < each["vram"]["expert lanes"] <= config.LANE_BYTES
        assert each["vram"]["resident experts"] == 0
        assert each["vram"]["expert outputs"] == 58 * 2048 * 7168 * 2
    assert any("k4 experts: of their rows" in note and "PCIe" in note for note in by_pcie[0]["notes"])
    assert any("expert lanes 1.7 GiB, expert outputs 1.6 GiB" in note for note in by_pcie[0]["notes"])
    assert any("--pcie 54G, pinned, of 80 GiB" in line for line in lanes_of()["assumptions"])


def test_micro_batches_that_go_together_copy_each_expert_once(lanes_of: Callable[..., dict[str, Any]]) -> None:
    """As many as the GPU's memory allows; one more makes no more copies, but takes memory."""

    def of(count: int, asked: int | str, *options: str) -> dict[str, Any]:
        settings = {"gradient_accumulation_steps": count, "bf16": True}
        return lanes_of(*options, settings=settings, placement="stream", micro_batches_together=asked)

    alone, some, every = of(8, 1), of(64, "auto", "--gpu", "20G"), of(8, "auto")
    assert alone["micro_batches_together"] == 1 < some["micro_batches_together"] < 64
    assert every["micro_batches_together"] == 8
    assert 4 * every["step"]["experts"] < alone["step"]["experts"]
    assert every["vram"]["micro-batches together"] > 0 and "micro-batches together" not in alone["vram"]
    assert any("8 of a step's 8 micro-batches go through each layer together" in note for note in every["notes"])


def test_a_gpu_with_room_is_told_to_train_without_checkpointing(lanes_of: Callable[..., dict[str, Any]]) -> None:
    def notes(**settings: Any) -> list[str]:
        told = lanes_of(settings={"bf16": True} | settings)
        return [note for note in told["notes"] if "disable_gradient_checkpointing" in note]

    (note,) = notes(cutoff_len=1024)
    assert re.search(r"true fits too, in [\d.]+ GiB of GPU memory, at about [\d.]+ s a step", note)
    assert not notes(cutoff_len=4096)
    assert not notes(cutoff_len=1024, disable_gradient_checkpointing=True)


def test_layers_that_are_not_run_again(recipe: Recipes) -> None:
    """Those that fit keep their activations, and a step takes less for each. Layers of few tokens are recorded."""

    def of(memory: int | str, **settings: Any) -> tuple[float, float, list[str]]:
        kt_config = {"expert_format": "k4", "gpu_activation_memory": memory}
        path = recipe(kt_config=kt_config, bf16=True, **{"cutoff_len": 16384} | settings)
        told = plan(QWEN_30B, path, "--ram", "200G", "--gpu", "80G", "--cores", "16")
        found = by_format(told)["k4"]
        notes = [note for note in told["notes"] if "layers keep their activations" in note]
        return found["step_seconds"], found["vram"].get("stored activations", 0), notes

    every, some, none = of("auto"), of("8G"), of(0)
    assert every[0] < some[0] < none[0] and none[1:] == (0, [])
    # On an H100 a layer kept 39,000 to 41,000 bytes of a token
    assert every[1] / 48 / 16384 == pytest.approx(40_000, rel=0.2) and every[1] > some[1] > 7 * GIB
    assert every[2][0].startswith("48 of 48 layers keep their activations, in")
    assert of("auto", cutoff_len=2048)[1] == 0 < of("auto", cutoff_len=16384, gradient_accumulation_steps=2)[1]
    assert of("auto", disable_gradient_checkpointing=True)[1] == 0


def test_forced_lanes_and_residents(lanes_of: Callable[..., dict[str, Any]]) -> None:
    auto = lanes_of()
    for placement in ("cpu", "stream"):
        forced = lanes_of(placement=placement)
        assert forced["lanes"]["row_shares"][placement] == 1
        assert forced["step_seconds"] > auto["step_seconds"]
        assert (forced["vram"]["expert lanes"] == 0) == (placement == "cpu")
    some = lanes_of("--routing", "zipf", gpu_expert_memory="24G")
    without = lanes_of("--routing", "zipf")
    assert some["vram"]["resident experts"] == 24 * GIB
    varied = ("expert lanes", "recordings")  # there are as many recordings as there is memory for
    of_all_else = (each["vram_bytes"] - sum(each["vram"][name] for name in varied) for each in (without, some))
    assert next(of_all_else) + 24 * GIB == next(of_all_else)
    assert some["step_seconds"] < without["step_seconds"]
    assert some["lanes"]["row_shares"]["resident"] > 24 * GIB / sum(some["packed_bytes"])
    every = lanes_of(gpu_expert_memory="auto", placement="resident")
    assert every["vram"] == lanes_of(gpu_expert_memory=None, placement="resident")["vram"]  # by default
    others = every["vram_bytes"] - every["vram"]["resident experts"]
    assert every["vram"]["resident experts"] > 5 * GIB
    assert every["machine"]["gpu"]["memory_bytes"] - every["vram_bytes"] == pytest.approx(others / 4, abs=2)
    assert every["fits"] and not every["tight"]


def test_residents_that_do_not_fit(recipe: Recipes) -> None:
    told = plan(DEEPSEEK, recipe(kt_config={"expert_format": "k4", "gpu_expert_memory": "77G"}), *BIG, code=1)
    assert "GPU memory" in told["verdict"]
    change = next(each for each in told["changes"] if each["change"].startswith("kt_config.gpu_expert_memory: 0"))
    assert change["fits"]


def test_checkpointing_beside_a_gpu_keeps_outputs_and_not_activations(recipe: Recipes) -> None:
    streams = {"kt_config": {"gpu_expert_memory": 0}, "cutoff_len": 512}
    recipes = (recipe(disable_gradient_checkpointing=disabled, **streams) for disabled in (False, True))
    kept, retained = (by_format(plan(DEEPSEEK, path, *BIG[:3], "192G"))["k4"] for path in recipes)
    assert kept["vram"]["expert outputs"] == 58 * 512 * 7168 * 2 and not retained["vram"]["expert outputs"]
    assert kept["ram"]["expert activations"] < retained["ram"]["expert activations"]
    # two forwards would take more than gate and up computed again in backward
    assert kept["lanes"]["forward_seconds"] == pytest.approx(retained["lanes"]["forward_seconds"], rel=0.02)
    assert kept["lanes"]["backward_seconds"] < 2 * retained["lanes"]["backward_seconds"]


@pytest.mark.parametrize(
    ("options", "kt_config", "words"),
    [
        ((*BIG, "--pcie", "6"), {}, "--pcie is '6'; give a generation (3, 4, 5) or bytes a second"),
        ((*BIG, "--pcie", "fast"), {}, "--pcie: 'fast' is not a size"),
        (("--ram", "64G"), {"placement": "stream"}, "placement is 'stream', but the machine has no GPU; describe one"),
        (BIG, {"gpu_expert_memory": "8X"}, "gpu_expert_memory is '8X'; give a size"),
    ],
)
def test_bad_lanes(options: tuple[str, ...], kt_config: dict[str, Any], words: str, recipe: Recipes) -> None:
    assert words in refused("plan", DEEPSEEK, recipe(kt_config=kt_config), *options)


def test_use_cpu_and_a_lane_that_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="use_cpu is true, but placement is 'stream', which needs a GPU"):
        Recipe(use_cpu=True, settings=Settings(placement="stream"))


def test_experts_of_a_described_cpu_take_what_was_measured(tmp_path: Path, recipe: Recipes) -> None:
    values = json.loads((DEEPSEEK / "config.json").read_text())
    qwen = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "torch_dtype": values["torch_dtype"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(qwen))
    path = recipe(cutoff_len=4096, disable_gradient_checkpointing=True, kt_config={"placement": "cpu"})
    own = ("--ram", "256G", "--gpu", "192G", "--pcie", "5", "--cores", "16", "--bandwidth", "76G")
    lanes = by_format(plan(tmp_path, path, *own))["int8"]["lanes"]
    # 16 vCPUs with AMX: 24 and 28 ms a layer
    assert lanes["forward_seconds"] / 48 == pytest.approx(24e-3, rel=0.12)
    assert lanes["backward_seconds"] / 48 == pytest.approx(28e-3, rel=0.12)

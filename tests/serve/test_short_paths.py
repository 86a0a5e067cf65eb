"""Shorter forwards of vLLM's layers give what vLLM's own give, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import IDS, served
from tiny import write_checkpoint

from ktft import native
from ktft.hosts.vllm import ATTENTION_FORWARD, EXPERTS_FORWARD, NORM_FORWARD
from ktft.serve.vllm import norms

PATCHES = {each.owner.rpartition(".")[2]: each for each in (NORM_FORWARD, ATTENTION_FORWARD, EXPERTS_FORWARD)}
NORMS = {"ir_op_priority": json.loads(norms.ARGUMENT[1])}
LONGER = [5 + i % 50 for i in range(40)]


def shortened(model: Any) -> dict[str, list[Any]]:
    """The layers with a shorter forward, by the name of their class."""
    found: dict[str, list[Any]] = {}
    for module in model.modules():
        if "forward" in vars(module):
            found.setdefault(type(module).__name__, []).append(module)
    return found


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3moe", {"head_dim": 32}),
        pytest.param("qwen2moe", {"num_attention_heads": 2, "num_key_value_heads": 1}, id="shared experts"),
        pytest.param("glm4", {"head_dim": 32, "routed_scaling_factor": 2.5}, id="shared experts and a factor"),
    ],
)
def test_answers_are_those_of_vllms_own_forwards(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    checkpoint = write_checkpoint(family, tmp_path / "base", **overrides)
    with served(checkpoint, adapter_swap=False, options=NORMS) as server:
        found = shortened(server.model)
        expected = {"Attention", "MoERunner"} | ({"RMSNorm"} if native.cpu_features()["avx512"] else set())
        assert found.keys() == expected
        scaled = {runner.routed_scaling_factor for runner in found["MoERunner"]}
        assert scaled == {overrides.get("routed_scaling_factor", 1.0)}
        short = server.logprobs(), server.together([(IDS, 0), (LONGER, 0)], tokens=6)
        for kind, modules in found.items():
            for module in modules:
                PATCHES[kind].take_off(module)
        assert not shortened(server.model)
        server.llm.reset_prefix_cache()
        own = server.logprobs(), server.together([(IDS, 0), (LONGER, 0)], tokens=6)
    assert torch.equal(short[0], own[0])
    for (ids, said), (own_ids, own_said) in zip(short[1], own[1], strict=True):
        assert ids == own_ids and torch.equal(said, own_said)


def test_a_layer_of_which_more_is_asked_keeps_its_forward(tmp_path: Path) -> None:
    """Norms where vLLM is told to compute them by torch's operations, and any layer for arguments of another kind."""
    checkpoint = write_checkpoint("qwen3moe", tmp_path / "base", head_dim=32)
    with served(checkpoint, adapter_swap=False) as server:
        assert shortened(server.model).keys() == {"Attention", "MoERunner"}
    if not native.cpu_features()["avx512"]:
        return
    with served(checkpoint, adapter_swap=False, options=NORMS) as server:
        norm = shortened(server.model)["RMSNorm"][0]
        x = torch.randn(3, norm.weight.shape[0])
        short = norm(x)
        NORM_FORWARD.take_off(norm)
        assert short.dtype == torch.float32 and torch.equal(short, norm(x)), "fp32 beside weights in bf16"

"""Adapters on a model with latent attention, also from the start of the server."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import write_checkpoint

pytest.importorskip("vllm")

from adapters import random_adapter
from effects import DSV3, MLA, error_of_effect, expected
from in_process import served

PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "q_b_proj", "o_proj")


def test_adapters_on_every_linear_layer(tmp_path: Path) -> None:
    """Latent attention with fused input projections, a dense layer and shared experts; one is there from the start."""
    base = write_checkpoint("dsv3", tmp_path / "base", **DSV3)
    one = random_adapter(base, tmp_path / "one", target_modules=["q_a_proj", "kv_a_proj_with_mqa"])
    others = [random_adapter(base, tmp_path / each, target_modules=[each]) for each in PROJECTIONS]
    with served(base, options=MLA, adapters=(("one", str(one)),), max_lora_rank=8) as running:
        assert running.adapter["name"] == "one"
        plain = running.logprobs()
        assert (plain - expected(base)).norm() < 1e-2 * plain.norm()
        running.number = 1
        with_one = running.logprobs()
        for adapter in (one, *others):
            running.use(adapter)
            assert error_of_effect(running, base, adapter, plain) < 0.1, adapter
            assert torch.equal(running.logprobs(), with_one) == (adapter is one)
        refused = random_adapter(base, tmp_path / "latent", target_modules=["kv_b_proj"])
        with pytest.raises(ValueError, match="would not apply .*kv_b_proj.lora_A.* multi-head latent .*ktft merge"):
            running.use(refused)
        large = random_adapter(base, tmp_path / "large", r=9, target_modules=["o_proj"])
        with pytest.raises(ValueError, match=r"o_proj.* has rank 9, the server takes 8 .*--max-lora-rank 9"):
            running.use(large)

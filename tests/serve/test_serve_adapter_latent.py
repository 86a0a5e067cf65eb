"""Adapters on a model with latent attention, from the start of the server and in compiled code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import write_checkpoint

pytest.importorskip("vllm")

from adapters import random_adapter
from effects import DSV3, MLA, error_of_effect, expected
from in_process import served

from ktft.serve.runtime.lora_linear import A
from ktft.serve.vllm.lora_linear import slots_of

PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "q_b_proj", "o_proj")


def test_an_adapter_from_the_start_in_compiled_code(tmp_path: Path) -> None:
    """Latent attention with fused input projections, a dense layer and shared experts, in slots of a fixed rank."""
    base = write_checkpoint("dsv3", tmp_path / "base", **DSV3)
    one = random_adapter(base, tmp_path / "one", target_modules=["q_a_proj", "kv_a_proj_with_mqa"])
    others = [random_adapter(base, tmp_path / each, target_modules=[each]) for each in PROJECTIONS]
    named, options = (("one", str(one)),), MLA | {"enforce_eager": False}
    with served(base, options=options, adapters=named, max_lora_rank=8) as running:
        assert running.adapter["name"] == "one"
        (first, *_) = slots_of(running.model).values()
        assert len(getattr(first, A)) == 8 * len(first.output_partition_sizes)
        with_one = running.logprobs()
        running.set_adapter(None)
        plain = running.logprobs()
        assert (plain - expected(base)).norm() < 1e-2 * plain.norm()
        for adapter in (one, *others):
            running.set_adapter(adapter)
            assert error_of_effect(running, base, adapter, plain) < 0.1, adapter
            assert torch.equal(running.logprobs(), with_one) == (adapter is one)
        refused = random_adapter(base, tmp_path / "latent", target_modules=["kv_b_proj"])
        with pytest.raises(ValueError, match="would not apply .*kv_b_proj.lora_A.* multi-head latent .*ktft merge"):
            running.set_adapter(refused)
        large = random_adapter(base, tmp_path / "large", r=9, target_modules=["o_proj"])
        with pytest.raises(ValueError, match=r"o_proj.* has rank 9, the server takes 8 .*--max-lora-rank 9"):
            running.set_adapter(large)

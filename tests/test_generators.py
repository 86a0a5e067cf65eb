"""What is measured, compared or chosen at first use moves no random generator: resuming and checkpointing need that."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from adapted import load
from given import Checkpoint

from ktft.model import norms, rotary


def states() -> list[object]:
    kind, keys, *rest = np.random.get_state()
    return [torch.get_rng_state().tolist(), (kind, keys.tolist(), *rest), random.getstate()]


def test_a_first_step_draws_nothing(tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout a step needs no random number; rates of lanes, norms and rotation are measured in it."""
    monkeypatch.setenv("KTFT_EMULATE_GPU", "1")
    for module in (norms, rotary):
        monkeypatch.setattr(module, "DEVICES", {"cpu"})  # stands for a GPU, where they are fused
    model = load(tiny_checkpoint("dsv3"), torch.bfloat16, expert_format="int8").train()
    before, measured = states(), dict(norms._agree)
    model.get_input_embeddings().weight.requires_grad_()
    ids = torch.arange(3, 19)[None]
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
    assert dict(norms._agree) != measured
    assert states() == before

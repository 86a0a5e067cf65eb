"""A process that holds some of every layer's experts: it reads, packs, computes, trains, saves and plans just these."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import load as load_model
from adapted import lora_config, tensors_of
from commands import run
from contract import random_inputs
from given import Checkpoint
from lanes import no_calibration
from quantize import read_all, write
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

import ktft
from ktft.checkpoint.load import ExpertPlan
from ktft.checkpoint.reader import CheckpointReader
from ktft.config import EXPERT_FORMATS, PROJECTIONS
from ktft.held import ELSEWHERE, HeldExperts
from ktft.model.experts import KtftExperts, find_experts
from ktft.model.memory import packed_per_node
from ktft.model.shape import shape_of

__all__ = ["no_calibration"]

EXPERTS, PARTS = 8, ((0, 3), (3, 7), (7, 8))


def load(directory: Path, part: tuple[int, int] | None = None, expert_format: str | None = None, **options: Any) -> Any:
    return load_model(directory, torch.bfloat16, part=part, expert_format=expert_format, **options)


def first(model: Any) -> KtftExperts:
    experts: KtftExperts = next(iter(find_experts(model).values()))
    return experts


def batch(experts: KtftExperts) -> tuple[Tensor, Tensor, Tensor]:
    return random_inputs(21, experts.hidden_size, 3, experts=EXPERTS)


def assert_same_bytes(whole: KtftExperts, part: KtftExperts) -> None:
    for (local, number), projection in product(enumerate(part.held.numbers), PROJECTIONS):
        mine, theirs = part.layer.export_packed(local, projection), whole.layer.export_packed(number, projection)
        assert torch.equal(mine, theirs)


def check_part(whole: KtftExperts, part: KtftExperts) -> None:
    """The part has the whole layer's bytes, and the bits that this one gives for these routes alone."""
    assert_same_bytes(whole, part)
    hidden, index, weights = batch(whole)
    here = index.where(torch.isin(index, torch.tensor(list(part.held.numbers))), ELSEWHERE)
    expected, saved = whole.layer.forward(hidden, here, weights, None, "retain")
    grads = whole.layer.backward(saved, hidden, hidden, here, weights, None)
    given, routing = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
    out = part(given, index, routing)
    out.backward(hidden)
    assert torch.equal(out, expected)
    assert torch.equal(given.grad, grads.hidden_states) and torch.equal(routing.grad, grads.top_k_weights)  # type: ignore[arg-type]


@pytest.mark.parametrize("fmt", EXPERT_FORMATS)
def test_parts_of_a_checkpoint(tiny_checkpoint: Checkpoint, fmt: str) -> None:
    directory = tiny_checkpoint("qwen3moe")
    whole, packed = first(load(directory, expert_format=fmt)), 0
    for part in PARTS:
        held = first(load(directory, part, expert_format=fmt))
        assert held.layer.num_experts == part[1] - part[0]
        check_part(whole, held)
        packed += held.layer.packed_bytes
    assert packed == whole.layer.packed_bytes


@pytest.mark.parametrize("family", ["gpt_oss", "dsv3"])
def test_stacked_tensors_and_biases(tiny_checkpoint: Checkpoint, family: str) -> None:
    whole = first(load(tiny_checkpoint(family), expert_format="int8"))
    count = whole.num_experts
    held = first(load(tiny_checkpoint(family), (1, count - 1), expert_format="int8"))
    assert held.held == HeldExperts(tuple(range(1, count - 1)), count)
    if whole.layer.biases:
        assert torch.equal(held.layer.bias(0, "down_proj"), whole.layer.bias(1, "down_proj"))
    assert_same_bytes(whole, held)


def test_part_of_a_converted_checkpoint(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = tiny_checkpoint("qwen3moe")
    status, said = run("convert", source, tmp_path / "k4", "--format", "k4", "--threads", "1")
    assert status == 0, said
    check_part(first(load(tmp_path / "k4")), first(load(tmp_path / "k4", PARTS[1])))


def test_only_the_parts_tensors_are_read(tiny_checkpoint: Checkpoint) -> None:
    reader, plans = CheckpointReader.from_directory(tiny_checkpoint("qwen3moe")), []
    for part in (PARTS[0], None):
        found = find_experts(load(tiny_checkpoint("qwen3moe"), part))
        layers = {number: each.layer for number, each in enumerate(found.values())}
        plans.append(ExpertPlan(reader, next(iter(found.values())).family, layers))
    assert plans[0].tensor_names == plans[1].tensor_names
    assert plans[0].nbytes() * EXPERTS == plans[1].nbytes() * (PARTS[0][1] - PARTS[0][0])
    read = {name for number in range(3) for name, _ in plans[0].pieces(number)}
    assert read and not any(f".experts.{PARTS[0][1]}." in name for name in read)


def test_an_expert_that_nobody_has_is_missed_by_every_part(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Headers of all experts are checked, also of those that another process holds."""
    source = tiny_checkpoint("qwen3moe")
    tensors = {name: each for name, each in read_all(source).items() if ".experts.7." not in name}
    with pytest.raises(ValueError, match=r"lacks expert tensors: .*experts\.7\."):
        load(write(source, tmp_path / "model", tensors, None), PARTS[0])


def adapted(directory: Path, part: tuple[int, int] | None) -> Any:
    torch.manual_seed(0)
    return ktft.get_peft_model(load(directory, part), lora_config(init_lora_weights=False))


def test_adapters_of_the_parts_are_the_whole_adapter(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Each part loads its own of a whole adapter, trains it, and saves it under the model's numbers."""
    directory = tiny_checkpoint("qwen3moe")
    adapted(directory, None).save_pretrained(tmp_path / "whole")
    joined: dict[str, Tensor] = {}
    for number, part in enumerate(PARTS):
        model = ktft.load_adapter(load(directory, part), tmp_path / "whole", is_trainable=True)
        ids = torch.arange(24).reshape(2, 12)
        model.train()(input_ids=ids, labels=ids).loss.backward()
        trained = [p for n, p in model.named_parameters() if "experts" in n and p.requires_grad]
        assert {len(p) for p in trained} == {part[1] - part[0]} and all(p.grad.any() for p in trained)
        model.save_pretrained(tmp_path / str(number))
        ktft.load_adapter(load(directory, part), tmp_path / str(number))  # a part's own file is enough for it
        joined |= tensors_of(tmp_path / str(number))
    whole = tensors_of(tmp_path / "whole")
    assert joined.keys() == whole.keys() and all(torch.equal(joined[name], whole[name]) for name in whole)
    lacking = {name: tensor for name, tensor in whole.items() if ".experts.1." not in name}
    save_file(lacking, tmp_path / "whole" / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"are missing.*experts\.1\."):
        ktft.load_adapter(load(directory, PARTS[0]), tmp_path / "whole")


@pytest.mark.usefixtures("no_calibration")
@pytest.mark.parametrize("placement", ["stream", "cpu"])
def test_in_lanes(tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, placement: str) -> None:
    """The sum over the parts is the whole layer's output, wherever their experts run, and so are gradients."""
    monkeypatch.setenv("KTFT_EMULATE_GPU", "1")
    directory = tiny_checkpoint("qwen3moe")
    found = []
    for parts in ((None,), PARTS):
        out = grad = torch.zeros(())
        for part in parts:
            experts = first(load(directory, part, placement=placement))
            hidden, index, weights = batch(experts)
            given = hidden.float().requires_grad_()
            part_out = experts(given, index, weights)
            part_out.backward(hidden.float())
            assert given.grad is not None
            out, grad = out + part_out.detach(), grad + given.grad
        found.append((out, grad))
    for whole, summed in zip(*found, strict=True):
        assert (whole - summed).norm() < 5e-3 * whole.norm()


def test_plan_of_a_part(tiny_checkpoint: Checkpoint) -> None:
    directory = tiny_checkpoint("qwen3moe")
    config = AutoConfig.from_pretrained(directory)
    shape, _ = shape_of(config, PARTS[1])
    layers = [each.layer for each in find_experts(load(directory, PARTS[1], expert_format="int8")).values()]
    assert sum(packed_per_node(shape.moe.values(), "int8", 1)) == sum(layer.packed_bytes for layer in layers)
    whole, _ = shape_of(config)
    assert shape.expert_parameters * EXPERTS == whole.expert_parameters * 4


def test_refusals(tiny_checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match="experts 6, 7, 8 of a layer that has 8"):
        load(tiny_checkpoint("qwen3moe"), (6, 9))
    experts = first(load(tiny_checkpoint("qwen3moe"), PARTS[0]))
    hidden, index, weights = batch(experts)
    for wrong in (-1, EXPERTS):
        index[0, 0] = wrong
        with pytest.raises(ValueError, match="routed to expert"):
            experts(hidden, index, weights)

"""Blocks that call their experts in another way, and experts without weights: Llama-4 and LongCat-Flash."""

from __future__ import annotations

import copy
from pathlib import Path

import commands
import pytest
import torch
from contract import relative
from given import Checkpoint
from quantize import read_all, separate, write
from stock import IDS, load, text_loss
from tiny import write_checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import ktft
from ktft.model.experts import find_experts

ROUTERS = {"llama4": "router.weight", "longcat": "router.classifier.weight"}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Those of all but the experts' weights."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." not in name)
    text_loss(model)[1].backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}


@pytest.mark.parametrize("family", ROUTERS)
def test_gradients_of_all_around_the_experts(tiny_checkpoint: Checkpoint, family: str) -> None:
    """A score that scales an expert's input has another gradient than one that weighs its output."""
    path = tiny_checkpoint(family)
    stock, mine = load(path, None), load(path)
    expected, found = gradients(stock), gradients(mine)
    assert expected.keys() == found.keys()
    assert sum(name.endswith(ROUTERS[family]) for name in found) == 2
    for name, gradient in expected.items():
        assert relative(found[name], gradient) <= 0.01, name


@pytest.mark.parametrize("family", ROUTERS)
def test_the_whole_model_is_verified(tiny_checkpoint: Checkpoint, family: str) -> None:
    """The block's own forward calls stock experts too, which are put in the place of ktft's."""
    status, said = commands.run("verify", tiny_checkpoint(family), "--whole", "--threads", "1", "--format", "int8")
    assert status == 0 and "The whole model" in said, said


def test_a_copy_calls_its_own_experts(tiny_checkpoint: Checkpoint) -> None:
    model = load(tiny_checkpoint("llama4"))
    copied = copy.deepcopy(model)
    for name in find_experts(model):
        model.set_submodule(name, nn.Identity())
    with torch.no_grad():
        assert torch.equal(text_loss(copied)[0], text_loss(load(tiny_checkpoint("llama4")))[0])


def test_several_scaled_inputs_of_a_token(tmp_path: Path) -> None:
    path = write_checkpoint("llama4", tmp_path, num_experts_per_tok=3)
    with torch.no_grad():
        assert relative(text_loss(load(path))[0], text_loss(load(path, None))[0]) <= 0.02


def test_experts_one_by_one(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """As FP8 releases of Llama-4 have them."""
    path = tiny_checkpoint("llama4")
    apart = write(path, tmp_path / "apart", separate(read_all(path), transposed=True), None)
    assert any(".experts.7.gate_proj.weight" in name for name in read_all(apart))
    with torch.no_grad():
        assert torch.equal(text_loss(load(apart))[0], text_loss(load(path))[0])


def test_the_text_model_alone(tiny_checkpoint: Checkpoint) -> None:
    config = ktft.KtftConfig(expert_format="bf16", threads=1)
    path = tiny_checkpoint("llama4")
    text = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=config)
    with torch.no_grad():
        assert relative(text_loss(text)[0].float(), text_loss(load(path))[0]) <= 0.02


def test_a_release_has_no_weights_of_experts_that_compute_nothing(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tiny_checkpoint("longcat")
    tensors = read_all(path)
    released = {name: t for name, t in tensors.items() if not any(f".experts.{n}." in name for n in range(8, 12))}
    assert len(released) < len(tensors)
    apart = write(path, tmp_path / "apart", released, None)
    with torch.no_grad():
        assert torch.equal(text_loss(load(apart))[0], text_loss(load(path))[0])


def test_parts_add_what_computes_nothing_once(tiny_checkpoint: Checkpoint) -> None:
    path = tiny_checkpoint("longcat")
    hidden, weights = torch.randn(6, 64), torch.rand(6, 3)
    index = torch.tensor([[0, 5, 8], [9, 10, 11], [1, 2, 3], [7, 8, 4], [8, 9, 6], [3, 4, 11]])

    def out(part: tuple[int, int] | None) -> Tensor:
        config = ktft.KtftConfig(expert_format="bf16", threads=1, part=part)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=config)
        # With a backward, so that parts and the whole have the same order of work
        out = next(iter(find_experts(model).values()))(hidden.requires_grad_(), index, weights)
        return out.detach()

    whole = out(None)
    assert relative(out((0, 3)) + out((3, 8)), whole) < 1e-5
    torch.testing.assert_close(whole[1], hidden[1].detach() * weights[1].sum())


def test_a_number_that_no_expert_has_is_refused(tiny_checkpoint: Checkpoint) -> None:
    experts = next(iter(find_experts(load(tiny_checkpoint("longcat"))).values()))
    for wrong in (12, -1):
        with pytest.raises(ValueError, match="expert"):
            experts(torch.randn(1, 64), torch.tensor([[0, 1, wrong]]), torch.rand(1, 3))


@pytest.mark.full
@pytest.mark.parametrize("family", ROUTERS)
def test_generates_as_stock_does(tiny_checkpoint: Checkpoint, family: str) -> None:
    path, found = tiny_checkpoint(family), []
    for model in (load(path, None), load(path)):
        found.append(model.generate(IDS[:1], max_new_tokens=8, do_sample=False))
    assert found[0].shape[1] == IDS.shape[1] + 8
    assert torch.equal(found[0][:, : IDS.shape[1] + 1], found[1][:, : IDS.shape[1] + 1])

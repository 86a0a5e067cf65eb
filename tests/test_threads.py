"""One model in several threads: training, evaluation and generation on every placement give what one thread gives."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from contract import EXPERTS, TAILS, inputs_for, make_layer, make_lora, relative
from lanes import no_calibration
from torch import Tensor

from ktft import config, native
from ktft.checkpoint.families import FAMILIES
from ktft.config import Settings
from ktft.lanes.gpu import lane as lane_module
from ktft.lanes.lanes import Lanes
from ktft.lora import ExpertLora
from ktft.model.experts import KtftExperts
from ktft.train.optimizer import AdamW

__all__ = ["no_calibration"]

HIDDEN, INTERMEDIATE, RANK = 64, 96, 4
PLACEMENTS = {name: {"placement": name} for name in config.PLACEMENTS}
PLACEMENTS["resident"]["gpu_expert_memory"] = 100_000
CALLS = 40

pytestmark = pytest.mark.usefixtures("no_calibration")


def make_model(placement: str) -> list[KtftExperts]:
    """Three layers in the same lanes; "none" has none of them, as without a GPU."""
    layers = [make_layer(HIDDEN, INTERMEDIATE, fmt, native.default_isa(), threads=2) for fmt in ("int8", "k4", "int8")]
    model = [KtftExperts(layer, FAMILIES["qwen3_moe"]).train() for layer in layers]
    if placement != "none":
        lanes = Lanes(Settings(**PLACEMENTS[placement]), on_cpu=True)
        for number, experts in enumerate(model):
            experts.run_in(lanes, number)
    return model


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    x, index, weights = (tensor.detach() for tensor in inputs_for(TAILS[2], HIDDEN, torch.float32))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=generator)
    return x + torch.randn(x.shape, generator=generator), index[order], weights[order]


def evaluated(model: list[KtftExperts], lora: ExpertLora | None, seed: int) -> list[Tensor]:
    with torch.no_grad():
        return [experts(*batch(seed), lora) for experts in model]


def trained(model: list[KtftExperts], lora: ExpertLora | None, seed: int) -> list[Tensor]:
    """Outputs, and gradients of one micro-batch."""
    assert lora is not None
    x, index, weights = batch(seed)
    x.requires_grad_()
    outs = [experts(x, index, weights, lora) for experts in model]
    leaves = [x, *lora.parameters()]
    return [out.detach() for out in outs] + list(torch.autograd.grad(sum(out.sum() for out in outs), leaves))


def run_together(works: list[Callable[[], None]]) -> None:
    """Run in a thread each, all at once; what one of them raises is raised."""
    errors: list[BaseException] = []
    begin = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        try:
            begin.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("placement", [*PLACEMENTS, "none"])
def test_two_threads_at_one_model(placement: str) -> None:
    """One trains and one generates, each with adapters of its own; residents are exchanged meanwhile."""
    model = make_model(placement)
    loras = [make_lora(HIDDEN, INTERMEDIATE, RANK, torch.float32) for _ in range(2)]
    works = [(trained, loras[0], 1), (evaluated, loras[1], 2)]
    expected = [work(model, lora, seed) for work, lora, seed in works]
    wrong: list[str] = []

    def call(number: int) -> None:
        work, lora, seed = works[number]
        for _ in range(CALLS):
            for at, (found, true) in enumerate(zip(work(model, lora, seed), expected[number], strict=True)):
                if not relative(found, true) < 1e-2:
                    wrong.append(f"thread {number}, tensor {at}: {relative(found, true)}")
            laned = model[0].laned
            if number == 0 and laned is not None:
                laned.lanes.end_step()
                laned.lanes.begin_step()

    run_together([lambda: call(0), lambda: call(1)])
    assert not wrong, wrong[:5]


def test_a_kept_output_is_of_the_same_hidden_states() -> None:
    """A top-1 router with normalized weights gives two batches the same routing, bit for bit."""
    (experts, *_) = make_model("stream")
    index, weights = torch.tensor([[0], [1], [2], [3], [0]]), torch.ones(5, 1)
    first, second = (torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    with torch.no_grad():
        experts(first, index, weights)  # in train mode, as checkpointing's first forward; no backward follows
        true = experts.eval()(second, index, weights)
    found = experts.train()(second.requires_grad_(), index, weights)
    assert torch.equal(found, true)


def test_a_step_leaves_no_kept_output_behind() -> None:
    (experts, *_) = make_model("stream")
    assert experts.laned is not None
    with torch.no_grad():
        experts(*batch(1))
    assert len(experts.laned.kept) == 1
    experts.laned.lanes.begin_step()
    assert len(experts.laned.kept) == 0


@pytest.mark.parametrize("placement", ["none", "cpu", "stream"])
def test_an_expert_number_below_zero_is_refused(placement: str) -> None:
    (experts, *_) = make_model(placement)
    x, index, weights = batch(1)
    index[3, 1] = native.ELSEWHERE
    with pytest.raises(ValueError, match=rf"expert -1, but the layer's experts are 0 to {EXPERTS - 1}"):
        experts(x, index, weights)


def test_the_optimizer_waits_for_a_call_that_reads_the_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    (experts, *_), lora = make_model("stream"), make_lora(HIDDEN, INTERMEDIATE, RANK, torch.float32)
    inside, go = threading.Event(), threading.Event()
    original = lane_module.chunk_forward

    def slow(*args: object) -> None:
        inside.set()
        assert go.wait(60)
        original(*args)

    monkeypatch.setattr(lane_module, "chunk_forward", slow)
    parameters = lora.parameters()
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    call = threading.Thread(target=evaluated, args=([experts], lora, 1))
    step = threading.Thread(target=AdamW(parameters, lr=1.0).step)
    call.start()
    assert inside.wait(60)
    step.start()
    step.join(0.3)
    waits = step.is_alive() and all(map(torch.equal, parameters, before))
    go.set()
    for thread in (call, step):
        thread.join(60)
    assert waits
    assert not any(map(torch.equal, parameters, before))


@pytest.mark.parametrize("placement", [*PLACEMENTS, "none"])
def test_inference_mode(placement: str) -> None:
    """LLaMA-Factory's `chat` and `api` generate in it; the model may be in training mode, and train later."""
    lora = make_lora(HIDDEN, INTERMEDIATE, RANK, torch.float32)
    expected = trained(make_model(placement), lora, 1)
    model = make_model(placement)
    with torch.inference_mode():
        found = [experts(*batch(1), lora) for experts in model]
        if model[0].laned is not None:
            model[0].laned.lanes.end_step()
    for after in (found, trained(model, lora, 1)):
        assert all(relative(one, other) < 1e-2 for one, other in zip(after, expected, strict=False))

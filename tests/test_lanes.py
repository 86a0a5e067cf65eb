"""Routed experts in lanes: every mix against the reference; checkpointing; failures. On a GPU if there is one, else the
CPU's torch stands in for it.
"""

from __future__ import annotations

import copy
import gc
import time
import weakref

import contract
import pytest
import torch
from contract import EXPERTS, GRADIENT_TOLERANCE, OUTPUT_TOLERANCE, make_layer, make_lora, relative
from lanes import no_calibration
from torch.utils.checkpoint import checkpoint

from ktft import native, reference
from ktft.checkpoint.families import FAMILIES
from ktft.config import PROJECTIONS, Settings
from ktft.lanes.decide.placer import Placement, Placer
from ktft.lanes.gpu.residents import STEPS
from ktft.lanes.lanes import Lanes
from ktft.lora import ExpertLora
from ktft.model.experts import KtftExperts

__all__ = ["no_calibration"]

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
HIDDEN, INTERMEDIATE, RANK = 64, 288, 8
ROWS = (17, 3, 0, 64, 9)
MIXES = {
    "cpu": ([0, 1, 3, 4], []),
    "stream": ([], [0, 1, 3, 4]),
    "both": ([0, 4], [3, 1]),
    "one streamed": ([0, 1, 3], [4]),
}


pytestmark = pytest.mark.usefixtures("no_calibration")


def inputs_for(rows, hidden, dtype=torch.bfloat16):
    x, index, weights = contract.inputs_for(rows, hidden, dtype)
    leaves = (tensor.detach().to(DEVICE).requires_grad_() for tensor in (x, weights))
    return next(leaves), index.to(DEVICE), next(leaves)


@pytest.fixture
def lora() -> ExpertLora:
    return make_lora(HIDDEN, INTERMEDIATE, RANK, torch.float32)


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """One for each forward of a native layer."""
    found, forward = [], native.ExpertLayer.forward
    monkeypatch.setattr(native.ExpertLayer, "forward", lambda *a, **k: found.append(1) or forward(*a, **k))
    return found


def make_experts(fmt: str = "int8", nodes: int = 1, activation: str = "retain", **settings) -> KtftExperts:
    layer = make_layer(HIDDEN, INTERMEDIATE, fmt, native.default_isa(), threads=2, nodes=nodes)
    experts = KtftExperts(layer, FAMILIES["qwen3_moe"], activation)
    experts.run_in(Lanes(Settings(**settings), on_cpu=DEVICE.type == "cpu"), 0)
    return experts


def force(monkeypatch: pytest.MonkeyPatch, cpu: list[int], stream: list[int]) -> None:
    def decide(self, counts, *_):
        zeros = dict.fromkeys(("cpu", "copy", "gpu"), 0.0)
        on_cpu, streamed = ([e for e in experts if counts[e]] for experts in (cpu, stream))
        return Placement(on_cpu, streamed, [], zeros, zeros, ahead=streamed)

    monkeypatch.setattr(Placer, "decide", decide)


def gradients(out, x, weights, lora):
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(3)).to(out.device)
    leaves = [x, weights, *lora.parameters()]
    for leaf in leaves:
        leaf.grad = None
    (out.float() * direction).sum().backward()  # reentrant checkpointing takes no list of inputs
    return [leaf.grad for leaf in leaves]


def compare(experts: KtftExperts, call=None, dtype=torch.bfloat16, oracle=reference.moe, **dropout: float) -> None:
    lora = make_lora(HIDDEN, INTERMEDIATE, RANK, torch.float32, **dropout)
    x, index, weights = inputs_for(ROWS, HIDDEN, dtype)
    out = (call or experts)(x, index, weights, lora)
    found = gradients(out, x, weights, lora)
    matrices = [torch.stack([experts.layer.dequantize(e, n) for e in range(EXPERTS)]) for n in PROJECTIONS]
    x, weights = (tensor.detach().cpu().requires_grad_() for tensor in (x, weights))
    expected_out = oracle(x, index.cpu(), weights, *matrices, lora)
    assert relative(out.cpu(), expected_out) < OUTPUT_TOLERANCE
    for actual, expected in zip(found, gradients(expected_out, x, weights, lora), strict=True):
        assert actual.dtype == expected.dtype and relative(actual.cpu(), expected) < GRADIENT_TOLERANCE


@pytest.mark.parametrize("activation", ["retain", "recompute"])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("fmt", ["int8", "k4"])
def test_every_mix(monkeypatch, fmt, mix, activation):
    force(monkeypatch, *MIXES[mix])
    compare(make_experts(fmt, nodes=2, activation=activation))


@pytest.mark.parametrize("fmt", native.FORMATS)
def test_every_format_in_both(monkeypatch, fmt):
    force(monkeypatch, *MIXES["both"])
    compare(make_experts(fmt))


def test_placed_by_itself():
    compare(make_experts(placement="auto"), dtype=torch.float32)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_computes_the_output_once(monkeypatch, calls, mix, use_reentrant):
    force(monkeypatch, *MIXES[mix])
    experts = make_experts().train()
    compare(experts, lambda *args: checkpoint(experts, *args, use_reentrant=use_reentrant))
    if use_reentrant:
        assert len(calls) == (1 if MIXES[mix][0] else 0)


def test_a_kept_output_needs_the_same_adapters(lora):
    experts = make_experts().train()
    x, index, weights = inputs_for(ROWS, HIDDEN)
    with torch.no_grad():
        experts(x, index, weights, lora)
        lora.pairs["up_proj"].b.mul_(2)
    later = experts(x, index, weights, lora)
    experts.eval()
    with torch.no_grad():
        assert torch.equal(later, experts(x, index, weights, lora))


@pytest.mark.parametrize("order", [1, -1])
def test_each_of_two_kept_outputs_is_found(lora, calls, order):
    """Reentrant checkpointing of two micro-batches whose forwards come before both backwards."""
    experts = make_experts().train()
    batches = [inputs_for(rows, HIDDEN) for rows in (ROWS, ROWS[::-1])]
    with torch.no_grad():
        outputs = [experts(*batch, lora) for batch in batches]
    calls.clear()
    for batch, out in list(zip(batches, outputs, strict=True))[::order]:
        assert torch.equal(experts(*batch, lora), out)
    assert not calls


def test_gradient_accumulation(monkeypatch, lora):
    force(monkeypatch, *MIXES["both"])
    experts = make_experts()
    for _ in range(2):
        x, index, weights = inputs_for(ROWS, HIDDEN)
        experts(x, index, weights, lora).float().sum().backward()
    twice = [parameter.grad.clone() for parameter in lora.parameters()]
    for parameter in lora.parameters():
        parameter.grad = None
    experts(x, index, weights, lora).float().sum().backward()
    for parameter, both in zip(lora.parameters(), twice, strict=True):
        assert relative(both, 2 * parameter.grad) < 1e-5


@pytest.mark.parametrize("use_reentrant", [True, None])
def test_lora_gradients_are_waited_for_last(monkeypatch, lora, use_reentrant):
    """What comes before the experts has its backward first; the gradients are the buffers that the lanes wrote."""
    force(monkeypatch, *MIXES["stream"])
    experts = make_experts()
    x, index, weights = inputs_for(ROWS, HIDDEN)
    order: list[str] = []

    def block(hidden):
        before = torch.tanh(hidden)
        if before.requires_grad:
            before.grad_fn.register_hook(lambda *_: order.append("before"))
        return experts(before, index, weights, lora)

    out = checkpoint(block, x, use_reentrant=True) if use_reentrant else block(x)
    gpu = experts.laned.lanes.running.gpu
    finish = gpu.finish
    monkeypatch.setattr(gpu, "finish", lambda: (order.append("finish"), finish()))
    for parameter in lora.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: order.append("accumulated"))
    out.float().square().sum().backward()
    if DEVICE.type == "cuda" and not use_reentrant:  # another thread has the nodes of CPU tensors
        order.remove("before")
        order.insert(0, "before")
    assert order == ["before", "finish", *["accumulated"] * len(lora.parameters())]
    assert len({parameter.grad.untyped_storage().data_ptr() for parameter in lora.parameters()}) == 1


def test_every_pass_of_every_step_finds_experts_on_their_way(monkeypatch, lora):
    """Those that were on their way the last time, too."""
    lanes = Lanes(Settings(placement="stream"), on_cpu=DEVICE.type == "cpu")
    layers = [make_experts(activation="recompute") for _ in range(2)]
    for number, experts in enumerate(layers):
        experts.run_in(lanes, number)
    found = []
    decide = Placer.decide

    def noting(self, *args):
        placement = decide(self, *args)
        for coming in args[4:]:
            found.append((set(coming.experts), set(placement.stream), placement.resident))
        return placement

    monkeypatch.setattr(Placer, "decide", noting)
    for _ in range(4):
        x, index, weights = inputs_for(ROWS, HIDDEN)
        out = x
        for experts in layers:
            out = experts(out, index, weights, lora)
        out.float().square().sum().backward()
    first_step = 4
    used = {0, 1, 3, 4}
    assert found[first_step:] == [(used, used, [])] * 12


def test_residents_take_part():
    experts = make_experts(placement="resident", gpu_expert_memory="1M")
    lanes = experts.laned.lanes
    compare(experts)
    for _ in range(STEPS):
        lanes.end_step()
    assert lanes.running.gpu.held(experts.layer)
    compare(experts)


def test_bad_routing_and_bad_values_are_named():
    experts = make_experts()
    x, index, weights = (t.detach().clone() for t in inputs_for(ROWS, HIDDEN))
    index[1, 1] = EXPERTS
    with pytest.raises(ValueError, match=f"expert {EXPERTS}, but the layer's experts are 0 to {EXPERTS - 1}"):
        experts(x, index, weights)
    index[1, 1] = 0
    x[2, 7] = float("inf")
    with pytest.raises(ValueError, match="NaN or Inf .token 2 of"):
        experts(x, index, weights)


@pytest.mark.parametrize("where", ["forward", "backward", "prefetch"])
def test_a_lane_that_fails_leaves_nothing_running(monkeypatch, lora, where):
    force(monkeypatch, *MIXES["both"])
    experts = make_experts()
    x, index, weights = inputs_for(ROWS, HIDDEN)
    lanes = experts.laned.lanes.on(x.device)
    experts(x, index, weights, lora).float().sum().backward()  # so that the next one has something to send ahead

    busy = []

    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def slow(name):
        whole = getattr(native.ExpertLayer, name)

        def call(*args, **kwargs):
            busy.append(name)
            time.sleep(0.1)
            try:
                return whole(*args, **kwargs)
            finally:
                busy.remove(name)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(lanes.gpu, where, fail)
        for name in ("forward", "backward"):
            patch.setattr(native.ExpertLayer, name, slow(name))
        with pytest.raises(torch.OutOfMemoryError):
            experts(x, index, weights, lora).float().sum().backward()
        assert not busy
    assert lanes.cpu.submit(lambda: 1).result(timeout=60) == 1
    compare(experts)


def test_copies_of_a_model_share_its_lanes():
    experts = make_experts()
    assert copy.deepcopy(experts).laned.lanes is experts.laned.lanes


@pytest.mark.parametrize("use_reentrant", [True, None])
def test_a_step_leaves_nothing_to_the_garbage_collector(lora, use_reentrant):
    """Tensors in a cycle hold a GPU's memory until Python looks for cycles, which may be many steps later."""
    experts = make_experts().train()
    x, index, weights = inputs_for(ROWS, HIDDEN)
    seen = []

    def block(hidden):
        out = experts(torch.tanh(hidden), index, weights, lora)
        seen.append(weakref.ref(out))
        return out.clone()

    gc.collect()
    gc.disable()
    try:
        out = checkpoint(block, x, use_reentrant=True) if use_reentrant else block(x)
        out.float().square().sum().backward()
        del out
        left = [ref() for ref in seen if ref() is not None]
    finally:
        gc.enable()
    assert not left

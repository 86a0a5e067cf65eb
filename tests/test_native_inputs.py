"""What the native layer is given is held against what it needs: tensors without values, other sizes, other layers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import EXPERTS, make_layer, make_lora, random_inputs
from given import RunPython
from torch import Tensor

from ktft import native
from ktft.lora import ExpertLora, LoraPair
from ktft.native import ExpertLayer

HIDDEN, INTERMEDIATE = 64, 32


def layer_of() -> ExpertLayer:
    return make_layer(HIDDEN, INTERMEDIATE, "bf16", native.default_isa())


def inputs(tokens: int = 3, top_k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return random_inputs(tokens, HIDDEN, top_k, seed=tokens, dtype=torch.float32)


def adapters(rank: int = 4) -> ExpertLora:
    return make_lora(HIDDEN, INTERMEDIATE, rank, torch.float32)


def made(lora: ExpertLora, make: Callable[[Tensor], Tensor]) -> ExpertLora:
    return ExpertLora({name: LoraPair(make(pair.a.detach()), pair.b, 1.0) for name, pair in lora.pairs.items()})


CALLS = """
import sys, torch
sys.path.insert(0, {tests!r})
from contract import empty_layer
from test_native_inputs import layer_of, inputs, made, adapters, HIDDEN, INTERMEDIATE
from torch._subclasses.fake_tensor import FakeTensorMode
layer, (x, index, weights) = layer_of(), inputs()
fakes = FakeTensorMode()
lora = adapters()
out, saved = layer.forward(x, index, weights, lora, "retain")
def replaced(at, make):
    return [make(t) if i == at else t for i, t in enumerate((x, index, weights))]
for name, make in (("meta", lambda t: t.to("meta")), ("fake", fakes.from_tensor)):
    for at in range(3):
        yours = replaced(at, make)
        for call in (lambda: layer.forward(*yours, None, "none"), lambda: layer.backward(saved, x, *yours, lora)):
            try: call(); print("went on")
            except ValueError as error: print("refused", error)
    for call in (
        lambda: layer.backward(saved, make(x), x, index, weights, lora),
        lambda: layer.prepare(make(index)),
        lambda: layer.forward(x, index, weights, made(lora, make), "none"),
        lambda: layer.forward(x, index, weights, None, "none", out=make(out)),
        lambda: empty_layer(HIDDEN, INTERMEDIATE, "bf16").load(0, "up_proj", make(torch.zeros(INTERMEDIATE, HIDDEN))),
    ):
        try: call(); print("went on")
        except ValueError as error: print("refused", error)
with torch.device("meta"):
    again, _ = layer.forward(x, index, weights, lora, "none")
    grads = layer.backward(saved, x, x, index, weights, lora)
    print("same" if torch.equal(again, out) and grads.top_k_weights.device.type == "cpu" else "differs")
    print("same" if layer.dequantize(0, "up_proj").device.type == "cpu" else "differs")
"""


def test_tensors_without_values_are_refused(fork_python: RunPython) -> None:
    """In a process of its own, since reading where there is no memory ends it."""
    done = fork_python(CALLS.format(tests=str(Path(__file__).parent)))
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert said[-2:] == ["same", "same"]
    assert len(said) == 24 and all(line.startswith("refused") for line in said[:-2]), done.stdout
    assert any("has no memory: experts are computed from values" in line for line in said)


@pytest.mark.parametrize("activation", ["retain", "recompute"])
def test_what_forward_kept_belongs_to_one_call(activation: str) -> None:
    layer, twin, given = layer_of(), layer_of(), inputs()
    lora = adapters()
    _, saved = layer.forward(*given, lora, activation)
    ones = torch.ones_like(given[0])
    with pytest.raises(ValueError, match="comes from another layer"):
        twin.backward(saved, ones, *given, lora)
    with pytest.raises(ValueError, match="forward had 3 tokens with 2 experts each, backward has 5 with 2"):
        layer.backward(saved, torch.ones(5, HIDDEN), *inputs(5), lora)
    with pytest.raises(ValueError, match="forward had 3 tokens with 2 experts each, backward has 3 with 3"):
        layer.backward(saved, ones, *inputs(3, 3), lora)
    with pytest.raises(ValueError, match="forward kept nothing for backward: its activation was none"):
        layer.backward(None, ones, *given, lora)
    layer.backward(saved, ones, *given, lora)


def test_adapters_of_another_rank_are_not_those_of_forward() -> None:
    """Under `retain` the products with A were kept, at the rank they had."""
    layer, given = layer_of(), inputs()
    _, saved = layer.forward(*given, adapters(), "retain")
    ones = torch.ones_like(given[0])
    wider = adapters(64)
    with pytest.raises(ValueError, match="forward had LoRA of rank 4 on gate_proj, backward has rank 64"):
        layer.backward(saved, ones, *given, wider)
    with pytest.raises(ValueError, match="rank 4 on gate_proj, backward has rank 0 .0 stands for none"):
        layer.backward(saved, ones, *given, None)


NOT_CONTIGUOUS = "the gradient of a LoRA tensor must be a contiguous CPU tensor"
NOT_BOOLEAN = r"elsewhere must be a contiguous CPU tensor \[5\] torch.bool"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda grads: {"lora_grads": grads[:-1]}, "5 tensors for the gradients of 6 LoRA tensors"),
        (lambda grads: {"lora_grads": [grad.half() for grad in grads]}, NOT_CONTIGUOUS),
        (lambda grads: {"lora_grads": [grad[:, :1].contiguous() for grad in grads]}, NOT_CONTIGUOUS),
        (lambda grads: {"lora_grads": grads, "elsewhere": torch.zeros(EXPERTS, dtype=torch.int64)}, NOT_BOOLEAN),
        (lambda grads: {"lora_grads": grads, "elsewhere": torch.zeros(1, dtype=torch.bool)}, NOT_BOOLEAN),
    ],
    ids=["too few", "half", "small", "numbers", "one"],
)
def test_where_gradients_go_is_checked(change: Any, message: str) -> None:
    layer, given = layer_of(), inputs()
    lora = adapters()
    _, saved = layer.forward(*given, lora, "retain")
    grads = [torch.zeros(tensor.shape) for tensor in lora.parameters()]
    with pytest.raises(ValueError, match=message):
        layer.backward(saved, torch.ones_like(given[0]), *given, lora, **change(grads))


def test_numbers_are_integers_and_gradients_fit() -> None:
    layer, (x, index, weights) = layer_of(), inputs()
    with pytest.raises(ValueError, match="top_k_index must be integers"):
        layer.forward(x, index + 0.5, weights, None, "none")
    with pytest.raises(ValueError, match="top_k_index must be integers"):
        layer.prepare(index.bool())
    with pytest.raises(ValueError, match="top_k_weights must be floating point, got torch.int64"):
        layer.forward(x, index, index, None, "none")
    _, saved = layer.forward(x, index, weights, None, "retain")
    with pytest.raises(ValueError, match=r"grad_output must be \[3, 64\], got \[2, 64\]"):
        layer.backward(saved, x[:2], x, index, weights, None)
    assert torch.equal(layer.forward(x, index.to(torch.int32), weights, None, "none")[0],
                       layer.forward(x, index, weights, None, "none")[0])  # fmt: skip

"""`ktft verify --deferral`: how deferring experts changes a model's logits."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from commands import invoke, refused
from given import Checkpoint

from ktft.config import Settings
from ktft.deferral import lowest
from ktft.verify.deferral import deferral_effect, deferred
from ktft.verify.whole import load_model, outermost_experts, random_tokens


def test_lowest() -> None:
    weights = torch.tensor([[0.5, 0.1, 0.4], [0.2, 0.2, 0.6]])
    assert lowest(weights, 1).tolist() == [[False, True, False], [True, False, False]]
    assert lowest(weights, 2).tolist() == [[False, True, True], [True, True, False]]


def test_the_next_layer_adds_the_deferred_experts(tiny_checkpoint: Checkpoint) -> None:
    model = load_model(tiny_checkpoint("qwen3moe"), Settings(threads=1), None)
    ids, seen, calls = random_tokens(model, 7), {}, {}
    experts = outermost_experts(model)
    for number, module in experts.items():
        forward = module.forward

        def keep(hidden, index, weights, n=number, forward=forward):
            seen.setdefault(n, []).append((hidden, index, weights))
            return forward(hidden, index, weights)

        calls[number] = forward
        module.forward = keep
    effect = deferral_effect(model, [ids], 1)
    first, last = min(experts), max(experts)
    plain, on_time, late = seen[first]
    light = lowest(plain[2], 1)
    assert torch.equal(on_time[2], plain[2].masked_fill(light, 0))
    assert torch.equal(late[2] + on_time[2], plain[2])
    assert len(seen[last]) == 2 and (seen[last][1][2] > 0).all()  # never on the last layer
    assert effect.logits > 1e-4 and effect.kl > 0 and effect.tokens == 7 and effect.deferred == 1
    for module, forward in zip(experts.values(), calls.values(), strict=True):
        module.forward = forward

    second = sorted(experts)[1]  # gets, in its own output, what the first one left out
    outs: dict[str, torch.Tensor] = {}
    with torch.no_grad(), deferred(model, 1):
        hook = experts[second].register_forward_hook(lambda _, args, out: outs.update(out=out, args=args))
        before = experts[first].register_forward_hook(lambda _, args, out: outs.update(first=args))
        model(input_ids=ids, use_cache=False)
    hook.remove()
    before.remove()
    with torch.no_grad():
        hidden, index, weights = outs["first"]
        owed = calls[first](hidden, index, weights.masked_fill(~lowest(weights, 1), 0))
        hidden, index, weights = outs["args"]
        own = calls[second](hidden, index, weights.masked_fill(lowest(weights, 1), 0))
    torch.testing.assert_close(outs["out"], own + owed)


def test_command(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    verify = ("verify", tiny_checkpoint("qwen3moe"), "--threads", "1", "--deferral")
    done = invoke(*verify, 1, "--json", "--tokens", "16")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["tokens"] == 16 and found["deferred"] == 1 and 0 < found["logits"] < 1
    assert 0 <= found["top1"] <= 1 and found["perplexity"] != found["deferred_perplexity"]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("how many experts are late\n\nand which of them\n")
    done = invoke(*verify, 1, "--prompts", prompts)
    assert done.exit_code == 0 and "experts one layer late" in done.stdout and "perplexity" in done.stdout, done.stderr
    assert f"tokens have {found['top_k']} experts" in refused(*verify, found["top_k"])
    prompts.write_text("\n")
    assert "has no line of two tokens" in refused(*verify, 1, "--prompts", prompts)

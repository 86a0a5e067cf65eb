"""Shorter forwards of vLLM's layers give what vLLM's own give, but for rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import random_adapter
from in_process import IDS, served
from tiny import write_checkpoint

from ktft import native
from ktft.hosts.vllm import ATTENTION_FORWARD, BLOCK_FORWARD, EXPERTS_FORWARD, LAYER_FORWARD, NORM_FORWARD
from ktft.native.attention import AttentionSizes
from ktft.native.decoder import DecoderLayer, MoeBlock
from ktft.serve.vllm import attention
from ktft.serve.vllm.attention_block import BLOCKS

PATCHES = {each.owner.rpartition(".")[2]: each for each in (NORM_FORWARD, ATTENTION_FORWARD, EXPERTS_FORWARD)}
PATCHES |= dict.fromkeys(BLOCKS, BLOCK_FORWARD)
TOLERANCE = 0.03  # of log-probabilities: outputs of attention and norms are bf16
FULL = pytest.mark.full
LONGER = [5 + i % 50 for i in range(40)]


def shortened(model: Any) -> dict[str, list[Any]]:
    """The layers with a shorter forward, by the name of their class."""
    found: dict[str, list[Any]] = {}
    for module in model.modules():
        if "forward" in vars(module):
            found.setdefault(type(module).__name__, []).append(module)
    return found


def answers(server: Any) -> list[tuple[list[int], torch.Tensor]]:
    server.llm.reset_prefix_cache()
    return list(server.together([(IDS, 0), (LONGER, 0)], tokens=6))


Answers = list[tuple[list[int], torch.Tensor]]


def assert_near(found: Answers, own: Answers) -> None:
    """Log-probabilities of continuations as far as these are the same, and of the token at which they part."""
    near = []
    for (ids, said), (own_ids, own_said) in zip(found, own, strict=True):
        assert ids[0] == own_ids[0], "the first token is a prompt's"
        same = next((i for i, (a, b) in enumerate(zip(ids, own_ids, strict=True)) if a != b), len(ids))
        apart = (said - own_said).abs()[len(said) - len(ids) :][: same + 1]  # a near tie may go the other way
        near += (apart < TOLERANCE).tolist()
    assert sum(near) >= 0.75 * len(near) and len(near) >= 6, "rounding may also choose another expert for a token"


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3moe", {"head_dim": 32}),
        pytest.param("qwen2moe", {"num_attention_heads": 2, "num_key_value_heads": 1}, id="shared experts", marks=FULL),
        pytest.param("glm4", {"head_dim": 32, "routed_scaling_factor": 2.5}, id="shared experts and a factor"),
        pytest.param("glm4", {"head_dim": 32, "use_qk_norm": True}, id="norms where the family has a choice"),
        pytest.param("mixtral", {"num_attention_heads": 2}, id="no norms"),
    ],
)
def test_answers_are_those_of_vllms_own_forwards(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    checkpoint = write_checkpoint(family, tmp_path / "base", **overrides)
    with served(checkpoint, adapter_swap=False) as server:
        found = shortened(server.model)
        (block,) = found.keys() & set(BLOCKS)
        assert found.keys() == {block, "Attention", "MoERunner", "RMSNorm"}
        scaled = {runner.routed_scaling_factor for runner in found["MoERunner"]}
        assert scaled == {overrides.get("routed_scaling_factor", 1.0)}
        short = answers(server)
        for kind, modules in found.items():
            for module in modules:
                PATCHES[kind].take_off(module)
        assert not shortened(server.model)
        own = answers(server)
    assert_near(short, own)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3moe", {"head_dim": 32}),
        ("gpt_oss", {"head_dim": 32}),
        pytest.param("mixtral", {"num_attention_heads": 2}, marks=FULL),
    ],
)
def test_ktft_computes_attention_of_single_tokens(
    tmp_path: Path, family: str, overrides: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts of several blocks; sinks and a window where the family has them."""
    checkpoint = write_checkpoint(family, tmp_path / "base", **overrides)
    asked = [([3 + (7 * i + n) % 90 for i in range(n)], 0) for n in (300, 20, 129)]
    few = [(list(range(7, 7 + attention.MOST_NEW)), 0), (list(range(40, 43)), 0)]  # prompts of a few tokens
    found, prompts = {}, {}
    for kernels in (attention.KERNELS, {}):
        monkeypatch.setattr(attention, "KERNELS", kernels)
        with served(checkpoint, adapter_swap=False, options={"max_model_len": 512}) as server:
            found[bool(kernels)] = server.together(asked, tokens=6)
            prompts[bool(kernels)] = torch.cat([said[:-1] for _, said in server.together(few, tokens=1)])
            assert attention.decodes() == any(layer.isa in kernels for layer in shortened(server.model)["Attention"])
    assert_near(found[True], found[False])
    assert ((prompts[True] - prompts[False]).abs() < TOLERANCE).float().mean() >= 0.75


def rows_of(kind: type, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each call of the native objects of this kind."""
    found: list[int] = []
    own: Any = kind.__call__

    def counted(native: Any, x: torch.Tensor, *rest: Any) -> Any:
        found.append(len(x))
        return own(native, x, *rest)

    monkeypatch.setattr(kind, "__call__", counted)
    return found


def test_experts_with_an_adapter_are_not_one_call_with_their_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with room for adapters computes a layer by its parts."""
    checkpoint = write_checkpoint("qwen3moe", tmp_path / "base", head_dim=32, num_experts=32)
    adapter = random_adapter(checkpoint, tmp_path / "adapter", target_modules=["experts"])
    layers, routed = rows_of(DecoderLayer, monkeypatch), rows_of(MoeBlock, monkeypatch)
    with served(checkpoint, dense_format="int8", max_lora_rank=8) as server:
        base = server.greedy(tokens=4)
        calls = len(routed)
        server.use(adapter)
        assert server.greedy(tokens=4) != base
        assert len(routed) == calls > 0 and not layers
        server.use(None)
        assert server.greedy(tokens=4) == base and len(routed) > calls


def test_a_layer_is_one_call_in_steps_of_few_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With packed weights around the experts: to the bit what its parts give, and counted as theirs."""
    checkpoint = write_checkpoint("qwen3moe", tmp_path / "base", head_dim=32, num_experts=32)
    rows, found, pairs = rows_of(DecoderLayer, monkeypatch), [], []
    with served(checkpoint, adapter_swap=False, dense_format="int8") as server:
        layers = shortened(server.model)["Qwen3MoeDecoderLayer"]
        assert len(layers) == server.model.config.num_hidden_layers
        for one_call in (True, False):
            if not one_call:
                [LAYER_FORWARD.take_off(layer) for layer in layers]
            before, rows[:] = server.status()["lanes"]["cpu"], []
            found.append(answers(server))
            after = server.status()["lanes"]["cpu"]
            pairs.append(after["pairs"] - before["pairs"])
            assert after["seconds"] > before["seconds"]
            assert rows == ([2] * 5 * len(layers) if one_call else []), "the first step has the prompts"
    for (ids, said), (own_ids, own_said) in zip(*found, strict=True):
        assert ids == own_ids and torch.equal(said, own_said)
    assert pairs[0] == pairs[1] > 0


def test_vllm_computes_attention_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As it would if vLLM laid out its cache in another way."""
    checkpoint = write_checkpoint("qwen3moe", tmp_path / "base", head_dim=32)
    by_vllm = attention._MadeUp.by_vllm

    def then_moved(made_up: Any, *args: Any) -> torch.Tensor:
        found = by_vllm(made_up, *args)
        made_up.cache.copy_(made_up.cache.flip(2))
        return found

    monkeypatch.setattr(attention._MadeUp, "by_vllm", then_moved)
    monkeypatch.setattr(attention.logger, "propagate", True)
    attention._agrees.cache_clear()
    with served(checkpoint, adapter_swap=False) as server:
        ids, _ = server.greedy(tokens=4)
        assert not attention.decodes()
    assert "differs by" in caplog.text and "vLLM's is used" in caplog.text
    monkeypatch.undo()
    attention._agrees.cache_clear()
    with served(checkpoint, adapter_swap=False) as server:
        assert server.greedy(tokens=4)[0][0] == ids[0]
        ours = {layer.isa in attention.KERNELS for layer in shortened(server.model)["Attention"]}
        assert ours == {attention.decodes()}


def test_a_cache_that_vllm_writes_elsewhere_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = native.runtime(threads=2), "vec", AttentionSizes(4, 2, 32, 32), 0, False
    attention._agrees.cache_clear()
    assert attention._agrees(*asked)
    attention._agrees.cache_clear()
    monkeypatch.setattr(attention._MadeUp, "written_by_ktft", lambda made_up, _: made_up.cache.roll(1, 2))
    assert not attention._agrees(*asked)
    attention._agrees.cache_clear()


def test_a_layer_of_which_more_is_asked_keeps_its_forward(tmp_path: Path) -> None:
    checkpoint = write_checkpoint("qwen3moe", tmp_path / "base", head_dim=32)
    with served(checkpoint, adapter_swap=False) as server:
        norm = shortened(server.model)["RMSNorm"][0]
        x = torch.randn(3, norm.weight.shape[0])
        short = norm(x)
        NORM_FORWARD.take_off(norm)
        assert short.dtype == torch.float32 and torch.equal(short, norm(x)), "fp32 beside weights in bf16"

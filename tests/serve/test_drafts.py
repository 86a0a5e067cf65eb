"""Tokens that a model's own prediction layer drafts, `--speculative-tokens`: answers stay what they are without drafts,
and drafts are those that vLLM's own experts make.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
import torch
from adapters import random_adapter
from commands import invoke, run
from conftest import serving
from in_process import ENVIRONMENT, served
from prediction import NUMBER, add_prediction_layer
from safetensors.torch import load_file, save_file
from tiny import write_checkpoint

from ktft.serve.runtime.served_model import current

SIZES: dict[str, dict[str, Any]] = {"glm4": {"head_dim": 32}, "dsv3": {"qk_nope_head_dim": 24, "v_head_dim": 32}}
OPTIONS: dict[str, dict[str, Any]] = {"glm4": {}, "dsv3": {"compilation_config": {"custom_ops": ["none"]}}}
DRAFTED = 2
SPECULATIVE = {"speculative_config": {"method": "mtp", "num_speculative_tokens": DRAFTED}}
PROMPTS = [[3, 4, 5, 6, 7, 8] * 4, list(range(3, 35)), list(range(100, 130))]


# By default, those of the other family are drafted over HTTP
@pytest.fixture(scope="module", params=["dsv3", pytest.param("glm4", marks=pytest.mark.full)])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp(family) / "model"
    return add_prediction_layer(write_checkpoint(family, place, **SIZES[family]), weight=4.0)


@contextmanager
def drafts_of(llm: Any) -> Iterator[list[list[int]]]:
    """The tokens that are drafted in the block, step by step."""
    drafter = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner.drafter
    propose, found = drafter.propose, []

    def noting(*args: Any, **kwargs: Any) -> Any:
        drafts = propose(*args, **kwargs)
        found.append(torch.as_tensor(drafts).tolist())
        return drafts

    with patch.object(drafter, "propose", noting):
        yield found


def continued(llm: Any) -> list[tuple[list[int], list[Any]]]:
    """The greedy continuation of each prompt, and the drafts of its steps."""
    from vllm import SamplingParams

    parameters, found = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), []
    for ids in PROMPTS:
        with drafts_of(llm) as drafts:
            (out,) = llm.generate([{"prompt_token_ids": ids}], parameters, use_tqdm=False)
        found.append((list(out.outputs[0].token_ids), drafts))
    return found


def by_vllm_alone(model: Path, family: str) -> list[tuple[list[int], list[Any]]]:
    """The same by vLLM's own experts in bf16."""
    with patch.dict(os.environ, ENVIRONMENT | {"VLLM_MLA_DISABLE": "1"}):
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory

        llm = LLM(str(model), enforce_eager=True, dtype="bfloat16", max_model_len=128, **OPTIONS[family], **SPECULATIVE)
        try:
            return continued(llm)
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            cleanup_dist_env_and_memory()


def same(one: list[tuple[list[int], list[Any]]], other: list[tuple[list[int], list[Any]]]) -> float:
    """The part of drafts that are the same, of the prompts with the same continuation: random weights tip some."""
    alike = [(a, b) for (said, a), (also, b) in zip(one, other, strict=True) if said == also]
    assert len(alike) > 1
    pairs = [pair for a, b in alike for pair in zip(a, b, strict=False)]
    return sum(a == b for a, b in pairs) / len(pairs)


def test_drafts_are_those_of_vllms_own_experts_and_answers_those_without_drafts(
    model: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    options = OPTIONS[family]
    with served(model, options=options | SPECULATIVE, expert_format="bf16", speculative_tokens=DRAFTED) as drafting:
        found = continued(drafting.llm)
        experts = current().layers[NUMBER]
        assert sum(experts.heat.tolist()) > 0
        experts.__class__, whole = _Nothing, experts.__class__
        without = continued(drafting.llm)
        experts.__class__ = whole
        with_drafts = [drafting.greedy(ids, 16)[0] for ids in PROMPTS]
    with served(model, options=options, expert_format="bf16") as plain:
        assert [plain.greedy(ids, 16)[0] for ids in PROMPTS] == with_drafts == answers(found) == answers(without)
    alone = by_vllm_alone(model, family)
    assert same(found, alone) >= 0.95
    assert same(found, without) < 0.9, "the experts of the prediction layer make no difference"


def answers(found: list[tuple[list[int], list[Any]]]) -> list[list[int]]:
    return [said for said, _ in found]


class _Nothing:
    """In place of experts: they add nothing."""

    def __call__(self, hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.zeros_like(hidden_states)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("served") / "model"
    return add_prediction_layer(write_checkpoint("glm4", place, **SIZES["glm4"]))


def test_served_over_http_with_a_converted_model_packed_weights_and_an_adapter(glm: Path, tmp_path: Path) -> None:
    """With drafts, requests for the base and for an adapter get what they get without."""
    adapter = random_adapter(glm, tmp_path / "tuned")
    converted = tmp_path / "converted"
    assert run("convert", glm, converted, "--format", "int8")[0] == 0
    asked: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    options, answers = ["--dense-format", "int8", "--adapter", str(adapter)], []
    for drafts in ([], ["--speculative-tokens", "2"]):
        (tmp_path / f"log{len(drafts)}").mkdir()
        with serving(converted, tmp_path / f"log{len(drafts)}", *options, *drafts) as (server, _):
            for name in (server.name, "tuned"):
                for ids in PROMPTS:
                    answer = server.post("/v1/completions", model=name, prompt=ids, logprobs=0, **asked)
                    assert answer.status_code == 200, answer.text
                    answers.append(answer.json()["choices"][0]["logprobs"]["tokens"])
            metrics = httpx.get(f"{server.url}/metrics").text
            refused = server.post("/v1/completions", model=server.name, prompt=[3], max_tokens=2, min_p=0.2)
    without, with_drafts = answers[: len(answers) // 2], answers[len(answers) // 2 :]
    assert with_drafts == without and without[:3] != without[3:]
    assert "spec_decode_num_draft_tokens_total" in metrics
    # vLLM leaves min_p out of account for tokens that were drafted
    assert refused.status_code == 400 and "min_p" in refused.text


def test_what_cannot_draft_is_refused(glm: Path, tmp_path: Path) -> None:
    def said(checkpoint: Path, *options: str) -> str:
        result = invoke("serve", checkpoint, *options)
        assert result.exit_code == 2, result.output
        return result.output

    plain = write_checkpoint("glm4", tmp_path / "plain", **SIZES["glm4"])
    assert "has no tensors of layer 3, which predicts further tokens" in said(plain, "--speculative-tokens", "1")
    assert "speculative_tokens is 9; give a whole number" in said(glm, "--speculative-tokens", "9")
    other = write_checkpoint("qwen3moe", tmp_path / "other", head_dim=32)
    assert "num_nextn_predict_layers is 0" in said(other, "--speculative-tokens", "1")
    asked = said(glm, "--", "--speculative-config", '{"method": "ngram"}')
    assert "--speculative-tokens lets the model's own prediction layer draft" in asked
    lacking = write_checkpoint("glm4", tmp_path / "lacking", **SIZES["glm4"])
    tensors = load_file(add_prediction_layer(lacking) / "model.safetensors")
    del tensors["model.layers.3.enorm.weight"]
    save_file(tensors, lacking / "model.safetensors", {"format": "pt"})
    assert "lacks tensors that the model needs: model.layers.3.enorm.weight" in said(
        lacking, "--speculative-tokens", "1"
    )

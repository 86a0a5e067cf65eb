"""Tokens that a model's own prediction layer drafts, `--speculative-tokens`: answers stay what they are without drafts,
and drafts are those that vLLM's own experts make.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import pytest
import torch
from adapters import random_adapter
from bad_requests import COMPLETIONS
from commands import invoke, run
from conftest import Server, serving
from gated import bearer
from in_process import BLOCKS, ENVIRONMENT, engine, served
from prediction import NUMBER, add_prediction_layer
from safetensors.torch import load_file, save_file
from tiny import write_checkpoint

from ktft.serve.runtime.served_model import current

SIZES: dict[str, dict[str, Any]] = {"glm4": {"head_dim": 32}, "dsv3": {"qk_nope_head_dim": 24, "v_head_dim": 32}}
OPTIONS: dict[str, dict[str, Any]] = {"glm4": {}, "dsv3": {"compilation_config": {"custom_ops": ["none"]}}}
DRAFTED = 2
SPECULATIVE = {"speculative_config": {"method": "mtp", "num_speculative_tokens": DRAFTED}}
PROMPTS = [[3, 4, 5, 6, 7, 8] * 4, list(range(3, 35)), list(range(100, 130))]
NEAR_TIE = 0.05  # of log-probabilities, which bf16 rounds by some 0.02


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
        options = {"num_gpu_blocks_override": BLOCKS} | OPTIONS[family] | SPECULATIVE
        with engine(model, **options) as llm:
            return continued(llm)


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


@pytest.fixture(scope="module")
def tuned(glm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter."""
    return random_adapter(glm, tmp_path_factory.mktemp("adapter") / "tuned")


@pytest.fixture(scope="module")
def converted(glm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with experts in INT8."""
    made = tmp_path_factory.mktemp("converted") / "model"
    assert run("convert", glm, made, "--format", "int8")[0] == 0
    return made


@pytest.fixture(scope="module")
def drafting(
    converted: Path, tuned: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    """`ktft serve` with drafts, packed weights, an adapter and keys, and its process."""
    options = ["--dense-format", "int8", "--adapter", str(tuned), "--adapter-swap", "--speculative-tokens", "2"]
    options += ["--api-key", "user", "--admin-key", "admin"]
    with serving(converted, tmp_path_factory.mktemp("server"), *options) as (server, process):
        yield replace(server, key="user"), process


def test_served_over_http_with_a_converted_model_packed_weights_and_an_adapter(
    drafting: tuple[Server, subprocess.Popen[bytes]], converted: Path, tuned: Path
) -> None:
    """With drafts, requests for the base and for an adapter get what they get without, up to the first near tie: three
    tokens in a step may take kernels that add up in another order than those of one.
    """
    server, _ = drafting
    asked: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with_drafts, without = [], []
    for name in (server.name, "tuned"):
        for ids in PROMPTS:
            answer = server.post(COMPLETIONS, model=name, prompt=ids, **asked)
            assert answer.status_code == 200, answer.text
            with_drafts.append(answer.json()["choices"][0]["token_ids"])
    with served(converted, expert_format="int8", dense_format="int8") as plain:
        for number, adapter in enumerate((None, tuned)):
            plain.use(adapter)
            for ids, drafted in zip(PROMPTS, with_drafts[number * len(PROMPTS) :], strict=False):
                own = plain.greedy(ids, 24)[0]
                same = next((at for at, pair in enumerate(zip(own, drafted, strict=True)) if pair[0] != pair[1]), 24)
                assert same == 24 or plain.lead([*ids, *own[:same]], drafted[same]) < NEAR_TIE, (own, drafted)
                without.append(own)
    assert len(without) == len(with_drafts) and without[:3] != without[3:]
    metrics = httpx.get(f"{server.url}/metrics", headers=bearer("user")).text
    assert "spec_decode_num_draft_tokens_total" in metrics
    # vLLM leaves min_p out of account for tokens that were drafted
    refused = server.post(COMPLETIONS, model=server.name, prompt=[3], max_tokens=2, min_p=0.2)
    assert refused.status_code == 400 and "min_p" in refused.text


def test_keys(drafting: tuple[Server, subprocess.Popen[bytes]], tmp_path: Path) -> None:
    server, _ = drafting
    body = {"model": server.name, "prompt": [5, 6], "max_tokens": 2}
    for headers, code in ((bearer("user"), 200), (bearer("admin"), 200), ({"x-api-key": "user"}, 200), ({}, 401)):
        assert httpx.post(server.url + COMPLETIONS, json=body, headers=headers, timeout=300).status_code == code
    for path in ("/metrics", "/ktft/status", "/v1/models", "/version"):
        assert httpx.get(server.url + path).status_code == 401
        assert httpx.get(server.url + path, headers=bearer("user"), timeout=300).status_code == 200
    for path in ("/abort_requests", "/start_profile", "/stop_profile"):
        assert httpx.post(server.url + path).status_code == 401
        assert httpx.post(server.url + path, headers=bearer("user")).status_code == 403
    assert httpx.get(f"{server.url}/health").status_code == 200

    path = random_adapter(server.checkpoint, tmp_path / "tuned")
    load = {"lora_name": "tuned", "lora_path": str(path)}
    for headers, code in (({}, 401), (bearer("user"), 403), (bearer("admin"), 200)):
        answer = httpx.post(f"{server.url}/v1/load_lora_adapter", json=load, headers=headers, timeout=300)
        assert answer.status_code == code, answer.text
    unload = f"{server.url}/v1/unload_lora_adapter"
    assert httpx.post(unload, json={"lora_name": "tuned"}, headers=bearer("user")).status_code == 403
    assert httpx.post(unload, json={"lora_name": "tuned"}, headers=bearer("admin"), timeout=300).status_code == 200


def test_a_failure_in_the_kernels_ends_the_server(
    drafting: tuple[Server, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """With an adapter whose numbers are finite and whose products are not. It is the last test of this server."""
    server, process = drafting
    body = {"model": server.name, "prompt": [5, 6], "max_tokens": 2}
    assert server.post(COMPLETIONS, **body).status_code == 200
    path = random_adapter(server.checkpoint, tmp_path / "huge", std=1e25, target_modules=["experts"])
    admin = replace(server, key="admin")
    assert admin.post("/v1/load_lora_adapter", lora_name="huge", lora_path=str(path)).status_code == 200
    assert server.post(COMPLETIONS, **body | {"model": "huge"}).status_code >= 500
    assert process.wait(300) == 1
    assert "the server has died" in server.log.read_text()


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

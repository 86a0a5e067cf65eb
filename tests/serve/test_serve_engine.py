"""vLLM with ktft's experts computes the model that was trained, and refuses what it cannot serve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quantize import quantize
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from ktft.model.experts import find_experts
from ktft.model.quantizer import KtftConfig
from ktft.serve.runtime.settings import ServeSettings

PROMPT = list(range(20, 60))
BOUND = 0.02  # for the mean difference of log-probabilities; rounding to bf16 alone gives about 0.005


def log_probabilities(model: PreTrainedModel) -> list[float]:
    """Log-probabilities of the prompt's tokens after the first."""
    with torch.no_grad():
        rows = model(torch.tensor([PROMPT])).logits[0, :-1].float().log_softmax(-1)
    return [float(row[token]) for row, token in zip(rows, PROMPT[1:], strict=True)]


def mean_difference(one: list[float], other: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def test_log_probabilities_are_those_of_the_model_that_trains(server: Any) -> None:
    answer = server.post("/v1/completions", model=server.name, prompt=PROMPT, max_tokens=1, echo=True, logprobs=1)
    assert answer.status_code == 200, answer.text
    served = answer.json()["choices"][0]["logprobs"]["token_logprobs"][1 : len(PROMPT)]
    config = KtftConfig(expert_format="bf16", threads=1)
    model = AutoModelForCausalLM.from_pretrained(server.checkpoint, quantization_config=config, dtype=torch.bfloat16)
    trained = log_probabilities(model)
    assert mean_difference(served, trained) < BOUND
    for experts in find_experts(model).values():
        experts.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
    assert mean_difference(log_probabilities(model), trained) > 4 * BOUND, "the experts matter"


def test_the_same_request_gets_the_same_answer(server: Any) -> None:
    body = {"model": server.name, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 1}
    first, second = (server.post("/v1/completions", **body).json()["choices"][0] for _ in range(2))
    assert first["text"] == second["text"]
    assert first["logprobs"]["token_logprobs"] == pytest.approx(second["logprobs"]["token_logprobs"], abs=0.05)


def test_progress_is_shown_until_the_server_is_ready(server: Any) -> None:
    """The status file says `READY` from the last expert until the server answers."""
    assert "Starting the engine ..." in server.log.read_text().splitlines()


# --- what vLLM is told, without a server ------------------------------------------------------------------------------


@pytest.fixture
def plugin(served_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from vllm.plugins import load_general_plugins

    for name, value in ServeSettings(str(served_checkpoint)).to_env().items():
        monkeypatch.setenv(name, value)
    load_general_plugins()
    from ktft.serve.vllm.plugin import register

    register()  # vLLM may have loaded its plugins before there were settings
    yield


def test_vllm_ignores_the_quantization_of_the_checkpoint(plugin: None, served_checkpoint: Path, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    fp8, _, _ = quantize(served_checkpoint, tmp_path, "fp8")
    config = EngineArgs(str(fp8), quantization="ktft", load_format="ktft", enforce_eager=True).create_engine_config()
    assert config.model_config.quantization == "ktft"
    assert config.model_config.hf_config.quantization_config is None
    assert type(config.quant_config).__name__ == "KtftQuantization"
    assert config.cache_config.cache_dtype == "auto"


def vllm_layer(**changes: Any) -> Any:
    """A layer as vLLM passes it to a method for routed experts."""
    parallel = SimpleNamespace(tp_size=1, ep_size=1, dp_size=1)
    for name in list(changes):
        if hasattr(parallel, name):
            setattr(parallel, name, changes.pop(name))
    layer = {
        "layer_name": "model.layers.2.mlp.experts",
        "apply_router_weight_on_input": False,
        "activation": SimpleNamespace(value="silu"),
        "moe_config": SimpleNamespace(moe_parallel_config=parallel),
    }
    return SimpleNamespace(**layer | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"apply_router_weight_on_input": True}, "routing weights on the experts' input"),
        ({"tp_size": 2}, "tensor parallelism"),
        ({"ep_size": 2}, "expert parallelism"),
        ({"dp_size": 2}, "data parallelism"),
        ({"activation": SimpleNamespace(value="gelu")}, "the activation 'gelu'"),
    ],
)
def test_layers_that_the_kernels_cannot_compute_are_refused(changes: dict[str, Any], message: str) -> None:
    from ktft.serve.vllm.moe import KtftMoEMethod

    assert KtftMoEMethod(vllm_layer()).number == 2
    with pytest.raises(ValueError, match=f"model.layers.2.mlp.experts: vLLM asks for {message}"):
        KtftMoEMethod(vllm_layer(**changes))


def test_tokens_of_vllms_profiling_run_reach_no_expert() -> None:
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import ForwardContext, override_forward_context

    from ktft.serve.vllm.moe import KtftMoEMethod

    method, x = KtftMoEMethod(vllm_layer()), torch.ones(3, 8)
    weights, index = torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int32)

    def apply(metadata: Any, mode: CUDAGraphMode) -> Tensor:
        context = ForwardContext(
            no_compile_layers={}, attn_metadata=metadata, slot_mapping={}, cudagraph_runtime_mode=mode
        )
        with override_forward_context(context):
            return method.apply(vllm_layer(), x, weights, index)

    assert not apply(None, CUDAGraphMode.NONE).any()
    for metadata, mode in (({}, CUDAGraphMode.NONE), (None, CUDAGraphMode.PIECEWISE)):
        with pytest.raises(RuntimeError, match="this process has loaded no routed experts"):
            apply(metadata, mode)

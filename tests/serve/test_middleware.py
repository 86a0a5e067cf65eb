"""What ktft's gate asks of vLLM. The application here has the parts of vLLM's that it uses."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from ktft.serve.engine import EngineError
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.vllm.middleware import VllmClient, VllmGate, reason_of


@dataclass(frozen=True)
class BaseModelPath:
    """vLLM's record of a served model."""

    name: str
    model_path: str


class EngineClient:
    """Like vLLM's client, which passes on a worker's error as text."""

    errored = False

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "ktft_add_adapter" and args == (2, "bad"):
            raise Exception("Call to collective_rpc method failed: lora_A is [4, 64], rank is 8")
        return [{"asked": [method, *args]}]


def scope_of(engine: EngineClient) -> dict[str, Any]:
    """The scope that Starlette gives a request."""
    models = SimpleNamespace(base_model_paths=[BaseModelPath("base", "/base")])
    return {"app": SimpleNamespace(state=SimpleNamespace(engine_client=engine, openai_serving_models=models))}


def test_answers_of_the_worker() -> None:
    async def ask() -> None:
        client = VllmClient(scope_of(EngineClient()))
        assert await client.add_adapter(1, "good") == {"asked": ["ktft_add_adapter", 1, "good"]}
        assert await client.status() == {"asked": ["ktft_status"]}

    asyncio.run(ask())


@pytest.mark.parametrize("errored", [True, False])
def test_errors_of_the_worker(errored: bool) -> None:
    engine = EngineClient()
    engine.errored = errored
    with pytest.raises(EngineError) as error:
        asyncio.run(VllmClient(scope_of(engine)).add_adapter(2, "bad"))
    assert (str(error.value), error.value.dead) == ("lora_A is [4, 64], rank is 8", errored)


def test_vllms_words_are_stripped_from_the_reason() -> None:
    reason = "x.weight is damaged, its CRC-32 is 'a'"
    wrapped = f"Worker failed with error '{reason}', please check the stack trace above for the root cause"
    assert reason_of(Exception(f"Call to collective_rpc method failed: {wrapped}")) == reason
    assert reason_of(ValueError(reason)) == reason


def test_the_gate_needs_nothing_but_the_application(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ServeSettings(str(tmp_path), served_name="mine").to_env().items():
        monkeypatch.setenv(name, value)
    gate = VllmGate(object(), registry=CollectorRegistry())
    assert gate.adapters.names == ["mine"] and gate.connect is VllmClient
    assert {"/v1/chat/completions", "/abort_requests"} <= {*gate.paths.computes, *gate.door.admin_paths}

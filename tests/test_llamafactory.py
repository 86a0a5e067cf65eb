"""`use_kt: true` through unmodified LLaMA-Factory: training stages, evaluation, chat, the API and bad input."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from adapted import load_as_stored, lora_config, randomize, tensors_of
from commands import run
from forked import Forks
from given import Checkpoint, RunCli, RunExp, Train, TrainYaml
from llamafactory.hparams import get_infer_args, get_train_args
from runs import logged
from safetensors.torch import load_file

import ktft
from ktft import versions
from ktft.model.experts import find_experts
from ktft.train.llamafactory import settings_of

TRAIN = ["llamafactory-cli", "train"]


def logged_losses(output: Path) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in logged(output)}


def trained_experts(output: Path) -> int:
    """How many experts' tensors of an adapter were moved away from B = 0."""
    tensors = tensors_of(output)
    return sum(bool(t.any()) for name, t in tensors.items() if ".mlp.experts." in name and "lora_B" in name)


def run_report(output: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((output / "ktft_report.json").read_text())
    return report


@pytest.fixture(scope="module")
def big_adapter(tiny_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter for qwen3moe, on experts alone, that changes what the model says."""
    model = ktft.get_peft_model(load_as_stored(tiny_checkpoint("qwen3moe")), lora_config(target_modules=["experts"]))
    path = tmp_path_factory.mktemp("big_adapter")
    randomize(model, 0.5).save_pretrained(path)
    return path


# --- training ---------------------------------------------------------------------------------------------------------


def test_sft_reports_saves_evaluates_and_resumes(
    train_yaml: TrainYaml, run_cli: RunCli, fork_cli: RunCli, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"max_steps": 4, "save_steps": 2, "lora_dropout": 0.1, "bf16": True}
    options |= {"val_size": 0.25, "do_eval": True, "compute_accuracy": True}
    options["kt_config"] = {"kt_backend": "AMXINT8", "kt_num_threads": 1, "kt_max_cache_depth": 2}
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    log = run_cli(TRAIN, train_yaml("dsv3", output_dir=str(whole), **options)).stdout
    before, after = log.split("before step 1", 1)
    assert "kt_config.kt_max_cache_depth has no effect" in before
    for expected in (
        "2 layers x 8, int8",
        "threads: 1",
        f"  {'routed experts':<15}{'18,432':>16}",
        "by ktft's kernel",
        "ktft export would refuse this adapter for vllm: LoRA on kv_b_proj; gguf: LoRA on kv_a_proj_with_mqa, ",
        "'loss':",
    ):
        assert expected in after
    assert "eval_accuracy" in json.loads((whole / "eval_results.json").read_text())
    assert trained_experts(whole) > 0
    targets = json.loads((whole / "adapter_config.json").read_text())["target_modules"]
    assert {"q_a_proj", "gate_proj", "up_proj", "down_proj"} < set(targets)

    shutil.copytree(whole / "checkpoint-2", tmp_path / "checkpoint-2")
    resume = train_yaml("dsv3", output_dir=str(rest), resume_from_checkpoint=str(tmp_path / "checkpoint-2"), **options)
    fork_cli(TRAIN, resume)
    assert logged_losses(rest) == logged_losses(whole)
    resumed, uninterrupted = (tensors_of(path) for path in (rest, whole))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in uninterrupted.items())

    card = (whole / "README.md").read_text()  # which Trainer has written anew at the end
    assert "| routed experts | 18,432 |" in card
    assert "do not load this directory with PEFT" in card
    status, said = run("export", whole, tmp_path / "exported", "--to", "peft")
    assert status == 0, said
    settings = json.loads((tmp_path / "exported" / "adapter_config.json").read_text())
    assert len(settings["target_parameters"]) == 2 * 2

    for path in (whole, rest):
        report = run_report(path)
        assert dict(zip(report["logged"]["step"], report["logged"]["loss"], strict=True)) == logged_losses(whole)
        adapter = (path / "adapter_model.safetensors").read_bytes()
        assert report["adapter"]["file"]["sha256"] == hashlib.sha256(adapter).hexdigest()
        assert "<svg" in (path / "ktft_report.html").read_text()
        assert [row["step"] for row in report["resumed"]] == ([2] if path == rest else [])
    assert run_report(rest)["expert_tokens"] == run_report(whole)["expert_tokens"]


@pytest.mark.parametrize(
    ("stage", "family", "options"),
    [
        ("pt", "dsv2", {"disable_gradient_checkpointing": True}),
        ("dpo", "qwen3moe", {"use_rslora": True}),
        ("kto", "dsv3", {"lora_target": "experts,o_proj"}),
        ("rm", "dsv3", {}),
    ],
)
def test_stages(
    train_yaml: TrainYaml, train: Train, tmp_path: Path, stage: str, family: str, options: dict[str, Any]
) -> None:
    config, output = train_yaml(family, stage=stage, **options), tmp_path / "out"
    log = train(config)
    assert "before step 1" in log
    assert set(logged_losses(output)) == {1, 2}
    report = run_report(output)
    assert report["ended"] == "finished"
    assert {proof["update_step"] for proof in report["guards"]["groups"].values()} == {1}
    assert trained_experts(output) > 0
    ktft.load_adapter(load_as_stored(config["model_name_or_path"]), output)  # strict: standard names, nothing left over
    if stage == "rm":
        assert set(load_file(output / "value_head.safetensors")) == {"v_head.summary.weight", "v_head.summary.bias"}


def test_runs_in_one_process_do_not_mix(
    train_yaml: TrainYaml, run_exp: RunExp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stock run between two ktft runs, the second continuing the adapter of the first; then evaluation alone."""
    import llamafactory.train.sft.workflow as workflow

    seen: list[set[str]] = []
    original = workflow.load_model

    def spy(*args: Any, **kwargs: Any) -> Any:
        model = original(*args, **kwargs)
        seen.append({module.layer.format for module in find_experts(model).values()})
        return model

    monkeypatch.setattr(workflow, "load_model", spy)
    first, second = tmp_path / "first", tmp_path / "second"
    run_exp(train_yaml("qwen3moe", output_dir=str(first), kt_config={"expert_format": "bf16", "threads": 1}))
    stock = train_yaml("qwen3moe", output_dir=str(tmp_path / "stock"), use_kt=False)
    del stock["kt_config"]
    run_exp(stock)
    run_exp(train_yaml("qwen3moe", output_dir=str(second), kt_config=None, adapter_name_or_path=str(first)))
    assert seen == [{"bf16"}, set(), {"int8"}]
    one, two = (tensors_of(path) for path in (first, second))
    assert one.keys() == two.keys()
    assert any(not torch.equal(one[name], two[name]) for name in one)

    evaluate = {"do_train": False, "do_eval": True, "eval_dataset": "sft", "per_device_eval_batch_size": 4}
    results = {}
    for name, adapter in (("base", None), ("adapted", str(second))):
        output = tmp_path / name
        run_exp(train_yaml("qwen3moe", output_dir=str(output), adapter_name_or_path=adapter, dataset=None, **evaluate))
        results[name] = json.loads((output / "eval_results.json").read_text())["eval_loss"]
    assert results["adapted"] < results["base"]


# --- inference --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat_config(tiny_checkpoint: Checkpoint, big_adapter: Path) -> dict[str, Any]:
    return {
        "model_name_or_path": str(tiny_checkpoint("qwen3moe")),
        "adapter_name_or_path": str(big_adapter),
        "template": "default",
        "use_kt": True,
        "kt_config": {"expert_format": "bf16", "threads": 1},
        "do_sample": False,
        "max_new_tokens": 12,
    }


@pytest.fixture(scope="module")
def answers(chat_config: dict[str, Any]) -> dict[str, str]:
    """What the model says with the adapter and without, in this process."""
    from llamafactory.chat import ChatModel

    stock = {key: value for key, value in chat_config.items() if key != "adapter_name_or_path"}
    said = {
        name: "".join(ChatModel(dict(config)).stream_chat([{"role": "user", "content": "add 2 and 3"}]))
        for name, config in (("adapter", chat_config), ("base", stock))
    }
    assert said["adapter"].strip() != said["base"].strip()
    return said


def test_chat_answers_with_the_adapter(
    forks: Forks, chat_config: dict[str, Any], answers: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "chat.yaml").write_text(yaml.safe_dump(chat_config))
    typed, said = tmp_path / "typed", tmp_path / "said"
    os.mkfifo(typed)
    command = [str(Path(sys.executable).parent / "llamafactory-cli"), "chat", str(tmp_path / "chat.yaml")]
    chat = forks.start(command, dict(os.environ), said, stdin=typed)
    with typed.open("w") as keyboard:
        print("add 2 and 3", file=keyboard, flush=True)
        while f"Assistant: {answers['adapter']}" not in said.read_text(errors="replace"):
            assert chat.poll() is None, said.read_text(errors="replace")
            time.sleep(0.05)
        time.sleep(1)  # the answer's thread, LLaMA-Factory's own, may be at its last lines: Python aborts over those
        print("exit", file=keyboard, flush=True)
        assert chat.wait() == 0, said.read_text(errors="replace")


def test_api_answers_with_the_adapter(chat_config: dict[str, Any], answers: dict[str, str]) -> None:
    """In this process: tests of disconnected clients start `llamafactory-cli api`."""
    from fastapi.testclient import TestClient
    from llamafactory.api.app import create_app
    from llamafactory.chat import ChatModel

    body = {"model": "ktft", "messages": [{"role": "user", "content": "add 2 and 3"}]}
    with TestClient(create_app(ChatModel(dict(chat_config)))) as client:
        reply = client.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert reply["choices"][0]["message"]["content"].strip() == answers["adapter"].strip()


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kt_config": {"expert_format": "int3"}}, "expert_format is 'int3'"),
        ({"kt_config": "absent.yaml"}, "kt_config is 'absent.yaml'; give a mapping"),
        ({"kt_threadz": 2}, "unknown key 'kt_threadz'"),
        ({"kt_use_lora_experts": True}, "no dense LoRA experts"),
        ({"use_kt": False}, "kt_config is given without use_kt: true"),
        ({"use_kt": "yes please"}, "use_kt is 'yes please'; give true or false"),
        ({"use_asft_loss": True}, "use_asft_loss is True.*name the reference model, ref_model"),
        ({"infer_backend": "vllm"}, "infer_backend is .*ktft serve MODEL --adapter"),
        ({"quantization_bit": 4}, "quantization_bit is 4"),
        ({"train_from_scratch": True}, "train_from_scratch is True"),
        ({"fsdp": "full_shard", "fsdp_config": {"version": 1}}, "ktft supports FSDP2, and not FSDP1: set version: 2"),
        ({"deepspeed": "z3.json"}, "ktft does not support DeepSpeed"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_refused_arguments(train_yaml: TrainYaml, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_train_args(train_yaml("qwen3moe", **options))


def test_argument_forms_and_untested_versions(
    train_yaml: TrainYaml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = train_yaml("qwen3moe", kt_config=None, kt_cpu_activation="recompute")
    (tmp_path / "kt.yaml").write_text("threads: 2\n")
    assert settings_of(get_train_args(given)[0]).activation == "recompute"
    assert settings_of(get_train_args(given | {"kt_config": str(tmp_path / "kt.yaml")})[0]).threads == 2
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(given | {"kt_config": {"threads": 1}}))
    monkeypatch.setattr(sys, "argv", ["x", str(tmp_path / "train.yaml"), "kt_config.expert_format=bf16"])
    settings = settings_of(get_train_args()[0])
    assert (settings.expert_format, settings.threads) == ("bf16", 1)
    flags = ["--model_name_or_path", given["model_name_or_path"], "--template", "default"]
    flags += ["--use_kt", "--kt_config", '{"threads": 4}']
    assert settings_of(get_infer_args(flags)[0]).threads == 4
    assert settings_of(get_infer_args(flags[:4])[0]) is None

    with pytest.raises(ValueError, match="ktft does not support DeepSpeed"):
        get_train_args(given | {"deepspeed": "z3.json"})
    monkeypatch.setitem(versions.FACTORY.optional, "llamafactory", ("0.9.6", "0.9.7"))
    with pytest.raises(ValueError, match=r"llamafactory 0\.9\.5.* has llamafactory 0\.9\.6.*'llamafactory>=0\.9\.6"):
        get_train_args(given)
    assert settings_of(get_infer_args(flags[:4])[0]) is None  # without use_kt, any version goes on as it is


def test_targets_that_match_nothing_and_nan_end_the_run_clearly(
    train_yaml: TrainYaml, run_exp: RunExp, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="'nothing' matches nothing in the model; it has"):
        run_exp(train_yaml("qwen3moe", lora_target="q_proj,nothing"))
    with pytest.raises(ValueError, match="router"):
        run_exp(train_yaml("dsv2", lora_target="q_proj,gate"))

    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

    monkeypatch.setattr(Qwen3MoeRMSNorm, "forward", lambda self, x: x * float("nan"))
    with pytest.raises(ValueError, match=r"mlp\.experts.*NaN"):
        run_exp(train_yaml("qwen3moe"))


def test_export_is_refused_without_a_crash(fork_cli: RunCli, chat_config: dict[str, Any], tmp_path: Path) -> None:
    """With ktft's message and a status that is not zero, before a model is loaded."""
    export = {key: value for key, value in chat_config.items() if not key.startswith(("do_", "max_"))}
    done = fork_cli(["llamafactory-cli", "export"], export | {"export_dir": str(tmp_path / "merged")}, check=False)
    assert done.returncode == 2  # a wrong input, as every command says it
    assert "ktft keeps adapters unmerged" in done.stdout and "ktft merge BASE ADAPTER OUT" in done.stdout
    assert "Loading" not in done.stdout

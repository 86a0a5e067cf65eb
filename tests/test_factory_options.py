"""Options of LLaMA-Factory that only some users set: they do what they say, or the first message has the cure."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import trl
from adapted import load_as_stored, tensors_of
from given import Checkpoint, RunCli, RunExp, RunPython, TrainYaml
from llamafactory.hparams import get_train_args
from llamafactory.third_party.muon import Muon
from tiny import make_config, make_model, tokenizer
from torch import Tensor, nn
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

import ktft
from ktft.model import quantizer
from ktft.train.muon import orthogonalize, take_stacked
from ktft.train.trainer import check_arguments

TRAIN = ["llamafactory-cli", "train"]


# --- resize_vocab -----------------------------------------------------------------------------------------------------


def test_new_tokens_train_are_saved_and_loaded_again(
    train_yaml: TrainYaml, fork_cli: RunCli, run_exp: RunExp, tmp_path: Path
) -> None:
    """The tiny vocabulary has 320 rows of which 259 are tokens, so that 70 more need new rows."""
    words = {"add_tokens": ",".join(f"<new{i}>" for i in range(70)), "resize_vocab": True, "bf16": True}
    config = train_yaml("qwen3moe", lora_target="q_proj,down_proj", learning_rate=1e-2, **words)
    config["kt_config"] = {"expert_format": "int8", "threads": 1}
    fork_cli(TRAIN, config)
    saved = tensors_of(tmp_path / "out")
    rows = {name: tensor for name, tensor in saved.items() if "embed_tokens" in name or "lm_head" in name}
    assert [tuple(tensor.shape) for tensor in rows.values()] == [(384, 64), (384, 64)]
    assert any(tensor.any() for name, tensor in saved.items() if ".mlp.experts." in name and "lora_B" in name)

    again = {"adapter_name_or_path": str(tmp_path / "out"), "learning_rate": 0.0, "max_steps": 1}
    run_exp(config | again | {"output_dir": str(tmp_path / "again")})
    for name, tensor in tensors_of(tmp_path / "again").items():
        assert torch.equal(tensor, saved[name]), name

    model = load_as_stored(Path(config["model_name_or_path"]))
    with pytest.raises(ValueError, match=r"\(384, 64\) in the adapter and \(320, 64\) in the model"):
        ktft.load_adapter(model, tmp_path / "out")
    model.resize_token_embeddings(384)
    ktft.load_adapter(model, tmp_path / "out")
    (embeddings,) = (tensor for name, tensor in rows.items() if "embed_tokens" in name)
    assert torch.equal(model.get_input_embeddings().weight, embeddings.bfloat16())


# --- Muon -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 4, 48), (5, 48, 4), (3, 16, 16)])
def test_muon_on_stacked_matrices_is_muon_on_each(shape: tuple[int, int, int]) -> None:
    """Beside LLaMA-Factory's own Muon on every matrix as a parameter of its own, after each of three steps."""
    generator = torch.Generator().manual_seed(3)
    stacked = nn.Parameter(torch.randn(shape, generator=generator))
    vector = nn.Parameter(torch.randn(7, generator=generator))
    each, same = [nn.Parameter(matrix.clone()) for matrix in stacked.detach()], nn.Parameter(vector.detach().clone())
    start, options = stacked.detach().clone(), {"lr": 0.02, "wd": 0.1}
    ours = Muon(muon_params=[], adamw_params=[stacked, vector], **options)
    take_stacked(ours, [stacked])
    theirs = Muon(muon_params=each, adamw_params=[same], **options)
    for step in range(3):
        stacked.grad = torch.randn(shape, generator=generator)
        stacked.grad[1] = 0  # an expert without tokens
        vector.grad = torch.randn(7, generator=generator)
        for parameter, gradient in zip(each, stacked.grad.clone(), strict=True):
            parameter.grad = gradient
        same.grad = vector.grad.clone()
        kept = stacked.grad.clone()
        ours.step()
        theirs.step()
        assert torch.equal(stacked.grad, kept)
        moved, expected = stacked.detach() - start, torch.stack([p.detach() for p in each]) - start
        for expert in range(shape[0]):
            assert (moved[expert] - expected[expert]).norm() <= 0.02 * expected[expert].norm(), (step, expert)
        assert torch.equal(vector, same)
    assert not orthogonalize(torch.zeros(2, 3, 4), 5).any()


def test_muons_state_is_resumed_and_another_is_refused() -> None:
    def make(stacked: bool) -> tuple[nn.Parameter, Any]:
        parameter = nn.Parameter(torch.arange(24.0).view(2, 3, 4))
        optimizer = Muon(muon_params=[], adamw_params=[parameter], lr=0.1)
        if stacked:
            take_stacked(optimizer, [parameter])
        parameter.grad = torch.ones(2, 3, 4)
        optimizer.step()
        return parameter, optimizer

    (one, first), (two, second) = make(True), make(True)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for parameter, optimizer in ((one, first), (two, second)):
        parameter.grad = torch.full((2, 3, 4), 2.0)
        optimizer.step()
    assert torch.equal(one, two)
    with pytest.raises(ValueError, match="moved the LoRA of routed experts by AdamW"):
        second.load_state_dict(make(False)[1].state_dict())


def test_use_muon_updates_experts_by_muon(train_yaml: TrainYaml, run_exp: RunExp, tmp_path: Path) -> None:
    """A step of Muon is nearly orthogonal times a known rate, one of AdamW has equal entries."""
    run_exp(train_yaml("qwen3moe", use_muon=True, max_steps=1, learning_rate=1e-2, weight_decay=0.0))
    moved = [t for name, t in tensors_of(tmp_path / "out").items() if ".mlp.experts." in name and "lora_B" in name]
    touched = [b for b in moved if b.any()]
    assert len(touched) > 10
    for b in touched:
        values = torch.linalg.svdvals(b) / (1e-2 * 0.2 * max(b.shape) ** 0.5)
        assert values[0] < 1.3
    spread = torch.cat([b.abs().flatten() / b.abs().max() for b in touched])
    assert (spread < 0.5).float().mean() > 0.3  # AdamW's first step moves every entry by the learning rate


# --- what is refused, and how -----------------------------------------------------------------------------------------


def test_asft_trains_with_a_reference_model(
    train_yaml: TrainYaml, run_exp: RunExp, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    run_exp(train_yaml("qwen3moe", use_asft_loss=True, ref_model=str(tiny_checkpoint("qwen3moe")), max_steps=1))
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


LAUNCHERS = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism of accelerate",
}


@pytest.mark.parametrize("variable", LAUNCHERS)
def test_a_launcher_in_the_environment_is_named(
    train_yaml: TrainYaml, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    config = train_yaml("qwen3moe")
    monkeypatch.setenv(variable, "true")
    with pytest.raises(ValueError, match=rf"{LAUNCHERS[variable]} in this release.*{variable}=true; unset {variable}"):
        get_train_args(config)
    monkeypatch.setenv(variable, "false")
    with contextlib.suppress(ImportError):  # of what other variables ask for
        get_train_args(config)


def test_additional_target_names_all_that_a_cpu_needs(train_yaml: TrainYaml, run_exp: RunExp) -> None:
    config = train_yaml("qwen3moe", additional_target="gate")
    del config["use_cpu"]
    with pytest.raises(ValueError, match=r"set bf16: true and use_cpu: true$"):
        run_exp(config)


def test_a_json_file_is_read_as_a_yaml_file_is(
    train_yaml: TrainYaml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "train.json"
    monkeypatch.setattr(sys, "argv", ["x", str(file), "max_steps=7"])
    file.write_text(json.dumps(train_yaml("qwen3moe")))
    assert get_train_args()[2].max_steps == 7
    for text, message in (("{'a': 1}", "is not a JSON file"), ("[1]", "holds no keys")):
        file.write_text(text)
        with pytest.raises(ValueError, match=rf"train\.json {message}"):
            get_train_args()


def test_a_process_of_several_ends_with_the_refusal(train_yaml: TrainYaml, fork_cli: RunCli) -> None:
    done = fork_cli(TRAIN, train_yaml("qwen3moe", deepspeed="z3.json"), check=False, env={"WORLD_SIZE": "2"})
    assert done.returncode != 0
    assert "ktft does not support DeepSpeed (ZeRO-2 and ZeRO-3 included) in this release" in done.stdout


@pytest.mark.full
def test_torchrun_ends_with_the_refusal(train_yaml: TrainYaml, run_cli: RunCli) -> None:
    two = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = run_cli(TRAIN, train_yaml("qwen3moe", deepspeed="z3.json"), check=False, env=two)
    assert done.returncode == 1
    summary = done.stdout.rpartition("Root Cause (first observed failure)")[2]
    assert "ktft does not support DeepSpeed (ZeRO-2 and ZeRO-3 included) in this release" in summary


# --- FlashAttention and Liger -----------------------------------------------------------------------------------------


def test_fa2_is_refused_where_transformers_cannot_run_it(
    train_yaml: TrainYaml, tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    if transformers.__version__ != "5.6.0":
        pytest.skip("another transformers may run it")

    def as_asked(self: Any, implementation: str | None, *args: Any, **kwargs: Any) -> str | None:
        return implementation  # no flash-attn, which the check comes before, is installed here

    words = r"cannot work with transformers 5\.6\.0.*flash_attn: sdpa"
    with pytest.raises(ValueError, match=f"flash_attn: fa2 {words}"):
        get_train_args(train_yaml("qwen3moe", flash_attn="fa2"))
    get_train_args(train_yaml("qwen3moe", flash_attn="sdpa"))
    monkeypatch.setattr("transformers.modeling_utils.PreTrainedModel._check_and_adjust_attn_implementation", as_asked)
    with pytest.raises(ValueError, match=f"attn_implementation 'flash_attention_2' {words}"):
        load_as_stored(tiny_checkpoint("qwen3moe"), attn_implementation="flash_attention_2")

    def mended(*args: Any, s_aux: Any = None, **kwargs: Any) -> Any:
        return flash_attention_forward(*args, s_aux=torch.zeros(1) if s_aux is None else s_aux, **kwargs)

    monkeypatch.setattr(quantizer, "flash_attention_forward", mended)
    get_train_args(train_yaml("qwen3moe", flash_attn="fa2"))  # what decides is the function, not its version


def test_doctor_says_what_the_versions_cannot_do_together(fork_python: RunPython) -> None:
    """And it is true: TRL's DPOTrainer by itself does not import."""
    from ktft.cli.doctor import known_limits

    if transformers.__version__ != "5.6.0" or not trl.__version__.startswith("0.24."):
        pytest.skip("other versions may")
    said = {row.check: row.value for row in known_limits()}
    assert "stage: dpo works" in said["trl"]
    assert "flash_attn: sdpa" in said["flash attention"]
    assert "mergekit" in fork_python("from trl import DPOTrainer").stderr


def test_ligers_experts_are_left_out_and_the_rest_stays(
    train_yaml: TrainYaml, run_exp: RunExp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in that swaps classes of transformers' module, as liger-kernel 0.8.5 does for Qwen3-MoE."""
    seen: list[str] = []
    for name in ("Qwen3MoeExperts", "Qwen3MoeRMSNorm", "apply_rotary_pos_emb"):
        monkeypatch.setattr(modeling, name, getattr(modeling, name))  # put back after the test

    class LigerRMSNorm(modeling.Qwen3MoeRMSNorm):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor) -> Tensor:
            seen.append("norm")
            return super().forward(hidden_states)

    class LigerExperts(nn.Module):
        def __init__(self, config: Any) -> None:
            raise AssertionError("these weights would be on no CPU kernel")

    def apply() -> None:
        modeling.Qwen3MoeRMSNorm, modeling.Qwen3MoeExperts = LigerRMSNorm, LigerExperts

    inner = SimpleNamespace(apply_liger_kernel_to_qwen3_moe=apply)
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", inner)
    monkeypatch.setattr("llamafactory.hparams.parser.check_version", lambda *args, **kwargs: None)
    run_exp(train_yaml("qwen3moe", enable_liger_kernel=True, max_steps=1))
    assert seen
    assert any(".mlp.experts." in name for name in tensors_of(tmp_path / "out"))


def test_a_trainers_own_liger_must_leave_experts_alone(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", use_liger_kernel=True)
    with pytest.raises(ValueError, match=r"in place of ktft's experts.*'swiglu': False"):
        check_arguments(args)
    args.liger_kernel_config = {"swiglu": False}
    check_arguments(args)


def test_experts_that_another_package_replaced_are_named(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = type("LigerExperts", (modeling.Qwen3MoeExperts,), {})
    monkeypatch.setattr(modeling, "Qwen3MoeExperts", other)
    with pytest.raises(ValueError, match="LigerExperts in place of Qwen3MoeExperts.*swiglu=False"):
        load_as_stored(tiny_checkpoint("qwen3moe"))


# --- tool calls -------------------------------------------------------------------------------------------------------


def test_the_api_answers_with_a_tool_call(tmp_path: Path) -> None:
    """A tiny model that was taught a single one, in stock torch, answers through ktft's experts and LLaMA-Factory."""
    from fastapi.testclient import TestClient
    from llamafactory.api.app import create_app
    from llamafactory.chat import ChatModel
    from llamafactory.data import get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments

    numbers = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    tool = {"name": "add", "description": "Add.", "parameters": numbers}
    call = {"name": "add", "arguments": {"a": 1, "b": 2}}
    words = tokenizer()
    template = get_template_and_fix_tokenizer(words, DataArguments(template="default"))
    turn = [{"role": "user", "content": "1+2?"}, {"role": "function", "content": json.dumps([call])}]
    prompt, answer = template.encode_oneturn(words, turn, None, json.dumps([tool]))
    ids = torch.tensor([prompt + answer])
    labels = ids.masked_fill(torch.arange(ids.shape[1]) < len(prompt), -100)
    model = make_model(make_config("qwen3moe", max_position_embeddings=1024)).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        loss = model(input_ids=ids, labels=labels).loss
        if loss < 0.01:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.bfloat16().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)

    arguments = {"model_name_or_path": str(tmp_path), "template": "default", "use_kt": True, "infer_dtype": "float32"}
    chat = ChatModel(arguments | {"kt_config": {"expert_format": "bf16", "threads": 1}, "do_sample": False})
    body = {"model": "ktft", "messages": turn[:1], "tools": [{"type": "function", "function": tool}], "max_tokens": 64}
    with TestClient(create_app(chat)) as client:
        choice = client.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (made,) = choice["message"]["tool_calls"]
    assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == ("add", {"a": 1, "b": 2})

"""FSDP2 beside experts that ranks share, on CPUs and gloo: what DDP computes and writes, with divided parameters."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from adapted import load
from given import RunCli
from ranks import ENVIRONMENT, results, run_jobs
from runs import logged
from safetensors.torch import load_file
from tiny import write_data

import ktft
from ktft.ranks import launch
from ktft.train import shards
from ktft.train.trainer import check_launch

ROOT = Path(__file__).resolve().parents[1]
YAML = ROOT / "examples" / "yaml" / "qwen3_moe_fsdp2.yaml"
FSDP: dict[str, Any] = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}}
WHOLE = {"target_modules": ["embed_tokens", "q_proj", "gate_proj"], "modules_to_save": ["lm_head"]}


def near(one: list[float], two: list[float]) -> bool:
    return one == pytest.approx(two, rel=5e-3)


def distance(one: torch.Tensor, two: torch.Tensor) -> float:
    """Relative. AdamW makes much of the last bits of gradients near zero."""
    return float((one - two).norm() / two.norm().clamp(min=1e-12))


def same_adapters(one: Path, two: Path, within: float) -> None:
    """As a whole: after some steps last bits may send a token to another expert, which one expert's LoRA shows."""
    a, b = (load_file(each / "adapter_model.safetensors") for each in (one, two))
    assert a.keys() == b.keys() and all(a[name].shape == b[name].shape for name in a)
    assert distance(*(torch.cat([each[name].flatten() for name in sorted(a)]) for each in (a, b))) <= within


def same_moments(one: Path, two: Path, within: float) -> None:
    """Those in `optimizer.pt`, of all but the experts."""
    a, b = (torch.load(each / "optimizer.pt")["state"] for each in (one, two))
    assert a.keys() == b.keys()
    for at, state in a.items():
        for key, value in state.items():
            assert value.shape == b[at][key].shape
            assert distance(value, b[at][key]) <= within, (at, key)


def test_fsdp2_is_ddp_and_resumes(base: Path, tmp_path: Path) -> None:
    """Also through a mixed checkpoint: DDP's goes on under FSDP2. Gradient checkpointing is asked for as reentrant."""

    def job(name: str, **more: Any) -> dict[str, Any]:
        # At five times this rate the last bits, which follow the order of sums, grow to some percent in eight steps
        six = {"max_steps": 6, "save_steps": 1, "gradient_accumulation_steps": 2, "learning_rate": 1e-3}
        reentrant = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
        best = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
        return {"base": str(base), "output": str(tmp_path / name), "lora": WHOLE} | six | reentrant | best | more

    again = job("again", resume=str(tmp_path / "fsdp/checkpoint-3"), **FSDP)
    mixed = job("mixed", resume=str(tmp_path / "ddp/checkpoint-3"), **FSDP)
    ended = job("ended", resume=str(tmp_path / "ddp/checkpoint-6"), **FSDP)  # what DDP wrote is saved again
    status, said = run_jobs(2, tmp_path, job("ddp"), job("fsdp", **FSDP), again, mixed, ended)
    assert status == 0, said
    assert said.count("FSDP2 divides") == 4, "one line of rank 0 for each run"
    found = {name: results(tmp_path / name) for name in ("ddp", "fsdp", "again", "mixed")}
    for name in ("fsdp", "mixed"):
        assert near(found[name]["losses"], found["ddp"]["losses"])
        assert found[name]["norms"] == pytest.approx(found["ddp"]["norms"], rel=0.01)
    assert found["fsdp"]["norms"][0] == pytest.approx(found["ddp"]["norms"][0], rel=1e-6)
    for key in ("losses", "norms"):
        assert found["again"][key] == found["fsdp"][key]
    assert found["fsdp"]["eval"] == pytest.approx(found["ddp"]["eval"], rel=5e-3)
    fsdp, ddp = tmp_path / "fsdp", tmp_path / "ddp"
    same_moments(fsdp / "checkpoint-1", ddp / "checkpoint-1", within=1e-5)
    same_adapters(fsdp, ddp, within=0.02)
    same_moments(tmp_path / "again/checkpoint-6", fsdp / "checkpoint-6", within=0)
    same_adapters(tmp_path / "again", fsdp, within=0)
    same_adapters(tmp_path / "ended", ddp / "checkpoint-6", within=0)


def test_three_processes_of_which_some_have_no_rows(base: Path, tmp_path: Path) -> None:
    """LoRA of rank 2 has two rows. The precision is mixed, and the arguments come from accelerate's environment."""
    job = {"base": str(base), "max_steps": 4, "dtype": "bfloat16", "bf16": True, "examples": 12}
    asked = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    jobs = {**job, "output": str(tmp_path / "fsdp")}, {**job, "output": str(tmp_path / "ddp"), "fresh": True}
    status, said = run_jobs(3, tmp_path, *jobs, **asked)
    assert status == 0 and said.count("FSDP2 divides") == 1, said
    ddp, fsdp = results(tmp_path / "ddp"), results(tmp_path / "fsdp")
    assert near(fsdp["losses"], ddp["losses"]) and near(fsdp["norms"], ddp["norms"])


def test_through_llamafactory(base: Path, tmp_path: Path, fork_cli: RunCli) -> None:
    """The example, on a small model, which LLaMA-Factory starts in two processes, evaluates and saves on the way."""
    tiny = {"model_name_or_path": str(base), "dataset_dir": str(write_data(tmp_path / "data")), "dataset": "sft"}
    few = {"template": "default", "cutoff_len": 64, "max_steps": 3, "logging_steps": 1, "save_steps": 2}
    few |= {"eval_dataset": "sft", "eval_strategy": "steps", "eval_steps": 2}
    settings = yaml.safe_load(YAML.read_text()) | tiny | few | {"output_dir": str(tmp_path / "out"), "use_cpu": True}
    settings["kt_config"]["threads"] = 1
    cli = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"}
    said = fork_cli(["llamafactory-cli", "train"], settings, env=ENVIRONMENT | cli).stdout  # which starts torchrun
    assert "FSDP2 divides" in said, said
    assert len(logged(tmp_path / "out")) == 3
    assert (tmp_path / "out" / "checkpoint-2" / shards.shard_name(1, 2)).is_file()
    ktft.load_adapter(load(base), tmp_path / "out")  # refuses an adapter that lacks an expert
    names = load_file(tmp_path / "out" / "adapter_model.safetensors").keys()
    assert any(".experts.7.gate_proj.lora_A" in name for name in names), "experts of the second process"
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["r"] == 8


def test_fsdp1_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="version: 2"):
        check_launch(fsdp=1)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="FSDP_VERSION=2"):
        check_launch()
    monkeypatch.setenv("FSDP_VERSION", "2")
    check_launch(fsdp=2)
    assert launch.fsdp_version() == 2

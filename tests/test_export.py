"""`ktft export`: what each program will make of the files, and what is refused because it could not."""

from __future__ import annotations

import errno
import json
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import adapted, logits
from commands import run as command
from dying import full_disk
from given import Checkpoint
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ktft.adapters.export import open_adapter
from ktft.checkpoint import files as checkpoint_files
from ktft.config import PROJECTIONS

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
from second_environment import reference_experts

PATTERNS = {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"gate_proj": 5, "o_proj": 3}, "use_rslora": True}
HEAD = {"modules_to_save": ["lm_head"]}
WITHOUT_LATENT = ["o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def make(tmp_path: Path, tiny_checkpoint: Checkpoint) -> Callable[..., Path]:
    """`make(family, **LoRA options)` -> a saved adapter that matters."""

    def make(family: str, **options: Any) -> Path:
        adapted(tiny_checkpoint(family), **options).save_pretrained(tmp_path / "adapter")
        return tmp_path / "adapter"

    return make


def run(adapter: Path, target: str, *more: str, code: int = 0) -> str:
    """Export beside the adapter, as a user does. Returns what was said, on one line."""
    status, said = command("export", adapter, adapter.parent / "out", "--to", target, *more)
    assert status == code, said
    return " ".join(said.split())


def stock(checkpoint: Path, adapter: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapter)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3moe", {}),
        ("dsv2", PATTERNS),
        ("dsv3", HEAD),
        ("gpt_oss", PATTERNS),
        ("nemotron", {"rank_pattern": {"up_proj": 2}}),
        ("qwen3moe", {"target_modules": ["experts"]}),
        ("dsv3", {"target_modules": r".*experts\.\d+\.up_proj"}),
        ("dsv2", {"target_modules": ["down_proj", "q_proj"], "rank_pattern": {"self_attn.q_proj": 3}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "all",
)
def test_peft_on_transformers_5(
    tiny_checkpoint: Checkpoint, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    checkpoint, adapter = tiny_checkpoint(family), tmp_path / "adapter"
    model = adapted(checkpoint, **options)
    model.save_pretrained(adapter)
    with reference_experts():
        expected = logits(model)
        with model.disable_adapter():
            base = logits(model)
    run(adapter, "peft")
    exported = logits(stock(checkpoint, tmp_path / "out"))
    assert (expected - base).abs().max() > 0.1
    assert (exported - expected).abs().max() < 1e-5


def test_why_the_export_is_needed(tiny_checkpoint: Checkpoint, make: Callable[..., Path]) -> None:
    """The card's warning is true of the versions that ktft stands on: another model, and no word of it."""
    targets = ["o_proj", *PROJECTIONS]
    model = adapted(tiny_checkpoint("dsv3"), target_modules=targets)
    adapter = make("dsv3", target_modules=targets)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The following .*_pattern keys", RuntimeWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        unchanged = logits(stock(tiny_checkpoint("dsv3"), adapter))
    assert (unchanged - logits(model)).abs().max() > 0.1


def trained(adapter: Path) -> dict[str, Tensor]:
    """Module -> scaling · B A, as ktft trained it."""
    opened = open_adapter(adapter)
    return {
        name: place.scaling * opened.read(place.tensor("lora_B")) @ opened.read(place.tensor("lora_A"))
        for name, place in opened.places.items()
    }


@pytest.mark.parametrize("target", ["vllm", "sglang"])
@pytest.mark.parametrize("options", [{}, PATTERNS, {"target_modules": ["up_proj", "q_proj", "v_proj"]}], ids=str)
def test_servers_get_one_rank_one_scaling_and_whole_groups(
    make: Callable[..., Path], target: str, options: dict[str, Any]
) -> None:
    """Read as both servers do: alpha / r for all. Their own readers: tests/scripts/serving_readers.py."""
    adapter = make("qwen3moe", **options)
    said = run(adapter, target)
    out = adapter.parent / "out"
    assert str(out) in said
    assert "--max-lora-rank" in said
    config = json.loads((out / "adapter_config.json").read_text())
    tensors = load_file(out / "adapter_model.safetensors")
    assert config["r"] == 4
    assert config["rank_pattern"] == config["alpha_pattern"] == {}
    assert config["use_rslora"] is False
    assert isinstance(config["target_modules"], list)
    names = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in tensors}
    expected = trained(adapter)
    for name in names:
        a, b = (tensors[f"base_model.model.{name}.lora_{kind}.weight"] for kind in "AB")
        assert a.shape[0] == b.shape[1] == 4
        delta = config["lora_alpha"] / config["r"] * b @ a
        assert torch.allclose(delta, expected.pop(name, torch.zeros(())).expand_as(delta), atol=1e-6)
    assert not expected
    for expert in range(8):
        assert {f"model.layers.0.mlp.experts.{expert}.{p}_proj" for p in ("gate", "up", "down")} <= names
    assert ("model.layers.0.self_attn.k_proj" in names) == (target == "sglang" or "target_modules" not in options)


@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen3moe", {}), ("qwen3moe", PATTERNS), ("dsv3", {"target_modules": WITHOUT_LATENT})],
    ids=["all", "patterns", "dsv3"],
)
def test_gguf_is_read_by_its_own_reader(make: Callable[..., Path], family: str, options: dict[str, Any]) -> None:
    gguf = pytest.importorskip("gguf")
    adapter = make(family, **options)
    run(adapter, "gguf")
    reader = gguf.GGUFReader(adapter.parent / "out" / "adapter.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.type"] == "adapter"
    assert fields["adapter.type"] == "lora"
    assert fields["general.architecture"] == {"qwen3moe": "qwen3moe", "dsv3": "deepseek2"}[family]
    alpha = fields["adapter.lora.alpha"]
    found = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    assert {name.rsplit(".", 1)[1] for name in found} == {"lora_a", "lora_b"}
    places = {
        "self_attn.o_proj": "attn_output",
        "mlp.experts.{}.gate_proj": "ffn_gate_exps",
        "mlp.experts.{}.down_proj": "ffn_down_exps",
    }
    if family == "dsv3":
        places["mlp.shared_experts.up_proj"] = "ffn_up_shexp"
    expected = trained(adapter)
    for module, name in places.items():
        a, b = (found[f"blk.1.{name}.weight.lora_{kind}"] for kind in "ab")
        assert a.shape[-2] == b.shape[-1]
        delta = alpha / b.shape[-1] * b @ a
        own = [expected[f"model.layers.1.{module.format(expert)}"] for expert in range(8 if "{}" in module else 1)]
        assert torch.allclose(delta, torch.stack(own).view_as(delta), atol=1e-6)
    assert len(found) == 2 * len({re.sub(r"\.experts\.\d+", "", name) for name in expected})


@pytest.mark.parametrize(
    ("family", "options", "target", "message"),
    [
        ("qwen3moe", HEAD, "vllm", "vLLM loads LoRA alone.*lm_head.weight, trained"),
        ("qwen3moe", HEAD, "sglang", "SGLang loads LoRA alone.*ktft merge"),
        ("qwen3moe", HEAD, "gguf", "holds LoRA alone"),
        ("dsv3", {}, "vllm", r"vLLM would not apply .*kv_b_proj\.lora_A\.weight.*without kv_b_proj in lora_target"),
        ("dsv2", {}, "sglang", r"SGLang reads .*layers\.\d\.self_attn\.\w+_proj.* together, and the model has no"),
        ("dsv3", {}, "gguf", "deepseek2 does not apply LoRA to .*self_attn"),
        ("gpt_oss", {}, "gguf", "export to GGUF knows Qwen2-MoE.*not gpt-oss"),
        ("gpt_oss", {}, "vllm", "vLLM.*gpt-oss"),
        ("mixtral", {}, "sglang", "SGLang.*Mixtral"),
        ("qwen3moe", {"rank_pattern": {"q_proj": 520}}, "vllm", "rank 520, vLLM loads 512 at most"),
        ("qwen2moe", {}, "sglang", "SGLang has no place for .*shared_expert_gate"),
        ("qwen3moe", {}, "ollama", "'ollama'.*'peft'"),
    ],
)
def test_what_a_target_cannot_hold_is_refused(
    make: Callable[..., Path], family: str, options: dict[str, Any], target: str, message: str
) -> None:
    adapter = make(family, **options)
    said = run(adapter, target, code=2)
    assert re.search(message, said), said
    assert not (adapter.parent / "out").exists()


def test_bad_input(
    make: Callable[..., Path], tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, out = make("qwen3moe"), tmp_path / "out"
    config, weights = adapter / "adapter_config.json", adapter / "adapter_model.safetensors"
    good = config.read_bytes(), weights.read_bytes()
    assert "no such directory" in run(adapter / "absent", "peft", code=2)
    out.mkdir()
    (out / "file").touch()
    assert "is not empty; name a new directory" in run(adapter, "peft", code=2)
    shutil.rmtree(out)

    config.write_text(json.dumps(json.loads(good[0]) | {"base_model_name_or_path": "/nowhere/model"}))
    assert "the base model '/nowhere/model': no such directory; name its directory" in run(adapter, "peft", code=2)
    run(adapter, "peft", "--base", str(tiny_checkpoint("qwen3moe")))
    shutil.rmtree(out)
    config.write_bytes(good[0])

    tensors = load_file(weights)
    name = next(name for name in tensors if "experts.3.up_proj.lora_B" in name)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    for target in ("peft", "vllm", "gguf"):
        assert f"{name} holds NaN or Inf" in run(adapter, target, code=2)
        assert not out.exists() or not any(out.iterdir())
    del tensors[name]
    save_file(tensors, weights, metadata={"format": "pt"})
    assert f"1 tensors of the model are missing, the first is {name}" in run(adapter, "vllm", code=2)
    weights.write_bytes(good[1])

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files.os, "pwrite", full_disk)
        assert f"[Errno {errno.ENOSPC}]" in run(adapter, "vllm", code=2)
    assert not any(out.iterdir())
    run(adapter, "vllm")


# --- from another folder ----------------------------------------------------------------------------------------------


@pytest.fixture
def relative(tmp_path: Path, tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An adapter whose base was named by a relative path, seen from another folder than the one of its training."""
    (tmp_path / "home" / "build").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    shutil.copytree(tiny_checkpoint("qwen3moe"), tmp_path / "home" / "build" / "model")
    monkeypatch.chdir(tmp_path / "home")
    adapted(Path("build/model")).save_pretrained(tmp_path / "adapter")
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "adapter"


def test_the_base_is_found_from_any_folder(relative: Path) -> None:
    assert json.loads((relative / "adapter_config.json").read_text())["base_model_name_or_path"] == "build/model"
    base = relative.parent / "home" / "build" / "model"
    assert f'from_pretrained("{base}"' in (relative / "README.md").read_text()
    assert f'AutoModelForCausalLM.from_pretrained("{base}")' in run(relative, "peft")


def test_a_base_that_is_gone_is_not_asked_of_the_hub(relative: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (relative.parent / "home").rename(relative.parent / "moved")
    (relative.parent / "elsewhere" / "build").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    said = run(relative, "peft", code=2)
    assert f"the base model 'build/model': no such directory from here ({relative.parent / 'elsewhere'})" in said
    assert "--base" in said and "repo" not in said.lower()

"""Adapters on disk: saves are verified, a failed save changes nothing, and loading notices every damage."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from adapted import adapted, load
from damage import edit_json, flip
from dying import full_disk
from given import Checkpoint
from merging import contents
from runs import DATA, arguments
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import ktft
from ktft.adapters import files
from ktft.checkpoint import files as checkpoint_files

Mutation = Callable[[dict[str, Tensor], str, random.Random], Any]


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Checkpoint) -> torch.nn.Module:
    """DeepSeek-V3 with LoRA on all layers and the output layer trained whole."""
    return adapted(tiny_checkpoint("dsv3"), modules_to_save=["lm_head"])


@pytest.fixture
def saved(model: torch.nn.Module, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "adapter", selected_adapters=["default"])
    return tmp_path / "adapter"


def rename(tensors: dict[str, Tensor], name: str, _: random.Random) -> None:
    tensors[name.replace("layers.1", "layers.7").replace("weight", "wieght")] = tensors.pop(name)


def add(tensors: dict[str, Tensor], name: str, _: random.Random) -> None:
    tensors[name.replace("model.model", "model.model.extra")] = tensors[name].clone()


def poke(new: Callable[[Tensor], Any]) -> Mutation:
    """Change one number."""

    def change(tensors: dict[str, Tensor], name: str, rng: random.Random) -> None:
        flat = tensors[name].view(-1)
        at = rng.randrange(len(flat))
        flat[at] = new(flat[at])

    return change


def cast(tensors: dict[str, Tensor], name: str, rng: random.Random) -> None:
    tensors[name] = tensors[name].to(rng.choice([torch.bfloat16, torch.int32, torch.float64]))


def cut(tensors: dict[str, Tensor], name: str, rng: random.Random) -> None:
    tensors[name] = tensors[name][:-1].contiguous() if rng.random() < 0.5 else tensors[name][:, :-1].contiguous()


def lower_rank(tensors: dict[str, Tensor], a: str, _: random.Random) -> None:
    b = a.replace("lora_A", "lora_B")
    tensors[a], tensors[b] = tensors[a][:2].contiguous(), tensors[b][:, :2].contiguous()


def renumber(old: str, new: str, keep: bool) -> Mutation:
    """Rename tensors as if the model had another number of experts or other layers."""

    def change(tensors: dict[str, Tensor], *_: Any) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors[name].clone()
            if not keep:
                del tensors[name]

    return change


def swap(tensors: dict[str, Tensor], a: str, _: random.Random) -> None:
    b = a.replace("experts.3", "experts.5")
    tensors[a], tensors[b] = tensors[b], tensors[a]


MUTATIONS: dict[str, tuple[Mutation, str, bool]] = {
    "renamed": (rename, "", False),
    "dropped": (lambda tensors, name, _: tensors.pop(name), "", False),
    "added": (add, "", False),
    "NaN": (poke(lambda _: float("nan")), "", False),
    "Inf": (poke(lambda _: float("-inf")), "", False),
    "dtype": (cast, "lora_", False),
    "shape": (cut, "", False),
    "rank": (lower_rank, "lora_A", False),
    "an expert more": (renumber("experts.7.", "experts.8.", keep=True), "", False),
    "an expert less": (renumber("experts.7.", "experts.77.", keep=False), "", False),
    "other layers": (renumber("layers.2.", "layers.3.", keep=False), "", False),
    "value": (poke(lambda old: old + 0.5), "", True),
    "swapped": (swap, "experts.3", True),
}
"""A change to a tensor, a part of the tensor's name, and whether only checksums reveal the change."""


@pytest.mark.parametrize("rounds", [3, pytest.param(10, marks=pytest.mark.full)])
def test_every_mutation_of_a_tensor_is_noticed(
    model: torch.nn.Module, saved: Path, tmp_path: Path, rounds: int
) -> None:
    rng, file = random.Random(0), saved / "adapter_model.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    for i, what in enumerate(rounds * list(MUTATIONS)):
        change, part, needs_checksums = MUTATIONS[what]
        tensors = load_file(file)
        change(tensors, rng.choice([name for name in tensors if part in name]), rng)
        damaged = tmp_path / "damaged"
        shutil.copytree(saved, damaged, dirs_exist_ok=True)
        keep = needs_checksums or rng.random() < 0.5
        save_file(tensors, damaged / file.name, metadata=metadata if keep else {"format": "pt"})
        with pytest.raises(ValueError, match=r"adapter_model\.safetensors"):
            model.load_adapter(damaged, f"mutation{i}")
            pytest.fail(f"{what} was not noticed")
    assert list(model.peft_config) == ["default"]
    model.load_adapter(saved, "again")
    for name, tensor in model.state_dict().items():
        if ".again." in name or name.endswith(".again"):
            assert torch.equal(tensor, model.state_dict()[name.replace(".again", ".default")])
    model.delete_adapter("again")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 8}, r"says r: 8, but its tensors were saved with r: 4"),
        ({"lora_alpha": 16}, r"says lora_alpha: 16, .* lora_alpha: 8; set it back"),
        ({"use_rslora": True}, "says use_rslora: true"),
        ({"rank_pattern": {"q_b_proj": 2}}, "says rank_pattern"),
        ({"alpha_pattern": {"q_b_proj": 2}}, "says alpha_pattern"),
        ({"target_modules": ["down_proj"]}, "are left over, the first is .*gate_proj"),
        ({"modules_to_save": None}, "are left over, the first is .*lm_head"),
        ({"layers_to_transform": [1]}, r"are left over, the first is .*layers\.0"),
        ({"exclude_modules": ["o_proj"]}, "are left over, the first is .*o_proj"),
        ({"peft_type": "IA3"}, "ktft loads LoRA"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_changed_configuration_is_noticed(
    model: torch.nn.Module, saved: Path, change: dict[str, Any], message: str
) -> None:
    edit_json(saved / "adapter_config.json", **change)
    with pytest.raises(ValueError, match=message):
        model.load_adapter(saved, "changed")
    assert list(model.peft_config) == ["default"]


def test_a_file_without_ktfts_metadata_is_checked_by_its_tensors(model: torch.nn.Module, saved: Path) -> None:
    """A file as another program writes it: a rank that disagrees with the tensors is still noticed."""
    file, config = saved / "adapter_model.safetensors", saved / "adapter_config.json"
    save_file(load_file(file), file, metadata={"format": "pt"})
    model.load_adapter(saved, "plain")
    model.delete_adapter("plain")
    edit_json(config, r=8)
    with pytest.raises(ValueError, match=r"has shape \(4, \d+\) in the adapter and \(8, \d+\) in the model"):
        model.load_adapter(saved, "changed")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("adapter_model.safetensors", lambda b: b[:-1], r"bytes long|truncated"),
        ("adapter_model.safetensors", lambda b: b[:100], "not a whole safetensors file"),
        ("adapter_model.safetensors", lambda b: b"", "not a whole safetensors file"),
        ("adapter_config.json", lambda b: b[:40], "is not an adapter's configuration"),
        ("adapter_config.json", lambda b: b"{}", "is not an adapter's configuration|ktft loads LoRA"),
    ],
)
def test_truncated_files(
    model: torch.nn.Module, saved: Path, name: str, content: Callable[[bytes], bytes], message: str
) -> None:
    (saved / name).write_bytes(content((saved / name).read_bytes()))
    with pytest.raises(ValueError, match=message):
        model.load_adapter(saved, "cut")


def test_a_model_is_as_it_was_after_a_refused_adapter(tiny_checkpoint: Checkpoint, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "cut")
    tensors = load_file(saved / "adapter_model.safetensors")
    tensors.popitem()
    save_file(tensors, tmp_path / "cut" / "adapter_model.safetensors", metadata={"format": "pt"})
    base = load(tiny_checkpoint("dsv3"))
    names = [name for name, _ in base.named_modules()]
    with pytest.raises(ValueError, match="1 tensors of the model are missing"):
        ktft.load_adapter(base, tmp_path / "cut")
    assert [name for name, _ in base.named_modules()] == names
    ktft.load_adapter(base, saved)


def test_tensors_that_peft_leaves_out_are_named(
    model: torch.nn.Module, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = peft.PeftModel.load_adapter

    def leave_out(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        result.unexpected_keys.extend(["of_another.lora_A.weight", "of_another.lora_B.weight"])
        return result

    monkeypatch.setattr(peft.PeftModel, "load_adapter", leave_out)
    with pytest.raises(ValueError) as error:
        model.load_adapter(saved, "another")
    said = str(error.value)
    assert f"left out 2 tensors of {saved}, the first is of_another.lora_A.weight. " in said
    assert "report this with the output of ktft doctor --json" in said and "pip install" not in said
    assert f"ktft merge BASE {saved} OUT writes to OUT" in said
    assert list(model.peft_config) == ["default"]


def test_an_adapter_of_another_model(
    tiny_checkpoint: Checkpoint, model: torch.nn.Module, saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapted(tiny_checkpoint("qwen3moe"), target_modules=["experts"]).save_pretrained(tmp_path / "qwen")
    with pytest.raises(ValueError, match=r"was trained on a model of type qwen3_moe, this one is deepseek_v3"):
        model.load_adapter(tmp_path / "qwen", "other")
    edit_json(saved / "adapter_config.json", base_model_name_or_path="org/another")
    with caplog.at_level("WARNING", "ktft"):
        model.load_adapter(saved, "moved")
    assert "trained on org/another" in caplog.text
    model.delete_adapter("moved")


def test_a_save_is_compared_bit_by_bit(model: torch.nn.Module, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, write = contents(saved), files.write_safetensors

    def failing_disk(path: Path, *args: Any) -> None:
        write(path, *args)
        flip(path)

    monkeypatch.setattr(files, "write_safetensors", failing_disk)
    with pytest.raises(ValueError, match=r"q_b_proj\.lora_B|\w+ was read back otherwise"):
        model.save_pretrained(saved)
    assert contents(saved) == before


def test_nan_is_not_saved_over_a_good_adapter(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = adapted(tiny_checkpoint("qwen3moe"))
    model.save_pretrained(tmp_path)
    before = contents(tmp_path)
    name, parameter = next((n, p) for n, p in model.named_parameters() if ".experts.lora_B" in n)
    parameter.data[5, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"experts\.5\.\w+\.lora_B\.weight holds NaN or Inf; use an earlier"):
        model.save_pretrained(tmp_path)
    assert contents(tmp_path) == before, name


@pytest.mark.parametrize("early", [True, False])
def test_a_full_disk_leaves_the_earlier_adapter(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: bool
) -> None:
    """A Trainer that saves at its end notices it before writing or in the middle of it."""
    args = arguments(tmp_path, max_steps=1, save_strategy="no")
    trainer = transformers.Trainer(adapted(tiny_checkpoint("qwen3moe")), args, train_dataset=DATA)
    trainer.save_model()
    (tmp_path / ".saving-killed").mkdir()
    before = contents(tmp_path)
    trainer.train()
    report = ("ktft_report.", "expert_routing.")
    before |= {name: text for name, text in contents(tmp_path).items() if name.startswith(report)}
    with monkeypatch.context() as patch:
        if early:
            patch.setattr(files.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2**40, 2**40, 1000))
        else:
            patch.setattr(checkpoint_files.os, "pwrite", full_disk)
        with pytest.raises(OSError, match=r"untouched") as caught:
            trainer.save_model()
    assert caught.value.errno == errno.ENOSPC
    assert str(tmp_path) in str(caught.value)
    assert contents(tmp_path) == before
    assert not list(tmp_path.glob(".saving-*"))
    trainer.save_model()
    assert contents(tmp_path)["adapter_model.safetensors"] != before["adapter_model.safetensors"]


def test_the_card_says_what_was_trained_and_how_to_load_it(model: torch.nn.Module, saved: Path) -> None:
    text = (saved / "README.md").read_text()
    experts = 2 * 8 * 3 * 4 * (64 + 32)  # layers, experts, projections, r, in + out
    assert f"| routed experts | {experts:,} |" in text
    assert "| default (r = 4, alpha = 8) | parameters |" in text
    assert f"Base model: `{model.config.name_or_path}` (deepseek_v3)" in text
    assert f"no\n> module for {2 * 8 * 3 * 2} of this adapter's tensors" in text
    assert "ktft export THIS_DIRECTORY --to peft OUT" in text
    assert "[More Information Needed]" not in text
    (saved / "README.md").write_text(text.replace("# LoRA adapter", "# My adapter\nmy words") + "\nmine at the end\n")
    model.save_pretrained(saved)
    again = (saved / "README.md").read_text()
    assert "# My adapter\nmy words" in again
    assert "mine at the end" in again
    assert again.count("## What was trained") == again.count("### Framework versions") == 1


def test_the_card_promises_no_more_than_is_true(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """gpt-oss had no module for each expert in transformers 4; without LoRA on experts no warning is needed."""
    adapted(tiny_checkpoint("gpt_oss")).save_pretrained(tmp_path / "gpt_oss")
    adapted(tiny_checkpoint("qwen3moe"), target_modules=["o_proj"]).save_pretrained(tmp_path / "attention")
    stacked, plain = ((tmp_path / name / "README.md").read_text() for name in ("gpt_oss", "attention"))
    assert "transformers 4.57" not in stacked
    assert "do not load this directory with PEFT" in stacked
    assert "do not load" not in plain
    assert 'In PEFT: `PeftModel.from_pretrained(model, "THIS_DIRECTORY")`' in plain


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("out/adaptr", "no such directory from here"),  # two parts, the first of them a folder here
        ("./adapter", "no such directory from here"),
        ("adapter", "no such directory from here"),
        ("nobody/adapter", "the Hugging Face Hub cannot be asked: HF_HUB_OFFLINE is set"),
    ],
)
def test_a_mistyped_path_is_not_looked_up_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    asked: list[str] = []
    if "nobody" not in name:
        monkeypatch.setattr(files, "snapshot_download", lambda name, **_: asked.append(name))
    (tmp_path / "out" / "adapter").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=words) as caught:
        files.local_directory(name)
    assert "repo id" not in str(caught.value).lower()
    assert asked == []
    assert ("there is 'out/adapter'" in str(caught.value)) == (name == "out/adaptr")

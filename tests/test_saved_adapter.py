"""Every command that reads a saved adapter: what it was trained on top of, and what tells that it is damaged."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import distance, load, lora_config, randomize
from commands import refused, run
from given import Checkpoint
from merging import logits, write_adapter
from safetensors import safe_open

import ktft
from ktft.adapters.below import REPORT
from ktft.adapters.several import stand_on

FILE = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def plain(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter on everything; it stands on nothing."""
    return write_adapter(base, tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def chain(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, torch.Tensor]:
    """Two adapters, one that was trained on top of both, and the logits of all together."""
    folder = tmp_path_factory.mktemp("chain")
    one = write_adapter(base, folder / "one", target_modules=["experts"])
    two = write_adapter(base, folder / "two", target_modules=["v_proj", "down_proj"])
    model: Any = ktft.get_peft_model(load(base), lora_config(target_modules=["up_proj", "o_proj"]))
    randomize(model)
    stand_on(model, [one, two])
    model.save_pretrained(folder / "top")
    return one, two, folder / "top", logits(model.eval())


def test_merge_on_top_of_others(base: Path, chain: tuple[Path, Path, Path, torch.Tensor], tmp_path: Path) -> None:
    """Refused on the bare base model; the commands that the error names make the model that was trained."""
    one, two, top, expected = chain
    said = refused("merge", base, top, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.merging").exists()
    assert f"{top} was trained on top of {one}, {two}, and {base} does not hold them: it has no {REPORT}" in said
    commands = said.split("Merge them first: ")[1].strip().replace("; then ", ", ").split(", ")
    places = {f"OUT{number}": str(tmp_path / f"merged{number}") for number in ("", 1, 2)}
    for command in commands:
        name, *arguments = shlex.split(command)
        assert name == "ktft" and arguments[0] == "merge"
        status, said = run(*(places.get(each, each) for each in arguments), "--format", "bf16", "--threads", "1")
        assert status == 0, said
        assert "alone its effect is another" not in said
    assert distance(logits(load(tmp_path / "merged")), expected) < 0.1, "three roundings to bf16"
    assert distance(logits(load(tmp_path / "merged2")), expected) > 0.5
    report = json.loads((tmp_path / "merged" / REPORT).read_text())
    assert len(report["adapters"]) == 3

    said = refused("merge", tmp_path / "merged1", top, tmp_path / "out")
    assert f"merged1 does not hold these: {tmp_path / 'merged1' / REPORT} tells of others" in said
    assert f"ktft merge BASE {one} OUT1" in said
    (tmp_path / "merged2" / REPORT).write_text("{}")
    said = refused("merge", tmp_path / "merged2", top, tmp_path / "out")
    assert f"{REPORT} is not what ktft merge writes" in said


def test_export_and_verify_on_top_of_others(
    base: Path, chain: tuple[Path, Path, Path, torch.Tensor], tmp_path: Path
) -> None:
    one, two, top, _ = chain
    export, verify = ("export", top, tmp_path / "out", "--to", "peft"), ("--adapter", top, "--layers-only")
    said = refused(*export)
    assert not (tmp_path / "out").exists()
    assert f"Merge them first: ktft merge {base} {one} OUT1, ktft merge OUT1 {two} OUT2" in said
    assert f"; then ktft export {top} OUT --to ... --base OUT2" in said
    status, said = run("verify", base, *verify)
    assert status == 0 and f"note: {top} was trained on top of {one}, {two}, which {base} does not hold" in said

    for below, source, target in ((one, base, "merged1"), (two, tmp_path / "merged1", "merged2")):
        status, said = run("merge", source, below, tmp_path / target, "--no-check", "--threads", "1")
        assert status == 0, said
    merged = tmp_path / "merged2"
    status, said = run(*export, "--base", merged / "config.json")
    assert status == 0 and f'from_pretrained("{merged}")' in said
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(merged)
    status, said = run("verify", merged, *verify)
    assert status == 0 and "trained on top of" not in said


@pytest.mark.parametrize("part", ["layers.1.mlp.experts.3.up_proj.lora_B", "layers.0.self_attn.o_proj.lora_A"])
def test_a_flipped_byte_is_refused_by_every_command(base: Path, plain: Path, tmp_path: Path, part: str) -> None:
    """The lowest bits of one value: names, shapes and sizes are as they were, and nothing is NaN."""
    name = f"base_model.model.model.{part}.weight"
    damaged = shutil.copytree(plain, tmp_path / "adapter")
    content = bytearray((plain / FILE).read_bytes())
    length = int.from_bytes(content[:8], "little")
    begin, _ = json.loads(content[8 : 8 + length])[name]["data_offsets"]
    content[8 + length + begin] ^= 1
    (damaged / FILE).write_bytes(content)
    with safe_open(damaged / FILE, "pt") as file, safe_open(plain / FILE, "pt") as before:
        assert (file.get_tensor(name) != before.get_tensor(name)).sum() == 1
    for command in (
        ("merge", base, damaged, tmp_path / "out", "--no-check"),
        ("export", damaged, tmp_path / "out", "--to", "vllm"),
        ("export", damaged, tmp_path / "out", "--to", "peft"),
        ("verify", base, "--adapter", damaged, "--layers-only", "--layers", "0"),
    ):
        said = refused(*command)
        assert f"{name} is damaged, its CRC-32 is " in said and "use another copy" in said
        assert not (tmp_path / "out" / FILE).exists() and not (tmp_path / "out" / "config.json").exists()


def test_options_without_a_place(base: Path, plain: Path, tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """And another type of model: each command says so, before it reads a value."""
    adapter, out = shutil.copytree(plain, tmp_path / "adapter"), tmp_path / "out"
    config = json.loads((plain / "adapter_config.json").read_text())

    def each_refuses(model: Path, message: str, **changes: Any) -> None:
        (adapter / "adapter_config.json").write_text(json.dumps(config | changes))
        for command in (
            ("merge", model, adapter, out),
            ("export", adapter, out, "--to", "peft", "--base", model),
            ("verify", model, "--adapter", adapter),
        ):
            assert message in refused(*command)

    each_refuses(base, "biases trained beside LoRA (bias) cannot be merged, exported or verified", bias="all")
    each_refuses(base, "use_dora", use_dora=True)
    each_refuses(base, "has LoRA on model.embed_tokens, which is Embedding", target_modules=["experts", "embed_tokens"])
    each_refuses(tiny_checkpoint("dsv3"), "was trained on a model of type qwen3_moe, this one is deepseek_v3")
    assert not out.exists()

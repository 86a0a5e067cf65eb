"""`ktft convert` gives the experts of the source, even after interruptions, and refuses what it cannot convert."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import adapted
import commands
import pytest
import torch
from damage import edit_json, flip
from dying import deaths, forked
from given import Checkpoint, RunCli, TrainYaml
from holding import held_by_another
from merging import contents, logits
from quantize import is_expert, quantize, read_all
from safetensors.torch import load_file, save_file
from tiny import write_checkpoint
from torch import Tensor

from ktft.checkpoint import identity
from ktft.checkpoint.cache import MANIFEST, UNFINISHED, layer_file
from ktft.checkpoint.files import TEMPORARY, to_json
from ktft.checkpoint.quantization_error import REPORT
from ktft.checkpoint.reader import INDEX_NAME, CheckpointReader
from ktft.config import PROJECTIONS
from ktft.model.experts import find_experts

LAYER = layer_file(1)


def convert(*arguments: str | Path) -> tuple[int, str]:
    return commands.run("convert", *arguments, "--threads", "1")


def converted(source: Path, target: Path, *options: str) -> Path:
    status, output = convert(source, target, *options)
    assert status == 0, output
    return target


def refused(*arguments: str | Path) -> str:
    return commands.refused("convert", *arguments, "--threads", "1")


def load(path: Path, nodes: int = 1, expert_format: str | None = None, **settings: Any) -> Any:
    return adapted.load(path, expert_format=expert_format, threads=2, numa_nodes=nodes, **settings)


@pytest.fixture(autouse=True)
def any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow splits over NUMA nodes and two threads on any machine."""
    monkeypatch.setenv("KTFT_EMULATE_CPUS", "1")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose experts divide into up to three slices, the last one short."""
    path = tmp_path_factory.mktemp("source")
    return write_checkpoint("dsv3", path, moe_intermediate_size=288, n_routed_experts=4, n_group=2, topk_group=1)


@pytest.fixture(scope="module")
def packed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`source` in k4. Copy it before changing it."""
    return converted(source, tmp_path_factory.mktemp("packed") / "k4", "--format", "k4", "--report")


# --- the same model ---------------------------------------------------------------------------------------------------


def test_loads_as_the_source_does(source: Path, packed: Path, tmp_path: Path) -> None:
    for nodes in (1, 2, 3):
        again = converted(source, tmp_path / f"nodes{nodes}", "--format", "k4", "--numa-nodes", str(nodes), "--report")
        assert contents(again) == contents(packed)
        expected = logits(load(source, nodes, expert_format="k4"))
        assert torch.equal(logits(load(packed, nodes)), expected)
        assert torch.equal(logits(load(source, nodes, expert_checkpoint=str(packed))), expected)
    assert not torch.equal(logits(load(source)), expected), "k4 is the converted checkpoint's, not the default"
    assert not [name for name in read_all(packed) if ".experts." in name]


@pytest.mark.parametrize(("scheme", "expert_format"), [("fp8", "fp8"), ("fp8", "k4"), ("int4-32", "int4")])
def test_quantized_sources(source: Path, tmp_path: Path, scheme: str, expert_format: str) -> None:
    quantized = quantize(source, tmp_path, scheme)[0]
    target = converted(quantized, tmp_path / "target", "--format", expert_format, "--report")
    assert torch.equal(logits(load(target)), logits(load(quantized, expert_format=expert_format)))
    errors = json.loads((target / REPORT).read_text())["layers"]["1"]["up_proj"]
    kept = errors["relative_rms"] < 0.002  # fp8's product of code and scale is a bf16
    assert kept == (expert_format != "k4")
    assert "all checksums match" in convert(quantized, target, "--check")[1]


@pytest.mark.parametrize(("scheme", "expert_format"), [(None, "k4"), ("mxfp4", "mxfp4"), ("mxfp4", "k4")])
def test_biases_are_converted_too(
    tiny_checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scheme: str | None,
    expert_format: str,
) -> None:
    monkeypatch.setattr(identity, "SAMPLE_BYTES", 16)  # else a bias of so small a checkpoint may lie within a sample
    origin = tiny_checkpoint("gpt_oss")
    if scheme is not None:
        origin = quantize(origin, tmp_path, scheme, is_expert)[0]
    target = converted(origin, tmp_path / "target", "--format", expert_format, "--report")
    expected, found = load(origin, expert_format=expert_format), load(target, nodes=2)
    one_node = load(target)
    assert torch.equal(logits(one_node), logits(expected))
    torch.testing.assert_close(logits(found), logits(expected))
    for name, module in find_experts(expected).items():
        for expert, projection in product(range(8), PROJECTIONS):
            bias = module.layer.bias(expert, projection)
            assert bias.any()
            for other in (one_node, found):
                assert torch.equal(find_experts(other)[name].layer.bias(expert, projection), bias)
    assert not [name for name in read_all(target) if ".experts." in name]
    assert load_file(target / LAYER)["7.up_proj.bias"].dtype == torch.float32
    assert "all checksums match" in convert(origin, target, "--check")[1]

    changed = shutil.copytree(origin, tmp_path / "changed")
    flip_in(changed, "model.layers.1.mlp.experts.gate_up_proj_bias")
    assert f"{changed}: layer 1 changed since the conversion" in refused(changed, target, "--check")


def test_every_other_file_is_copied(source: Path, packed: Path) -> None:
    weights = {file.name for file in source.glob("*.safetensors")} | {INDEX_NAME}
    for file in source.iterdir():
        if file.name not in weights:
            assert (packed / file.name).read_bytes() == file.read_bytes()


def test_llamafactory_trains_it(
    tiny_checkpoint: Checkpoint, train_yaml: TrainYaml, fork_cli: RunCli, tmp_path: Path
) -> None:
    target = converted(tiny_checkpoint("qwen3moe"), tmp_path / "int4", "--format", "int4")
    config = train_yaml("qwen3moe", model_name_or_path=str(target), kt_config={"threads": 1}, max_steps=1)
    assert "3 layers x 8, int4" in fork_cli(["llamafactory-cli", "train"], config).stdout
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert any(bool(tensor.any()) for name, tensor in adapter.items() if ".mlp.experts." in name and "lora_B" in name)


def test_report(source: Path, packed: Path, tmp_path: Path) -> None:
    report = json.loads((packed / REPORT).read_text())
    weights = read_all(source)
    for number, (name, module) in zip((1, 2), find_experts(load(packed)).items(), strict=True):
        for projection in PROJECTIONS:
            squares = []
            for expert in range(4):
                weight = weights[f"{name}.{expert}.{projection}.weight"].double()
                error = module.layer.dequantize(expert, projection).double() - weight
                squares.append((float(error.square().sum()), float(weight.square().sum())))
            relative = [(e / s) ** 0.5 for e, s in squares]
            found = report["layers"][str(number)][projection]
            total = (sum(e for e, _ in squares) / sum(s for _, s in squares)) ** 0.5
            assert found["relative_rms"] == pytest.approx(total, rel=1e-5)
            assert found["worst_relative_rms"] == pytest.approx(max(relative), rel=1e-5)
            assert found["worst_expert"] == relative.index(max(relative))
            assert 0.06 < total < 0.09
    later = converted(source, tmp_path / "later", "--format", "k4")
    assert not (later / REPORT).exists()
    _, output = convert(source, later, "--report")
    assert contents(later) == contents(packed)
    assert f"{100 * report['layers']['2']['up_proj']['relative_rms']:.3f}" in output


# --- interruptions ----------------------------------------------------------------------------------------------------


def test_killed_at_any_change_it_goes_on_to_the_same_bytes(source: Path, packed: Path, tmp_path: Path) -> None:
    expected, target = contents(packed), tmp_path / "target"
    finished, half_written = [], 0

    def work() -> None:
        converted(source, target, "--format", "k4", "--report")

    for number in deaths(target, target.mkdir, work):
        left = contents(target)
        finished.append(MANIFEST in left)
        half_written += any(name.endswith(TEMPORARY) for name in left)
        assert all(left[name] == expected[name] for name in left.keys() & expected.keys() if name != REPORT)
        if number % 12 == 0:
            work()
            assert contents(target) == expected, number
    assert half_written > 0
    assert finished == sorted(finished) and sum(finished) < 8, "the manifest comes last"


def test_finished_files_are_not_written_again(source: Path, packed: Path, tmp_path: Path) -> None:
    target = shutil.copytree(packed, tmp_path / "target")
    (target / MANIFEST).unlink()
    (target / UNFINISHED).write_bytes(to_json(json.loads((packed / MANIFEST).read_text()) | {"files": {}}))
    (target / layer_file(2)).unlink()
    (target / f"stray{TEMPORARY}").touch()
    before = (target / LAYER).stat().st_mtime_ns
    with pytest.raises(ValueError, match="conversion that has not finished; run the same ktft convert SRC DST again"):
        load(target)
    converted(source, target)
    assert contents(target) == contents(packed)
    assert (target / LAYER).stat().st_mtime_ns == before


def test_full_disk(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, target, log = tmp_path / "whole", tmp_path / "target", tmp_path / "log"
    expected = contents(converted(source, whole, "--format", "bf16"))
    size, needed = len(expected[LAYER]), len(expected[LAYER]) + len(expected[layer_file(2)])
    assert max(len(content) for name, content in expected.items() if "/" not in name) < size

    def limited() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, size - 1))
        status, output = convert(source, target, "--format", "bf16")
        os.write(1, output.encode())
        return status

    assert forked(limited, log) == 2
    assert f"{needed:,} bytes are still to be written" in log.read_text()
    assert "What is finished is kept: make room, then run the same command again" in log.read_text()
    kept = contents(target)
    assert not [name for name in kept if name.startswith("experts/") or name.endswith(TEMPORARY)]
    assert all(expected[name] == content for name, content in kept.items() if name != UNFINISHED)

    free = shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: free)
        assert f"{needed:,} bytes are still to be written, 1,000 are free there" in refused(source, target)
    assert contents(converted(source, target)) == expected


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_commands_that_are_refused(source: Path, packed: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").touch()
    other = shutil.copytree(source, tmp_path / "other")
    change_shard(other, lambda tensor: tensor + 1)
    assert "is not empty (thesis.txt)" in refused(source, foreign)
    assert "lie within each other" in refused(source, source)
    assert "lie within each other" in refused(source, source / "inside")
    assert "thesis.txt is not a directory; give one" in refused(source, foreign / "thesis.txt")
    assert "is a conversion itself (ktft.json is in it)" in refused(packed, tmp_path / "new")
    assert "is not a directory with a config.json" in refused(tmp_path, tmp_path / "new")
    said = refused(source, packed, "--format", "bf16")
    assert "has expert_format k4, asked for is bf16; give another directory" in said
    assert "supported: bf16, int8" in refused(source, tmp_path / "new", "--format", "k5")
    assert "was made from another source" in refused(other, packed)
    assert "holds no finished conversion" in refused(source, tmp_path / "new", "--check")
    assert not (tmp_path / "new").exists()
    with held_by_another(packed) as other:
        assert f"{packed} is in use by process {other.pid}" in refused(source, packed)
        assert convert(source, packed, "--check")[0] == 0  # which writes nothing, and works on a read-only disk


def change_shard(folder: Path, change: Callable[[Tensor], Tensor]) -> Path:
    """Change the tensors of the first shard. Returns its path."""
    path = sorted(folder.glob("*.safetensors"))[0]
    tensors = {name: change(tensor) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return path


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped byte": (lambda d: flip(d / LAYER), f"{LAYER}: tensor 3.down_proj.packed is damaged, its CRC-32"),
    "layers swapped": (lambda d: shutil.copy(d / layer_file(2), d / LAYER), f"{LAYER} has header_sha256"),
    "missing layer": (lambda d: (d / LAYER).unlink(), f"{LAYER} is missing; run the same ktft convert"),
    "truncated": (lambda d: os.truncate(d / LAYER, 1000), f"{LAYER} has 1000 bytes, ktft.json says"),
    "missing shard": (lambda d: next(d.glob("model-*")).unlink(), "model-00001-of-00001.safetensors"),
    "not JSON": (lambda d: (d / MANIFEST).write_text("{"), "ktft.json is not valid JSON"),
    "no such key": (lambda d: (d / MANIFEST).write_text("{}"), "has format_version None, this ktft knows 1"),
    "newer": (lambda d: edit_json(d / MANIFEST, format_version=2), "has format_version 2, this ktft knows 1"),
    "other layout": (lambda d: edit_json(d / MANIFEST, layout_version=0), "has layout_version 0, this ktft knows 1"),
    "layer dropped": (
        lambda d: edit_json(d / MANIFEST, layers={"1": json.loads((d / MANIFEST).read_text())["layers"]["1"]}),
        f"files and layers disagree about {layer_file(2)}",
    ),
    "experts of config.json": (lambda d: edit_json(d / "config.json", n_routed_experts=8), "layer 1 is ExpertShape("),
    "layers of config.json": (
        lambda d: edit_json(d / "config.json", first_k_dense_replace=2),
        "has experts of 2 layers, the model of 1: it has layer 1",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged(packed: Path, tmp_path: Path, damage: str) -> None:
    target = shutil.copytree(packed, tmp_path / "target")
    change, message = DAMAGES[damage]
    change(target)
    with pytest.raises((ValueError, OSError)) as error:
        load(target)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_stale_and_foreign(source: Path, packed: Path, tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    stale = shutil.copytree(source, tmp_path / "stale")
    shard = change_shard(stale, lambda tensor: tensor * 1.01)
    with pytest.raises(ValueError, match=f"shard {shard.name} has .*; convert it again, or take the whole model from"):
        load(stale, expert_checkpoint=str(packed))
    with pytest.raises(ValueError, match="ktft.json is of model_type 'deepseek_v3', config.json of 'qwen3_moe'"):
        load(tiny_checkpoint("qwen3moe"), expert_checkpoint=str(packed))
    with pytest.raises(ValueError, match="holds experts in k4, but expert_format is int8; leave expert_format out"):
        load(packed, expert_format="int8")
    flipped = shutil.copytree(packed, tmp_path / "flipped")
    flip(flipped / LAYER)
    assert load(flipped, verify_checksums=False) is not None


def test_config_may_be_edited(packed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = shutil.copytree(packed, tmp_path / "target")
    load(target)
    assert "was edited" not in caplog.text
    edit_json(target / "config.json", max_position_embeddings=1024)
    load(target)
    assert f"{target / 'config.json'} was edited since the conversion" in caplog.text


def test_check_reads_everything_again(source: Path, packed: Path, tmp_path: Path) -> None:
    status, output = convert(source, packed, "--check")
    assert (status, output.splitlines()[-1]) == (0, f"{packed}: all checksums match")
    target, changed = shutil.copytree(packed, tmp_path / "target"), shutil.copytree(source, tmp_path / "changed")
    flip(target / LAYER)
    (target / layer_file(2)).unlink()
    output = refused(source, target, "--check")
    assert f"{LAYER}: tensor 3.down_proj.packed is damaged: CRC-32" in output
    assert f"{layer_file(2)} is missing, or not of this conversion" in output
    assert "2 problems. Delete damaged files" in output
    (target / LAYER).unlink()
    converted(source, target)
    assert contents(target) == contents(packed)

    # between two samples: only a whole reading can tell
    for name in ("1.mlp.experts.2.up_proj", "0.self_attn.o_proj"):
        flip_in(changed, f"model.layers.{name}.weight")
    output = refused(changed, packed, "--check")
    assert f"{changed}: layer 1 changed since the conversion" in output
    assert f"{changed}: model.layers.0.self_attn.o_proj.weight changed since the conversion" in output


def flip_in(folder: Path, name: str) -> None:
    """Flip a bit in the middle of a tensor."""
    entry = CheckpointReader.from_directory(folder).tensors[name]
    flip(entry.file, entry.offset + entry.nbytes // 2)

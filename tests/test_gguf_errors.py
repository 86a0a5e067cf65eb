"""GGUF files that are damaged, of another model or not there: one message each, before anything is loaded."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapted import load
from given import Checkpoint
from transformers import AutoConfig

from ktft.checkpoint.families import FAMILIES
from ktft.checkpoint.gguf_source import GgufReader, gguf_plan
from ktft.config import Settings
from ktft.kt_keys import parse_kt_config
from ktft.model.shape import shape_of

gguf = pytest.importorskip("gguf")
from ggufs import write_gguf  # noqa: E402

from ktft.checkpoint.gguf_format import read_gguf_header  # noqa: E402

GATE, DOWN = "blk.1.ffn_gate_exps.weight", "blk.1.ffn_down_exps.weight"
Tensors = dict[str, Any]


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good file for `base`. Copy it before changing it."""
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    write_gguf(base, path, "qwen3moe", "Q8_0")
    return path


def refused(base: Path, place: Path) -> str:
    with pytest.raises(ValueError) as caught:
        load(base, expert_checkpoint=str(place))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def drop(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


def put(name: str, array: np.ndarray, kind: Any = None) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: (array, kind)})


def spoil(tensors: Tensors) -> None:
    tensors[DOWN][0][2, 5, :2] = np.float16([np.nan]).view(np.uint8)


@pytest.mark.parametrize(
    ("fields", "change", "message"),
    [
        ({"expert_count": 16}, None, "qwen3moe.expert_count is 16, the model's config has 8 (experts a layer); give"),
        ({"embedding_length": 128}, None, "qwen3moe.embedding_length is 128, the model's config has 64 (hidden size)"),
        (
            {"expert_feed_forward_length": 64},
            None,
            "qwen3moe.expert_feed_forward_length is 64, the model's config has 32 (intermediate size of an expert)",
        ),
        ({"block_count": 5}, None, "qwen3moe.block_count is 5, the model's config has 3 layers"),
        ({"block_count": 5, "nextn_predict_layers": 1}, None, "qwen3moe.block_count is 5"),
        ({}, drop(GATE), f"lacks expert tensors: {GATE};"),
        ({}, put("blk.7.ffn_up_exps.weight", np.zeros((8, 32, 64), np.float32)), "has no place for: blk.7.ffn_up_exps"),
        ({}, put("blk.1.ffn_up_exps.scale", np.ones(8, np.float32)), "has no place for: blk.1.ffn_up_exps.scale"),
        ({}, put("blk.1.ffn_up_exps.bias", np.ones((8, 32), np.float32)), "no place for: blk.1.ffn_up_exps.bias"),
        (
            {"expert_count": None, "embedding_length": None},
            put(GATE, np.zeros((8, 32, 96), np.float32)),
            f"{GATE} has shape (8, 32, 96), the model's config needs (8, 32, 64)",
        ),
        ({}, put(GATE, np.zeros((4, 32, 64), np.float32)), f"{GATE} has shape (4, 32, 64), the model's config needs"),
        ({}, put(GATE, np.zeros((8, 32, 64), np.float64)), f"{GATE} is F64; with gguf "),
        ({}, spoil, f"{DOWN}: "),
    ],
)
def test_another_model_or_other_tensors(
    base: Path, tmp_path: Path, fields: dict[str, Any], change: Any, message: str
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(base, path, "qwen3moe", "Q8_0", fields=fields, change=change)
    said = refused(base, path)
    assert message in said and str(path) in said


def test_another_architecture(base: Path, tiny_checkpoint: Checkpoint, tmp_path: Path, whole: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(tiny_checkpoint("dsv3"), path, "deepseek2", "Q8_0")
    expected = "general.architecture is 'deepseek2', that of the model (Qwen3-MoE) is 'qwen3moe'; give a GGUF file of"
    assert expected in refused(base, path)
    derived = replace(FAMILIES["qwen3_moe"], architecture=None)
    with pytest.raises(
        ValueError, match="does not know llama.cpp's name of the family Qwen3-MoE.*take the model's saf"
    ):
        gguf_plan(GgufReader(whole), derived, {}, 3)


# --- damaged files ----------------------------------------------------------------------------------------------------


def test_truncated_files(base: Path, whole: Path, tmp_path: Path) -> None:
    content, path = whole.read_bytes(), tmp_path / "model.gguf"
    path.write_bytes(content[:-100])
    said = refused(base, path)
    assert f"{path} is truncated: tensor blk." in said and f"ends at byte {len(content)}, the file at" in said
    header = read_gguf_header(whole).nbytes
    for size in (0, 3, 4, 20, 100, header // 2, header - 60):
        path.write_bytes(content[:size])
        assert f"{path} is no whole GGUF file" in refused(base, path)


def test_files_that_are_something_else(base: Path, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(next(base.glob("*.safetensors")).read_bytes())
    assert f"{path} is no whole GGUF file that ktft reads: GGUF magic invalid" in refused(base, path)
    gguf.GGUFWriter(path, "qwen3moe", endianess=gguf.GGUFEndian.BIG)
    writer = gguf.GGUFWriter(path, "qwen3moe", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor(GATE, np.zeros((8, 32, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "its numbers are in big-endian order" in refused(base, path)


def place_of(content: bytes, name: str, then: int) -> int:
    """Where `then` bytes after a tensor's name and its three dimensions lie."""
    return content.index(name.encode()) + len(name) + 4 + 3 * 8 + then


def test_headers_that_contradict_themselves(base: Path, whole: Path, tmp_path: Path) -> None:
    path, content = tmp_path / "model.gguf", bytearray(whole.read_bytes())
    at = place_of(content, GATE, 0)
    path.write_bytes(content[:at] + (99).to_bytes(4, "little") + content[at + 4 :])
    assert f"{GATE} is type 99; with gguf " in refused(base, path)
    at = place_of(content, GATE, 4)
    path.write_bytes(content[:at] + bytes(8) + content[at + 8 :])
    assert "begins at byte" in (said := refused(base, path)) and "overlaps" in said
    at = content.index(GATE.encode()) + len(GATE) + 4
    path.write_bytes(content[:at] + (65).to_bytes(8, "little") + content[at + 8 :])
    assert f"tensor {GATE}, Q8_0 of shape (8, 32, 65), has rows that are not whole blocks" in refused(base, path)
    twice = content.replace(b"blk.2.ffn_gate_exps", b"blk.1.ffn_gate_exps")
    path.write_bytes(twice)
    assert f"{GATE} is there twice" in refused(base, path)


def test_no_damage_of_a_header_is_anything_but_an_error(base: Path, whole: Path, tmp_path: Path) -> None:
    layers = shape_of(AutoConfig.from_pretrained(base))[0].moe
    path, content = tmp_path / "model.gguf", whole.read_bytes()
    size, chance = read_gguf_header(whole).nbytes, random.Random(3)
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(chance.choice((1, 1, 4))):
            damaged[chance.randrange(size)] = chance.choice((0, 1, 8, 9, 255, chance.randrange(256)))
        path.write_bytes(damaged)
        with contextlib.suppress(ValueError):
            gguf_plan(GgufReader(path), FAMILIES["qwen3_moe"], layers, 3)


def test_a_file_that_changes_while_it_is_read(base: Path, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole.read_bytes())
    with GgufReader(path) as reader:
        path.write_bytes(whole.read_bytes()[:-5000])
        with pytest.raises(ValueError, match=r"ended while tensor blk\.2\.\S+ was read; the file has changed"):
            for name in reader.tensors:
                reader.read(name)


# --- files that are not there, or too many ----------------------------------------------------------------------------


def test_parts(base: Path, whole: Path, tmp_path: Path) -> None:
    write_gguf(base, tmp_path / "model.gguf", "qwen3moe", "Q8_0", split=4)
    first, second, third = sorted(tmp_path.glob("*.gguf"))
    second.rename(tmp_path / "kept")
    said = refused(base, third)
    assert f"{third} is one of 3 parts, and {second} is missing; download it too" in said
    second.write_bytes(first.read_bytes())
    assert f"{second} is part 1 of 3 by its header, and part 2 of 3 by its name" in refused(base, tmp_path)
    alone = tmp_path / "alone.gguf"
    first.rename(alone)
    assert f"{alone} is part 1 of 3 by its header, and part 1 of 1 by its name; give all parts" in refused(base, alone)
    (tmp_path / "kept").rename(second)
    alone.rename(first)
    content, key = first.read_bytes(), b"split.tensors.count"
    at = content.index(key) + len(key) + 4
    first.write_bytes(content[:at] + (99).to_bytes(4, "little") + content[at + 4 :])
    assert "with its 2 other parts holds 10 tensors, its header says 99" in refused(base, first)


def test_names(base: Path, whole: Path, tmp_path: Path) -> None:
    text = tmp_path / "model.bin"
    text.touch()
    for key, place, message in (
        ("expert_checkpoint", tmp_path / "nowhere.gguf", "which is not a directory or a .gguf file; give"),
        ("kt_weight_path", tmp_path / "nowhere", "which is not a directory or a .gguf file; give"),
        ("kt_expert_checkpoint_path", text, "is a file; give a directory with safetensors files, or a .gguf file"),
        ("expert_checkpoint", tmp_path, "holds no .safetensors and no .gguf file"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            parse_kt_config({key: str(place)})
        assert str(place) in str(caught.value)
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).write_bytes(whole.read_bytes())
    assert "holds 2 GGUF models (one.gguf, two.gguf); give the path of one file" in refused(base, tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert "holds both .safetensors and .gguf files; give the .gguf file's own path" in refused(base, tmp_path)
    assert Settings(expert_checkpoint=str(tmp_path / "one.gguf"))


def test_without_the_package(base: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert refused(base, whole) == "reading GGUF needs the package gguf: pip install 'ktft[gguf]'"
    with pytest.raises(ValueError, match="kt_config.expert_checkpoint: reading GGUF needs the package gguf"):
        parse_kt_config({"expert_checkpoint": str(whole)})

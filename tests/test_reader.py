"""The safetensors reader: what it reads, and what it says about damaged checkpoints."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from given import Checkpoint
from safetensors.torch import load_file, save_file

from ktft.checkpoint.reader import INDEX_NAME, SINGLE_NAME, CheckpointReader

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
import fuzz_reader


def write(path: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> Path:
    """A safetensors file with this header, valid or not."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def entry(begin: int = 0, end: int = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_reads_what_safetensors_wrote(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {f"w{n}": torch.randn(n, 2 * n).to(dtype) for n in (3, 1, 5, 0)}
    save_file(tensors, tmp_path / SINGLE_NAME)
    with CheckpointReader.from_directory(tmp_path) as reader:
        seen = {name: reader.read(name) for name in tensors}
        slices = [reader.read("w3", i) for i in range(3)]
    assert seen.keys() == tensors.keys()
    assert all(torch.equal(seen[name], tensor) and seen[name].dtype == dtype for name, tensor in tensors.items())
    assert all(torch.equal(row, tensors["w3"][i]) for i, row in enumerate(slices))
    with pytest.raises(IndexError, match=r"tensor w3 has shape \(3, 6\), so no slice 3"):
        reader.read("w3", 3)


def test_reads_shards(tiny_checkpoint: Checkpoint) -> None:
    path = tiny_checkpoint("dsv3")
    stored = {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}
    with CheckpointReader.from_directory(path) as reader:
        assert reader.tensors.keys() == stored.keys()
        assert len({entry.file for entry in reader.tensors.values()}) == 2
        assert all(torch.equal(reader.read(name), tensor) for name, tensor in stored.items())


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"w": entry()}, b"1234567", "is truncated: tensor w ends at byte 77, the file at 76"),
        ({"w": entry()}, b"123456789", "is 78 bytes long, but its tensors end at byte 77"),
        ({"a": entry(), "b": entry(4, 12)}, b"x" * 12, "tensor b begins at byte"),
        ({"a": entry(), "b": entry(9, 17)}, b"x" * 17, "and leaves a gap after a"),
        ({"w": entry(0, 8, (3,))}, b"x" * 8, "tensor w, F32 of shape [3], needs 12 bytes but has 8 in the file"),
        ({"w": entry(dtype="F33")}, b"x" * 8, "tensor w has the unknown dtype 'F33'"),
        ({"w": entry(dtype=["F32"])}, b"x" * 8, "tensor w has the unknown dtype ['F32']"),
        ({"w": entry(shape=(-2,))}, b"x" * 8, "tensor w has the invalid shape [-2]"),
        ({"w": entry(8, 0)}, b"x" * 8, "tensor w has the invalid data_offsets [8, 0]"),
        ({"w": {"dtype": "F32"}}, b"", "tensor w has no dtype, shape and data_offsets"),
        (b"{not json", b"", "has no valid safetensors header"),
        (b"[]", b"", "has no valid safetensors header"),
        (b"[" * 100_000, b"", "has no valid safetensors header"),
        (b'{"w": {}, "w": {}}', b"", "w appears twice"),
        ({"w": entry(0, 0, [2**62, 4, 0])}, b"", "tensor w has the invalid shape [4611686018427387904, 4, 0]"),
        ({"w": entry(0, 1, [3], "F4")}, b"x", "tensor w, F4 of shape [3], does not end at a whole byte"),
        ({"\0": entry()}, b"x" * 8, r"'\x00' is no name of a tensor"),
        (b'{"\\ud800": {}}', b"", r"'\ud800' is no name of a tensor"),
        ({"__metadata__": [1]}, b"", "__metadata__ of its header does not map names to texts"),
        ({"__metadata__": {"format": 1}}, b"", "__metadata__ of its header does not map names to texts"),
    ],
)
def test_bad_files(tmp_path: Path, header: dict[str, Any] | bytes, data: bytes, message: str) -> None:
    path = write(tmp_path / SINGLE_NAME, header, data)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{re.escape(message)}"):
        CheckpointReader([path])


def test_header_longer_than_the_file(tmp_path: Path) -> None:
    path = tmp_path / SINGLE_NAME
    for content in (b"", b"\x00\x01", (10**6).to_bytes(8, "little") + b"{}", b"\xff" * 64):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not a whole safetensors file"):
            CheckpointReader([path])


def test_dtype_that_experts_cannot_have(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4, dtype=torch.bool)}, tmp_path / SINGLE_NAME)
    reader = CheckpointReader.from_directory(tmp_path)
    with pytest.raises(ValueError, match="tensor w is BOOL; ktft reads BF16, F16, F32"):
        reader.read("w")


def test_shards_and_index_must_agree(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint("dsv3"), path)
    shards = sorted(path.glob("*.safetensors"))
    original = json.loads((path / INDEX_NAME).read_text())

    def fails(weight_map: dict[str, str], message: str) -> None:
        (path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match=re.escape(message)):
            CheckpointReader(shards)

    weight_map = original["weight_map"]
    fails(weight_map | {"extra": shards[0].name}, f"lists extra in {shards[0].name}, which does not hold it")
    fails(weight_map | {"lm_head.weight": shards[1].name}, f"but it is in {shards[0].name}")
    fails({k: v for k, v in weight_map.items() if k != "lm_head.weight"}, "holds lm_head.weight, which")
    for index in ("[]", "[" * 100_000, '{"weight_map": {"w": "../other.safetensors"}}', '{"weight_map": {"w": 1}}'):
        (path / INDEX_NAME).write_text(index)
        with pytest.raises(ValueError, match="is not a valid index"):
            CheckpointReader.from_directory(path)

    (path / INDEX_NAME).unlink()
    shutil.copy(shards[0], path / "copy.safetensors")
    with pytest.raises(ValueError, match="is in two shards"):
        CheckpointReader([*shards, path / "copy.safetensors"])
    with pytest.raises(FileNotFoundError, match=r"holds neither model\.safetensors nor"):
        CheckpointReader.from_directory(path)


def test_config_that_is_none(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint("dsv3"), tmp_path / "checkpoint")
    for content, message in (("{", "is not valid JSON"), ("[]", "is not a configuration")):
        (tmp_path / "checkpoint" / "config.json").write_text(content)
        with pytest.raises(ValueError, match=rf"config\.json {message}"):
            _ = CheckpointReader.from_directory(tmp_path / "checkpoint").scheme


def test_damaged_checkpoints(tmp_path: Path) -> None:
    """A slice of tests/scripts/fuzz_reader.py: refused by name, or loaded unchanged."""
    counts, failures = fuzz_reader.run(150, 1, tmp_path)
    assert not failures
    assert sum(count for (_, outcome), count in counts.items() if outcome == "refused") > 50
    assert sum(count for (_, outcome), count in counts.items() if outcome.startswith("loaded")) > 5

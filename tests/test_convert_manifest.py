"""Damaged manifests of converted checkpoints are refused with their path and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ktft.checkpoint.cache import FORMAT_VERSION, LAYOUT_VERSION, MANIFEST, PackedCache

VALID: dict[str, Any] = {
    "expert_format": "k4",
    "model_type": "deepseek_v3",
    "source": {},
    "layers": {},
    "files": {},
    "config_sha256": "",
    "format_version": FORMAT_VERSION,
    "layout_version": LAYOUT_VERSION,
}


def test_valid_manifest(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps(VALID))
    assert PackedCache(tmp_path).manifest.expert_format == "k4"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("files", {"x": {}}),
        ("files", []),
        ("files", {"../../etc/hostname": {"bytes": 1, "header_sha256": ""}}),
        ("files", {"/etc/hostname": {"bytes": 1, "header_sha256": ""}}),
        ("layers", {"first": {}}),
        ("layers", {"1": {"num_experts": "4", "hidden_size": 64, "intermediate_size": 288, "biases": False}}),
        ("layers", {"1": {"num_experts": 4}}),
        ("layers", None),
        ("expert_format", None),
        ("expert_format", ["k4"]),
        ("source", {"model.safetensors": 1}),
        ("model_type", 3),
    ],
)
def test_damaged_manifest_names_the_field(tmp_path: Path, field: str, value: Any) -> None:
    content = VALID | {field: value}
    (tmp_path / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"^{tmp_path}/{MANIFEST}: {field} is .*; convert the original"):
        PackedCache(tmp_path)


@pytest.mark.parametrize("content", [b"[]", b"[" * 100_000, b"\xff", b"", b'"ktft"'])
def test_files_that_are_no_manifest_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(ValueError, match=f"^{tmp_path}/{MANIFEST} is not .*; convert the original"):
        PackedCache(tmp_path)

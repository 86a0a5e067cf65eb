"""`ktft plan` in the test's own process, for models from their configuration alone or for a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import invoke

CONFIGS = Path(__file__).parent / "data"
DEEPSEEK, GLM_AIR, QWEN_30B = (CONFIGS / name for name in ("deepseek-v3", "glm-4.5-air", "qwen3-30b-a3b"))


def plan(*args: object, code: int = 0) -> dict[str, Any]:
    done = invoke("plan", *args, "--json")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def by_format(told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["format"]: row for row in told["formats"]}


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Path]:
    """`recipe(text)`, or `recipe(**settings)`: a YAML file with these settings, of one sample a batch."""

    def write(text: str | None = None, **settings: Any) -> Path:
        path = tmp_path / "train.yaml"
        path.write_text(json.dumps({"per_device_train_batch_size": 1} | settings) if text is None else text)
        return path

    return write

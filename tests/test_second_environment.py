"""Adapters of ktft in transformers 4.57 with PEFT 0.18, where experts are modules: the script, as a test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
from second_environment import FAMILIES, LIMIT, compare, make_environment

pytestmark = pytest.mark.full  # it downloads and installs another transformers


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("environment")
    try:
        make_environment(directory)
    except subprocess.SubprocessError as error:
        pytest.skip(f"pip cannot install transformers 4.57 here: {getattr(error, 'stderr', error)}")
    return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_peft_gives_the_same_logits(family: str, environment: Path, tmp_path: Path) -> None:
    figures = compare(family, environment, tmp_path)
    assert figures["kernels"] < LIMIT
    assert figures["reference"] < LIMIT / 100
    assert figures["effect"] > 100 * LIMIT

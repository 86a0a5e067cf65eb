"""How settings reach the server's processes, and the plugin that does nothing without them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ktft.cli.serve import named_adapters
from ktft.config import SERVE_ENV
from ktft.serve.engine import Findings, Options
from ktft.serve.engines import VLLM
from ktft.serve.runtime.progress import Progress, StatusFile, read_progress
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.vllm.command import arguments, cpu_environment


def test_settings_survive_the_environment(tmp_path: Path) -> None:
    given = {"expert_format": "int8", "threads": 3, "gpu_expert_memory": "8G", "activation_bits": 8, "deferral": 2}
    settings = ServeSettings(str(tmp_path), adapters=(("tuned", str(tmp_path)),), max_adapters=3, **given)
    assert ServeSettings.from_env(settings.to_env()) == settings
    assert settings.gpu_expert_memory == 8 << 30
    assert settings.experts.expert_format == "int8" and settings.experts.threads == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"checkpoint": "nowhere"}, "checkpoint is 'nowhere', which is not a directory"),
        ({"adapters": [["a", "nowhere"]]}, "adapter is 'nowhere', which is not a directory"),
        ({"adapters": [["a", "."], ["a", "/"]]}, "2 models are called 'a'"),
        ({"served_name": "a", "adapters": [["a", "."]]}, "2 models are called 'a', so that no request could tell them"),
        ({"adapters": [["a", "."], ["b", "."]], "max_adapters": 1}, "2 adapters, --max-adapters is 1; give 2"),
        ({"max_adapters": 0}, "max_adapters is 0; give a whole number, 1 or more"),
        ({"routing": "nowhere"}, "routing is 'nowhere', which is not a file"),
        ({"expert_checkpoint": "nowhere"}, "expert_checkpoint is 'nowhere', which is not a directory"),
        ({"expert_format": "int3"}, "expert_format is 'int3'; supported: bf16, int8"),
        ({"threads": 0}, "threads is 0; give a whole number"),
        ({"activation_bits": 4}, "activation_bits is 4; supported: 16 and 8"),
        ({"max_lora_rank": 257}, "max_lora_rank is 257; give a whole number from 1 to 256"),
        ({"deferral": -1}, "deferral is -1; give a whole number of experts"),
        ({"gpu_expert_memory": "lots"}, "gpu_expert_memory is 'lots'; give a size"),
        ({"thread": 2}, "unknown key 'KTFT_SERVE.thread'; the nearest valid key is 'threads'"),
    ],
)
def test_bad_settings(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    text = json.dumps({"checkpoint": str(tmp_path)} | given)
    with pytest.raises(ValueError, match=re.escape(message)):
        ServeSettings.from_env({SERVE_ENV: text})


def test_names_of_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a=b").mkdir()
    given = ["x/tuned", "mine=/y/tuned", "a=b"]
    assert named_adapters(given) == (
        ("tuned", str(tmp_path / "x/tuned")),
        ("mine", "/y/tuned"),
        ("a=b", str(tmp_path / "a=b")),
    )
    assert named_adapters(["x/tuned"], "other") == (("other", str(tmp_path / "x/tuned")),)
    for several in ([], given):
        with pytest.raises(ValueError, match=f"other, and there are {len(several)} adapters; give --adapter NAME=DIR"):
            named_adapters(several, "other")


def test_an_adapter_has_no_name_of_a_part_of_messages(tmp_path: Path) -> None:
    """vLLM would compute the base's requests that have such a part by the adapter."""
    settings = ServeSettings(str(tmp_path), adapters=(("image", str(tmp_path)),))
    with pytest.raises(ValueError, match="cannot be called 'image'"):
        arguments(settings, Options(), Findings(VLLM, "qwen3_moe", False, 512, 1 << 20))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "KTFT_SERVE is not set; start the server with ktft serve"),
        ("{", "KTFT_SERVE is not JSON"),
        ("[1]", "it must be a JSON object with at least checkpoint"),
    ],
)
def test_damaged_environment(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServeSettings.from_env({SERVE_ENV: text})


def test_vllm_gets_the_threads_of_ktft(tmp_path: Path) -> None:
    environment = cpu_environment(ServeSettings(str(tmp_path), threads=3))
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_status_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    assert read_progress(path) is None
    status = StatusFile(str(path))
    status.write(Progress("packing", 1, 10))
    status.advance(Progress("packing", 2, 10))  # too soon after the last one
    assert read_progress(path) == Progress("packing", 1, 10)
    status.advance(Progress("packing", 10, 10))
    assert read_progress(path) == Progress("packing", 10, 10)
    assert [each.name for each in tmp_path.iterdir()] == ["status.json"]
    StatusFile(None).write(Progress("nobody reads it"))


def test_the_plugin_is_cheap_and_silent_where_ktft_does_not_serve() -> None:
    """vLLM calls it in every process of every server, even where ktft serves nothing."""
    code = (
        "import sys; from ktft.serve.vllm.plugin import register; register();"
        "print([name for name in ('torch', 'vllm', 'transformers') if name in sys.modules])"
    )
    environment = {"PATH": "/usr/bin"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_vllm_finds_the_plugin() -> None:
    from importlib.metadata import entry_points

    (point,) = [each for each in entry_points(group="vllm.general_plugins") if each.name == "ktft"]
    assert point.value == "ktft.serve.vllm.plugin:register"
    assert callable(point.load())

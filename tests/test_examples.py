"""The example YAML and the Trainer script."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from given import Checkpoint, RunCli

from ktft.config import SETTINGS
from ktft.kt_keys import parse_kt_config

ROOT = Path(__file__).resolve().parents[1]
YAML = ROOT / "examples" / "yaml" / "kt_deepseek_lora.yaml"


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    """A data folder with the demo's two data sets, of a few records."""
    records = [{"instruction": "Add.", "input": f"{n} + {n}", "output": f"The sum is {2 * n}."} for n in range(16)]
    (tmp_path / "functions.json").write_text(json.dumps(records))
    info = {name: {"file_name": "functions.json"} for name in ("functions", "functions_heldout")}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    return tmp_path


def test_yaml_explains_every_key_of_kt_config() -> None:
    text = YAML.read_text()
    config = yaml.safe_load(text)
    assert set(config["kt_config"]) == set(SETTINGS)
    assert parse_kt_config(config["kt_config"])[1] == [], "no key of the example is without effect"
    for key in SETTINGS:
        assert re.search(rf"^  {key}: \S+ +# \S", text, re.MULTILINE), f"{key} has no comment"


def test_yaml_marks_two_lines_and_names_the_demos_folders() -> None:
    marked = re.findall(r"^(\w+):.*# \(\d\)", YAML.read_text(), re.MULTILINE)
    assert marked == ["model_name_or_path", "template"]
    config = yaml.safe_load(YAML.read_text())
    folders = {key: config[key] for key in ("model_name_or_path", "dataset_dir", "output_dir")}
    assert folders == {
        "model_name_or_path": "build/demo/model",
        "dataset_dir": "build/demo/data",
        "output_dir": "build/demo/lora",
    }


def test_yaml_trains_another_deepseek_by_its_two_lines(
    tiny_checkpoint: Checkpoint, functions: Path, tmp_path: Path, fork_cli: RunCli
) -> None:
    changed = [f"model_name_or_path={tiny_checkpoint('dsv2')}", "template=default"]
    short = [f"dataset_dir={functions}", f"output_dir={tmp_path / 'out'}", "max_steps=2", "logging_steps=1"]
    fork_cli(["llamafactory-cli", "train", str(YAML), *changed, *short])
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "out" / "training_loss.png").is_file()
    assert "eval_loss" in json.loads((tmp_path / "out" / "eval_results.json").read_text())


def test_trainer_api(tiny_checkpoint: Checkpoint, functions: Path, tmp_path: Path, fork_cli: RunCli) -> None:
    command = [str(ROOT / "examples" / "trainer_api.py"), "--steps", "2"]
    command += ["--model", str(tiny_checkpoint("dsv3")), "--data", str(functions), "--out", str(tmp_path / "adapter")]
    done = fork_cli(command)
    assert "before step 1" in done.stdout and "reloaded from" in done.stdout
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_the_guides_snippet_as_it_stands(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On texts of unequal length, and what it names as "later" too."""
    guide = (ROOT / "docs/guide/first-training.md").read_text().partition("## Without LLaMA-Factory")[2]
    snippet = guide.partition("```python\n")[2].partition("```")[0]
    later = re.search(r"# later: (.*)$", snippet, re.MULTILINE)
    assert later is not None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    names = {"path": str(tiny_checkpoint("dsv3")), "texts": ["a text", "a longer text of more words", "short"]}
    exec(snippet, names)
    again = "AutoModelForCausalLM.from_pretrained(path, quantization_config=ktft.KtftConfig())"
    exec(f"base_model = {again}\nagain = {later[1]}", names)
    assert any("experts.lora_B" in name and p.any() for name, p in names["again"].named_parameters())  # type: ignore[attr-defined]

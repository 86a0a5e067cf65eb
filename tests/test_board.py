"""LLaMA Board, LLaMA-Factory's page, with ktft's keys in its box of extra arguments. No browser is needed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from given import Checkpoint, RunCli
from llamafactory.hparams import get_train_args

from ktft.train.llamafactory import settings_of

# gradio takes seconds to import, so only the tests that make the page do
pytestmark = pytest.mark.skipif(importlib.util.find_spec("gradio") is None, reason="LLaMA Board needs gradio")

Page = Callable[..., tuple[Any, dict[Any, Any]]]


@pytest.fixture
def page(tiny_checkpoint: Checkpoint, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Page:
    """`page(kt_config)` -> the page's engine, and all inputs of its Train tab: its own values and what a user typed."""
    monkeypatch.chdir(tmp_path)  # the page writes where it was started
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    import gradio
    from llamafactory.webui import components, engine

    def fill(kt_config: dict[str, Any]) -> tuple[Any, dict[Any, Any]]:
        made = engine.Engine()
        with gradio.Blocks():
            made.manager.add_elems("top", components.create_top())
            made.manager.add_elems("train", components.create_train_tab(made))
        extra = {"use_kt": True, "kt_config": kt_config, "use_cpu": True, "max_steps": 2}
        extra["preprocessing_num_workers"] = 1
        typed = {
            "top.lang": "en",
            "top.model_name": "Custom",
            "top.model_path": str(tiny_checkpoint("qwen3moe")),
            "train.dataset_dir": str(data_dir),
            "train.dataset": ["sft"],
            "train.cutoff_len": 64,
            "train.gradient_accumulation_steps": 1,
            "train.learning_rate": "1e-3",
            "train.logging_steps": 1,
            "train.output_dir": "first",
            "train.extra_args": json.dumps(extra),
        }
        shown = {each: getattr(each, "value", None) for each in made.manager.get_elem_list()}
        return made, shown | {made.manager.get_elem_by_id(name): value for name, value in typed.items()}

    return fill


def test_start_trains_the_experts_and_shows_what_ktft_says(
    page: Page, fork_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llamafactory.webui import runner

    class Forked:
        """`subprocess.Popen`, as far as the page uses it."""

        def __init__(self, command: list[str], env: dict[str, str], **_: Any) -> None:
            self.done, self.returncode = fork_cli(command, env=env), None

        def communicate(self, timeout: float) -> tuple[None, str]:
            if self.returncode is None:  # the page reads the log only while the run goes on
                self.returncode = self.done.returncode
                raise subprocess.TimeoutExpired("train", timeout)
            return None, self.done.stdout

    monkeypatch.setattr(runner, "Popen", Forked)
    monkeypatch.setattr(runner, "is_accelerator_available", lambda: True)  # or gradio warns that there is none
    engine, inputs = page({"expert_format": "int8", "threads": 1})
    *_, last = engine.runner.run_train(inputs)
    shown = last[engine.manager.get_elem_by_id("train.output_box")]
    assert shown.startswith("Finished.")
    assert "before step 1\nrouted experts: 3 layers x 8, int8" in shown
    report = json.loads(Path("saves/Custom/lora/first/ktft_report.json").read_text())
    assert report["guards"]["experts_updated"] > 10


def test_bash_runs_the_previewed_command(page: Page) -> None:
    """LLaMA Board does not quote the JSON of `kt_config`."""
    kt_config = {"expert_format": "k4", "threads": 1, "gpu_expert_memory": None, "verify_checksums": False}
    engine, inputs = page(kt_config)
    (*_, shown) = engine.runner.preview_train(inputs)
    command = shown[engine.manager.get_elem_by_id("train.output_box")].removeprefix("```bash\n").removesuffix("\n```")
    assert json.dumps(kt_config) in command
    script = "llamafactory-cli() { printf '%s\\0' \"$@\"; }\n" + command
    printed = subprocess.run(["bash", "-c", script], stdout=subprocess.PIPE, text=True, check=True).stdout
    train, *words, _ = printed.split("\0")
    assert train == "train"
    settings = settings_of(get_train_args(words)[0])
    assert (settings.expert_format, settings.threads, settings.verify_checksums) == ("k4", 1, False)

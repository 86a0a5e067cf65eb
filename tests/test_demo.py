"""The demo, in its quick form, and what its stages promise one by one."""

from __future__ import annotations

import ast
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forked import Forks

ROOT = Path(__file__).resolve().parents[1]
STAGES = ["data", "tokenizer", "model", "lora", "reloaded", "answers"]


def run_demo(forks: Forks, out: Path) -> str:
    """Output of the quick demo; a failure of it fails the test."""
    command = [str(ROOT / "examples" / "demo" / "run.py"), "--quick", "--out", str(out)]
    done = forks.run(command, os.environ | {"COLUMNS": "200"})
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def demo(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished quick demo."""
    out = tmp_path_factory.mktemp("demo")
    run_demo(forks, out)
    return out


@pytest.fixture
def summary(demo: Path) -> dict[str, Any]:
    """What the quick demo found."""
    return json.loads((demo / "summary.json").read_text(encoding="utf-8"))


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the demo's modules importable."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "demo"))


def test_summary(demo: Path, summary: dict[str, Any]) -> None:
    assert list(summary["seconds"]) == list(summary["stages"]) == STAGES
    assert summary["failures"] == []
    assert all(math.isfinite(loss) for loss in summary["heldout_loss"].values())
    assert math.isfinite(summary["stages"]["model"]["loss"])
    assert Path(summary["loss_curve"]).read_bytes().startswith(b"\x89PNG")
    assert Path(summary["report"]).is_file()
    assert [set(sample) for sample in summary["samples"]] == [{"input", "reference", "before", "after"}] * 3


def test_reload_reproduces_the_loss_and_lora_changed_it(summary: dict[str, Any]) -> None:
    loss = summary["heldout_loss"]
    assert abs(loss["after_reload"] - loss["after_training"]) <= 1e-3
    assert loss["before"] - loss["after_reload"] > 2e-3, "too small a change for the reload to prove anything"


def test_checkpoint_is_what_deepseek_publishes(demo: Path) -> None:
    from safetensors import safe_open

    config = json.loads((demo / "model" / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3"
    with safe_open(demo / "model" / "model.safetensors", framework="pt") as tensors:
        names = set(tensors.keys())
        assert tensors.get_slice("model.layers.1.mlp.experts.7.down_proj.weight").get_dtype() == "BF16"
        bias = tensors.get_tensor("model.layers.1.mlp.gate.e_score_correction_bias")
    assert bias.dtype.itemsize == 4 and bias.abs().max() > 0, "the router's bias is fp32, and pretraining balanced it"
    assert not any("gate_up_proj" in name for name in names)


def test_finished_stages_are_not_run_again(forks: Forks, demo: Path) -> None:
    record = demo / "records" / "answers.json"
    before = {path.name: path.stat().st_mtime_ns for path in (demo / "records").iterdir()}
    record.unlink()  # as after a kill in the last stage
    output = run_demo(forks, demo)
    assert output.count("done before") == len(STAGES) - 1
    after = {path.name: path.stat().st_mtime_ns for path in (demo / "records").iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"answers.json"}
    # What a reader sees last: how much better the answers are, and then what to do.
    order = ["Result", "right answers", "held-out loss", "Next", "ktft plan", "ktft serve"]
    assert sorted(order, key=output.rindex) == order


def test_a_model_that_learned_too_little_is_pretrained_anew(
    demo: Path, modules: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that was busy during pretraining, and is not the next time."""
    import run as demo_run

    shutil.copytree(demo, tmp_path, dirs_exist_ok=True)

    def stages_of(out: Path, scale: Any) -> Any:
        stages = demo_run.Stages(out, scale)
        for name in STAGES:
            stages.figures[name] = json.loads((out / "records" / f"{name}.json").read_text())["figures"]
        return stages

    monkeypatch.setattr(demo_run, "run_stages", stages_of)
    monkeypatch.setattr(demo_run, "QUICK", replace(demo_run.QUICK, required_gain=2.0))
    with pytest.raises(SystemExit, match=r"had time for \d+ of 20 steps: on a busy machine run the demo again"):
        demo_run.main(tmp_path, quick=True)
    left = {path.stem for path in (tmp_path / "records").iterdir()}
    assert left == {*STAGES} - {"model"}


def test_heldout_functions_come_from_other_files(demo: Path, modules: None) -> None:
    import dataset

    train, heldout = (dataset.read(demo / "data", split) for split in ("train", "heldout"))
    assert {record["path"] for record in train}.isdisjoint(record["path"] for record in heldout)
    functions = [record["input"] for record in train + heldout]
    assert len(set(functions)) == len(functions)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("def f(self):\n    self.x = 1", "This method returns nothing."),
        (
            "async def f(x):\n    if x:\n        raise errors.ParseError('no')\n    return x",
            "This function checks a condition, raises ParseError and returns a value.",
        ),
        (
            "def f(cls, n):\n    try:\n        yield from range(n)\n    except OSError:\n        return",
            "This method catches exceptions and yields values.",
        ),
        (
            "def f(x):\n    return [a if a else 0 for a in x]",
            "This function checks a condition, loops and returns a value.",
        ),
        ("def f(x):\n    raise x", ""),
        ("def f(x):\n    return lambda: x", ""),
    ],
)
def test_sentence_says_what_the_function_does(modules: None, source: str, sentence: str) -> None:
    import dataset

    [function] = ast.parse(source).body
    assert dataset.describe(function) == sentence


def test_records_hold_code_without_its_docstring(modules: None) -> None:
    import dataset

    code = "def area(width, height):\n    product = width * height\n    return product"
    source = code.replace("\n", '\n    """Return the area.\n\n    More."""\n', 1)
    sentence = "This function returns a value."
    record = {"instruction": dataset.INSTRUCTION, "input": code, "output": sentence}
    assert list(dataset.records("@cached\n" + source)) == [record]
    assert list(dataset.records("def short(): return 1")) == []
    assert list(dataset.records("a template {{ of }} no language")) == []


def test_tokenizer_takes_any_text(demo: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(demo / "model")
    text = "def f(x):\n    return 'żółć 漢字 🙂'\x00"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, 2)


def test_chat_template_is_llamafactorys(demo: Path) -> None:
    from llamafactory.data.template import TEMPLATES
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(demo / "model")
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    prompt, answer = TEMPLATES["deepseek3"].encode_oneturn(tokenizer, messages)
    ours = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer(ours, add_special_tokens=False)["input_ids"] == prompt + answer
    assert answer[-1] == tokenizer.eos_token_id


def test_learning_rate_warms_up_and_ends_low(modules: None) -> None:
    from pretrain import learning_rate
    from scale import Recipe

    recipe = Recipe(learning_rate=1.0, warmup=0.1)
    rates = [learning_rate(step / 100, recipe) for step in range(101)]
    assert rates[0] < 0.05 and max(rates) > 0.9 and rates[-1] == pytest.approx(0.05)
    assert rates.index(max(rates)) == 10

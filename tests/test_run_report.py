"""The training report: every figure against the truth, resumed runs, runs that end badly, and the page."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
import transformers
from given import Checkpoint
from plots import with_plots
from torch import Tensor
from transformers import TrainerCallback

import ktft
from ktft.checkpoint.routing_profile import Routing, find_routing
from ktft.lanes.record import Record
from ktft.model.experts import find_experts
from ktft.spans import PARALLEL, Sum
from ktft.train import run_report
from ktft.train.run_report import JSON_NAME, MAX_ROWS, PAGE_NAME, RunReport, Series
from ktft.train.run_times import BUSY, LOGGED, TIMES

Whole = tuple[transformers.Trainer, list[Tensor]]


def trainer(base: Path, output: Path, lora: dict[str, Any] | None = None, **overrides: Any) -> transformers.Trainer:
    settings = {"max_steps": 6, "max_grad_norm": 0.1, "logging_steps": 1} | overrides
    return runs.trainer(base, output, cls=ktft.Trainer, lora={"lora_dropout": 0.0} | (lora or {}), **settings)


def choices(model: torch.nn.Module) -> list[Tensor]:
    """`[experts]` for each layer, filled by hand with what the routers choose in training from now on."""
    counts = []
    for module in find_experts(model).values():
        count = torch.zeros(module.num_experts, dtype=torch.int64)
        counts.append(count)

        def look(module: Any, args: Any, kwargs: Any, count: Tensor = count) -> None:
            if module.training:
                for expert in args[1].flatten().tolist():
                    count[expert] += 1

        module.register_forward_pre_hook(look, with_kwargs=True)
    return counts


def read(directory: Path | str) -> dict[str, Any]:
    return json.loads(Path(directory, JSON_NAME).read_text())


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Checkpoint) -> Path:
    return tiny_checkpoint("dsv3")


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A run of six steps with checkpoints 3 and 6 and evaluations, saved; and the routers' choices, counted by hand."""
    run = trainer(base, tmp_path_factory.mktemp("whole"), eval_strategy="steps", eval_steps=2)
    counts = choices(run.model)
    with with_plots():
        run.train()
        run.save_model()
    return run, counts


def test_every_field_is_true(base: Path, whole: Whole) -> None:
    run, counts = whole
    output = Path(run.args.output_dir)
    report = read(output)
    assert (report["layout"], report["ended"], report["resumed"]) == (2, "finished", [])
    assert report["expert_tokens"] == {"layers": [1, 2], "tokens": [count.tolist() for count in counts]}
    for directory in (output, output / "checkpoint-6"):
        path = find_routing(None, base, directory)
        assert path == directory / "expert_routing.json"
        assert Routing.load(path).tokens == {1: counts[0].tolist(), 2: counts[1].tolist()}

    history = [entry for entry in run.state.log_history if "loss" in entry]
    logged, steps = report["logged"], report["steps"]
    for name in ("step", "loss", "learning_rate", "grad_norm"):
        assert logged[name] == [entry[name] for entry in history], name
    groups = [name for name in logged if name.startswith("grad_norm of ")]
    assert groups == [f"grad_norm of {group}" for group in ("attention", "shared experts", "routed experts", "other")]
    for norms in zip(logged["grad_norm"], *(logged[name] for name in groups), strict=True):
        assert norms[0] == pytest.approx(math.hypot(*norms[1:]), rel=1e-5)
    assert max(logged["grad_norm"]) > 0.1  # so it was clipped

    assert steps["step"] == [1, 2, 3, 4, 5, 6]
    assert steps["tokens"] == [32] * 6  # 2 batches of 1 x 16
    for row in range(6):
        parts = {name: steps[name][row] for name in TIMES}
        ran = {name for name, part in parts.items() if part > 0}
        assert ran == {"attention", "cpu", "wait", "optimizer", "data", "other"}, parts
        assert steps["seconds"][row] == pytest.approx(sum(parts.values()), abs=2e-5)
        assert [steps[name][row] for name in BUSY] == [parts[name] for name in PARALLEL]  # nothing runs beside on a CPU
        assert 1e6 < steps["ram_free_bytes"][row] < report["machine"]["memory_bytes"]
        assert 1e8 < steps["rss_bytes"][row] < 1e11
    assert steps["gpu_bytes"] == steps["gpu_free_bytes"] == [None] * 6
    check_spans(report, tokens=6 * 32)

    file = (output / "adapter_model.safetensors").read_bytes()
    assert report["adapter"]["file"] == {
        "name": "adapter_model.safetensors",
        "bytes": len(file),
        "sha256": hashlib.sha256(file).hexdigest(),
    }
    trainable = {group["name"]: group["trainable"] for group in report["adapter"]["groups"]}
    assert trainable["routed experts"] == 2 * 8 * 3 * 2 * 96
    assert sum(trainable.values()) == sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    experts = next(iter(find_experts(run.model).values())).layer
    assert report["experts"] == {
        "layers": 2,
        "experts": 8,
        "format": "int8",
        "packed_bytes": 2 * experts.packed_bytes,
        "isa": experts.runtime.isa,
        "threads": 1,
        "numa_nodes": 1,
    }
    assert report["model"] == {"name": str(base), "model_type": "deepseek_v3", "family": "DeepSeek-V3"}
    assert report["versions"]["torch"] == torch.__version__
    assert report["training"]["gradient_accumulation_steps"] == 2
    assert report["adapter"]["lora"]["default"].items() >= {"r": 2, "lora_alpha": 8, "lora_dropout": 0.0}.items()
    assert report["data"] == {"samples": 8, "eval_samples": 2}
    measured = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
    assert report["evaluated"].items() >= {"step": [2, 4, 6], "eval_loss": measured}.items()
    assert f"loss {measured[0]:.4g} → " in (output / PAGE_NAME).read_text()
    assert report["machine"]["memory_bytes"] > 1 << 28 and report["machine"]["gpus"] == []
    guards = report["guards"]
    assert guards["groups"]["routed experts"]["update_step"] == 1
    assert guards["groups"]["routed experts"]["late_update_step"] == 2
    assert guards["experts_updated"] == sum(int((count > 0).sum()) for count in counts)
    assert (guards["steps_checked"], guards["closed_step"], guards["failure"]) == (6, 6, None)


def check_spans(report: dict[str, Any], tokens: int) -> None:
    """Of a run without a GPU, on dsv3, whose layer 0 has no experts."""
    found, steps = report["spans"], report["steps"]
    assert {name: columns["layers"] for name, columns in found.items()} == {
        "attention": [0, 1, 2],
        "cpu": [1, 2],
        "wait": [1, 2],
        "optimizer": [None],
        "data": [None],
    }
    for name, columns in found.items():
        assert sum(columns["waited"]) == pytest.approx(sum(steps[name]), abs=1e-4), name
        assert all(seconds > 0 for seconds in columns["seconds"])
        assert columns["expected"] == [0] * len(columns["layers"])
    passes = 6 * 2  # steps, forward and backward; a step's two batches go through the experts together
    assert found["attention"]["count"] == [2 * passes] * 3 and found["cpu"]["count"] == [passes] * 2
    experts = report["experts"]
    assert found["cpu"]["flops"] == [2 * tokens * 2 * 3 * 2 * 64 * 32] * 2  # passes, top_k, products of rows
    whole = experts["packed_bytes"] // 2
    for moved in found["cpu"]["bytes"]:  # at least one expert, at most all, in each pass
        assert whole / 8 <= moved / passes <= whole and moved % (whole // 8) == 0
    rates, busy = report["rates"], sum(found["cpu"]["seconds"])
    assert set(rates) == {"attention", "cpu"}
    assert rates["cpu"]["seconds"] == pytest.approx(busy, abs=1e-5)
    assert rates["cpu"]["share"] == pytest.approx(busy / sum(steps["seconds"]), abs=1e-4)
    assert rates["cpu"]["gb_per_s"] == pytest.approx(sum(found["cpu"]["bytes"]) / busy / 1e9, rel=0.02)
    assert rates["cpu"]["tflops"] == pytest.approx(sum(found["cpu"]["flops"]) / busy / 1e12, rel=0.1)
    assert rates["attention"]["tflops"] is None


class Logged(TrainerCallback):
    """What other callbacks are given."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def test_log_has_times_and_memory(base: Path, tmp_path: Path) -> None:
    callback = Logged()
    run = trainer(base, tmp_path, callbacks=[callback], max_steps=4, logging_steps=2, save_strategy="no")
    run.train()
    steps = read(tmp_path)["steps"]
    for row, logs in enumerate(callback.logs[:2]):
        ours = {key.removeprefix("ktft/"): value for key, value in logs.items() if key.startswith("ktft/")}
        assert ours.keys() >= {"step_s", "cpu_s", "attention_s", "tokens_per_s", "ram_free_gib"} and len(ours) < 8
        assert all(name in LOGGED for name in ours), "what is logged is explained"
        both = slice(2 * row, 2 * row + 2)
        assert ours["step_s"] == pytest.approx(sum(steps["seconds"][both]) / 2, rel=1e-3)
        assert ours["cpu_s"] == pytest.approx(sum(steps["busy_cpu"][both]) / 2, rel=1e-3, abs=1e-6)
        assert ours["tokens_per_s"] == pytest.approx(64 / sum(steps["seconds"][both]), rel=1e-3)
    assert not any(key.startswith("ktft/") for key in callback.logs[2])  # the run's summary
    assert not any(key.startswith("ktft/") for entry in run.state.log_history for key in entry)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_and_evaluation_are_not_counted(
    base: Path, whole: Whole, tmp_path: Path, reentrant: bool
) -> None:
    options = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}, "save_strategy": "no"}
    run = trainer(base, tmp_path, gradient_checkpointing=True, max_steps=2, **options)
    counts = choices(run.model)
    run.train()
    tokens = torch.tensor(read(tmp_path)["expert_tokens"]["tokens"])
    assert (tokens.sum(1) == 2 * 2 * 16 * 2).all()  # steps, batches, tokens, top_k
    assert torch.equal(2 * tokens, torch.stack(counts))  # by hand, forward and its recomputation
    passes = read(tmp_path)["spans"]
    # Steps, batches, forward twice and backward. The batches of a step go through the experts together
    assert passes["cpu"]["count"] == [2 * 3] * 2
    assert passes["attention"]["count"] == [2 * 2 * 3] * 3


def test_layers_beneath_what_trains_are_counted(base: Path, tmp_path: Path) -> None:
    lora = {"target_modules": ["experts"], "layers_to_transform": [2]}
    run = trainer(base, tmp_path, lora, max_steps=2, save_strategy="no")
    counts = choices(run.model)
    run.train()
    assert read(tmp_path)["expert_tokens"]["tokens"] == [count.tolist() for count in counts]


def test_passes_without_gradients_are_not_counted(base: Path, tmp_path: Path) -> None:
    """As those of DPO's reference, which are in training mode."""
    model = trainer(base, tmp_path).model.train()
    modules = find_experts(model).values()
    for module in modules:
        module.record = Record(module.held)
    batch = {name: rows[None] for name, rows in runs.DATA[0].items()}
    with torch.no_grad():
        model(**batch)
    records = [module.record for module in modules]
    assert all(record.rows == 0 and not record.tokens.any() for record in records)
    model(**batch).loss.backward()
    assert all(record.rows == 16 and record.tokens.sum() == 32 for record in records)


def test_resumed_run_reports_all_steps(
    base: Path, whole: Whole, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    straight = read(whole[0].args.output_dir)
    shutil.copytree(Path(whole[0].args.output_dir, "checkpoint-3"), tmp_path / "checkpoint-3")
    (tmp_path / JSON_NAME).write_text("of an earlier run")
    trainer(base, tmp_path).train(resume_from_checkpoint=True)
    report = read(tmp_path)
    assert report["logged"] == straight["logged"]
    assert report["expert_tokens"] == straight["expert_tokens"]
    for key in ("count", "bytes", "flops"):
        assert report["spans"]["cpu"][key] == straight["spans"]["cpu"][key]
    assert report["steps"]["step"] == straight["steps"]["step"]
    assert report["steps"]["seconds"][:3] == straight["steps"]["seconds"][:3]
    origin = {"step": 3, "checkpoint": str(tmp_path / "checkpoint-3")}
    assert report["resumed"] == [{**origin, "from": JSON_NAME}]
    assert "resumed after 3" in (tmp_path / PAGE_NAME).read_text()

    for path in (tmp_path / "checkpoint-3").glob("ktft_*.json"):  # as of a checkpoint of plain transformers
        path.unlink()
    trainer(base, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    report = read(tmp_path)
    assert report["logged"]["loss"] == straight["logged"]["loss"]
    assert report["logged"]["grad_norm of attention"][:3] == [None] * 3
    assert report["steps"]["step"] == [4, 5, 6]
    assert report["resumed"][0]["from"].startswith("trainer_state.json")
    assert f"has no {JSON_NAME} that fits" in caplog.text


class Raise(TrainerCallback):
    """Ends a run from outside."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_run_that_is_stopped_has_a_report(base: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trainer(base, tmp_path, callbacks=[Raise()]).train()
    report = read(tmp_path)
    assert report["ended"].startswith("KeyboardInterrupt")
    assert report["steps"]["step"] == [1, 2]
    assert "Ended by KeyboardInterrupt" in (tmp_path / PAGE_NAME).read_text()


def test_report_that_cannot_be_written_costs_nothing_else(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / JSON_NAME).mkdir()  # where the file has to go
    original = run_report.write_whole

    def full_disk(path: Path, content: bytes) -> None:
        if path.parent.name == "checkpoint-1":
            raise OSError(28, "No space left on device")
        original(path, content)

    monkeypatch.setattr(run_report, "write_whole", full_disk)
    run = trainer(base, tmp_path, max_steps=1, save_steps=1)
    run.train()
    run.save_model()
    warned = [r.message for r in caplog.records if r.levelno == logging.WARNING and "could not be written" in r.message]
    assert len(warned) == 3
    assert "checkpoint-1" in warned[0] and "No space left on device" in warned[0]
    assert all("The adapter and the checkpoints are not affected" in message for message in warned)
    assert not list(tmp_path.rglob("*tmp*"))
    for directory in (tmp_path, tmp_path / "checkpoint-1"):
        assert (directory / "adapter_model.safetensors").stat().st_size > 0


def test_without_matplotlib_there_is_the_json(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else find(name, *a))
    with caplog.at_level(logging.INFO, "ktft"):
        trainer(base, tmp_path, max_steps=1, save_strategy="no").train()
    assert read(tmp_path)["ended"] == "finished"
    assert not (tmp_path / PAGE_NAME).exists()
    assert f"no {tmp_path / PAGE_NAME}: matplotlib is not installed (pip install matplotlib)" in caplog.text


# --- series and page --------------------------------------------------------------------------------------------------


def test_long_series_stay_short_and_true() -> None:
    series, steps = Series(frozenset({"seconds"}), frozenset({"peak"}), frozenset({"free"})), 5 * MAX_ROWS + 3
    for step in range(1, steps + 1):
        series.add(
            {"step": step, "seconds": 0.5, "loss": float(step), "peak": step % 100, "free": 7 + step % 4, "rare": None}
        )
        assert len(series.rows) <= MAX_ROWS
    columns = series.columns()
    assert columns["step"][-1] == steps
    assert sum(columns["seconds"]) == steps / 2
    assert sum(columns["merged"]) == steps
    assert columns["merged"][:-1] == [series.stride] * (len(series.rows) - 1)
    assert columns["loss"][0] == (1 + series.stride) / 2
    assert set(columns["rare"]) == {None} and max(columns["peak"]) == 99 and set(columns["free"][:-1]) == {7}

    resumed = Series(series.sums, series.peaks, series.lows)
    resumed.load(json.loads(json.dumps(columns)))
    for one in (series, resumed):
        one.add({"step": steps + 1, "seconds": 0.5, "loss": 1.0, "peak": 1, "free": 9, "rare": 2.0})
    assert resumed.rows == series.rows


def large_report(report: dict[str, Any]) -> RunReport:
    """As of a long run of a model with 58 layers of 256 experts, with a loss that was NaN for a while."""
    facts = {key: report[key] for key in ("machine", "versions", "model", "experts", "adapter", "training", "started")}
    tokens = torch.randint(0, 10**9, (58, 256))
    tokens[3, 5:20] = 0
    large = RunReport(facts, list(range(3, 61)), tokens, ended="GuardError: <b>\n", guards=report["guards"])
    for step in range(1, MAX_ROWS + 1):
        times = {name: 1 / (3 + i) for i, name in enumerate(TIMES)}
        busy = {name: 1 / (5 + i) for i, name in enumerate(BUSY)}
        row = {"step": step, "seconds": sum(times.values()), **times, **busy, "tokens": 8192}
        row = {name: round(v, 6) if isinstance(v, float) else v for name, v in row.items()}
        large.steps.add({**row, "rss_bytes": 7 * 10**11, "gpu_bytes": 2 * 10**10, "gpu_free_bytes": 4 * 10**9})
        loss = math.nan if 5 < step < 900 else 1 / step
        large.log(step, {"loss": loss, "learning_rate": 1e-4, "grad_norm": 0.1234567891234}, {"other": 1e-3})
    for layer in range(3, 61):
        for name in PARALLEL:
            large.spans.add({(name, layer): Sum(1.2345678, 0.5, 1.0, 5 * 10**12, 7 * 10**15, MAX_ROWS)})
    return large


class Tags(HTMLParser):
    """Tags that are open, and all that were seen."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "use", "path", "image", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()


@pytest.mark.parametrize("size", ["small", "large", "empty"])
def test_page_is_whole_and_self_contained(whole: Whole, tmp_path: Path, size: str) -> None:
    report = large_report(read(whole[0].args.output_dir))
    if size == "empty":  # of a run that was stopped in its first step
        report = RunReport(report.facts, [1], torch.zeros(1, 4, dtype=torch.int64), ended="KeyboardInterrupt: ")
    if size == "small":
        page = Path(whole[0].args.output_dir, PAGE_NAME).read_text()
    else:
        with with_plots():
            assert report.write(tmp_path)
        page = (tmp_path / PAGE_NAME).read_text()
        assert (tmp_path / JSON_NAME).stat().st_size < 2_000_000
        assert "NaN" not in (tmp_path / JSON_NAME).read_text()
    assert len(page) < 1_000_000
    tags = Tags()
    tags.feed(page)
    assert tags.seen.count("svg") == (0 if size == "empty" else 6)
    assert ("<h2>Lanes</h2>" in page) == (size != "empty")
    assert set(tags.open) <= {"html"}
    assert not {"script", "link", "iframe"} & set(tags.seen)
    outside = re.findall(r"""(?:href|src)=["']?(?!#|data:image/png)([^"' >]+)|url\((?!#)([^)]+)""", page)
    assert outside == []
    assert "prefers-color-scheme:dark" in page and "#123457" not in page
    if size == "large":
        assert "&lt;b&gt;" in page and "<b>" not in page

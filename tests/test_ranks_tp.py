"""Tensor parallel attention with experts by rank: the losses, gradients and files of one process, on gloo."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapted import randomize, tensors_of
from rank_program import train
from ranks import TESTS, results, run_jobs, torchrun
from runs import adapted
from tiny import make_config
from tp_gradients import gradients

from ktft.model.experts import find_experts
from ktft.model.meta import meta_model
from ktft.model.tensor_parallel import NEEDS, asked_tp_size, check_versions
from ktft.train.parallel import check_layout
from ktft.versions import is_at_least, version_of

if not all(is_at_least(version_of(name) or "0", lowest) for name, lowest in NEEDS.items()):
    pytest.skip("tensor parallel attention needs the newest stack", allow_module_level=True)

from transformers.distributed import DistributedConfig

FAMILIES = "qwen3moe", "olmoe"  # by outputs and inputs, and with gathered ones
RUN: dict[str, Any] = {"max_steps": 12, "save_steps": 6, "learning_rate": 2e-3}
TP = {"settings": {"distributed": {"tp_size": 2}}}
Checkpoint = Callable[[str], Path]


def train_in_one_and_two(tiny_checkpoint: Checkpoint, out: Path) -> None:
    """One process trains, then two resume from its checkpoint and train the same, then one resumes from theirs."""
    more = {"olmoe": {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}}
    for family in FAMILIES:
        train(str(tiny_checkpoint(family)), str(out / f"one-{family}"), **RUN, **more.get(family, {}))
    base, jobs = str(tiny_checkpoint("qwen3moe")), []
    for family in FAMILIES:
        own = {"base": str(tiny_checkpoint(family)), "output": str(out / f"two-{family}")}
        jobs.append({**own, **RUN, **TP, **more.get(family, {})})
    for name in ("one", "two"):
        point = str(out / f"{name}-qwen3moe/checkpoint-6")
        jobs.append({"base": base, "output": str(out / f"two-from-{name}"), "resume": point, **RUN, **TP})
    for family in ("qwen3moe", "dsv2"):
        start = tiny_checkpoint(family)
        randomize(adapted(start, r=2)).save_pretrained(out / f"adapter-{family}")  # type: ignore[operator]
        own = {"base": str(start), "adapter": str(out / f"adapter-{family}")}
        gradients(**own, output=str(out / f"gradients-one-{family}.pt"))
        jobs.append({**own, "output": str(out / f"gradients-two-{family}.pt"), **TP["settings"]})
    status, said = run_jobs(2, out, *jobs)
    assert status == 0, said[-4000:]
    train(base, str(out / "one-from-two"), resume=str(out / "two-qwen3moe/checkpoint-6"), **RUN)


def test_two_ranks_are_one_process(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """One test, because with several each of pytest's workers would train for it."""
    train_in_one_and_two(tiny_checkpoint, tmp_path)
    for family in FAMILIES:
        losses_and_norms_are_those_of_one_process(family, tmp_path)
    for family in ("qwen3moe", "dsv2"):
        gradients_are_those_of_one_process(family, tmp_path)
    one_standard_adapter_is_saved(tmp_path)
    resuming_with_the_same_layout_is_exact(tmp_path)
    for name in ("one-from-two", "two-from-one"):
        resuming_with_another_layout(name, tmp_path)


def apart(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(found, expected, strict=True))


def losses_and_norms_are_those_of_one_process(family: str, folder: Path) -> None:
    one, two = (results(folder / f"{name}-{family}") for name in ("one", "two"))
    assert len(two["losses"]) == 12 and two["losses"][-1] < two["losses"][0] - 0.2
    assert apart(two["losses"], one["losses"]) < 0.005
    assert apart(two["norms"], one["norms"]) < 0.02 and min(two["norms"]) > 0.9, "it is clipped to 1"
    assert apart([two["eval"]], [one["eval"]]) < 0.005


def gradients_are_those_of_one_process(family: str, folder: Path) -> None:
    """Before anything is averaged: copies have the same bits, and no sum over the group is missing."""
    one, two = (torch.load(folder / f"gradients-{name}-{family}.pt") for name in ("one", "two"))
    assert abs(two["loss"] - one["loss"]) < 1e-4
    assert two["apart"] and set(two["apart"].values()) == {0.0}
    for name, expected in one["gradients"].items():
        found = two["gradients"][name]
        assert (found - expected).norm() < 0.01 * expected.norm(), name  # experts round hidden gradients to bf16


def one_standard_adapter_is_saved(folder: Path) -> None:
    one, two = (tensors_of(folder / f"{name}-qwen3moe") for name in ("one", "two"))
    assert {name: t.shape for name, t in two.items()} == {name: t.shape for name, t in one.items()}
    assert not list(folder.glob("two-qwen3moe/checkpoint-12/model*")), "the model around the adapter is not saved"


def resuming_with_the_same_layout_is_exact(folder: Path) -> None:
    whole, resumed = (folder / name / "checkpoint-12" for name in ("two-qwen3moe", "two-from-two"))
    names = ["adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"]
    names += [f"optimizer-experts-0000{rank}-of-00002.pt" for rank in range(2)]
    for name in names:
        assert (whole / name).read_bytes() == (resumed / name).read_bytes(), name
    assert results(folder / "two-from-two")["losses"] == results(folder / "two-qwen3moe")["losses"]


def resuming_with_another_layout(name: str, folder: Path) -> None:
    assert apart(results(folder / name)["losses"], results(folder / "one-qwen3moe")["losses"]) < 0.005


@pytest.mark.full
def test_replicas_beside_tensor_parallel_ranks(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Four processes, two by two: each pair has a half of a step's batch."""
    base, run = str(tiny_checkpoint("qwen3moe")), {**RUN, "max_steps": 8, "save_steps": 4}
    train(base, str(tmp_path / "one"), per_device_train_batch_size=4, **run)
    four = {"distributed": {"tp_size": 2, "dp_replicate_size": 2}}
    status, said = run_jobs(4, tmp_path, {"base": base, "output": str(tmp_path / "four"), "settings": four, **run})
    assert status == 0, said[-4000:]
    one, found = results(tmp_path / "one"), results(tmp_path / "four")
    assert apart(found["losses"], one["losses"]) < 0.005
    assert apart(found["norms"], one["norms"]) < 0.02
    shutil.rmtree(tmp_path / "one")


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    yield


def asked(family: str, part: tuple[int, int] | None = None, overrides: Any = None, **options: Any) -> int:
    """The size that a model on the meta device is refused with, or accepted with."""
    model = meta_model(make_config(family, **(overrides or {})))
    model.config.distributed_config = DistributedConfig(**options)
    return asked_tp_size(model, part)


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gpt_oss", {"tp_size": 2}, "no tensor parallel plan for the attention of GptOss.*data parallel"),
        ("dsv3", {"tp_size": 2}, "no tensor parallel plan for the attention of DeepseekV3"),
        ("qwen3moe", {"tp_size": 2, "overrides": {"num_key_value_heads": 1}}, "does not divide the 1 num_key_value"),
        ("qwen3moe", {"tp_size": 2, "fsdp_size": 2}, "fsdp_size=2.*dp_replicate_size in its place"),
        ("qwen3moe", {"tp_size": 2, "pp_size": 2}, "pp_size=2"),
        ("qwen3moe", {"tp_size": 2, "ep_size": 2}, "ep_size=2.*shares the experts"),
        ("qwen3moe", {"tp_size": 2, "dp_replicate_size": 2}, "asks for 2 x 2 processes.*and 2 run"),
        ("qwen3moe", {"tp_size": 2, "part": (0, 4)}, "leave part out"),
        ("qwen3moe", {"tp_size": 1, "dp_replicate_size": 2}, "divides nothing"),
        ("qwen3moe", {"tp_size": 2, "tp_plan": {"model.layers.*.mlp.experts": "moe_tp_experts"}}, "shares among"),
    ],
)
def test_refused_before_loading(family: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asked(family, **options)


@pytest.mark.usefixtures("two_ranks")
def test_accepted() -> None:
    assert [asked(family, tp_size=2) for family in ("qwen3moe", "dsv2", "olmoe", "qwen3next", "glm4")] == [2] * 5
    assert asked("olmoe", tp_size=2, overrides={"num_key_value_heads": 1}) == 2, "its heads are not divided"


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktft.model.tensor_parallel.version_of", lambda name: "5.5.4")
    check_versions(1)
    with pytest.raises(ValueError, match=r"needs transformers 5\.23 or later, installed is 5\.5\.4; run: pip install"):
        check_versions(2)


def test_another_layout_in_the_arguments_is_refused(base: Path) -> None:
    model = adapted(base)
    for sizes, message in (({"tp_size": 2}, r"DistributedConfig\(tp_size=2\)"), ({"cp_size": 2}, "cp_size=2")):
        asked_of = SimpleNamespace(**{"tp_size": 1, "cp_size": 1, "sp_size": 1} | sizes)
        with pytest.raises(ValueError, match=message):
            check_layout(SimpleNamespace(parallelism_config=asked_of), model)  # type: ignore[arg-type]
    for module in find_experts(model).values():
        module.tp_size = 2
    check_layout(SimpleNamespace(optim="adamw_torch"), model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="adafactor.*set optim: adamw_torch"):
        check_layout(SimpleNamespace(optim="adafactor"), model)  # type: ignore[arg-type]


@pytest.mark.full
def test_the_example(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    records = [{"instruction": "Add.", "input": f"{n} + {n}", "output": f"The sum is {2 * n}."} for n in range(16)]
    (tmp_path / "functions.json").write_text(json.dumps(records))
    script = [TESTS / "tp_on_cpu.py", TESTS.parent / "examples/tensor_parallel.py", "--steps", "2"]
    script += ["--model", tiny_checkpoint("qwen3moe"), "--data", tmp_path, "--out", tmp_path / "out"]
    status, said = torchrun(2, *script, ACCELERATE_USE_CPU="true")
    assert status == 0, said[-4000:]
    assert (tmp_path / "out/adapter_model.safetensors").is_file()

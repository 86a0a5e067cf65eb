"""Several processes share the experts: their run is that of one process, saved, resumed and ended like one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import rank_program
import torch
import yaml
from adapted import load, tensors_of
from ranks import ENVIRONMENT, results, run_jobs, torchrun_jobs
from tiny import factory_settings, write_checkpoint

import ktft
from ktft.checkpoint.routing_profile import Routing
from ktft.held import HeldExperts
from ktft.model.experts import layer_number
from ktft.ranks import watch
from ktft.ranks.cores import divide
from ktft.ranks.launch import Launch
from ktft.ranks.watch import Watch
from ktft.train import parallel, shards
from ktft.train.run_report_page import page_of
from ktft.train.run_times import TIMES

FAMILIES = {"qwen3moe": "int8", "dsv3": "bf16", "gpt_oss": "int8"}
STEPS = 10


def job(base: Path, output: Path, processes: int, together: int, **options: Any) -> dict[str, Any]:
    """A run of `together` sequences a step, in this many processes."""
    steps = {"max_steps": STEPS, "examples": 24, "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no"}
    batches = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": together // processes}
    return {"base": str(base), "output": str(output)} | steps | batches | options


def worst(one: Path, other: Path) -> float:
    """The largest relative difference of two runs' losses."""
    pairs = list(zip(results(one)["losses"], results(other)["losses"], strict=True))
    assert len(pairs) > 1
    return max(abs(a - b) / a for a, b in pairs)


def adapter(output: Path) -> str:
    return hashlib.sha256((output / "adapter_model.safetensors").read_bytes()).hexdigest()


def launched(processes: int, folder: Path, *jobs: dict[str, Any]) -> None:
    status, said = run_jobs(processes, folder, *jobs)
    assert status == 0, said[-3000:]


def test_two_and_three_processes_train_like_one(tmp_path: Path) -> None:
    """Losses of three families, an odd number of experts, evaluation; runs that go on in other numbers of processes."""
    bases = {name: write_checkpoint(name, tmp_path / name) for name in FAMILIES}
    odd = write_checkpoint("qwen3moe", tmp_path / "odd", num_experts=33)
    saved = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lora": {"lora_dropout": 0.1}}
    families = [(bases[name], name, {"settings": {"expert_format": fmt}}) for name, fmt in FAMILIES.items()]

    def jobs(processes: int, together: int, *runs: tuple[Path, str, dict[str, Any]]) -> list[dict[str, Any]]:
        return [job(base, tmp_path / f"{name}-{processes}", processes, together, **more) for base, name, more in runs]

    three = [(bases["qwen3moe"], "three", {"max_steps": 6, "generate": True}), (bases["qwen3moe"], "saved3", saved)]
    families.append((odd, "odd", {"max_steps": 6}))
    tokens = {"base": str(bases["dsv3"]), "tokens": [5, 0, 3]}
    launched(3, tmp_path, *jobs(3, 3, *three), tokens | {"output": str(tmp_path / "layer")})
    shutil.copytree(tmp_path / "saved3-3" / "checkpoint-2", tmp_path / "from3" / "checkpoint-2")
    shutil.copytree(tmp_path / "saved3-3" / "checkpoint-4", tmp_path / "end3-1" / "checkpoint-4")
    two = [*jobs(2, 2, *families), job(bases["qwen3moe"], tmp_path / "saved-2", 2, 2, **saved)]
    again = str(tmp_path / "saved-2" / "checkpoint-2")
    two.append(job(bases["qwen3moe"], tmp_path / "again-2", 2, 2, **saved | {"resume": again}))
    two.append(job(bases["qwen3moe"], tmp_path / "from3", 2, 2, **saved | {"resume": True}))
    routed = {"settings": {"expert_routing": str(tmp_path / "saved-2" / "expert_routing.json")}}
    two.append(job(bases["qwen3moe"], tmp_path / "routed-2", 2, 2, **saved | routed | {"resume": again}))
    refused = job(bases["qwen3moe"], tmp_path / "refused", 2, 2, of_rank={"1": {"learning_rate": 0.1}})
    status, said = run_jobs(2, tmp_path, *two, refused)
    assert status == 1 and "has learning_rate 0.1, rank 0 on" in said and "has 0.001; start all" in said, said[-3000:]
    one = [*jobs(1, 2, *families), *jobs(1, 3, three[0])]
    one.append(job(bases["qwen3moe"], tmp_path / "end3-1", 1, 3, **saved | {"resume": True}))
    one.append(job(bases["qwen3moe"], tmp_path / "from2-1", 1, 2, **saved | {"resume": again}))
    for each in one:
        rank_program.train(**each)
    rank_program.experts(**tokens, output=str(tmp_path / "layer"))

    for name in FAMILIES:
        assert worst(tmp_path / f"{name}-1", tmp_path / f"{name}-2") < 0.005, name
        eval_losses = [results(tmp_path / f"{name}-{processes}")["eval"] for processes in (1, 2)]
        assert eval_losses[0] == pytest.approx(eval_losses[1], rel=0.005)
        assert tensors_of(tmp_path / f"{name}-1").keys() == tensors_of(tmp_path / f"{name}-2").keys()
    for name, processes in (("odd", 2), ("three", 3)):  # 17 and 16 experts; 3, 3 and 2
        assert worst(tmp_path / f"{name}-1", tmp_path / f"{name}-{processes}") < 0.005, name
    assert adapter(tmp_path / "again-2") == adapter(tmp_path / "saved-2")  # resumed in as many processes: exactly
    assert adapter(tmp_path / "end3-1") == adapter(tmp_path / "saved3-3")  # no step was left: the same file
    check_report(tmp_path / "saved-2")
    check_shares(tmp_path / "routed-2" / "checkpoint-4", routed["settings"]["expert_routing"])
    assert worst(tmp_path / "again-2", tmp_path / "routed-2") < 0.005  # the same experts, elsewhere
    assert len(results(tmp_path / "from3")["losses"]) == len(results(tmp_path / "from2-1")["losses"]) == 4
    files = sorted(path.name for path in (tmp_path / "saved-2" / "checkpoint-4").iterdir())
    assert [name for name in files if name.startswith("optimizer")] == [
        *(shards.shard_name(rank, 2) for rank in range(2)),
        "optimizer.pt",
    ]
    check_layer(tmp_path / "layer")


def check_shares(checkpoint: Path, routing: str) -> None:
    """Two ranks saved the experts that the counts give them."""
    counts = Routing.load(Path(routing)).tokens
    for rank in range(2):
        saved = torch.load(checkpoint / shards.shard_name(rank, 2), weights_only=True)
        for name, own in saved.items():
            assert own["numbers"] == list(HeldExperts.balanced(counts[layer_number(name)], rank, 2).numbers)
        assert any(own["numbers"] != list(range(rank, 8, 2)) for own in saved.values())


def check_report(output: Path) -> None:
    """The report has a row for each process, and the page shows it."""
    report = json.loads((output / "ktft_report.json").read_text())
    assert [rank["steps"] for rank in report["ranks"]] == [4, 4]
    every = sum(map(sum, report["expert_tokens"]["tokens"]))
    assert sum(rank["expert_tokens"] for rank in report["ranks"]) == every
    for rank in report["ranks"]:
        assert sum(rank[name] for name in TIMES) == pytest.approx(rank["seconds"], abs=1e-4)
        assert rank["rss_bytes"] > 0 and rank["gpu_bytes"] is None and rank["device"] == "CPU"
    assert page_of(report).count(f"<td>{report['ranks'][0]['machine']}</td>") == 2


def check_layer(folder: Path) -> None:
    """Three ranks with 5, 0 and 3 tokens: outputs and all gradients are those of one process."""
    whole = torch.load(folder / "0-of-1.pt")
    parts = [torch.load(folder / f"{rank}-of-3.pt") for rank in range(3)]
    for name in ("out", "hidden", "weights"):
        found = torch.cat([part[name] for part in parts])
        assert (found - whole[name]).norm() < 5e-3 * whole[name].norm(), name
    lora = {name: tensor for part in parts for name, tensor in part.items() if name.startswith("lora_")}
    assert lora.keys() == {name for name in whole if name.startswith("lora_")}
    for stack in {name.rpartition(".")[0] for name in lora}:
        found, expected = (
            torch.stack([each[name] for name in sorted(lora) if name.startswith(stack)]) for each in (lora, whole)
        )
        assert (found - expected).norm() < 1e-2 * expected.norm(), stack


@pytest.mark.parametrize("start", [run_jobs, pytest.param(torchrun_jobs, marks=pytest.mark.full)])
def test_a_rank_that_is_killed_ends_the_others(
    tmp_path: Path, base: Path, start: Callable[..., tuple[int, str]]
) -> None:
    began = time.monotonic()
    status, said = start(2, tmp_path, job(base, tmp_path / "out", 2, 2, max_steps=1000, stop=(1, "SIGKILL")))
    assert status == 1, said[-3000:]
    assert ("Signal 9" if start is torchrun_jobs else "cannot go on because rank 1") in said, said[-3000:]
    assert time.monotonic() - began < 200  # it would be hours


def test_a_rank_that_fails_ends_the_others(tmp_path: Path, base: Path) -> None:
    """The other process tells which rank it was, and why; the last checkpoint is whole."""
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 1, "stop": (0, "error")}
    status, said = run_jobs(2, tmp_path, job(base, tmp_path / "out", 2, 2, **options))
    assert status == 1
    assert "rank 0 on " in said and "failed: MemoryError: no memory left for this test" in said, said[-3000:]
    assert "this process cannot go on because rank 0" in said or "ends because rank 0" in said
    assert (tmp_path / "out" / "checkpoint-1" / "ktft_checkpoint.json").is_file()


@pytest.mark.full  # in `make test`, LLaMA-Factory starts two processes under FSDP2
def test_llamafactory_cli(tmp_path: Path, base: Path, data_dir: Path) -> None:
    """`llamafactory-cli train` starts a process for each GPU, or as many as NPROC_PER_NODE says."""
    bin_dir = Path(sys.executable).parent
    keys = {"max_steps": 3, "per_device_train_batch_size": 1, "learning_rate": 1e-3, "save_steps": 2, "eval_steps": 2}
    keys |= {"eval_dataset": "sft", "eval_strategy": "steps", "gradient_accumulation_steps": 2, "logging_steps": 1}
    file = tmp_path / "train.yaml"
    file.write_text(yaml.safe_dump(factory_settings(base, data_dir, tmp_path / "out", **keys)))
    environment = ENVIRONMENT | {
        "FORCE_TORCHRUN": "1",
        "NPROC_PER_NODE": "2",
        "PATH": f"{bin_dir}:{os.environ['PATH']}",
    }
    command = [bin_dir / "llamafactory-cli", "train", file]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert (tmp_path / "out" / "checkpoint-2" / shards.shard_name(1, 2)).is_file()
    ktft.load_adapter(load(base), tmp_path / "out")  # refuses an adapter that lacks an expert


# --- parts ------------------------------------------------------------------------------------------------------------


def test_cores_are_divided_whole_and_near_the_gpus() -> None:
    cores = [(cpu, cpu + 8) for cpu in range(8)]  # two threads each
    nodes = {cpu: cpu % 8 // 4 for cpu in range(16)}
    parts = [divide(cores, nodes, [None] * 4, rank) for rank in range(4)]
    assert parts == [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}]
    assert divide(cores, nodes, [1, 0], 0) == {4, 5, 6, 7, 12, 13, 14, 15}  # its GPU is near node 1
    assert [divide([(0,), (1,)], {}, [None] * 3, rank) for rank in range(3)] == [{0}, {1}, {0}]


def test_experts_are_shared_without_rest() -> None:
    held = [HeldExperts.share_of(33, rank, 2) for rank in range(2)]
    assert [each.count for each in held] == [17, 16]
    assert sorted(number for each in held for number in each.numbers) == list(range(33))
    index = torch.tensor([[0, 1], [32, 31]])
    assert held[0].local(index).tolist() == [[0, -1], [16, -1]] and held[1].local(index).tolist() == [[-1, 0], [-1, 15]]
    with pytest.raises(ValueError, match=r"9 processes cannot share the 8 experts.*at most 8"):
        HeldExperts.share_of(8, 0, 9)


def test_hot_experts_part() -> None:
    tokens = [900, 0, 800, 5, 700, 5, 600, 5, 0]
    shares = [HeldExperts.balanced(tokens, rank, 2) for rank in range(2)]
    assert [each.count for each in shares] == [5, 4]  # as many as without counts
    assert sorted(number for each in shares for number in each.numbers) == list(range(9))
    got = [sum(tokens[number] for number in each.numbers) for each in shares]
    assert max(got) - min(got) <= 10, "900 + 600 and 800 + 700"
    for rank in range(3):
        assert HeldExperts.balanced([7] * 16, rank, 3) == HeldExperts.share_of(16, rank, 3)
        assert HeldExperts.share_of(16, rank, 3).numbers == tuple(range(rank, 16, 3))


def test_shares_that_do_not_add_up_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the processes were given different counts."""
    layer = SimpleNamespace(held=HeldExperts.share_of(8, 0, 2))
    monkeypatch.setattr(parallel, "find_experts", lambda model: {"layers.0": layer})
    alike: Any = SimpleNamespace(gather=lambda value: [value, value])
    with pytest.raises(ValueError, match=r"layers.0 once: rank 0 has 0, 2 to 6 by 2; rank 1 has 0.*same"):
        parallel._check_shares(torch.nn.Module(), alike)


class Board(dict[str, str]):
    """A store in memory."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def get(self, key: str) -> bytes:  # type: ignore[override]
        return self[key].encode()

    def check(self, keys: list[str]) -> bool:
        return keys[0] in self


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"failure/1": "elsewhere|OSError: disk full"}, "rank 1 on elsewhere failed: OSError: disk full"),
        ({"life/1": "elsewhere|pid|7|3"}, "rank 1 on elsewhere has been silent"),
    ],
)
def test_what_is_told_of_a_rank_that_is_gone(monkeypatch: pytest.MonkeyPatch, other: dict[str, str], told: str) -> None:
    for name, seconds in (("EVERY", 0.02), ("SILENT", 0.5), ("GRACE", 0.02)):
        monkeypatch.setattr(watch, name, seconds)
    ended = threading.Event()
    board = Board(other)
    guard = Watch(Launch(0, 2, 0, 2), board, ended.set)
    guard.start()
    assert ended.wait(20) and guard.found is not None and guard.found.startswith(told)
    assert ("heard/1/0" in board) == ("failure/1" in board), "the rank that fails may end now"
    guard.stop()


def test_ranks_are_not_silent_while_this_one_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-Z and `fg`: this rank may be the first to look again."""
    monkeypatch.setattr(watch, "EVERY", 0.02)
    stopped = [0.0]
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + stopped[0]))
    board, ended = Board({"life/1": "elsewhere|pid|7|3"}), threading.Event()
    guard = Watch(Launch(0, 2, 0, 2), board, ended.set)
    guard.start()
    time.sleep(0.1)
    stopped[0] = 1000.0
    assert not ended.wait(0.3) and guard.found is None
    guard.stop()


def test_a_rank_that_fails_waits_until_the_others_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 fails as well."""
    monkeypatch.setattr(watch, "EVERY", 5.0)
    board = Board({"failure/2": "elsewhere|MemoryError: no memory"})
    failing = Watch(Launch(0, 3, 0, 3), board, lambda: None)
    failing._failure = "OSError: disk full"
    waiting = threading.Thread(target=failing._talking)
    waiting.start()
    waiting.join(1.0)
    assert (
        waiting.is_alive()
        and not failing._told.is_set()
        and board["failure/0"] == f"{socket.gethostname()}|OSError: disk full"
    )
    board["heard/0/1"] = "1"
    waiting.join(15)
    assert failing._told.is_set()


def test_a_rank_that_ends_well_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "EVERY", 0.02)
    board, ended = Board({"life/1": "ended"}), threading.Event()
    guard = Watch(Launch(0, 2, 0, 2), board, ended.set)
    guard.start()
    assert not ended.wait(0.5) and guard.found is None
    guard.stop()
    until = time.monotonic() + 20
    while board["life/0"] != "ended" and time.monotonic() < until:
        time.sleep(0.01)
    assert board["life/0"] == "ended"


def test_state_that_has_no_rows_cannot_be_divided(tmp_path: Path) -> None:
    state = {"step": torch.tensor(2.0), "absmax": torch.zeros(5)}
    sources = [shards._Source([0, 2], state), shards._Source([1, 3], state)]
    whole = HeldExperts.of(4)
    with pytest.raises(ValueError, match=r"absmax of p has no row for each expert.*start as many as wrote it"):
        shards._rows("p", whole, sources)
    rows = {"exp_avg": torch.arange(4.0).view(2, 2)}
    found = shards._rows("p", whole, [shards._Source([0, 2], rows), shards._Source([1, 3], rows)])
    assert found["exp_avg"].tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]

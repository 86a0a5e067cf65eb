"""`ktft bench step`: the records, the models and their routing, the floor, and what fails. Nothing asserts a time."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import invoke, refused

from benchmarks import machine
from benchmarks.peer import Job as KernelJob
from benchmarks.step import floor, models, peers, run
from benchmarks.step.cases import Job, Rates, StepRecord, Times, parse_step_shape
from benchmarks.step.peers import PEERS, RUNNERS, Fsdp2Offload, KtKernelLayer, Zero3Offload
from benchmarks.step.process import Worker, WorkerError
from benchmarks.step.runners import HfResident, Ktft, token_ids
from benchmarks.step.worker import serve
from ktft import native
from ktft.config import PLACEMENTS
from ktft.lanes.gpu.residents import STEPS

TINY = "8,2,64,64"


def bench(*arguments: object, output: Path, code: int = 0) -> tuple[list[dict[str, Any]], str]:
    """The command's records for a tiny shape in one thread, and its stderr."""
    done = invoke("bench", "step", "--shape", TINY, "--threads", 1, *arguments, "--output", output)
    assert done.exit_code == code, done.output
    return [json.loads(line) for line in output.read_text().splitlines()], done.stderr


def job(**changes: Any) -> Job:
    tiny = Job("ktft", parse_step_shape(TINY), 2, (24,), "uniform", 4, True, "int8", "auto", threads=1)
    return replace(tiny, **changes)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(machine, "read_bytes", lambda: 32 << 20)
    monkeypatch.setattr(run, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(run, "WARM_STEPS", 2)  # nothing asserts a time
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class LocalWorker(Worker):
    """A worker without its process."""

    def __init__(self, job: Job) -> None:
        self.job, self.facts = job, {}

    def close(self) -> None:
        self._runner = None

    def make(self) -> None:
        if self.job.format == "bf16":
            raise WorkerError(f"{self.job.name}: no bf16 today")
        try:
            self._runner = RUNNERS[self.job.runner](self.job)
        except ValueError as error:
            raise WorkerError(f"{self.job.name}: {error}") from None
        self.facts = self._runner.facts()

    def step(self, tokens: int) -> Times:
        return self._runner.step(tokens)

    def rates(self, threads: int | None) -> Rates:
        return Rates(1e11, 1e11, 1e7, 1e7)  # experts take most of a step's floor, however slow the rest is here


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "Worker", LocalWorker)


@pytest.mark.parametrize("worker", [LocalWorker, pytest.param(run.Worker, marks=pytest.mark.full)])
def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: type[LocalWorker]) -> None:
    """As a user types it, with a process for each model and peer, or with all in this process."""
    monkeypatch.setattr(run, "Worker", worker)
    plot, peers = tmp_path / "steps.png", ("--peer", "hf-resident", "--peer", "zero3-offload")
    case = ("--layers", 1, "--tokens", 32, "--format", "int8", "--placement", "cpu", "--runs", 1)
    (record,), said = bench(*case, *peers, "--plot", plot, output=tmp_path / "steps.jsonl")
    assert set(record) == {field.name for field in fields(StepRecord)}
    assert (record["layers"], record["tokens"], record["format"], record["placement"]) == (1, 32, "int8", "cpu")
    numbers = [record[field.name] for field in fields(StepRecord) if field.type == "float"]
    assert all(math.isfinite(number) and number >= 0 for number in numbers), record
    assert record["step_ms"] * record["tokens_per_second"] == pytest.approx(32e3, rel=1e-3)
    assert record["ms_per_layer"] == record["step_ms"]
    assert record["floor_ms"] > record["without_experts_ms"] > 0
    assert record["rss_bytes"] > 1e8
    assert record["threads"] == 1 and record["marginal_ms_per_layer"] is None
    peer = record["peers"]["hf-resident"]
    assert peer["ratio"] > 0 and peer["rss_bytes"] > 1e8
    assert set(record["peers"]) | set(record["absent_peers"]) == {each.name for each in PEERS}
    if not torch.cuda.is_available():
        assert record["absent_peers"]["zero3-offload"] == "needs a GPU"
        assert "without zero3-offload: needs a GPU" in said
    assert re.search(r"(?m)^\d\d:\d\d:\d\d 8,2,64,64, 1 layers, uniform, 32 tokens, warming up", said)
    assert "x floor" in said
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("in_process")
def test_marginal_of_two_layer_counts(tmp_path: Path) -> None:
    case = ("--layers", 3, "--layers", 1, "--tokens", 24, "--format", "k4", "--runs", 2)
    how = ("--routing", "zipf", "--no-checkpointing", "--peer", "hf-resident")
    (one, three), _ = bench(*case, *how, output=tmp_path / "steps.jsonl")
    assert (one["layers"], three["layers"]) == (1, 3)
    assert one["marginal_ms_per_layer"] is None
    assert three["marginal_ms_per_layer"] == pytest.approx((three["step_ms"] - one["step_ms"]) / 2, abs=0.02)
    assert three["peers"]["hf-resident"]["marginal_ms_per_layer"] is not None
    # the runs, and those after the peer
    assert three["runs"] == 2 + run.AROUND


@pytest.mark.usefixtures("in_process")
def test_a_model_that_cannot_run_does_not_end_the_others(tmp_path: Path) -> None:
    case = ("--layers", 1, "--tokens", 8, "--format", "bf16", "--format", "k4", "--runs", 1, "--peer", "none")
    (record,), said = bench(*case, output=tmp_path / "steps.jsonl", code=1)
    assert "ktft bf16 auto: no bf16 today" in said and record["format"] == "k4"


def test_worker_answers_every_request() -> None:
    requests = [{"tokens": 24}, {"job": asdict(job(format="nonsense"))}, {"job": asdict(job(threads=1))}]
    requests += [{"tokens": 24}, {"rates": {"threads": 1, "read_bytes": 16 << 20}}]
    answers = io.StringIO()
    serve(io.StringIO("".join(json.dumps(request) + "\n" for request in requests)), answers)
    ready, early, wrong, made, step, rates = map(json.loads, answers.getvalue().splitlines())
    assert ready == {}
    assert early["error"].startswith("AttributeError")
    assert wrong["error"].startswith("ValueError: expert_format is 'nonsense'")
    assert made == {"device": "cpu", "isa": native.default_isa(), "threads": 1, "lanes": "cpu"}
    assert Times(**step).step > 0
    assert all(value > 0 for value in asdict(Rates(**rates)).values())


def test_worker_that_dies() -> None:
    with Worker(job()) as worker:
        worker._processes[0]._process.kill()
        with pytest.raises(WorkerError, match="ktft int8 auto: its process ended with -9"):
            worker.make()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "small"), "unknown shape 'small'"),
        (("--shape", "8,9,64,64"), "9 experts per token of 8"),
        (("--placement", "gpu"), "'gpu' is none of auto"),
        (("--format", "int3"), "'int3' is none of"),
        (("--peer", "vllm"), "'vllm' is none of zero3-offload"),
        (("--gpu-expert-memory", "much"), "gpu_expert_memory is 'much'"),
    ],
)
def test_bad_arguments(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused("bench", "step", *arguments)


def test_settings_reach_the_experts() -> None:
    assert job(placement="resident").settings().gpu_expert_memory == "auto"
    assert job(placement="resident", gpu_expert_memory=5).settings().gpu_expert_memory == 5
    assert job(placement="cpu", gpu_expert_memory=5).settings().gpu_expert_memory == 0
    assert job(format="k4", placement="stream").settings().placement == "stream"
    assert Job.from_dict(json.loads(json.dumps(asdict(job())))) == job()


@pytest.mark.parametrize(
    ("shape", "attention"),
    [
        ("qwen3-30b-a3b", 2048 * (2 * 4096 + 2 * 512)),
        # out of q_proj and kv_a_proj, into o_proj, and kv_b_proj
        ("deepseek-v2-lite", 2048 * (16 * 192 + (512 + 64) + 16 * 128) + 512 * 16 * (128 + 128)),
    ],
)
def test_released_shapes(shape: str, attention: int) -> None:
    """Real sizes, nothing allocated."""
    known = parse_step_shape(shape)
    with torch.device("meta"):
        model = models.empty_model(known, 2)
    experts = models.expert_modules(model, models.family_of(model))
    assert [sizes for *_, sizes in experts] == 2 * [(known.num_experts, known.hidden_size, known.intermediate_size)]
    weights = model.model.layers[1].self_attn.parameters()
    assert sum(weight.numel() for weight in weights if weight.dim() == 2) == attention


def test_experts_of_layers_differ() -> None:
    runner = Ktft(job())
    first, second = (module.layer for module in runner.model.modules() if type(module).__name__ == "KtftExperts")
    assert not first.missing() and not second.missing()
    weights = [first.dequantize(expert, "up_proj") for expert in range(5)]
    assert weights[0].std() == pytest.approx(models.SCALE, rel=0.1)
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[models.DISTINCT])
    assert not torch.equal(weights[0], second.dequantize(0, "up_proj"))


def watch_routing(model: torch.nn.Module) -> list[list[int]]:
    """Records the tokens of each expert for every call from now on."""
    seen: list[list[int]] = []
    for name, module in model.named_modules():
        if name.endswith(".mlp.experts"):
            module.register_forward_pre_hook(
                lambda _, given: seen.append(given[1].flatten().bincount(minlength=8).tolist())
            )
    return seen


@pytest.mark.parametrize("routing", ["uniform", "zipf"])
def test_every_runner_routes_by_the_table(routing: str) -> None:
    """With ktft, stock experts or none, each expert gets the same tokens, also when backward recomputes forward."""
    for runner in ("ktft", "hf-resident", "without-experts"):
        made = RUNNERS[runner](job(runner=runner, routing=routing, tokens=(24, 16)))
        for tokens in (24, 16):
            seen = watch_routing(made.model)
            made.step(tokens)
            wanted = [models.counts(job(routing=routing), layer, tokens) for layer in range(2)]
            assert sorted(seen) == sorted(2 * wanted), runner
    skew = max(models.counts(job(routing=routing), 0, 4096)) / 1024
    assert skew > 1.5 if routing == "zipf" else skew < 1.1


def test_training_moves_attention_and_experts() -> None:
    runner = Ktft(job())
    before = {n: p.detach().clone() for n, p in runner.model.named_parameters() if p.requires_grad}
    runner.step(24)
    moved = {name for name, p in runner.model.named_parameters() if name in before and not p.equal(before[name])}
    assert {name for name in before if "lora_B" in name} <= moved
    assert any(".experts.lora_B" in name for name in moved) and any("q_proj.lora_B" in name for name in moved)


@pytest.mark.usefixtures("in_process")
def test_lanes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every placement on an emulated GPU: the floor knows the lanes, and residents are made."""
    monkeypatch.setenv("KTFT_EMULATE_GPU", "1")
    case = ("--layers", 2, "--tokens", 24, "--format", "int8", "--runs", 1, "--gpu-expert-memory", "1G")
    placements = [f"--placement={name}" for name in PLACEMENTS]
    records, _ = bench(*case, *placements, "--peer", "none", output=tmp_path / "steps.jsonl")
    floors = {record["placement"]: record["floor_ms"] for record in records}
    assert floors["resident"] == floors["auto"] < min(floors["cpu"], floors["stream"])
    memory = {record["placement"]: record["gpu_expert_memory"] for record in records}
    assert memory == {"auto": 1 << 30, "cpu": 0, "stream": 0, "resident": 1 << 30}
    runner = Ktft(job(placement="resident", gpu_expert_memory=1 << 30))
    for _ in range(STEPS):
        runner.step(24)
    assert runner.lanes is not None and runner.lanes.running is not None
    layers = [module.layer for module in runner.model.modules() if type(module).__name__ == "KtftExperts"]
    assert all(len(runner.lanes.running.gpu.held(layer)) == 8 for layer in layers)


@pytest.mark.usefixtures("in_process")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    case = ("--layers", 1, "--tokens", 8, "--format", "int8", "--placement", "stream", "--runs", 1, "--peer", "none")
    _, said = bench(*case, output=tmp_path / "steps.jsonl", code=1)
    assert "ktft int8 stream" in said and "torch sees no GPU" in said


def test_fsdp_trains_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")  # so that what the peer sets is taken back
    losses = []
    for runner in (HfResident, Fsdp2Offload):
        made = runner(job(runner=runner.name))
        torch.manual_seed(1)
        ids = token_ids(24, made.device)
        losses.append(float(made.model(input_ids=ids, labels=ids).loss.detach()))
        assert made.step(24).backward > 0
    torch.distributed.destroy_process_group()
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


class OneLayer:
    """ktft's own layer in place of kt-kernel."""

    def absent(self) -> str:
        return ""

    def make(self, job: KernelJob) -> Any:
        assert job.case.format == "int8" and job.case.tokens == len(job.batch.x)
        return job.ktft


@pytest.mark.usefixtures("in_process")
def test_kernels_of_one_layer_beside_a_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The peer's figure is for one layer and is not divided by the model's layers."""
    monkeypatch.setattr(peers, "KT_KERNEL", OneLayer())
    monkeypatch.setattr(KtKernelLayer, "absent", staticmethod(lambda: ""))
    monkeypatch.setattr(machine, "MAX_COPIES", 2)
    case = ("--layers", 2, "--tokens", 16, "--tokens", 64, "--format", "k4", "--runs", 1, "--peer", "kt-kernel")
    plot = tmp_path / "steps.png"
    records, _ = bench(*case, "--plot", plot, output=tmp_path / "steps.jsonl")
    for record in records:
        peer = record["peers"]["kt-kernel"]
        assert peer["ms_per_layer"] == pytest.approx(peer["forward_ms"] + peer["backward_ms"], rel=1e-3)
        assert peer["marginal_ms_per_layer"] is None and peer["optimizer_ms"] == 0
    assert plot.is_file()


def test_peers_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Zero3Offload.absent() == "not installed: deepspeed"
    assert KtKernelLayer.absent() == "kt_kernel is not installed"


def test_floor_is_the_best_of_all_splits() -> None:
    """Compared with every way to split five experts over one or two lanes."""
    tokens, size, flops = [9, 1, 0, 4, 30, 2], 1000, 10.0
    for given in ((100, 1e9, 900, 700), (1e9, 1e9, 900, 700), (20, 1e9, 1e9, 300), (50, 120, 9e9, 9e9)):
        rates = Rates(*given)

        def seconds(streamed: tuple[int, ...], held: tuple[int, ...] = (), rates: Rates = rates) -> float:
            gpu = {*streamed, *held}
            here = [count for expert, count in enumerate(tokens) if count and expert not in gpu]
            cpu = max(len(here) * size / rates.read, sum(here) * flops / rates.registers)
            on_gpu = sum(tokens[expert] for expert in gpu) * flops / rates.gpu
            return max(cpu, len(streamed) * size / rates.pcie, on_gpu)

        used = [expert for expert, count in enumerate(tokens) if count]
        splits = [s for n in range(len(used) + 1) for s in itertools.combinations(used, n)]
        found = {name: floor.pass_floor(tokens, size, flops, rates, name, 0) for name in PLACEMENTS}
        assert found["cpu"] == pytest.approx(seconds(()))
        assert found["stream"] == pytest.approx(seconds(tuple(used)))
        assert found["resident"] == pytest.approx(seconds((), tuple(used)))
        if rates.gpu == 1e9:
            assert found["auto"] == pytest.approx(min(map(seconds, splits)))
        assert found["auto"] <= min(found["cpu"], found["stream"]) * (1 + 1e-9)
        assert floor.pass_floor(tokens, size, flops, rates, "auto", 2) <= found["auto"] or rates.gpu == 120


def test_floor_of_a_model() -> None:
    """Bytes are counted in the packed format; residents need no copies."""
    rates = Rates(1e30, 1e30, 1e9, 1e9)
    counts = [[1] * 8, [0] * 7 + [24]]
    packed = sum(native.packed_bytes(8, 64, 64, "int8", 1)) / 8
    cpu = floor.experts_floor(job(placement="cpu"), counts, rates)
    assert cpu == pytest.approx(2 * (8 + 1) * packed / 1e9)
    assert floor.experts_floor(job(placement="auto"), counts, rates) == pytest.approx(2 * (4 + 1) * packed / 1e9)
    assert floor.experts_floor(job(placement="resident"), counts, rates) < cpu / 1e6
    some = job(gpu_expert_memory=int(2 * 4 * packed))
    assert floor.experts_floor(some, counts, rates) == pytest.approx(2 * 2 * packed / 1e9)

"""`ktft bench`: its records, on tiny shapes. No test asserts a time."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from commands import invoke, refused
from forked import Forks
from typer.testing import CliRunner

from benchmarks import layers, machine, measure, optimizer, peer_kt, report
from benchmarks.cases import SHAPES, STEPS, W8A8_STEP, Case, PeerFigure, Record, Shape, parse_shape
from benchmarks.kernels import LIBRARIES, PEERS
from benchmarks.layers import Ktft
from benchmarks.peer import Job
from ktft import native
from ktft.cli import bench as bench_command

TINY = "4,2,64,96"
CONTRACT = {"forward": 0.005, "backward": 0.01, "forward+backward": 0.01}
ONE = ["--shape", TINY, "--tokens", "1", "--format", "int8", "--rank", "0", "--runs", "1", "--peer", "none"]
PROCESS = [str(Path(sys.executable).parent / "ktft"), "bench", "kernels", *ONE]


def records_of(output: Path, *arguments: object, command: str = "kernels") -> tuple[list[dict[str, Any]], str]:
    """The records and the output of `ktft bench` for a tiny shape."""
    done = invoke("bench", command, "--shape", TINY, "--runs", "1", "--threads", "2", "--output", output, *arguments)
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in output.read_text().splitlines()], done.output


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(machine, "MAX_COPIES", 3)
    monkeypatch.setattr(machine, "read_bytes", lambda: 32 << 20)
    monkeypatch.setattr(measure, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(measure, "MOST_REPEATS", 2)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_records(tmp_path: Path) -> None:
    records, _ = records_of(tmp_path / "records.jsonl", "--tokens", 40, "--routing", "uniform")
    assert len(records) == len(native.FORMATS) * len(STEPS)
    assert {(r["format"], r["step"]) for r in records} == {(fmt, step) for fmt in native.FORMATS for step in STEPS}
    for r in records:
        assert set(r) == {field.name for field in fields(Record)}
        assert (r["shape"], r["tokens"], r["rank"], r["threads"], r["copies"]) == (TINY, 40, 8, 2, 3)
        assert r["isa"] == native.default_isa()
        assert r["max_error"] <= CONTRACT[r["step"]], r
        numbers = [r[f.name] for f in fields(Record) if f.type == "float"]
        assert all(math.isfinite(n) and n >= 0 for n in numbers), r
        assert all(r[f"{name}_tflops"] > 0 for name in ("registers", "hot", "streamed"))
        assert r["ms"] > 0 and r["read_gbs"] > 0
        assert r["tflops"] * r["ms"] * 1e9 == pytest.approx(6 * 40 * 2 * 64 * 96 * STEPS[r["step"]], rel=1e-3)
        assert r["percent_of_read"] == pytest.approx(100 * r["gbs"] / r["read_gbs"], rel=1e-3)
        assert set(r["peers"]) | set(r["absent_peers"]) == {peer.name for peer in PEERS}
        assert r["peers"]["torch-eager"]["ratio"] > 0


def test_json_lines_on_stdout_are_alone_there(forks: Forks, tmp_path: Path) -> None:
    """In a process of its own, since descriptor 1 is redirected to stderr during the run."""
    lines, told = tmp_path / "lines", tmp_path / "told"
    assert forks.start(PROCESS, dict(os.environ), lines, stderr=told).wait() == 0, told.read_text()
    assert [json.loads(line)["step"] for line in lines.read_text().splitlines()] == list(STEPS)
    assert "%read" in told.read_text()


@pytest.mark.full  # the same command as above, with a terminal in place of a file
def test_a_terminal_shows_the_table_alone(forks: Forks, tmp_path: Path) -> None:
    reader, terminal = pty.openpty()
    told = tmp_path / "told"
    assert forks.start(PROCESS, dict(os.environ), os.ttyname(terminal), stderr=told).wait() == 0, told.read_text()
    os.close(terminal)
    with pytest.raises(OSError):  # nothing was written
        os.read(reader, 1)
    os.close(reader)
    assert "%read" in told.read_text()
    assert "its time over ktft's" in " ".join(told.read_text().split())


def test_ktft_beside_itself(tmp_path: Path) -> None:
    """What LoRA, skewed routing and the last thread cost, each as a peer."""
    peers = ("--peer", "no-lora", "--peer", "uniform", "--peer", "thread-less")
    how = ("--tokens", 9, "--routing", "uniform", "--routing", "zipf", "--format", "int8")
    records, _ = records_of(tmp_path / "records.jsonl", *how, *peers)
    assert {(r["routing"], r["step"]) for r in records} == {
        (way, step) for way in ("uniform", "zipf") for step in STEPS
    }
    for r in records:
        assert set(r["peers"]) == {"no-lora", "uniform", "thread-less"}
        assert all(figure["ratio"] > 0 for figure in r["peers"].values())


def test_w8a8_is_a_step_of_int8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_runtime = native.runtime
    monkeypatch.setattr(native, "runtime", partial(make_runtime, isa="amx_emu"))
    formats = ("--format", "int8", "--format", "bf16", "--w8a8")
    records, _ = records_of(tmp_path / "records.jsonl", "--tokens", 8, *formats, "--peer", "torch-eager")
    assert [r["step"] for r in records] == [*STEPS, W8A8_STEP, *STEPS]
    assert 0 < records[3]["max_error"] <= 0.04 and records[3]["peers"]["torch-eager"]["ratio"] > 0
    monkeypatch.setattr(native, "runtime", partial(make_runtime, isa="scalar"))
    assert "activation_bits is 8, but the ISA is scalar" in refused("bench", "kernels", *ONE, "--w8a8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "huge"], "unknown shape 'huge'"),
        (["--shape", "2,4,64,64"], "4 experts per token of 2"),
        (["--format", "int3"], "'int3' is none of"),
        (["--routing", "skewed"], "uniform, zipf"),
        (["--peer", "numpy"], "torch-eager"),
        (["--shape", "4,2,60,64", "--peer", "none"], "multiple"),
    ],
)
def test_wrong_options_are_told(arguments: list[str], message: str) -> None:
    assert message in refused("bench", "kernels", *arguments)


def test_shapes() -> None:
    assert parse_shape("deepseek-v3") is SHAPES["deepseek-v3"]
    assert parse_shape("8,2,64,32") == Shape("8,2,64,32", 8, 2, 64, 32)


def test_zipf_is_skewed_and_draws_without_replacement() -> None:
    torch.manual_seed(0)
    case = Case(Shape("s", 32, 4, 32, 32), 512, "zipf", "bf16", 0)
    batch, even = layers.make_batch(case), layers.make_batch(Case(case.shape, 512, "uniform", "bf16", 0))
    assert all(len(set(row)) == 4 for row in batch.index.tolist())
    assert batch.index.flatten().bincount().max() > 2 * even.index.flatten().bincount().max()
    torch.testing.assert_close(batch.weights.sum(-1), torch.ones(512))


@pytest.mark.parametrize("isa", native.isas())
def test_ceilings(isa: str) -> None:
    runtime = native.runtime(threads=2, isa=isa)
    assert all(rate > 0 for rate in native.compute_ceilings(runtime, seconds=0.001))
    memory = native.StreamedMemory(native.runtime(threads=3, numa_nodes=2, isa=isa), 20 << 20)
    assert memory.read() > 0 and memory.update() > 0 and memory.gemm(3, 2048) > 0
    with pytest.raises(ValueError, match="tokens are 705"):
        memory.gemm(705, 2048)


@pytest.mark.parametrize("peer", LIBRARIES, ids=lambda peer: peer.name)
def test_peers_compute_the_same_layer(peer: Any) -> None:
    """Without LoRA, which torch's peers lack. The limit is 2%, since bf16 products are summed in another order."""
    if reason := peer.absent():
        pytest.skip(reason)
    torch.manual_seed(0)
    case = Case(parse_shape("4,2,256,256"), 24, "uniform", "bf16", 0)
    weights, batch = layers.make_weights(case.shape), layers.make_batch(case)
    ours = Ktft(case.shape, case.format, native.runtime(threads=2), weights, None)
    runner = peer.make(Job(case, weights, None, batch, ours))
    wanted = ours.forward(batch).float()
    for _ in range(2):
        assert (runner.forward(batch).float() - wanted).norm() <= 0.02 * wanted.norm()
    if runner.has_backward:
        runner.train(batch)()


def test_kt_kernel_says_why_it_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kt_kernel", None)
    assert "does not import" in peer_kt.KT_KERNEL.absent()
    bare = SimpleNamespace(kt_kernel_ext=SimpleNamespace(moe=SimpleNamespace()))
    monkeypatch.setitem(sys.modules, "kt_kernel", bare)
    assert "no AMX experts" in peer_kt.KT_KERNEL.absent()
    assert peer_kt.thread_counts(16) == [16, 15, 12, 8]
    assert peer_kt.thread_counts(1) == [1]


def a_record(**changes: Any) -> Record:
    values: dict[str, Any] = {f.name: {"str": "deepseek-v2-lite", "int": 8192, "float": 1234.5678}.get(str(f.type)) for
                              f in fields(Record)}  # fmt: skip
    figures = {peer.name: PeerFigure(123.4, 123.45) for peer in LIBRARIES}
    return Record(**values | {"step": "forward", "routing": "uniform", "peers": figures, "absent_peers": {}} | changes)


def test_table_fits_120_columns() -> None:
    from rich.console import Console

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report.make_table([a_record(format="mxfp4", tflops=35.4321, max_error=0.0123)]))
    text = console.export_text()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 120
    assert "…" not in text.replace("deepseek-v2-li", "")


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.plot([a_record(tokens=t, routing=r) for t in (8, 1) for r in ("uniform", "zipf")], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_machine(tmp_path: Path) -> None:
    assert machine.cache_bytes(tmp_path) == 32 << 20
    assert machine.cache_bytes() > 0
    assert machine.free_bytes() > 0
    assert 1 <= machine.copies(1 << 20) <= machine.MAX_COPIES
    assert machine.copies(1 << 50) == 1


def test_optimizer_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setattr(optimizer, "SETTLE_SECONDS", 0)
    options = ("--rank", 4, "--parameters", "20K")
    records, said = records_of(tmp_path / "records.jsonl", *options, command="optimizer")
    assert "without deepspeed: ModuleNotFoundError" in said and "%mix" in said
    assert [r["optimizer"] for r in records] == ["ktft", "torch-fused", "torch-foreach", "torch"]
    for r in records:
        assert (r["layers"], r["tensors"], r["parameters"]) == (3, 18, 3 * 4 * 3 * 4 * (64 + 96))
        assert r["gbs"] == pytest.approx(28 * r["parameters"] / r["ms"] / 1e6, rel=1e-3)
        assert r["read_gbs"] > 0 and r["mix_gbs"] > 0 and r["ratio"] > 0
        assert r["percent_of_mix"] == pytest.approx(100 * r["gbs"] / r["mix_gbs"], rel=1e-3)
    for options, message in (
        (["--parameters", "many"], "'many' is not a size"),
        (["--parameters", "100T"], "give fewer --parameters"),
        (["--peer", "adam"], "torch-foreach"),
    ):
        assert message in refused("bench", "optimizer", "--shape", TINY, *options)


def test_an_installed_package_says_where_the_benchmarks_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel has the command but not the benchmarks."""
    monkeypatch.setattr(bench_command, "CHECKOUT", tmp_path)
    app = typer.Typer()
    app.callback()(lambda: None)
    bench_command.add_to(app)
    done = CliRunner().invoke(app, ["bench", "kernels", "--shape", "small"])
    assert isinstance(done.exception, ValueError) and "Clone the repository" in str(done.exception)

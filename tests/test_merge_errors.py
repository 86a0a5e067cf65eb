"""`ktft merge` where it cannot, and where it is stopped: an error that names the cause; nothing that looks whole."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import edit_json
from dying import forked
from given import Checkpoint
from holding import held_by_another
from merging import contents, merge, run, write_adapter
from quantize import quantize
from safetensors.torch import load_file, save_file
from tiny import write_checkpoint
from torch import Tensor

from ktft.adapters import merge as merging_module
from ktft.adapters.merge import REPORT, STATE
from ktft.checkpoint import files as checkpoint_files
from ktft.checkpoint.files import TEMPORARY

FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
EXPERT = "base_model.model.model.layers.1.mlp.experts.3.up_proj"


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FP8, so that one matrix is several tensors. Copy it before changing it."""
    return quantize(tiny_checkpoint("dsv3"), tmp_path_factory.mktemp("base"), "fp8")[0]


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For `base`. Copy it before changing it."""
    return write_adapter(base, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def whole(base: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a merge that nothing disturbed."""
    return contents(merge(base, adapter, tmp_path_factory.mktemp("whole") / "out", "--no-check"))


@pytest.fixture(autouse=True)
def untouched(base: Path, adapter: Path) -> Iterator[None]:
    """No test changes what it is given."""
    before = contents(base), contents(adapter)
    yield
    assert (contents(base), contents(adapter)) == before


def refused(base: Path, adapter: Path, out: Path, *options: str) -> str:
    """The error; there is no OUT, and nothing beside it where nothing was begun."""
    status, output = run(base, adapter, out, "--no-check", *options)
    assert status == 2, output
    assert not out.exists()
    return output


def change(folder: Path, how: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / FILE)
    how(tensors)
    save_file(tensors, folder / FILE)


def rename(tensors: dict[str, Tensor], old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


A, B = f"{EXPERT}.lora_A.weight", f"{EXPERT}.lora_B.weight"
ATTENTION = "base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "tensor missing": (
        lambda d: change(d, lambda t: t.pop(B)),
        f"1 tensors of the model are missing, the first is {B}",
    ),
    "tensor left over": (
        lambda d: change(d, lambda t: t.update({A.replace("experts.3", "experts.8"): t[A].clone()})),
        "1 tensors are left over, the first is base_model.model.model.layers.1.mlp.experts.8.up_proj.lora_A.weight",
    ),
    "tensor renamed": (
        lambda d: change(d, lambda t: rename(t, ATTENTION, ATTENTION.replace("o_proj", "n_proj"))),
        f"are missing, the first is {ATTENTION}; 1 tensors are left over",
    ),
    "NaN": (lambda d: change(d, lambda t: t[B].fill_(float("nan"))), f"{FILE}: {B} holds NaN or Inf"),
    "Inf in attention": (lambda d: change(d, lambda t: t[ATTENTION].fill_(float("inf"))), f"{ATTENTION} holds NaN"),
    "rank of one tensor": (
        lambda d: change(d, lambda t: t.update({A: t[A][:3].clone()})),
        f"{A} has shape (3, 64) in the adapter and (4, 64) in the model",
    ),
    "rank of the config": (
        lambda d: edit_json(d / CONFIG, r=8),
        "says r: 8, but its tensors were saved with r: 4; set it back",
    ),
    "target of the config": (
        lambda d: edit_json(d / CONFIG, target_modules=["up_proj", "down_proj"]),
        "are left over, the first is base_model.model.model.layers.0.mlp.gate_proj.lora_A.weight",
    ),
    "truncated": (lambda d: os.truncate(d / FILE, 5000), f"{FILE} is not a whole safetensors file"),
    "cut off": (lambda d: os.truncate(d / FILE, (d / FILE).stat().st_size - 4), f"{FILE} is truncated: tensor"),
    "no file": (lambda d: (d / FILE).unlink(), f"has no {FILE}"),
    "PiSSA": (lambda d: edit_json(d / CONFIG, init_lora_weights="pissa"), "changed the base weights before training"),
    "tokens": (
        lambda d: edit_json(d / CONFIG, trainable_token_indices=[1]),
        "trainable tokens (trainable_token_indices) cannot",
    ),
    "not LoRA": (
        lambda d: (d / CONFIG).write_text('{"peft_type": "IA3"}'),
        "holds a PeftType.IA3 adapter",
    ),
    "module without a place": (
        lambda d: edit_json(d / CONFIG, modules_to_save=["lm_head"]),
        "1 tensors of the model are missing, the first is base_model.model.lm_head.weight",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_adapter(base: Path, adapter: Path, tmp_path: Path, damage: str) -> None:
    hurt, out = shutil.copytree(adapter, tmp_path / "adapter"), tmp_path / "out"
    how, message = DAMAGES[damage]
    how(hurt)
    output = refused(base, hurt, out)
    assert message in output and str(tmp_path) in output
    written = contents(tmp_path / "out.merging") if (tmp_path / "out.merging").exists() else {}
    assert not [name for name in written if name != STATE], "nothing was begun"


def test_an_adapter_of_another_model(base: Path, adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    other = write_checkpoint("dsv3", tmp_path / "experts", n_routed_experts=4, n_group=2, topk_group=1)
    assert "the first is base_model.model.model.layers.1.mlp.experts.4.down_proj" in refused(other, adapter, out)
    other = write_checkpoint("dsv3", tmp_path / "layers", num_hidden_layers=4)
    assert "are missing, the first is base_model.model.model.layers.3.mlp.experts.0" in refused(other, adapter, out)
    other = write_checkpoint("dsv3", tmp_path / "width", moe_intermediate_size=64)
    assert " in the adapter and (" in refused(other, adapter, out)


def test_tied_weights(tmp_path: Path) -> None:
    base = write_checkpoint("qwen3moe", tmp_path / "base", tie_word_embeddings=True)
    adapter = write_adapter(base, tmp_path / "adapter", modules_to_save=["embed_tokens"])
    said = refused(base, adapter, tmp_path / "out")
    assert "changes model.embed_tokens.weight, which is tied to another weight" in said


def test_commands_that_are_refused(base: Path, adapter: Path, tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "--format is 'k5'; supported: same, bf16" in refused(base, adapter, out, "--format", "k5")
    assert "lie within each other" in refused(base, adapter, base / "merged")
    assert "lie within each other" in refused(base, adapter, adapter / "merged")
    assert "is not a directory with a config.json" in refused(tmp_path, adapter, out)
    assert "adapter " in refused(base, tmp_path / "nothing", out)
    gptq = quantize(tiny_checkpoint("mixtral"), tmp_path, "gptq")[0]
    for_gptq = write_adapter(gptq, tmp_path / "for_gptq")
    assert "is gptq, whose codes are calibrated on data" in refused(gptq, for_gptq, out)
    packed = merge(base, adapter, tmp_path / "packed", "--format", "k4", "--no-check")
    assert "is a converted checkpoint; give the original one" in refused(packed, adapter, out)

    full, staging = tmp_path / "full", tmp_path / "out.merging"
    for folder in (full, staging):
        folder.mkdir()
        (folder / "thesis.txt").touch()
    status, output = run(base, adapter, full)
    assert status == 2 and "full exists; give a new or empty directory" in output
    assert contents(full) == {"thesis.txt": b""}
    assert "holds thesis.txt, which no merge wrote" in refused(base, adapter, out)
    (staging / "thesis.txt").unlink()
    with held_by_another(staging, tmp_path / "out.merging.ktft-lock") as other:
        assert f"out.merging is in use by process {other.pid}" in refused(base, adapter, out)
    merge(base, adapter, out, "--no-check")


def test_a_damaged_base(base: Path, adapter: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    hurt, out = shutil.copytree(base, tmp_path / "base"), tmp_path / "out"
    shard = sorted(hurt.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    name = next(n for n in tensors if n.endswith("weight_scale_inv"))
    save_file(tensors | {name: torch.full_like(tensors[name], float("nan"))}, shard)
    assert f"{name.removesuffix('_scale_inv')}: it holds NaN or Inf" in refused(hurt, adapter, out)
    shutil.copy(base / shard.name, shard)
    assert contents(merge(hurt, adapter, out, "--no-check")) == whole
    os.truncate(shard, 5000)
    assert f"{shard} is not a whole safetensors file" in refused(hurt, adapter, tmp_path / "new")


# --- interruptions ----------------------------------------------------------------------------------------------------


def count_calls(stop_after: int | None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note what a merge does to the disk. It is killed before call number `stop_after`, or half way through a write."""
    made: list[str] = []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            original = getattr(os, name)
            if name not in ("open", "pwrite", "fsync", "replace", "rename"):
                return original

            def call(*args: Any, **kwargs: Any) -> Any:
                if len(made) == stop_after:
                    if name == "pwrite":
                        original(args[0], args[1][: len(args[1]) // 2], args[2])
                    os.kill(os.getpid(), signal.SIGKILL)
                made.append(name)
                return original(*args, **kwargs)

            return call

    monkeypatch.setattr(checkpoint_files, "os", Counted())
    monkeypatch.setattr(merging_module, "os", Counted())
    return made


@pytest.mark.parametrize("storage", ["same", pytest.param("k4", marks=pytest.mark.full)])
def test_killed_at_any_call_it_goes_on_to_the_same_bytes(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str
) -> None:
    command = (base, adapter, tmp_path / "whole", "--format", storage, "--no-check")
    with monkeypatch.context() as patch:
        calls = count_calls(None, patch)
        expected = contents(merge(*command))
    assert calls[-2:] == ["open", "fsync"] and calls.count("rename") == 1
    last, half_written = len(calls) - 1, 0
    moments = {*range(0, last, last // 6), last, calls.index("rename"), calls.index("rename") + 1}
    for moment in sorted(moments):
        out = tmp_path / f"killed{moment}"

        def killed(out: Path = out, moment: int = moment) -> int:
            count_calls(moment, monkeypatch)
            return run(base, adapter, out, "--format", storage, "--no-check")[0]

        assert forked(killed, tmp_path / "log") == -signal.SIGKILL
        staging = tmp_path / f"killed{moment}.merging"
        assert out.exists() == (moment > calls.index("rename")) != staging.exists()
        if out.exists():
            assert contents(out) == expected
            continue
        half_written += any(name.endswith(TEMPORARY) for name in contents(staging))
        assert contents(merge(base, adapter, out, "--format", storage, "--no-check")) == expected, moment
        assert not staging.exists()
    assert half_written > 0


def test_another_merge_starts_over(base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed merge left is not taken for another adapter's, nor for another format's."""
    other = write_adapter(base, tmp_path / "other", size=0.06)
    expected = contents(merge(base, other, tmp_path / "whole", "--no-check"))
    for options in ((), ("--format", "bf16"), ("--format", "k4")):

        def killed(options: tuple[str, ...] = options) -> int:
            monkeypatch.setattr(merging_module.Merge, "publish", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            return run(base, adapter, tmp_path / "out", "--no-check", *options)[0]

        assert forked(killed, tmp_path / "log") == -signal.SIGKILL
        assert len(contents(tmp_path / "out.merging")) > 5
        if not options:
            files = sorted((tmp_path / "out.merging").glob("*.safetensors"))
            shutil.copytree(tmp_path / "out.merging", tmp_path / "go_on.merging")
            before = [(tmp_path / "go_on.merging" / file.name).stat().st_mtime_ns for file in files]
            merge(base, adapter, tmp_path / "go_on", "--no-check")
            after = [(tmp_path / "go_on" / file.name).stat().st_mtime_ns for file in files]
            assert after == before, "what is finished is not written again"
        assert contents(merge(base, other, tmp_path / "out", "--no-check")) == expected
        shutil.rmtree(tmp_path / "out")


def test_full_disk(base: Path, adapter: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    shards = [name for name in whole if name.endswith(".safetensors")]
    size, out, log = max(len(whole[name]) for name in shards), tmp_path / "out", tmp_path / "log"

    def limited() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, size - 1))
        status, output = run(base, adapter, out, "--no-check")
        os.write(1, output.encode())
        return status

    assert forked(limited, log) == 2
    assert "bytes are still to be written" in log.read_text() and "run the same command again" in log.read_text()
    kept = contents(tmp_path / "out.merging")
    assert not out.exists() and not [name for name in kept if name.endswith(TEMPORARY) or name == REPORT]
    assert all(kept[name] == whole[name] for name in shards if name in kept)
    assert contents(merge(base, adapter, out, "--no-check")) == whole

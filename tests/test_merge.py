"""`ktft merge`: base + adapter in one checkpoint, in every format, and what it says where it cannot."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapted
import pytest
import torch
from contract import relative
from given import Checkpoint, RunPython
from merging import contents, logits, merge, merged_by_hand, names_of, run, stock, weight_of, write_adapter
from quantize import is_expert, is_linear, quantize, read_all, write
from safetensors.torch import load_file
from stock import same_choices
from torch import Tensor

import ktft
from ktft.adapters.deltas import LoraDelta
from ktft.adapters.merge import REPORT
from ktft.checkpoint.reader import INDEX_NAME, CheckpointReader
from ktft.config import PROJECTIONS
from ktft.formats import FORMAT_TRAITS
from ktft.model.experts import find_experts

CASES = {
    "qwen3moe": ("qwen3moe", None),
    "dsv2": ("dsv2", None),
    "dsv3-fp8": ("dsv3", "fp8"),
    "dsv3-int4": ("dsv3", "int4-32"),
    "gpt_oss-mxfp4": ("gpt_oss", "mxfp4"),
}


class Case:
    """A base model, the same dequantized, and an adapter."""

    def __init__(self, base: Path, plain: Path, folder: Path) -> None:
        self.base, self.plain = base, plain
        self.adapter = write_adapter(base, folder / "adapter")
        self.by_hand = merged_by_hand(plain, self.adapter)


Cases = Callable[[str], Case]
load = functools.partial(adapted.load, expert_format=None)


@pytest.fixture(scope="module")
def case(tiny_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """Made once; copy before changing."""

    @functools.cache
    def make(name: str) -> Case:
        (family, scheme), folder = CASES[name], tmp_path_factory.mktemp(name)
        base = plain = tiny_checkpoint(family)
        if scheme is not None:
            base, plain, _ = quantize(base, folder, scheme, is_linear if scheme == "fp8" else is_expert)
        return Case(base, plain, folder)

    return make


def experts_of(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if hasattr(module, "gate_up_proj") and "experts" in name]


# --- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_bf16_is_the_sum_and_loads_in_stock_transformers(case: Cases, tmp_path: Path, name: str) -> None:
    given = case(name)
    before = contents(given.base)
    out = merge(given.base, given.adapter, tmp_path / "out", "--format", "bf16")
    found = stock(out)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    names = names_of(given.adapter)
    base = stock(given.plain)
    assert len(names) > 20 and {p for n in names for p in PROJECTIONS if ".experts." in n and n.endswith(p)}
    for module in names:
        expected = weight_of(given.by_hand, module)
        assert relative(weight_of(found, module), expected) < 0.003
        assert relative(weight_of(base, module), expected) > 0.01, "the adapter is not trivial"
    same_choices(given.by_hand, found, experts_of(found))
    assert relative(logits(given.by_hand), logits(base)) > 0.1
    assert relative(logits(found), logits(given.by_hand)) <= 0.01
    assert contents(given.base) == before
    assert not list(tmp_path.glob("*.merging"))


@pytest.mark.parametrize("name", CASES)
def test_same_keeps_layout_and_formats(case: Cases, tmp_path: Path, name: str) -> None:
    given = case(name)
    out = merge(given.base, given.adapter, tmp_path / "out")
    old, new = contents(given.base), contents(out)
    assert {file for file in old if new.get(file) != old[file]} == {f for f in old if f.endswith(".safetensors")}
    assert new.keys() - old.keys() == {REPORT}
    before, after = (CheckpointReader.from_directory(path) for path in (given.base, out))
    places = [[(e.name, e.file.name, e.dtype, e.shape) for e in r.tensors.values()] for r in (before, after)]
    assert places[0] == places[1]
    changed = {n for n in before.tensors if not torch.equal(_bytes(before.read(n)), _bytes(after.read(n)))}
    assert not [n for n in changed if "norm" in n or "embed" in n or "gate.weight" in n or "lm_head" in n]
    model, kind = load(out, expert_format="bf16"), (CASES[name][1] or "bf16").partition("-")[0]
    for module in names_of(given.adapter):
        experts, _, place = module.rpartition(".experts.")
        limit = FORMAT_TRAITS[kind].error_limit if experts or kind == "fp8" else 0.003
        if experts:
            expert, projection = place.split(".")
            weight = model.get_submodule(f"{experts}.experts").layer.dequantize(int(expert), projection)
        else:
            weight = model.get_parameter(f"{module}.weight").data
        assert relative(weight, weight_of(given.by_hand, module)) < 1.3 * limit, module
    report = json.loads((out / REPORT).read_text())
    assert report["check"]["method"] == "logits" and report["check"]["error"] < report["check"]["effect"]
    assert report["weights"].keys() == set(names_of(given.adapter))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(("name", "expert_format"), [("qwen3moe", "k4"), ("dsv3-fp8", "int8"), ("gpt_oss-mxfp4", "k4")])
def test_packed_for_ktft(case: Cases, tmp_path: Path, name: str, expert_format: str) -> None:
    given = case(name)
    out = merge(given.base, given.adapter, tmp_path / "out", "--format", expert_format)
    model = load(out)
    for experts, module in find_experts(model).items():
        assert module.layer.format == expert_format
        for projection in PROJECTIONS:
            expected = weight_of(given.by_hand, f"{experts}.5.{projection}")
            assert relative(module.layer.dequantize(5, projection), expected) < FORMAT_TRAITS[expert_format].error_limit
    attention = "model.layers.1.self_attn.o_proj"
    assert relative(model.get_parameter(f"{attention}.weight"), weight_of(given.by_hand, attention)) < 0.04
    ktft.get_peft_model(model, adapted.lora_config(r=2))  # trains on
    with pytest.raises(ValueError, match=r"shard adapter_\w+\.\w+ was converted, but the checkpoint has"):
        load(given.base, expert_checkpoint=str(out))


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "rslora": ("qwen3moe", {"use_rslora": True}),
    "patterns": ("dsv2", {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"gate_proj": 3, "o_proj": 20}}),
    "only up of a shared matrix": ("gpt_oss", {"target_modules": ["up_proj", "q_proj"]}),
    "whole modules": ("qwen3moe", {"target_modules": ["experts"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "attention alone": ("dsv2", {"target_modules": ["o_proj"]}),
}


@pytest.mark.parametrize("options", OPTIONS)
def test_options(tiny_checkpoint: Checkpoint, tmp_path: Path, options: str) -> None:
    family, given = OPTIONS[options]
    base = tiny_checkpoint(family)
    adapter = write_adapter(base, tmp_path / "adapter", **given)
    found, expected = stock(merge(base, adapter, tmp_path / "out")), merged_by_hand(base, adapter)
    for name, parameter in expected.named_parameters():
        assert relative(found.get_parameter(name), parameter) < 0.003, name
    untouched = [n for n, p in stock(base).named_parameters() if torch.equal(p, expected.get_parameter(n))]
    assert untouched and all(torch.equal(found.get_parameter(n), expected.get_parameter(n)) for n in untouched)


def test_a_dequantized_checkpoint_has_no_code_left(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Layers for multi-token prediction too, which no adapter reaches, and scales of activations go."""
    base = quantize(tiny_checkpoint("dsv3"), tmp_path / "fp8", "fp8")[0]
    tensors = read_all(base)
    spare = {n.replace("layers.2.", "layers.3."): t for n, t in tensors.items() if "layers.2.mlp.experts.1." in n}
    tensors |= spare | {"model.layers.1.self_attn.o_proj.input_scale": torch.ones(1)}
    config = json.loads((base / "config.json").read_text())
    base = write(base, tmp_path / "base", tensors, config["quantization_config"])
    config["num_nextn_predict_layers"] = 1
    (base / "config.json").write_text(json.dumps(config))
    adapter = write_adapter(base, tmp_path / "adapter")
    found = read_all(merge(base, adapter, tmp_path / "out", "--format", "bf16", "--no-check"))
    assert found.keys() == {n for n in tensors if not n.endswith(("_scale_inv", "input_scale"))}
    assert {t.dtype for t in found.values()} <= {torch.bfloat16, torch.float32}
    name = "model.layers.3.mlp.experts.1.up_proj.weight"
    exact = tensors[name].float() * tensors[name + "_scale_inv"].repeat_interleave(128, 0)[:32, :1]
    assert relative(found[name].float(), exact) < 0.003
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())["weight_map"]
    assert index.keys() == found.keys()


def test_loads_without_ktft(case: Cases, tmp_path: Path, fork_python: RunPython) -> None:
    given = case("gpt_oss-mxfp4")
    out = merge(given.base, given.adapter, tmp_path / "out", "--format", "bf16", "--no-check")
    code = (
        "import sys, torch\nfrom transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(out)!r}, dtype=torch.float32)\n"
        "ids = torch.arange(3, 67).reshape(4, 16)\n"
        f"torch.save(model(input_ids=ids, use_cache=False).logits, {str(tmp_path / 'logits.pt')!r})\n"
        "assert not [name for name in sys.modules if name.startswith('ktft.model')]"
    )
    done = fork_python(code)
    assert done.returncode == 0, done.stderr
    assert relative(torch.load(tmp_path / "logits.pt"), logits(stock(out))) < 1e-5


# --- what survived ----------------------------------------------------------------------------------------------------


def test_survival_is_measured(case: Cases, tmp_path: Path) -> None:
    """The report's numbers, from both checkpoints as transformers sees them."""
    given = case("qwen3moe")
    out = merge(given.base, given.adapter, tmp_path / "out", "--no-check")
    report = json.loads((out / REPORT).read_text())
    base, found = stock(given.base), stock(out)
    tensors = load_file(given.adapter / "adapter_model.safetensors")
    for name in names_of(given.adapter)[::7]:
        delta = weight_of(given.by_hand, name) - weight_of(base, name)
        moved = weight_of(found, name) - weight_of(base, name)
        measured = report["weights"][name]
        assert measured["projected"] == pytest.approx(float((moved * delta).sum() / delta.square().sum()), abs=1e-3)
        assert measured["relative_error"] == pytest.approx(relative(moved, delta), rel=0.02)
        basis = torch.linalg.svd(tensors[f"base_model.model.{name}.lora_A.weight"], full_matrices=False)[2].T
        assert measured["lost"] == pytest.approx(float(((moved - delta) @ basis).norm() / delta.norm()), rel=0.02)
    groups = {(group["layer"], group["projection"]): group for group in report["groups"]}
    assert groups["model.layers.2.mlp.experts", "up_proj"]["weights"] == 8
    lost = [group["lost"] for group in report["groups"]]
    assert lost == sorted(lost, reverse=True) and {group["verdict"] for group in report["groups"]} == {"ok"}


def test_a_drowned_adapter_is_refused(case: Cases, tmp_path: Path) -> None:
    given, out = case("dsv3-int4"), tmp_path / "out"
    adapter = write_adapter(given.base, tmp_path / "adapter", size=0.0005)
    status, output = run(given.base, adapter, out, "--no-check")
    assert status == 2 and not out.exists()
    assert "6 of " in output and "merged projections drowned in rounding, the worst is model.layers." in output
    assert "the same command with --allow-drowned takes them" in output
    status, output = run(given.base, adapter, out, "--allow-drowned")
    assert status == 0 and "warning: 6 of " in output
    report = json.loads((out / REPORT).read_text())
    verdicts = {g["projection"] if ".mlp.experts" in g["layer"] else "": g["verdict"] for g in report["groups"]}
    assert {verdicts[name] for name in PROJECTIONS} == {"drowned"}
    assert merge(given.base, adapter, tmp_path / "bf16", "--format", "bf16", "--no-check")


def test_dithering_saves_what_rounding_to_the_nearest_would_drop(case: Cases, tmp_path: Path) -> None:
    given = case("dsv3-fp8")
    adapter = write_adapter(given.base, tmp_path / "adapter", size=0.003)
    status, output = run(given.base, adapter, tmp_path / "out", "--no-check")
    assert status == 0 and "merged projections are weak" in output
    report = json.loads((tmp_path / "out" / REPORT).read_text())
    dithered = [g for g in report["groups"] if g["rounding"] == "dithered"]
    assert dithered and all(abs(g["projected"] - 1) < 0.15 and g["relative_error"] > 1 for g in dithered)
    again = merge(given.base, adapter, tmp_path / "again", "--no-check")
    assert contents(again) == contents(tmp_path / "out"), "the same random numbers"


# --- the check --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["logits", "layers"])
def test_a_wrong_sum_is_found(case: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Whole, and layer by layer as for a model that does not fit in memory."""
    given, honest = case("qwen3moe"), LoraDelta.matrix
    if method == "layers":
        monkeypatch.setattr("ktft.system.available_memory", lambda: 0)
    good = merge(given.base, given.adapter, tmp_path / "good")
    check = json.loads((good / REPORT).read_text())["check"]
    assert check["method"] == method and 0.0005 < check["error"] < 0.01 <= check["limit"] < 0.03
    monkeypatch.setattr(LoraDelta, "matrix", lambda self, base: honest(self, base) * 0.9)
    status, output = run(given.base, given.adapter, tmp_path / "bad")
    assert status == 2 and "the merged model is not the base model with the adapter: " in output
    assert not (tmp_path / "bad").exists()
    merge(given.base, given.adapter, tmp_path / "bad", "--no-check")

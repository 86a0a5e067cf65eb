"""Routed experts from GGUF files: every type and layout, split files, parts, plan, convert, training."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import distance, load, logits, tensors_of
from commands import refused, run
from given import Checkpoint, Train, TrainYaml
from packing import round_trip
from planning import plan
from quantize import is_expert, read_all
from safetensors.torch import save_file
from tiny import write_checkpoint
from torch import Tensor

from ktft.checkpoint import gguf_format
from ktft.checkpoint.cache import MANIFEST
from ktft.checkpoint.families import ROWS
from ktft.checkpoint.gguf_source import TYPES, GgufReader, nearest_format
from ktft.checkpoint.reader import INDEX_NAME
from ktft.config import EXPERT_FORMATS, PROJECTIONS
from ktft.model.experts import find_experts, layer_number

gguf = pytest.importorskip("gguf")
from ggufs import Values, write_gguf  # noqa: E402

BLOCK = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2}  # K-quants have blocks of 256
FAMILIES = {"qwen3moe": "qwen3moe", "dsv3": "deepseek2"}
FEWER = {"qwen3moe": {"num_experts": 4}, "dsv3": {"n_routed_experts": 4, "n_group": 2, "topk_group": 1}}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of two families whose rows are whole blocks of every type."""
    folder = tmp_path_factory.mktemp("wide")
    return {name: write_checkpoint(name, folder / name, **BLOCK, **FEWER[name]) for name in FAMILIES}


def each_weight(model: Any) -> Iterator[tuple[tuple[int, int, str], Tensor]]:
    """(layer, expert, projection), and what is packed for it, for the experts that the process holds."""
    for name, module in find_experts(model).items():
        for place, expert in enumerate(module.layer.held.numbers):
            for projection in PROJECTIONS:
                yield (layer_number(name), expert, projection), module.layer.dequantize(place, projection)


def check_values(model: Any, values: Values, fmt: str, tolerance: float | None = None) -> None:
    """The packed experts are those that packing the values that gguf gives would make, bit for bit."""
    found = dict(each_weight(model))
    assert found and found.keys() <= values.keys()
    for place, weight in found.items():
        assert torch.equal(weight, round_trip(fmt, values[place])), place
        if tolerance is not None:
            assert distance(weight, values[place]) <= tolerance, place
    assert {module.layer.format for module in find_experts(model).values()} == {fmt}


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("kind", "fmt", "tolerance"),
    [
        ("F32", "bf16", 0.004),
        ("F16", "bf16", 0.004),
        ("BF16", "bf16", 0),
        ("Q8_0", "int8", 0.02),
        ("Q6_K", "int8", 0.02),
        ("Q5_K", "int8", 0.02),
        ("Q4_K", "k4", 0.15),
        ("Q4_0", "k4", 0.15),
        ("Q3_K", "k4", 0.15),
        ("IQ4_XS", "k4", 0.15),
        ("MXFP4", "mxfp4", 0),
    ],
)
def test_experts_are_the_dequantized_values_packed(
    wide: dict[str, Path], tmp_path: Path, family: str, kind: str, fmt: str, tolerance: float
) -> None:
    if kind not in gguf_format.readable_types():
        pytest.skip(f"the installed gguf has no {kind}")
    values = write_gguf(wide[family], tmp_path / "model.gguf", FAMILIES[family], kind)
    model = load(wide[family], expert_checkpoint=str(tmp_path / "model.gguf"), expert_format=None)
    check_values(model, values, fmt, tolerance)


def test_a_format_that_is_asked_for_is_taken(wide: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    values = write_gguf(
        wide["qwen3moe"], path, "qwen3moe", {"gate_proj": "Q4_K", "up_proj": "Q4_K", "down_proj": "Q6_K"}
    )
    assert GgufReader(path).types == {"Q4_K": pytest.approx(2 / 3), "Q6_K": pytest.approx(1 / 3)}
    for fmt in (None, "int8", "bf16"):
        check_values(load(wide["qwen3moe"], expert_checkpoint=str(path), expert_format=fmt), values, fmt or "k4")


@pytest.mark.parametrize(
    ("family", "architecture", "layout", "kind"),
    [
        ("qwen3moe", "qwen3moe", "merged", "Q8_0"),
        ("mixtral", "llama", "separate", "Q8_0"),
        ("mixtral", "llama", "stacked", "F16"),
        ("gpt_oss", "gpt-oss", "stacked", "MXFP4"),
    ],
)
def test_layouts(
    tiny_checkpoint: Checkpoint, tmp_path: Path, family: str, architecture: str, layout: str, kind: str
) -> None:
    """gpt-oss has biases, and its own checkpoints gates and ups in turns."""
    if kind not in gguf_format.readable_types():
        pytest.skip(f"the installed gguf has no {kind}")
    base, path = tiny_checkpoint(family), tmp_path / "model.gguf"
    values = write_gguf(base, path, architecture, kind, layout)
    model = load(base, expert_checkpoint=str(path), expert_format="bf16")
    check_values(model, values, "bf16")
    if kind == "F16":  # the tiny weights are bf16 numbers, most of which fp16 holds
        assert distance(logits(model), logits(load(base))) < 0.01
    for own, other in zip(find_experts(model).values(), find_experts(load(base)).values(), strict=True):
        for expert, projection in itertools.product(range(8), PROJECTIONS):
            if own.layer.biases:
                assert torch.equal(own.layer.bias(expert, projection), other.layer.bias(expert, projection))


def test_every_type_has_a_format_and_every_architecture_a_name() -> None:
    readable = set(gguf_format.readable_types())
    assert readable <= set(TYPES), "a type that gguf reads and ktft does not name"
    assert {nearest_format(kind) for kind in readable} <= set(EXPERT_FORMATS)
    if "MXFP4" in readable:  # earlier releases of gguf lack some architectures too, whose names are not asked of it
        assert {row.architecture for row in ROWS if row.architecture is not None} <= set(gguf.MODEL_ARCH_NAMES.values())


def test_rows_are_decoded_a_few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = torch.from_numpy(gguf.quantize(torch.randn(150, 64).numpy(), gguf.GGMLQuantizationType.Q8_0)).flatten()
    whole = torch.from_numpy(gguf.dequantize(raw.view(150, -1).numpy(), gguf.GGMLQuantizationType.Q8_0))
    seen: list[int] = []
    dequantize = gguf.dequantize
    monkeypatch.setattr(gguf, "dequantize", lambda rows, kind: (seen.append(len(rows)), dequantize(rows, kind))[1])
    assert torch.equal(gguf_format.dequantize(raw, "Q8_0", (150, 64)), whole)
    assert seen == [64, 64, 22]


# --- files ------------------------------------------------------------------------------------------------------------


def test_split_files(wide: dict[str, Path], tmp_path: Path) -> None:
    base = wide["dsv3"]
    values = write_gguf(base, tmp_path / "model.gguf", "deepseek2", "Q8_0", split=2)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [path.name for path in parts] == ["model-00001-of-00002.gguf", "model-00002-of-00002.gguf"]
    (tmp_path / "mmproj-model-f16.gguf").touch()  # what sees images lies beside the language model
    for place in (tmp_path, *parts):
        check_values(load(base, expert_checkpoint=str(place), expert_format="bf16"), values, "bf16")


def test_a_process_reads_the_experts_that_it_holds(
    wide: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = write_gguf(wide["qwen3moe"], tmp_path / "model.gguf", "qwen3moe", "Q4_K")
    read: list[int] = []
    fill = GgufReader._fill
    monkeypatch.setattr(
        GgufReader, "_fill", lambda self, entry, at, view: (read.append(len(view)), fill(self, entry, at, view))
    )
    model = load(wide["qwen3moe"], expert_checkpoint=str(tmp_path), expert_format="int8", part=(1, 3))
    check_values(model, values, "int8")
    assert {place[1] for place, _ in each_weight(model)} == {1, 2}
    assert sum(read) == 2 * 2 * 3 * 256 * 256 * 144 // 256  # layers, experts, matrices, bytes of a block of 256
    assert max(read) == 256 * 256 * 144 // 256, "one matrix of one expert at once"


def test_the_model_needs_no_experts_of_its_own(wide: dict[str, Path], tmp_path: Path) -> None:
    base, bare = wide["dsv3"], tmp_path / "bare"
    write_gguf(base, tmp_path / "model.gguf", "deepseek2", "Q8_0")
    bare.mkdir()
    for path in base.iterdir():
        if path.suffix != ".safetensors" and path.name != INDEX_NAME:
            (bare / path.name).write_bytes(path.read_bytes())
    others = {name: tensor for name, tensor in read_all(base).items() if not is_expert(name)}
    save_file(others, bare / "model.safetensors", metadata={"format": "pt"})
    source = {"expert_checkpoint": str(tmp_path / "model.gguf"), "expert_format": None}
    assert torch.equal(logits(load(bare, **source)), logits(load(base, **source)))


def test_layers_for_multi_token_prediction_are_ignored(wide: dict[str, Path], tmp_path: Path) -> None:
    base, path = wide["dsv3"], tmp_path / "model.gguf"

    def predict(tensors: dict[str, Any]) -> None:
        last = {name.replace("blk.1.", "blk.2."): each for name, each in tensors.items() if "blk.1." in name}
        tensors |= last

    values = write_gguf(base, path, "deepseek2", fields={"block_count": 3, "nextn_predict_layers": 1}, change=predict)
    check_values(load(base, expert_checkpoint=str(path), expert_format=None), values, "int8")


# --- commands and training --------------------------------------------------------------------------------------------


def test_convert(wide: dict[str, Path], tmp_path: Path) -> None:
    base, path, target = wide["dsv3"], tmp_path / "model.gguf", tmp_path / "packed"
    write_gguf(base, path, "deepseek2", "Q4_K")
    command = ["convert", base, target, "--expert-checkpoint", path, "--threads", "1"]
    status, said = run(*command, "--report")
    assert status == 0, said
    manifest = json.loads((target / MANIFEST).read_text())
    assert manifest["expert_format"] == "k4" and manifest["source_directory"] == str(path)
    assert manifest["source"]["experts/model.gguf"]["bytes"] == path.stat().st_size
    assert not [name for name in read_all(target) if is_expert(name)]
    expected = logits(load(base, expert_checkpoint=str(path), expert_format=None))
    assert torch.equal(logits(load(target, expert_format=None)), expected)
    assert torch.equal(logits(load(base, expert_checkpoint=str(target), expert_format=None)), expected)
    assert "all checksums match" in run(*command, "--check")[1]

    status, said = run("verify", target, "--threads", "1", "--json")
    told = json.loads(said[said.index("{") :])
    assert status == 0 and told["layers"][0]["quantization"]["up_proj"]["relative_rms"] > 0.01, said
    other = tmp_path / "other.gguf"
    write_gguf(base, other, "deepseek2", "Q8_0")
    assert "has other experts than --source" in refused("verify", target, "--source", other, "--threads", "1")
    assert "shard experts/" in refused("convert", base, target, "--expert-checkpoint", other, "--format", "k4")
    assert "shard experts/model.gguf was converted" in refused("convert", base, target)
    assert "is a conversion itself" in refused("convert", base, tmp_path / "x", "--expert-checkpoint", target)


def test_plan(wide: dict[str, Path], tmp_path: Path) -> None:
    base, path, recipe = wide["qwen3moe"], tmp_path / "model.gguf", tmp_path / "train.yaml"
    write_gguf(base, path, "qwen3moe", "Q4_K")
    recipe.write_text(f"kt_config: {{expert_checkpoint: {path}}}\nper_device_train_batch_size: 1\n")
    told = plan(base, recipe, code=0)
    experts = 2 * 4 * 3 * 256 * 256 * 144 // 256
    others = sum(t.nbytes for name, t in read_all(base).items() if not is_expert(name))
    assert told["disk"]["checkpoint_bytes"] == experts + others
    assert "k4 *" in run("plan", base, recipe)[1]
    write_gguf(base, path, "qwen3moe", "Q4_K", fields={"expert_count": 9})
    assert "qwen3moe.expert_count is 9, the model's config has 4" in refused("plan", base, recipe)


def test_llamafactory_trains_on_them(
    wide: dict[str, Path], train_yaml: TrainYaml, train: Train, tmp_path: Path
) -> None:
    """From a YAML, without a word about the format, with the experts of a file in parts."""
    write_gguf(wide["dsv3"], tmp_path / "model.gguf", "deepseek2", "Q4_K", split=2)
    settings = {"expert_checkpoint": str(tmp_path / "model-00001-of-00002.gguf"), "threads": 1}
    log = train(train_yaml("dsv3", model_name_or_path=str(wide["dsv3"]), kt_config=settings))
    assert "1 layers x 4, k4" in log
    moved = {name: bool(t.any()) for name, t in tensors_of(tmp_path / "out").items() if "lora_B" in name}
    assert len([name for name in moved if ".mlp.experts." in name]) == 4 * 3 and sum(moved.values()) > len(moved) / 2

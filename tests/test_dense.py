"""Linear weights outside the routed experts that are packed, or in host memory, against ordinary ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from adapted import load, logits, lora_config, randomize, tensors_of
from given import Checkpoint, RunCli, TrainYaml
from host_graphs import HostGraph, record_on_host
from lanes import no_calibration
from quantize import quantize
from runs import logged
from safetensors.torch import load_file, save_file
from stacks import SHOWN_BEFORE, shown_by_the_first_stack
from tiny import write_checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer

import ktft
from ktft import native
from ktft.checkpoint.reader import CheckpointReader
from ktft.config import DENSE_FORMATS, Settings
from ktft.dense.embedding import HostEmbedding, to_device, to_host
from ktft.dense.formats import dense_bytes, layout, may_pack
from ktft.dense.linear import PackedLinear
from ktft.dense.stream import DenseStream
from ktft.lanes.ops import torch_ops
from ktft.native.dense import pack_dense

__all__ = ["no_calibration"]

pytestmark = pytest.mark.usefixtures("no_calibration")
PACKED = ("fp8", "int8", "k4")
PLACED = [{"dense_format": "fp8"}, {"dense_format": "k4"}, {"dense_placement": "host"},
          {"dense_format": "int8", "dense_placement": "host"}]  # fmt: skip
FULL, HOST_INT8 = pytest.mark.full, PLACED[3]
# By default each family has one way, and the first of them all of them
PLACES = [("dsv3", PLACED[0]), ("qwen3moe", PLACED[2]), ("gpt_oss", PLACED[1]), ("glm4", PLACED[3]),
          ("qwen3_5", PLACED[0])]  # fmt: skip
PLACES = [pytest.param(*each, id=f"{each[0]}-{each[1]}") for each in PLACES] + [
    pytest.param(family, way, id=f"{family}-{way}", marks=SHOWN_BEFORE if family == "dsv3" else FULL)
    for family in ("dsv3", "qwen3moe", "gpt_oss", "glm4", "qwen3_5")
    for way in PLACED
    if (family, way) not in PLACES
]


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTFT_EMULATE_GPU", "1")


def packed_linears(model: nn.Module) -> dict[str, PackedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def unpack(model: nn.Module) -> nn.Module:
    """The same model with ordinary layers of the decoded weights."""
    for name, module in packed_linears(model).items():
        model.set_submodule(name, module.to_linear())
    return model


# --- one matrix -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", native.FORMATS)
def test_a_matrix_has_the_values_that_an_expert_would_have(format: str) -> None:
    for rows, cols in ((32, 32), (96, 160), (288, 96), (160, 288)):
        weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)) * 0.02
        layer = native.ExpertLayer(native.runtime(2), num_experts=1, hidden_size=cols, intermediate_size=rows,
                                   format=format, name="expert")  # fmt: skip
        layer.load(0, "up_proj", weight)
        packed, (matrix, size) = pack_dense(native.runtime(2), format, weight), layout(format, rows, cols)
        assert packed.numel() == size == dense_bytes(format, rows, cols) or format == "bf16"
        assert torch.equal(packed, pack_dense(native.runtime(1), format, weight))
        expected = layer.dequantize(0, "up_proj")
        out = torch.full((rows, cols), torch.nan, dtype=torch.bfloat16)
        torch_ops.decode_matrix(format, packed, matrix, out)
        assert torch.equal(out, expected.bfloat16())
        wide = torch.empty(rows, cols)
        torch_ops.decode_matrix(format, packed, matrix, wide)
        assert torch.allclose(wide, expected, rtol=2.0**-8)  # the kernels round products with blocks' scales to bf16


def test_sizes_that_have_no_tiles() -> None:
    assert not may_pack(24, 64) and not may_pack(32, 40) and may_pack(16, 32)
    with pytest.raises(ValueError, match=r"\[24, 64\] is not \[a multiple of 16, a multiple of 32\]"):
        pack_dense(native.runtime(1), "k4", torch.zeros(24, 64))
    assert dense_bytes("k4", 24, 64) == 24 * 64 * 2
    assert PackedLinear(nn.Linear(64, 24, device="meta"), "k4").format == "bf16"


# --- a model ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "settings"), PLACES)
def test_logits_are_those_of_the_decoded_weights(
    tiny_checkpoint: Checkpoint, family: str, settings: dict[str, Any]
) -> None:
    model = load(tiny_checkpoint(family), torch.bfloat16, **settings)
    every, plain = packed_linears(model), load(tiny_checkpoint(family), torch.bfloat16)
    assert any("attn" in name or "attention" in name for name in every)
    changes_head = settings.get("dense_format", "fp8") != "fp8" and not plain.config.tie_word_embeddings
    assert any("lm_head" in name for name in every) == changes_head
    assert not any(name.rpartition(".")[2] in ("gate", "router", "shared_expert_gate") for name in every)
    found = logits(model)
    assert torch.equal(found, logits(unpack(model)))
    exact = "dense_format" not in settings
    assert torch.equal(found, logits(plain)) == exact


@shown_by_the_first_stack
def test_fp8_is_kept_as_released(tmp_path: Path) -> None:
    whole = write_checkpoint("dsv3", tmp_path / "whole", hidden_size=256, moe_intermediate_size=128)
    path, _, weights = quantize(whole, tmp_path, "fp8")
    kept = load(path, torch.bfloat16, dense_format="fp8")
    for name, module in packed_linears(kept).items():
        assert torch.equal(module.decoded(), weights[f"{name}.weight"].bfloat16()), name
    assert {each.format for each in packed_linears(kept).values()} == {"fp8"}
    assert torch.equal(logits(kept), logits(load(path, torch.bfloat16)))
    for settings in ({"dense_placement": "host"}, {"dense_format": "k4"}):
        other = load(path, torch.bfloat16, **settings)
        assert torch.equal(logits(other), logits(unpack(other)))


def test_products_have_the_gradients_of_a_linear_layer() -> None:
    torch.manual_seed(0)
    like = nn.Linear(64, 48, dtype=torch.float32)
    module = PackedLinear(nn.Linear(64, 48, device="meta"), "int8")
    module.weight = nn.Parameter(pack_dense(native.runtime(1), "int8", like.weight.detach()), requires_grad=False)
    module.bias = like.bias
    stock = module.to_linear()
    stock.bias = nn.Parameter(like.bias.detach().clone())
    x = torch.randn(2, 5, 64, requires_grad=True)
    mine, theirs = (torch.autograd.grad(each(x).square().sum(), [x, each.bias]) for each in (module, stock))
    assert all(torch.allclose(one, other, rtol=1e-6) for one, other in zip(mine, theirs, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x), stock(x)) and module(x).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match=r"input is torch.bfloat16, its weight decodes to torch.float32"):
        module(x.bfloat16())


@pytest.mark.parametrize("settings", [{}, *PLACED])
def test_no_more_gpu_memory_is_reserved_for_loading_than_weights_take(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    path, reserved = quantize(tiny_checkpoint("dsv3"), tmp_path, "fp8")[0], []

    def count(model: Any, device_map: dict[str, Any], quantizer: Any) -> None:
        parameters = {name: model.get_parameter_or_buffer(name) for name in device_map}
        reserved.append(sum(quantizer.param_element_size(model, n, p) * p.numel() for n, p in parameters.items()))

    monkeypatch.setattr("transformers.modeling_utils.caching_allocator_warmup", count)
    config = ktft.KtftConfig(**settings)
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config, device_map={"": "cpu"})
    assert reserved == [sum(weight.nbytes for weight in model.state_dict().values())]


# --- training ---------------------------------------------------------------------------------------------------------


def steps(path: Path, out: Path, plain: bool = False, recorded: bool = False, **settings: Any) -> Any:
    """The losses of some steps and the weights after them. `plain`: of a model with the decoded weights."""
    own = {name: settings.pop(name) for name in list(settings) if name in Settings.__dataclass_fields__}
    model = load(path, **{"cuda_graphs": recorded} | own)
    model = unpack(model) if plain else model
    torch.manual_seed(0)
    model = randomize(ktft.get_peft_model(model, lora_config()), std=0.05)
    torch.manual_seed(1)
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 100, (12, 12))]
    given: dict[str, Any] = {"max_steps": 4, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}
    given |= {"save_strategy": "no", "gradient_checkpointing": True, "learning_rate": 1e-3}
    trainer = Trainer(model, runs.arguments(out, **given | settings), train_dataset=data)
    trainer.train()
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    return runs.losses(trainer), weights, model


def assert_same(one: Any, other: Any) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(other[1][name], weight) for name, weight in one[1].items())


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({"dense_format": "k4"}, {}),
        pytest.param({"dense_format": "fp8"}, {"bf16": True}, marks=FULL),
        pytest.param({"dense_placement": "host"}, {"gradient_checkpointing": False}, marks=FULL),
        pytest.param(HOST_INT8, {"bf16": True, "gradient_checkpointing": False}, marks=SHOWN_BEFORE),
        pytest.param(HOST_INT8, {"micro_batches_together": 1}, marks=FULL),
    ],
    ids=str,
)
def test_training_is_that_of_the_decoded_weights(
    tiny_checkpoint: Checkpoint, tmp_path: Path, settings: dict[str, Any], given: dict[str, Any]
) -> None:
    path = tiny_checkpoint("dsv3")
    mine = steps(path, tmp_path / "packed", **settings, **given)
    assert_same(steps(path, tmp_path / "plain", plain=True, **settings, **given), mine)
    assert packed_linears(mine[2])
    assert all(not module.weight.requires_grad for module in packed_linears(mine[2]).values())


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"dense_format": "fp8"}, marks=FULL),
        pytest.param({"dense_format": "k4"}, marks=SHOWN_BEFORE),
        pytest.param({"dense_placement": "host"}, marks=FULL),
        HOST_INT8,
    ],
    ids=str,
)
def test_recorded_layers(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """A recording reads each layer's own weights, in both passes."""
    graphs: list[HostGraph] = record_on_host(monkeypatch.setattr)
    path, given = tiny_checkpoint("dsv3"), {"bf16": True}
    with monkeypatch.context() as patch:
        patch.setattr("ktft.model.recorder.USES", 1 << 30)
        usual = steps(path, tmp_path / "usual", recorded=True, **settings, **given)
    recorded = steps(path, tmp_path / "recorded", recorded=True, **settings, **given)
    assert max(graph.replays for graph in graphs) > 1
    assert_same(usual, recorded)


def stream_of(model: nn.Module) -> DenseStream:
    (stream,) = {id(each._stream): each._stream for each in packed_linears(model).values() if each.is_streamed}.values()
    assert stream is not None
    return stream


def test_every_layer_crosses_once_in_a_pass(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many micro-batches there are. The layers at both ends stay for the next pass."""
    counts = []
    original = DenseStream.bytes_of
    monkeypatch.setattr(DenseStream, "bytes_of", lambda self, *given: (counts.append(1), original(self, *given))[1])
    path = tiny_checkpoint("qwen3moe")
    there = []
    original_forward = HostEmbedding.forward
    monkeypatch.setattr(HostEmbedding, "forward", lambda self, ids: (there.append(1), original_forward(self, ids))[1])
    *_, model = steps(path, tmp_path, dense_placement="host")
    passes, layers = 2 * 4, 3
    assert len(there) == 3 * 4 and type(model.get_input_embeddings()) is nn.Embedding
    assert stream_of(model).copies <= passes * (layers - 1) + 1 < len(counts)


def test_the_next_layer_is_copied_ahead_in_both_directions() -> None:
    layers = [[torch.full((300,), number, dtype=torch.uint8), torch.full((7,), 10 + number, dtype=torch.uint8)]
              for number in range(4)]  # fmt: skip
    stream, cpu = DenseStream(layers), torch.device("cpu")
    assert layers == [[]] * 4 and stream.host_bytes == 4 * 768 and stream.slot_bytes == 2 * 768
    found = []
    for layer in (0, 1, 2, 3, 3, 2, 1, 0, 0, 2, 1):
        for place in (2 * layer, 2 * layer + 1):
            taken = stream.bytes_of(place, cpu)
            assert taken.unique().tolist() == [layer + 10 * (place % 2)] and taken.numel() == (7 if place % 2 else 300)
        found.append(stream.copies)
    #        0  1  2  3  3  2  1  0  0  2  1: the jump from 0 to 2 also brings the 3 that nobody asks for
    assert found == [2, 3, 4, 4, 4, 5, 6, 6, 6, 8, 10]


def test_a_module_that_is_trained_is_an_ordinary_copy(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    model = load(tiny_checkpoint("qwen3moe"), torch.float32, dense_format="int8")
    before = model.lm_head.decoded()
    model = ktft.get_peft_model(model, lora_config(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    copied = model.get_base_model().lm_head.modules_to_save.default
    assert type(copied) is nn.Linear and copied.weight.requires_grad and torch.equal(copied.weight, before)
    data = runs.DATA[:4]
    Trainer(model, runs.arguments(tmp_path, max_steps=2, save_strategy="no"), train_dataset=data).train()
    assert not torch.equal(copied.weight, before)


def test_the_embeddings_wait_in_host_memory(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """While a model is trained, its rows are the same, and nobody takes the place of the table for the table."""
    model = load(tiny_checkpoint("dsv3"), torch.float32, dense_placement="host").requires_grad_(False)
    module, ids = model.get_input_embeddings(), torch.randint(0, 300, (2, 7))
    table, rows = module.weight.detach().clone(), module(ids)
    embedding = to_host(model)
    assert embedding is module and torch.equal(module(ids), rows)
    assert module.weight.shape == table.shape and module.weight.untyped_storage().nbytes() == table[0].nbytes
    assert module.weight.isnan().all() and torch.equal(model.state_dict()["model.embed_tokens.weight"], table)
    to_device(embedding)
    assert type(module) is nn.Embedding and torch.equal(module.weight, table)
    assert torch.equal(model.state_dict()["model.embed_tokens.weight"], table) and torch.equal(module(ids), rows)

    module.weight.requires_grad_()
    assert to_host(model) is None
    assert to_host(load(tiny_checkpoint("dsv3"), torch.float32).requires_grad_(False)) is None
    tied = load(tiny_checkpoint("qwen3moe"), torch.float32, dense_placement="host").requires_grad_(False)
    tied.lm_head.weight = tied.get_input_embeddings().weight
    assert to_host(tied) is None


# --- what is wrong ----------------------------------------------------------------------------------------------------


def damage(path: Path, tmp_path: Path, name: str, value: float) -> Path:
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    (file,) = {
        entry.file.name for entry in CheckpointReader.from_directory(path).tensors.values() if entry.name == name
    }
    tensors = load_file(tmp_path / file)
    tensors[name][3, 5] = value
    save_file(tensors, tmp_path / file, {"format": "pt"})
    return tmp_path


@pytest.mark.parametrize("settings", [{"dense_format": "k4"}, {"dense_placement": "host"}], ids=str)
def test_a_damaged_weight(tiny_checkpoint: Checkpoint, tmp_path: Path, settings: dict[str, Any]) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    path = damage(tiny_checkpoint("qwen3moe"), tmp_path, name, torch.nan)
    with pytest.raises(ValueError, match=rf"safetensors: {name}: it holds NaN or Inf"):
        load(path, torch.bfloat16, **settings)


def test_settings_that_cannot_be(tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="dense_format is 'k5'; supported: bf16, fp8, int8, k4"):
        ktft.KtftConfig(dense_format="k5")
    with pytest.raises(ValueError, match="dense_placement is 'cpu'; supported: auto, gpu, host"):
        ktft.KtftConfig(dense_placement="cpu")
    assert set(DENSE_FORMATS) <= {*native.FORMATS}
    monkeypatch.delenv("KTFT_EMULATE_GPU")
    with pytest.raises(ValueError, match="dense_placement is 'host'"):
        load(tiny_checkpoint("qwen3moe"), dense_placement="host")


@pytest.mark.parametrize("asked", [{"use_dora": True}, {"init_lora_weights": "pissa"}], ids=str)
def test_lora_that_reads_weights_is_refused(tiny_checkpoint: Checkpoint, asked: dict[str, Any]) -> None:
    model = load(tiny_checkpoint("qwen3moe"), torch.float32, dense_format="int8")
    with pytest.raises(ValueError, match="reads the whole weights of linear layers, which dense_format 'int8'"):
        ktft.get_peft_model(model, lora_config(target_modules=["q_proj"], **asked))
    plain = load(tiny_checkpoint("qwen3moe"), torch.float32)
    ktft.get_peft_model(plain, lora_config(target_modules=["q_proj"], **asked))


# --- through LLaMA-Factory --------------------------------------------------------------------------------------------


def test_llamafactory(fork_cli: RunCli, train_yaml: TrainYaml, tmp_path: Path) -> None:
    """Packed weights train, and a run that is resumed with them elsewhere has the bits of an uninterrupted one."""
    kt: dict[str, Any] = {"expert_format": "int8", "dense_format": "k4", "dense_placement": "host", "threads": 1}
    given: dict[str, Any] = {"kt_config": kt, "max_steps": 4, "save_steps": 2}
    environment = {"KTFT_EMULATE_GPU": "1"}

    def run(name: str, **more: Any) -> Path:
        config = train_yaml("dsv3", **given | more) | {"output_dir": str(tmp_path / name)}
        fork_cli(["llamafactory-cli", "train"], config, env=environment)
        return tmp_path / name

    whole = run("whole")
    elsewhere = kt | {"dense_placement": "gpu"}
    resumed = run("resumed", resume_from_checkpoint=str(whole / "checkpoint-2"), kt_config=elsewhere)
    first, second = tensors_of(whole), tensors_of(resumed)
    assert first.keys() == second.keys() and all(torch.equal(second[name], each) for name, each in first.items())
    assert len(logged(whole)) == 4 and any(bool(Tensor.any(each)) for name, each in first.items() if "lora_B" in name)

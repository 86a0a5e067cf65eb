"""Where the weights outside the routed experts lie: their bytes in each format and place, and what is chosen."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest
from given import Checkpoint
from planning import CONFIGS
from tiny import make_config
from torch import nn
from transformers import AutoConfig

from ktft.checkpoint.reader import CheckpointReader
from ktft.checkpoint.schemes import scheme_of
from ktft.config import DENSE_FORMATS, Settings
from ktft.dense.formats import dense_bytes, head_format, may_pack
from ktft.model.dense_linears import fitting
from ktft.model.dense_memory import (
    GPU,
    HOST,
    DenseChoice,
    choose_dense,
    dense_memory,
    dense_tiers,
    loaded_choice,
    released_format,
)
from ktft.model.fit import Room
from ktft.model.memory import footprint, loss_bytes
from ktft.model.meta import meta_model
from ktft.model.shape import ModelShape, shape_of
from ktft.model.workload import PlannedAdapters
from ktft.system import GIB
from ktft.train.recipe import Recipe, dense_choice, training_fit, training_reserve


def config_of(folder: str) -> Any:
    return AutoConfig.from_pretrained(CONFIGS / folder)


def of_model(folder: str) -> tuple[ModelShape, str | None]:
    """A model's shape, and the format that keeps its released weights."""
    values = json.loads((CONFIGS / folder / "config.json").read_text())
    return shape_of(config_of(folder))[0], released_format(scheme_of(values, folder))


@pytest.mark.parametrize("form", DENSE_FORMATS)
@pytest.mark.parametrize("family", ["dsv3", "qwen3moe", "qwen2moe", "gpt_oss"])
def test_bytes_are_those_of_the_formats(family: str, form: str) -> None:
    """Every linear layer of a tiny model, but routers and gates, and every other parameter in the model's dtype."""
    shape, model = shape_of(make_config(family))
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    stay = {name for name in linears if name.endswith((".gate", ".router", ".shared_expert_gate"))}
    packed = [module for name, module in linears.items() if name not in stay]
    assert packed
    of = {id(module): head_format(form) if name == "lm_head" else form for name, module in linears.items()}
    weights = sum(dense_bytes(of[id(each)], each.out_features, each.in_features) for each in packed)
    others = shape.other_parameters - sum(each.weight.numel() for each in packed)
    found = dense_memory(shape, DenseChoice(form, GPU), 2, recorded=False)
    assert found.gpu == weights + 2 * others
    assert found.host == found.crossing == 0
    coded = [each for each in packed if of[id(each)] != "bf16" and may_pack(each.out_features, each.in_features)]
    assert found.transit == max((2 * each.weight.numel() for each in coded), default=0)
    assert found.decoded + found.head == sum(2 * each.weight.numel() for each in coded)


@pytest.mark.parametrize("form", DENSE_FORMATS)
def test_weights_in_host_memory_leave_two_layers_and_what_recordings_read(form: str) -> None:
    shape, _ = of_model("deepseek-v3")
    near, kept = (dense_memory(shape, DenseChoice(form, GPU), 2, recorded=recorded) for recorded in (False, True))
    far, plain = (dense_memory(shape, DenseChoice(form, HOST), 2, recorded=recorded) for recorded in (True, False))
    assert far.gpu + far.host == near.gpu
    assert far.host - far.crossing == 2 * 129280 * 7168  # the embedding table crosses row by row
    kinds = [
        sum(
            dense_bytes(form, each.out_features, each.in_features)
            for each in shape.linears
            if each.packs and each.layer == n
        )
        for n in (0, 3)
    ]
    assert plain.transit - near.transit == 2 * kinds[0]
    assert far.copies == kept.copies == sum(kinds) and plain.copies == near.copies == 0


def test_a_tied_output_layer_stays_on_the_gpu_as_it_is() -> None:
    config = make_config("qwen3moe")
    loose, _ = shape_of(config)
    config.tie_word_embeddings = True
    tied, _ = shape_of(config)
    assert tied.embedding == 0 < loose.embedding == config.vocab_size * config.hidden_size
    heads = [[each.packs for each in shape.linears if each.layer is None] for shape in (loose, tied)]
    assert heads == [[True], [False]]


# --- the choice -------------------------------------------------------------------------------------------------------

ORDER = ["bf16 on the GPU", "fp8 on the GPU", "bf16 in host memory", "fp8 in host memory"]
COARSER = ["int8 on the GPU", "int8 in host memory", "k4 on the GPU", "k4 in host memory"]


@pytest.mark.parametrize(
    ("settings", "released", "order"),
    [
        ({}, "fp8", ORDER + COARSER),
        ({}, None, ORDER[::2] + COARSER),
        ({"dense_placement": "gpu"}, "fp8", [each for each in ORDER + COARSER if each.endswith("GPU")]),
        ({"dense_placement": "host"}, None, ["bf16 in host memory", "int8 in host memory", "k4 in host memory"]),
        ({"dense_format": "k4"}, "fp8", COARSER[2:]),
        ({"dense_format": "fp8", "dense_placement": "host"}, None, ["fp8 in host memory"]),
    ],
)
def test_exact_ones_come_first_and_host_memory_before_coarser_ones(
    settings: dict[str, Any], released: str | None, order: list[str]
) -> None:
    tiers = dense_tiers(Settings(**settings), released)
    assert [str(each) for tier in tiers for each in tier] == order
    left = set(order)
    for expected in order:  # what was chosen does not fit any more
        assert str(choose_dense(tiers, lambda each: str(each) in left)) == expected
        left.remove(expected)
    assert choose_dense(tiers, lambda each: False) is None


def test_among_exact_ones_more_micro_batches_together_count() -> None:
    tiers = dense_tiers(Settings(), "fp8")
    together = {"bf16 on the GPU": 1, "fp8 on the GPU": 4, "bf16 in host memory": 8, "fp8 in host memory": 8}
    assert str(choose_dense(tiers, lambda each: together.get(str(each), 100))) == "bf16 in host memory"


@pytest.mark.parametrize(
    ("folder", "gib", "chosen"),
    [
        ("deepseek-v3", 80, "bf16 on the GPU"),
        ("deepseek-v3", 32, "fp8 on the GPU"),
        ("deepseek-v3", 16, "bf16 in host memory"),
        ("deepseek-v3", 6, "fp8 in host memory"),
        ("deepseek-v3", 5, "k4 in host memory"),
        ("glm-4.5", 48, "bf16 on the GPU"),
        ("glm-4.5", 16, "bf16 in host memory"),
        ("glm-4.5", 4.25, "int8 in host memory"),
        ("glm-4.5", 1, "k4 in host memory"),  # fits neither; loading says so
    ],
)
def test_a_model_loaded_for_nothing_known_leaves_a_fifth_of_the_gpu(folder: str, gib: float, chosen: str) -> None:
    shape, released = of_model(folder)
    assert str(loaded_choice(shape, Settings(), released, 2, int(gib * GIB))) == chosen
    capped = Settings(gpu_memory=int(gib * GIB))
    assert str(loaded_choice(shape, capped, released, 2, 1000 * GIB)) == chosen


def test_a_load_chooses_when_the_weights_do_not_fit(
    tiny_checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_checkpoint("dsv3")
    files = [str(file) for file in CheckpointReader.from_directory(path).files]
    model = meta_model(config := AutoConfig.from_pretrained(path))
    shape, _ = shape_of(config)
    whole = sum(tensor.nbytes for name, tensor in model.state_dict().items() if ".experts." not in name)
    counted = dense_memory(shape, DenseChoice("bf16", GPU), 2, recorded=False).gpu
    assert 0 <= counted - whole < 100  # with buffers that no checkpoint has
    roomy = Settings(cuda_graphs=False)
    assert fitting(roomy, model, files, None) == fitting(roomy, model, files, int(1.26 * whole)) == roomy
    assert fitting(replace(roomy, dense_placement="gpu"), model, files, 1).dense_format is None
    with caplog.at_level(logging.INFO, "ktft"):
        tight = fitting(roomy, model, files, int(1.2 * whole))
    need = dense_memory(shape, DenseChoice(tight.dense_format or "", tight.dense_placement), 2, recorded=False)
    assert tight != roomy and need.gpu + need.transit + need.copies <= 0.8 * 1.2 * whole
    assert f"linear weights outside the routed experts are {tight.dense_format}" in caplog.text
    assert fitting(replace(roomy, dense_format="k4"), model, files, int(1.2 * whole)).dense_format == "k4"


@pytest.mark.parametrize(
    ("block", "form"), [([128, 128], "fp8"), ([64, 128], None), (None, None)], ids=["blocks", "others", "none"]
)
def test_fp8_keeps_what_is_released_in_its_own_blocks(block: list[int] | None, form: str | None) -> None:
    quantization = {"quant_method": "fp8", "weight_block_size": block} if block else None
    assert released_format(scheme_of({"quantization_config": quantization}, "here")) == form


# --- a training -------------------------------------------------------------------------------------------------------

EIGHT = Recipe(per_device_train_batch_size=1, gradient_accumulation_steps=8, cutoff_len=2048, bf16=True)


def test_a_training_chooses_what_loading_is_told() -> None:
    config, room = config_of("deepseek-v3"), Room(22 * GIB, 1000 * GIB, 32, 1)
    found = training_fit(config, EIGHT, room, released="fp8")
    assert found.fits and found.work.away
    assert found.work.dense.placement == HOST and found.work.dense.format in ("bf16", "fp8")
    assert found.work.dense == dense_choice(config, EIGHT.settings, EIGHT, room, released="fp8")
    assert found.need.vram_bytes <= 22 * GIB
    reserve = training_reserve(found.need, gpu=True)
    assert reserve["other weights"] == found.need.ram["other weights"] > 15 * GIB
    assert reserve["activations"] > found.work.together * 2048 * 7168 * (61 + 58) * 2
    alone = dense_choice(config, Settings(), None, room, released="fp8")
    assert alone == loaded_choice(shape_of(config)[0], Settings(), "fp8", 2, 22 * GIB)
    without = Room(None, 1000 * GIB, 32, 1)
    assert dense_choice(config, Settings(), None, without) == DenseChoice("bf16", GPU)
    assert training_fit(config, EIGHT, without).work.dense == DenseChoice("bf16", GPU)
    assert "other weights" not in training_reserve(training_fit(config, EIGHT, without).need, gpu=False)


def test_no_host_memory_for_the_weights_takes_coarser_ones() -> None:
    """GLM-4.5's fit on 24 GB in host memory, unless the experts leave none."""
    config = config_of("glm-4.5")
    enough = training_fit(config, EIGHT, Room(24 * GIB, 600 * GIB, 32, 1))
    assert str(enough.work.dense) == "bf16 in host memory"
    less = enough.need.ram_bytes - enough.need.ram["other weights"]
    short = training_fit(config, EIGHT, Room(24 * GIB, less, 32, 1))
    assert short.fits and short.need.ram_bytes <= less
    assert short.work.dense.format != "bf16"


def test_what_waits_is_in_host_memory_only_if_the_gpu_is_short() -> None:
    config = config_of("qwen3-30b-a3b")
    near, far = (training_fit(config, EIGHT, Room(size * GIB, 200 * GIB, 16, 1)) for size in (48, 12))
    assert (near.work.away, far.work.away) == (False, True)
    assert near.work.together == far.work.together == 8
    assert "activations that wait" not in near.need.ram
    assert far.need.ram["activations that wait"] == 8 * 2048 * 2048 * (48 + 48) * 2
    one, eight = (far.need.vram["expert outputs"], far.need.vram["micro-batches together"])
    assert one == 3 * 2048 * 2048 * 2
    kept = 2 * (4096 + 512 + 512 + 4096) + 2 * (2 * 4096 + 4 * 2048)  # of linear layers; of attention, sums and norms
    assert eight == 7 * 2048 * (2048 * 2 * 2 * 3 + kept + 4 * 2048 * 2)


def test_a_loss_in_chunks_takes_no_more_for_more_tokens() -> None:
    config = config_of("deepseek-v3")
    shape, _ = shape_of(config)

    def of(stage: str, tokens: int) -> int:
        work = Recipe(stage=stage, per_device_train_batch_size=1, cutoff_len=tokens).workload(PlannedAdapters(), 2)
        return loss_bytes(shape, work, gpu=True)

    hidden = 2 * 7168 * 2
    assert of("sft", 65536) - of("sft", 2048) == (65536 - 2048) * hidden
    assert of("sft", 2048) < 0.5 * GIB < of("dpo", 2048)
    assert of("dpo", 4096) == 2 * of("dpo", 2048)
    one_word = shape.vocab_size * 12
    assert of("sft", 16) == 16 * (hidden + one_word)
    works = (Recipe(stage=stage, cutoff_len=2048).workload(PlannedAdapters(), 2) for stage in ("sft", "dpo"))
    chunked, whole = (footprint(shape, work, "k4", threads=1, nodes=1, gpu=True).vram_bytes for work in works)
    assert whole - chunked > 8 * 2048 * shape.vocab_size * 12

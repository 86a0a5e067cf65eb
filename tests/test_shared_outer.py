"""LoRA that a layer's experts share (`expert_lora: shared_outer`), against tied matrices in plain torch."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from adapted import distance, load, logits, lora_config, randomize, tensors_of
from commands import refused
from commands import run as command
from given import Checkpoint, RunCli, TrainYaml
from lanes import no_calibration
from merging import merge, merged_by_hand, standard
from peft import PeftModel
from planning import plan
from safetensors.torch import save_file
from stock import load as load_stock
from stock import matrices
from tiny import tokenizer
from torch import Tensor, nn
from transformers import Trainer

import ktft
from ktft import reference
from ktft.adapters.lora import KINDS, KtftExpertsLora
from ktft.adapters.peft import expert_layers
from ktft.adapters.shared import SHARED, Spread
from ktft.config import PROJECTIONS
from ktft.lanes.decide.placer import Placement, Placer
from ktft.lanes.lanes import DeviceLanes
from ktft.lora import ExpertLora, LoraPair
from ktft.native.repeated import distinct_rows
from ktft.train.gradients import trained_parameters

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
from second_environment import reference_experts

__all__ = ["no_calibration"]

OUTER: dict[str, Any] = {"expert_lora": "shared_outer"}
RANK, ALPHA, STEPS = 4, 8, 20


def shared_model(path: Path, std: float = 0.1, lora: dict[str, Any] | None = None, **settings: Any) -> Any:
    torch.manual_seed(0)
    return randomize(ktft.get_peft_model(load(path, **OUTER | settings), lora_config(**lora or {})), std)


def first_layer(model: nn.Module) -> KtftExpertsLora:
    return next(iter(expert_layers(model).values()))


def tied(parameters: dict[tuple[str, str], Tensor], experts: int) -> ExpertLora:
    """LoRA for the reference, in which autograd itself ties what is shared."""

    def every(projection: str, kind: str) -> Tensor:
        found = parameters[projection, kind]
        return found.expand(experts, *found.shape[1:])

    return ExpertLora({name: LoraPair(*(every(name, kind) for kind in KINDS), ALPHA / RANK) for name in PROJECTIONS})


def half(self: Placer, counts: Any, *_: Any) -> Placement:
    """Every other expert is streamed."""
    used = [expert for expert, rows in enumerate(counts) if rows]
    zeros = dict.fromkeys(("cpu", "copy", "gpu"), 0.0)
    return Placement(used[::2], used[1::2], [], zeros, zeros, ahead=used[1::2])


@pytest.fixture(params=["cpu", "stream", "both"])
def lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings by which the native kernels, the GPU lane (the CPU's torch in its place) or both compute the experts."""
    if request.param != "cpu":
        monkeypatch.setenv("KTFT_EMULATE_GPU", "1")
    if request.param == "both":
        monkeypatch.setattr(Placer, "decide", half)
    return {"placement": "stream"} if request.param == "stream" else {}


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_calibration")
@pytest.mark.parametrize(("rank", "dtype"), [(16, torch.float32), (RANK, torch.bfloat16)], ids=["fp32", "bf16"])
def test_gradients_are_those_of_tied_matrices(base: Path, lane: dict[str, Any], rank: int, dtype: torch.dtype) -> None:
    """Two of eight experts get no token; a second backward adds to the first. 16 rows of fp32 are a page of memory."""
    layer = first_layer(shared_model(base, lora={"r": rank, "lora_alpha": 2 * rank}, **lane)).to(dtype)
    experts, native = layer.experts.num_experts, layer.experts.layer
    torch.manual_seed(2)
    x, weights = torch.randn(40, 64).requires_grad_(), torch.rand(40, 2).requires_grad_()
    index = torch.rand(40, experts - 2).topk(2).indices
    direction = torch.randn(40, 64)
    for _ in range(2):
        (layer(x, index, weights) * direction).sum().backward()
    own = {(name, kind): layer.stacked(kind, "default")[name] for name in PROJECTIONS for kind in KINDS}
    assert {key for key, parameter in own.items() if len(parameter) == 1} == set(SHARED.items())

    twins = {key: parameter.detach().float().requires_grad_() for key, parameter in own.items()}
    frozen = [torch.stack([native.dequantize(e, name) for e in range(experts)]) for name in PROJECTIONS]
    mine = {"hidden": x.grad, "weights": weights.grad} | {key: parameter.grad for key, parameter in own.items()}
    x.grad = weights.grad = None
    out = reference.moe(x, index, weights, *frozen, tied(twins, experts))
    (2 * out * direction).sum().backward()
    expected = {"hidden": x.grad, "weights": weights.grad} | {key: twin.grad for key, twin in twins.items()}
    for key, grad in expected.items():
        found = mine[key]
        assert grad is not None and found is not None and found.shape == grad.shape
        assert distance(found.float(), grad) < 0.01, key
    for name in ("gate_proj", "up_proj"):
        idle = own[name, "lora_B"].grad
        assert idle is not None and not idle[-2:].any()


def test_hooks_of_a_shared_parameter_see_its_gradient(base: Path) -> None:
    layer = first_layer(shared_model(base))
    parameter = layer.stacked("lora_A", "default")["up_proj"]
    seen: list[tuple[str, tuple[int, ...]]] = []
    parameter.register_hook(lambda grad: seen.append(("grad", tuple(grad.shape))) or 2 * grad)  # type: ignore[func-returns-value]
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(("after", tuple(p.grad.shape))))
    x, index = torch.randn(4, 64), torch.tensor([[0, 1]]).expand(4, 2)
    norms = []
    for factor in (1, 2):
        if factor == 2:
            parameter._backward_hooks.clear()
        parameter.grad = None
        layer(x, index, torch.ones(4, 2)).sum().backward()
        assert parameter.grad is not None
        norms.append(float(parameter.grad.norm()))
    assert seen == [("grad", (1, RANK, 64)), ("after", (1, RANK, 64)), ("after", (1, RANK, 64))]
    assert norms[0] == pytest.approx(2 * norms[1])


def test_a_new_value_is_used_however_it_was_written(base: Path) -> None:
    model = shared_model(base)
    before = logits(model)
    parameter = first_layer(model).stacked("lora_B", "default")["down_proj"]
    kept = parameter.detach().clone()
    parameter.data.mul_(3)
    version = parameter._version
    changed = logits(model)
    assert distance(changed, before) > 1e-3
    parameter.data.copy_(kept)
    assert parameter._version == version and torch.equal(logits(model), before)
    first_layer(model).lora_B["default"]["down_proj"] = nn.Parameter(3 * kept)
    assert torch.equal(logits(model), changed)


@pytest.mark.parametrize(("experts", "rank", "distinct"), [(8, 16, 1), (40, 16, 3), (40, 15, 40)])
def test_a_spread_takes_little_memory(experts: int, rank: int, distinct: int) -> None:
    """Where its rows are whole pages: these are mapped again and again, until the tensor dies."""

    def mapped() -> list[str]:
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if "ktft-shared-lora" in line]

    before = mapped()
    parameter = nn.Parameter(torch.randn(1, rank, 64))
    spread = Spread(parameter, experts)
    assert len(mapped()) - len(before) == (0 if distinct == experts else -(-experts // distinct))
    assert distinct_rows(experts, parameter.nbytes) == distinct
    with torch.no_grad():
        parameter.neg_()
    assert torch.equal(spread.now().detach(), parameter.detach().expand(experts, -1, -1))
    del spread
    assert mapped() == before


# --- training ---------------------------------------------------------------------------------------------------------


class TiedExperts(nn.Module):
    """Frozen experts and LoRA that they share in plain torch; autograd sums over the experts."""

    def __init__(self, stock: nn.Module, twin: KtftExpertsLora) -> None:
        super().__init__()
        for name, weight in matrices(stock, stock.gate_up_proj.detach(), stock.down_proj.detach()).items():
            self.register_buffer(name, weight.clone())
        for name in PROJECTIONS:
            for kind in KINDS:
                value = twin.stacked(kind, "default")[name].detach().clone()
                self.register_parameter(f"{kind}_{name}", nn.Parameter(value))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        frozen = [getattr(self, name) for name in PROJECTIONS]
        lora = tied({(n, k): getattr(self, f"{k}_{n}") for n in PROJECTIONS for k in KINDS}, len(frozen[0]))
        return reference.moe(hidden_states, top_k_index, top_k_weights, *frozen, lora)


def losses(model: nn.Module, out: Path, **settings: Any) -> list[float]:
    text = [f"line {n}: the sum of {n} and {n + 1} is {2 * n + 1}." for n in range(16)]
    rows = [{"input_ids": ids, "labels": ids} for ids in tokenizer()([line.ljust(40) for line in text]).input_ids]
    own = {"max_steps": STEPS, "save_strategy": "no", "learning_rate": 3e-3, "gradient_accumulation_steps": 2}
    args = runs.arguments(out, per_device_train_batch_size=4, **own | settings)
    trainer = Trainer(model, args, train_dataset=rows)
    trainer.train()
    return runs.losses(trainer)


@pytest.mark.usefixtures("no_calibration")
@pytest.mark.parametrize("lane", ["cpu", "stream"], indirect=True)
def test_twenty_steps_are_those_of_tied_matrices(
    base: Path, tmp_path: Path, lane: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the GPU lane with checkpointing, where LoRA's gradients are delivered after backward."""
    mine = shared_model(base, 0.02, {"target_modules": ["experts"]}, **lane)
    plain = load_stock(base, None).requires_grad_(False)
    for name, layer in expert_layers(mine).items():
        inner = name.removeprefix("base_model.model.")
        plain.set_submodule(inner, TiedExperts(plain.get_submodule(inner), layer))
    owed: list[int] = []
    deliver = DeviceLanes.deliver
    monkeypatch.setattr(DeviceLanes, "deliver", lambda self: (owed.append(len(self._owed)), deliver(self)))
    assert all(each.layer is None for name, each in trained_parameters(mine).items() if len(each.parameter) == 1)
    before = {name: p.detach().clone() for name, p in mine.named_parameters() if p.requires_grad}

    expected = losses(plain, tmp_path)
    actual = losses(mine, tmp_path, gradient_checkpointing=bool(lane))
    assert actual == pytest.approx(expected, rel=0.005)
    assert expected[-1] < 0.95 * expected[0], "the comparison is of a model that learns"
    assert bool(lane) == any(owed)
    for name, p in mine.named_parameters():
        assert name not in before or not torch.equal(p, before[name]), name


def test_a_resumed_run_is_the_uninterrupted_run(base: Path, tmp_path: Path) -> None:
    whole = runs.trainer(base, tmp_path / "whole", settings=OUTER)
    whole.train()
    shutil.copytree(tmp_path / "whole/checkpoint-3", tmp_path / "rest/checkpoint-3")
    resumed = runs.trainer(base, tmp_path / "rest", settings=OUTER)
    torch.manual_seed(99)
    resumed.train(resume_from_checkpoint=True)
    runs.require_same_end(resumed, whole)

    other = runs.trainer(base, tmp_path / "rest")
    told = r"gate_proj has shape \[1, 2, 64\] in it and \[8, 2, 64\] now; set .*expert_lora"
    with pytest.raises(ValueError, match=told):
        other.train(resume_from_checkpoint=str(tmp_path / "rest/checkpoint-3"))


def test_llamafactory_and_the_plan(train_yaml: TrainYaml, fork_cli: RunCli, tmp_path: Path) -> None:
    kt_config = {"expert_format": "int8", "threads": 1, **OUTER}
    config = train_yaml("dsv3", kt_config=kt_config, lora_target="experts", output_dir=str(tmp_path / "a"))
    log = fork_cli(["llamafactory-cli", "train"], config).stdout
    count = 2 * RANK * (3 * 64 + 8 * 3 * 32)  # two layers of eight experts
    assert f"{count:,}" in log.split("before step 1", 1)[1]
    tensors = tensors_of(tmp_path / "a")
    assert sum(tensor.numel() for tensor in tensors.values()) == count
    assert all(tensor.any() for tensor in tensors.values() if len(tensor) == 1), "down's B has moved away from 0"
    report = json.loads((tmp_path / "a/ktft_report.json").read_text())
    assert report["adapter"]["lora"]["default"]["expert_lora"] == "shared_outer"
    card = " ".join((tmp_path / "a/README.md").read_text().split())
    assert "Do not load this directory with PEFT.** All experts of a layer share" in card
    assert plan(config["model_name_or_path"], tmp_path / "train.yaml")["adapter"]["parameters"] == count

    further = config | {"adapter_name_or_path": str(tmp_path / "a"), "output_dir": str(tmp_path / "b")}
    other = further | {"kt_config": {**kt_config, "expert_lora": "per_expert"}}
    done = fork_cli(["llamafactory-cli", "train"], other, check=False)
    assert done.returncode and "was trained with expert_lora: shared_outer" in done.stdout


# --- on disk ----------------------------------------------------------------------------------------------------------


def test_saved_once_and_loaded_whole(base: Path, tmp_path: Path) -> None:
    model = shared_model(base)
    model.save_pretrained(tmp_path / "shared")
    tensors = tensors_of(tmp_path / "shared")
    prefix = "base_model.model.model.layers.1.mlp.experts"
    shapes = {name.removeprefix(f"{prefix}."): tuple(t.shape) for name, t in tensors.items() if name.startswith(prefix)}
    assert shapes == {
        **{f"{name}.lora_A.weight": (1, RANK, 64) for name in ("gate_proj", "up_proj")},
        "down_proj.lora_B.weight": (1, 64, RANK),
        **{f"{e}.{name}.lora_B.weight": (32, RANK) for e in range(8) for name in ("gate_proj", "up_proj")},
        **{f"{e}.down_proj.lora_A.weight": (RANK, 32) for e in range(8)},
    }
    each = ktft.get_peft_model(load(base), lora_config(target_modules=["experts"]))
    each.save_pretrained(tmp_path / "each")
    one = sum(t.numel() for name, t in tensors.items() if ".experts." in name)
    assert one / sum(t.numel() for t in tensors_of(tmp_path / "each").values()) == (64 / 8 + 32) / (64 + 32)

    assert torch.equal(logits(ktft.load_adapter(load(base), tmp_path / "shared")), logits(model))
    again = ktft.load_adapter(load(base, **OUTER), tmp_path / "shared", is_trainable=True)
    assert {layer.forms["default"] for layer in expert_layers(again).values()} == {"shared_outer"}
    again.load_adapter(tmp_path / "each", "other")
    logits(again)
    again.set_adapter("other")
    again.delete_adapter("default")
    assert first_layer(again).forms == {"other": "per_expert"} and not first_layer(again)._spreads._made


def test_what_another_program_wrote_is_read(base: Path, tmp_path: Path) -> None:
    """Without ktft's metadata; a tensor too few or too many is named."""
    model = shared_model(base)
    model.save_pretrained(tmp_path / "a")
    tensors = tensors_of(tmp_path / "a")
    file = tmp_path / "a/adapter_model.safetensors"
    save_file(tensors, file)
    assert torch.equal(logits(ktft.load_adapter(load(base), tmp_path / "a")), logits(model))
    name = "base_model.model.model.layers.2.mlp.experts.down_proj.lora_B.weight"
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    with pytest.raises(ValueError, match=f"1 tensors of the model are missing, the first is {name}"):
        ktft.load_adapter(load(base), tmp_path / "a")
    save_file(tensors | {name.replace("lora_B", "lora_A"): tensors[name].clone()}, file)
    with pytest.raises(ValueError, match="1 tensors are left over, the first is .*experts.down_proj.lora_A.weight"):
        ktft.load_adapter(load(base), tmp_path / "a")
    save_file(tensors | {name: tensors[name].expand(8, -1, -1).contiguous()}, file)
    with pytest.raises(ValueError, match=r"has shape \(8, 64, 4\) in the adapter and \(1, 64, 4\) in the model"):
        ktft.load_adapter(load(base), tmp_path / "a")


@pytest.mark.parametrize("saved", ["shared_outer", "per_expert"])
def test_another_form_is_refused(base: Path, tmp_path: Path, saved: str) -> None:
    other = {"shared_outer": "per_expert", "per_expert": "shared_outer"}[saved]
    targets = {"target_modules": ["experts"]}
    model = ktft.get_peft_model(load(base, expert_lora=saved), lora_config(**targets))
    model.save_pretrained(tmp_path)
    name = r"experts\.(0\.)?down_proj\.lora_B\.weight"
    told = (
        rf"was trained with expert_lora: {saved} \(.*{name} is .*'default' here has expert_lora: {other} .*; set expert"
    )
    with pytest.raises(ValueError, match=told):
        ktft.load_adapter(load(base, expert_lora=other), tmp_path, is_trainable=True)
    present = ktft.get_peft_model(load(base, expert_lora=other), lora_config(**targets))
    with pytest.raises(ValueError, match=told):
        present.load_adapter(tmp_path, "default")
    with pytest.raises(ValueError, match=f"has expert_lora: {other}; set the form that the tensors have"):
        present.load_state_dict(
            {name.replace(".weight", ".default.weight"): tensor for name, tensor in tensors_of(tmp_path).items()},
            strict=False,
        )
    present.load_adapter(tmp_path, "frozen")  # beside it, as it is
    assert first_layer(present).forms == {"default": other, "frozen": saved}


def test_a_part_of_the_experts_cannot_share(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor processes that have parts, which is said before anything is loaded."""
    with pytest.raises(ValueError, match="'shared_outer', and this process holds 4 of the 8 experts of model.layers.0"):
        ktft.get_peft_model(load(base, part=(0, 4), **OUTER), lora_config())
    for name, value in {"WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="'shared_outer', and 2 processes share the experts: .* Set expert_lora: per_"):
        load(base, **OUTER)


@pytest.mark.parametrize("family", ["qwen3moe", "gpt_oss"])
def test_merged_and_exported(tiny_checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    """By hand from the tensors' names; by `ktft merge`; and through exports, which give each expert its own copy."""
    path, adapter = tiny_checkpoint(family), tmp_path / "a"
    model = shared_model(path, lora={"target_modules": ["experts"]})
    model.save_pretrained(adapter)
    with reference_experts():
        trained = logits(model)
        with model.disable_adapter():
            effect = distance(logits(model), trained)
    assert effect > 0.05
    assert distance(logits(merged_by_hand(path, adapter)), trained) < 1e-4 * effect
    assert distance(logits(load_stock(merge(path, adapter, tmp_path / "merged"), None)), trained) < 0.1 * effect
    out = tmp_path / "peft"
    assert command("export", adapter, out, "--to", "peft")[0] == 0
    assert distance(logits(PeftModel.from_pretrained(load_stock(path, None), out)), trained) < 1e-4 * effect
    if family == "qwen3moe":
        for target in ("vllm", "sglang"):
            status, said = command("export", adapter, tmp_path / target, "--to", target)
            assert status == 0, said
            found, expected = tensors_of(tmp_path / target), standard(tensors_of(adapter))
            assert found.keys() == expected.keys()
            assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
        assert torch.equal(logits(ktft.load_adapter(load(path), tmp_path / "vllm")), logits(model))


def test_a_damaged_shared_matrix_is_refused(base: Path, tmp_path: Path) -> None:
    shared_model(base).save_pretrained(tmp_path / "a")
    tensors = tensors_of(tmp_path / "a")
    name = "base_model.model.model.layers.1.mlp.experts.up_proj.lora_A.weight"
    tensors[name][0, 1, 2] = torch.nan
    save_file(tensors, tmp_path / "a/adapter_model.safetensors")
    for arguments in (("merge", base, tmp_path / "a", tmp_path / "m"), ("verify", base, "--adapter", tmp_path / "a")):
        assert f"{name} holds NaN or Inf" in refused(*arguments)


def test_two_adapters_are_summed(base: Path, tmp_path: Path) -> None:
    """One shares, the other does not; the gradient of the shared one is the same as when it is alone on zeros."""
    model = shared_model(base, lora={"target_modules": ["experts"]})
    model.save_pretrained(tmp_path / "shared")
    x, index, weights = torch.randn(9, 64), torch.randint(0, 8, (9, 1)), torch.ones(9, 1)
    first_layer(model)(x, index, weights).sum().backward()
    alone = {name: p.grad.clone() for name, p in first_layer(model).named_parameters() if p.grad is not None}
    model.zero_grad()
    each = ktft.get_peft_model(load(base), lora_config(target_modules=["experts"]))
    each.save_pretrained(tmp_path / "each")  # its B is zero
    model.load_adapter(tmp_path / "each", "each")
    model.set_adapter(["default", "each"])
    first_layer(model)(x, index, weights).sum().backward()
    for name, p in first_layer(model).named_parameters():
        if name in alone:
            assert p.grad is not None and distance(p.grad, alone[name]) < 0.01, name

"""AdamW for CPU parameters as an optimizer: states, Trainers, and what `optim` may be."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from adapted import load_as_stored, lora_config
from given import Checkpoint
from runs import DATA, adapted, arguments, losses
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.training_args import OptimizerNames

import ktft
from ktft import native
from ktft.train import optimizer as optimizers
from ktft.train.optimizer import AdamW, check_optimizer

# --- the optimizer ----------------------------------------------------------------------------------------------------


def make_params() -> list[torch.nn.Parameter]:
    """fp32, bf16, fp16, not contiguous, without a gradient."""
    torch.manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.float32)
    params = [torch.nn.Parameter(torch.randn(6, 50).to(dtype)) for dtype in dtypes]
    params[3] = torch.nn.Parameter(torch.randn(50, 6).T)
    return params


def train(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        for p in params[:-1]:
            p.grad = torch.randn(p.shape).to(p.dtype)
        optimizer.step()


def groups_of(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": params[:2], "lr": 1e-2, "weight_decay": 0.1}, {"params": params[2:]}]


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("ours_first", [True, False])
def test_states_go_both_ways(fused: bool | None, ours_first: bool, tmp_path: Path) -> None:
    """Three steps with one AdamW, three with the other, from a saved state; torch's alone throughout beside it."""
    params, alone = make_params(), make_params()
    classes = (AdamW, torch.optim.AdamW) if ours_first else (torch.optim.AdamW, AdamW)
    whole = torch.optim.AdamW(groups_of(alone), fused=fused)
    first, second = (cls(groups_of(params), fused=fused) for cls in classes)
    train(alone, whole, 3, seed=1)
    train(alone, whole, 3, seed=2)
    train(params, first, 3, seed=1)
    torch.save(first.state_dict(), tmp_path / "optimizer.pt")
    second.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    train(params, second, 3, seed=2)
    ours, theirs = second.state_dict(), whole.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys() == {0, 1, 2, 3}
    for index, state in theirs["state"].items():
        assert list(ours["state"][index]) == list(state) == ["step", "exp_avg", "exp_avg_sq"]
        for name, tensor in state.items():
            assert ours["state"][index][name].dtype == tensor.dtype
            # without fused, torch rounds bf16 after each operation and not once
            coarse = {"rtol": 0.02, "atol": 0.02} if tensor.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
            torch.testing.assert_close(ours["state"][index][name], tensor, **coarse)
    for mine, its in zip(params, alone, strict=True):
        coarse = {"rtol": 0.03, "atol": 0.03} if its.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(mine, its, **coarse)


def test_schedules_closures_and_autograd() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([p], lr=torch.tensor(0.5), weight_decay=0.0, runtime=native.runtime(1))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (p * 3).sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 9
    schedule.step()
    assert optimizer.step(closure) == pytest.approx(4.5)
    torch.testing.assert_close(p.detach(), torch.full((3,), 0.25))  # a constant gradient moves by lr: 0.5, then 0.25
    square = (p * p).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()


@pytest.mark.parametrize("flag", ["amsgrad", "maximize", "capturable", "differentiable"])
def test_flags_are_refused(flag: str) -> None:
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=f"{flag} is True, which ktft's AdamW does not do"):
        AdamW([{"params": [p], flag: True}])
    optimizer, other = AdamW([p]), torch.optim.AdamW([p])
    other.param_groups[0][flag] = True
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match=f"{flag} is True"):
        optimizer.load_state_dict(other.state_dict())
    assert optimizer.state_dict() == before


# --- in a Trainer -----------------------------------------------------------------------------------------------------


class GradientNorms(TrainerCallback):
    """fp64 norms over all trainable parameters, and over the experts' LoRA, as the optimizer gets their gradients."""

    def __init__(self) -> None:
        self.all, self.experts = [], []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        grads = {n: p.grad.double() for n, p in kwargs["model"].named_parameters() if p.requires_grad}
        for norms, part in ((self.all, ""), (self.experts, ".experts.")):
            norms.append(float(sum(g.square().sum() for n, g in grads.items() if part in n) ** 0.5))


class TorchsSteps(TrainerCallback):
    """Steps of torch's AdamW beside those of the Trainer that calls this, on the same gradients: the same parameters.

    Losses of two trainings would not do: the last bit of a parameter can make a token choose another expert.
    """

    def __init__(self, trainer: transformers.Trainer, steps: int) -> None:
        self.named = dict(trainer.model.named_parameters())
        self.optimizer = trainer.create_optimizer()
        self.schedule = trainer.create_scheduler(steps, self.optimizer)
        self.compared = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, p in kwargs["model"].named_parameters():
            self.named[name].grad = None if p.grad is None else p.grad.clone()
        self.optimizer.step()
        self.schedule.step()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for name, p in kwargs["model"].named_parameters():
            torch.testing.assert_close(p, self.named[name], rtol=1e-6, atol=1e-7)
        self.compared += 1


@pytest.mark.parametrize("optim", optimizers.NATIVE)
def test_trainer_takes_torchs_steps_and_the_norm_over_all_groups(
    tiny_checkpoint: Checkpoint, tmp_path: Path, optim: str
) -> None:
    options: dict[str, Any] = {"optim": optim, "max_steps": 8, "gradient_accumulation_steps": 2}
    options |= {"lr_scheduler_type": "linear", "weight_decay": 0.1, "learning_rate": 1e-3}
    options |= {"save_strategy": "no", "max_grad_norm": 1e6}
    path, norms = tiny_checkpoint("dsv3"), GradientNorms()
    args = arguments(tmp_path, **options)
    stock = torch.optim.AdamW, {"lr": args.learning_rate, "weight_decay": 0.1}
    theirs = transformers.Trainer(adapted(path), args, train_dataset=DATA, optimizer_cls_and_kwargs=stock)
    torchs = TorchsSteps(theirs, args.max_steps)
    assert type(torchs.optimizer) is torch.optim.AdamW
    ours = transformers.Trainer(adapted(path), args, train_dataset=DATA, callbacks=[norms, torchs])
    ours.train()
    assert type(ours.optimizer.optimizer) is AdamW and torchs.compared == args.max_steps
    logged = [entry["grad_norm"] for entry in ours.state.log_history if "grad_norm" in entry]
    assert logged == pytest.approx(norms.all, rel=1e-5)
    assert all(0 < part < 0.999 * whole for part, whole in zip(norms.experts, norms.all, strict=True))
    assert losses(ours)[-1] < losses(ours)[0]

    clipped = GradientNorms()
    args = arguments(tmp_path, **options | {"max_grad_norm": 0.05, "max_steps": 3})
    transformers.Trainer(adapted(path), args, train_dataset=DATA, callbacks=[clipped]).train()
    assert clipped.all == pytest.approx([0.05] * 3, rel=1e-4)


def test_stock_models_keep_torchs(base: Path, tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=1, save_strategy="no")
    stock = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for model, cls in ((stock, torch.optim.AdamW), (adapted(base), AdamW)):
        trainer = transformers.Trainer(model, args, train_dataset=DATA)
        assert type(trainer.create_optimizer()) is cls
        # asked by the arguments alone, as LLaMA-Factory does for LoRA+
        assert transformers.Trainer.get_optimizer_cls_and_kwargs(args)[0] is cls


def test_pure_bf16_trains_with_moments_in_bf16(base: Path, tmp_path: Path) -> None:
    model = load_as_stored(base, dtype=torch.bfloat16)
    model = ktft.get_peft_model(model, lora_config(target_modules=["experts"])).to(torch.bfloat16)
    args = arguments(tmp_path, max_steps=12, learning_rate=2e-2, save_strategy="no")
    trainer = transformers.Trainer(model, args, train_dataset=DATA)
    trainer.train()
    assert {s["exp_avg"].dtype for s in trainer.optimizer.optimizer.state.values()} == {torch.bfloat16}
    assert sum(losses(trainer)[-4:]) < 0.95 * sum(losses(trainer)[:4])


# --- optim ------------------------------------------------------------------------------------------------------------

OTHERS = {"transformers": optimizers.BUILT_IN, **optimizers.PACKAGES}


def test_every_optimizer_of_transformers_has_its_place() -> None:
    places = [*optimizers.NATIVE, *optimizers.REFUSED, *(name for names in OTHERS.values() for name in names)]
    assert len(set(places)) == len(places)
    assert {name.value for name in OptimizerNames} <= set(places)


@pytest.mark.parametrize("requirement", OTHERS)
def test_other_optimizers_train_every_group(base: Path, tmp_path: Path, requirement: str) -> None:
    for optim in OTHERS[requirement]:
        args = arguments(tmp_path, optim=optim, save_strategy="no", max_steps=6)
        try:
            check_optimizer(args)
        except ValueError as error:
            pytest.skip(str(error))
        trainer = transformers.Trainer(adapted(base), args, train_dataset=DATA)
        trainer.train()
        assert type(trainer.optimizer.optimizer) is not AdamW
        assert all(p.any() for name, p in trainer.model.named_parameters() if "lora_B" in name), optim


def test_the_rest_is_refused_before_training(base: Path, tmp_path: Path) -> None:
    for optim, reason in optimizers.REFUSED.items():
        if optim not in [name.value for name in OptimizerNames]:
            continue  # later transformers have no adamw_apex_fused
        with pytest.raises(ValueError, match=f"optim is '{optim}'.*does not support: {reason[:20]}.*set optim: adamw"):
            check_optimizer(arguments(tmp_path, optim=optim))
    with pytest.raises(ValueError, match="optim is 'lomo'"):
        ktft.Trainer(adapted(base), arguments(tmp_path, optim="lomo"), train_dataset=DATA)


def test_optimizers_whose_package_is_missing_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "schedulefree":
            raise metadata.PackageNotFoundError
        return "0.43.1"

    monkeypatch.setattr(metadata, "version", version)
    for optim, words in {
        "paged_adamw_8bit": r"needs bitsandbytes>=0\.50 .*installed is 0\.43\.1; pip install 'bitsandbytes",
        "schedule_free_adamw": "installed is none",
    }.items():
        with pytest.raises(ValueError, match=words):
            check_optimizer(arguments(tmp_path, optim=optim))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"loraplus_lr_ratio": 16.0}, ("Using LoRA+ optimizer", "ktft.train.optimizer.AdamW", "by ktft's kernel")),
        ({"use_muon": True}, ("Using Muon", "Muon also updates", "ktft.train.muon.StackedMuon, parameters: ")),
    ],
    ids=["loraplus", "muon"],
)
def test_llamafactorys_own_optimizers(
    train_yaml: Callable[..., Any], fork_cli: Callable[..., Any], options: dict[str, Any], expected: tuple[str, ...]
) -> None:
    log = fork_cli(["llamafactory-cli", "train"], train_yaml("qwen3moe", **options)).stdout
    for text in (*expected, "'loss':"):
        assert text in log, log


def test_llamafactory_refuses_before_loading(train_yaml: Callable[..., dict[str, Any]]) -> None:
    from llamafactory.hparams import get_train_args

    for options, message in (
        ({"optim": "adamw_torch_xla"}, "optim is 'adamw_torch_xla'.*set optim: adamw_torch"),
        ({"optim": "adamw_torch", "use_adam_mini": True}, "use_adam_mini is True"),
    ):
        with pytest.raises(ValueError, match=message):
            get_train_args(train_yaml("qwen3moe", **options))

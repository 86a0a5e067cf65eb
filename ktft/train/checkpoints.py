"""Atomic checkpoints and exact resuming, for every Trainer on a model with ktft's experts.

Functions marked `_of_experts` wrap methods of transformers' Trainers; `ktft/hosts/transformers.py` lists them. While a
run trains or saves, its `output_dir` is locked. A checkpoint, with what callbacks write in `on_save`, is written into a
staging folder in `output_dir`, sealed with a manifest and renamed. It is verified before training resumes from it.
"""

from __future__ import annotations

import copy
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_NAME

from ktft.adapters.files import SCRATCH
from ktft.adapters.gathered import gathered, made_whole
from ktft.adapters.peft import KtftPeftMixin
from ktft.adapters.several import check_resumed
from ktft.checkpoint.files import TEMPORARY, exchange, sync_directory
from ktft.checkpoint.lock import locked
from ktft.hosts.transformers import ON_SAVE, OUTPUT_DIR, PUSH, STATE_DICT
from ktft.model.experts import first_experts
from ktft.ranks.launch import Launch
from ktft.ranks.sharded import divide_again
from ktft.system import readable
from ktft.train import manifest
from ktft.train.parallel import agreed, checked_once, ranks_of
from ktft.train.report import logger
from ktft.train.run import note_saved
from ktft.train.shards import has_shards, load_divided, save_shard, whole_state
from ktft.train.step_order import TOKENS

STAGING = f"_checkpoints{TEMPORARY}"
"""The folder in `output_dir` where a checkpoint is written. Hosts neither list it as a checkpoint nor upload it."""
_REPLACED = "replaced"
_LOSSES = "_ktft_losses"

_ANEW = "or begin anew from its adapter: set another output_dir, and {} as adapter_name_or_path (ktft.load_adapter)"


def _of_experts(around: Callable[..., Any]) -> Callable[..., Any]:
    """Call `around` for a Trainer whose model has ktft's experts, and the original method for every other Trainer.

    `around` receives the bound original method and its owner: a Trainer, or an object with an attribute `trainer`.
    """

    @functools.wraps(around)
    def wrapper(original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
        if first_experts(getattr(owner, "trainer", owner).model) is not None:
            return around(functools.partial(original, owner), owner, *args, **kwargs)
        return original(owner, *args, **kwargs)

    return wrapper


# --- one run per folder -----------------------------------------------------------------------------------------------


def hold(args: TrainingArguments) -> AbstractContextManager[Any]:
    """Lock `output_dir` against other runs before anything there is read or written. Only the saving rank locks it.

    Raises ValueError if another run uses the folder, OSError if the folder is not writable.
    """
    return locked(Path(str(args.output_dir)), "training") if args.should_save else nullcontext()


@_of_experts
def train(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """`Trainer.train`, with the run's folder locked."""
    with hold(trainer.args):
        return original(*args, **kwargs)


@_of_experts
def save_model(
    original: Callable[..., Any], trainer: Any, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    """`Trainer.save_model`, with the folder locked until the report there records what was written."""
    place = Path(output_dir or trainer.args.output_dir)
    with locked(place, "saving a model") if trainer.args.should_save else nullcontext(), gathered(trainer.model):
        original(output_dir, _internal_call)
        if not _internal_call:
            note_saved(trainer, place)


# --- saving -----------------------------------------------------------------------------------------------------------


def clear_leftovers(run_dir: Path) -> None:
    """Remove the unfinished files and checkpoints that a killed run left. The caller holds the folder's lock."""
    if (run_dir / STAGING).is_dir():
        with _staging(run_dir):
            pass
    for path in (*run_dir.glob(f"{SCRATCH}*"), *run_dir.glob(f"*{TEMPORARY}")):
        _remove_leftover(path)


@contextmanager
def _staging(run_dir: Path) -> Iterator[Path]:
    """Provide an empty staging folder; it is removed afterwards, with everything that was moved into it for removal."""
    staging = run_dir / STAGING
    staging.mkdir(parents=True, exist_ok=True)
    _bring_back(staging)
    for leftover in staging.iterdir():
        _remove_leftover(leftover)
    try:
        yield staging
    finally:
        _bring_back(staging)
        shutil.rmtree(staging, ignore_errors=True)


def _bring_back(staging: Path) -> None:
    """Restore a checkpoint that was moved aside for a replacement that was never completed."""
    for old in (staging / _REPLACED).glob("*"):
        if not (staging.parent / old.name).exists():
            os.rename(old, staging.parent / old.name)


def _remove_leftover(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    logger().info("removed %s, left unfinished by a run that was killed", path)


@_of_experts
def save_checkpoint(original: Callable[..., Any], trainer: Any, model: Any, trial: Any) -> None:
    """`Trainer._save_checkpoint`, made atomic: the checkpoint is either complete or absent."""
    run_dir = Path(trainer._get_output_dir(trial))
    place = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    together = ranks_of(trainer.model)
    first = together is None or together.first
    divide_again(trainer.model)
    facts = _facts(trainer)
    state = None if together is None else whole_state(trainer.model, trainer.optimizer, together)
    try:
        with ExitStack() as stack, gathered(trainer.model):
            staging = agreed(together, lambda: stack.enter_context(_staging(run_dir)) if first else run_dir / STAGING)
            agreed(together, lambda: _write(original, trainer, model, trial, staging, place, state))
            nbytes = agreed(together, lambda: _complete(trainer, staging, place, facts) if first else 0)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise OSError(_not_written(trainer, place, error)) from error
    if first:
        logger().info("%s is whole, %s", place, readable(nbytes))
    if trainer.args.push_to_hub:
        trainer._push_from_checkpoint(str(place))


def _complete(trainer: Any, staging: Path, place: Path, facts: dict[str, Any]) -> int:
    """Seal what all ranks wrote into `staging`, and make it a checkpoint. Returns its bytes."""
    nbytes = manifest.seal(staging / place.name, facts)
    _publish(staging / place.name, place)
    _rotate(place.parent, staging, trainer.args.save_total_limit, place, trainer.state.best_model_checkpoint)
    return nbytes


def _write(
    original: Callable[..., Any], trainer: Any, model: Any, trial: Any, staging: Path, place: Path, whole: Any
) -> None:
    """Let the Trainer and its callbacks write the checkpoint into `staging`; its final path will be `place`.

    `whole` is the optimizer's state dict, if the one that rank 0 has lacks what other ranks hold.
    """
    if not staging.is_dir():
        raise OSError(
            f"{Launch.of_environment().name} does not see {staging}, which rank 0 made: give an output_dir that is the "
            "same folder on all machines"
        )
    together, optimizer = ranks_of(trainer.model), trainer.optimizer
    if together is not None:
        (staging / place.name).mkdir(exist_ok=True)
        save_shard(staging / place.name, trainer.model, optimizer, together)
        STATE_DICT.put(optimizer, lambda: whole)
    OUTPUT_DIR.put(trainer, lambda trial: str(staging))
    PUSH.put(trainer, lambda folder: None)
    try:
        original(model, trial)
    finally:
        OUTPUT_DIR.take_off(trainer)
        PUSH.take_off(trainer)
        if together is not None:
            STATE_DICT.take_off(optimizer)
    state = trainer.state
    if _find_best(state, place.parent, place) and trainer.args.should_save:
        state.save_to_json(str(staging / place.name / TRAINER_STATE_NAME))
    args, handler = copy.copy(trainer.args), trainer.callback_handler
    args.output_dir = str(staging)
    trainer.control = type(handler).on_save(handler, args, state, trainer.control)

    def already_done(args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Stand in for the `on_save` event that every Trainer sends after `_save_checkpoint`."""
        ON_SAVE.take_off(handler)
        return control

    ON_SAVE.put(handler, already_done)


def _find_best(state: TrainerState, run_dir: Path, place: Path | None = None) -> bool:
    """Update the path of the best checkpoint, since the run's folder may have been moved.

    `place` is the path of the checkpoint that is being written: it counts as present. Returns whether one was found.
    """
    best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
    if found := bool(state.best_global_step) and (best == place or best.is_dir()):
        state.best_model_checkpoint = str(best)
    return found


def _facts(trainer: Any) -> dict[str, Any]:
    return {
        "step": trainer.state.global_step,
        "run": manifest.run_facts(trainer.model, trainer.args.optim),
        "settings": manifest.settings_of(trainer),
        "data": manifest.data_facts(trainer),
        "tokens_together": getattr(trainer, TOKENS, None),
        "seed": torch.initial_seed(),  # also determines the data order: accelerate's sampler uses it
        "parameters": manifest.parameter_facts(trainer.model, trainer.optimizer, ranks_of(trainer.model)),
        # Losses since the last log and before it: transformers does not save them, so it would log other values
        # after resuming.
        "losses": {
            "since_logged": trainer._tr_loss.item(),
            "logged": trainer._total_loss_scalar,
            "last_logged": trainer._globalstep_last_logged,
        },
    }


def _publish(written: Path, place: Path) -> None:
    """Move a sealed checkpoint to its final path. A checkpoint that is already there is exchanged for it."""
    if not place.exists():
        os.rename(written, place)
    elif not exchange(written, place):
        aside = written.parent / _REPLACED
        aside.mkdir()
        os.rename(place, aside / place.name)
        os.rename(written, place)
    sync_directory(place.parent)


def _rotate(run_dir: Path, staging: Path, limit: int | None, *kept: str | Path | None) -> None:
    """Move the checkpoints of the earliest steps, except those in `kept`, into `staging`, until `limit` are left.

    The step number decides, because file times are wrong after a clock was set or a folder was copied.
    """
    if limit is None or limit <= 0:
        return
    found = manifest.checkpoints(run_dir)
    names = {Path(path).name for path in (*found[:1], *kept) if path is not None}
    removable = [path for path in reversed(found) if path.name not in names]
    for path in removable[: max(0, len(found) - limit)]:
        os.rename(path, staging / f"{path.name}.rotated")


def _not_written(trainer: Any, place: Path, error: Exception) -> str:
    tensors: list[torch.Tensor] = [p for p in trainer.model.parameters() if p.requires_grad]
    states = trainer.optimizer.state_dict()["state"].values()
    tensors += [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    needed, free = sum(tensor.nbytes for tensor in tensors), shutil.disk_usage(place.parent).free
    last = manifest.newest_whole(place.parent)
    then = f"{last} is whole: the same command resumes from it" if last else "no checkpoint was written before it"
    return (
        f"{place} could not be written: {error}. It takes about {readable(needed)}, and {readable(free)} are free in "
        f"{place.parent} without it; make room, or set save_total_limit. {then}"
    )


@_of_experts
def execute_jit_checkpoint(original: Callable[..., Any], manager: Any) -> None:
    """Handle SIGTERM under `enable_jit_checkpoint`: finish the current step, log it and save it like any other."""
    manager.is_checkpoint_requested = False
    manager.trainer.control.should_save = manager.trainer.control.should_training_stop = True


# --- resuming ---------------------------------------------------------------------------------------------------------


@_of_experts
def load_from_checkpoint(original: Callable[..., Any], trainer: Any, checkpoint: str, model: Any = None) -> None:
    """`Trainer._load_from_checkpoint`, after the checkpoint is verified against its manifest and this run."""
    check_resumed(trainer.model)
    path = Path(checkpoint)
    if path.is_dir():
        logger().info("reading %s against its manifest", path)
        if problem := checked_once(ranks_of(trainer.model), lambda: manifest.damage(path)):
            raise ValueError(_refusal(path, problem))
        sealed = manifest.read_manifest(path)
        if sealed is None:
            logger().warning(
                "%s has no manifest: plain transformers or an older ktft wrote it, nothing proves it", path
            )
        else:
            _require_same_run(path, sealed, trainer)
            setattr(trainer, TOKENS, sealed.get("tokens_together"))
            torch.manual_seed(sealed["seed"])  # before the sampler is made; generator states are restored later
    try:
        with made_whole(trainer.model):
            if isinstance(trainer.model, PreTrainedModel | PeftModel) or (path / SAFE_WEIGHTS_NAME).is_file():
                original(checkpoint, model)
            else:
                _load_around_adapter(path, trainer.model)
    except (ValueError, SafetensorError) as error:
        raise ValueError(_refusal(path, str(error))) from error


def _load_around_adapter(path: Path, model: nn.Module) -> None:
    """Load a model around a PEFT model that transformers cannot load, such as one with a value head.

    The other tensors are in safetensors files beside the adapter, under the model's names.
    """
    inside, adapted = next((n, m) for n, m in model.named_modules() if isinstance(m, KtftPeftMixin))
    adapted.load_adapter(str(path), adapted.active_adapters[0], is_trainable=True)
    files = (file for file in path.glob("*.safetensors") if file.name != ADAPTER_SAFE_WEIGHTS_NAME)
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not name.startswith(f"{inside}."):
            if name not in tensors:
                raise ValueError(f"it has no tensor {name}")
            with torch.no_grad():
                parameter.copy_(tensors[name])


def _require_same_run(path: Path, sealed: dict[str, Any], trainer: Any) -> None:
    if problem := manifest.other_parameters(sealed["parameters"], trainer.model):
        cure = "set lora_target (target_modules), lora_rank, expert_lora and the model as they were"
        raise ValueError(f"{path} cannot be resumed: {problem}; {cure}, {_ANEW.format(path)}")
    now = manifest.run_facts(trainer.model, trainer.args.optim)
    for key, value in sealed["run"].items():
        if now.get(key) != value:
            cure = f"set it as it was, {_ANEW.format(path)}"
            raise ValueError(f"{path} cannot be resumed: {key} was {value}, it is {now.get(key)} now; {cure}")
    for key, value in manifest.data_facts(trainer).items():
        if value != (then := sealed["data"][key]):
            logger().warning(
                "%s: %s were %s, they are %s now: data will be repeated or left out", path, key, then, value
            )


@_of_experts
def load_optimizer_and_scheduler(original: Callable[..., Any], trainer: Any, checkpoint: str | None) -> None:
    """`Trainer._load_optimizer_and_scheduler`; the loaded state is then compared with the manifest."""
    if checkpoint is None:
        return
    path = Path(checkpoint)
    together = ranks_of(trainer.model)
    try:
        if together is not None or has_shards(path):
            load_divided(path, trainer.model, trainer.optimizer, trainer.lr_scheduler)
        else:
            original(checkpoint)
    except (RuntimeError, ValueError, KeyError, EOFError) as error:
        raise ValueError(_refusal(path, f"its optimizer's state cannot be loaded: {error}")) from error
    if sealed := manifest.read_manifest(path):
        now = manifest.parameter_facts(trainer.model, trainer.optimizer, together)
        if problem := manifest.other_state(sealed["parameters"], now):
            raise ValueError(_refusal(path, problem))
        setattr(trainer, _LOSSES, sealed["losses"])
    _tell_settings(path, sealed or {}, trainer)


def _tell_settings(path: Path, sealed: dict[str, Any], trainer: Any) -> None:
    """Warn if the resumed run had already finished, and name the settings that differ from those it began with."""
    state = trainer.state
    changed = manifest.changed_settings(sealed.get("settings", {}), manifest.settings_of(trainer))
    others = f"Settings are others than then: {'; '.join(changed)}. " if changed else ""
    if state.global_step >= state.max_steps:
        logger().warning(
            "%s is of step %d, and training ends at step %d: this run had finished. No step is trained now, the same "
            "end is saved again. %sTo train on, raise max_steps or num_train_epochs; to train otherwise, give another "
            "output_dir",
            path,
            state.global_step,
            state.max_steps,
            others,
        )
    elif changed:
        logger().warning(
            "%s: %sWhat the checkpoint holds goes on, the learning rate, the optimizer's other settings and the order "
            "of the data among it; to train with others from the beginning, give another output_dir",
            path,
            others,
        )


def _refusal(path: Path, problem: str) -> str:
    other = manifest.newest_whole(path.parent, besides=path)
    cure = f"give resume_from_checkpoint: {other}, which is whole" if other else "no whole checkpoint lies beside it"
    if (path / ADAPTER_SAFE_WEIGHTS_NAME).is_file() and not (path / OPTIMIZER_NAME).is_file():
        cure += f". save_only_model: true keeps no optimizer; leave it out of runs to be resumed, {_ANEW.format(path)}"
    return f"{path} cannot be resumed: {problem}; {cure}"


@_of_experts
def run_epoch(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> None:
    """`Trainer._run_epoch`, which continues with the resumed run's losses and trains no step beyond the run's end."""
    _restore_losses(trainer)
    if trainer.state.global_step >= trainer.state.max_steps:
        trainer.control.should_training_stop = True  # a finished run is resumed: transformers would train another step
        return
    original(*args, **kwargs)


@_of_experts
def finalize_training(original: Callable[..., Any], trainer: Any, trial: Any, *args: Any, **kwargs: Any) -> Any:
    """`Trainer._finalize_training`, which loads the best checkpoint from its current path."""
    _restore_losses(trainer)
    _find_best(trainer.state, Path(trainer._get_output_dir(trial)))  # loaded by `original`, which keeps only it
    with made_whole(trainer.model) if trainer.args.load_best_model_at_end else nullcontext():
        return original(trial, *args, **kwargs)


def _restore_losses(trainer: Any) -> None:
    """Restore the losses of the resumed run, once, after the Trainer has reset them."""
    if losses := vars(trainer).pop(_LOSSES, None):
        trainer._tr_loss = torch.tensor(losses["since_logged"], device=trainer.args.device)
        trainer._total_loss_scalar = losses["logged"]
        trainer._globalstep_last_logged = losses["last_logged"]
        trainer._initial_global_step = 0  # later transformers divide the losses by the steps since this one

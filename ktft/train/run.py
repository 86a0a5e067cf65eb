"""Guards, spans and the training report around each optimizer step of every Trainer on a model with ktft's experts."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, IntervalStrategy

from ktft import spans
from ktft.adapters.linear import restore, shorten
from ktft.adapters.tensor_parallel import shards_of
from ktft.config import trace_file
from ktft.dense.embedding import HostEmbedding, to_device, to_host
from ktft.lanes.lanes import Lanes
from ktft.lanes.record import Record, reached_by
from ktft.late import settle
from ktft.model.experts import find_experts, layer_number
from ktft.native import Runtime
from ktft.ranks.group import Ranks
from ktft.ranks.sharded import divide_again, is_divided
from ktft.ranks.watch import explained
from ktft.train.attention import AttentionSpans
from ktft.train.dead import LifeSigns, vocabulary_of
from ktft.train.facts import Told, facts_of
from ktft.train.gradients import GradientWatch, clip_grad_norm, group_norms, rates_of, trained_parameters
from ktft.train.guards import ROUTED, Guards, Step
from ktft.train.loss import LossInChunks
from ktft.train.manifest import MANIFEST, checkpoints
from ktft.train.optimizer import AdamW
from ktft.train.out_of_memory import told
from ktft.train.parallel import average_gradients, over_ranks, ranks_of, split_parameters, summed, with_shards
from ktft.train.report import examine, logger
from ktft.train.run_report import JSON_NAME, RunReport
from ktft.train.run_times import OwnTimes, Since, memory_now, times_of
from ktft.train.step_order import TOKENS, StepOrder
from ktft.train.trace import Trace
from ktft.train.unchanged import WalkedOnce

FINISHED = "finished"
_KNOWN = ("transformers", "llamafactory", "ktft")
"""Packages whose trainers and callbacks read weights through `state_dict` alone."""
UNLOGGED_INTERVAL = 10
"""Steps between two checks of the gradients when `logging_strategy` is not `steps`."""


@dataclass
class Run:
    """A training run on a model with ktft's experts, from `on_train_begin` on.

    Attributes:
        loss: the current step's loss, summed over its batches so far; None at steps whose gradients are not checked.
        mark: time at which the last step, or the last work outside training (logging, saving, evaluating), ended.
        began: time at which the current step began, reading its data included.
    """

    records: dict[str, Record]  # name of a routed experts module, with any LoRA on it -> the counts that it keeps
    guards: Guards
    watch: GradientWatch
    report: RunReport
    attention: AttentionSpans
    trace: Trace | None
    walked: WalkedOnce
    runtime: Runtime
    loss_in_chunks: LossInChunks
    embedding: HostEmbedding | None
    lanes: Lanes | None = None
    ranks: Ranks | None = None
    shared: tuple[str, ...] = (ROUTED,)  # groups of which each rank has a part
    shards: tuple[str, ...] = ()  # the trained parameters of which tensor parallel ranks hold pieces
    split: frozenset[int] = frozenset()  # ids of the parameters of which each rank has its own rows
    norms: dict[str, float] = field(default_factory=dict)  # of gradients by group, at step `norms_step`
    norms_step: int = 0
    since: Since = field(default_factory=Since)
    own: OwnTimes = field(default_factory=OwnTimes)
    loss: Tensor | None = None
    mark: float = field(default_factory=time.perf_counter)
    began: float = 0.0
    optimizer: spans.Span | None = None
    order: StepOrder | None = None
    later: frozenset[int] = frozenset()  # ids of the parameters whose update may still go on in the next step

    @classmethod
    def of(
        cls, args: TrainingArguments, state: TrainerState, told: Told, *, model: nn.Module, **kwargs: Any
    ) -> Run | None:
        """Start a run; None if its model has no experts of ktft. `kwargs` are those of `on_train_begin`."""
        report = examine(model)
        if report is None:
            return None
        facts = facts_of(model, report, args, state, told, **kwargs)
        trace = None if (path := trace_file()) is None else Trace(path)
        experts = find_experts(model)
        for name, module in experts.items():
            module.record = Record(module.held, layer_number(name))
        parameters, runtime = trained_parameters(model), next(iter(experts.values())).layer.runtime
        tokens = torch.zeros(len(experts), report.num_experts, dtype=torch.int64)
        spans.RECORDER.start(trace)
        shorten(model)
        embedding = to_host(model)
        return cls(
            records={n.removesuffix(".base_layer"): m.record for n, m in experts.items() if m.record is not None},
            guards=Guards(parameters, runtime, LifeSigns(vocabulary_of(model))),
            watch=GradientWatch(parameters, runtime),
            report=RunReport(facts, list(map(layer_number, experts)), tokens),
            attention=AttentionSpans(model),
            trace=trace,
            walked=WalkedOnce(model),
            runtime=runtime,
            loss_in_chunks=LossInChunks(model, args, told=True),
            embedding=embedding,
            lanes=next((m.laned.lanes for m in experts.values() if m.laned is not None), None),
            ranks=ranks_of(model),
            shared=tuple({each.group for each in parameters.values()}) if is_divided(model) else (ROUTED,),
            shards=tuple(name for name in shards_of(model) if name in parameters),
            split=frozenset(map(id, split_parameters(model).values())),
        )

    def begin_step(self, look: bool) -> None:
        """Begin a step. `look` says whether its gradients are checked."""
        self.began = self.mark
        if self.lanes is not None:
            self.lanes.begin_step()
        spans.RECORDER.on = True
        spans.add("data", None, self.began, time.perf_counter(), waited=True)
        self.watch.on, self.loss = look, None
        for record in self.records.values():
            record.watching = look
            record.reached.zero_()

    def add_loss(self, loss: Any) -> None:
        """Add a batch's part of the step's loss, a scalar; it stays on its device, so that nothing waits for a GPU."""
        if self.watch.on and isinstance(loss, Tensor) and loss.numel() == 1:
            self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()

    def before_optimizer(self, number: int, optimizer: Any) -> None:
        """Begin the optimizer's span. Before it, check the step's complete gradients if this step checks them."""
        if self.watch.on:
            scaler = getattr(optimizer, "scaler", None)
            scale = float(scaler.get_scale()) if scaler is not None else 1.0
            norms = self.watch.take(scale)
            whole = with_shards(self.ranks, norms, self.shards)
            self.norms, self.norms_step = group_norms(whole, self.guards.parameters), number
            reached = reached_by(self.records)
            loss = None if self.loss is None else float(self.loss)
            loss = over_ranks(self.ranks, loss, self.norms, self.shared)
            groups = None if self.ranks is None else self.norms
            step = Step(number, norms, reached, rates_of(optimizer.param_groups), scaler is not None, loss, groups)
            self.guards.before_step(step)
        own = getattr(optimizer, "optimizer", optimizer)
        if isinstance(own, AdamW):
            own.later = self.later
        self.optimizer = spans.span("optimizer").begin()

    def end_step(self, number: int, skipped: bool) -> None:
        """End a step: check its updates, and record its times, tokens and memory. `skipped`: no update was made."""
        if self.lanes is not None:
            self.lanes.end_step()
        self.guards.after_step(number, skipped)
        ended = time.perf_counter()
        spans.RECORDER.on = False
        sums = spans.RECORDER.take()
        if self.trace is not None:
            self.trace.step(number, self.began, ended)
        seconds = ended - self.began
        counts = torch.zeros_like(self.report.expert_tokens)
        for row, record in zip(counts.numpy(), self.records.values(), strict=True):
            row[list(record.held.numbers)] = record.tokens.numpy()
        own_tokens = int(counts.sum())
        counts = summed(self.ranks, counts)
        tokens = max(record.rows for record in self.records.values())
        row = {"step": number, "seconds": seconds, **times_of(seconds, sums), "tokens": tokens, **memory_now()}
        self.report.steps.add({name: round(v, 6) if isinstance(v, float) else v for name, v in row.items()})
        self.report.spans.add(sums)
        self.since.add(row)
        self.own.add(row, own_tokens)
        self.report.expert_tokens += counts
        for record in self.records.values():
            record.tokens.zero_()
            record.rows = 0

    def may_end_later(self, trainer: Any) -> frozenset[int]:
        """The parameters that the optimizer may update while the next step has begun: the LoRA of experts, which are
        used one layer after the other. None, if somebody may look at them who does not know of it.
        """
        optimizer = getattr(trainer.optimizer, "optimizer", None)
        if self.ranks is not None or self.lanes is None or self.lanes.running is None or type(optimizer) is not AdamW:
            return frozenset()
        hooks = (optimizer._optimizer_step_post_hooks, optimizer._optimizer_step_pre_hooks)
        known = all(type(each).__module__.split(".")[0] in _KNOWN for each in trainer.callback_handler.callbacks)
        if not known or type(trainer).__module__.split(".")[0] not in _KNOWN or any(hooks) or trainer.optimizer.scaler:
            return frozenset()
        return frozenset(id(each.parameter) for each in self.guards.parameters.values() if each.layer is not None)

    def note_ranks(self) -> None:
        """Record what each rank did, for the report. All ranks must call it."""
        if self.ranks is not None:
            self.report.ranks = self.ranks.gather(self.own.content())

    def end(self, model: nn.Module, how: str) -> None:
        """Stop counting and checking; `how` is the reason, for the report."""
        with suppress(BaseException) if how != FINISHED else nullcontext():
            settle()
        self.report.spans.add(spans.RECORDER.stop(wait=how == FINISHED))
        if self.trace is not None:
            self.trace.close()
        self.attention.close()
        self.walked.close()
        self.loss_in_chunks.close()
        self.watch.close()
        restore(model)
        if self.embedding is not None:
            to_device(self.embedding)
        for module in find_experts(model).values():
            module.record = None
        self.report.ended = how
        self.report.note_guards(self.guards)


class RunCallback(TrainerCallback):
    """Guards and reports a run on a model with ktft's experts; ignores all other models."""

    def __init__(self) -> None:
        self.run: Run | None = None  # the current one, or the last one
        self.resume_from: str | None = None
        self.told = Told()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        self.run = Run.of(args, state, self.told, **kwargs)
        if self.run is not None and self.resume_from is not None:
            self.run.report.resume(Path(self.resume_from), state.global_step, state.log_history)

    def on_epoch_begin(self, *_: Any, **__: Any) -> None:
        """Restart the clock: training time counts again from here."""
        if self.run is not None:
            self.run.mark = time.perf_counter()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Record the metrics in the report, also when they are measured after training has ended."""
        divide_again(kwargs["model"])
        if self.run is not None:
            self.run.report.evaluate(state.global_step, kwargs.get("metrics") or {})
            self.run.mark = time.perf_counter()
            if self.run.report.ended != "running" and state.is_world_process_zero:
                self.run.report.write(Path(str(args.output_dir)))

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Begin a step; the data of its first batches has been read."""
        if self.run is not None:
            self.run.begin_step(self.run.guards.open or _looked_at(state.global_step + 1, args, state))

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        if self.run is not None:
            self.run.before_optimizer(state.global_step + 1, kwargs["optimizer"])

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        if self.run is not None and self.run.optimizer is not None:
            self.run.optimizer.end()
            self.run.optimizer = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check updates within the guards' window and, before a checkpoint, all parameters."""
        if self.run is not None:
            self.run.end_step(state.global_step, bool(getattr(kwargs["optimizer"], "step_was_skipped", False)))
            self._before_save(state, control)
            self.run.mark = time.perf_counter()

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Check all parameters before a checkpoint at the end of an epoch."""
        self._before_save(state, control)

    def _before_save(self, state: TrainerState, control: TrainerControl) -> None:
        if self.run is None or not control.should_save:
            return
        self.run.guards.check_finite(state.global_step)
        if self.run.guards.life.doubtful:
            control.should_save = False
            logger().warning(
                "step %d: no checkpoint is saved, for the run may be dead: the next steps decide. Those before stay",
                state.global_step,
            )

    def on_log(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Record what is logged in the report, and add times and memory for the console and other callbacks.

        These are kept out of the Trainer's history, which is identical whenever a run is repeated.
        """
        if self.run is None:
            return
        logs = kwargs.get("logs") or {}
        if "loss" in logs:
            norms = self.run.norms if self.run.norms_step == state.global_step else {}
            self.run.report.log(state.global_step, logs, norms)
            logs |= self.run.since.take()
        self.run.mark = time.perf_counter()

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any) -> None:
        """Write the report so far into the checkpoint, for the run that resumes from it."""
        if self.run is None:
            return
        checkpoint = Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        self.run.note_ranks()
        if state.is_world_process_zero and checkpoint.is_dir():
            self.run.report.note_guards(self.run.guards)
            self.run.report.write(checkpoint, page=False)
        if self.run.lanes is not None:
            self.run.lanes.forget()
        self.run.mark = time.perf_counter()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Check all parameters a last time and write the report."""
        if self.run is not None:
            self.run.guards.end(state.global_step)
            self.run.note_ranks()
            self._finish(kwargs["model"], args, state, FINISHED)

    def failed(self, model: nn.Module, args: TrainingArguments, state: TrainerState, error: BaseException) -> None:
        """Write the report of a run that ends with an exception."""
        if self.run is not None and self.run.report.ended == "running":
            self._finish(model, args, state, f"{type(error).__name__}: {error}")

    def _finish(self, model: nn.Module, args: TrainingArguments, state: TrainerState, how: str) -> None:
        assert self.run is not None
        self.run.end(model, how)
        directory = Path(str(args.output_dir))
        if state.is_world_process_zero and self.run.report.write(directory):
            logger().info("training report: %s", directory / JSON_NAME)

    def saved(self, directory: Path) -> None:
        """Add the hash of an adapter that was saved to `directory` after training to the report there."""
        if self.run is not None and self.run.report.ended != "running":
            self.run.report.note_adapter(directory)
            self.run.report.write(directory)


def _looked_at(number: int, args: TrainingArguments, state: TrainerState) -> bool:
    """Whether a step's gradients are checked even when nothing is in doubt: the step is logged, saved or the last."""
    by_steps = args.logging_strategy == IntervalStrategy.STEPS
    logged = number % ((by_steps and state.logging_steps) or UNLOGGED_INTERVAL) == 0
    first = number == 1 and args.logging_first_step
    saved = args.save_strategy == IntervalStrategy.STEPS and bool(state.save_steps) and number % state.save_steps == 0
    return logged or first or saved or number == state.max_steps


# --- methods without an event of their own ----------------------------------------------------------------------------


def train_loop(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """A Trainer's `_inner_training_loop`; the callback learns which checkpoint is resumed and of any exception."""
    callback = _callback(trainer)
    callback.run, callback.resume_from = None, kwargs.get("resume_from_checkpoint")
    callback.told = Told.by(trainer)
    if callback.resume_from is None:
        vars(trainer).pop(TOKENS, None)
    try:
        with explained() if ranks_of(trainer.model) is not None else nullcontext():
            return original(trainer, *args, **kwargs)
    except BaseException as error:
        run = callback.run
        short = None if run is None else told(trainer, run.order, run.lanes, error, _left(trainer))
        callback.failed(trainer.model, trainer.args, trainer.state, short or error)
        if short is not None:
            raise short from error
        if isinstance(error, KeyboardInterrupt) and callback.run is not None:
            error.add_note(_interrupted(trainer))
        raise


def clip_gradients(original: Callable[..., Any], trainer: Any, model: nn.Module) -> Any:
    """A Trainer's `_clip_grad_norm`, computed by ktft's threads and measured."""
    run = _callback(trainer).run
    if run is None:
        return original(trainer, model)
    run.watch.measure()
    trainer.accelerator.unscale_gradients()
    pieces = {id(each.parameter) for name, each in run.guards.parameters.items() if name in run.shards}
    most = trainer.args.max_grad_norm
    given = run.walked.parameters, most, run.runtime, run.ranks, run.split, pieces, run.later
    total, factor = clip_grad_norm(*given, anew=getattr(trainer.optimizer, "scaler", None) is not None)
    if run.later:
        trainer.optimizer.optimizer.grad_factor = factor
    return total


def batch_samples(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """A Trainer's `get_batch_samples`: the micro-batches of an optimizer step, and their number of items."""
    found = original(trainer, *args, **kwargs)
    if (run := _callback(trainer).run) is not None:
        run.order = run.order or StepOrder(trainer, run.ranks)
        run.order.begin(found[0])
    return found


def training_step(
    original: Callable[..., Any], trainer: Any, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    """A Trainer's `training_step`; its loss is recorded. Gradients that DDP has not averaged are averaged."""
    if (run := _callback(trainer).run) is None:
        return original(trainer, model, inputs, *args, **kwargs)
    # The loss is divided by the step's number of batches or tokens; accelerate would divide it once more, since
    # transformers before 5.5.4 also gives it the number of batches
    trainer.accelerator.gradient_accumulation_steps = 1
    run.later = run.may_end_later(trainer)
    order = run.order = run.order or StepOrder(trainer, run.ranks)
    loss = order.run(trainer, inputs, lambda batch: original(trainer, model, batch, *args, **kwargs))
    if run.ranks is not None and trainer.accelerator.sync_gradients and (run.ranks.tp_size > 1 or order.shared):
        average_gradients(trainer.model)
    run.add_loss(loss)
    return loss


def note_saved(trainer: Any, directory: Path) -> None:
    """Record that a Trainer's model was saved to `directory`, not as part of a checkpoint."""
    if trainer.args.should_save:
        _callback(trainer).saved(directory)


def _interrupted(trainer: Any) -> str:
    """The note for a person who interrupted training: the last whole checkpoint and how to resume from it."""
    step, path = f"interrupted after step {trainer.state.global_step}", _last_checkpoint(trainer)
    if path is None:
        return f"{step}; no checkpoint was saved, so training would begin anew"
    return f"{step}; the same command goes on from {path} (in Python: train(resume_from_checkpoint=True))"


def _left(trainer: Any) -> str:
    """What a failed run has left, for its user."""
    path = _last_checkpoint(trainer)
    if path is None:
        return "No checkpoint was saved yet, so training begins anew."
    return f"The last checkpoint is intact: the same command goes on from {path}."


def _last_checkpoint(trainer: Any) -> Path | None:
    """The newest checkpoint that is sealed."""
    found = checkpoints(Path(str(trainer.args.output_dir)))
    return next((path for path in found if (path / MANIFEST).is_file()), None)


def _callback(trainer: Any) -> RunCallback:
    """A Trainer's callback; a new one, without a run, if the Trainer is older than ktft's import or removed its own."""
    found = (each for each in trainer.callback_handler.callbacks if isinstance(each, RunCallback))
    return next(found, RunCallback())

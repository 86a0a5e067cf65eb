"""What makes a plan: tries every expert format, then changes of recipe and machine until one fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count, takewhile

import torch

from ktft import native
from ktft.adapters.reach import linear_names
from ktft.config import EXPERT_FORMATS, PROJECTIONS, SHARED_OUTER, Settings
from ktft.device import accelerator
from ktft.lora import NOT_SHARED
from ktft.model.dense_memory import dense_tiers
from ktft.model.fit import Room, fit
from ktft.model.memory import STORED, Footprint, resident_bytes, stored_layers
from ktft.model.shape import MoeShape
from ktft.model.shortage import by_cause, largest_cause, shortage
from ktft.model.workload import PlannedAdapters, Workload
from ktft.plan import rates
from ktft.plan.backbone import Untimed, timed_layers
from ktft.plan.description import ALONE, GPUS, Machine, Together, gpu_of_size
from ktft.plan.plan import FormatPlan, Plan, PlanChange, best_of, cost_of, lane_notes, wished_format
from ktft.plan.source import ModelSource
from ktft.plan.steptime import load_seconds, simulated_lanes, step_time
from ktft.system import GIB, readable
from ktft.train.recipe import Recipe, weight_bytes_of

TIGHT = 0.95  # of what is there: fits, but a mistake of the estimate's size would show
_RAM_SIZES = tuple(n * GIB for n in (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096))
_LEAST_CUTOFF = 512


class Planner:
    """Plans one model; rates are timed or looked up once, for the recipe it was made with.

    Args:
        machine: what one process has of it.
        together: how many processes share the experts, and how many of them each machine has.
    """

    def __init__(
        self,
        source: ModelSource,
        machine: Machine,
        recipe: Recipe,
        routing: str = "uniform",
        together: Together = ALONE,
    ) -> None:
        self.source, self.machine, self.recipe, self.routing = source, machine, recipe, routing
        self.together = together
        if machine.gpu is None and recipe.settings.needs_gpu:
            cure = "set placement: auto" if machine.measured else "describe one with --gpu, for instance --gpu 24G"
            raise ValueError(f"{recipe.settings.needs_gpu}, but the machine has no GPU; {cure}")
        if recipe.settings.expert_lora == SHARED_OUTER and together.ranks > 1:
            raise ValueError(NOT_SHARED.format(f"{together.ranks} processes share the experts"))
        self._adapters: dict[tuple[str, int, str | None], PlannedAdapters] = {}
        self.work = self._workload(recipe)
        self._on_gpu = machine.gpu is not None and not recipe.use_cpu
        self.formats = (source.expert_format,) if source.expert_format else EXPERT_FORMATS
        self._moe = max(source.shape.moe.values(), key=lambda moe: moe.parameters)
        lora = self.work.on_experts(min(source.shape.moe))
        self._notes: tuple[str, ...] = ()
        here = accelerator()
        gpus = [here.indexed().index] if here else []
        with torch.random.fork_rng(gpus):  # timing draws weights and inputs, which must not move anybody's generator
            self._others = self._other_rates()
            self._experts = {name: self._expert_rate(name, self._moe, lora) for name in self.formats}

    def _workload(self, recipe: Recipe) -> Workload:
        key = (recipe.lora_target, recipe.lora_rank, recipe.settings.expert_lora)
        if key not in self._adapters:
            self._adapters[key] = recipe.adapters(self.source.shape, self.source.model)
        work = recipe.workload(self._adapters[key], weight_bytes_of(self.source.config))
        return replace(work, ranks=self.together.ranks)

    def _other_rates(self) -> rates.OtherRates:
        published = rates.published_torch_rate(self.machine, self.work)
        if not self.machine.measured:
            return rates.OtherRates(published, None)
        shape, gpu = self.source.shape, self.machine.gpu is not None
        products = published if gpu else rates.timed_torch_rate(shape, self.work)
        try:
            here = accelerator() if gpu else None
            layers = timed_layers(self.source.model, shape, self.work, here.device if here else torch.device("cpu"))
        except Untimed as reason:
            self._notes += (f"the time of attention is estimated, not measured: {reason}",)
            layers = None
        if layers and layers.shortened:
            self._notes += (
                f"the time of attention follows from that of {layers.shortened} tokens, because a pass over whole "
                "sequences would take long here; what grows with their square is missing",
            )
        return rates.OtherRates(products, layers)

    def _expert_rate(self, name: str, moe: MoeShape, lora: PlannedAdapters) -> rates.ExpertRate:
        if not self.machine.measured:
            return rates.published_expert_rate(self.machine, moe, name, lora)
        settings = self.recipe.settings
        runtime = native.runtime_of(settings)
        activation = self.work.expert_activation(gpu=self._on_gpu)
        timed = rates.timed_expert_rate(runtime, self.machine, moe, name, self.work.expert_tokens, lora, activation)
        return timed.shared(self.together.local_ranks)

    def plan(self, notes: tuple[str, ...] = ()) -> Plan:
        """Every format, and changes if none fits."""
        formats = self._formats(self.machine, self.recipe)
        fits = any(each.fits for each in formats)
        changes = () if fits else tuple(self._changes())
        told = Plan(
            self.source,
            replace(self.machine, gpu=self.machine.gpu and self.machine.gpu.capped(self.recipe.settings)),
            self.recipe,
            self.work,
            formats,
            changes,
            (*notes, *self._notes),
            self.together,
        )
        return replace(told, notes=(*told.notes, *lane_notes(told), *self._faster(told.best())))

    def format_plan(self, name: str, machine: Machine) -> FormatPlan:
        """One expert format alone, on a machine that differs from the planner's in memory and GPU only."""
        (one,) = self._formats(machine, self.recipe, (name,))
        return one

    def _formats(self, machine: Machine, recipe: Recipe, names: tuple[str, ...] = ()) -> tuple[FormatPlan, ...]:
        machine, work = _usable(machine, recipe), self._workload(recipe)
        return tuple(self._format(name, machine, work, recipe.settings) for name in names or self.formats)

    def _format(self, name: str, machine: Machine, work: Workload, settings: Settings) -> FormatPlan:
        shape, rate, gpu, lanes = self.source.shape, self._experts[name], machine.gpu, None
        alike = replace(work, checkpointing=self.work.checkpointing) == self.work
        as_timed = gpu == _usable(self.machine, self.recipe).gpu and alike
        others = self._others if as_timed else replace(self._others, layers=None)
        room = Room(gpu.memory_bytes if gpu else None, machine.ram_bytes, machine.threads, machine.nodes)
        tiers = dense_tiers(settings, self.source.dense_format)
        fitted = fit(shape, work, name, room, tiers, settings.micro_batches_together)
        work, need = fitted.work, fitted.need
        sizes = [(need.ram_bytes, machine.ram_bytes)]
        if gpu is not None:
            sizes.append((need.vram_bytes, gpu.memory_bytes))
            free = gpu.memory_bytes - need.vram_bytes
            resident = resident_bytes(work.gpu_expert_memory, sum(need.packed), free, need.vram_bytes)
            used = need.vram_bytes + resident
            layers, stored = stored_layers(shape, work, gpu.memory_bytes - used, used)
            need = replace(need, vram=need.vram | {"resident experts": resident, STORED: stored})
            work = replace(work, stored=layers / shape.layers)
            lanes = simulated_lanes(shape, work, machine, rate, others, name, resident, self.routing)
        step = step_time(shape, work, machine, rate, others, sum(need.packed), lanes)
        return FormatPlan(
            format=name,
            work=work,
            footprint=need,
            load_seconds=load_seconds(self.source, machine, rate),
            step=step,
            lanes=lanes,
            tokens_per_second=work.accumulation * work.expert_tokens / step.total,
            lacking=tuple(_lacking(name, need, machine)),
            tight=any(needed > TIGHT * there for needed, there in sizes),
        )

    def _faster(self, best: FormatPlan | None) -> Iterator[str]:
        """Suggest turning off gradient checkpointing, which runs attention's forward twice, if the GPU has room and the
        step is faster without: layers are recorded only with it.
        """
        if best is None or best.lanes is None or not self.work.checkpointing:
            return
        recipe = replace(self.recipe, disable_gradient_checkpointing=True)
        (other,) = self._formats(self.machine, recipe, (best.format,))
        if other.fits and not other.tight and other.tokens_per_second > best.tokens_per_second:
            room = readable(other.footprint.vram_bytes)
            yield f"disable_gradient_checkpointing: true fits too, in {room} of GPU memory, at about {cost_of(other)}"

    # --- what to change -----------------------------------------------------------------------------------------------

    def _changes(self) -> list[PlanChange]:
        """Single changes that suffice; if there are none, one of the recipe together with one of the machine."""
        machines = list(self._machines())
        kinds = [[(words, self.machine, recipe) for words, recipe in rows] for rows in self._recipes()]
        kinds += [[(words, machine, self.recipe) for words, machine in rows] for rows in machines]
        changes = self._sufficient(kinds)
        also, frugal = "", self.recipe
        if frugal.per_device_train_batch_size > 1:  # the least memory for activations
            words, frugal = self._one_by_one()
            also = f", and {words}"
        elif changes:
            return changes
        changes += self._sufficient([(words + also, machine, frugal) for words, machine in rows] for rows in machines)
        return changes or self._both(also, frugal)

    def _sufficient(self, kinds: Iterable[Iterable[tuple[str, Machine, Recipe]]]) -> list[PlanChange]:
        """The first change of each kind that fits."""
        return [change for tried in kinds if (change := self._first(tried))]

    def _first(self, tried: Iterable[tuple[str, Machine, Recipe]]) -> PlanChange | None:
        """The first that fits."""
        for words, machine, recipe in tried:
            if best := best_of(self._formats(machine, recipe), wished_format(self.source, recipe)):
                return PlanChange(words, best)
        return None

    def _recipes(self) -> Iterator[list[tuple[str, Recipe]]]:
        """Changes of the recipe: of each kind some, the smallest change first."""
        recipe = self.recipe
        lora_on_experts = any(a.projection for a in self.work.adapters)
        if recipe.disable_gradient_checkpointing:
            yield [("disable_gradient_checkpointing: false", replace(recipe, disable_gradient_checkpointing=False))]
        if self.work.expert_activation(gpu=self._on_gpu) == "retain":
            settings = replace(recipe.settings, activation="recompute")
            yield [("kt_config.activation: recompute", replace(recipe, settings=settings))]
        if recipe.settings.gpu_expert_memory:
            settings = replace(recipe.settings, placement="auto", gpu_expert_memory=0)
            yield [("kt_config.gpu_expert_memory: 0 with placement: auto", replace(recipe, settings=settings))]
        if recipe.settings.dense_format is not None or recipe.settings.dense_placement != "auto":
            settings = replace(recipe.settings, dense_format=None, dense_placement="auto")
            words = "no kt_config.dense_format and no dense_placement, so that they are chosen"
            yield [(words, replace(recipe, settings=settings))]
        if recipe.settings.gpu_memory is not None:
            settings = replace(recipe.settings, gpu_memory=None)
            yield [("no kt_config.gpu_memory", replace(recipe, settings=settings))]
        if recipe.per_device_train_batch_size > 1:
            yield [self._one_by_one()]
        lengths = takewhile(lambda n: n >= _LEAST_CUTOFF, (recipe.cutoff_len >> n for n in count(1)))
        yield [(f"cutoff_len: {length}", replace(recipe, cutoff_len=length)) for length in lengths]
        if lora_on_experts and recipe.settings.expert_lora is None and self.together.ranks == 1:
            settings = replace(recipe.settings, expert_lora=SHARED_OUTER)
            yield [("kt_config.expert_lora: shared_outer", replace(recipe, settings=settings))]
        if recipe.lora_rank > 4 and lora_on_experts:
            yield [("lora_rank: 4", replace(recipe, lora_rank=4))]
        names = linear_names(self.source.model)
        dense = ",".join(sorted(name for name in names if name.removeprefix("experts.") not in PROJECTIONS))
        if dense and lora_on_experts:
            yield [(f"lora_target: {dense} (no LoRA on experts)", replace(recipe, lora_target=dense))]
        if self.machine.gpu is not None and not recipe.use_cpu:
            settings = replace(recipe.settings, placement="auto", gpu_expert_memory=0)
            yield [("use_cpu: true", replace(recipe, use_cpu=True, settings=settings))]

    def _one_by_one(self) -> tuple[str, Recipe]:
        """The same step, a sequence at a time."""
        sequences = self.recipe.per_device_train_batch_size * self.recipe.gradient_accumulation_steps
        small = replace(self.recipe, per_device_train_batch_size=1, gradient_accumulation_steps=sequences)
        return f"per_device_train_batch_size: 1 with gradient_accumulation_steps: {sequences}", small

    def _machines(self) -> Iterator[list[tuple[str, Machine]]]:
        if self.machine.gpu == _usable(self.machine, self.recipe).gpu:  # gpu_memory would cap a larger one too
            yield list(self._larger_gpus(self.machine))
        yield list(self._larger_ram(self.machine))

    def _larger_gpus(self, machine: Machine) -> Iterator[tuple[str, Machine]]:
        if machine.gpu is None:
            return
        for size in GPUS:
            gpu = gpu_of_size(size * GIB)
            if gpu.memory_bytes > machine.gpu.memory_bytes:
                yield f"a GPU of {size} GiB", replace(machine, gpu=gpu)

    def _larger_ram(self, machine: Machine) -> Iterator[tuple[str, Machine]]:
        for size in _RAM_SIZES:
            larger = machine.with_ram(size // self.together.local_ranks)
            if larger.ram_bytes > machine.ram_bytes:
                yield f"{size // GIB} GiB of memory", larger

    def _both(self, also: str, recipe: Recipe) -> list[PlanChange]:
        if self.machine.gpu is None:
            return []
        tried = (
            (f"{ram_words} and {gpu_words}{also}", both, recipe)
            for ram_words, larger in self._larger_ram(self.machine)
            for gpu_words, both in self._larger_gpus(larger)
        )
        return self._sufficient([tried])


def _usable(machine: Machine, recipe: Recipe) -> Machine:
    """What of a machine the recipe lets training use."""
    gpu = None if recipe.use_cpu or machine.gpu is None else machine.gpu.capped(recipe.settings)
    return replace(machine, gpu=gpu)


def _lacking(name: str, need: Footprint, machine: Machine) -> Iterator[str]:
    """A message for each shortage of memory."""
    short = need.ram_bytes > machine.ram_bytes
    if short:
        words = shortage(f"training with {name} experts", need.ram_bytes, machine.ram_bytes)
        yield f"{words}; {largest_cause(by_cause(need.ram))}"
    for node, (packed, size) in enumerate(zip(need.packed, machine.node_bytes, strict=True)):
        if packed > size and not short:
            short = True
            yield shortage(f"NUMA node {node}'s slice of {name} experts", packed, size)
    if machine.gpu is not None and need.vram_bytes > machine.gpu.memory_bytes:
        words = shortage("what runs on the GPU", need.vram_bytes, machine.gpu.memory_bytes, of="GPU memory")
        yield f"{words}; {largest_cause(by_cause(need.vram))}"

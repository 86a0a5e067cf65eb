"""The plan: memory and time of every expert format, which of them fit, and what to change if none does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ktft import native
from ktft.adapters.reach import linear_names
from ktft.config import DEFAULT_EXPERT_FORMAT, EXPERT_FORMATS, PROJECTIONS
from ktft.lanes.simulate import Simulated
from ktft.model.memory import FP32, LANE_PARTS, Adapter, Footprint, Workload, footprint, resident_bytes, shortage
from ktft.model.shape import MoeShape
from ktft.plan import rates
from ktft.plan.backbone import Untimed, timed_layers
from ktft.plan.machine import GPUS, Machine, gpu_of_size
from ktft.plan.source import ModelSource
from ktft.plan.steptime import StepTime, load_seconds, simulated_lanes, step_time
from ktft.system import GIB, readable
from ktft.train.recipe import Recipe, weight_bytes_of

TIGHT = 0.95  # of what is there: fits, but a mistake of the estimate's size would show
_RAM_SIZES = tuple(n * GIB for n in (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096))
_LEAST_CUTOFF = 512


@dataclass(frozen=True)
class FormatPlan:
    """One expert format on one machine. `lanes` are the experts of one pass, None without a GPU; `lacking` is empty
    when it fits, else the words for what there is too little of.
    """

    format: str
    footprint: Footprint
    load_seconds: float
    step: StepTime
    lanes: Simulated | None
    tokens_per_second: float
    lacking: tuple[str, ...]
    tight: bool

    @property
    def fits(self) -> bool:
        """Whether the machine has the memory."""
        return not self.lacking


@dataclass(frozen=True)
class Change:
    """Something that would make a format fit, and what it then costs."""

    words: str
    plan: FormatPlan


@dataclass(frozen=True)
class Plan:
    """Everything `ktft plan` tells."""

    source: ModelSource
    machine: Machine
    recipe: Recipe
    work: Workload
    formats: tuple[FormatPlan, ...]
    changes: tuple[Change, ...]
    notes: tuple[str, ...]

    @property
    def wished(self) -> str:
        """The format that training would take."""
        return _wished(self.source, self.recipe)

    @property
    def fits(self) -> bool:
        """Whether any format fits."""
        return any(each.fits for each in self.formats)

    def best(self) -> FormatPlan | None:
        """The recipe's own format if it fits, else the most precise that does."""
        return _best(self.formats, self.wished)


def _wished(source: ModelSource, recipe: Recipe) -> str:
    return source.expert_format or recipe.settings.expert_format or DEFAULT_EXPERT_FORMAT


def _best(plans: tuple[FormatPlan, ...], wished: str) -> FormatPlan | None:
    fitting = [each for each in plans if each.fits]
    own = [each for each in fitting if each.format == wished]
    precision = {name: i for i, name in enumerate(EXPERT_FORMATS)}
    return own[0] if own else min(fitting, key=lambda each: precision[each.format], default=None)


class Planner:
    """Plans one model; rates are timed or looked up once, for the recipe it was made with."""

    def __init__(self, source: ModelSource, machine: Machine, recipe: Recipe, routing: str = "uniform") -> None:
        self.source, self.machine, self.recipe, self.routing = source, machine, recipe, routing
        if machine.gpu is None and recipe.settings.needs_gpu:
            cure = "set placement: auto" if machine.measured else "describe one with --gpu, for instance --gpu 24G"
            raise ValueError(f"{recipe.settings.needs_gpu}, but the machine has no GPU; {cure}")
        self._adapters: dict[tuple[str, int], tuple[Adapter, ...]] = {}
        self.work = self._workload(recipe)
        self._on_gpu = machine.gpu is not None and not recipe.use_cpu
        self.formats = (source.expert_format,) if source.expert_format else EXPERT_FORMATS
        self._moe = max(source.shape.moe.values(), key=lambda moe: moe.parameters)
        lora = self.work.on_experts(min(source.shape.moe))
        self._notes: tuple[str, ...] = ()
        self._others = self._other_rates()
        self._experts = {name: self._expert_rate(name, self._moe, lora) for name in self.formats}

    def _workload(self, recipe: Recipe) -> Workload:
        key = (recipe.lora_target, recipe.lora_rank)
        if key not in self._adapters:
            self._adapters[key] = recipe.adapters(self.source.shape, self.source.model)
        return recipe.workload(self._adapters[key], weight_bytes_of(self.source.config))

    def _other_rates(self) -> rates.OtherRates:
        published = rates.published_torch_rate(self.machine, self.work)
        if not self.machine.measured:
            return rates.OtherRates(published, None)
        shape, gpu = self.source.shape, self.machine.gpu is not None
        products = published if gpu else rates.timed_torch_rate(shape, self.work)
        try:
            layers = timed_layers(self.source.model, shape, self.work, torch.device("cuda" if gpu else "cpu"))
        except Untimed as reason:
            self._notes += (f"the time of attention is estimated, not measured: {reason}",)
            layers = None
        return rates.OtherRates(products, layers)

    def _expert_rate(self, name: str, moe: MoeShape, lora: list[Any]) -> rates.ExpertRate:
        if not self.machine.measured:
            return rates.published_expert_rate(self.machine, moe, name, lora)
        settings = self.recipe.settings
        runtime = native.runtime(settings.threads, settings.numa_nodes)
        return rates.timed_expert_rate(
            runtime, self.machine, moe, name, self.work.tokens, lora, self.work.expert_activation(gpu=self._on_gpu)
        )

    def plan(self, notes: tuple[str, ...] = ()) -> Plan:
        """Every format, and changes if none fits."""
        formats = self._formats(self.machine, self.recipe)
        fits = any(each.fits for each in formats)
        changes = () if fits else tuple(self._changes())
        told = Plan(self.source, self.machine, self.recipe, self.work, formats, changes, (*notes, *self._notes))
        return replace(told, notes=(*told.notes, *lane_notes(told), *self._faster(told.best())))

    def _formats(self, machine: Machine, recipe: Recipe) -> tuple[FormatPlan, ...]:
        if recipe.use_cpu:
            machine = replace(machine, gpu=None)
        work = self._workload(recipe)
        return tuple(self._format(name, machine, work) for name in self.formats)

    def _format(self, name: str, machine: Machine, work: Workload) -> FormatPlan:
        shape, rate, lanes = self.source.shape, self._experts[name], None
        need = footprint(shape, work, name, threads=machine.threads, nodes=machine.nodes, gpu=machine.gpu is not None)
        room = [(need.ram_bytes, machine.ram_bytes)]
        if machine.gpu is not None:
            room.append((need.vram_bytes, machine.gpu.memory_bytes))
            free = machine.gpu.memory_bytes - need.vram_bytes
            resident = resident_bytes(work.gpu_expert_memory, sum(need.packed), free, need.vram_bytes)
            need = need.with_residents(resident)
            lanes = simulated_lanes(shape, work, machine, rate, name, resident, self.routing)
        alike = replace(work, checkpointing=self.work.checkpointing) == self.work
        as_timed = machine.gpu == self.machine.gpu and alike
        others = self._others if as_timed else replace(self._others, layers=None)
        step = step_time(shape, work, machine, rate, others, sum(need.packed), lanes)
        loading = load_seconds(self.source, machine, rate)
        lacking = []
        if need.ram_bytes > machine.ram_bytes:
            lacking.append(shortage(f"training with {name} experts", need.ram_bytes, machine.ram_bytes))
        for node, (packed, size) in enumerate(zip(need.packed, machine.node_bytes, strict=True)):
            if packed > size and not lacking:
                lacking.append(shortage(f"NUMA node {node}'s slice of {name} experts", packed, size))
        if machine.gpu is not None and need.vram_bytes > machine.gpu.memory_bytes:
            lacking.append(shortage("what runs on the GPU", need.vram_bytes, machine.gpu.memory_bytes, of="GPU memory"))
        return FormatPlan(
            format=name,
            footprint=need,
            load_seconds=loading,
            step=step,
            lanes=lanes,
            tokens_per_second=work.accumulation * work.tokens / step.total,
            lacking=tuple(lacking),
            tight=any(needed > TIGHT * there for needed, there in room),
        )

    def _faster(self, best: FormatPlan | None) -> Iterator[str]:
        """Without gradient checkpointing, which runs attention's forward twice, if the GPU has the memory."""
        if best is None or best.lanes is None or not self.work.checkpointing:
            return
        work = self._workload(replace(self.recipe, disable_gradient_checkpointing=True))
        other = self._format(best.format, self.machine, work)
        if other.fits and not other.tight:
            room = readable(other.footprint.vram_bytes)
            yield f"disable_gradient_checkpointing: true fits too, in {room} of GPU memory, at about {_cost(other)}"

    # --- what to change -----------------------------------------------------------------------------------------------

    def _changes(self) -> Iterator[Change]:
        """Single changes that suffice; if there are none, one of the recipe together with one of the machine."""
        found = False
        recipes, machines = list(self._recipes()), list(self._machines())
        for words, recipe in recipes:
            if change := self._try(words, self.machine, recipe):
                found = True
                yield change
        for several in machines:
            if change := self._smallest(several, self.recipe):
                found = True
                yield change
        if found and self.recipe.per_device_train_batch_size == 1:
            return
        frugal_words, frugal = self._frugal()
        for several in machines:
            if change := self._smallest(several, frugal, f", and {frugal_words}" if frugal_words else ""):
                found = True
                yield change
        if not found:
            yield from self._both(frugal_words, frugal)

    def _try(self, words: str, machine: Machine, recipe: Recipe) -> Change | None:
        best = _best(self._formats(machine, recipe), _wished(self.source, recipe))
        return Change(words, best) if best else None

    def _smallest(self, several: list[tuple[str, Machine]], recipe: Recipe, also: str = "") -> Change | None:
        return next((c for words, m in several if (c := self._try(words + also, m, recipe))), None)

    def _recipes(self) -> Iterator[tuple[str, Recipe]]:
        recipe = self.recipe
        batch, accumulation = recipe.per_device_train_batch_size, recipe.gradient_accumulation_steps
        if recipe.disable_gradient_checkpointing:
            yield "disable_gradient_checkpointing: false", replace(recipe, disable_gradient_checkpointing=False)
        if self.work.expert_activation(gpu=self._on_gpu) == "retain":
            settings = replace(recipe.settings, activation="recompute")
            yield "kt_config.activation: recompute", replace(recipe, settings=settings)
        if recipe.settings.gpu_expert_memory:
            settings = replace(recipe.settings, placement="auto", gpu_expert_memory=0)
            yield "kt_config.gpu_expert_memory: 0 with placement: auto", replace(recipe, settings=settings)
        if batch > 1:
            small = replace(recipe, per_device_train_batch_size=1, gradient_accumulation_steps=batch * accumulation)
            yield f"per_device_train_batch_size: 1 with gradient_accumulation_steps: {batch * accumulation}", small
        length = recipe.cutoff_len // 2
        while length >= _LEAST_CUTOFF:
            yield f"cutoff_len: {length}", replace(recipe, cutoff_len=length)
            length //= 2
        if recipe.lora_rank > 4 and any(a.projection for a in self.work.adapters):
            yield "lora_rank: 4", replace(recipe, lora_rank=4)
        dense = sorted(linear_names(self.source.model) - set(PROJECTIONS))
        if any(a.projection for a in self.work.adapters) and dense:
            yield f"lora_target: {','.join(dense)} (no LoRA on experts)", replace(recipe, lora_target=",".join(dense))
        if self.machine.gpu is not None and not recipe.use_cpu:
            settings = replace(recipe.settings, placement="auto", gpu_expert_memory=0)
            yield "use_cpu: true", replace(recipe, use_cpu=True, settings=settings)

    def _frugal(self) -> tuple[str, Recipe]:
        """The same training with the least memory for activations."""
        for words, recipe in self._recipes():
            if words.startswith("per_device_train_batch_size"):
                return words, recipe
        return "", self.recipe

    def _machines(self) -> Iterator[list[tuple[str, Machine]]]:
        if self.machine.gpu is not None:
            yield list(self._larger_gpus(self.machine))
        yield list(self._larger_ram(self.machine))

    def _larger_gpus(self, machine: Machine) -> Iterator[tuple[str, Machine]]:
        assert machine.gpu is not None
        for size in GPUS:
            gpu = gpu_of_size(size * GIB)
            if gpu.memory_bytes > machine.gpu.memory_bytes:
                yield f"a GPU of {size} GiB", replace(machine, gpu=gpu)

    def _larger_ram(self, machine: Machine) -> Iterator[tuple[str, Machine]]:
        for size in _RAM_SIZES:
            larger = machine.with_ram(size)
            if larger.ram_bytes > machine.ram_bytes:
                yield f"{size // GIB} GiB of memory", larger

    def _both(self, words: str, recipe: Recipe) -> Iterator[Change]:
        if self.machine.gpu is None:
            return
        for ram_words, larger in self._larger_ram(self.machine):
            for gpu_words, both in self._larger_gpus(larger):
                also = f", and {words}" if words else ""
                if change := self._try(f"{ram_words} and {gpu_words}{also}", both, recipe):
                    yield change
                    return


# --- as data ----------------------------------------------------------------------------------------------------------


def verdict(plan: Plan) -> str:
    """The answer in plain words."""
    best, wished = plan.best(), plan.wished
    if best is None:
        smallest = min(plan.formats, key=lambda each: each.footprint.ram_bytes)
        none = "No expert format fits" if len(plan.formats) > 1 else f"The converted {wished} experts do not fit"
        return f"{none}. {_sentence('; '.join(smallest.lacking))}."
    others = [each.format for each in plan.formats if each.fits and each is not best]
    words = f"{plan.source.name} can be trained here with {best.format} experts, at about {_cost(best)}"
    if best.format != wished:
        words = f"The recipe's {wished} experts do not fit. {words}"
    if best.tight:
        words += "; it is tight, within 5% of what there is"
    if plan.source.expert_format:
        return f"{words}. The experts were converted to that format; the original checkpoint can have others."
    return f"{words}. {_sentence('also fit: ' + ', '.join(others)) + '.' if others else 'No other format fits.'}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _cost(plan: FormatPlan) -> str:
    return f"{plan.step.total:,.1f} s a step ({plan.tokens_per_second:,.0f} tokens/s)"


_LANE_NAMES = {"cpu": "the CPU", "copy": "PCIe", "gpu": "the GPU"}


def lane_notes(plan: Plan) -> list[str]:
    """Where the experts of the best format run, what limits them, and what that takes of the GPU's memory."""
    best = plan.best() or next((each for each in plan.formats if each.format == plan.wished), plan.formats[0])
    if (lanes := best.lanes) is None:
        return []
    shares = {where: f"{share:.0%}" for where, share in lanes.shares.items()}
    busy = ", ".join(f"{_LANE_NAMES[lane]} {seconds / lanes.total:.0%}" for lane, seconds in lanes.busy.items())
    vram = best.footprint.vram
    own = ", ".join(f"{part} {readable(vram[part])}" for part in LANE_PARTS if vram.get(part))
    return [
        f"{best.format} experts: of their rows {shares['cpu']} run on the CPU, {shares['stream']} are streamed to the "
        f"GPU, {shares['resident']} meet residents there; {_LANE_NAMES[lanes.slowest]} is what most time is waited for "
        f"(busy: {busy})",
        f"of the GPU's memory the experts take: {own or 'nothing'}",
    ]


def advice(plan: Plan) -> list[str]:
    """What to change, a line each."""
    return [
        f"{change.words}: then {change.plan.format} fits ({readable(change.plan.footprint.ram_bytes)} of memory"
        + (f", {readable(change.plan.footprint.vram_bytes)} of GPU memory" if change.plan.footprint.vram else "")
        + f"), at about {_cost(change.plan)}"
        for change in plan.changes
    ]


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON's types; bytes, seconds and bytes/s."""
    shape, source, machine = plan.source.shape, plan.source, plan.machine
    adapter = sum(a.parameters for a in plan.work.adapters)
    return {
        "model": {
            "name": source.name,
            "model_type": shape.model_type,
            "expert_parameters": shape.expert_parameters,
            "other_parameters": shape.other_parameters,
            "moe_layers": len(shape.moe),
            "quantization": source.scheme,
            "converted_to": source.expert_format,
            "sizes_from": "shards" if source.from_shards else "config",
        },
        "machine": {
            **{k: v for k, v in asdict(machine).items() if k not in ("assumptions", "warnings")},
            "nodes": machine.nodes,
        },
        "recipe": {
            **{k: v for k, v in asdict(plan.recipe).items() if k != "settings"},
            "kt_config": asdict(plan.recipe.settings),
        },
        "adapter": {
            "parameters": adapter,
            "expert_parameters": sum(a.parameters for a in plan.work.on_experts()),
            "training_bytes": plan.work.training_bytes(plan.work.adapters),
        },
        "disk": {
            "checkpoint_bytes": source.expert_bytes + source.other_bytes,
            "adapter_bytes": adapter * FP32,
            "training_checkpoint_bytes": int(adapter * FP32 * (1 + plan.work.states)),
        },
        "formats": [_format_json(each) for each in plan.formats],
        "fits": plan.fits,
        "verdict": verdict(plan),
        "changes": [{"change": each.words, **_format_json(each.plan)} for each in plan.changes],
        "estimates": "memory, times and rates are estimates; bytes of packed experts and LoRA are exact",
        "assumptions": list(machine.assumptions),
        "warnings": list(machine.warnings),
        "notes": list(plan.notes),
    }


def _format_json(plan: FormatPlan) -> dict[str, Any]:
    need = plan.footprint
    return {
        "format": plan.format,
        "fits": plan.fits,
        "tight": plan.tight,
        "lacking": list(plan.lacking),
        "ram_bytes": need.ram_bytes,
        "ram": need.ram,
        "packed_bytes": list(need.packed),
        "node_bytes": list(need.node_bytes),
        "vram_bytes": need.vram_bytes,
        "vram": need.vram,
        "load_seconds": plan.load_seconds,
        "step_seconds": plan.step.total,
        "step": asdict(plan.step),
        "tokens_per_second": plan.tokens_per_second,
        "lanes": _lanes_json(plan.lanes) if plan.lanes else None,
    }


def _lanes_json(lanes: Simulated) -> dict[str, Any]:
    return {
        "row_shares": lanes.shares,
        "forward_seconds": lanes.forward,
        "backward_seconds": lanes.backward,
        "busy_seconds": lanes.busy,
        "limited_by": lanes.slowest,
    }

"""The plan: the memory and time of every expert format, the formats that fit, and the changes to make if none does."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ktft.config import EXPERT_FORMATS
from ktft.lanes.decide.simulate import Simulated
from ktft.model.dense_memory import HOST, PLAIN_ON_GPU
from ktft.model.memory import LANE_PARTS, STORED, Footprint
from ktft.model.workload import FP32, Workload
from ktft.plan.description import ALONE, Machine, Together
from ktft.plan.source import ModelSource
from ktft.plan.steptime import StepTime
from ktft.system import readable
from ktft.train.recipe import Recipe


@dataclass(frozen=True)
class FormatPlan:
    """The plan for one expert format on one machine.

    Attributes:
        work: the step as it would run: its micro-batches together, its dense weights and waiting activations.
        lanes: what experts add to one pass of these, simulated; None without a GPU.
        lacking: a message for each shortage of memory; empty if the format fits.
    """

    format: str
    work: Workload
    footprint: Footprint
    load_seconds: float
    step: StepTime
    lanes: Simulated | None
    tokens_per_second: float
    lacking: tuple[str, ...]
    tight: bool

    @property
    def fits(self) -> bool:
        """Whether the machine has enough memory for this format."""
        return not self.lacking


@dataclass(frozen=True)
class PlanChange:
    """A change to the recipe that would make a format fit, and the plan with that change."""

    words: str
    plan: FormatPlan


@dataclass(frozen=True)
class Plan:
    """Everything that `ktft plan` reports."""

    source: ModelSource
    machine: Machine
    recipe: Recipe
    work: Workload
    formats: tuple[FormatPlan, ...]
    changes: tuple[PlanChange, ...]
    notes: tuple[str, ...]
    together: Together = ALONE

    @property
    def wished(self) -> str:
        """The expert format that training would use."""
        return wished_format(self.source, self.recipe)

    @property
    def fits(self) -> bool:
        """Whether any format fits."""
        return any(each.fits for each in self.formats)

    def best(self) -> FormatPlan | None:
        """The recipe's own format if it fits, otherwise the most precise format that does; None if none fits."""
        return best_of(self.formats, self.wished)


def wished_format(source: ModelSource, recipe: Recipe) -> str:
    return source.expert_format or recipe.settings.expert_format or source.default_format


def best_of(plans: tuple[FormatPlan, ...], wished: str) -> FormatPlan | None:
    fitting = [each for each in plans if each.fits]
    own = [each for each in fitting if each.format == wished]
    precision = {name: i for i, name in enumerate(EXPERT_FORMATS)}
    return own[0] if own else min(fitting, key=lambda each: precision[each.format], default=None)


def verdict(plan: Plan) -> str:
    """The plan's conclusion, in sentences for the user."""
    best, wished = plan.best(), plan.wished
    if best is None:
        smallest = min(plan.formats, key=lambda each: each.footprint.ram_bytes)
        none = "No expert format fits" if len(plan.formats) > 1 else f"The converted {wished} experts do not fit"
        return f"{none}. {_sentence('; '.join(smallest.lacking))}."
    others = [each.format for each in plan.formats if each.fits and each is not best]
    words = f"{plan.source.name} can be trained here with {best.format} experts, at about {cost_of(best)}"
    if best.format != wished:
        words = f"The recipe's {wished} experts do not fit. {words}"
    if best.tight:
        words += "; it is tight, within 5% of what there is"
    if plan.source.expert_format:
        return f"{words}. The experts were converted to that format; the original checkpoint can have others."
    return f"{words}. {_sentence('also fit: ' + ', '.join(others)) + '.' if others else 'No other format fits.'}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def cost_of(plan: FormatPlan) -> str:
    return f"{plan.step.total:,.1f} s a step ({plan.tokens_per_second:,.0f} tokens/s)"


LANE_WORDS = {"cpu": "the CPU", "copy": "PCIe", "gpu": "the GPU"}


def lane_notes(plan: Plan) -> list[str]:
    """Notes on where the best format's experts run, what limits them, and how much GPU memory they take."""
    best = plan.best() or next((each for each in plan.formats if each.format == plan.wished), plan.formats[0])
    said = _ranks_notes, _order_notes, _stored_notes, _dense_notes
    notes = [note for each in said for note in each(plan, best)]
    if (lanes := best.lanes) is None:
        return notes
    shares: dict[str, str] = {where: f"{share:.0%}" for where, share in lanes.shares.items()}
    busy = ", ".join(f"{LANE_WORDS[lane]} {seconds / lanes.passes:.0%}" for lane, seconds in lanes.busy.items())
    vram = best.footprint.vram
    own = ", ".join(f"{part} {readable(vram[part])}" for part in LANE_PARTS if vram.get(part))
    return [
        *notes,
        f"{best.format} experts: of their rows {shares['cpu']} run on the CPU, {shares['stream']} are streamed to the "
        f"GPU, {shares['resident']} meet residents there; {LANE_WORDS[lanes.slowest]} is what they wait for most "
        f"(busy: {busy}); {lanes.between / lanes.passes:.0%} of a pass lies between one layer's experts and the next's",
        f"of the GPU's memory the experts take: {own or 'nothing'}",
    ]


def _order_notes(plan: Plan, best: FormatPlan) -> list[str]:
    """How many of several micro-batches go through the layers together."""
    if (count := plan.work.accumulation) == 1:
        return []
    return [
        f"{best.work.together} of a step's {count} micro-batches go through each layer together (docs/guide/step.md)"
    ]


def _stored_notes(plan: Plan, best: FormatPlan) -> list[str]:
    """How many checkpointed layers are not run again."""
    if not best.work.stored:
        return []
    layers = plan.source.shape.layers
    return [
        f"{round(best.work.stored * layers)} of {layers} layers keep their activations, in "
        f"{readable(best.footprint.vram[STORED])} of GPU memory, and are not run again in backward (docs/guide/step.md)"
    ]


def _dense_notes(plan: Plan, best: FormatPlan) -> list[str]:
    """Where the weights outside the experts and the waiting activations lie, and what that costs."""
    if plan.machine.gpu is None or best.lanes is None:
        return []
    work, ram, step = best.work, best.footprint.ram, best.step
    notes = []
    if work.dense != PLAIN_ON_GPU:
        costs = [f"{step.decoding:.2g} s a step to decode them"] if step.decoding else []
        if work.dense.placement == HOST:
            costs.append(f"{step.copying:.2g} s a step of copies to the GPU, which go on beside its work")
            costs.append(f"{readable(ram['other weights'])} of memory")
        notes.append(f"weights outside the experts are {work.dense}: {', '.join(costs)}")
    if work.away:
        size = readable(ram["activations that wait"])
        notes.append(f"activations that wait for backward do so in host memory ({size}), but for three layers'")
    return notes


def _ranks_notes(plan: Plan, best: FormatPlan) -> list[str]:
    """What the figures of a plan for several processes count."""
    together = plan.together
    if together.ranks == 1:
        return []
    memory = readable(together.local_ranks * best.footprint.ram_bytes)
    return [
        f"{together.ranks} processes, one for each GPU, on {together.machines} machine"
        f"{'s' * (together.machines > 1)}: memory and GPU memory are of one process, tokens/s of all. The "
        f"{together.local_ranks} of a machine take {memory} of its memory with {best.format} experts; each holds "
        f"1/{together.ranks} of the experts"
    ]


def advice(plan: Plan) -> list[str]:
    """The changes that would make the recipe fit, one line for each."""
    return [
        f"{change.words}: then {change.plan.format} fits ({readable(change.plan.footprint.ram_bytes)} of memory"
        + (f", {readable(change.plan.footprint.vram_bytes)} of GPU memory" if change.plan.footprint.vram else "")
        + f"), at about {cost_of(change.plan)}"
        for change in plan.changes
    ]


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan as JSON types. Sizes are in bytes, times in seconds, rates in units per second."""
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
        "processes": asdict(plan.together),
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
        "micro_batches_together": plan.work.together,
        "dense_format": plan.work.dense.format,
        "dense_placement": plan.work.dense.placement,
        "activations_away": plan.work.away,
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

"""PEFT models whose LoRA reaches the routed experts, and their adapters on disk under standard names."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftConfig, PeftModel
from peft import get_peft_model as peft_get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer, _ExcludedModule, check_target_module_exists
from peft.utils import PeftType, get_peft_model_state_dict
from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND, SAFETENSORS_WEIGHTS_NAME
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from ktft.adapters.lora import UNMERGED, KtftExpertsLora, Rank, to_standard
from ktft.config import PROJECTIONS, require_tested
from ktft.model.experts import KtftExperts, experts_family

Shapes = dict[str, tuple[int, ...]]


class HasExperts(Protocol):
    """What an adapter needs to know of a layer's experts to find its ranks on them."""

    num_experts: int


def get_peft_model(model: PreTrainedModel, config: LoraConfig, adapter_name: str = "default") -> PeftModel:
    """PEFT's `get_peft_model` for a model with ktft's experts; the model is changed in place.

    `config.target_modules` follows PEFT's rule, applied to the standard names of the experts' projections
    (`model.layers.3.mlp.experts.7.gate_proj`): `gate_proj` selects it on routed and shared experts and dense MLPs.
    `experts` selects the routed experts alone, `all-linear` everything but the output layer and the router.

    Raises:
        ValueError: a target matches nothing, or only some experts of a layer; DoRA and other methods that ktft does
            not have; a model without ktft's experts.
    """
    _require_experts(model)
    _resolve(model, config)
    with _reaching_experts(model, config, adapter_name):
        return _adapt(peft_get_peft_model(model, config, adapter_name=adapter_name))


def load_adapter(
    model: PreTrainedModel | PeftModel,
    path: str | os.PathLike[str],
    adapter_name: str = "default",
    is_trainable: bool = False,
    **hub: Any,
) -> PeftModel:
    """Put a saved adapter on a model with ktft's experts, changed in place; every tensor must fit and be used.

    Args:
        model: as loaded, or returned by this function or `get_peft_model` (the new adapter then becomes active).
        path: an adapter directory, or a repository of the Hugging Face Hub.
        adapter_name: name it by which PEFT will know it.
        is_trainable: train it further; otherwise its parameters are frozen and the model is put in eval mode.
        hub: `subfolder`, `revision`, `cache_dir`, `token`.

    Raises:
        ValueError: a tensor is missing, left over, of another shape, NaN or Inf; or as for `get_peft_model`.
    """
    directory = local_directory(path, **hub)
    adapted: Any = model
    if not isinstance(model, KtftPeftMixin):
        _require_experts(model)
        config = read_config(directory)
        config.inference_mode = not is_trainable
        with _reaching_experts(model, config, adapter_name):
            adapted = _adapt(peft_get_peft_model(adapted, config, adapter_name=adapter_name))
    adapted.load_adapter(str(directory), adapter_name, is_trainable=is_trainable)
    adapted.set_adapter(adapter_name)
    if not is_trainable:
        adapted.set_requires_grad(adapter_name, False)
    return adapted


if TYPE_CHECKING:
    from peft import PeftModel as _Base  # what the mixin is mixed into
else:
    _Base = object


class KtftPeftMixin(_Base):
    """What a `PeftModel` with expert LoRA does differently: standard names on disk, strict loading, no merging."""

    def add_adapter(self, adapter_name: str, peft_config: Any, *args: Any, **kwargs: Any) -> None:
        """Add another adapter, on the routed experts too."""
        with _reaching_experts(self.base_model.model, peft_config, adapter_name):
            super().add_adapter(adapter_name, peft_config, *args, **kwargs)

    def load_adapter(self, model_id: str | os.PathLike[str], adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        """Load an adapter as PEFT does, but refuse one of which a tensor is missing, left over, misshapen or NaN."""
        hub = {key: kwargs.pop(key) for key in _HUB_KEYS if key in kwargs}
        directory = local_directory(model_id, **hub)
        new = adapter_name not in self.peft_config
        if new:
            self.add_adapter(adapter_name, read_config(directory))
        try:
            _check_file(directory, _standard_tensors(self, adapter_name))
            kwargs["torch_device"] = "cpu"  # expert LoRA stays there, and may not fit a GPU
            return super().load_adapter(str(directory), adapter_name, *args, **kwargs)
        except ValueError:
            if new:
                self.delete_adapter(adapter_name)
            raise

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        safe_serialization: bool = True,
        *args: Any,
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Save adapters under standard per-expert names: written beside, verified, then moved into place."""
        if not safe_serialization:
            raise ValueError("ktft saves adapters as safetensors only; leave safe_serialization on")
        if not is_main_process:
            return
        target = Path(save_directory)
        target.mkdir(parents=True, exist_ok=True)
        selected = kwargs.get("selected_adapters") or list(self.peft_config)
        tensors = to_standard(self.state_dict() if state_dict is None else state_dict, expert_layers(self))
        with tempfile.TemporaryDirectory(dir=target, prefix=".saving-") as scratch:
            if (target / "README.md").exists():  # PEFT updates an existing model card
                shutil.copy(target / "README.md", scratch)
            super().save_pretrained(scratch, True, *args, state_dict=tensors, **kwargs)
            for name in selected:
                written = Path(scratch) if name == "default" else Path(scratch, name)
                _check_file(written, _standard_tensors(self, name), values=False)
            _move_files(Path(scratch), target)

    def merge_and_unload(self, *_: Any, **__: Any) -> None:
        """Refused."""
        raise ValueError(UNMERGED)

    def merge_adapter(self, *_: Any, **__: Any) -> None:
        """Refused."""
        raise ValueError(UNMERGED)


def expert_layers(model: nn.Module) -> dict[str, KtftExpertsLora]:
    """Module name -> layer, for the routed experts that have LoRA."""
    return {name: module for name, module in model.named_modules() if isinstance(module, KtftExpertsLora)}


def linear_names(model: Any) -> set[str]:
    """Last names of all that LoRA can train: linear layers and experts' projections, less the output layer and what
    the family's `without_lora` names.
    """
    unused = set(experts_family(model).without_lora)
    output = model.get_output_embeddings()
    names = set(PROJECTIONS)
    for name, module in _adaptable(model).items():
        path = name.split(".")
        if isinstance(module, nn.Linear) and module is not output and not unused & set(path):
            names.add(path[-1])
    return names


def _require_experts(model: Any) -> None:
    require_tested("peft")
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError("the model has adapters already; add one with its add_adapter or with ktft.load_adapter")
    if not any(isinstance(module, KtftExperts) for module in model.modules()):
        raise ValueError(
            "the model has no experts held by ktft; load it with from_pretrained(..., quantization_config=KtftConfig())"
        )


def _adapt(model: Any) -> PeftModel:
    cls = type(model)
    model.__class__ = type(f"Ktft{cls.__name__}", (KtftPeftMixin, cls), {})
    return model


# --- which modules an adapter reaches ---------------------------------------------------------------------------------


def _adaptable(model: Any) -> dict[str, nn.Module]:
    """Module name -> module without LoRA around it, for every module PEFT would consider."""
    found: dict[str, nn.Module] = {}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if not name or name.startswith(inside):
            continue
        if isinstance(module, BaseTunerLayer):
            inside += (f"{name}.",)
            module = module.get_base_layer()
        found[name] = module
    return found


def _resolve(model: Any, config: Any) -> None:
    if isinstance(config.target_modules, str) and config.target_modules.lower() == INCLUDE_LINEAR_LAYERS_SHORTHAND:
        config.target_modules = list(linear_names(model))
    _check_request(model, config)


def _check_request(model: Any, config: Any) -> None:
    """Each requested name must match something that LoRA there would train."""
    modules = _adaptable(model)
    targets = config.target_modules
    known = f"it has {', '.join(sorted(linear_names(model)))}, and experts for the routed experts alone"
    standard = [f"{n}.0.{p}" for n, m in modules.items() if isinstance(m, KtftExperts) for p in PROJECTIONS]
    if not targets:
        raise ValueError(f"target_modules is {targets!r}: name what LoRA shall train in the model; {known}")
    for target in [targets] if isinstance(targets, str) else sorted(targets):
        probe = LoraConfig(target_modules=target if isinstance(targets, str) else [target])
        matched = [name for name in (*modules, *standard) if check_target_module_exists(probe, name)]
        if not matched:
            raise ValueError(f"target_modules (lora_target) {target!r} matches nothing in the model; {known}")
        family = experts_family(model)
        unused = [name for name in matched if set(family.without_lora) & set(name.split("."))]
        if unused:
            what = "router" if family.router in unused[0].split(".") else "module"
            raise ValueError(
                f"target_modules (lora_target) {target!r} matches the {what} {unused[0]}, whose forward would not use "
                f"LoRA, so that it would never train; leave the {what} out"
            )


@dataclass(frozen=True)
class Reach:
    """Full names of the modules to give LoRA, ranks on routed experts by module, and target_modules to save."""

    modules: set[str]
    ranks: dict[str, dict[str, Rank]]
    standard: set[str] | str


def planned_reach(model: Any, config: LoraConfig, saved: bool = False) -> Reach:
    """What `get_peft_model` would give LoRA, and the same errors; the model, which may be on meta, is not changed.

    Args:
        saved: the config is a saved adapter's, whose targets are spelled out and need not match one by one.
    """
    if not saved:
        _resolve(model, config)
    return _reach(model, config)


def _reach(model: Any, config: Any) -> Reach:
    if config.peft_type != PeftType.LORA or config.target_parameters:
        raise ValueError(
            f"ktft trains LoRA on target_modules, not {config.peft_type} with "
            f"target_parameters={config.target_parameters}; experts are no torch parameters"
        )
    if config.layers_to_transform is not None and not config.layers_pattern:
        config.layers_pattern = ["layers"]  # else PEFT takes the expert's number for the layer's
    modules: set[str] = set()
    ranks: dict[str, dict[str, Rank]] = {}
    direct: dict[str, int] = {}
    for name, module in _adaptable(model).items():
        match = check_target_module_exists(config, name)
        if isinstance(module, KtftExperts):
            if match:
                direct[name] = module.num_experts
            if not isinstance(match, _ExcludedModule) and (own := expert_ranks(config, name, module, bool(match))):
                ranks[name] = own
        elif match:
            modules.add(name)
    return Reach(modules | set(ranks), ranks, _standard_targets(config.target_modules, direct))


def expert_ranks(config: Any, name: str, experts: HasExperts, whole: bool) -> dict[str, Rank]:
    """Projection -> rank, for the projections of one layer's experts that the config targets."""
    ranks: dict[str, Rank] = {}
    for projection in PROJECTIONS:
        keys = [f"{name}.{expert}.{projection}" for expert in range(experts.num_experts)]
        targeted = [key for key in keys if whole or check_target_module_exists(config, key)]
        if not targeted:
            continue
        if len(targeted) < len(keys):
            raise ValueError(
                f"target_modules match {projection} of {len(targeted)} of the {len(keys)} experts of {name}; ktft "
                "trains all experts of a layer or none"
            )
        found = {
            (_pattern(config.rank_pattern, k, config.r), _pattern(config.alpha_pattern, k, config.lora_alpha))
            for k in keys
        }
        if len(found) > 1:
            raise ValueError(f"rank_pattern or alpha_pattern differ between experts of {name}: {sorted(found)}")
        ranks[projection] = Rank(*found.pop())
    for pattern in (*config.rank_pattern, *config.alpha_pattern):
        if get_pattern_key([pattern], name) == pattern != name:
            raise ValueError(f"the pattern {pattern!r} matches {name}; name its projections instead, as in 'down_proj'")
    return ranks


def _pattern(patterns: dict[str, Any], key: str, default: Any) -> Any:
    return patterns.get(get_pattern_key(list(patterns), key), default) if patterns else default


def _standard_targets(targets: set[str] | str, direct: dict[str, int]) -> set[str] | str:
    """`target_modules` as other software reads them: `experts`, a module of ktft's alone, spelled out per expert."""
    if not direct:
        return targets
    if isinstance(targets, str):
        return rf"(?:{targets})|(?:{targets})\.\d+\.(?:{'|'.join(PROJECTIONS)})"
    standard: set[str] = set()
    for target in targets:
        counts = {count for name, count in direct.items() if name == target or name.endswith(f".{target}")}
        standard |= {f"{target}.{e}.{p}" for e in range(max(counts)) for p in PROJECTIONS} if counts else {target}
    return standard


@contextmanager
def _reaching_experts(model: Any, config: Any, adapter_name: str) -> Iterator[None]:
    """While PEFT puts layers into the model: `config` names modules of ktft's too, and their layer class."""
    reach = _reach(model, config)
    ranks = {model.get_submodule(name): own for name, own in reach.ranks.items()}

    def create(target: KtftExperts, name: str, **kwargs: Any) -> KtftExpertsLora:
        return KtftExpertsLora(target, name, ranks[target], **kwargs)

    for module, own in ranks.items():
        if isinstance(module, KtftExpertsLora):
            module.ranks[adapter_name] = own
    config._register_custom_module({KtftExperts: create})
    config.target_modules = reach.modules
    try:
        yield
    finally:
        config.target_modules, config._custom_modules = reach.standard, None


# --- adapters on disk -------------------------------------------------------------------------------------------------

_HUB_KEYS = ("subfolder", "revision", "cache_dir", "token")


def local_directory(path: str | os.PathLike[str], subfolder: str | None = None, **hub: Any) -> Path:
    """An adapter's directory; one of the Hugging Face Hub is downloaded. Raises ValueError if it is no adapter."""
    root = Path(path)
    if not root.is_dir():
        if root.is_absolute() or len(root.parts) != 2:
            raise ValueError(f"adapter {str(path)!r} is not a directory")
        root = Path(snapshot_download(str(path), allow_patterns=["*adapter_*", "*/adapter_*"], **hub))
    directory = root / subfolder if subfolder else root
    for name in ("adapter_config.json", SAFETENSORS_WEIGHTS_NAME):
        if not (directory / name).is_file():
            raise ValueError(f"{directory} has no {name}; give the directory that save_pretrained wrote")
    return directory


def read_config(directory: Path) -> LoraConfig:
    """An adapter's configuration. Raises ValueError if it is not LoRA."""
    config = PeftConfig.from_pretrained(str(directory))
    if not isinstance(config, LoraConfig):
        raise ValueError(f"{directory} holds a {config.peft_type} adapter; ktft loads LoRA")
    return config


def _standard_tensors(model: Any, adapter_name: str) -> Shapes:
    """Names and shapes that an adapter's file must have: PEFT's for all but experts, theirs counted one by one."""
    layers = {name: layer for name, layer in expert_layers(model).items() if adapter_name in layer.lora_A}
    prefixes = tuple(f"{name}.lora_" for name in layers)
    others = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(prefixes)}
    tensors = get_peft_model_state_dict(model, state_dict=others, adapter_name=adapter_name)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, layer in layers.items():
        for kind, projection, stacked in layer.tensors(adapter_name):
            for expert in range(layer.experts.num_experts):
                shapes[f"{name}.{expert}.{projection}.{kind}.weight"] = tuple(stacked.shape[1:])
    return shapes


def _check_file(directory: Path, expected: Shapes, values: bool = True) -> None:
    """Compare an adapter file with what the model holds, and look for NaN and Inf in `values`."""
    file = directory / SAFETENSORS_WEIGHTS_NAME
    with safe_open(file, framework="pt", device="cpu") as tensors:
        found = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        problems = [
            f"{len(names)} tensors {what}, the first is {names[0]}"
            for what, names in (
                ("of the model are missing", sorted(expected.keys() - found.keys())),
                ("are left over", sorted(found.keys() - expected.keys())),
            )
            if names
        ]
        problems += [
            f"{name} has shape {shape} in the adapter and {expected[name]} in the model"
            for name, shape in sorted(found.items())
            if expected.get(name, shape) != shape
        ][:1]
        if not problems and values:
            problems += [f"{name} holds NaN or Inf" for name in found if not _finite(tensors.get_tensor(name))][:1]
    if problems:
        raise ValueError(f"{file} does not fit the model: {'; '.join(problems)}")


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _move_files(source: Path, target: Path) -> None:
    """Move a directory's files into another, each whole or not at all."""
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, place)

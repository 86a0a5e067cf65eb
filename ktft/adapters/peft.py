"""PEFT models with LoRA on the routed experts too, however the models are made."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from peft import LoraConfig, PeftModel
from peft import get_peft_model as peft_get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer, cast_adapter_dtype
from peft.utils.constants import SAFETENSORS_WEIGHTS_NAME
from torch import nn
from transformers import PreTrainedModel

from ktft import hosts
from ktft.adapters import files
from ktft.adapters.below import BELOW, holds, stands_on
from ktft.adapters.card import NEW_CARD, update_card
from ktft.adapters.gathered import gathered
from ktft.adapters.injection import as_saved
from ktft.adapters.lora import UNMERGED, KtftExpertsLora
from ktft.adapters.reach import check_method
from ktft.adapters.several import SeveralAdapters, trainability_kept
from ktft.adapters.shared import check_form
from ktft.adapters.tensor_parallel import with_whole_shapes
from ktft.adapters.whole_modules import take_precision
from ktft.model.experts import find_experts, first_experts
from ktft.versions import require_stack, version_of

logger = logging.getLogger("ktft")


def get_peft_model(model: PreTrainedModel, config: LoraConfig, adapter_name: str = "default") -> PeftModel:
    """PEFT's `get_peft_model` for a model with ktft's experts; the model is changed in place.

    `config.target_modules` follows PEFT's rule, applied to the standard names of the experts' projections
    (`model.layers.3.mlp.experts.7.gate_proj`): `gate_proj` selects it on routed and shared experts and dense MLPs.
    `experts` selects the routed experts alone, `experts.down_proj` one projection of them, `all-linear` everything but
    the output layer and the router.

    Raises:
        ValueError: a target matches nothing or only some experts of a layer, the method is DoRA or another one that
            ktft does not support, or the model has no experts of ktft.
    """
    _require_experts(model)
    return cast(PeftModel, peft_get_peft_model(model, config, adapter_name=adapter_name))


def load_adapter(
    model: PreTrainedModel | PeftModel,
    path: str | os.PathLike[str],
    adapter_name: str = "default",
    is_trainable: bool = False,
    **options: Any,
) -> PeftModel:
    """Put a saved adapter on a model with ktft's experts. Every tensor must fit and be used.

    Args:
        model: the model, changed in place: as loaded, or as returned by this function or `get_peft_model` (the new
            adapter then becomes active).
        path: an adapter directory, or a repository of the Hugging Face Hub.
        is_trainable: train the adapter further; otherwise its parameters are frozen and the model is in eval mode.
        options: `subfolder`, `revision`, `cache_dir`, `token`, and the options of PEFT's `load_adapter`.

    Raises:
        ValueError: a tensor is missing, left over, of another shape, NaN or Inf; and as for `get_peft_model`.
    """
    directory = files.local_directory(path, **{key: options.pop(key) for key in files.HUB_KEYS if key in options})
    adapted: Any = model
    if not isinstance(model, KtftPeftMixin):
        _require_experts(model)
        config = files.read_config(directory)
        config.inference_mode = not is_trainable
        form = _saved_form(model, directory, is_trainable, adapter_name)
        adapted = peft_get_peft_model(adapted, as_saved(config, form), adapter_name=adapter_name)
    try:
        adapted.load_adapter(str(directory), adapter_name, is_trainable=is_trainable, **options)
    except ValueError:
        if adapted is not model:
            adapted.unload()  # so that the caller can try again
        raise
    adapted.set_adapter(adapter_name)
    if not is_trainable:
        adapted.set_requires_grad(adapter_name, False)
    return adapted


class KtftPeftMixin(SeveralAdapters):
    """Overrides for a `PeftModel` with expert LoRA: standard names on disk, strict loading, no merging."""

    def add_adapter(self, adapter_name: str, peft_config: Any, *args: Any, **kwargs: Any) -> None:
        """Add another adapter, on the routed experts too."""
        with trainability_kept(self):
            super().add_adapter(adapter_name, peft_config, *args, **kwargs)
            # PEFT casts the first adapter to fp32, but a later one only after loading it, which would round it to bf16.
            cast_adapter_dtype(self, adapter_name)

    def load_adapter(self, model_id: str | os.PathLike[str], adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        """Load an adapter as PEFT does, but refuse one that is damaged or has a tensor that does not fit."""
        hub = {key: kwargs.pop(key) for key in files.HUB_KEYS if key in kwargs}
        directory = files.local_directory(model_id, **hub)
        config, new = files.read_config(directory), adapter_name not in self.peft_config
        trains = args[:1] == (True,) or bool(kwargs.get("is_trainable"))
        form = _saved_form(self, directory, trains, adapter_name)
        if new:
            self.add_adapter(adapter_name, as_saved(config, form))
        try:
            layers = expert_layers(self)
            expected = files.adapter_tensors(self, layers, adapter_name, with_whole_shapes(self, self.state_dict()))
            elsewhere = files.names_elsewhere(layers, adapter_name)
            files.check_loadable(directory, expected, self.config.model_type, elsewhere)
            below = files.read_own_metadata(directory).get(files.RECORD, {}).get(BELOW)
            if not below or not holds(Path(self.config.name_or_path), below):
                files.warn_of_another_base(config, self.config.name_or_path)
                if below:
                    logger.warning("%s is %s", directory, stands_on(below))
            kwargs["torch_device"] = "cpu"  # expert LoRA stays there, and may not fit a GPU
            result = super().load_adapter(str(directory), adapter_name, *args, **kwargs)
            if result.unexpected_keys:
                raise ValueError(_left_out(directory, result.unexpected_keys))
            if trains:  # else training would go on from rounded values
                take_precision(self, adapter_name, directory / SAFETENSORS_WEIGHTS_NAME)
            return result
        except ValueError:
            if new:
                self.delete_adapter(adapter_name)
            raise

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        safe_serialization: bool = True,
        selected_adapters: list[str] | None = None,
        save_embedding_layers: str | bool = "auto",
        is_main_process: bool = True,
        path_initial_model_for_weight_conversion: str | None = None,
        state_dict: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Save adapters under standard per-expert names: into a scratch folder, read back, then moved into place.

        If ranks share the experts, all of them must call it, and rank 0 writes the whole adapter.

        Raises:
            ValueError: a tensor holds NaN or Inf or differs when read back, or ktft does not support an option.
            OSError: the disk is full, for example. An earlier adapter in the directory is untouched in either case.
        """
        if not safe_serialization:
            raise ValueError("ktft saves adapters as safetensors only; leave safe_serialization on")
        if path_initial_model_for_weight_conversion is not None:
            raise ValueError("ktft's adapters need no weight conversion; leave it out")
        with gathered(self) as writes:
            if is_main_process and writes:
                self._save(save_directory, selected_adapters, save_embedding_layers, state_dict, **kwargs)

    def _save(
        self,
        save_directory: str | os.PathLike[str],
        selected_adapters: list[str] | None,
        save_embedding_layers: str | bool,
        state_dict: dict[str, Any] | None,
        **kwargs: Any,
    ) -> None:
        selected = selected_adapters or [name for name in self.peft_config if name not in self.base_adapters]
        below = list(self.base_adapters.values())
        state, layers = self.state_dict() if state_dict is None else state_dict, expert_layers(self)
        adapters = {name: files.adapter_tensors(self, layers, name, state, save_embedding_layers) for name in selected}
        nbytes = sum(tensor.nbytes for tensors in adapters.values() for tensor in tensors.values())
        with files.saving(Path(save_directory), nbytes) as scratch:
            if (card := Path(save_directory, files.CARD)).exists():  # PEFT updates an existing model card
                shutil.copy(card, scratch)
            plain = files.without_experts(state, layers)  # PEFT would hold a second copy; they are written below
            super().save_pretrained(str(scratch), True, selected, save_embedding_layers, state_dict=plain, **kwargs)
            for name, tensors in adapters.items():
                directory = scratch if name == "default" else scratch / name
                files.write_adapter(directory, tensors, self.peft_config[name], self.config.model_type, below)
        if below:
            logger.info("saved in %s: the adapter that trains, %s", save_directory, stands_on(below))

    def create_or_update_model_card(self, output_dir: str) -> None:
        """Write PEFT's model card, and add what was trained and how to load it."""
        file = Path(output_dir, files.CARD)
        if not file.exists():
            file.write_text(NEW_CARD)  # PEFT's own template is a form to fill in
        super().create_or_update_model_card(output_dir)
        update_card(file, self)

    def merge_and_unload(self, *_: Any, **__: Any) -> None:
        """Not supported: raises ValueError."""
        raise ValueError(UNMERGED)

    merge_adapter = merge_and_unload

    def add_weighted_adapter(self, *_: Any, **__: Any) -> None:
        """Not supported: raises ValueError."""
        raise ValueError(
            "ktft does not combine adapters into a new one; activate several with model.set_adapter([...])"
        )


def expert_layers(model: nn.Module) -> dict[str, KtftExpertsLora]:
    """Module name -> layer, for the routed experts that have LoRA."""
    return {name: module for name, module in model.named_modules() if isinstance(module, KtftExpertsLora)}


def _saved_form(model: Any, directory: Path, trains: bool, adapter_name: str) -> str:
    """The form of a saved adapter's LoRA on experts.

    Refuses it if the model has that adapter in another form, or would train it further where the setting names another.
    """
    layers = expert_layers(model).values()
    present = next((layer.forms[adapter_name] for layer in layers if adapter_name in layer.forms), None)
    asked = next(iter(find_experts(model).values())).expert_lora if trains else None
    with files.open_tensors(directory) as file:
        check_form(directory, file.tensors, present, adapter_name)
        return check_form(directory, file.tensors, asked, adapter_name)


def _require_experts(model: Any) -> None:
    require_stack()
    if first_experts(model) is None:
        raise ValueError(
            "the model has no experts held by ktft; load it with from_pretrained(..., quantization_config=KtftConfig())"
        )
    _require_no_adapters(model)
    hosts.install_for_models()  # KtftConfig has not done it for a model that from_pretrained did not make


def _left_out(directory: Path, names: list[str]) -> str:
    """The message about tensors that a tested PEFT leaves out of a file with all that the model expects."""
    return (
        f"peft {version_of('peft')} left out {len(names)} tensors of {directory}, the first is {names[0]}. The file "
        "has what the model needs, and ktft was tested with this peft, so that neither must be made or installed anew; "
        "please report this with the output of ktft doctor --json. Meanwhile train or serve what "
        f"ktft merge BASE {directory} OUT writes to OUT: it reads the file without peft"
    )


def _require_no_adapters(model: nn.Module) -> None:
    if any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ValueError("the model has adapters already; add one with its add_adapter or with ktft.load_adapter")


def _check_given(config: Any, directory: Path) -> None:
    """Check that a configuration given with a saved adapter has the same meaning as the adapter's own."""
    own = files.read_config(directory)
    for field in (*files.MEANING, "target_modules", "modules_to_save"):
        if getattr(config, field, None) != getattr(own, field):
            raise ValueError(
                f"config has {field}={getattr(config, field, None)!r}, {directory} was saved with "
                f"{getattr(own, field)!r}; leave config out"
            )


def init_peft_model(
    original: Callable[..., None], peft_model: Any, model: nn.Module, peft_config: Any, *args: Any, **kwargs: Any
) -> None:
    """PEFT's `PeftModel.__init__`; the PEFT model of a model with ktft's experts becomes a `KtftPeftMixin`."""
    has_experts = first_experts(model) is not None
    if has_experts:
        check_method(peft_config)  # before PEFT has changed any module
        _require_no_adapters(model)
    original(peft_model, model, peft_config, *args, **kwargs)
    if has_experts:
        cls = type(peft_model)
        peft_model.__class__ = type(f"Ktft{cls.__name__}", (KtftPeftMixin, cls), {})
        peft_model.base_adapters = {}


def from_pretrained(
    original: Callable[..., PeftModel],
    cls: type[PeftModel],
    model: nn.Module,
    model_id: str | os.PathLike[str],
    adapter_name: str = "default",
    is_trainable: bool = False,
    config: Any = None,
    **kwargs: Any,
) -> PeftModel:
    """PEFT's `PeftModel.from_pretrained`, which is `load_adapter` for models with ktft's experts."""
    if first_experts(model) is None:
        return original(cls, model, model_id, adapter_name, is_trainable, config, **kwargs)
    if config is not None:
        _check_given(
            config, files.local_directory(model_id, **{key: kwargs[key] for key in files.HUB_KEYS if key in kwargs})
        )
    return load_adapter(cast(PreTrainedModel, model), model_id, adapter_name, is_trainable, **kwargs)

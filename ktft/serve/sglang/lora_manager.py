"""SGLang's LoRA manager, answered for adapters that ktft loads and applies itself.

With `--enable-lora` SGLang lets a request carry an adapter, keeps its KV cache apart from that of others, and tells the
manager before each step which adapter each request of it has. That is all ktft needs of it: SGLang's own manager would
wrap linear layers and load adapters, which ktft's slots and its kernels do here.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from sglang.srt.managers.io_struct import LoRAUpdateOutput
from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode
from torch import nn

from ktft.serve.runtime.served_adapter import ServedAdapter
from ktft.serve.runtime.served_model import current
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.runtime.slots import add_adapter, remove_adapter
from ktft.serve.runtime.step_adapters import BASE
from ktft.serve.sglang.lora_linear import slots_of, target_of


class SglangLoraManager:
    """A LoRA manager whose adapters are those of the process's `ServedModel`.

    Args:
        model: SGLang's model, loaded.

    Attributes:
        memory_pool: None, for SGLang's metrics: adapters have no slots that SGLang knows of.
        supports_prefill_cuda_graph: never: long calls look at the routing.
    """

    memory_pool = None
    supports_prefill_cuda_graph = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    # --- steps --------------------------------------------------------------------------------------------------------

    def validate_lora_batch(self, lora_ids: Collection[str | None]) -> bool:
        """Whether these adapters can be in one step: any can."""
        return True

    def fetch_new_loras(self, new_loras: Collection[str | None], running_loras: Collection[str | None] = ()) -> None:
        """SGLang brings adapters to the device here; ktft's are where they are computed."""

    def prepare_lora_batch(self, forward_batch: Any) -> None:
        """Called before each step: say which adapter each of its tokens has."""
        served, numbers = current(), [int(each or BASE) for each in forward_batch.lora_ids]
        if forward_batch.forward_mode.is_extend():
            lengths = forward_batch.extend_seq_lens_cpu
            numbers = list(chain.from_iterable(map(repeat, numbers, lengths)))
        served.step.set(numbers, served.adapters)
        if get_is_capture_mode():  # tokens have none now, and may have some when the graph is replayed
            served.step.mixed = True

    def init_cuda_graph_batch_info(self, **_: Any) -> None:
        """SGLang takes memory for its graphs here; ktft's is taken with the model."""

    def reset_lora_batch(self) -> None:
        """Called before a step without tokens."""
        current().step.set([], ())

    # --- adapters -----------------------------------------------------------------------------------------------------

    def load_lora_adapter(self, lora_ref: Any) -> LoRAUpdateOutput:
        """Load the adapter in a directory, between two steps."""
        try:
            add(self.model, int(lora_ref.lora_id), lora_ref.lora_path)
        except Exception as error:  # the engine goes on; the gate hands the reason to whoever asked
            return LoRAUpdateOutput(success=False, error_message=str(error) or type(error).__name__)
        return LoRAUpdateOutput(success=True)

    def unload_lora_adapter(self, lora_ref: Any) -> LoRAUpdateOutput:
        """Take an adapter out, of which no request is in flight."""
        try:
            remove_adapter(int(lora_ref.lora_id), current(), slots_of(self.model))
        except Exception as error:
            return LoRAUpdateOutput(success=False, error_message=str(error) or type(error).__name__)
        return LoRAUpdateOutput(success=True)

    def load_lora_adapter_from_tensors(self, lora_ref: Any, *_: Any, **__: Any) -> LoRAUpdateOutput:
        """Refuses: an adapter is a directory here."""
        return LoRAUpdateOutput(success=False, error_message="ktft serves adapters from directories only")


def add(model: nn.Module, number: int, path: str) -> dict[str, Any]:
    """Put an adapter into the model that this process computes, for tokens that have its number.

    Returns what `ktft.serve.runtime.slots.add_adapter` does, and raises what it and `ServedAdapter` do.
    """
    settings = ServeSettings.from_env()
    target = target_of(model, settings.max_lora_rank, current().sizes())
    adapter = ServedAdapter(Path(path), Path(settings.checkpoint), target)
    return add_adapter(number, adapter, current(), slots_of(model))

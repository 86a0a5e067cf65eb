"""What vLLM's model runner asks of a LoRA manager, answered for adapters that ktft loads and applies itself.

With `--enable-lora` vLLM lets a request carry an adapter, keeps its KV cache apart from that of others, and tells the
manager before each step which adapter each token has. That is all ktft needs of it: vLLM's own manager would wrap
linear layers and load adapters, which ktft's slots and its kernels do here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ktft.serve.runtime.served_model import current


def load_lora_model(original: Any, runner: Any, model: nn.Module, *_: Any) -> nn.Module:
    """In place of vLLM's: give the runner ktft's manager, and leave the model as it is."""
    runner.lora_manager = StepLoraManager()
    return model


def cache_keys(original: Any, request: Any) -> list[Any]:
    """What keeps a request's KV cache apart from that of others: besides vLLM's keys, the adapter's number.

    No other load gets that number, whatever its name and directory.
    """
    carried = request.lora_request
    return [*original(request), *(() if carried is None else (str(carried.lora_int_id),))]


class StepLoraManager:
    """A LoRA manager whose adapters are those of the process's `ServedModel`."""

    def set_active_adapters(self, requests: Collection[Any], mapping: Any) -> None:
        """Called before each step: `mapping.index_mapping` has the number of each token's adapter."""
        served = current()
        served.step.set(mapping.index_mapping, served.adapters)

    def list_adapters(self) -> set[int]:
        """The numbers of all adapters."""
        return set(current().adapters)

    def add_adapter(self, request: Any) -> bool:
        """Whether the adapter is there. vLLM's own way to load one is closed: see `ktft.serve.vllm.worker`."""
        return request.lora_int_id in current().adapters

    def remove_adapter(self, number: int) -> bool:
        """Never: see `ktft.serve.vllm.worker`."""
        return False

    def pin_adapter(self, number: int) -> bool:
        """Whether the adapter is there: all stay in memory."""
        return number in current().adapters

    def remove_all_adapters(self) -> None:
        """vLLM calls it after a run on made-up tokens, to take out made-up adapters. There are none."""

    def supports_tower_connector_lora(self) -> bool:
        """Whether adapters reach parts of a model that read images."""
        return False

    @contextmanager
    def dummy_lora_cache(self) -> Iterator[None]:
        """vLLM makes up adapters in this block, to measure memory."""
        yield

    def add_dummy_lora(self, request: Any, rank: int) -> bool:
        """Makes up nothing: tokens that ask for it compute the base."""
        return False

    def get_dummy_lora_warmup_rank(self, default_rank: int) -> int:
        """The rank of made-up adapters."""
        return default_rank

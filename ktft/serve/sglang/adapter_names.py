"""The names of adapters, as SGLang looks them up for each request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sglang.srt.lora.lora_registry import LoRARef


class AdapterNames:
    """In place of SGLang's registry of adapters. ktft's gate fills it, and knows which requests are in flight.

    A request keeps the number of the adapter with which it began, whatever its name stands for later.
    """

    def __init__(self) -> None:
        self._refs: dict[str, LoRARef] = {}

    def announce(self, adapters: Mapping[str, tuple[int, str]]) -> None:
        """From now on these names stand for these adapters: number, and directory.

        SGLang keys KV cache by the number, which no other load gets.
        """
        self._refs = {
            name: LoRARef(lora_id=str(number), lora_name=name, lora_path=path)
            for name, (number, path) in adapters.items()
        }

    def get_all_adapters(self) -> dict[str, LoRARef]:
        """The adapters by name."""
        return dict(self._refs)

    @property
    def num_registered_loras(self) -> int:
        """How many there are."""
        return len(self._refs)

    async def get_unregistered_loras(self, lora_name: Iterable[str | None]) -> list[str | None]:
        """Those of these names that stand for nothing; SGLang then refuses the request."""
        return [name for name in lora_name if name not in self._refs]

    async def acquire(self, lora_name: Any) -> Any:
        """The numbers, as texts, of one name or of a list. None stands for the base.

        Raises:
            ValueError: a name stands for nothing.
        """
        if isinstance(lora_name, list):
            return [None if name is None else await self.acquire(name) for name in lora_name]
        if lora_name not in self._refs:
            raise ValueError(f"no adapter {lora_name!r} is loaded")
        return self._refs[lora_name].lora_id

    async def release(self, lora_id: Any) -> None:
        """Nothing: the gate counts requests."""

"""Which adapters a server serves, under which names, and how they change: all of a change, or nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from ktft.serve.engine import Client, EngineError
from ktft.serve.front.adapter_record import AdapterRecord, Named, NotRecorded
from ktft.serve.front.admission import Admission
from ktft.serve.front.asgi import Refusal
from ktft.serve.runtime.settings import ServeSettings


@dataclass(frozen=True)
class Loaded:
    """An adapter in the engine: its number, which no other load gets, and its directory."""

    number: int
    path: str


class ServedAdapters:
    """The adapters of a server, beside the base and each other: each request is computed by the one that it names.

    An adapter that is loaded concerns no other requests. One that is unloaded, or replaced by another of its name,
    waits for its own.

    Attributes:
        base: the base model's name.
        loaded: the adapters by name.
        changes: how often these changed.
    """

    def __init__(self, settings: ServeSettings, admission: Admission) -> None:
        self.settings, self.admission, self.base = settings, admission, settings.base_name
        self.loaded = {name: Loaded(i, path) for i, (name, path) in enumerate(settings.adapters, start=1)}
        self.changes = 0
        self._last = len(self.loaded)
        self._record = AdapterRecord(settings.adapter_file)
        self._announced = False

    @property
    def names(self) -> list[str]:
        """The names that requests may give."""
        return [self.base, *self.loaded]

    def room(self, name: str | None) -> str:
        """The room of `Admission` for a request that names this model."""
        return name or self.base

    def announce(self, client: Client) -> None:
        """Tell the engine of the adapters that are there from its start."""
        if not self._announced:
            client.announce({name: (each.number, each.path) for name, each in self.loaded.items()})
            self._announced = True

    def check(self, name: str | None) -> None:
        """Raise Refusal if no model has this name; none stands for the base."""
        if name is not None and name not in self.names:
            raise Refusal(
                404, f"the model {name!r} is not served; what is served is {_listed(self.names)}", param="model"
            )

    def _require_loaded(self, name: str) -> Loaded:
        if name not in self.loaded:
            text = f"no adapter {name!r} is loaded; what is served is {_listed(self.names)}"
            raise Refusal(404, text, param="lora_name")
        return self.loaded[name]

    def _require_room(self) -> None:
        if not self.settings.adapter_slots:
            raise Refusal(400, "this server has no room for an adapter; start it with --adapter-swap")

    async def _recorded(
        self, after: Iterable[Named], change: Callable[[], Awaitable[dict[str, Any]]]
    ) -> dict[str, Any]:
        """Change the adapters and their record on disk."""
        before = _listed(self.names)
        try:
            with self._record.changing(after):
                result = await change()
        except NotRecorded as error:
            text = f"what is served is {_listed(self.names)}, which could not be recorded ({error})"
            result |= {"warning": f"{text}: after a crash, --supervise would start the server with {before}"}
        except OSError as error:
            text = f"cannot write {self._record.path}, from which --supervise starts again: {error.strerror}"
            raise Refusal(503, f"{text}. Nothing has changed: what is served is {before}") from None
        return result

    async def load(self, client: Client, name: str, path: str) -> dict[str, Any]:
        """Serve the adapter in a directory by this name. Returns what `Client.add_adapter` does.

        Raises:
            Refusal: it did not work. Nothing has changed, the record on disk included.
            Busy: the requests in flight took too long. Nothing has changed.
        """
        self._require_room()
        async with self.admission.turn():
            old, most = self.loaded.get(name), self.settings.most_adapters
            if old is None and len(self.loaded) >= most:
                raise Refusal(
                    400,
                    f"there is room for {most} adapters, which {_listed(self.loaded)} take; unload one, or start the "
                    f"server with --max-adapters {most + 1}",
                    param="lora_name",
                )
            self._last += 1
            new = Loaded(self._last, path)
            after = {**self.loaded, name: new}

            async def change() -> dict[str, Any]:
                result = await _asked(client.add_adapter(new.number, path))
                try:
                    async with self._without_requests(name, old):
                        self._serve(client, after)
                except BaseException:
                    await self._remove(client, new)
                    raise
                return result

            result = await self._recorded(_named(after), change)
            return result | (await self._remove(client, old) if old else {})

    async def unload(self, client: Client, name: str) -> dict[str, Any]:
        """Serve an adapter no longer. Raises as `load`, and Refusal if none has this name."""
        async with self.admission.turn():
            old = self._require_loaded(name)
            after = {key: each for key, each in self.loaded.items() if key != name}

            async def change() -> dict[str, Any]:
                async with self._without_requests(name, old):
                    self._serve(client, after)
                return {}

            result = await self._recorded(_named(after), change)
            return result | await self._remove(client, old)

    @asynccontextmanager
    async def _without_requests(self, name: str, old: Loaded | None) -> AsyncIterator[None]:
        """The block changes what a name stands for. A request keeps the adapter with which it began."""
        if old is None:
            yield
            return
        async with self.admission.closed(name):
            yield

    def _serve(self, client: Client, after: dict[str, Loaded]) -> None:
        client.announce({name: (each.number, each.path) for name, each in after.items()})
        self.loaded, self._announced = after, True
        self.changes += 1

    @staticmethod
    async def _remove(client: Client, old: Loaded) -> dict[str, Any]:
        """Take an adapter that no name stands for any more out of memory."""
        try:
            await client.remove_adapter(old.number)
        except EngineError as error:
            return {"warning": f"{old.path} is served no longer, but could not be taken out of memory: {error}"}
        return {}


async def _asked(answer: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    try:
        return await answer
    except EngineError as error:
        raise Refusal(503 if error.dead else 400, str(error)) from None


def _named(loaded: dict[str, Loaded]) -> list[Named]:
    return [(name, each.path) for name, each in loaded.items()]


def _listed(names: Iterable[str]) -> str:
    """Names as they stand in a sentence."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last

"""ktft's part of `/metrics`, in the engine's registry: expert time, lanes, routing heat, adapter, requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from ktft.checkpoint.routing_profile import Routing
from ktft.serve.engine import Client
from ktft.serve.front.asgi import Refusal

MAX_AGE = 1.0  # seconds for which an answer of the engine is shown
_PATIENCE = 5.0  # seconds that a scrape waits for the answer, which an engine gives after its step


class MetricsSource(Protocol):
    """What the gate tells of itself."""

    admission: Any
    adapters: Any


class Metrics(Collector):
    """The numbers of `gate` and the engine's latest status: as JSON and, in the engine's `registry`, as metrics."""

    def __init__(self, gate: MetricsSource, registry: CollectorRegistry) -> None:
        self._gate, self._asked, self._swaps = gate, -MAX_AGE, -1
        self._status: dict[str, Any] | None = None
        self._lock = asyncio.Lock()
        registry.register(self)

    async def refresh(self, client: Client) -> None:
        """Ask the engine for its status, unless it was asked within `MAX_AGE` and the adapters are still the same.

        An engine that does not answer has no status.
        """
        async with self._lock:
            swaps = self._gate.adapters.changes
            if swaps == self._swaps and time.monotonic() - self._asked < MAX_AGE:
                return
            try:
                async with asyncio.timeout(_PATIENCE):
                    self._status = await client.status()
            except Exception:  # all other metrics must be there when the engine is dead
                self._status = None
            self._asked, self._swaps = time.monotonic(), swaps

    def to_dict(self) -> dict[str, Any]:
        """All of it as values of JSON; `engine` is None if the engine has not answered."""
        adapters, admission = self._gate.adapters, self._gate.admission
        return {
            "models": adapters.names,
            "base": adapters.base,
            "adapters": [
                {"name": name, "path": each.path, "requests_in_flight": admission.in_flight_of(adapters.room(name))}
                for name, each in adapters.loaded.items()
            ],
            "adapter_swaps": adapters.changes,
            "requests_in_flight": admission.in_flight,
            "requests_waiting": admission.waiting,
            "engine": self._status,
        }

    def routing(self) -> Routing:
        """What was routed since the start, as `ktft serve --routing-profile` takes it. Refusal without a status."""
        if self._status is None:
            raise Refusal(503, "the engine has not answered; try again", retry_after=5)
        return Routing({int(layer): counts for layer, counts in self._status["heat"].items()})

    def collect(self) -> Iterator[Metric]:
        """The metrics, as `prometheus_client` asks for them."""
        adapters, admission = self._gate.adapters, self._gate.admission
        yield GaugeMetricFamily("ktft_requests_in_flight", "Requests until their last byte", admission.in_flight)
        yield GaugeMetricFamily(
            "ktft_requests_waiting", "Requests that wait for a change of an adapter", admission.waiting
        )
        of_model = GaugeMetricFamily("ktft_model_requests_in_flight", "Those of a model", labels=["model"])
        served = InfoMetricFamily("ktft_adapter", "An adapter that is served", labels=["name"])
        for name in adapters.names:
            of_model.add_metric([name], admission.in_flight_of(adapters.room(name)))
        for name in adapters.loaded:
            served.add_metric([name], {"base": adapters.base})
        yield from (of_model, served)
        yield CounterMetricFamily("ktft_adapter_swaps", "Changes of adapters", adapters.changes)
        if self._status is not None:
            yield from _of_experts(self._status)


def _of_experts(status: dict[str, Any]) -> Iterator[Metric]:
    about = {key: str(status[key]) for key in ("expert_format", "isa", "threads", "numa_nodes")}
    yield InfoMetricFamily("ktft_experts", "How routed experts are held and computed", about)
    yield GaugeMetricFamily("ktft_experts_packed_bytes", "Routed experts in memory", status["packed_bytes"])
    lanes = {
        "seconds": CounterMetricFamily("ktft_expert_seconds", "Time in routed experts", labels=["lane"]),
        "pairs": CounterMetricFamily("ktft_expert_pairs", "Experts computed, a token each", labels=["lane"]),
    }
    for lane, counts in status["lanes"].items():
        for key, family in lanes.items():
            family.add_metric([lane], counts[key])
    yield from lanes.values()
    heat = CounterMetricFamily("ktft_expert_heat", "Tokens routed to an expert", labels=["layer", "expert"])
    for layer, counts in status["heat"].items():
        for expert, tokens in enumerate(counts):
            heat.add_metric([layer, str(expert)], tokens)
    yield heat
    if residents := status.get("residents"):
        yield GaugeMetricFamily("ktft_resident_bytes", "GPU memory of resident experts", residents["bytes"])
        yield CounterMetricFamily("ktft_residents_moved", "Experts that became resident later", residents["moved"])

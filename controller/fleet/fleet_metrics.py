"""The fleet's figures in Prometheus's format: FLEET_METRICS is the one list of names. Called by the entry point."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .fleet import Fleet
from .forwarding import ForwardCounts
from .views import STATES

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
Samples = Iterator[tuple[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True)
class FleetSeries:
    """One metric: a counter if its name ends in _total."""

    name: str
    help: str
    labels: tuple[str, ...]
    of: Callable[[Fleet, ForwardCounts], Samples]


def _one(read: Callable[[Fleet, ForwardCounts], float]) -> Callable[[Fleet, ForwardCounts], Samples]:
    return lambda fleet, counts: iter([((), read(fleet, counts))])


def _states(fleet: Fleet, _: ForwardCounts) -> Samples:
    for state in STATES:
        yield (state,), float(len(fleet.view().of(state)))


def _in_flight(fleet: Fleet, _: ForwardCounts) -> Samples:
    for replica in fleet.replicas():
        yield (replica.name,), float(len(replica.places))


def _outcomes(_: Fleet, counts: ForwardCounts) -> Samples:
    for outcome in ("finished", "failed", "cancelled"):
        yield (outcome,), float(getattr(counts, outcome))


def _changes(fleet: Fleet, _: ForwardCounts) -> Samples:
    for change in ("added", "merged", "restored", "lost", "not_started"):
        yield (change,), float(getattr(fleet.counts, change))


FLEET_METRICS: Final = (
    FleetSeries("faser_fleet_replicas", "Replicas by state.", ("state",), _states),
    FleetSeries("faser_fleet_in_flight", "Requests in flight by replica.", ("replica",), _in_flight),
    FleetSeries(
        "faser_fleet_waiting", "Requests that no replica has yet.", (), _one(lambda fleet, _: fleet.view().waiting)
    ),
    FleetSeries(
        "faser_fleet_start_seconds", "What the last engine took to start, in seconds.", (),
        _one(lambda fleet, _: fleet.counts.start_s),
    ),
    FleetSeries(
        "faser_fleet_requests_total", "Requests by outcome: finished, failed, cancelled.", ("outcome",), _outcomes
    ),
    FleetSeries(
        "faser_fleet_retries_total", "Requests made again on another replica.", (),
        _one(lambda _, counts: counts.retried),
    ),
    FleetSeries(
        "faser_fleet_changes_total", "Replicas by what became of them: added, merged, restored, lost, not_started.",
        ("change",), _changes,
    ),
)  # fmt: skip


class _FleetCollector(Collector):
    def __init__(self, fleet: Fleet, counts: ForwardCounts) -> None:
        self._fleet, self._counts = fleet, counts

    def collect(self) -> Iterator[Metric]:
        for series in FLEET_METRICS:
            family = CounterMetricFamily if series.name.endswith("_total") else GaugeMetricFamily
            metric = family(series.name, series.help, labels=series.labels)
            for labels, value in series.of(self._fleet, self._counts):
                metric.add_metric(labels, value)
            yield metric


def exposition(fleet: Fleet, counts: ForwardCounts) -> bytes:
    """Return what Prometheus scrapes."""
    registry = CollectorRegistry()
    registry.register(_FleetCollector(fleet, counts))
    return generate_latest(registry)

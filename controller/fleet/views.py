"""What the fleet's rules see of it: plain records, made anew for every question. Nothing here acts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

ReplicaState: TypeAlias = Literal["pending", "starting", "serving", "draining"]
STATES: Final[tuple[ReplicaState, ...]] = ("pending", "starting", "serving", "draining")


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica: pending while it waits for room, draining while it finishes what it has."""

    name: str
    state: ReplicaState
    requests: int = 0  # in flight
    body_bytes: int = 0  # of those requests, a stand-in for their prompts' tokens
    chosen_s: float = 0.0  # when it was last given a request
    since_s: float = 0.0  # when its state began


@dataclass(frozen=True, slots=True)
class FleetView:
    """The fleet at one moment of its clock."""

    now_s: float
    replicas: tuple[ReplicaView, ...] = ()
    waiting: int = 0  # requests that no replica has
    may_start: bool = True  # False for a while after an engine that did not start

    def of(self, *states: ReplicaState) -> list[ReplicaView]:
        """Return the replicas in these states."""
        return [replica for replica in self.replicas if replica.state in states]

    @property
    def ongoing(self) -> int:
        """Return the requests that wait or are in flight."""
        return self.waiting + sum(replica.requests for replica in self.replicas)

"""Who is in time under a policy: requests and tokens by class, on a simulated engine served by the decision core.

Called by the evaluation of objectives and by training's judge. Times are taken from the records' events, as the
sidecar takes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ...engine_adapter.protocol import ActionSet, RequestEvent, StepRecord
from ...env.estimate.engine_state import EngineState
from ...env.simulator.simulated_engine import SimulatedEngine
from ..policies.policy import Policy
from .evaluate import Decide
from .objective_worlds import CLASSES

WARM_SHARE: Final = 0.3  # of the steps, not counted: estimates settle


@dataclass(slots=True)
class Attained:
    """What a run came to behind its warm-up; lists by class, the urgent first."""

    seconds: float = 0.0
    tokens: int = 0
    good_tokens: int = 0  # of requests that ended in time
    ended: list[int] = field(default_factory=lambda: [0] * len(CLASSES))
    kept: list[int] = field(default_factory=lambda: [0] * len(CLASSES))

    @property
    def goodput(self) -> float:
        """Tokens per second of requests that ended in time."""
        return self.good_tokens / max(self.seconds, 1e-9)

    @property
    def late_share(self) -> float:
        """Share of the requests that missed their objective."""
        return 1.0 - sum(self.kept) / max(sum(self.ended), 1)

    def in_time(self, priority: int) -> float:
        """Return the share of a class's requests in time; 1 of none."""
        return self.kept[priority] / self.ended[priority] if self.ended[priority] else 1.0


@dataclass(slots=True)
class _Clock:
    """Follows requests from arrival to end."""

    attained: Attained = field(default_factory=Attained)
    _arrivals: dict[int, RequestEvent] = field(default_factory=dict)
    _firsts: dict[int, float] = field(default_factory=dict)

    def take(self, record: StepRecord, *, counts: bool) -> None:
        for event in record.events:
            if event.kind == "arrival":
                self._arrivals[event.handle] = event
            elif event.kind == "first_token":
                self._firsts[event.handle] = event.time_s
            elif event.kind == "finish":
                self._end(event, counts)

    def _end(self, event: RequestEvent, counts: bool) -> None:
        arrival, first_s = self._arrivals.pop(event.handle, None), self._firsts.pop(event.handle, None)
        if not counts or arrival is None or first_s is None:
            return
        assert arrival.tpot_ms is not None
        is_kept = event.time_s - first_s <= arrival.tpot_ms / 1e3 * (event.tokens - 1)
        self.attained.ended[arrival.priority] += 1
        self.attained.kept[arrival.priority] += is_kept
        self.attained.good_tokens += event.tokens * is_kept


def serve(engine: SimulatedEngine, policy: Policy, decide: Decide, steps: int) -> Attained:
    """Serve an engine from its beginning."""
    state, clock = EngineState(engine.capabilities), _Clock()
    actions: ActionSet | None = None
    warm, begin_s, record = int(WARM_SHARE * steps), 0.0, None
    for number in range(1, steps + 1):
        record = engine.step(actions)
        clock.take(record, counts=number > warm)
        if number == warm:
            begin_s = record.time_s
        elif number > warm:
            clock.attained.tokens += sum(row.emitted for row in record.rows)
        actions = decide(state, record, policy, number)
    clock.attained.seconds = (record.time_s if record else 0.0) - begin_s
    return clock.attained

"""What stands between one engine's policy and its wire: mode, guard, canary and hysteresis, in that order.

Called by the session for every record, and by the replay. Reads no clock but the times it is given. What it costs per
record in active mode without faults is a few microseconds.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Final

import msgspec

from ...engine_adapter.protocol import Hello, Mode, StepRecord
from ...env.estimate.engine_state import EngineState
from ...env.spaces import Action
from ..config import GuardConfig, ModeConfig
from ..snapshot import SteeringStatus
from .audit import audit_event
from .canary import Canary, Draws
from .decide import LeaseTerms
from .envelope import EnvelopeSums
from .guard import Breaker, Dwell, GuardState, Sight, judge
from .modes import ModeBoard, engine_name

SENDING: Final = ("active", "canary")
LAG_RECORDS: Final = 1024  # the quickest record of the last one to two of these is what others are compared with


class Lag:
    """By how much records are later than the quickest ones: works between hosts whose clocks do not agree."""

    def __init__(self) -> None:
        self._lowest = self._lowest_before = math.inf  # seconds between the engine's clock and ours
        self._records = 0

    def of(self, time_s: float, received_s: float) -> float:
        """Take in a record and return its lag, seconds."""
        apart = received_s - time_s
        if self._records >= LAG_RECORDS:
            self._lowest_before, self._lowest, self._records = self._lowest, apart, 0
        self._records += 1
        if apart < self._lowest:
            self._lowest = apart
        return apart - min(self._lowest, self._lowest_before)


class Governor:
    """One engine's mode and guard.

    :param board: the modes of all engines; by default active, kept nowhere.
    """

    def __init__(
        self,
        hello: Hello,
        terms: LeaseTerms,
        board: ModeBoard | None = None,
        modes: ModeConfig | None = None,
        limits: GuardConfig | None = None,
    ) -> None:
        self._hello = hello
        self._board = board or ModeBoard()
        modes = modes or ModeConfig()
        self.limits = limits or GuardConfig()
        self.canary = Canary(modes.canary_share, modes.canary_epsilon)
        self.canary.note(hello.roster)
        self.mode: Mode = self._board.mode_of(hello)
        self.terms = replace(terms, mode=self.mode)
        self.guard = GuardState()
        self.draws: Draws | None = None  # of the last decision, in canary mode
        self.lag_s = 0.0  # of the newest record
        self.counts: Counter[str] = Counter()  # records not steered on, by stance and reason
        self._revision = self._board.revision
        self._lag = Lag()
        self._lost = 0
        self._counter = 0
        self._breaker = Breaker()
        self._dwell = Dwell()
        self._envelope = EnvelopeSums(self.limits.envelope_records)
        self._trip = ""
        self._has_lease = False
        self._favours = self._favoured = False  # what this and the last decision asked for

    @property
    def is_sending(self) -> bool:
        """Return whether the mode lets anything be sent: the only door for action sets."""
        return self.mode in SENDING

    @property
    def has_lease(self) -> bool:
        """Return whether the engine may hold a lease of ours."""
        return self._has_lease

    @property
    def reason(self) -> str:
        """Return why the policy does not steer, empty while it does."""
        if self.mode == "off":
            return "off: switched off"
        return f"{self.guard.stance}: {self.guard.reason}" if self.guard.stance != "steer" else ""

    def configure(self, terms: LeaseTerms, modes: ModeConfig, limits: GuardConfig) -> None:
        """Take new settings in, as a reload does; what was learnt and switched stays."""
        self.terms = replace(terms, mode=self.mode)
        self.canary.share, self.canary.epsilon = modes.canary_share, modes.canary_epsilon
        self.limits = limits
        self._envelope = EnvelopeSums(limits.envelope_records)

    def refresh(self) -> None:
        """Follow the board; a switched engine starts with a clean slate."""
        if self._revision == self._board.revision:
            return
        self._revision = self._board.revision
        before, self.mode = self.mode, self._board.mode_of(self._hello)
        if self.mode == before:
            return
        self.terms = replace(self.terms, mode=self.mode)
        self.guard, self._breaker, self._trip = GuardState(), Breaker(), ""
        self._envelope.clear()
        audit_event("mode", self._hello.boot_id, engine=engine_name(self._hello), mode=self.mode, was=before)

    def hear(self, record: StepRecord, received_s: float) -> None:
        """Take note of a record in order, whether it will be decided on or not."""
        self.lag_s = self._lag.of(record.time_s, received_s)
        if self._counter and record.counter > self._counter + 1:
            self._lost = max(self._lost, record.counter - self._counter - 1)
        self._counter = record.counter
        if record.events:
            self.canary.note(record.events)
            self.canary.forget(record.events)

    def may_decide(self, record: StepRecord) -> bool:
        """Return whether to decide on the newest record."""
        self.refresh()
        if self.mode == "off":
            self.counts["off"] += 1
            return False
        before = self.guard
        sight = Sight(self.lag_s, self._lost, self._trip)
        self._lost, self._trip = 0, ""
        self.guard = judge(before, sight, self.limits)
        if self.guard.stance != before.stance:
            self._tell(before)
        if self.guard.stance == "steer":
            return True
        self.counts[f"{self.guard.stance}_{self.guard.reason}"] += 1
        return False

    def amend(self, action: Action, state: EngineState) -> Action:
        """Change what the policy asks for as mode and hysteresis demand; called inside `decide`."""
        self._favoured = self._favours
        self._favours = action.favours
        if self.limits.dwell_records:
            handles = state.requests.column("handle")
            lengths = self._dwell.settle(handles, action.lengths, state.counter, self.limits.dwell_records)
            action = msgspec.structs.replace(action, lengths=lengths)
        self.draws = None
        if self.mode == "canary":
            action, self.draws = self.canary.draw(action, state)
        return action

    def succeed(self, is_sent: bool) -> None:
        """Note that deciding worked, and whether the engine may hold a lease of ours now."""
        self._breaker.succeed()
        self._has_lease = self._has_lease or is_sent

    def fail(self) -> None:
        """Note that deciding raised."""
        self._trip = self._breaker.fail(self.limits) or self._trip

    def measure(self, record: StepRecord, state: EngineState, is_under_lease: bool) -> None:
        """Watch the envelope, once the answer is out.

        Steps that follow objectives are left out: they were not to emit as many tokens as can be.
        """
        if not is_under_lease or self.limits.envelope_margin >= 1.0 or self.mode != "active":
            return
        if self._favours or self._favoured:
            return
        self._envelope.add(record, state.unsplit_cost)
        ratio = self._envelope.ratio()
        if ratio is not None and ratio < 1.0 - self.limits.envelope_margin:
            self._trip = "envelope"
            audit_event("envelope", self._hello.boot_id, ratio=round(ratio, 4), margin=self.limits.envelope_margin)
            self._envelope.clear()

    def owes_release(self) -> bool:
        """Return, once, that the engine may hold a lease which the sidecar does not stand by any more."""
        is_over = self._has_lease and (not self.is_sending or self.guard.stance == "fallback")
        if is_over:
            self._has_lease = False
        return is_over

    def status(self) -> SteeringStatus:
        """Return what status readers see."""
        return SteeringStatus(
            engine_name(self._hello),
            self.mode,
            self.guard.stance,
            self.guard.reason,
            dict(self.counts),
            self._envelope.ratio(),
            self.lag_s if math.isfinite(self.lag_s) else 0.0,
        )

    def _tell(self, before: GuardState) -> None:
        audit_event(
            "guard", self._hello.boot_id,
            stance=self.guard.stance, reason=self.guard.reason or before.reason, was=before.stance, lag_s=self.lag_s,
        )  # fmt: skip

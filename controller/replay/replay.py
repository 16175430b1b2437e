"""A telemetry file through the decision core again: what was decided, what another policy would have asked for.

Called by controller/cli/replay.py. Three honest kinds: decision replay is exact, byte for byte, and says nothing
about speed; an off-policy estimate needs a canary's logged probabilities and is refused where there are too few; a
model-based counterfactual (controller/replay/counterfactual.py) needs a simulator and prints its error on the same
file. Opens no socket, never writes the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ...engine_adapter.protocol import MAX_DRAFT_LENGTH, RequestRow, StepRecord
from ...env.estimate.engine_state import EngineState, observe
from ...env.spaces import Action, Capabilities, clamp
from ...models.policies.policy import Policy
from ...models.registry import make_policy
from ..config import GuardConfig, ModeConfig
from ..decision.audit import digest
from ..decision.decide import Decision, LeaseTerms, decide, guard
from ..decision.governor import Governor
from ..snapshot import Source
from ..telemetry.schema import open_for_reading
from ..telemetry.sessions import Recorded, RecordedSession, RunSettings, read_sessions
from .counterfactual import Counterfactual
from .offpolicy import FLOOR, OffPolicy, Sample, estimate

SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class Replayed:
    """One decision made again; `alternative` is the other policy's action on the same state."""

    recorded: Recorded
    decision: Decision
    handles: list[int]
    alternative: Action | None


@dataclass(slots=True)
class SourceCounts:
    """What became of the recorded drafts of one source, in tokens."""

    verified: int = 0
    accepted: int = 0

    def add(self, rows: Iterable[RequestRow]) -> None:
        """Take in requests of one step."""
        for row in rows:
            self.verified += row.verified
            self.accepted += row.accepted


@dataclass(slots=True)
class Report:
    """What a replay found. Lengths are request-decisions by length."""

    sessions: int = 0
    partial_sessions: int = 0  # their beginning was deleted: not compared
    records: int = 0
    decisions: int = 0
    identical: int = 0  # the same bytes again
    unrecorded: int = 0  # written before digests were
    partial: int = 0  # decisions of partial sessions
    differing: list[str] = field(default_factory=list)  # the first few
    policy: str = ""
    agreement: float | None = None  # share of request-decisions on which the other policy wants the same
    sources: dict[Source, SourceCounts] = field(default_factory=dict)  # copies: only where there are some
    lengths: dict[int, int] = field(default_factory=dict)
    alternative_lengths: dict[int, int] = field(default_factory=dict)
    off_policy: OffPolicy | None = None
    counterfactual: Counterfactual | None = None

    def is_exact(self) -> bool:
        """Return whether every decision that could be compared came out the same."""
        return self.identical + self.unrecorded + self.partial == self.decisions

    def count_drafts(self, record: StepRecord) -> None:
        """Take in what became of a step's drafts."""
        copies = frozenset(record.verified_copies)
        self.sources.setdefault("drafter", SourceCounts()).add(row for row in record.rows if row.handle not in copies)
        if copies:
            self.sources.setdefault("copies", SourceCounts()).add(row for row in record.rows if row.handle in copies)


@dataclass(slots=True)
class Trail:
    """The decisions one by one, for pictures; as many entries each, in the file's order. Lengths are means, tokens."""

    running: list[int] = field(default_factory=list)
    recorded: list[float] = field(default_factory=list)
    alternative: list[float] = field(default_factory=list)  # empty without another policy

    def note(self, running: int, recorded: list[int], alternative: list[int] | None) -> None:
        """Take one decision in, unless it was about nobody."""
        if not recorded:
            return
        self.running.append(running)
        self.recorded.append(sum(recorded) / max(len(recorded), 1))
        if alternative is not None:
            self.alternative.append(sum(alternative) / max(len(alternative), 1))


class Replayer:
    """One session lived again, record by record."""

    def __init__(self, session: RecordedSession, policy: str | None) -> None:
        self._session = session
        self._capabilities = Capabilities.from_hello(session.hello)
        self._state = EngineState(self._capabilities, session.steps[0].settings.objectives)
        self._state.meet(session.hello.roster)
        self._made: dict[str, Policy] = {}
        self._settings: RunSettings | None = None
        self._alternative = make_policy(policy, self._capabilities) if policy else None
        self._seen: Action | None = None
        self._governor = Governor(session.hello, LeaseTerms())

    def step(self, recorded: Recorded) -> Replayed | None:
        """Take a record in; return the decision made on it again, if one was made."""
        self._follow(recorded.settings)
        self._governor.hear(recorded.record, recorded.record.time_s)
        if recorded.sequence is None:
            observe(self._state, recorded.record)
            return None
        policy = self._policy_of(recorded.policy)
        self._governor.mode = recorded.mode
        terms = replace(self._governor.terms, mode=recorded.mode)
        epoch = self._session.epoch
        decision = decide(self._state, recorded.record, policy, terms, epoch, recorded.sequence, self._amend)
        handles: list[int] = self._state.requests.column("handle").tolist()
        return Replayed(recorded, decision, handles, self._seen)

    def _amend(self, action: Action, state: EngineState) -> Action:
        if self._alternative is not None:
            self._seen = clamp(guard(self._alternative.act(state), state), self._capabilities)
        return self._governor.amend(action, state)

    def _follow(self, settings: RunSettings) -> None:
        if settings is self._settings:
            return
        self._settings = settings
        self._state.objectives = settings.objectives
        self._governor.configure(
            LeaseTerms(settings.lease_steps, settings.lease_ms),
            ModeConfig(canary_share=settings.canary_share, canary_epsilon=settings.canary_epsilon),
            GuardConfig(dwell_records=settings.dwell_records),
        )

    def _policy_of(self, spec: str) -> Policy:
        """Return the policy in charge; one that a reload brought in starts anew, as it did then."""
        if spec not in self._made:
            self._made = {spec: make_policy(spec, self._capabilities)}
        return self._made[spec]


def replay(path: Path, policy: str | None = None, floor: float = FLOOR, trail: Trail | None = None) -> Report:
    """Run every session of a file again; with `policy` also ask that one, and estimate what it would have earned."""
    if policy:
        make_policy(policy, Capabilities(k_max=MAX_DRAFT_LENGTH))
    report = Report(policy=policy or "")
    lengths, alternatives, samples = Counter[int](), Counter[int](), list[Sample]()
    same = 0
    with closing(open_for_reading(path)) as database:
        for number, session in enumerate(read_sessions(database)):
            report.sessions += 1
            report.partial_sessions += not session.is_whole
            replayer, outcomes = Replayer(session, policy), _Outcomes(session.epoch, number)
            for recorded in session.steps:
                report.records += 1
                report.count_drafts(recorded.record)
                outcomes.see(recorded.record)
                replayed = replayer.step(recorded)
                if replayed is None:
                    continue
                _compare(report, session, replayed)
                ours = _lengths(replayed.recorded, replayed.handles)
                lengths.update(ours)
                wanted = replayed.alternative.lengths.tolist() if replayed.alternative is not None else None
                if trail is not None:
                    trail.note(recorded.record.running, ours, wanted)
                if wanted is not None:
                    alternatives.update(wanted)
                    same += sum(a == b for a, b in zip(wanted, ours, strict=True))
                    outcomes.expect(recorded, dict(zip(replayed.handles, wanted, strict=True)))
            samples += outcomes.samples
    report.lengths, report.alternative_lengths = dict(sorted(lengths.items())), dict(sorted(alternatives.items()))
    if policy:
        report.agreement = same / alternatives.total() if alternatives else None
        report.off_policy = estimate(samples, floor)
    return report


def _lengths(recorded: Recorded, handles: list[int]) -> list[int]:
    return [recorded.lengths.get(handle, recorded.default_length) for handle in handles]


def _compare(report: Report, session: RecordedSession, replayed: Replayed) -> None:
    report.decisions += 1
    recorded = replayed.recorded
    if not session.is_whole:
        report.partial += 1
    elif recorded.digest is None:
        report.unrecorded += 1
    elif digest(replayed.decision.action_set) == recorded.digest:
        report.identical += 1
    elif len(report.differing) < SHOWN:
        report.differing.append(
            f"{session.hello.boot_id} record {recorded.record.counter}, decision {recorded.sequence}"
        )


class _Outcomes:
    """Joins a drawn length with what became of the draft made under it.

    A decision is in force in the steps that carry its sequence; what such a step drafts for a request is verified in
    the request's next row. Counted as drawn, also where the end of the request cut it short.
    """

    def __init__(self, epoch: int, session: int) -> None:
        self.samples: list[Sample] = []
        self._epoch, self._session = epoch, session
        self._expected: dict[int, dict[int, tuple[float, bool]]] = {}  # sequence -> handle -> (propensity, match)
        self._open: dict[int, tuple[float, bool]] = {}  # handle -> the draw its waiting draft was made under

    def expect(self, recorded: Recorded, wanted: dict[int, int]) -> None:
        """Note a decision's draws and whether the other policy agrees with each."""
        if recorded.draws is None or recorded.sequence is None:
            return
        draws = recorded.draws
        self._expected[recorded.sequence] = {
            handle: (propensity, wanted.get(handle) == length)
            for handle, length, propensity in zip(draws.handles, draws.lengths, draws.propensities, strict=True)
        }
        while len(self._expected) > MAX_DRAFT_LENGTH:
            del self._expected[next(iter(self._expected))]

    def see(self, record: StepRecord) -> None:
        """Close the drafts that this record verified, and open those it made.

        A copy in a draft's place counts as what came of the drawn length: which drafts it takes, and how often, depends
        on that.
        """
        drawn = self._expected.get(record.lease_sequence, {}) if record.lease_epoch == self._epoch else {}
        for row in record.rows:
            if (opened := self._open.pop(row.handle, None)) is not None and not row.is_prefill:
                self.samples.append(self._sample(row, *opened))
            if (draw := drawn.get(row.handle)) is not None and row.emitted:
                self._open[row.handle] = draw
        for event in record.events:
            if event.kind in ("finish", "abort", "preempt"):
                self._open.pop(event.handle, None)

    def _sample(self, row: RequestRow, propensity: float, is_match: bool) -> Sample:
        return Sample(self._session << 40 | row.handle, propensity, is_match, row.accepted, row.verified)


def mean_length(lengths: dict[int, int]) -> str:
    """Return the mean of a count by length, as text."""
    total = sum(lengths.values())
    return f"{sum(length * count for length, count in lengths.items()) / total:.3f}" if total else "-"

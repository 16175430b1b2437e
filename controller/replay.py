"""`faser replay`: a telemetry file through the decision core again: what was decided, what another policy would have.

Called by the CLI. Three honest kinds: decision replay is exact, byte for byte, and says nothing about speed; an
off-policy estimate needs a canary's logged probabilities and is refused where there are too few; a model-based
counterfactual needs a simulator and its measured error (`faser fidelity`). Opens no socket, never writes the file.
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from ..engine_adapter.protocol import MAX_DRAFT_LENGTH, RequestRow, StepRecord
from ..env.spaces import Action, Capabilities, clamp
from ..env.state import EngineState, observe
from ..models.policy import Policy, PolicyError, make_policy
from .audit import digest
from .config import GuardConfig, ModeConfig
from .decide import Decision, LeaseTerms, decide, guard
from .errors import PolicyError as UnknownPolicy
from .errors import UsageError
from .governor import Governor
from .offpolicy import FLOOR, OffPolicy, Sample, estimate
from .recorded import Recorded, RecordedSession, RunSettings, read_sessions
from .schema import open_for_reading

SHOWN: Final = 10


@dataclass(frozen=True, slots=True)
class Replayed:
    """One decision made again; `alternative` is the other policy's action on the same state."""

    recorded: Recorded
    decision: Decision
    handles: list[int]
    alternative: Action | None


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
    lengths: dict[int, int] = field(default_factory=dict)
    alternative_lengths: dict[int, int] = field(default_factory=dict)
    off_policy: OffPolicy | None = None

    def is_exact(self) -> bool:
        """Return whether every decision that could be compared came out the same."""
        return self.identical + self.unrecorded + self.partial == self.decisions


class Replayer:
    """One session lived again, record by record."""

    def __init__(self, session: RecordedSession, policy: str | None) -> None:
        self._session = session
        self._capabilities = Capabilities.from_hello(session.hello)
        self._state = EngineState(self._capabilities)
        self._made: dict[str, Policy] = {}
        self._settings: RunSettings | None = None
        self._alternative = _policy(policy, self._capabilities) if policy else None
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
        self._governor.configure(
            LeaseTerms(settings.lease_steps, settings.lease_ms),
            ModeConfig(canary_share=settings.canary_share, canary_epsilon=settings.canary_epsilon),
            GuardConfig(dwell_records=settings.dwell_records),
        )

    def _policy_of(self, spec: str) -> Policy:
        """Return the policy in charge; one that a reload brought in starts anew, as it did then."""
        if spec not in self._made:
            self._made = {spec: _policy(spec, self._capabilities)}
        return self._made[spec]


def _policy(spec: str, capabilities: Capabilities) -> Policy:
    try:
        return make_policy(spec, capabilities)
    except PolicyError as error:
        raise UnknownPolicy(str(error)) from None


def replay(path: Path, policy: str | None = None, floor: float = FLOOR) -> Report:
    """Run every session of a file again; with `policy` also ask that one, and estimate what it would have earned."""
    if policy:
        _policy(policy, Capabilities(k_max=MAX_DRAFT_LENGTH))
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
                outcomes.see(recorded.record)
                replayed = replayer.step(recorded)
                if replayed is None:
                    continue
                _compare(report, session, replayed)
                lengths.update(_lengths(replayed.recorded, replayed.handles))
                if replayed.alternative is not None:
                    wanted = replayed.alternative.lengths.tolist()
                    alternatives.update(wanted)
                    ours = _lengths(replayed.recorded, replayed.handles)
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
        """Close the drafts that this record verified, and open those it made."""
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


def run_replay(path: Path, policy: str | None, is_counterfactual: bool, is_json: bool, floor: float) -> int:
    """Print the report; return 1 if a decision came out differently."""
    if is_counterfactual:
        raise UsageError(
            "--counterfactual: decision replay cannot tell speed",
            "a simulator whose error on this file is known",
            "see: faser fidelity",
        )
    report = replay(path, policy, floor)
    console = Console(soft_wrap=True, highlight=False)
    if is_json:
        console.out(msgspec.json.encode(report).decode(), highlight=False)
    else:
        _show(report, path, console)
    return 0 if report.is_exact() else 1


def _show(report: Report, path: Path, console: Console) -> None:
    table = Table(title=f"decision replay of {path.name}", title_justify="left", show_header=False)
    for name, value in (
        ("sessions", f"{report.sessions}, {report.partial_sessions} without their beginning"),
        ("records", f"{report.records}, decided on {report.decisions}"),
        ("the same bytes again", f"{report.identical} of {report.decisions - report.unrecorded - report.partial}"),
        ("not comparable", f"{report.unrecorded} without a digest, {report.partial} in partial sessions"),
        *(("differs", text) for text in report.differing),
    ):
        table.add_row(name, value)
    console.print(table)
    if report.policy:
        _show_alternative(report, console)


def _show_alternative(report: Report, console: Console) -> None:
    table = Table("draft length", "recorded", report.policy, title="request-decisions; says nothing about speed")
    for length in sorted(report.lengths.keys() | report.alternative_lengths.keys()):
        table.add_row(str(length), str(report.lengths.get(length, 0)), str(report.alternative_lengths.get(length, 0)))
    table.add_row("mean", _mean(report.lengths), _mean(report.alternative_lengths))
    console.print(table)
    if report.agreement is not None:
        console.print(f"the same length in {report.agreement:.1%} of request-decisions")
    off = report.off_policy
    if off is None or not off.samples:
        console.print("no off-policy estimate: the file has no canary decisions")
        return
    console.print(
        f"off-policy: {off.samples} samples, {off.effective_samples:.0f} effective, coverage {off.coverage:.1%}"
    )
    if off.refusal:
        console.print(f"no estimate: {off.refusal}")
        return
    for name, ours, theirs in (
        ("tokens accepted", off.accepted_logged, off.accepted), ("draft rows", off.rows_logged, off.rows),
    ):  # fmt: skip
        if ours is not None and theirs is not None:
            console.print(
                f"{name} per request and step: canary {ours.mean:.3f} ± {ours.half_width:.3f}, "
                f"{report.policy} {theirs.mean:.3f} ± {theirs.half_width:.3f} (95 %)"
            )


def _mean(lengths: dict[int, int]) -> str:
    total = sum(lengths.values())
    return f"{np.dot(list(lengths), list(lengths.values())) / total:.3f}" if total else "-"

"""One engine as the daemon knows it: state, policy, last decision, presence and figures.

Called by the daemon's loop only. Takes records in order, decides on the newest; opens no socket and reads no clock
but the times it is given.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections import deque
from pathlib import Path
from typing import Final

from ...engine_adapter.protocol import MAX_DRAFT_LENGTH, Hello, StepRecord
from ...env.estimate.engine_state import EngineState, learn, look
from ...env.estimate.objectives import NO_CLASSES, ObjectiveClasses
from ...env.spaces import Capabilities
from ...models import registry
from ...models.policies import policy as policies
from ...models.stages.staged_policy import SEPARATOR
from ..config import LeaseConfig
from ..snapshot import MAX_SHOWN, EngineStatus, LastStep, Presence, Source, SourceStatus, StagesStatus, layers_by_rank
from .attainment import Attainment
from .decide import Decision, LeaseTerms, decide
from .governor import Governor
from .window import PruningTotals, Window

logger = logging.getLogger(__name__)

DECISIONS_TIMED: Final = 512  # the newest, for the 99th percentile: five lie beyond it
LARGEST_EPOCH: Final = 1 << 62  # of the wire
EPOCH_STEPS: Final = 1 << 32  # epochs above an engine's own that a start may take


class Session:
    """The sidecar's side of one engine's boot."""

    def __init__(
        self,
        hello: Hello,
        policy: str,
        lease: LeaseConfig,
        epoch: int,
        now_s: float,
        objectives: ObjectiveClasses = NO_CLASSES,
    ) -> None:
        self.hello = hello
        self.epoch = epoch_above(epoch, hello.epoch)
        capabilities = Capabilities.from_hello(hello)
        self.state = EngineState(capabilities, objectives)
        self.state.meet(hello.roster)
        self.attainment = Attainment(objectives)
        self.attainment.take(hello.roster)
        self.governor = Governor(hello, LeaseTerms(lease.steps, lease.ms))
        self.window = Window(hello.longest)
        self.pruning = PruningTotals()
        self.newest: StepRecord | None = None
        self.sequence = 0
        self.decisions = self.sends_dropped = self.failures = self.late_records = self.clamped = 0
        self.unverified_tokens = 0  # drawn and dropped by a stop rule
        self._handed_over = 0  # by policies before this one
        self.decision_s: deque[float] = deque(maxlen=DECISIONS_TIMED)
        self.reason = ""
        self.policy = self._first_policy(policy)
        self.presence: Presence = "idle"
        self.heard_s = self.changed_s = now_s
        self._sent_s: deque[tuple[int, float]] = deque(maxlen=DECISIONS_TIMED)  # (sequence, when)
        # A process of another PID namespace cannot be watched: then only silence tells.
        self._is_pid_visible = hello.host == socket.gethostname() and _is_alive(hello.pid)

    def _first_policy(self, spec: str) -> policies.Policy | None:
        """Return the policy, without its stages if this engine cannot have them; None if it can have nothing of it."""
        try:
            return registry.make_policy(spec, self.state.capabilities)
        except policies.PolicyError as error:  # such as fixed:8 for an engine with k_max 4
            if (rest := self._without_stages(spec)) is not None:
                logger.error("engine %s keeps its stages: %s", self.hello.boot_id, error)
                return rest
            self.reason = f"not steered: {error}"
            logger.error("engine %s is %s", self.hello.boot_id, self.reason)
            return None

    def _without_stages(self, spec: str) -> policies.Policy | None:
        lengths, has_stages, _ = spec.partition(SEPARATOR)
        if not has_stages:
            return None
        try:
            return registry.make_policy(lengths, self.state.capabilities)
        except policies.PolicyError:
            return None

    def follow(self, policy: policies.Policy | None) -> None:
        """Let another policy decide from now on."""
        if policy is not self.policy:
            self._handed_over += registry.handed_over(self.policy)
            self.policy = policy

    def promise(self, objectives: ObjectiveClasses) -> None:
        """Go by other objectives for the requests that arrive from now on."""
        self.state.objectives = objectives
        self.attainment.follow(objectives)

    def admit(self, record: StepRecord, now_s: float) -> bool:
        """Take note of a record; False if it is not newer than the last one, and is to be dropped."""
        self.heard_s = now_s
        if self.newest is not None and record.counter <= self.newest.counter:
            self.late_records += 1
            return False
        self.newest = record
        self.governor.hear(record, now_s)
        return True

    def may_obey_another(self, record: StepRecord) -> bool:
        """Return whether this newer record lets one think that the engine obeyed a higher epoch meanwhile."""
        refuses = self.newest is not None and record.rejected > self.newest.rejected
        return record.lease_epoch > self.epoch or (refuses and record.lease_epoch != self.epoch)

    def observe(self, record: StepRecord) -> None:
        """Learn from a record that is not the newest any more."""
        try:
            look(self.state, record)
            self._learn()
        except Exception:
            self._count_failure("observing")

    def decide(self, record: StepRecord) -> Decision | None:
        """Learn from the newest record and decide; None where that failed: the engine's default takes over."""
        if self.policy is None or not self.governor.may_decide(record):
            self.observe(record)
            return None
        started = time.perf_counter()
        try:
            governor = self.governor
            decision = decide(
                self.state, record, self.policy, governor.terms, self.epoch, self.sequence + 1, governor.amend
            )
        except Exception:
            self.governor.fail()
            self._count_failure("deciding")
            return None
        self.sequence += 1
        self.decisions += 1
        self.clamped += decision.is_clamped
        governor.succeed(governor.is_sending)
        self.decision_s.append(time.perf_counter() - started)
        self.reason = decision.reason
        return decision

    def learn(self) -> None:
        """Learn from the record that was last decided on, once the answer is out."""
        try:
            self._learn()
        except Exception:
            self._count_failure("learning")

    def _learn(self) -> None:
        lesson = self.state.lesson
        if lesson is not None:
            drawn, is_ours = lesson.record.drawn_tokens, lesson.record.lease_epoch == self.epoch
            unverified = max(drawn - int(lesson.rows.drafted.sum()), 0) if drawn is not None else 0
            self.unverified_tokens += unverified
            self.window.add(lesson.record, lesson.told, is_ours, lesson.is_copy, unverified)
        learn(self.state)

    def measure(self, record: StepRecord) -> None:
        """Take a record into the figures that need no learning."""
        self.pruning.add(record)
        if record.events:
            self.attainment.take(record.events)
        self.governor.measure(record, self.state, record.lease_epoch == self.epoch)

    def note_sent(self, is_sent: bool, now_s: float) -> None:
        """Remember when the last decision went out, or that it did not."""
        if is_sent:
            self._sent_s.append((self.sequence, now_s))
        else:
            self.sends_dropped += 1

    def _count_failure(self, doing: str) -> None:
        self.failures += 1
        if self.failures == 1:
            logger.exception("engine %s: %s failed; its default holds until it works again", self.hello.boot_id, doing)

    def update_presence(self, now_s: float, silent_after_s: float) -> Presence | None:
        """Look whether the engine is still there; return the new presence if it changed."""
        before, self.presence = self.presence, self._presence(now_s, silent_after_s)
        if self.presence == before:
            return None
        self.changed_s = now_s
        return self.presence

    def _presence(self, now_s: float, silent_after_s: float) -> Presence:
        if self.presence in ("stopped", "gone") and self.heard_s <= self.changed_s:
            return self.presence
        if self._is_pid_visible and not _is_alive(self.hello.pid):
            return "gone"
        if self.newest is None or not (self.newest.running or self.newest.waiting):
            return "idle"
        return "silent" if now_s - self.heard_s > silent_after_s else "busy"

    def stop(self, now_s: float) -> None:
        """Note the engine's goodbye."""
        self.presence, self.changed_s, self.heard_s = "stopped", now_s, now_s

    def is_over(self) -> bool:
        """Return whether the engine ended, in whatever way."""
        return self.presence in ("stopped", "gone")

    def status(self, now_s: float) -> EngineStatus:
        """Return the figures a status reader sees."""
        hello, record, window, counters = self.hello, self.newest, self.window, self.state.link
        times_us = sorted(value * 1e6 for value in self.decision_s)
        return EngineStatus(
            boot_id=hello.boot_id,
            pid=hello.pid,
            host=hello.host,
            model=hello.model,
            drafter=hello.drafter,
            method=hello.method,
            device=hello.device,
            vllm_version=hello.vllm_version,
            adapter_version=hello.adapter_version,
            k_max=hello.longest,
            presence=self.presence,
            last_record_age_s=now_s - self.heard_s if record else None,
            running=record.running if record else 0,
            waiting=record.waiting if record else 0,
            kv_usage=record.kv_usage if record else 0.0,
            steps_per_s=_finite(window.steps_per_s()),
            tokens_per_s=_finite(window.tokens_per_s()),
            step_ms=_finite(window.mean_step_s() * 1e3),
            adapter_us=_finite(record.adapter_s * 1e6) if record else 0.0,
            acceptance_rate=window.acceptance_rate(),
            acceptance_by_position=window.acceptance_by_position(),
            mean_draft_length=window.mean_length(),
            length_histogram=window.length_histogram(),
            lease_share=window.lease_share(),
            lease_age_s=self._lease_age_s(now_s),
            records=counters.records,
            decisions=self.decisions,
            sends_dropped=self.sends_dropped,
            failures=self.failures,
            gaps=counters.gaps,
            lost_records=counters.lost_records,
            late_records=self.late_records,
            engine_dropped=record.dropped if record else 0,
            engine_rejected=record.rejected if record else 0,
            decision_us_p50=_quantile(times_us, 0.5),
            decision_us_p99=_quantile(times_us, 0.99),
            reason=self.governor.reason or self.reason,
            steering=self.governor.status(),
            last_step=_last_step(record) if record else None,
            pruning=self.pruning.status(),
            clamped=self.clamped,
            handed_over=self._handed_over + registry.handed_over(self.policy),
            unverified_tokens=self.unverified_tokens,
            sat_out=record.sat_out if record else 0,
            rested=record.rested if record else 0,
            sources=self._sources(),
            attainment=self.attainment.status(),
            miscounted=record.miscounted if record else 0,
            split=self._split(),
            stages=self._stages(),
        )

    def _split(self) -> str:
        """Return the name of the split that the newest step ran under, empty where the engine offers none."""
        splits, record = self.hello.splits, self.newest
        if len(splits) < 2:
            return ""
        index = record.split or 0 if record else 0
        return splits[index] if index < len(splits) else ""

    def _stages(self) -> StagesStatus | None:
        stages, sight = self.hello.stages, self.state.stages
        if stages is None:
            return None
        return StagesStatus(layers_by_rank(stages, sight.bounds), sight.moves, sight.is_moving)

    def _sources(self) -> dict[Source, SourceStatus]:
        drafter = self.window.drafter()
        if not self.hello.copy_max:
            return {"drafter": drafter}
        return {"drafter": drafter, "copies": self.window.copies()}

    def _lease_age_s(self, now_s: float) -> float | None:
        """Return the age of the action set that the newest record ran under, None for the engine's default."""
        if self.newest is None or self.newest.lease_epoch != self.epoch:
            return None
        in_force = self.newest.lease_sequence
        return next((now_s - sent_s for sequence, sent_s in reversed(self._sent_s) if sequence <= in_force), None)


def epoch_above(own: int, obeyed: int) -> int:
    """Return this life's own epoch, or where the engine obeyed one as high, one above that.

    By how much is this life's own, so that two that take over the same engine at once do not meet at one epoch.
    """
    return own if own > obeyed else min(obeyed + 1 + own % EPOCH_STEPS, LARGEST_EPOCH)


def _last_step(record: StepRecord) -> LastStep:
    """Return what is shown of a record; times that no clock can mean are 0."""
    phases_s = (record.schedule_s, record.draft_s, record.verify_s, record.sample_s, record.overlap_s)
    schedule, draft, verify, sample, overlap = (_finite(seconds * 1e3) for seconds in phases_s)
    rows = record.rows[:MAX_SHOWN]
    return LastStep(
        record.step, schedule, draft, verify, sample, overlap,
        _finite(max(record.step_s * 1e3 - schedule - draft - verify - sample + overlap, 0.0)),
        [row.handle for row in rows], [row.draft_limit for row in rows], [row.accepted for row in rows],
    )  # fmt: skip


def _finite(value: float) -> float:
    """Return 0 for what JSON has no number for: figures of an engine whose times no clock can mean."""
    return value if math.isfinite(value) else 0.0


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def _is_alive(pid: int) -> bool:
    """Return whether a process runs; one that ended and was not waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def check_policy(spec: str) -> None:
    """Raise PolicyError if no engine could ever be steered by `spec`."""
    registry.make_policy(spec, Capabilities(k_max=MAX_DRAFT_LENGTH))

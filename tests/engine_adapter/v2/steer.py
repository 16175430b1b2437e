"""A rule in the place of leases, and a log of what FASER's records are made of; also under asynchronous scheduling."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from faser.engine_adapter.protocol import ActionSet, Admission, Rest, StepRecord, decode_from_engine, encode
from faser.engine_adapter.steering.lease import Lease
from faser.engine_adapter.steering.orders import StepOrder
from faser.engine_adapter.steering.resting import Resting
from faser.engine_adapter.steering.steering import BatchOutcome, Steering

Rule = Callable[[int, int], int]  # handle, step -> draft length

STEPS_OF_SPLIT = 5


def rule_of(spec: dict[str, Any]) -> Rule:
    """Return lengths that are fixed, cyclic over requests or over steps, or random for each request and step."""
    if "fixed" in spec:
        return lambda handle, step: int(spec["fixed"])
    if "cycle" in spec:
        cycle = spec["cycle"]
        return lambda handle, step: int(cycle[(handle - 1) % len(cycle)])
    if "waves" in spec:
        waves = spec["waves"]
        return lambda handle, step: int(waves[step % len(waves)])
    seed, longest = spec.get("seed", 0), spec["random"]
    return lambda handle, step: random.Random(f"{seed} {handle} {step}").randint(0, longest)


def random_rest(handles: list[int], step: int) -> Rest | None:
    """Return who sits out steps, drawn anew in some of them."""
    chance = random.Random(f"rest {step // 3}")
    return Rest(tuple(handle for handle in handles if chance.random() < 0.5), chance.randint(1, 3))


class Steer:
    """Gives every live request a length by a rule, through a lease of its own, and logs each step."""

    def __init__(
        self, rule: Rule, admission: dict[str, Any] | None = None, is_resting: bool = False, splits: int = 1
    ) -> None:
        """`splits`: so many are offered, and asked for in turn."""
        self.log: list[dict[str, Any]] = []
        self.lost: set[str] = set()  # requests that were preempted: their drafts are gone
        self.held: set[str] = set()  # who is left out of the step that is scheduled now
        self.unheld: list[str] = []  # who was in it nevertheless
        self.offered: list[str] = []  # HELLO's splits
        steering: Steering | None = None
        ordered, recorded, builder = Steering.order, Steering.record, Lease.in_force
        steer = self

        def order(self: Steering, scheduled: dict[str, int], started_s: float) -> StepOrder:
            nonlocal steering
            steering = self
            steer.offered = list(self.hello.splits)
            steer.unheld += sorted(steer.held & scheduled.keys())
            return ordered(self, scheduled, started_s)

        def in_force(lease: Lease, step: int, now_s: float) -> ActionSet | None:
            if steering is None:  # nothing is scheduled yet
                return None
            handles = [entry.handle for entry in steering.entries.values()]
            lengths = [rule(handle, step) for handle in handles]
            builder(lease, step, now_s)
            action = ActionSet(lease.boot_id, 1, step, step + 32, now_s + 5.0, 0, handles, lengths)
            if admission is not None:
                weights = [admission["weights"][handle % len(admission["weights"])] for handle in handles]
                action.admission = Admission(admission["rows"], admission["seconds"], weights)
            if is_resting:
                action.rest = random_rest(handles, step)
            if splits > 1:
                action.split = step // STEPS_OF_SPLIT % splits
            return action

        def record(self: Steering, order: StepOrder, outcome: BatchOutcome) -> None:
            steer.note(self, order, outcome)
            recorded(self, order, outcome)

        left_out = Resting.leave_out

        def leave_out(self: Resting, rest: Rest | None, *batch: Any) -> int:
            count, step = left_out(self, rest, *batch), batch[-1]
            named = [entry for entry in self._named if entry.request.next_decode_eligible_step == step + 1]
            steer.held = {entry.request_id for entry in named} if count else set()
            return count

        Resting.leave_out = leave_out  # type: ignore[method-assign]
        Steering.order, Steering.record = order, record  # type: ignore[method-assign]
        Lease.in_force = in_force  # type: ignore[method-assign]

    def note(self, steering: Steering, order: StepOrder, outcome: BatchOutcome) -> None:
        """Log one step."""
        report = outcome.report
        self.lost |= {entry.request_id for entry in steering._preempted}
        rows = {}
        for name, scheduled in outcome.scheduled.items():
            row = outcome.row_of[name]
            rows[name] = {
                "ordered": order.lengths.get(name),
                "scheduled": scheduled,
                "verified": len(outcome.drafts.get(name, ())),
                "sampled": outcome.sampled.counts[row] if outcome.sampled.counts else 0,
                "admitted": report.admitted[row] if report and report.admitted is not None else None,
                "reported": report.drafted[row] if report and report.drafted else None,
                "confidences": list(report.late_confidences.get(name, ())) if report else [],
                "rested": order.rested,
                "accepted": outcome.sampled.counts[row] - 1 if outcome.sampled.counts else 0,
            }
        told = None if report is None else [report.verify_s, report.sample_s, report.draft_s, report.runner_s]
        rounds = None if report is None or report.rounds is None else list(report.rounds)
        self.log.append({"step": order.step, "rows": rows, "times_s": told, "rounds": rounds, "at_s": time.monotonic()})
        self.log[-1]["is_deferred"] = order.is_deferred
        self.log[-1]["splits"] = [order.split, report.split if report else None]
        self.log[-1]["caught_up"] = report.caught_up if report else 0

    def check(self) -> dict[str, Any]:
        """Compare what each request's step ordered with what its next step verified, and with what the runner told."""
        last: dict[str, dict[str, Any]] = {}
        seen: Counter[int] = Counter()
        obeyed, lost, disobeyed, misreported = 0, 0, [], []
        for entry in self.log:
            for name, row in entry["rows"].items():
                before, last[name] = last.get(name), row
                if before is None or not before["sampled"]:
                    continue
                if name in self.lost and not row["verified"]:  # a preempted request loses its draft
                    lost += 1
                    continue
                seen[row["verified"]] += 1
                if before["ordered"] == row["verified"]:
                    obeyed += 1
                else:
                    disobeyed.append([entry["step"], name, before["ordered"], row["verified"]])
                if before["reported"] != row["verified"]:
                    misreported.append([entry["step"], name, before["reported"], row["verified"]])
        return {
            "records": len(self.log),
            "without_report": sum(entry["times_s"] is None for entry in self.log),
            "obeyed": obeyed,
            "disobeyed": disobeyed,
            "misreported": misreported,
            "lost": lost,
            "unheld": self.unheld,
            "rested": sum(max((row["rested"] for row in entry["rows"].values()), default=0) for entry in self.log),
            "lengths": {str(length): count for length, count in sorted(seen.items())},
            "draft_rows": sum(sum(entry["rounds"] or ()) for entry in self.log),
            "rows_if_uniform": sum(len(entry["rows"]) * len(entry["rounds"] or ()) for entry in self.log),
            "rounds": sum(len(entry["rounds"] or ()) for entry in self.log),
            "confident": sum(len(r["confidences"]) >= r["verified"] > 0 for e in self.log for r in e["rows"].values()),
            "drafting": sum(r["verified"] > 0 for e in self.log for r in e["rows"].values()),
            "scheduled_drafts": sum(row["verified"] for e in self.log for row in e["rows"].values()),
            "admitted": sum(row["admitted"] or 0 for e in self.log for row in e["rows"].values()),
            "over_admitted": sum((r["admitted"] or 0) > r["verified"] for e in self.log for r in e["rows"].values()),
            "timed": sum(bool(entry["times_s"] and all(entry["times_s"][:2])) for entry in self.log),
        }


class Govern:
    """FASER's own policy in the place of a rule: each record is decided on, as a sidecar does, without sockets."""

    def __init__(self, policy: str) -> None:
        from faser.controller.cli.evaluate import decided
        from faser.engine_adapter.link.engine_link import EngineLink
        from faser.engine_adapter.steering.record import RecordBuilder
        from faser.env.estimate.engine_state import EngineState
        from faser.env.spaces import Capabilities
        from faser.models.registry import make_policy

        self.actions: list[ActionSet] = []
        self.records: list[StepRecord] = []
        waiting: list[ActionSet] = []
        build, introduce = RecordBuilder.build, Steering.introduce
        govern = self

        def introduced(steering: Steering) -> None:
            introduce(steering)
            steering.lease.max_s = 60.0  # an interpreted step may take longer than a lease holds
            capabilities = Capabilities.from_hello(steering.hello)
            govern.capabilities = capabilities
            govern.policy, govern.state = make_policy(policy, capabilities), EngineState(capabilities)

        def built(builder: RecordBuilder, raw: Any) -> StepRecord:
            record = decode_from_engine(encode(build(builder, raw)))
            assert isinstance(record, StepRecord)
            govern.records.append(record)
            action = decided(govern.state, record, govern.policy, record.counter)
            action.valid_until_s = record.time_s + 60.0
            govern.actions.append(action)
            waiting.append(action)
            return record

        def receive(link: EngineLink) -> list[Any]:
            arrived = waiting.copy()
            waiting.clear()
            return arrived

        def send_later(link: EngineLink, make: Any, rest_s: float = 0.0) -> None:
            make()

        RecordBuilder.build, Steering.introduce = built, introduced  # type: ignore[method-assign]
        EngineLink.receive, EngineLink.send_later = receive, send_later  # type: ignore[method-assign]

    def facts(self) -> dict[str, Any]:
        """Return what was learnt and asked for."""
        rows = [row for record in self.records for row in record.rows]
        return {
            "is_adaptive": self.capabilities.is_adaptive,
            "is_ready": self.state.confidence.is_ready,
            "under_lease": sum(record.lease_epoch > 0 for record in self.records),
            "records": len(self.records),
            "admissions": sum(action.admission is not None for action in self.actions),
            "rules": sum(action.stop is not None for action in self.actions),
            "verified": sum(row.verified for row in rows),
            "accepted": sum(row.accepted for row in rows),
            "drafted": sum(row.drafted for row in rows),
            "confidences": sum(len(row.confidences) for row in rows),
            "drawn": sum(record.drawn_tokens or 0 for record in self.records),
        }

"""One simulated engine as the decision core meets a real one: step records come out, action sets go in.

Called by models/evaluation/evaluate.py. Wraps a Simulator of one engine; its records are those of
env/simulator/simulated_record.py (a test holds them together), made for whole columns at once, since evaluations make
millions. Whether drafting ahead pays is left to the gate that a real engine has (`FASER_DRAFT_AHEAD=auto`).
"""

from __future__ import annotations

import numpy as np

from ...engine_adapter.gate import Gate
from ...engine_adapter.protocol import ActionSet, EventKind, RequestEvent, RequestRow, StepRecord, StopRule
from ..estimate.acceptance import Ints
from ..layout.action_vector import AHEAD, OVERLAPS, PING_PONG, outside
from ..spaces import Capabilities
from .constants import LOGITS, NAMED
from .scenario import Scenario
from .simulated_record import BOOT_ID, hello, pruning_of
from .simulator import Simulator
from .state import (
    ACCEPTED,
    CONTEXT,
    DRAFT_LIMIT,
    DRAFTS,
    EMITTED,
    FINISHED,
    FIRST,
    FREE,
    FRESH,
    GO_ON_FROM,
    HANDLE,
    IS_PREFILL,
    KEEP_FROM,
    KEPT,
    PHASE,
    PREEMPTED_NOW,
    PRUNED,
    QUEUE,
    SCHEDULED,
    VERIFIED,
    Singles,
)

_ROW = (HANDLE, SCHEDULED, DRAFT_LIMIT, KEPT, VERIFIED, PRUNED, ACCEPTED, FRESH, CONTEXT)  # as RequestRow's fields


class SimulatedEngine:
    """An engine with records; two of the same scenario and seed meet the same requests."""

    def __init__(self, scenario: Scenario, seed: int, *, has_confidence: bool = True) -> None:
        self.simulator = Simulator(scenario, 1, mode=NAMED, seed=seed, own_rules=True)
        self.simulator.reset()
        self._number = int(self.simulator.state.engines["profile"][0])
        self.profile = scenario.profiles[self._number]
        self.capabilities = Capabilities.from_hello(hello(self.simulator))
        self._has_confidence = has_confidence
        self._lengths = np.full((1, scenario.slots), -1, np.int8)
        self._arrived = 0
        self._rule: StopRule | None = None
        self._gate = Gate()
        self._waiting: list[tuple[float, ...]] = [()] * scenario.slots  # confidences of drafts not yet verified

    @property
    def clock_s(self) -> float:
        """The engine's time."""
        return float(self.simulator.state.engines["clock_s"][0])

    def step(self, actions: ActionSet | None) -> StepRecord:
        """Run one step under these actions (None: no drafts) and return its record."""
        state = self.simulator.state
        before = state.ints[0, HANDLE].copy()
        running = int(state.engines["running"][0])
        frontier = 0 if actions is None else min(actions.frontier or 0, self.capabilities.frontier)
        could = bool(frontier and state.ints[0, DRAFTS].any()) and not (actions and actions.split)
        may_go_on = could and self._gate.ask(running)
        self.simulator.step(self._ask(actions, may_go_on), self._lengths)
        engine = state.engines[0]
        rows = self._rows(before)
        if could and len(rows) == running and not engine["prefill_tokens"]:
            self._gate.note(running, may_go_on, float(engine["step_s"]), sum(row.emitted for row in rows))
        return StepRecord(
            boot_id=BOOT_ID,
            counter=int(engine["steps"]),
            step=int(engine["steps"]),
            time_s=float(engine["clock_s"]),
            step_s=float(engine["step_s"]),
            schedule_s=0.0,
            verify_s=float(engine["verify_s"]),
            sample_s=0.0,
            draft_s=float(engine["draft_s"]),
            overlap_s=float(engine["overlap_s"]),
            adapter_s=0.0,
            running=int(engine["running"]),
            waiting=int(engine["waiting"]),
            prefill_tokens=int(engine["prefill_tokens"]),
            decode_tokens=int(engine["decode_tokens"]),
            draft_tokens=int(engine["draft_tokens"]),
            kv_usage=1.0 - float(engine["free_blocks"]) / self.profile.kv_blocks,
            split=None if actions is None else actions.split,
            frontier=frontier or None,
            lease_epoch=0 if actions is None else actions.epoch,
            lease_sequence=0 if actions is None else actions.sequence,
            dropped=0,
            rejected=0,
            events=self._events(),
            rows=rows,
            caught_up=int(engine["caught_up"]),
            draft_rounds=int(engine["rounds"]),
            drawn_tokens=int(engine["drawn"]),
            frontier_hits=int(engine["frontier_hits"]),
            **pruning_of(engine, self.profile, rows),
        )

    def _rows(self, before: Ints) -> list[RequestRow]:
        """Return what each request of the step did, and keep the confidences of what it drafted for the next one.

        :param before: (slots,) handles before the step
        """
        ints = self.simulator.state.ints[0]
        busy = np.flatnonzero(ints[SCHEDULED])
        busy = busy[np.argsort(ints[HANDLE, busy], kind="stable")]
        is_same = (before[busy] == ints[HANDLE, busy]).tolist()
        columns = [ints[column, busy].tolist() for column in _ROW]
        rows = [
            RequestRow(*nine, bool(prefill), self._waiting[i] if same else ())  # type: ignore[call-arg]
            for *nine, prefill, i, same in zip(
                *columns, ints[IS_PREFILL, busy].tolist(), busy.tolist(), is_same, strict=True
            )
        ]
        self._waiting = self._confidences(busy)
        return rows

    def _ask(self, actions: ActionSet | None, may_go_on: bool) -> Singles:
        """Fill in lengths and stop rule; return the vector that carries the default length."""
        state, k_max = self.simulator.state, self.capabilities.k_max
        self._lengths[:] = -1
        if actions is None:
            return outside()
        named = dict(zip(actions.handles, actions.lengths, strict=True))
        taken = np.flatnonzero(state.ints[0, PHASE] != FREE)
        for i, handle in zip(taken.tolist(), state.ints[0, HANDLE, taken].tolist(), strict=True):
            self._lengths[0, i] = named.get(handle, actions.default_length)
        if actions.stop is not None and actions.stop is not self._rule:
            rule = actions.stop
            slope, intercept = (np.array(values[:k_max])[:, None] for values in (rule.slopes, rule.intercepts))
            state.chances[0] = 1.0 / (1.0 + np.exp(-(intercept + slope * self._logits())))
            state.rules[0, KEEP_FROM], state.rules[0, GO_ON_FROM] = rule.keep[:k_max], rule.go_on[:k_max]
        self._rule = actions.stop
        return outside(
            depth=actions.default_length / max(k_max, 1),
            keep=0.0 if self._rule is None else 1.0,
            prune=0.0 if actions.prune is None else 1.0,
            **self._side_by_side(actions.split, may_go_on),
        )

    def _side_by_side(self, split: int | None, may_go_on: bool) -> dict[str, float]:
        """Return the meanings of a split, on whose shares two groups take turns, or of drafting ahead, if any."""
        if not split:
            return {"overlap": (AHEAD + 0.5) / OVERLAPS} if may_go_on else {}
        return {"split": (split + 0.5) / len(self.capabilities.splits), "overlap": (PING_PONG + 0.5) / OVERLAPS}

    def _logits(self) -> Singles:
        """Return (k_max, cells) the confidences that the drafter reports."""
        logits: Singles = self.simulator.world.tables[self._number, LOGITS]
        return logits

    def _confidences(self, busy: Ints) -> list[tuple[float, ...]]:
        """Return the confidences of what was drafted in this step, and of one token that the rule dropped, by slot."""
        found: list[tuple[float, ...]] = [()] * self._lengths.shape[1]
        if not self._has_confidence:
            return found
        state = self.simulator.state
        kept, limit, cells = state.ints[0, KEPT, busy], state.ints[0, DRAFT_LIMIT, busy], state.cells[0, busy]
        positions = np.arange(cells.shape[1])
        shown = kept.copy()
        if self._rule is not None and len(busy):
            survival = state.chances[0][positions, cells].cumprod(axis=1)
            last = np.maximum(kept - 1, 0)
            went_on = (kept == 0) | (survival[np.arange(len(busy)), last] >= state.rules[0, GO_ON_FROM, last])
            shown = shown + ((kept < limit) & went_on)
        sure = 1.0 / (1.0 + np.exp(-self._logits()[positions, cells].astype(np.float64)))
        for i, values, many in zip(busy.tolist(), sure.tolist(), shown.tolist(), strict=True):
            found[i] = tuple(values[:many])
        return found

    def _events(self) -> list[RequestEvent]:
        state, world = self.simulator.state, self.simulator.world
        engine, ints, now_s = state.engines[0], state.ints[0], self.clock_s
        events = []
        arrived, waiting = int(engine["arrived"]), int(engine["queue_length"])
        for handle in range(self._arrived + 1, arrived + 1):
            place = (int(engine["queue_head"]) + waiting - 1 - (arrived - handle)) % QUEUE
            row = world.rows[state.queue_row[0, place]]
            arrival_s, priority = float(state.queue_s[0, place]), int(world.priority[row["service"]])
            events.append(RequestEvent("arrival", handle, arrival_s, int(row["prompt"]), f"r{handle}", priority))
        self._arrived = arrived
        kinds: tuple[tuple[EventKind, int], ...] = (
            ("preempt", PREEMPTED_NOW),
            ("first_token", FIRST),
            ("finish", FINISHED),
        )
        for kind, column in kinds:
            for i in np.flatnonzero(ints[column]).tolist():
                if column == PREEMPTED_NOW or ints[SCHEDULED, i]:
                    events.append(RequestEvent(kind, int(ints[HANDLE, i]), now_s, int(ints[EMITTED, i])))
        return events

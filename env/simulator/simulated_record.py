"""Step records of a simulated engine, as the real one's adapter would send them (engine_adapter/steering/record.py).

Called by env/simulator/simulated_engine.py and by replays: whatever drives the real engine through its records can
drive this one. Made for whole columns at once, since evaluations make millions.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from ...engine_adapter.arrays import Ints
from ...engine_adapter.protocol import (
    MOST_REST_STEPS,
    TPOT_MS,
    TTFT_MS,
    EventKind,
    Hello,
    Prune,
    RequestEvent,
    RequestRow,
    StepRecord,
)
from ..profile.engine_profile import EngineProfile
from .constants import LOGITS
from .simulator import Simulator
from .state import (
    ACCEPTED,
    BEHIND_WHOLE,
    CONTEXT,
    COPIED,
    COPY_KEPT,
    DRAFT_LIMIT,
    EMITTED,
    FINISHED,
    FIRST,
    FOUND,
    FRESH,
    GO_ON_FROM,
    HANDLE,
    IS_PREFILL,
    KEPT,
    PREEMPTED_NOW,
    PRUNED,
    QUEUE,
    SCHEDULED,
    VERIFIED,
    WAS_COPY,
)

BOOT_ID: Final = "simulated"
# Columns as RequestRow's fields.
_ROW: Final = (HANDLE, SCHEDULED, DRAFT_LIMIT, KEPT, VERIFIED, PRUNED, ACCEPTED, FRESH, CONTEXT)
_EVENTS: Final[tuple[tuple[EventKind, int], ...]] = (
    ("preempt", PREEMPTED_NOW), ("first_token", FIRST), ("finish", FINISHED),
)  # fmt: skip


def hello(simulator: Simulator, engine: int = 0) -> Hello:
    """Return how this engine would introduce itself."""
    profile = simulator.scenario.profiles[int(simulator.state.engines[engine]["profile"])]
    card = profile.card
    return Hello(
        boot_id=BOOT_ID, pid=1, host="", adapter_version="", vllm_version=card.vllm_version, model=card.model,
        device=card.device, runner="v1", is_async=False, method=card.method, drafter=card.drafter,
        k_max=simulator.scenario.positions, default_length=0, default_table=[],
        max_requests=min(profile.max_requests, simulator.scenario.slots), max_batched_tokens=profile.token_budget,
        kv_tokens=profile.kv_blocks * profile.block_size, graph_sizes=list(profile.graph_sizes),
        splits=[split.name for split in profile.splits], exit_layers=[each.layer for each in profile.exits],
        released_prune=Prune(profile.exits[0].layer, 0.5) if profile.exits else None,
        tensor_parallel=1, pipeline_parallel=1, data_parallel=1, data_parallel_rank=0, lease_steps=32, lease_ms=1000,
        roster=[], frontier=simulator.scenario.positions if profile.ahead is not None else 0,
        is_adaptive=profile.is_adaptive, copy_max=profile.matches.longest if profile.matches else 0,
        rest_steps=0 if len(profile.splits) > 1 or profile.exits or profile.is_adaptive else MOST_REST_STEPS,
    )  # fmt: skip


class Recorder:
    """Makes the records of one engine of a simulator; `record` is called after each of its steps.

    :param has_confidence: whether the drafter tells how sure it is
    """

    def __init__(self, simulator: Simulator, engine: int = 0, *, has_confidence: bool = True) -> None:
        self._simulator, self._engine, self._has_confidence = simulator, engine, has_confidence
        slots = simulator.scenario.slots
        self._can_copy = simulator.scenario.longest_copy > 0
        self._arrived = 0
        # Of drafts that wait for verification, and of one token more that a stop rule dropped.
        self._confidences: list[tuple[float, ...]] = [()] * slots
        self._drafted_for = np.zeros(slots, np.int32)  # handles of their requests

    def record(
        self, sequence: int = 0, *, epoch: int = 1, split: int | None = None, frontier: int | None = None
    ) -> StepRecord:
        """Return the record of the step just simulated.

        :param sequence: of the lease that was in force; 0: none was
        :param frontier: what was asked for; default: what the engine made of it
        """
        numbers = self._simulator.state.engines[self._engine]
        at = dict(zip(numbers.dtype.names or (), numbers.tolist(), strict=True))
        profile = self._simulator.scenario.profiles[at["profile"]]
        rows = self._rows(at["profile"], is_ruled=at["is_ruled"])
        return StepRecord(
            boot_id=BOOT_ID, counter=at["steps"], step=at["steps"], time_s=at["clock_s"], step_s=at["step_s"],
            schedule_s=0.0, verify_s=at["verify_s"], sample_s=0.0, draft_s=at["draft_s"], overlap_s=at["overlap_s"],
            adapter_s=0.0, running=at["running"], waiting=at["waiting"], prefill_tokens=at["prefill_tokens"],
            decode_tokens=at["decode_tokens"], draft_tokens=at["draft_tokens"],
            kv_usage=1.0 - at["free_blocks"] / profile.kv_blocks, split=split,
            frontier=(at["frontier"] if frontier is None else frontier) or None,
            lease_epoch=epoch if sequence else 0, lease_sequence=sequence, dropped=0, rejected=0,
            events=self._events(at), rows=rows, caught_up=at["caught_up"], draft_rounds=at["rounds"],
            drawn_tokens=at["drawn"], frontier_hits=at["frontier_hits"], copied=self._handles(COPIED),
            verified_copies=self._handles(WAS_COPY), rested=at["rested"], **_pruning(at, profile, rows),
        )  # fmt: skip

    def _rows(self, profile: int, *, is_ruled: bool) -> list[RequestRow]:
        """Return what each request of the step did, and keep the confidences of what it drafted for the next one."""
        ints = self._simulator.state.ints[self._engine]
        for i in np.flatnonzero(ints[PREEMPTED_NOW]).tolist():
            self._confidences[i] = ()
        busy = np.flatnonzero(ints[SCHEDULED])
        busy = busy[np.argsort(ints[HANDLE, busy], kind="stable")]
        is_same = (self._drafted_for[busy] == ints[HANDLE, busy]).tolist()
        columns = [ints[column, busy].tolist() for column in _ROW]
        confidences = [  # the scheduler cuts a draft at its end
            self._confidences[i][: verified + 1] if same else ()
            for i, verified, same in zip(busy.tolist(), columns[_ROW.index(VERIFIED)], is_same, strict=True)
        ]
        is_prefill = (ints[IS_PREFILL, busy] != 0).tolist()
        rows = [RequestRow(*values) for values in zip(*columns, is_prefill, confidences, strict=True)]
        if self._has_confidence:
            self._keep_confidences(busy, profile, is_ruled)
        return rows

    def _keep_confidences(self, busy: Ints, profile: int, is_ruled: bool) -> None:
        state, e = self._simulator.state, self._engine
        ints, cells = state.ints[e], state.cells[e, busy]
        is_copied = state.copies[e, COPIED, busy] != 0
        positions, kept = np.arange(cells.shape[1]), np.where(is_copied, 0, ints[KEPT, busy])
        shown = kept.copy()
        if is_ruled and len(busy):
            survival = state.chances[e][positions, cells].cumprod(axis=1)
            last = np.maximum(kept - 1, 0)
            went_on = (kept == 0) | (survival[np.arange(len(busy)), last] >= state.rules[e, GO_ON_FROM, last])
            shown += (kept < ints[DRAFT_LIMIT, busy]) & went_on
        logits = self._simulator.world.tables[profile, LOGITS]
        sure = 1.0 / (1.0 + np.exp(-logits[positions, cells].astype(np.float64)))
        for i, values, many in zip(busy.tolist(), sure.tolist(), shown.tolist(), strict=True):
            self._confidences[i] = tuple(values[:many])
        for i in busy[is_copied].tolist():
            self._confidences[i] = self._chances_of_copy(i, profile)
        self._drafted_for[busy] = ints[HANDLE, busy]

    def _chances_of_copy(self, slot: int, profile: int) -> tuple[float, ...]:
        """Return what the engine says of a copy: of each token, and of one behind it that was found and not kept."""
        state, e = self._simulator.state, self._engine
        copies = state.copies[e, :, slot]
        told = min(int(copies[COPY_KEPT]) + 1, int(copies[FOUND]))
        tables = self._simulator.world.match_tables[profile, copies[BEHIND_WHOLE], LOGITS]
        logits = tables[np.arange(told), state.copy_cells[e, slot, :told]]
        return tuple((1.0 / (1.0 + np.exp(-logits.astype(np.float64)))).tolist())

    def _handles(self, column: int) -> tuple[int, ...]:
        """Return the handles of the step's requests that are marked in a column of State.copies."""
        state, e = self._simulator.state, self._engine
        if not self._can_copy:
            return ()
        marked = (state.copies[e, column] != 0) & (state.ints[e, SCHEDULED] > 0)
        return tuple(np.sort(state.ints[e, HANDLE, marked]).tolist())

    def _events(self, at: dict[str, Any]) -> list[RequestEvent]:
        state, world, e = self._simulator.state, self._simulator.world, self._engine
        events, ints, now_s = list[RequestEvent](), state.ints[e], at["clock_s"]
        for handle in range(self._arrived + 1, at["arrived"] + 1):
            place = (at["queue_head"] + at["queue_length"] - 1 - (at["arrived"] - handle)) % QUEUE
            row = world.rows[state.queue_row[e, place]]
            arrival_s, priority = float(state.queue_s[e, place]), int(world.priority[row["service"]])
            told = world.objectives[at["profile"], row["service"]].tolist()
            ttft_s, tpot_s = told if self._simulator.scenario.tells_objectives else (math.inf, math.inf)
            events.append(
                RequestEvent(
                    "arrival", handle, arrival_s, int(row["prompt"]), f"r{handle}", priority,
                    ttft_ms=_milliseconds(ttft_s, TTFT_MS), tpot_ms=_milliseconds(tpot_s, TPOT_MS),
                )
            )  # fmt: skip
        self._arrived = at["arrived"]
        for kind, column in _EVENTS:
            for i in np.flatnonzero(ints[column]).tolist():
                if column == PREEMPTED_NOW or ints[SCHEDULED, i]:
                    events.append(RequestEvent(kind, int(ints[HANDLE, i]), now_s, int(ints[EMITTED, i])))
        return events


def _milliseconds(objective_s: float, bounds: tuple[float, float]) -> float | None:
    """Return an objective as a client may tell it, None where it is longer than any may be."""
    least, most = bounds
    return max(objective_s * 1e3, least) if objective_s * 1e3 <= most else None


def _pruning(at: dict[str, Any], profile: EngineProfile, rows: list[RequestRow]) -> dict[str, Any]:
    """Return what a record says of pruning."""
    if not at["looked"]:
        return {}
    first = profile.exits[0]
    return {
        "prune_layer": first.layer,
        "prune_s": at["prune_s"],
        "saved_rows": first.saved_share * sum([row.pruned for row in rows]),
        "wrongly_pruned": at["wrongly_pruned"],
    }

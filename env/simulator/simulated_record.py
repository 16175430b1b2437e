"""Step records of a simulated engine, as the real one's adapter would send them.

Called by replays and the parity test: whatever drives the real engine through its records can drive this one. Never
called while training.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...engine_adapter.protocol import Hello, Prune, RequestEvent, RequestRow, StepRecord
from ..profile.engine_profile import EngineProfile
from .constants import LOGITS
from .simulator import Simulator
from .state import (
    ACCEPTED,
    CONTEXT,
    DRAFT_LIMIT,
    EMITTED,
    FINISHED,
    FIRST,
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
)

BOOT_ID = "simulated"


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
    )  # fmt: skip


def pruning_of(engine: Any, profile: EngineProfile, rows: list[RequestRow]) -> dict[str, Any]:
    """Return what a record says of pruning in the step just simulated."""
    if not engine["looked"]:
        return {}
    first = profile.exits[0]
    return {
        "prune_layer": first.layer,
        "prune_s": float(engine["prune_s"]),
        "saved_rows": first.saved_share * sum([row.pruned for row in rows]),
        "wrongly_pruned": int(engine["wrongly_pruned"]),
    }


class Recorder:
    """Makes the records of one engine of a simulator; `record` is called after each of its steps."""

    def __init__(self, simulator: Simulator, engine: int = 0) -> None:
        self._simulator, self._engine = simulator, engine
        self._arrived = 0
        slots = simulator.scenario.slots
        self._dropped = np.zeros(slots, np.bool_)  # one more was drafted, but a stop rule dropped it
        self._cells = np.zeros((slots, simulator.scenario.positions), np.uint8)  # of the drafts that wait
        self._drafted_for = np.zeros(slots, np.int64)  # handles of their requests

    def record(self, lease_sequence: int = 0) -> StepRecord:
        """Return the record of the step just simulated; `lease_sequence` 0: no lease was in force."""
        state, e = self._simulator.state, self._engine
        engine, ints = state.engines[e], state.ints[e]
        at = {name: int(engine[name]) for name in engine.dtype.names or () if engine.dtype[name].kind == "i"}
        order = np.argsort(ints[HANDLE], kind="stable")
        rows = [self._row(i) for i in order.tolist() if ints[SCHEDULED, i] > 0]
        total = int(self._simulator.world.profiles["kv_blocks"][at["profile"]])
        record = StepRecord(
            boot_id=BOOT_ID, counter=at["steps"], step=at["steps"], time_s=float(engine["clock_s"]),
            step_s=float(engine["step_s"]), schedule_s=0.0, verify_s=float(engine["verify_s"]), sample_s=0.0,
            draft_s=float(engine["draft_s"]), overlap_s=float(engine["overlap_s"]), adapter_s=0.0,
            running=at["running"], waiting=at["waiting"], prefill_tokens=at["prefill_tokens"],
            decode_tokens=at["decode_tokens"], draft_tokens=at["draft_tokens"],
            kv_usage=1.0 - at["free_blocks"] / total, split=None, frontier=at["frontier"] or None,
            lease_epoch=1 if lease_sequence else 0, lease_sequence=lease_sequence, dropped=0, rejected=0,
            events=self._events(order), rows=rows, caught_up=at["caught_up"], draft_rounds=at["rounds"],
            drawn_tokens=at["drawn"], frontier_hits=at["frontier_hits"],
            **pruning_of(engine, self._simulator.scenario.profiles[at["profile"]], rows),
        )  # fmt: skip
        self._cells, self._dropped = state.cells[e].copy(), self._was_dropped(at["is_ruled"])
        self._drafted_for = ints[HANDLE].astype(np.int64)
        return record

    def _was_dropped(self, is_ruled: int) -> npt.NDArray[np.bool_]:
        """Return (slots,) whose draft ended with a drafted token that was dropped."""
        state, e = self._simulator.state, self._engine
        ints, positions = state.ints[e], np.arange(self._simulator.scenario.positions)
        kept, limit = ints[KEPT], np.minimum(ints[DRAFT_LIMIT], len(positions))
        chances = state.chances[e][positions, state.cells[e]]  # (slots, positions)
        survival = np.cumprod(chances, axis=1, dtype=np.float32)
        last = np.maximum(kept - 1, 0)
        went_on = (kept == 0) | (survival[np.arange(len(kept)), last] >= state.rules[e, GO_ON_FROM][last])
        dropped: npt.NDArray[np.bool_] = (ints[SCHEDULED] > 0) & (kept < limit) & went_on & (is_ruled != 0)
        return dropped

    def _row(self, i: int) -> RequestRow:
        ints = self._simulator.state.ints[self._engine]
        value = {name: int(ints[column, i]) for name, column in _COLUMNS.items()}
        return RequestRow(
            **value, is_prefill=bool(ints[IS_PREFILL, i]), confidences=self._confidences(i, value["verified"])
        )

    def _confidences(self, i: int, verified: int) -> tuple[float, ...]:
        is_same = self._drafted_for[i] == self._simulator.state.ints[self._engine, HANDLE, i]
        told = verified + int(self._dropped[i] and is_same)
        if told == 0:
            return ()
        profile = int(self._simulator.state.engines[self._engine]["profile"])
        logits = self._simulator.world.tables[profile, LOGITS]
        chosen = logits[np.arange(told), self._cells[i, :told]].astype(np.float64)
        return tuple((1.0 / (1.0 + np.exp(-chosen))).tolist())

    def _events(self, order: np.ndarray[tuple[int], np.dtype[np.intp]]) -> list[RequestEvent]:
        simulator, e = self._simulator, self._engine
        state, ints = simulator.state, simulator.state.ints[e]
        engine, now_s = state.engines[e], float(state.engines[e]["clock_s"])
        events = [RequestEvent("preempt", int(ints[HANDLE, i]), now_s, int(ints[EMITTED, i]))
                  for i in order.tolist() if ints[PREEMPTED_NOW, i]]  # fmt: skip
        arrived = int(engine["arrived"])
        for handle in range(self._arrived + 1, arrived + 1):
            place = (int(engine["queue_head"]) + int(engine["queue_length"]) - 1 - (arrived - handle)) % QUEUE
            row = simulator.world.rows[state.queue_row[e, place]]
            priority = int(simulator.world.priority[row["service"]])
            events.append(
                RequestEvent(
                    "arrival", handle, float(state.queue_s[e, place]), int(row["prompt"]), f"r{handle}", priority
                )
            )
        self._arrived = arrived
        for i in order.tolist():
            if ints[FIRST, i] and ints[SCHEDULED, i]:
                events.append(RequestEvent("first_token", int(ints[HANDLE, i]), now_s, int(ints[EMITTED, i])))
            if ints[FINISHED, i] and ints[SCHEDULED, i]:
                events.append(RequestEvent("finish", int(ints[HANDLE, i]), now_s, int(ints[EMITTED, i])))
        return events


_COLUMNS = {
    "handle": HANDLE, "scheduled": SCHEDULED, "draft_limit": DRAFT_LIMIT, "drafted": KEPT, "verified": VERIFIED,
    "pruned": PRUNED, "accepted": ACCEPTED, "emitted": FRESH, "context": CONTEXT,
}  # fmt: skip

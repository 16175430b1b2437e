"""The decision core: one step record in, one action set out.

Called by the daemon, the replay and the tests. Pure in the sense that matters: no socket, clock, file or random
source; the same records give byte-identical action sets. It must never raise because of what a record says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import msgspec
import numpy as np

from ...engine_adapter.compiled import compiled
from ...engine_adapter.protocol import MAX_REQUESTS, ActionSet, MatchRule, Mode, StepRecord
from ...env.estimate.engine_state import EngineState, look
from ...env.spaces import Action, Capabilities, Lengths, clamp, fit_rows, is_other
from ...models.policies.policy import Policy

LAST_STEP = 1 << 62  # the wire's bound on counters
Amend: TypeAlias = Callable[[Action, EngineState], Action]


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """How long an action set holds, and in which mode it is sent."""

    steps: int = 32
    ms: int = 1000
    mode: Mode = "active"

    def granted(self, capabilities: Capabilities) -> LeaseTerms:
        """Return these terms cut to what the engine grants."""
        if self.steps <= capabilities.lease_steps and self.ms <= capabilities.lease_ms:
            return self
        return replace(self, steps=min(self.steps, capabilities.lease_steps), ms=min(self.ms, capabilities.lease_ms))


class Decision(msgspec.Struct, frozen=True):
    """What is sent, what it means for each live request, and why."""

    action_set: ActionSet
    action: Action  # after the guard
    reason: str
    is_clamped: bool = False  # the policy asked for what the engine cannot run, or for other requests than there are


def decide(
    state: EngineState,
    record: StepRecord,
    policy: Policy,
    lease: LeaseTerms,
    epoch: int,
    sequence: int,
    amend: Amend | None = None,
) -> Decision:
    """Look at the record (updates `state`), ask the policy, guard its answer, and pack the action set.

    `amend` may change the guarded action, as a canary does; it must keep it within what the engine can run.

    What the record teaches is learnt by `env.estimate.engine_state.learn`: best after the answer is sent, at the latest
    by the next call.
    """
    look(state, record)
    asked = policy.act(state)
    possible = _possible(asked, state)
    action = _within_limits(possible, state)
    if amend is not None:
        action = amend(action, state)
    terms = lease.granted(state.capabilities)
    handles, lengths = pack(state, action)
    action_set = ActionSet(
        boot_id=record.boot_id,
        epoch=epoch,
        sequence=sequence,
        valid_until_step=min(record.step + terms.steps, LAST_STEP),
        valid_until_s=record.time_s + terms.ms / 1000.0,
        default_length=action.default_length,
        handles=handles,
        lengths=lengths,
        price=action.price,
        split=action.split,
        frontier=action.frontier,
        prune=action.prune,
        mode=terms.mode,
        stop=action.stop,
        admission=action.admission,
        match=action.match,
        stage_bounds=action.stage_bounds,
        rest=action.rest,
    )
    if terms.mode in ("active", "canary"):
        state.ask(sequence, action.stop)
    reason = told_of_sitting_out(record, action.reason)
    return Decision(action_set, action, reason, possible is not asked and is_other(asked, possible))


def told_of_sitting_out(record: StepRecord, reason: str) -> str:
    """Return the reason, behind what keeps the drafter from drafting for some or all requests."""
    if not record.sat_out:
        return reason
    if any(row.drafted for row in record.rows):
        return f"requests longer than the drafter's context get no drafts ({record.sat_out} now); {reason}"
    return f"the drafter sits out: a sequence is longer than its context; {reason}"


def guard(action: Action, state: EngineState) -> Action:
    """Return an action that the engine can run; one that does not fit the live requests becomes the default."""
    return _within_limits(_possible(action, state), state)


def _possible(action: Action, state: EngineState) -> Action:
    """Return an action of as many lengths as there are requests, each as the engine can have it."""
    size = np.size(action.lengths)
    if size != state.requests.size:
        default = state.capabilities.default_length
        reason = f"policy gave {size} lengths for {state.requests.size} requests: default length {default}"
        action = Action(np.full(state.requests.size, default, np.int64), default, reason=reason)
    return clamp(action, state.capabilities)


def _within_limits(action: Action, state: EngineState) -> Action:
    """Return the action within what clients allow and one step can verify, which no policy has to know."""
    lengths, most = action.lengths, state.requests.column("most")
    if not _are_allowed(lengths, most):
        lengths = np.minimum(lengths, most)
    match, max_rows = action.match, state.capabilities.max_batched_tokens
    if max_rows:
        in_batch = state.in_batch()
        lengths = fit_rows(lengths, max_rows, in_batch)
        match = _fitting(match, max_rows, int(np.count_nonzero(in_batch)))
    if lengths is action.lengths and match is action.match:
        return action
    return msgspec.structs.replace(action, lengths=lengths, match=match)


def _fitting(match: MatchRule | None, max_rows: int, requests: int) -> MatchRule | None:
    """Return the rule with copies no longer than everybody can have in one batch."""
    if match is None or requests * (1 + match.most) <= max_rows:
        return match
    return msgspec.structs.replace(match, most=max(max_rows // max(requests, 1) - 1, 0))


def pack(state: EngineState, action: Action) -> tuple[list[int], list[int]]:
    """Return handles and lengths of the requests whose length differs from the default."""
    handles = state.requests.column("handle")
    named = np.empty((2, min(len(handles), MAX_REQUESTS)), np.int64)
    size = _name(action.lengths, action.default_length, handles, named)
    return named[0, :size].tolist(), named[1, :size].tolist()


@compiled
def _are_allowed(lengths: Lengths, most: Lengths) -> bool:
    are_allowed = True
    for i in range(min(len(lengths), len(most))):
        are_allowed &= lengths[i] <= most[i]
    return are_allowed


@compiled
def _name(lengths: Lengths, default: int, handles: Lengths, named: Lengths) -> int:
    """Fill in handles and lengths, (2, m), of the first m whose length is not the default; return how many."""
    size = 0
    for i in range(min(len(lengths), len(handles))):
        if lengths[i] != default and size < named.shape[1]:
            named[0, size], named[1, size] = handles[i], lengths[i]
            size += 1
    return size

"""What a simulated engine is made of: the arrays that the compiled kernel reads and writes, one row per engine.

Filled by env/simulator/simulator.py, stepped by env/simulator/step.py. Structure of arrays: a column per quantity and
slot, one slot per request in the batch. Columns marked hidden must never reach an observation.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...engine_adapter.arrays import Floats, Ints, Singles
from ..cost.cost_curve import OCTAVES
from ..layout.action_vector import ACTION
from ..layout.observation import GLOBAL_FEATURES, REQUEST_FEATURES

Shorts = npt.NDArray[np.int32]
Column = npt.NDArray[np.int32]  # (slots,) of one quantity
Bytes = npt.NDArray[np.int8]
Cells = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Records = npt.NDArray[np.void]

QUEUE: Final = 512  # requests that wait outside the batch; more are turned away and counted
FREE, RUNNING, PREEMPTED = 0, 1, 2  # PHASE of a slot
TERMS: Final = ("good_tokens", "tokens", "request_s", "wasted_rows")  # of the reward, see env/layout/reward.py

# State.ints, (engines, columns, slots) int32; tokens unless said otherwise.
INT_COLUMNS: Final = (
    "phase", "handle", "row",  # row of the workload
    "prompt", "output",  # hidden: the true length of the answer
    "limit",  # the most that the answer may have, as the request says
    "emitted", "computed", "blocks", "drafter",  # tokens the drafter has computed
    "drafts",  # wait for verification
    "lucky",  # hidden: how many of them would be accepted
    "service",  # class of service
    # what the step just simulated did
    "scheduled", "verified", "accepted", "fresh",  # emitted
    "pruned", "draft_limit", "kept",  # handed over to the next step's verification
    "context",  # computed; while a step is under way, before it
    "is_prefill", "finished", "first", "preempted",
)  # fmt: skip
(
    PHASE, HANDLE, ROW, PROMPT, OUTPUT, LIMIT, EMITTED, COMPUTED, BLOCKS, DRAFTER, DRAFTS, LUCKY, SERVICE, SCHEDULED,
    VERIFIED, ACCEPTED, FRESH, PRUNED, DRAFT_LIMIT, KEPT, CONTEXT, IS_PREFILL, FINISHED, FIRST, PREEMPTED_NOW,
) = range(len(INT_COLUMNS))  # fmt: skip
# State.traits, (engines, 2, slots) float32, both hidden: how easy the request is and what its confidences do not tell,
# in standard deviations.
LEVEL, RESIDUAL = range(2)
ARRIVED, BEGAN = range(2)  # State.times, (engines, 2, slots) float64: arrival and first token, seconds
TRIALS, SUCCESSES, ACCEPTANCE = range(3)  # State.evidence, (engines, 3, positions, slots) float32
TRIED, HIT, MEAN = range(3)  # State.population, (engines, 3, positions) float64
OCTAVE_LOG, OCTAVE_VISITS = range(2)  # State.octaves, (engines, 2, OCTAVES) float64
# State.copies, (engines, COPY_COLUMNS, slots) int32: whether the draft that waits is a copy, and what the step verified
# was one; tokens that the newest match offered, that are kept of it, and hidden: how many of these would be accepted;
# whether it was found behind a copy that was accepted as a whole; what the drafter was asked for, and could draft of
# that; and what the step did with a copy while nobody shall take it for the drafter's.
COPIED, WAS_COPY, FOUND, COPY_KEPT, COPY_LUCKY, BEHIND_WHOLE, ASKED, WANTED = range(8)
COPIES_VERIFIED, COPIES_ACCEPTED, COPIES_PRUNED, COPY_COLUMNS = range(8, 12)
COPY_SLOPE, COPY_INTERCEPT, COPY_PRICE = range(3)  # State.copy_rules, (engines, 3, longest copy) float32
KEEP_FROM, GO_ON_FROM = range(2)  # State.rules, (engines, 2, positions) float32: thresholds of the stop rule in force

# Rows of the kernel's scratch `notes`, (NOTES, slots) int32, which every stage uses anew. The scheduler: slots in order
# of admission, and blocks; the target: whether a chunk makes a token of its own, and tokens made; the drafter: allowed
# tokens before and after catching up, drawn tokens, whether made ahead, cell of the first token and whether it would be
# accepted, a place in a table or a slot.
ORDER, NEEDED = range(2)
ENDS, MADE = range(2)
LENGTH, WANT, DRAWN_TOKENS, IS_AHEAD, CELL, ALIVE, PLACE, NOTES = range(8)
# Rows of the kernel's scratch for first tokens, (TOKEN, slots): luck, score, number from a table, survival.
LUCK, SCORE, NUMBER, SURVIVAL, TOKEN = range(5)
GOES_ON = LENGTH  # once it is caught up

_WHOLE = (
    "episodes", "steps",
    "arrived",  # requests taken into the queue: the last handle given
    "turned_away",  # arrivals that found the queue full, or could never fit
    "queue_head", "queue_length", "finished",
    "finished_good",  # ... within both objectives
    "preemptions", "drafted", "accepted", "emitted", "ttft_count", "tpot_count", "free_blocks", "profile", "workload",
    "cursor",  # row of the workload that arrives next
    "exhausted",  # 1: a workload that does not repeat has ended
    # the step just simulated
    "new_arrivals", "running", "waiting",  # after it
    "prefill_tokens", "decode_tokens", "draft_tokens", "rounds", "drawn", "caught_up",
    "was_ruled",  # a stop rule chose which tokens this step verified
    "is_ruled",  # a stop rule was in force while this step drafted
    "prunes",  # the drafts of this step will be pruned while the next one verifies them
    "looked",  # draft tokens of this step that exit heads looked at
    "wrongly_pruned",  # drafts cut at a token that was then accepted
    "frontier",  # tokens that may be drafted ahead of each draft of this step
    "frontier_hits",  # requests whose draft was made ahead
    "copy_most",  # as protocol.MatchRule has it; 0: nothing is copied
    "copy_fewest",
    "rested",  # requests that were left out of this step
    "rested_steps",  # in a row in which some were
    "rest_steps",  # that those who rest sit out for each one in which they decode; 0: nobody rests
)  # fmt: skip
_REAL = (
    "clock_s", "next_arrival_s",
    "idle_s",  # spent with nothing to do
    "busy_s", "ttft_sum_s", "tpot_sum_s", "e2e_sum_s",
    "in_system_s",  # integral of the requests in the system over time
    "rate",  # arrivals come so many times as fast as in the workload
    "swing", "swing_period_s", "swing_phase",  # drift of the rate and of the difficulty
    "hardness", "hardness_swing", "hardness_now",  # hidden: shift of every request's level, standard deviations
    # the step just simulated
    "began_s", "step_s",
    "elapsed_s",  # since the end of the step before, idle time included
    "verify_s", "draft_s", "overlap_s", "host_s",
    "prune_s",  # part of verify_s
    # running estimates, as env/estimate/engine_state.py keeps them
    "mean_prefill_rows", "mean_prefill_share", "mean_step_s", "mean_tokens_per_s", "arrival_rate", "observed_s",
    "excess", "leverage", "mean_draft_s", "mean_rounds",
    "copy_worth", "copy_least",  # of the rule, tokens
)  # fmt: skip
# One record per engine. Times in seconds, on the engine's own clock that starts at 0.
ENGINE: Final = np.dtype(
    [("seed", np.uint64), ("draws", np.uint64), *((name, np.int64) for name in _WHOLE)]
    + [(name, np.float64) for name in _REAL]
)


class State(NamedTuple):
    """All that changes; the first axis counts engines."""

    engines: Records  # (engines,) of ENGINE
    ints: Shorts
    traits: Singles
    keys: Words  # (engines, slots) hidden: key of each request's random numbers
    times: Floats
    evidence: Singles
    population: Floats
    octaves: Floats
    queue_s: Floats  # (engines, QUEUE) arrival times, a ring
    queue_row: Ints  # (engines, QUEUE) workload rows
    lengths: Bytes  # (engines, staleness + 1, slots) action sets on their way; -1: not named
    vectors: Singles  # (engines, staleness + 1, len(ACTION))
    rules: Singles
    chances: Singles  # (engines, positions, cells) chance of acceptance by score cell, as the stop rule has it
    cells: Cells  # (engines, slots, positions) scores of the last draft
    copies: Shorts
    copy_cells: Cells  # (engines, slots, longest copy) scores of the newest match
    copy_rules: Singles
    copy_weights: Singles  # (engines, slots) what a copied token of each request is worth
    rests: Bytes  # (engines, slots) who rests
    coefficients: Floats  # (engines, terms of verify, draft and host), seconds per unit
    shown: Singles  # (engines, len(REQUEST_FEATURES), slots)
    globals: Singles  # (engines, len(GLOBAL_FEATURES))
    terms: Floats  # (engines, len(TERMS)) of the step just simulated
    results: Floats  # (engines, requests, 4) arrival, first token, end in seconds; tokens. For replays, else empty


def allocate(
    engines: int, slots: int, positions: int, cells: int, delay: int, terms: int, results: int, copied: int
) -> State:
    """Return arrays of zeros; `copied`: tokens of the longest copy."""
    return State(
        engines=np.zeros(engines, ENGINE),
        ints=np.zeros((engines, len(INT_COLUMNS), slots), np.int32),
        traits=np.zeros((engines, 2, slots), np.float32),
        keys=np.zeros((engines, slots), np.uint64),
        times=np.zeros((engines, 2, slots)),
        evidence=np.zeros((engines, 3, positions, slots), np.float32),
        population=np.zeros((engines, 3, positions)),
        octaves=np.zeros((engines, 2, OCTAVES)),
        queue_s=np.zeros((engines, QUEUE)),
        queue_row=np.zeros((engines, QUEUE), np.int64),
        lengths=np.zeros((engines, delay + 1, slots), np.int8),
        vectors=np.zeros((engines, delay + 1, len(ACTION)), np.float32),
        rules=np.zeros((engines, 2, positions), np.float32),
        chances=np.zeros((engines, positions, cells), np.float32),
        cells=np.zeros((engines, slots, positions), np.uint8),
        copies=np.zeros((engines, COPY_COLUMNS, slots), np.int32),
        copy_cells=np.zeros((engines, slots, copied), np.uint8),
        copy_rules=np.zeros((engines, 3, copied), np.float32),
        copy_weights=np.zeros((engines, slots), np.float32),
        rests=np.zeros((engines, slots), np.int8),
        coefficients=np.zeros((engines, terms)),
        shown=np.zeros((engines, len(REQUEST_FEATURES), slots), np.float32),
        globals=np.zeros((engines, len(GLOBAL_FEATURES)), np.float32),
        terms=np.zeros((engines, len(TERMS))),
        results=np.zeros((engines, results, 4)),
    )

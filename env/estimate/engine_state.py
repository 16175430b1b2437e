"""What is known about one engine, kept up to date from its step records.

`observe` is called by the decision core, the replay and the simulator; it is deterministic and reads no clock,
file or random source. It updates `state` in place and returns it: use `EngineState.copy` to branch.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from ...engine_adapter.arrays import Bools, Floats, Ints
from ...engine_adapter.protocol import MAX_DRAFT_LENGTH, MAX_REQUESTS, RequestEvent, StepRecord, StopRule
from ..cost.cost_curve import StepOctaves
from ..cost.cost_table import MAX_ROWS, CostTable, StepCost
from ..cost.split_cost import SplitCost
from ..estimate import acceptance
from ..spaces import Capabilities
from .acceptance import Population
from .confidence import Confidence, DraftRows
from .matches import Matches, copies_of, drafters_rows
from .objectives import NO_CLASSES, ObjectiveClasses
from .planning_view import PlanningView
from .requests import RequestTable
from .step_rows import StepRows, StepSums

ARRIVAL_WINDOW_S = 10.0  # memory of the arrival rate: some requests at a load worth steering
LOAD_STEPS = 8.0  # memory of the running means
STEADY_STEPS = 256.0  # ... of those that are to outlast the time between two prompts
NO_COPIES: Final = np.zeros(0, np.bool_)
ASKED = 64  # action sets whose stop rule is remembered: more than are ever on their way


@dataclass(slots=True)
class Load:
    """How busy the engine is. Counts of requests unless said otherwise."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # 0..1
    arrival_rate_per_s: float = 0.0  # over about 10 s
    prefill_rows: float = 0.0  # running mean, rows per step
    prefill_steps: float = 0.0  # running mean, 0..1 of the steps that had any
    prefill_share: float = 0.0  # running mean, 0..1 of the rows
    steady_prefill_rows: float = 0.0  # rows per step, over some hundred steps
    step_s: float = 0.0  # running mean
    tokens_per_s: float = 0.0  # running mean of emitted tokens


@dataclass(slots=True)
class StageSight:
    """A pipeline's stages, and what the newest step did under their cut."""

    bounds: tuple[int, ...] = ()
    moves: int = 0  # since the engine's boot
    is_moving: bool = False
    steady_steps: int = 0  # since the last move
    emitted: float = 0.0  # tokens of the newest step
    elapsed_s: float = 0.0  # that it took
    running: int = 0  # requests

    @property
    def stages(self) -> int:
        """Ranks that run layers, where these lie on the last ones."""
        return len(self.bounds) + 1 - self.bounds.count(0)


@dataclass(slots=True)
class LinkCounters:
    """What went wrong on the way from the engine."""

    records: int = 0  # taken in
    gaps: int = 0  # holes in the counter
    lost_records: int = 0  # records in those holes
    regressions: int = 0  # records older than one already taken in: ignored
    reboots: int = 0  # another boot id under the same state
    evicted: int = 0  # requests whose end was never reported


class Lesson(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What one record teaches and was not learnt yet."""

    record: StepRecord
    rows: StepRows
    sums: StepSums
    trials: Floats  # (n, k_max)
    successes: Floats  # (n, k_max)
    drafts: DraftRows
    elapsed_s: float  # what the step cost in throughput
    rule: StopRule | None  # in force when this step drafted
    split: int  # in force in it
    told: StepRows  # rows with copied drafts in them; `rows` is what the drafter did
    is_copy: Bools  # (n,) whose verified draft was copied


class EngineState:
    """Everything a policy may look at."""

    def __init__(self, capabilities: Capabilities, objectives: ObjectiveClasses = NO_CLASSES) -> None:
        self.capabilities = capabilities
        self.objectives = objectives  # of requests that arrive from now on
        self.boot_id = ""
        self.counter = -1
        self.step = 0
        self.time_s = 0.0
        self.lesson: Lesson | None = None
        self.load = Load()
        self.link = LinkCounters()
        self.requests = RequestTable(capabilities.k_max)
        self.population = Population(capabilities.k_max)
        self.confidence = Confidence(capabilities.k_max)
        self.matches = Matches(capabilities.copy_max)
        self.asked_stops: dict[int, StopRule | None] = {}  # by the action set's sequence
        self.drafting_stop: StopRule | None = None  # in force when the step last looked at drafted
        self.rested_stop: StopRule | None = None  # ... when those did who were left out of it
        self.has_skipped = False  # the drafter leaves out what nobody drafts for, and makes up for it later
        self.octaves = StepOctaves()
        self.unsplit_cost = CostTable(
            device=capabilities.device,
            graph_sizes=capabilities.graph_sizes,
            max_rows=capabilities.max_batched_tokens or 8192,
        )
        self.stages = StageSight() if capabilities.stages is None else StageSight(capabilities.stages.bounds)
        self.split = 0  # that the newest step showed, an index into `Capabilities.splits`; 0 is unsplit
        self.octave = 0  # of the running requests
        self.split_costs: dict[tuple[int, int], SplitCost] = {}  # by split and octave

    def meet(self, roster: list[RequestEvent]) -> None:
        """Take in who was alive when the engine introduced itself; before the first record."""
        self.requests.apply(roster, self.link.records, self.objectives)

    def handles(self) -> Ints:
        """Return (n,) int64 handles of all live requests, in order of first appearance."""
        return self.requests.column("handle").copy()

    def in_batch(self) -> Bools:
        """Return (n,) which requests are in the batch now: the others wait."""
        return self.requests.running(self.link.records)

    def decoding(self) -> Bools:
        """Return (n,) which requests are in the batch and past their prompt: these can use a draft now."""
        return self.requests.decoding(self.link.records)

    def acceptance(self, chosen: Bools | None = None) -> Floats:
        """Return (n, k_max) chance that each position is accepted given that the one before it was.

        :param chosen: (n,) whose rows are asked for, default everybody's
        """
        known = self.requests.successes, self.requests.trials, self.population.mean, self.population.level_variance
        return acceptance.shrink(*known) if chosen is None else acceptance.shrink_some(*known, chosen)

    def view(self) -> PlanningView:
        """Return what plans are made of, under the costs of unsplit steps."""
        decoding = self.decoding()
        return PlanningView(
            self.capabilities, self.requests, decoding, int(np.count_nonzero(decoding)), self.population,
            self.confidence, self.matches if self.capabilities.copy_max else None, self.load, self.link.records,
            self.time_s, self.has_skipped, self.unsplit_cost, self.unsplit_cost,
        )  # fmt: skip

    def cost_under(self, split: int) -> CostTable | SplitCost:
        """Return what steps of about so many running requests cost under a split; 0 is unsplit."""
        return self.split_cost(split) if split else self.unsplit_cost

    def split_cost(self, split: int) -> SplitCost:
        """Return the same of a split other than unsplit."""
        key = split, self.octave
        return self.split_costs.setdefault(key, SplitCost(self.unsplit_cost))

    def ask(self, sequence: int, stop: StopRule | None) -> None:
        """Note which stop rule an action set asks for: it decides what the records under it can tell."""
        self.asked_stops[sequence] = stop
        if len(self.asked_stops) > ASKED:
            del self.asked_stops[next(iter(self.asked_stops))]

    def copy(self) -> EngineState:
        """Return an independent copy."""
        return copy.deepcopy(self)


def observe(state: EngineState, record: StepRecord) -> EngineState:
    """Take one step record into `state` and return it; a record that is not newer changes only a counter."""
    look(state, record)
    learn(state)
    return state


def look(state: EngineState, record: StepRecord) -> None:
    """See who is there and what each did; what it teaches about the population and the costs waits for `learn`.

    The first half of `observe`, for callers that answer before they learn. Whatever still waits is learnt first, so
    a state depends on the records alone, not on when `learn` was called.
    """
    learn(state)
    if not _admit(state, record):
        return
    elapsed_s = _elapsed_s(state, record)
    state.requests.apply(record.events, state.link.records, state.objectives)
    told = rows = StepRows.of(record.rows)
    is_copy = NO_COPIES
    if state.capabilities.copy_max:
        copied, is_copy = copies_of(record, told)
        rows = drafters_rows(told, copied, is_copy)
    # Chose which tokens this step verified, or an earlier one's of those who were left out since.
    rule = state.drafting_stop or state.rested_stop
    state.rested_stop = rule if record.rested else None
    state.drafting_stop = state.asked_stops.get(record.lease_sequence) if record.lease_epoch else None
    trials, successes = acceptance.count_trials(rows.verified, rows.pruned, rows.accepted, state.requests.k_max)
    # Under a stop rule only confident tokens are verified: their acceptance says nothing about drafts without one.
    fair = (trials, successes) if rule is None else (np.zeros(trials.shape),) * 2
    limit = state.requests.update(rows, *fair, state.link.records, record.caught_up, record.time_s)
    state.has_skipped |= record.caught_up > 0
    drafts = DraftRows(rows.confidences, limit, trials, successes, rule, state.link.records)
    state.requests.depart(record.events)
    sums = rows.sums()
    _update_load(state, record, sums.emitted)
    state.counter, state.step, state.time_s = record.counter, record.step, record.time_s
    _see_split(state, record)
    _see_stages(state.stages, record, sums.emitted, elapsed_s)
    state.lesson = Lesson(
        record, rows, sums, trials, successes, drafts, elapsed_s, state.drafting_stop, state.split, told, is_copy
    )


def _see_split(state: EngineState, record: StepRecord) -> None:
    """Note which split the step ran under: one that was never offered counts as none."""
    split = record.split or 0
    split = split if split < len(state.capabilities.splits) else 0
    before = state.split, state.octave
    state.split, state.octave = split, _octave(record.running, state.octave)
    if split and (split, state.octave) != before:
        state.split_cost(split).begin()


def _see_stages(sight: StageSight, record: StepRecord, emitted: float, elapsed_s: float) -> None:
    """Note what the step did under which cut; a move spoils the steps around it."""
    if record.stage_bounds is None:
        return
    has_moved = record.stage_moves != sight.moves or record.stage_bounds != sight.bounds
    sight.bounds, sight.moves, sight.is_moving = record.stage_bounds, record.stage_moves, record.is_moving
    sight.steady_steps = 0 if has_moved or record.is_moving else sight.steady_steps + 1
    sight.emitted, sight.elapsed_s, sight.running = emitted, elapsed_s, record.running


def _octave(running: int, before: int) -> int:
    """Return the octave of a number of requests; at its borders the one before goes on: batches swing by a few."""
    low, high = (1 << before) >> 1, 1 << before
    is_near = before > 0 and 3 * low <= 4 * running and 4 * running <= 5 * high
    return before if is_near else max(running, 1).bit_length()


def learn(state: EngineState) -> None:
    """Learn what the record last looked at teaches; nothing if that is done."""
    lesson, state.lesson = state.lesson, None
    if lesson is None:
        return
    rows = lesson.rows
    # What was verified since it was the surest says nothing of the rest; calibrated confidences do.
    is_trimmed = state.capabilities.is_adaptive and bool((rows.verified < lesson.drafts.limit).any())
    if lesson.drafts.rule is None and not is_trimmed:
        known = state.requests.trials, state.requests.successes
        # Drafts that a rule ended say nothing about what the drafter delivers, nor does one that sat out.
        tells = lesson.rule is None and not lesson.record.sat_out
        limit = rows.draft_limit if tells else np.zeros_like(rows.draft_limit)
        state.population.learn(lesson.trials, lesson.successes, known, limit, rows.drafted)
    state.confidence.learn(lesson.drafts)
    if state.capabilities.copy_max:
        state.matches.learn(lesson.told, lesson.is_copy, state.link.records)
    cost = _step_cost(lesson)
    if lesson.split == 0:
        state.unsplit_cost.learn(cost)
    else:
        state.split_cost(lesson.split).learn(cost)
    state.octaves.learn(cost)
    if state.link.records % 64 == 0 or state.requests.size > 2 * MAX_REQUESTS:
        state.link.evicted += state.requests.evict(state.link.records)


def _admit(state: EngineState, record: StepRecord) -> bool:
    """Count holes, ignore what is late, and start over with the requests of another boot."""
    if record.boot_id != state.boot_id:
        if state.boot_id:
            state.link.reboots += 1
            state.requests = RequestTable(state.capabilities.k_max)
        state.boot_id, state.counter, state.time_s = record.boot_id, -1, 0.0
    elif record.counter <= state.counter:
        state.link.regressions += 1
        return False
    elif record.counter > state.counter + 1:
        state.link.gaps += 1
        state.link.lost_records += record.counter - state.counter - 1
    state.link.records += 1
    return True


def _elapsed_s(state: EngineState, record: StepRecord) -> float:
    """Return what the step cost in throughput: with steps in flight, less than its own duration."""
    since_last = record.time_s - state.time_s
    is_next = state.counter >= 0 and record.counter == state.counter + 1
    return min(record.step_s, since_last) if is_next and since_last > 0.0 else record.step_s


def _step_cost(lesson: Lesson) -> StepCost:
    record, sums = lesson.record, lesson.sums
    # Under a stop rule more is drafted than handed over; not every engine says how much.
    rounds, drawn = record.draft_rounds, record.drawn_tokens
    is_known = lesson.rule is None or rounds is not None or sums.is_full
    return StepCost(
        rows=record.prefill_tokens + record.decode_tokens + record.draft_tokens,
        prefill_rows=record.prefill_tokens,
        requests=len(record.rows),
        context_tokens=sums.context,
        rounds=min(sums.longest if rounds is None else rounds, MAX_DRAFT_LENGTH),  # a cell of costs is kept for each
        drafted=sums.drafted if drawn is None else min(drawn, MAX_ROWS),
        total_s=lesson.elapsed_s,
        draft_s=record.draft_s,
        overlap_s=record.overlap_s,
        is_draft_known=is_known,
        caught_up=record.caught_up,
        all_draft=bool((lesson.rows.draft_limit > 0).all()),
    )


def _update_load(state: EngineState, record: StepRecord, emitted: float) -> None:
    load, share = state.load, 1.0 / LOAD_STEPS
    total = record.prefill_tokens + record.decode_tokens + record.draft_tokens
    load.running, load.waiting, load.kv_usage = record.running, record.waiting, record.kv_usage
    prefill_rows, steady = min(record.prefill_tokens, MAX_ROWS), max(1.0 / STEADY_STEPS, 1.0 / state.link.records)
    load.prefill_rows += share * (prefill_rows - load.prefill_rows)
    load.prefill_steps += share * (float(prefill_rows > 0) - load.prefill_steps)
    load.steady_prefill_rows += steady * (prefill_rows - load.steady_prefill_rows)
    load.prefill_share += share * (record.prefill_tokens / max(total, 1) - load.prefill_share)
    load.step_s += share * (record.step_s - load.step_s)
    if record.step_s > 0.0:
        load.tokens_per_s += share * (emitted / record.step_s - load.tokens_per_s)
    arrivals = sum(event.kind == "arrival" for event in record.events) if record.events else 0
    passed_s = max(record.time_s - state.time_s, 0.0) if state.counter >= 0 else 0.0
    fade = math.exp(-min(passed_s / ARRIVAL_WINDOW_S, 50.0))
    load.arrival_rate_per_s = load.arrival_rate_per_s * fade + arrivals / ARRIVAL_WINDOW_S

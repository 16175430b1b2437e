"""One recorded engine, run again on a profile: the same arrivals, lengths and decisions, acceptances drawn anew.

Called by controller/fidelity.py. Deliberately plain: one engine, Python, no options; the batched simulator is for
training. Reads of a recording only what its fields say; what was accepted is never read.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..engine_adapter.stop_rule import logit
from .acceptance_model import accept_chance, confidence_logit, draft_chain
from .engine_model import EngineProfile, Work
from .step_basis import DRAFT_BASIS, HOST_BASIS, VERIFY_BASIS, fill_draft_basis, fill_host_basis, fill_verify_basis

Floats = npt.NDArray[np.float64]

STEP_LIMIT = 1_000_000
NEIGHBOURS = 2  # decisions to either side that a replay may take between two


class Decision(NamedTuple):
    """One recorded draft of a request."""

    emitted: int  # tokens of the answer when it was decided
    handed: int  # draft tokens
    drawn: int  # ... with the one that the drafter dropped
    is_looked_at: bool = False  # by exit heads, while it was verified
    confidences: tuple[float, ...] = ()  # the drafter's in what was handed over; empty: not known


NOTHING: Final = Decision(0, 0, 0)


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """What is replayed of one request."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    decisions: tuple[Decision, ...] = ()  # by tokens emitted

    def decided(self, emitted: int) -> Decision:
        """Return what was decided at so many tokens emitted: the last decision until then, else the first."""
        return self.decisions[self._place(emitted)] if self.decisions else NOTHING

    def replayed(self, chance: np.random.Generator) -> list[Decision]:
        """Return which decision a replay takes at each number of tokens emitted, from 0 on.

        Where one was made, that one. Between two it takes any of those around: the one before would be met the more
        often the more was accepted behind it, and what was accepted must not decide what is accepted again.
        """
        moves = chance.integers(-NEIGHBOURS, NEIGHBOURS + 1, self.output_tokens + 1).tolist()
        return [self._around(emitted, move) for emitted, move in enumerate(moves)]

    def _around(self, emitted: int, move: int) -> Decision:
        own = self.decided(emitted)
        if own is NOTHING or own.emitted == emitted:
            return own
        return self.decisions[min(max(self._place(emitted) + move, 0), len(self.decisions) - 1)]

    def _place(self, emitted: int) -> int:
        return max(bisect_right(self.decisions, emitted, key=attrgetter("emitted")) - 1, 0)


@dataclass(frozen=True, slots=True)
class Retraced:
    """What became of the requests; arrays (n,) in the order they were given, seconds on the recording's clock."""

    first_token_s: Floats
    end_s: Floats
    steps: int
    outside_share: float  # of the steps, beyond the profile's measured domain


@dataclass(slots=True)
class _Live:
    number: int
    request: RecordedRequest
    level: float
    residual: float
    computed: int = 0
    held: int = 0  # tokens the drafter has computed
    emitted: int = 0
    draft: int = 0  # tokens that wait for verification
    logits: list[float] = field(default_factory=list)
    rows: int = 0
    is_prompt: bool = True


def retrace(profile: EngineProfile, requests: list[RecordedRequest], seed: int) -> Retraced:
    """Run the recording once."""
    return _Engine(profile, requests, seed).run()


class _Engine:
    def __init__(self, profile: EngineProfile, requests: list[RecordedRequest], seed: int) -> None:
        self.profile = profile
        self.chance = np.random.default_rng(seed)
        self.queue = sorted(range(len(requests)), key=lambda number: requests[number].arrival_s)
        self.requests = requests
        self.tables = profile.acceptance.tables()
        self.waiting: list[_Live] = []
        self.running: list[_Live] = []
        self.first_token_s = np.full(len(requests), np.nan)
        self.end_s = np.full(len(requests), np.nan)
        self.packed = profile.packed()
        self.verify, self.draft, self.host = (np.zeros(len(basis)) for basis in (VERIFY_BASIS, DRAFT_BASIS, HOST_BASIS))

    def run(self) -> Retraced:
        now_s, next_, steps, outside = 0.0, 0, 0, 0
        while next_ < len(self.queue) or self.waiting or self.running:
            if not self.waiting and not self.running:
                now_s = max(now_s, self.requests[self.queue[next_]].arrival_s)
                is_busy = False
            else:
                is_busy = True
            arrivals = 0
            while next_ < len(self.queue) and self.requests[self.queue[next_]].arrival_s <= now_s:
                self._arrive(self.queue[next_])
                next_, arrivals = next_ + 1, arrivals + 1
            scheduled = self._schedule()
            work = self._work(scheduled, arrivals)
            outside += self._is_outside(work)
            now_s += self._time(work, is_busy)
            self._emit(scheduled, now_s)
            steps += 1
            if steps > STEP_LIMIT:
                raise AssertionError("the recording does not end")
        return Retraced(self.first_token_s, self.end_s, steps, outside / max(steps, 1))

    def _arrive(self, number: int) -> None:
        level, residual = self.chance.standard_normal(2).tolist()
        self.waiting.append(_Live(number, self.requests[number], level, residual))

    def _schedule(self) -> list[_Live]:
        budget, scheduled = self.profile.token_budget, []
        for live in self.running:
            left = live.request.prompt_tokens + live.emitted - live.computed
            live.is_prompt = live.computed < live.request.prompt_tokens
            live.rows = min(left if live.is_prompt else 1 + live.draft, budget)
            if live.rows <= 0:
                live.rows = 0
                continue
            if not live.is_prompt:
                live.draft = live.rows - 1
            budget -= live.rows
            scheduled.append(live)
        while self.waiting and budget > 0 and len(self.running) < self.profile.max_requests:
            live = self.waiting.pop(0)
            live.is_prompt = True
            live.rows = min(live.request.prompt_tokens, budget)
            budget -= live.rows
            self.running.append(live)
            scheduled.append(live)
        return scheduled

    def _work(self, scheduled: list[_Live], arrivals: int) -> Work:
        """Draw what the step accepts and drafts, and return what it does."""
        decode = drafts = prompts = prompt_tokens = sampled = kv = attended = 0
        prompt_attended = 0.0
        drafting = rounds = drawn_rows = first = caught_up = own_rows = draft_attended = 0
        room = self.profile.catch_up_tokens or (1 << 30)
        for live in scheduled:
            before = live.computed
            if live.is_prompt:
                live.computed += live.rows
                prompts += 1
                prompt_tokens += live.rows
                prompt_attended += live.rows * (live.computed - 0.5 * (live.rows - 1))
                gained = int(live.computed >= live.request.prompt_tokens)
                sampled += gained
            else:
                accepted = self._accepted(live)
                gained = 1 + accepted
                live.computed += gained
                decode += live.rows
                drafts += live.draft
                sampled += live.rows
                attended += live.rows * live.computed
            kv += live.computed
            live.emitted = min(live.emitted + gained, live.request.output_tokens)
            live.draft = 0
            if not gained or live.emitted >= live.request.output_tokens - 1:
                continue
            decision = live.request.decided(live.emitted)
            drawn = decision.drawn
            if not drawn:
                continue
            missed = max(before - live.held, 0) if self.profile.catch_up_tokens else 0
            if missed > room:
                live.held += room
                caught_up += room
                room = 0
                continue
            room -= missed
            caught_up += missed
            first += live.computed - before
            own_rows += live.computed - before
            live.held = live.computed
            live.draft = decision.handed
            self._draw(live, decision.confidences)
            drafting += 1
            rounds = max(rounds, drawn)
            drawn_rows += drawn
            draft_attended += max(decision.handed, 1) * live.computed
        rows = decode + prompt_tokens
        return Work(
            requests=len(scheduled), decode_rows=decode, draft_tokens=drafts, prompts=prompts,
            prompt_tokens=prompt_tokens, sampled_rows=sampled, kv_tokens=kv, attended_tokens=attended,
            attended_prompt_tokens=prompt_attended, drafting_requests=drafting, rounds=rounds, draft_rows=drawn_rows,
            first_rows=first + caught_up, kept_rows=max(rows - own_rows, 0), draft_attended_tokens=draft_attended,
            arrivals=arrivals,
        )  # fmt: skip

    def _draw(self, live: _Live, told: tuple[float, ...]) -> None:
        _, _, quantiles, (share, carry, _) = self.tables
        chain = draft_chain(self.chance, min(live.draft, self.profile.acceptance.k_max), carry)
        live.logits = [confidence_logit(quantiles, at, live.level, score, share) for at, score in enumerate(chain)]
        if len(told) >= len(live.logits):
            live.logits = [logit(confidence) for confidence in told[: len(live.logits)]]

    def _accepted(self, live: _Live) -> int:
        intercepts, slopes, _, (_, _, hidden) = self.tables
        for position, value in enumerate(live.logits[: live.draft]):
            chance = accept_chance(intercepts, slopes, position, value, live.residual, hidden)
            if self.chance.random() >= chance:
                return position
        return min(live.draft, len(live.logits))

    def _time(self, work: Work, is_busy: bool) -> float:
        fill_verify_basis(
            self.verify, work.requests, work.decode_rows, work.draft_tokens, work.prompts, work.prompt_tokens,
            work.sampled_rows, work.kv_tokens, work.attended_tokens, work.attended_prompt_tokens,
        )  # fmt: skip
        fill_draft_basis(
            self.draft, work.drafting_requests, work.rounds, work.draft_rows, work.first_rows, work.kept_rows,
            work.draft_attended_tokens,
        )  # fmt: skip
        fill_host_basis(self.host, work.requests, work.arrivals)
        noise = np.exp(self.packed.noise * self.chance.standard_normal(3)).tolist()
        total: float = float(self.verify @ self.packed.verify) * noise[0]
        total += float(self.draft @ self.packed.draft) * noise[1]
        return total + (float(self.host @ self.packed.host) * noise[2] if is_busy else 0.0)

    def _is_outside(self, work: Work) -> bool:
        domain = self.profile.domain
        return any(
            not math.isfinite(value) or (name in domain and not domain[name].low <= value <= domain[name].high)
            for name, value in work.quantities().items()
        )

    def _emit(self, scheduled: list[_Live], now_s: float) -> None:
        for live in scheduled:
            if live.emitted and np.isnan(self.first_token_s[live.number]):
                self.first_token_s[live.number] = now_s
            if live.emitted >= live.request.output_tokens:
                self.end_s[live.number] = now_s
                self.running.remove(live)

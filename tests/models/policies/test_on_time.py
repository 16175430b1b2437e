"""Objectives per request: who would be late gets the drafts it needs, the others what room that leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from faser.engine_adapter.arrays import Bools, Floats, Ints
from faser.engine_adapter.protocol import RequestEvent, RequestRow, StepRecord
from faser.env.estimate.engine_state import EngineState, observe
from faser.env.spaces import Action, Capabilities
from faser.models.policies.on_time import RESERVE_TOKENS, SETTLE_STEPS, Needs, in_time
from faser.models.registry import make_policy

CAPABILITIES = Capabilities(k_max=4)
REQUESTS = 8  # every other one has an objective


def steps_of(tpot_ms: float | None, steps: int = 120) -> Iterator[StepRecord]:
    """Give steps of an engine where drafts are good and a row costs a tenth of a step.

    Every step verifies two to four tokens of each request, takes 10 ms and 1 ms per row, and drafting 1 ms per round:
    about 13 ms per token.
    """
    everybody, now_s = range(1, REQUESTS + 1), 0.0
    arrivals = [
        RequestEvent("arrival", handle, 0.0, 40, f"r{handle}", tpot_ms=tpot_ms if handle % 2 else None)
        for handle in everybody
    ]
    for counter in range(1, steps + 1):
        length = 2 + counter % 3
        accepted = [length - (handle + counter) % 2 for handle in everybody]
        rows = [
            RequestRow(handle, 1 + length, length, length, length, 0, taken, taken + 1, 50, False)
            for handle, taken in zip(everybody, accepted, strict=True)
        ]
        verify_s, draft_s = 10e-3 + 1e-3 * REQUESTS * (1 + length), 1e-3 * length
        now_s += verify_s + draft_s
        yield StepRecord(
            "boot", counter, counter, now_s, verify_s + draft_s, 0.0, verify_s, 0.0, draft_s, 0.0, 0.0,
            REQUESTS, 0, 0, REQUESTS, REQUESTS * length, 0.1, None, None, 1, counter, 0, 0,
            arrivals if counter == 1 else [], rows,
        )  # fmt: skip


def asked(tpot_ms: float | None) -> tuple[Action, Action, Bools]:
    """Return what price and the policy ask for after such steps, and who has an objective."""
    state = EngineState(CAPABILITIES)
    price, on_time = (make_policy(name, CAPABILITIES) for name in ("price", "price:slack"))
    for record in steps_of(tpot_ms):
        observe(state, record)
        found = price.act(state), on_time.act(state)
    return *found, state.requests.column("handle") % 2 == 1


@pytest.mark.parametrize("tpot_ms", [None, 1000.0], ids=["nobody has an objective", "all are ahead"])
def test_where_nobody_would_be_late_the_answer_is_prices(tpot_ms: float | None) -> None:
    price, on_time, _ = asked(tpot_ms)
    assert price.lengths.any()
    assert np.array_equal(on_time.lengths, price.lengths)
    assert on_time.reason == price.reason
    assert on_time.stop == price.stop


def test_those_behind_their_schedule_draft_the_longest_and_the_others_not_at_all() -> None:
    """At 10 ms a token they are far behind after so many steps of 13."""
    price, on_time, urgent = asked(10.0)
    assert price.lengths[~urgent].all()
    assert on_time.lengths[urgent].tolist() == [4] * (REQUESTS // 2)
    assert not on_time.lengths[~urgent].any()
    assert on_time.stop is None
    assert "favoured for their objectives, first request" in on_time.reason


def needs(tpot_s: list[float], slack: list[float]) -> Needs:
    return Needs(np.array(tpot_s), np.array(slack))


@dataclass
class Imagined:
    """A forecast: each draft token brings half a token and takes a fifth of a second, the step itself one."""

    requests: int
    longest: int = 4

    @property
    def tokens(self) -> Floats:
        return np.tile(1.0 + 0.5 * np.arange(self.longest + 1), (self.requests, 1))

    def step_s(self, lengths: Ints) -> float:
        return 1.0 + 0.2 * float(lengths.sum())


def found(wished: list[int], tpot_s: list[float], slack: list[float]) -> tuple[list[int], bool]:
    lengths, is_met = in_time(Imagined(len(wished)), needs(tpot_s, slack), np.array(wished))  # type: ignore[arg-type]
    return lengths.tolist(), is_met


def test_without_objectives_the_wish_stands() -> None:
    assert found([2, 0], [np.inf, np.inf], [np.inf, np.inf]) == ([2, 0], True)


def test_each_gets_the_fewest_drafts_that_bring_what_the_longer_step_needs() -> None:
    """0.9 s a token: one draft token makes it 1.2 s for 1.5 tokens, enough. Beside two of another's it takes two."""
    assert found([0, 0], [0.9, np.inf], [RESERVE_TOKENS, np.inf]) == ([1, 0], True)
    assert found([0, 2], [0.9, np.inf], [RESERVE_TOKENS, np.inf]) == ([2, 2], True)


def test_who_is_ahead_needs_less_and_who_is_behind_more() -> None:
    ahead, behind = RESERVE_TOKENS + SETTLE_STEPS, RESERVE_TOKENS - SETTLE_STEPS / 4.0
    assert found([0], [0.9], [ahead]) == ([0], True)
    assert found([0], [0.9], [behind]) == ([2], True)


def test_who_cannot_be_in_time_gets_the_longest_draft_and_that_is_said() -> None:
    assert found([0, 0], [0.1, np.inf], [0.0, np.inf]) == ([4, 0], False)

"""Which frontiers are of use, what is taken of them, and when one is worth asking for."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import product
from math import prod

import pytest

from faser.engine_adapter.drafter_process.drafted import Drafted
from faser.engine_adapter.overlap.frontier import PROBE_EVERY, Frontiers, HitRate

AHEAD = Drafted((30, 31, 32), (0.9, 0.8, 0.7))  # guess first


def opened(chunk: tuple[int, ...] = (10, 11), ahead: Drafted | None = AHEAD) -> Frontiers:
    frontiers = Frontiers()
    frontiers.open("a", chunk)
    if ahead is not None:
        frontiers.fill("a", ahead)
    return frontiers


@pytest.mark.parametrize(
    ("sampled", "taken", "outcome"),
    [
        ((10, 11, 30), (31, 32), "hits"),
        ((10, 11, 99), None, "other_bonus"),
        ((10, 99), None, "rejected"),
        ((99,), None, "rejected"),
        ((10, 11), (30, 31, 32), "hits"),  # pruning ended the step with the chunk: the guess is a draft as well
        ((10,), None, "rejected"),  # cut before it was verified
        ((), None, "rejected"),
        ((10, 11, 30, 31), (32,), "hits"),
        ((10, 11, 30, 31, 32), None, "other_bonus"),  # nothing is left of it
    ],
)
def test_what_follows_what_was_sampled_is_taken(
    sampled: tuple[int, ...], taken: tuple[int, ...] | None, outcome: str
) -> None:
    frontiers = opened()
    found = frontiers.take("a", sampled, 5)
    assert (None if found is None else found.tokens) == taken
    counted = {name: getattr(frontiers.outcomes, name) for name in ("hits", "rejected", "other_bonus", "late")}
    assert counted == {"hits": 0, "rejected": 0, "other_bonus": 0, "late": 0} | {outcome: 1}
    assert frontiers.outcomes.misses == (outcome != "hits")
    assert frontiers.take("a", sampled, 5) is None, "a chain is used once"


def test_confidences_stay_with_their_tokens_and_no_more_is_taken_than_may_be() -> None:
    assert opened().take("a", (10, 11, 30), 1) == Drafted((31,), (0.8,))


def test_a_frontier_that_is_not_there_is_late_and_no_other_requests_is_taken() -> None:
    frontiers = opened(ahead=None)
    frontiers.fill("b", AHEAD)
    assert frontiers.take("a", (10, 11, 30), 5) is None
    assert frontiers.take("b", (30,), 5) is None
    assert frontiers.outcomes.late == 1
    assert frontiers.outcomes.misses == 1


@pytest.mark.parametrize(
    ("sampled", "is_awaited"), [((10, 11, 30), True), ((10, 11), True), ((10, 99), False), ((10,), False)]
)
def test_it_is_waited_for_only_while_it_can_be_of_use(sampled: tuple[int, ...], is_awaited: bool) -> None:
    assert opened(ahead=None).is_awaited("a", sampled) == is_awaited
    assert not opened().is_awaited("a", sampled)
    assert not opened(ahead=None).is_awaited("b", sampled)


def test_requests_that_ended_or_were_not_in_the_step_leave_nothing() -> None:
    frontiers = opened()
    frontiers.forget(["a", "unknown"])
    assert frontiers.take("a", (10, 11, 30), 5) is None
    frontiers = opened()
    frontiers.clear()
    assert frontiers.take("a", (10, 11, 30), 5) is None
    assert frontiers.outcomes.misses == 0


def test_taken_tokens_always_continue_what_was_sampled() -> None:
    """Random chains over two letters against the definition: sampled + taken is a beginning of chunk + ahead."""
    chance = random.Random(1)
    hits = 0
    for _ in range(3000):
        chunk, ahead, sampled = (
            tuple(chance.choice((5, 6)) for _ in range(chance.randint(low, 3))) for low in (1, 1, 0)
        )
        found = opened(chunk, Drafted(ahead, (0.5,) * len(ahead))).take("a", sampled, 64)
        is_of_use = len(chunk) <= len(sampled) < len(chunk + ahead) and (chunk + ahead)[: len(sampled)] == sampled
        assert (found is not None) == is_of_use
        if found is not None:
            assert sampled + found.tokens == chunk + ahead
            hits += 1
    assert hits > 100


def test_a_request_that_never_hits_is_asked_rarely_and_one_that_hits_always() -> None:
    rate = HitRate()
    for _ in range(60):
        rate.note(False)
    asked = [rate.pays(serial_s=0.01, delay_s=0.001) for _ in range(10 * PROBE_EVERY)]
    assert sum(asked) == 10
    for _ in range(60):
        rate.note(True)
    assert all(rate.pays(serial_s=0.01, delay_s=0.001) for _ in range(20))


def test_misses_that_cost_nothing_are_worth_any_hit() -> None:
    rate = HitRate()
    for _ in range(60):
        rate.note(False)
    assert rate.pays(serial_s=0.01, delay_s=0.0)


# --- what is emitted, every way that a run can go, in exact fractions ---

VOCABULARY, ANSWER, LENGTH = 3, 4, 2  # tokens, tokens emitted, tokens of a chunk
Prefix = tuple[int, ...]
Spread = dict[Prefix, Fraction]


def chance(prefix: Prefix, token: int) -> Fraction:
    """Return the target's probability of a token; every prefix has its own."""
    weights = [
        1 + (7 * sum((place + 2) * (each + 1) for place, each in enumerate(prefix)) + 5 * x) % 6 for x in range(3)
    ]
    return Fraction(weights[token], sum(weights))


def drafted(prefix: Prefix, count: int) -> Prefix:
    """Return what the drafter goes on with; it is often wrong."""
    found = prefix
    for _ in range(count):
        found += ((sum(found) + len(found)) % VOCABULARY,)
    return found[len(prefix) :]


def verified(prefix: Prefix, chunk: Prefix, has_bonus: bool) -> Spread:
    """Return every outcome of verifying drafts of one token each by the ordinary rejection rule."""
    outcomes: Spread = {}
    weight, at = Fraction(1), prefix
    for token in chunk:
        for other in range(VOCABULARY):  # rejected: from what is left of the target's distribution
            if other != token:
                outcomes[(*at[len(prefix) :], other)] = weight * chance(at, other)
        weight *= chance(at, token)
        at = (*at, token)
    if not has_bonus:  # pruning ended the step with the chunk
        return outcomes | {chunk: weight}
    return outcomes | {(*chunk, bonus): weight * chance(at, bonus) for bonus in range(VOCABULARY)}


def emitted(prefix: Prefix, chunk: Prefix, is_naive: bool = False) -> Spread:
    """Return the distribution of answers under drafting ahead; naive: the guess is emitted, not the bonus sampled."""
    if len(prefix) >= ANSWER:
        return {prefix[:ANSWER]: Fraction(1)}
    total: Spread = {}
    frontiers = Frontiers()
    for has_bonus in (True, False) if chunk else (True,):
        for sampled, weight in verified(prefix, chunk, has_bonus).items():
            ahead = drafted(prefix + chunk, 1 + LENGTH)
            if is_naive and sampled[: len(chunk)] == chunk:
                sampled = (*chunk, ahead[0])
            frontiers.open("a", chunk)
            frontiers.fill("a", Drafted(ahead))
            found = frontiers.take("a", sampled, LENGTH)
            now = prefix + sampled
            following = drafted(now, LENGTH) if found is None else found.tokens
            share = weight / 2 if chunk else weight  # pruned or not, a coin
            for answer, each in emitted(now, following, is_naive).items():
                total[answer] = total.get(answer, Fraction(0)) + share * each
    assert frontiers.outcomes.hits > 0
    return total


def targets() -> Spread:
    """Return the target's own distribution of answers."""
    return {
        answer: prod((chance(answer[:place], token) for place, token in enumerate(answer)), start=Fraction(1))
        for answer in product(range(VOCABULARY), repeat=ANSWER)
    }


def test_answers_keep_the_targets_distribution_exactly_and_an_untested_guess_does_not() -> None:
    first = drafted((), LENGTH)
    assert emitted((), first) == targets()
    assert emitted((), first, is_naive=True) != targets()

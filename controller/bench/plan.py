"""What a benchmark is to measure, in which order, and when a load point is done. Pure.

Called by controller/bench/bench.py, which builds the plan from flags, and by controller/bench/course.py, which
follows it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...engine_adapter.arrays import Floats
from ..errors import UsageError
from .ratio import OURS, Ratio
from .workload import OPEN_LENGTHS, Mix, Replay, joined

NONE: Final = "none"
TABLE: Final = "table"
NGRAM: Final = "ngram"
NGRAM_LONG: Final = "ngram:8"
SUFFIX: Final = "suffix"
SUFFIX_OWN: Final = "suffix:own"  # matches a request's own text alone: the benchmark's prompts come back
SUFFIXES: Final = (SUFFIX, SUFFIX_OWN)
MATCHERS: Final = (NGRAM, NGRAM_LONG, *SUFFIXES)  # drafts are copied from text, no model makes them
PAPERS: Final = ("adaspec", "smartspec", "gplcb")
# By the objectives of requests, and FASER's rule without a look at them.
BY_OBJECTIVE: Final = ("price:even", "adaserve", "urgent:3", "urgent:4")
FIXED_RULES: Final = ("hybrid:4", "arctic:4")  # which mix sources and learn nothing
# Arms with FASER's plugin and a sidecar of their own under another policy than FASER's.
POLICIES: Final = (
    *PAPERS, "goodput", "ema", "bandit", "price:history", "price:drafter", *BY_OBJECTIVE, *FIXED_RULES,
    "learned",
)  # fmt: skip
# FASER with mechanisms that it leaves off by default; no rivals, so the envelope does not know them.
VARIANTS: Final = ("faser+pruning", "faser+overlap", "faser+both")
MAX_LENGTH: Final = 8
LENGTHS: Final = tuple(f"k{length}" for length in range(1, MAX_LENGTH + 1))
ARMS: Final = (NONE, *LENGTHS, TABLE, *MATCHERS, *POLICIES, *VARIANTS, OURS)
QUICK_LOADS: Final = (1, 8, 32)
QUICK_RIVALS: Final = (NONE, "k1", "k3", TABLE)
FULL_LOADS: Final = (1, 2, 4, 8, 16, 32, 64)
FULL_RIVALS: Final = (
    NONE, "k1", "k2", "k3", "k4", "k6", "k8", TABLE, *MATCHERS, *PAPERS, *FIXED_RULES,
)  # fmt: skip
MAX_LOAD: Final = 64
MAX_TEMPERATURE: Final = 2.0  # as vLLM's clients are held to
NEAR: Final = 0.92  # of the best rival's rate: what may still turn out the best
REPEATS: Final = 2  # rounds at most that replace disturbed ones, at each load point


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure. A load point is a number of clients or a replayed trace, with a mix of prompts."""

    loads: tuple[int, ...]
    replays: tuple[Replay, ...]
    mixes: tuple[Mix, ...]
    rivals: tuple[str, ...]
    pairs: int
    table_lengths: tuple[int, ...]  # what the sweep for the table tries, 0 for no speculation
    sweep_rounds: int = 2
    minutes: float = 0.0  # for each load point, to sharpen its ratio after the first rounds
    turn_s: float = 1.5
    learn_s: float = 0.0  # served once at a new load, unmeasured, by arms that learn it
    slice_s: float = 1.5  # of a turn, about: the arms go round within it
    max_tokens: int = 96
    max_prompt_tokens: int = 300
    least_tokens: int = 192  # of a turn: fewer depend too much on where in a text it begins and ends
    least_per_client: int = 16  # tokens of a turn: fewer depend too much on whose prompt falls into it
    repeat_s: float = math.inf  # since the run's start: later no round is repeated
    seed: int = 0
    held: int = 0  # prompts whose answers are recorded first, and every arm held to them; 0: each writes its own
    starts: int = 1  # of all servers, at most: intervals are over them if there are several
    temperature: float = 0.0  # of sampling; 0 is greedy

    def __post_init__(self) -> None:
        if not self.loads and not self.replays:
            raise UsageError("nothing to measure", "--loads or --trace")
        if any(not 1 <= load <= MAX_LOAD for load in self.loads):
            raise UsageError(f"--loads {','.join(map(str, self.loads))}", f"numbers from 1 to {MAX_LOAD}")
        if self.pairs < 1:
            raise UsageError(f"--pairs {self.pairs}", "1 or more")
        if self.held < 0:
            raise UsageError(f"--held {self.held}", "0 or more")
        if not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            raise UsageError(f"--temperature {self.temperature:g}", f"0 to {MAX_TEMPERATURE:g}")
        if self.starts < 1:
            raise UsageError(f"--starts {self.starts}", "1 or more")
        if self.starts > 1 and self.minutes:
            raise UsageError(f"--minutes {self.minutes:g} beside --starts", "one of them: both sharpen ratios")
        if self.replays and NONE not in self.rivals:
            raise UsageError("--trace without the rival none", "it, for goodput is told against its unloaded latency")

    @property
    def arms(self) -> tuple[str, ...]:
        """Return the rivals and ourselves."""
        return (*self.rivals, OURS)

    @property
    def points(self) -> dict[int | str, int | Replay]:
        """Return the load points by their names in the results."""
        return {load: load for load in self.loads} | {each.name: each for each in self.replays}

    @property
    def sweep_mix(self) -> Mix:
        """Return the prompts for which the table is tuned: an operator has one for all that is asked."""
        return joined(self.mixes)

    @property
    def longest_answer(self) -> int:
        """Return the tokens of the longest answer that is asked for."""
        return max(self.max_tokens, OPEN_LENGTHS.max_output_tokens or 0) if self.replays else self.max_tokens

    @property
    def sweep_loads(self) -> tuple[int, ...]:
        """Return the loads at which the table is found; without a closed loop some that replays pass through."""
        return self.loads or QUICK_LOADS


def parse_loads(text: str) -> tuple[int, ...]:
    """Return numbers of clients, ascending."""
    try:
        return tuple(sorted({int(part) for part in text.split(",") if part.strip()}))
    except ValueError:
        raise UsageError(f"--loads {text}", "numbers with commas between them") from None


def parse_rivals(text: str) -> tuple[str, ...]:
    """Return rivals in the table's order; `k=3` is k3."""
    named = {part.strip().replace("=", "") for part in text.split(",") if part.strip()}
    rivals = tuple(arm for arm in ARMS if arm in named and arm != OURS)
    if unknown := sorted(named - set(rivals)):
        raise UsageError(f"--rivals {','.join(unknown)}", f"some of {','.join(arm for arm in ARMS if arm != OURS)}")
    if not rivals:
        raise UsageError("--rivals without a rival", f"some of {','.join(arm for arm in ARMS if arm != OURS)}")
    return rivals


def length_of(arm: str) -> int | None:
    """Return an arm's fixed length, None if it has none."""
    if arm == NONE:
        return 0
    return int(arm[1:]) if arm in LENGTHS else None


def arm_of(length: int) -> str:
    """Return the arm that drafts so many tokens."""
    return f"k{length}" if length else NONE


def turn_order(arms: Sequence[str], round_: int) -> tuple[str, ...]:
    """Return the arms of a round, A B C; the next one begins with another, so that nobody is always first."""
    first = round_ % len(arms)
    return (*arms[first:], *arms[:first])


def groups(arms: Sequence[str], reference: str, capacity: int) -> list[tuple[str, ...]]:
    """Split arms into groups that fit into memory at once, the reference in each: ratios to it meet across groups."""
    others = [arm for arm in arms if arm != reference]
    if capacity < 2 and others:
        raise UsageError(f"memory for {capacity} servers", "for 2 at least", "stop other work")
    count = -(-len(others) // (capacity - 1)) if others else 1
    size = -(-len(others) // count)
    return [(*others[first : first + size], reference) for first in range(0, max(len(others), 1), max(size, 1))]


def is_rival(arm: str) -> bool:
    """Return whether FASER is compared with an arm: neither itself nor one of its variants is."""
    return arm != OURS and arm not in VARIANTS


def contenders(rates: Mapping[str, Floats], arms: Sequence[str]) -> tuple[str, ...]:
    """Return ourselves, no speculation and the rivals near the best: those still measured when a ratio is blunt."""
    rivals = [arm for arm in arms if is_rival(arm) and arm in rates]
    if OURS not in rates or not rivals:
        return tuple(arms)
    level = {}
    for arm in rivals:
        logs = np.log(rates[arm]) - np.log(rates[OURS])
        level[arm] = float(np.nanmean(logs)) if (~np.isnan(logs)).any() else -np.inf
    least = max(level.values()) + float(np.log(NEAR))
    return tuple(arm for arm in arms if arm == NONE or not is_rival(arm) or level.get(arm, -np.inf) >= least)


def learns(arm: str) -> bool:
    """Return whether an arm finds out what pays at a load while it serves."""
    return arm == OURS or arm in VARIANTS or (arm in POLICIES and arm not in FIXED_RULES)


@dataclass(slots=True)
class Progress:
    """How far one group at one load point is."""

    pairs: int
    minutes: float
    repeats: int = REPEATS
    quiet: int = 0  # rounds without a disturbed turn
    disturbed: int = 0

    def add(self, is_disturbed: bool) -> None:
        """Count a round."""
        self.disturbed += is_disturbed
        self.quiet += not is_disturbed

    def is_complete(self) -> bool:
        """Return whether all rounds are there: quiet ones, or as many as are ever repeated."""
        return self.quiet >= self.pairs or self.quiet + self.disturbed >= self.pairs + self.repeats

    def wants_more(self, ratio: Ratio, spent_s: float) -> bool:
        """Return whether another round is to be measured."""
        if not self.is_complete():
            return True
        return spent_s < 60.0 * self.minutes and not ratio.is_sharp()

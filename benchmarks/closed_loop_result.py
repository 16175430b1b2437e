"""What closed_loop.py measured: its file, and ratios with intervals over its rounds or starts.

Called by closed_loop_run.py, which adds turns, and by the reports made from the file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from faser.controller.bench_machine import Machine
from faser.controller.bench_plan import ARMS
from faser.controller.bench_ratio import OURS, Envelope, Floats, Ratio, cleanest, paired_ratio
from faser.controller.bench_table import Table as BatchLengths
from faser.controller.whole_file import replacing

RESULTS: Final = Path(__file__).resolve().parent / "results" / "closed_loop.json"

Ints = npt.NDArray[np.int64]


class Settings(msgspec.Struct, frozen=True):
    """What must be the same for turns to be compared."""

    slice_s: float
    answers: int  # that were recorded, and are given over and over
    max_tokens: int
    max_prompt_tokens: int
    threads: int
    k_max: int
    policy: str
    target: str
    drafter_sha256: str
    core: int | None = None  # on which every engine's only thread stays; None: wherever the system puts it
    has_huge_pages: bool = False  # asked of every engine's malloc


class Turn(msgspec.Struct, frozen=True):
    """One arm's slices in a round of one load. Shares are of one core."""

    round: int
    load: int
    arm: str
    tokens_per_s: float
    seconds: float
    slices: int
    steps: int
    tokens: int
    requests: int  # begun
    draft_tokens: int  # vLLM's counters
    accepted_tokens: int
    engine_cpu: float
    own_cpu: float  # with the sidecar, and the steps that are not measured
    other_cpu: float
    steal_share: float  # of all cores' time
    is_disturbed: bool
    at: str
    prompt_tokens: int = 0  # read
    start: int = 0  # which start of the engines
    prompt_steps: int = 0  # which ended the reading of a prompt
    prompt_steps_s: float = 0.0
    plain_firsts: int = 0  # first steps of slices that ended no prompt
    plain_firsts_s: float = 0.0


class Results(msgspec.Struct):
    """The whole file; `commits` are those the code had when turns were added."""

    machine: Machine
    versions: dict[str, str]
    commits: list[str]
    settings: Settings
    turns: list[Turn] = []
    table: BatchLengths = ()  # vLLM's lengths by batch size, of the arm `table`

    def loads(self) -> list[int]:
        """Return the loads measured, ascending."""
        return sorted({turn.load for turn in self.turns})

    def arms(self) -> list[str]:
        """Return the arms measured, in the table's order."""
        return sorted({turn.arm for turn in self.turns}, key=ARMS.index)

    def starts(self, load: int | None = None) -> list[int]:
        """Return the starts of the engines in which there were turns, of a load if one is named, ascending."""
        return sorted({turn.start for turn in self.turns if load in (None, turn.load)})

    def start_of(self, load: int) -> Ints:
        """Return the start that each round of a load was in, (rounds,)."""
        starts = {turn.round: turn.start for turn in self.turns if turn.load == load}
        return np.array([starts.get(round_, 0) for round_ in range(1 + max(starts, default=-1))], np.int64)

    def rates(self, load: int, is_clean: bool = False, is_even: bool = False) -> dict[str, Floats]:
        """Return tokens/s by arm, (rounds,) each; NaN where an arm was not measured or, if asked for, disturbed.

        :param is_even: as if all arms had read as many prompt tokens in a round as they did on average
        """
        turns = [turn for turn in self.turns if turn.load == load]
        count = 1 + max((turn.round for turn in turns), default=-1)
        rates = {arm: np.full(count, np.nan) for arm in self.arms()}
        surplus_s = surplus(turns) if is_even else np.zeros(len(turns))
        for turn, more_s in zip(turns, surplus_s, strict=True):
            is_left_out = is_clean and turn.is_disturbed
            rates[turn.arm][turn.round] = np.nan if is_left_out else turn.tokens / (turn.seconds - more_s)
        return rates


def surplus(turns: Sequence[Turn]) -> Floats:
    """Return the seconds that each turn of one load took for prompts beyond those of its round's average arm.

    Which prompts fall on which side of a round's end depends on whose clients happen to be ahead; over a load every arm
    reads the same. The time of a prompt token is the slope of a regression with an effect of every arm and round.
    """
    prompts = np.array([turn.prompt_tokens for turn in turns], np.float64)
    places = [np.unique([getattr(turn, name) for turn in turns], return_inverse=True)[1] for name in ("arm", "round")]
    arms, rounds = (np.eye(place.max(initial=0) + 1)[place] for place in places)
    if len(turns) <= arms.shape[1] + rounds.shape[1]:
        return np.zeros(len(turns))
    seconds = np.array([turn.seconds for turn in turns])
    slope_s = float(np.linalg.lstsq(np.column_stack([prompts, arms, rounds]), seconds)[0][0])
    means = (rounds.T @ prompts) / rounds.sum(axis=0)
    return max(slope_s, 0.0) * (prompts - means[places[1]])


def read_results(path: Path) -> Results:
    """Read the file; msgspec's errors name the field."""
    return msgspec.json.decode(path.read_bytes(), type=Results)


def write_results(results: msgspec.Struct, path: Path) -> None:
    """Replace the file at once: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as place:
        place.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def by_start(rates: dict[str, Floats], starts: Ints) -> dict[str, Floats]:
    """Return a rate for each start of the engines, in units of FASER's own, geometric means over its rounds.

    What differs between two processes of one kind stays for as long as they live, and rounds of one start would not
    tell of it; `scatter_at` says how much that is. With a single start the rounds are all there is.
    """
    places = np.unique(starts)
    if len(places) < 2 or OURS not in rates:
        return rates
    logs = {arm: np.log(rate) - np.log(rates[OURS]) for arm, rate in rates.items()}
    return {arm: np.exp([_mean(log[starts == place]) for place in places]) for arm, log in logs.items()}


def _mean(values: Floats) -> float:
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else math.nan


def _compared(results: Results, load: int, is_clean: bool) -> dict[str, Floats]:
    return by_start(results.rates(load, is_clean, is_even=True), results.start_of(load))


def envelope_at(results: Results, load: int) -> Envelope:
    """Return the envelope ratio at a load, from undisturbed turns if there are enough of them."""
    return cleanest(_compared(results, load, is_clean=True), _compared(results, load, is_clean=False))


def over_none(results: Results, load: int) -> Ratio:
    """Return FASER over no speculation at a load, from the same turns as the envelope."""
    rates = _compared(results, load, is_clean=not envelope_at(results, load).is_disturbed)
    return paired_ratio(np.log(rates[OURS]) - np.log(rates["none"]))


def scatter_at(results: Results, load: int) -> tuple[float, float] | None:
    """Return how far starts' ratios of FASER to no speculation scatter, and how far by what happens within them.

    Standard deviations of the ratios' logarithms. The second is that of rounds within starts, over the root of their
    number, if they were independent: what the first has more is what differs between processes. None with fewer than
    two starts of two rounds.
    """
    rates, starts = results.rates(load, is_clean=True, is_even=True), results.start_of(load)
    if not {OURS, "none"} <= set(rates):
        return None
    logs = np.log(rates[OURS]) - np.log(rates["none"])
    own = [logs[(starts == place) & ~np.isnan(logs)] for place in np.unique(starts)]
    rounds = [found for found in own if len(found) > 1]
    if len(rounds) < 2:
        return None
    within = math.sqrt(float(np.mean([found.var(ddof=1) / len(found) for found in rounds])))
    return float(np.std([found.mean() for found in rounds], ddof=1)), within


def mean_length(results: Results, load: int, arm: str = OURS) -> float:
    """Return the draft tokens verified per token that no draft gave, i.e. per request and step."""
    turns = [turn for turn in results.turns if turn.load == load and turn.arm == arm]
    own = sum(turn.tokens - turn.accepted_tokens for turn in turns)
    return sum(turn.draft_tokens for turn in turns) / own if own > 0 else math.nan

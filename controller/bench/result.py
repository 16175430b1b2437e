"""The results of a benchmark: their file, and the points, table rows and JSON line made from it. Pure but for the file.

Called by controller/bench/course.py and controller/bench/view.py. The file alone is enough to make every figure again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from ...engine_adapter.arrays import Floats, Ints
from ..engine.machine import Machine
from ..quantiles import Quantiles
from ..whole_file import replacing
from .best_table import described
from .plan import ARMS, NONE, VARIANTS, is_rival, length_of
from .ratio import OURS, Envelope, by_start, cleanest, paired_ratio, wider_interval

FORMAT: Final = 1
SWEEP: Final = "sweep"
MAIN: Final = "main"
COMPARED: Final = (  # settings that must be the same where turns of two runs stand in one file
    "target", "drafter_sha256", "policy", "k_max", "threads", "max_tokens", "max_prompt_tokens", "arguments", "held",
    "has_huge_pages", "temperature",
)  # fmt: skip
NAMES: Final = {NONE: "no speculation", "table": "best table", OURS: "FASER"} | {
    arm: arm.replace("faser+", "FASER + ") for arm in VARIANTS
}  # fmt: skip


class BenchSettings(msgspec.Struct, frozen=True):
    """What must be the same for turns to be compared."""

    target: str
    drafter_sha256: str
    policy: str
    k_max: int
    threads: int
    turn_s: float
    max_tokens: int
    max_prompt_tokens: int
    seed: int
    pairs: int
    arguments: tuple[str, ...]
    slice_s: float | None = None  # None: a turn at a time, as before there were slices
    held: int = 0  # prompts whose answers were recorded, and every arm held to them
    has_huge_pages: bool = False  # asked of every server's malloc
    temperature: float = 0.0  # of sampling
    learn_s: float = 0.0  # served unmeasured at a load that is new to an arm that learns


class Turn(msgspec.Struct, frozen=True):
    """One arm at one load point once: some seconds of a closed loop, or one whole replay of a trace."""

    phase: str  # sweep: to find the table; main
    load: int | str  # clients, or the name of a trace
    kinds: str
    round: int
    arm: str
    rate: float  # what is compared: tokens/s, in replays goodput in tokens/s
    tokens_per_s: float
    seconds: float
    tokens: int
    requests: int  # finished
    failed: int
    draft_tokens: int  # vLLM's counters
    accepted_tokens: int
    cpu_s: float  # of server and sidecar
    other_cpu: float  # cores
    steal_share: float
    load_average: float
    disturbed: str  # why the turn does not count as quiet; empty if it does
    at: str
    mean_tpot_ms: float | None = None  # of replays
    good_share: float | None = None  # of a replay's requests, within the objective
    slices: int = 1  # in which it was served, in turn with the other arms
    unverified_tokens: int = 0  # drawn, and not handed to verification
    start: int = 0  # which one of the servers
    prompt_tokens: int = 0  # read, in a closed loop
    compute_s: float | None = None  # CPU time of the threads that compute

    @property
    def tokens_per_compute_s(self) -> float | None:
        """Return tokens per second of CPU time that computing took: what other work on the machine hardly touches."""
        return self.tokens / self.compute_s if self.compute_s else None


class Spans(msgspec.Struct, frozen=True):
    """Quantiles in milliseconds; None where nothing was measured."""

    p50: float | None
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spans:
        """Return the quantiles of values."""
        found = Quantiles.of(values)
        return cls(*(_finite(value, 3) for value in (found.p50, found.p90, found.p99)))


class Latency(msgspec.Struct, frozen=True):
    """An arm's latencies at a load point, over all its rounds."""

    load: int | str
    kinds: str
    arm: str
    requests: int
    ttft_ms: Spans
    tpot_ms: Spans
    e2e_ms: Spans


class Results(msgspec.Struct):
    """The whole file."""

    machine: Machine
    versions: dict[str, str]
    commit: str
    settings: BenchSettings
    format: int = FORMAT
    note: str = ""
    table: tuple[tuple[int, int, int], ...] = ()  # the best one, as vLLM takes it
    failed: dict[str, str] = {}  # rivals that did not start or went away, and why
    objectives: dict[str, tuple[float, float]] = {}  # by mix: TTFT and TPOT in ms
    turns: list[Turn] = []
    latencies: list[Latency] = []
    wall_s: float = 0.0

    def unlike(self, other: Results) -> str:
        """Return what keeps the turns of two runs from being compared, as seen here; empty if nothing does."""
        was, now = (
            {name: getattr(each.settings, name) for name in COMPARED}
            | {"machine": each.machine.name, "versions": each.versions}
            for each in (self, other)
        )
        return next((f"{name} is {was[name]}, now {now[name]}" for name in was if was[name] != now[name]), "")

    def continued(self, now: Results, rivals: Sequence[str]) -> Results:
        """Return the run to be gone on with; of its rivals that failed, those asked for again may start now."""
        commits = dict.fromkeys([*self.commit.split(", "), now.commit])
        failed = {arm: reason for arm, reason in self.failed.items() if arm not in (*rivals, OURS)}
        notes = dict.fromkeys(note for note in (self.note, now.note) if note)
        return msgspec.structs.replace(self, commit=", ".join(commits), note="; ".join(notes), failed=failed)

    def load_points(self) -> list[tuple[int | str, str]]:
        """Return the load points measured: loads ascending, then traces, each with its mixes."""
        found = dict.fromkeys((turn.load, turn.kinds) for turn in self.turns if turn.phase == MAIN)
        return sorted(found, key=lambda key: (isinstance(key[0], str), key[0] if isinstance(key[0], int) else 0))

    def arms(self, phase: str = MAIN) -> list[str]:
        """Return the arms measured, in the table's order."""
        return sorted({turn.arm for turn in self.turns if turn.phase == phase}, key=ARMS.index)

    def turns_at(self, load: int | str, kinds: str, phase: str = MAIN) -> list[Turn]:
        """Return the turns of one load point."""
        return [turn for turn in self.turns if (turn.load, turn.kinds, turn.phase) == (load, kinds, phase)]

    def rates(
        self,
        load: int | str,
        kinds: str,
        phase: str = MAIN,
        is_clean: bool = False,
        what: str = "rate",
        is_even: bool = False,
    ) -> dict[str, Floats]:
        """Return what is compared by arm, (rounds,) each; NaN where an arm was not measured.

        :param is_clean: leave out every round in which a turn was disturbed: it was repeated whole
        :param is_even: as if all arms had read as many prompt tokens in a round as they did on average
        """
        turns = self.turns_at(load, kinds, phase)
        # Closed up: what is chosen on every other round must not depend on which rounds were disturbed.
        place = {round_: at for at, round_ in enumerate(_rounds(turns, is_clean))}
        rates = {arm: np.full(len(place), np.nan) for arm in ARMS if any(turn.arm == arm for turn in turns)}
        surplus_s = prompt_surplus_s(turns) if is_even else np.zeros(len(turns))
        for turn, more_s in zip(turns, surplus_s, strict=True):
            value = getattr(turn, what)
            if turn.round in place and value is not None and value > 0:
                rates[turn.arm][place[turn.round]] = value * turn.seconds / (turn.seconds - more_s)
        return rates

    def starts(self, load: int | str, kinds: str, is_clean: bool = False) -> Ints:
        """Return the start of the servers that each round of `rates` was in, (rounds,)."""
        turns = self.turns_at(load, kinds)
        start_of = {turn.round: turn.start for turn in turns}
        return np.array([start_of[round_] for round_ in _rounds(turns, is_clean)], np.int64)

    def compared(self, load: int | str, kinds: str, is_clean: bool = False, what: str = "rate") -> dict[str, Floats]:
        """Return what ratios are taken of by arm: even `rates`, or one value a start if servers were started anew."""
        rates = self.rates(load, kinds, MAIN, is_clean, what, is_even=isinstance(load, int))
        return by_start(rates, self.starts(load, kinds, is_clean))


def _rounds(turns: Sequence[Turn], is_clean: bool) -> list[int]:
    dirty = {turn.round for turn in turns if turn.disturbed} if is_clean else set()
    return sorted({turn.round for turn in turns} - dirty)


def prompt_surplus_s(turns: Sequence[Turn]) -> Floats:
    """Return the seconds that each turn of one load took for prompts beyond those of its round's average arm.

    Which prompts fall on which side of a round's end depends on whose clients happen to be ahead; over a load every arm
    reads the same. The time of a prompt token is the slope of a regression with an effect of every arm and round.
    """
    prompts = np.array([turn.prompt_tokens for turn in turns], np.float64)
    arms, rounds = (
        np.unique([getattr(turn, name) for turn in turns], return_inverse=True)[1] for name in ("arm", "round")
    )
    effects = np.column_stack([np.eye(place.max(initial=0) + 1)[place] for place in (arms, rounds)])
    if len(turns) <= effects.shape[1] or not prompts.any():
        return np.zeros(len(turns))
    seconds = np.array([turn.seconds for turn in turns])
    slope_s = float(np.linalg.lstsq(np.column_stack([prompts, effects]), seconds)[0][0])
    means = np.bincount(rounds, prompts) / np.bincount(rounds)
    return np.asarray(max(slope_s, 0.0) * (prompts - means[rounds]))


def envelope_at(results: Results, load: int | str, kinds: str, what: str = "rate") -> Envelope:
    """Return the envelope ratio at a load point."""
    clean, whole = (results.compared(load, kinds, is_clean, what) for is_clean in (True, False))
    clean, whole = ({arm: rates[arm] for arm in rates if arm == OURS or is_rival(arm)} for rates in (clean, whole))
    if OURS not in whole or len(whole) < 2:
        return Envelope(paired_ratio(np.array([])), ())
    return cleanest(clean, whole, wider_interval)


class Point(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the envelope table, and one entry of the JSON line."""

    load: int | str
    rivals: dict[str, float]
    faser: float | None
    envelope_ratio: float | None
    ci: tuple[float | None, float | None]
    kinds: str
    metric: str
    best_rival: list[str]
    pairs: int
    rounds: int
    disturbed_rounds: int
    verdict: str
    uses_disturbed: bool = False
    tpot_ratio: float | None = None  # the best rival's mean TPOT over FASER's, in replays
    starts: int = 1  # of the servers; with several `pairs` are starts, otherwise rounds
    compute_ms_per_token: dict[str, float] = {}  # by arm, CPU time of the threads that compute


def points(results: Results) -> list[Point]:
    """Return every load point with its envelope ratio."""
    return [_point(results, load, kinds) for load, kinds in results.load_points()]


def _point(results: Results, load: int | str, kinds: str) -> Point:
    best = envelope_at(results, load, kinds)
    rates = results.rates(load, kinds, is_clean=not best.is_disturbed)
    medians = {arm: _median(rate) for arm, rate in rates.items()}
    turns = results.turns_at(load, kinds)
    ratio = best.ratio
    verdict = "met" if ratio.meets_envelope() else "missed" if ratio.is_sharp() else "open"
    return Point(
        load=load,
        rivals={arm: rate for arm, rate in medians.items() if arm != OURS and rate is not None},
        faser=medians.get(OURS),
        envelope_ratio=_finite(ratio.value, 4),
        ci=(_finite(ratio.low, 4), _finite(ratio.high, 4)),
        kinds=kinds,
        metric="goodput" if isinstance(load, str) else "tokens_per_s",
        best_rival=list(dict.fromkeys(best.rivals)),
        pairs=ratio.pairs,
        rounds=len({turn.round for turn in turns}),
        disturbed_rounds=len({turn.round for turn in turns if turn.disturbed}),
        verdict=verdict,
        uses_disturbed=best.is_disturbed,
        tpot_ratio=_tpot_ratio(results, load, kinds, best.rivals) if isinstance(load, str) else None,
        starts=len({turn.start for turn in turns}),
        compute_ms_per_token=compute_ms_by_arm(turns),
    )


def compute_ms_by_arm(turns: Sequence[Turn]) -> dict[str, float]:
    """Return the CPU time per token of the threads that compute, of each arm that was looked at."""
    costs = {arm: _compute_ms([turn for turn in turns if turn.arm == arm]) for arm in {turn.arm for turn in turns}}
    return {arm: round(costs[arm] or 0.0, 4) for arm in ARMS if costs.get(arm) is not None}


def _tpot_ratio(results: Results, load: int | str, kinds: str, rivals: Sequence[str]) -> float | None:
    times = results.compared(load, kinds, what="mean_tpot_ms")
    if OURS not in times or not (logs := [np.log(times[arm]) - np.log(times[OURS]) for arm in dict.fromkeys(rivals)]):
        return None
    return _finite(paired_ratio(np.concatenate(logs)).value, 4)


def summary(results: Results) -> dict[str, Any]:
    """Return the JSON object that `faser bench --json` ends with; it holds no NaN."""
    found = points(results)
    ratios = [point.envelope_ratio for point in found if point.envelope_ratio is not None]
    return {
        "points": msgspec.to_builtins(found),
        "envelope_ratio_min": min(ratios, default=None),
        "envelope_ratio_mean": round(float(np.mean(ratios)), 4) if ratios else None,
        "table": described(results.table),
        "failed": results.failed,
        "wall_s": round(results.wall_s, 1),
        "machine": msgspec.to_builtins(results.machine),
        "versions": results.versions,
        "commit": results.commit,
    }


class Cost(msgspec.Struct, frozen=True):
    """What an arm's tokens cost at a load point, over all its rounds."""

    acceptance_rate: float | None  # of the draft tokens that were verified
    draft_length: float | None  # draft tokens verified per request and step
    draft_waste: float | None  # draft tokens rejected, or drawn and never verified, per token emitted
    cpu_ms_per_token: float | None
    compute_ms_per_token: float | None


def cost_of(turns: Sequence[Turn]) -> Cost:
    """Return the cost of some turns of one arm."""
    tokens, drafts = sum(turn.tokens for turn in turns), sum(turn.draft_tokens for turn in turns)
    accepted = sum(turn.accepted_tokens for turn in turns)
    unverified = sum(turn.unverified_tokens for turn in turns)
    own = tokens - accepted  # tokens that no draft gave: one per request and step
    return Cost(
        accepted / drafts if drafts else None,
        drafts / own if own > 0 else None,
        (drafts - accepted + unverified) / tokens if tokens else None,
        1e3 * sum(turn.cpu_s for turn in turns) / tokens if tokens else None,
        _compute_ms(turns),
    )


def _compute_ms(turns: Sequence[Turn]) -> float | None:
    looked = [(turn.tokens, turn.compute_s) for turn in turns if turn.compute_s and turn.tokens]
    tokens, seconds = (sum(each) for each in zip(*looked, strict=True)) if looked else (0, 0.0)
    return 1e3 * seconds / tokens if tokens else None


def name_of(arm: str) -> str:
    """Return an arm's name for people."""
    return NAMES.get(arm, f"k = {arm[1:]}" if arm[1:].isdigit() else arm)


def levels_at(results: Results, load: int, kinds: str) -> dict[int, float]:
    """Return the sweep's level of each length at a load: mean log ratio to no speculation in the same rounds."""
    rates = results.rates(load, kinds, SWEEP, is_clean=True)
    if not len(next(iter(rates.values()), ())):
        rates = results.rates(load, kinds, SWEEP)
    base = np.log(rates[NONE]) if NONE in rates else 0.0  # it was lost: the others are compared as they are
    levels = {}
    for arm, rate in rates.items():
        logs = np.log(rate) - base
        if (length := length_of(arm)) is not None and (~np.isnan(logs)).any():
            levels[length] = float(np.nanmean(logs))
    return levels


def read_results(path: Path) -> Results:
    """Read the file; msgspec's errors name the field."""
    return msgspec.json.decode(path.read_bytes(), type=Results)


def write_results(results: Results, path: Path) -> None:
    """Replace the file at once: a reader never sees half of it."""
    with replacing(path) as place:
        place.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def _median(rate: Floats) -> float | None:
    rate = rate[~np.isnan(rate)]
    return round(float(np.median(rate)), 2) if len(rate) else None


def _finite(value: float, digits: int) -> float | None:
    return round(value, digits) if math.isfinite(value) else None

"""The results of a benchmark with classes: their file, and what every arm came to. Pure but for the file.

Called by controller/bench/classes/course.py, markdown.py and view.py. The file alone is enough to make every figure
again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from ....engine_adapter.arrays import Floats
from ...errors import UsageError
from ...whole_file import replacing
from ..best_table import described
from ..plan import ARMS
from ..ratio import LEAST_PAIRS, OURS, paired_ratio, wider_interval
from ..result import Results, Turn
from .plan import ClassShare

KEPT: Final = 0.9  # of a class's requests in time: its objective is kept
PHASE: Final = "classes"
CLASS_FORMAT: Final = 1
_Z: Final = 1.96  # the normal distribution's 97.5 % quantile


class ClassCount(msgspec.Struct, frozen=True):
    """What one class came to in a turn."""

    finished: int  # whole answers
    in_time: int
    tokens: int  # received while it was measured
    good_tokens: float  # of them, those of answers in time


class ClassTurn(msgspec.Struct, frozen=True):
    """One arm at one load point once, from an idle server to its end."""

    turn: Turn
    classes: dict[str, ClassCount]
    peak_rps: float | None = None  # of a replay
    base_tpot_ms: float | None = None  # its objectives are multiples of this; None: of the file's

    def with_base(self, base_tpot_ms: float | None) -> ClassTurn:
        """Return the turn with a time per token that its objectives were told by, if it does not say so itself."""
        return self if self.base_tpot_ms is not None else msgspec.structs.replace(self, base_tpot_ms=base_tpot_ms)

    @property
    def goodput(self) -> float:
        """Return the tokens per second of answers in time."""
        return sum(each.good_tokens for each in self.classes.values()) / self.turn.seconds


class ClassResults(msgspec.Struct):
    """The whole file."""

    run: Results  # machine, versions, settings, table; its turns are the sweep's
    classes: tuple[ClassShare, ...]
    seconds: float  # of a closed loop's turn
    class_format: int = CLASS_FORMAT
    # Median without speculation, all classes' clients at once; of the newest start, for machines change.
    base_tpot_ms: float | None = None
    class_turns: list[ClassTurn] = []

    def bases_ms(self) -> list[float]:
        """Return the times per token, without speculation, that objectives were told by, in the order of starts."""
        known = (each.base_tpot_ms or self.base_tpot_ms for each in self.class_turns)
        found = list(dict.fromkeys(base for base in known if base is not None))
        return found or ([] if self.base_tpot_ms is None else [self.base_tpot_ms])

    def points(self) -> list[str]:
        """Return the load points in the order in which they were measured, replays by their rates."""
        found = {each.turn.load: each.peak_rps or 0.0 for each in self.class_turns}
        return [str(name) for name in sorted(found, key=lambda name: (found[name], str(name)))]

    def turns_at(self, point: str) -> list[ClassTurn]:
        """Return the turns of a load point."""
        return [each for each in self.class_turns if each.turn.load == point]

    def arms(self, point: str) -> list[str]:
        """Return the arms measured at a load point, in the table's order."""
        return sorted({each.turn.arm for each in self.turns_at(point)}, key=ARMS.index)

    def continued(self, classes: Sequence[ClassShare], seconds: float) -> None:
        """Raise UsageError where other classes could not be compared with these."""
        if self.classes != tuple(classes):
            told = ",".join(f"{each.name}:{each.clients}:{each.pace:g}" for each in self.classes)
            raise UsageError("--resume with other --classes", f"{told}, as in the file")
        if self.seconds != seconds:
            raise UsageError(f"--resume with --class-seconds {seconds:g}", f"{self.seconds:g}, as in the file")


class Figure(msgspec.Struct, frozen=True):
    """A mean over rounds, or over starts if there were several, with its 95 % interval; None where there is none."""

    value: float | None
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, values: Floats, least: float = -math.inf, most: float = math.inf) -> Figure:
        """Return the figure of (n,) values, NaN left out; its interval ends where values do."""
        known = values[~np.isnan(values)]
        if not len(known):
            return cls(None)
        if len(known) < 2:
            return cls(_rounded(known[0]))
        low, high = wider_interval(known)
        return cls(_rounded(known.mean()), _rounded(max(low, least)), _rounded(min(high, most)))


def share_figure(turns: Sequence[ClassTurn], arm: str, name: str) -> Figure:
    """Return a class's share in time; its interval is the hull of that over rounds and Wilson's of all requests.

    Rounds in which nobody or everybody was in time agree with each other, and yet say little with a dozen requests.
    """
    over_rounds = Figure.of(_values(turns, arm, _share_of(name)), 0.0, 1.0)
    counts = [each.classes[name] for each in turns if each.turn.arm == arm]
    finished, in_time = sum(each.finished for each in counts), sum(each.in_time for each in counts)
    if over_rounds.value is None:
        return over_rounds
    known = (*wilson_interval(in_time, finished), over_rounds.low, over_rounds.high)
    ends = [each for each in known if each is not None]
    return Figure(over_rounds.value, _rounded(min(ends)), _rounded(max(ends)))


def wilson_interval(hits: int, trials: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share."""
    share, weight = hits / trials, _Z**2 / trials
    middle = (share + weight / 2) / (1 + weight)
    reach = _Z / (1 + weight) * math.sqrt(share * (1 - share) / trials + weight / (4 * trials))
    return max(middle - reach, 0.0), min(middle + reach, 1.0)


class ArmFigures(msgspec.Struct, frozen=True):
    """What an arm came to at a load point."""

    arm: str
    attainment: dict[str, Figure]  # by class
    is_kept: bool  # by every class, for KEPT of its requests
    tokens_per_s: Figure
    goodput: Figure
    over: Figure  # FASER's goodput over its, paired; a round without goodput has no ratio


class PointFigures(msgspec.Struct, frozen=True):
    """One load point."""

    load: str
    peak_rps: float | None
    arms: list[ArmFigures]
    kept_by: list[str]
    rounds: int
    disturbed_rounds: int
    starts: int
    uses_disturbed: bool


def figures(results: ClassResults) -> list[PointFigures]:
    """Return every load point."""
    return [_point(results, point) for point in results.points()]


def _point(results: ClassResults, point: str) -> PointFigures:
    turns = results.turns_at(point)
    rounds = {each.turn.round for each in turns}
    dirty = {each.turn.round for each in turns if each.turn.disturbed}
    uses_disturbed = bool(dirty) and len(rounds - dirty) < LEAST_PAIRS
    counted = turns if uses_disturbed else [each for each in turns if each.turn.round not in dirty]
    names = [each.name for each in results.classes]
    arms = [_arm(counted, arm, names) for arm in results.arms(point)]
    return PointFigures(
        load=point, peak_rps=turns[0].peak_rps, arms=arms, kept_by=[each.arm for each in arms if each.is_kept],
        rounds=len(rounds), disturbed_rounds=len(dirty), starts=len({each.turn.start for each in turns}),
        uses_disturbed=uses_disturbed,
    )  # fmt: skip


def _arm(turns: Sequence[ClassTurn], arm: str, classes: Sequence[str]) -> ArmFigures:
    attainment = {name: share_figure(turns, arm, name) for name in classes}
    goodput, ours = _values(turns, arm, _goodput), _values(turns, OURS, _goodput)
    return ArmFigures(
        arm=arm, attainment=attainment,
        is_kept=all(each.value is not None and each.value >= KEPT for each in attainment.values()),
        tokens_per_s=Figure.of(_values(turns, arm, _rate), 0.0), goodput=Figure.of(goodput, 0.0),
        over=_over(ours, goodput),
    )  # fmt: skip


def _values(turns: Sequence[ClassTurn], arm: str, what: Callable[[Sequence[ClassTurn]], float]) -> Floats:
    """Return a figure of an arm by round, by start if there are several; NaN where the arm was not measured."""
    is_by_start = len({each.turn.start for each in turns}) > 1
    places = sorted({_place(each, is_by_start) for each in turns})
    own = [each for each in turns if each.turn.arm == arm]
    found = ([each for each in own if _place(each, is_by_start) == place] for place in places)
    return np.array([what(each) if each else math.nan for each in found], np.float64)


def _place(turn: ClassTurn, is_by_start: bool) -> int:
    return turn.turn.start if is_by_start else turn.turn.round


def _share_of(name: str) -> Callable[[Sequence[ClassTurn]], float]:
    def share(turns: Sequence[ClassTurn]) -> float:
        finished = sum(each.classes[name].finished for each in turns)
        return sum(each.classes[name].in_time for each in turns) / finished if finished else math.nan

    return share


def _goodput(turns: Sequence[ClassTurn]) -> float:
    return float(np.mean([each.goodput for each in turns]))


def _rate(turns: Sequence[ClassTurn]) -> float:
    return float(np.mean([each.turn.tokens_per_s for each in turns]))


def _over(ours: Floats, theirs: Floats) -> Figure:
    is_both = (ours > 0) & (theirs > 0)
    ratio = paired_ratio(np.log(ours[is_both]) - np.log(theirs[is_both]), wider_interval)
    return Figure(_rounded(ratio.value), _rounded(ratio.low), _rounded(ratio.high))


def summary(results: ClassResults) -> dict[str, Any]:
    """Return the JSON object that `faser bench --classes --json` ends with; it holds no NaN."""
    run, bases_ms = results.run, results.bases_ms()
    base_ms = _rounded(float(np.mean(bases_ms))) if bases_ms else None
    return {
        "classes": [
            msgspec.to_builtins(each) | {"tpot_ms": None if base_ms is None else _rounded(each.pace * base_ms)}
            for each in results.classes
        ],
        "base_tpot_ms": base_ms,
        "bases_tpot_ms": bases_ms,
        "points": msgspec.to_builtins(figures(results)),
        "table": described(run.table),
        "failed": run.failed,
        "wall_s": round(run.wall_s, 1),
        "machine": msgspec.to_builtins(run.machine),
        "versions": run.versions,
        "commit": run.commit,
    }


def has_classes(path: Path) -> bool:
    """Return whether a file holds results by class; False for what is no results file at all."""
    try:
        return "class_format" in msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return False


def read_class_results(path: Path, option: str) -> ClassResults:
    """Read the file; raise UsageError if it holds no results by class."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ClassResults)
    except OSError as error:
        raise UsageError(f"{option} {path}: {error.strerror}", "the results of an earlier run with --classes") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{option} {path}: {error}", "the results of an earlier run with --classes") from None


def write_class_results(results: ClassResults, path: Path) -> None:
    """Replace the file at once: a reader never sees half of it."""
    with replacing(path) as place:
        place.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def _rounded(value: float) -> float | None:
    return round(float(value), 4) if math.isfinite(value) else None

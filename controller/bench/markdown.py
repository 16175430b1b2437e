"""The results of a benchmark as Markdown: what `faser bench --table FILE` prints, for documents. Pure.

Called by controller/bench/bench.py; `markdown_table` by the scripts in benchmarks/ too. Made from the results file
alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from ...engine_adapter.arrays import Floats
from .best_table import described
from .plan import NONE, TABLE, is_rival
from .ratio import (
    LEAST_LOW,
    LEAST_RATIO,
    OURS,
    WANTED_HALF_WIDTH,
    paired_ratio,
    scatter,
    wider_interval,
)
from .result import MAIN, Point, Results, Turn, cost_of, envelope_at, name_of, points

_COMPUTE: Final = "tokens_per_compute_s"
_COMPUTE_LEGEND: Final = "The same by tokens per second of CPU time of the threads that compute, not by the clock."


def markdown_table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; every row has as many cells as there are names."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows))


def page(results: Results) -> str:
    """Return everything there is to say of a run: conditions, ratios, costs, and a table for each replayed trace."""
    found = points(results)
    closed = [point for point in found if isinstance(point.load, int)]
    parts = [" ".join(_conditions(results))]
    if closed:
        parts += [_ratios(results, closed), " ".join(_legend(results, closed))]
        if looked := [point for point in closed if point.compute_ms_per_token]:
            parts += [_compute_ratios(results, looked), _COMPUTE_LEGEND]
        parts += [_costs(results, closed)]
    parts += [f"{point.load}, {point.kinds}:\n\n{_replay(results, point)}" for point in found if point not in closed]
    return "\n\n".join(parts)


def _conditions(results: Results) -> Iterator[str]:
    machine, settings = results.machine, results.settings
    turns = [turn for turn in results.turns if turn.phase == MAIN]
    disturbed = sum(bool(turn.disturbed) for turn in turns)
    starts = len({turn.start for turn in turns})
    yield f"{settings.target} on {machine.name}, {machine.cores} cores, {settings.threads} of them for a server's"
    yield "threads;"
    yield f"commit {results.commit}; {len(turns)} turns, {disturbed} of them disturbed by other work;"
    yield f"{results.wall_s / 60:.0f} minutes."
    yield f"Policy: {settings.policy}, longest draft {settings.k_max}."
    if settings.temperature:
        yield f"Sampled at temperature {settings.temperature:g}."
    if settings.held:
        yield f"All arms are held to the same {settings.held} recorded answers."
    if starts > 1:
        yield f"All servers were started anew {starts} times."
    if settings.has_huge_pages:
        yield "Their memory is in huge pages."
    if results.table:
        yield f"The best table: {described(results.table)}."
    yield from (f"Left out: {name_of(arm)}: {reason}." for arm, reason in results.failed.items())


def _ratios(results: Results, closed: Sequence[Point]) -> str:
    """Return FASER over every rival at every load, and over the best of them."""
    arms = [arm for arm in results.arms() if is_rival(arm)]
    pairs = "starts" if any(point.starts > 1 for point in closed) else "pairs"
    names = ("requests", *map(name_of, arms), "over the best", "which", pairs, "bar")
    return markdown_table(names, (_ratio_row(results, point, arms) for point in closed))


def _ratio_row(results: Results, point: Point, arms: Sequence[str]) -> tuple[str, ...]:
    cells = _over_rivals(results.compared(point.load, point.kinds, is_clean=not point.uses_disturbed), arms)
    low, high = point.ci
    best = (
        "" if point.envelope_ratio is None or low is None else f"{point.envelope_ratio:.3f} ({low:.3f} to {high:.3f})"
    )
    pairs = f"{point.pairs}{' *' if point.uses_disturbed else ''}"
    return (_load(point), *cells, best, " / ".join(map(name_of, point.best_rival)), pairs, point.verdict)


def _over_rivals(rates: Mapping[str, Floats], arms: Sequence[str]) -> list[str]:
    return [ratio_of(rates[OURS], rates[arm]) if {OURS, arm} <= set(rates) else "" for arm in arms]


def _compute_ratios(results: Results, closed: Sequence[Point]) -> str:
    """Return FASER over every rival at every load, and over the best of them, by CPU time instead of the clock."""
    arms = [arm for arm in results.arms() if is_rival(arm)]
    names = ("requests", *map(name_of, arms), "over the best", "which")
    return markdown_table(names, (_compute_row(results, point, arms) for point in closed))


def _compute_row(results: Results, point: Point, arms: Sequence[str]) -> tuple[str, ...]:
    best = envelope_at(results, point.load, point.kinds, _COMPUTE)
    rates = results.compared(point.load, point.kinds, is_clean=not best.is_disturbed, what=_COMPUTE)
    told = str(best.ratio) if best.ratio.pairs > 1 else ""
    return (_load(point), *_over_rivals(rates, arms), told, " / ".join(map(name_of, dict.fromkeys(best.rivals))))


def _load(point: Point) -> str:
    return str(point.load) if point.kinds == "all" else f"{point.load}, {point.kinds}"


def _legend(results: Results, closed: Sequence[Point]) -> Iterator[str]:
    yield f"Ratios of tokens/s with 95 % intervals. *Bar*: ratio at least {LEAST_RATIO}, lower end at least"
    yield f"{LEAST_LOW}, half-width at most {WANTED_HALF_WIDTH:.0%}; *open*: the interval is still wider."
    if any(point.uses_disturbed for point in closed):
        yield "* uses rounds that other load disturbed."
    if spread := _scatter(results, closed):
        seen, expected = spread
        yield f"Starts' ratios of FASER to no speculation scatter by {seen:.1%}; by that of rounds within a start"
        yield f"{expected:.1%} is to be expected (root mean squares over loads)."


def _scatter(results: Results, closed: Sequence[Point]) -> tuple[float, float] | None:
    """Return how far starts lie apart, and how far by what happens within them: is a server as good as another?"""
    found = []
    for point in closed:
        rates = results.rates(point.load, point.kinds, is_clean=not point.uses_disturbed)
        if {OURS, NONE} <= set(rates):
            starts = results.starts(point.load, point.kinds, is_clean=not point.uses_disturbed)
            found += [each for each in [scatter(np.log(rates[OURS]) - np.log(rates[NONE]), starts)] if each]
    if not found:
        return None
    seen, expected = np.sqrt(np.mean(np.square(found), axis=0))
    return float(seen), float(expected)


def _costs(results: Results, closed: Sequence[Point]) -> str:
    """Return, for each load and arm, drafts, waste and CPU time."""
    names = (
        "requests", "arm", "tokens/s, median", "draft tokens verified", "accepted", "waste", "CPU ms/token",
        "compute ms/token",
    )  # fmt: skip
    rows = []
    for point in closed:
        turns = results.turns_at(point.load, point.kinds)
        for arm in results.arms():
            if own := [turn for turn in turns if turn.arm == arm]:
                rate = point.faser if arm == OURS else point.rivals.get(arm)
                rows.append((_load(point), name_of(arm), "" if rate is None else f"{rate:.1f}", *_cost_cells(own)))
    return markdown_table(names, rows)


def _cost_cells(turns: Sequence[Turn]) -> tuple[str, ...]:
    cost = cost_of(turns)
    figures = (cost.draft_length, cost.acceptance_rate, cost.draft_waste)
    cells = ("" if value is None else f"{value:.2f}" for value in figures)
    spent_ms = (cost.cpu_ms_per_token, cost.compute_ms_per_token)
    return (*cells, *("" if value is None else f"{value:.1f}" for value in spent_ms))


def _replay(results: Results, point: Point) -> str:
    """Return the arms of a replayed trace; a rival's row compares FASER with it alone, so no rival is chosen."""
    trace, kinds = point.load, point.kinds
    turns = results.turns_at(trace, kinds)
    goodput = results.compared(trace, kinds)
    speed = {arm: 1.0 / rate for arm, rate in results.compared(trace, kinds, what="mean_tpot_ms").items()}
    rows = []
    for arm in (arm for arm in results.arms() if arm in goodput):
        own = [turn for turn in turns if turn.arm == arm]
        ratios = [
            "" if arm == OURS or OURS not in each else ratio_of(each[OURS], each[arm]) for each in (goodput, speed)
        ]
        figures = (
            _median([turn.rate for turn in own], ".1f"), _median([turn.good_share for turn in own], ".0%"),
            _median([turn.tokens_per_s for turn in own], ".1f"), _median([turn.mean_tpot_ms for turn in own], ".1f"),
        )  # fmt: skip
        rows.append(
            (f"{name_of(arm)} ({described(results.table)})" if arm == TABLE else name_of(arm), *figures, *ratios)
        )
    names = (
        "arm", "goodput, tokens/s", "in time", "tokens/s", "TPOT, ms", "goodput of FASER over it", "speed per token",
    )  # fmt: skip
    return markdown_table(names, rows)


def ratio_of(ours: Floats, theirs: Floats) -> str:
    """Return ours over theirs, (rounds,) each, NaN where there was none, with its 95 % interval."""
    logs = np.log(ours) - np.log(theirs)
    if np.isnan(logs).all():
        return ""  # its quiet rounds are none of ours
    found = paired_ratio(logs[~np.isnan(logs)], wider_interval)
    return str(found) if found.pairs > 1 else f"{found.value:.3f}"


def _median(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return format(float(np.median(known)), form) if known else ""

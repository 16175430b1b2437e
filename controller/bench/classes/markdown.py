"""The results of a benchmark with classes as Markdown: what `faser bench --table FILE` prints of such a file. Pure.

Called by controller/bench/classes/bench.py. Made from the results file alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..best_table import described
from ..markdown import markdown_table
from ..plan import TABLE
from ..ratio import OURS
from ..result import name_of
from .result import KEPT, ArmFigures, ClassResults, Figure, PointFigures, figures


def class_page(results: ClassResults) -> str:
    """Return everything there is to say of a run: conditions, and a table for each load point."""
    parts = [" ".join(_conditions(results))]
    for point in figures(results):
        parts += [_heading(point), _table(results, point)]
    return "\n\n".join(parts)


def _conditions(results: ClassResults) -> Iterator[str]:
    run, bases_ms = results.run, results.bases_ms()
    disturbed = sum(bool(each.turn.disturbed) for each in results.class_turns)
    yield f"{run.settings.target} on {run.machine.name}, {run.machine.cores} cores, {run.settings.threads} of them for"
    yield f"a server's threads; commit {run.commit}; {len(results.class_turns)} turns, {disturbed} of them disturbed by"
    yield f"other work; {run.wall_s / 60:.0f} minutes. Policy: {run.settings.policy}."
    if bases_ms:
        yield f"Without speculation a token takes {_each(bases_ms, 1.0)} ms with all clients. Objectives, ms a token:"
        yield ", ".join(f"{each.name} {_each(bases_ms, each.pace)} ({each.pace:g})" for each in results.classes) + "."
    yield from (f"Left out: {name_of(arm)}: {reason}." for arm, reason in run.failed.items())


def _each(bases_ms: list[float], pace: float) -> str:
    """Return a multiple of each start's time per token."""
    return "/".join(f"{pace * base_ms:.1f}" for base_ms in bases_ms)


def _heading(point: PointFigures) -> str:
    arms = ", ".join(map(name_of, point.kept_by)) or "nobody"
    over = f"{point.starts} starts" if point.starts > 1 else f"{point.rounds} rounds"
    doubt = "; uses rounds that other load disturbed" if point.uses_disturbed else ""
    return f"{point.load}, {over}{doubt}. Every class in time for {KEPT:.0%} of its requests: {arms}."


def _table(results: ClassResults, point: PointFigures) -> str:
    classes = [each.name for each in results.classes]
    names = ("arm", *(f"{name} in time" for name in classes), "kept", "tokens/s", "goodput", "goodput of FASER over it")
    return markdown_table(names, (_row(results, each, classes) for each in point.arms))


def _row(results: ClassResults, arm: ArmFigures, classes: list[str]) -> tuple[str, ...]:
    name = f"{name_of(arm.arm)} ({described(results.run.table)})" if arm.arm == TABLE else name_of(arm.arm)
    shares = (_told(arm.attainment[each], ".0%") for each in classes)
    over = "" if arm.arm == OURS else _told(arm.over, ".3f")
    return (
        name, *shares, "yes" if arm.is_kept else "no", _told(arm.tokens_per_s, ".1f"), _told(arm.goodput, ".1f"), over,
    )  # fmt: skip


def _told(figure: Figure, form: str) -> str:
    if figure.value is None:
        return ""
    if figure.low is None or figure.high is None:
        return format(figure.value, form)
    return f"{figure.value:{form}} ({figure.low:{form}} to {figure.high:{form}})"

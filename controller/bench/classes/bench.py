"""`faser bench --classes`: who keeps the objectives of every class of requests, on real servers that take turns.

Called by controller/cli/bench.py. As controller/bench/bench.py, with load points of their own; docs/guide/benchmark.md
has the definitions.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.markdown import Markdown

from ...errors import UsageError
from ...link.endpoint import socket_folder
from ..arms import Tell
from ..bench import (
    BenchOptions,
    bed_of,
    fresh_results,
    go_on,
    measure,
    missing_rivals,
    new_places,
    require_no_out,
    require_places,
    require_policies,
    tell_missing,
)
from ..course import Advance
from ..result import Results
from .course import ClassCourse
from .markdown import class_page
from .plan import CLASS_RIVALS, ClassPlan, parse_classes, parse_peaks
from .result import ClassResults, read_class_results, summary
from .view import write_class_picture

_SECONDS, _QUICK_SECONDS = 45.0, 20.0
_ROUNDS, _QUICK_ROUNDS = 4, 3
_DEFAULT_PEAKS: Final = "1"


@dataclass(frozen=True, slots=True)
class ClassOptions:
    """What `faser bench --classes` was asked for; None means the default."""

    bench: BenchOptions
    classes: str
    seconds: float | None = None
    peaks: str | None = None

    def plan(self) -> ClassPlan:
        """Return what is to be measured; raise UsageError for what cannot be."""
        asked, classes = self.bench, parse_classes(self.classes)
        if asked.loads is not None:
            raise UsageError(f"--loads {asked.loads} beside --classes", "one of them: classes bring their own clients")
        if asked.minutes is not None:
            raise UsageError(f"--minutes {asked.minutes:g} beside --classes", "--pairs: every turn has the same length")
        if self.peaks is not None and not asked.traces:
            raise UsageError(f"--peaks {self.peaks} without --trace", "both: they are rates of a replayed trace")
        quick = asked.quick
        plan = asked.plan()
        plan = replace(
            plan,
            loads=() if plan.replays else (sum(each.clients for each in classes),),
            rivals=plan.rivals if quick or asked.rivals is not None else CLASS_RIVALS,
            pairs=asked.pairs if asked.pairs is not None else (_QUICK_ROUNDS if quick else _ROUNDS),
            minutes=0.0,
        )
        seconds = self.seconds if self.seconds is not None else (_QUICK_SECONDS if quick else _SECONDS)
        found = ClassPlan(classes, plan, seconds, parse_peaks(self.peaks or _DEFAULT_PEAKS))
        for each in found.points.values():
            if each is not None:  # a rate that the trace does not have is told before anything starts
                each.requests(plan.mixes[0], plan.seed)
        return found


def require_no_class_flags(seconds: float | None, peaks: str | None) -> None:
    """Raise UsageError for flags that say something of classes, where there are none."""
    for value, option in ((seconds, "--class-seconds"), (peaks, "--peaks")):
        if value is not None:
            raise UsageError(f"{option} {value} without --classes", "both or neither")


def run_class_bench(options: ClassOptions) -> int:
    """Measure, write, print; return 0, or 130 after Ctrl-C. A rival that failed is named, and no failure of ours."""
    plan, asked = options.plan(), options.bench
    require_policies(asked, plan.bench)
    console = Console(stderr=True, highlight=False)
    missing = missing_rivals(asked, plan.bench)
    folder, path = new_places(asked)
    fresh = fresh_results(asked, plan.bench, asked.number_type())
    found = _begun(options, plan, fresh)
    require_places(asked, path)
    tell_missing(missing, found.run, console)
    with socket_folder("bench") as sockets:
        bed = bed_of(asked, plan.bench, found.run.settings, sockets, folder)

        def course(tell: Tell, advance: Advance) -> ClassCourse:
            return ClassCourse(plan.bench, found.run, path, bed, tell, advance, class_plan=plan, found=found)

        code, failure = measure(course, console)
    _show(asked, found, path, console)
    if failure is not None:
        raise failure
    return code


def _begun(options: ClassOptions, plan: ClassPlan, fresh: Results) -> ClassResults:
    """Return the results to add to: new ones, or those of the file to go on with."""
    path = options.bench.resume
    if path is None:
        return ClassResults(fresh, plan.classes, plan.seconds)
    require_no_out(options.bench.out)
    found = read_class_results(path, "--resume")
    found.continued(plan.classes, plan.seconds)
    found.class_turns = [each.with_base(found.base_tpot_ms) for each in found.class_turns]
    found.run = go_on(path, found.run, fresh, plan.bench.rivals)
    return found


def print_class_tables(path: Path) -> None:
    """Print the Markdown tables of a results file."""
    sys.stdout.write(class_page(read_class_results(path, "--table")) + "\n")


def _show(options: BenchOptions, results: ClassResults, path: Path, console: Console) -> None:
    """Print tables and the JSON line, draw the picture."""
    if results.class_turns:
        picture = options.picture or path.with_suffix(".svg")
        write_class_picture(results, picture)
        wide = Console(stderr=options.json, highlight=False, width=None if sys.stdout.isatty() else 220)
        wide.print(Markdown(class_page(results)))
        console.print(f"faser: results {path}, picture {picture}", soft_wrap=True)
    if options.json:
        sys.stdout.write(json.dumps(summary(results)) + "\n")
        sys.stdout.flush()

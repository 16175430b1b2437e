"""What a cut costs between its two halves, stage by stage: `python benchmarks/pruning_stages.py [--steps 40]`.

vLLM with random weights: an 8B Llama's width and attention, but few and thin layers, so that a step is short while the
rows to move are as wide as there. Batch 16, k = 7, a cut behind the middle layer with an imposed mask that rejects
60 % of the drafts; every layer's weights pass through the caches in between, as in a real step. Heads' scoring is left
out: it is the heads', and the mask is given. Medians over steps: thread CPU time for the sum, wall time for the
stages, as its clock costs less; every other cut is timed by stage, the others as a whole, for clocks take time.
Writes the JSON and docs/pruning.md's table; a minute and 3 GiB of memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pruning_report import STAGES_RESULT, SUM, write_tables
from pruning_shape import Arm, Bench, measure

from faser.controller.bench_machine import provenance

BATCH, LENGTH, LAYERS, REJECTED = 16, 7, 4, 0.6
THIN: Final = 1024  # intermediate size


class Stopwatch:
    """Time of wrapped functions, each without what other wrapped ones inside it take."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = defaultdict(float)
        self.is_on = False
        self._inner_s = 0.0

    def wrap(self, owner: Any, name: str, stage: str) -> None:
        """Let calls of `owner.name` count as this stage."""
        whole: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            if not self.is_on:
                return whole(*arguments, **named)
            outer_s, self._inner_s = self._inner_s, 0.0
            began_s = time.perf_counter()
            try:
                return whole(*arguments, **named)
            finally:
                took_s = time.perf_counter() - began_s
                self.spent_s[stage] += took_s - self._inner_s
                self._inner_s = outer_s + took_s

        setattr(owner, name, timed)


class StagesBench(Bench):
    """In the child: whole steps and cut ones in turns."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        from faser.engine_adapter import pruning

        self.steps: list[dict[str, float]] = []
        self.sums_s: list[float] = []
        self.watch, self.is_cut, self.verdict_s = Stopwatch(), False, 0.0
        self.sum_s = 0.0
        self.heads.is_scoring = False
        for owner, name, stage in (
            (pruning.Pruning, "open", "taking in the step"),
            (pruning.Pruning, "_enter", "between the stages"),
            (pruning.Pruning, "_checks", "gathering the tested states"),
            (self.heads, "passes", "the mask"),
            (self.heads, "decide", "which rows leave"),
            (pruning, "Cut", "where everything lies"),
            (pruning.Pruning, "_compacted", "compaction"),
            (pruning, "cut_common", "attention metadata and slots"),
            (pruning, "shortened_speculation", "speculation metadata and draft ids"),
            (pruning, "cut_attention", "attention builder and forward context"),
            (pruning.Pruning, "_pass_on", "positions for later layers"),
            (pruning.Pruning, "spread", "spreading the output"),
        ):
            self.watch.wrap(owner, name, stage)
        passes, enter, bench = self.heads.passes, pruning.Pruning._enter, self

        def verdict(*arguments: Any) -> Any:
            passing = passes(*arguments)
            bench.verdict_s = time.thread_time()
            return passing

        def entered(*arguments: Any) -> Any:
            try:
                return enter(*arguments)
            finally:
                bench.sum_s = time.thread_time() - bench.verdict_s

        self.heads.passes, pruning.Pruning._enter = verdict, entered  # type: ignore[method-assign]

    def arms(self) -> list[Arm]:
        """Return what takes turns."""
        return [("full", 0.0, 0), ("cut", REJECTED, LAYERS // 2)]

    def begin(self, arm: Arm, batch: int) -> None:
        """Keep what the last step's stages took."""
        watch = self.watch
        if self.is_cut and watch.is_on:
            self.steps.append(dict(watch.spent_s))
        elif self.is_cut:
            self.sums_s.append(self.sum_s)
        watch.spent_s.clear()
        self.is_cut = arm[0] == "cut"
        watch.is_on = watch.is_on != self.is_cut  # in every other cut
        super().begin(arm, batch)


def child(options: dict[str, Any]) -> None:
    """Measure, and write each stage's median to the file named in the options."""
    bench = StagesBench(options)
    bench.measure(BATCH)
    steps, sums_s = bench.steps[2:], bench.sums_s[2:]  # the first ones warm up
    stages = {stage: 1e6 * statistics.median(step[stage] for step in steps) for stage in steps[0]}
    stages[SUM] = 1e6 * statistics.median(sums_s)
    told = {"steps": len(steps), "stages_us": {stage: round(value, 1) for stage, value in stages.items()}}
    Path(options["result"]).write_text(json.dumps(told))


def main() -> None:
    """Parse, measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=80, help="measured cuts, as many steps again in full")
    parser.add_argument("--out", type=Path, default=STAGES_RESULT)
    parser.add_argument("--dry-run", action="store_true", help="print only; nothing is written")
    given = parser.parse_args()
    if given.child:
        child(given.child)
        return
    options = {
        "layers": LAYERS, "batches": [BATCH], "length": LENGTH, "steps": given.steps, "rejected": [REJECTED],
        "intermediate_size": THIN,
    }  # fmt: skip
    result = {"options": dict(options), **provenance()}
    result |= measure(options, __file__)
    print(json.dumps(result, indent=1))
    if not given.dry_run:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
        write_tables()


if __name__ == "__main__":
    main()

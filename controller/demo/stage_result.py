"""What came of `faser demo --stages`: tokens per second by number of stages, moves, wrong tokens; JSON and picture.

Made by controller/demo/stages.py from the answers and the telemetry file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from ...engine_adapter.arrays import Floats
from ..telemetry.schema import open_for_reading
from .stage_load import Answer

_SMOOTHED_STEPS: Final = 9


@dataclass(frozen=True, slots=True)
class Timeline:
    """The steps of a run, in order; (n,) each."""

    ended_s: Floats  # since the first
    step_s: Floats
    emitted: Floats
    stages: Floats  # ranks with layers; not a number while a move is under way
    moves: int

    @classmethod
    def read(cls, path: Path) -> Timeline:
        """Read it from a telemetry file; raise StoreError if it is none."""
        database = open_for_reading(path)
        rows = list(
            database.execute(
                "SELECT time_s, step_s, emitted, stage_bounds, is_moving, stage_moves FROM steps "
                "WHERE stage_bounds IS NOT NULL ORDER BY id"
            )
        )
        database.close()
        if not rows:
            return cls(np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0), 0)
        time_s, step_s, emitted = (np.array([row[place] for row in rows], np.float64) for place in range(3))
        stages = np.array([np.nan if row[4] else stages_of(row[3]) for row in rows])
        return cls(time_s - time_s[0], step_s, emitted, stages, int(rows[-1][5]))

    def tokens_per_s(self) -> dict[str, float]:
        """Return tokens per second by number of stages, moves left out."""
        found = {}
        for count in np.unique(self.stages[~np.isnan(self.stages)]):
            at = self.stages == count
            found[f"{count:.0f}"] = round(float(self.emitted[at].sum() / self.step_s[at].sum()), 2)
        return found


def stages_of(bounds: str) -> float:
    """Return how many ranks run layers, of the text that telemetry has: 10,20; stages lie on the last ranks."""
    parts = bounds.split(",") if bounds else []
    return len(parts) + 1.0 - parts.count("0")


class StagesResult(msgspec.Struct, frozen=True):
    """The last line of `--json`."""

    ranks: int
    policy: str
    duration_s: float
    answers: int
    tokens: int
    wrong_tokens: int
    moves: int
    tokens_per_s: dict[str, float]  # by number of stages
    failed: int
    is_interrupted: bool
    telemetry_path: str
    picture_path: str

    def lines(self) -> list[str]:
        """Return what a reader wants to know."""
        by_stages = ", ".join(
            f"{rate:.0f} tokens/s on {count} stage{'s' * (count != '1')}" for count, rate in self.tokens_per_s.items()
        )
        return [
            f"{self.moves} moves under load; {self.answers} answers, {self.tokens} tokens, "
            f"{self.wrong_tokens} of them other than one rank says",
            by_stages or "no step was recorded",
        ]


def write_stages_picture(timeline: Timeline, answers: Sequence[Answer], path: Path) -> None:
    """Draw stages, step times and the time per token of each answer as SVG."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Sheet

    sheet = Sheet(figsize=(9.0, 4.6), layout="constrained")
    canvas = FigureCanvasSVG(sheet)
    top, middle, bottom = sheet.subplots(3, 1, sharex=True, height_ratios=(1, 2, 2))
    top.step(timeline.ended_s, timeline.stages, where="post", color="black")
    top.set_ylabel("stages")
    top.set_yticks(sorted({int(count) for count in timeline.stages[~np.isnan(timeline.stages)]}))
    _draw(middle, timeline.ended_s, 1e3 * timeline.step_s, "ms a step")
    for answer in answers:
        is_right = answer.wrong == 0
        bottom.plot(answer.ended_s, answer.ms_per_token, "o" if is_right else "x", color="black" if is_right else "red")
    bottom.set_ylim(bottom=0.0)
    bottom.set_ylabel("ms per token\nof each answer")
    bottom.set_xlabel("s")
    with rc_context({"svg.hashsalt": "stages"}):
        canvas.print_figure(path, metadata={"Date": None})


def _draw(axes: Any, at_s: Floats, values: Floats, label: str) -> None:
    axes.plot(at_s, values, ".", color="#b9c3cc", markersize=3)
    if len(values) >= _SMOOTHED_STEPS:
        windows = np.lib.stride_tricks.sliding_window_view(values, _SMOOTHED_STEPS)
        half = _SMOOTHED_STEPS // 2
        axes.plot(at_s[half : half + len(windows)], np.median(windows, axis=1), color="black", linewidth=1)
        axes.set_ylim(0.0, 1.3 * float(np.percentile(values, 99)))
    axes.set_ylabel(label)

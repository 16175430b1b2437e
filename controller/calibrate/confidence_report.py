"""How far the drafter's confidence can be trusted: AUC, calibration error and reliability curve by draft position.

Called by benchmarks/confidence_engine.py on telemetry files. Every figure is over tokens that were verified after all
the ones before them were accepted. The calibration under test is one that has not seen the tokens it is judged on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from ...engine_adapter.arrays import Bools, Floats
from ...engine_adapter.protocol import RequestRow
from ...env.calibration.judgement import auc, calibration_error, reliability
from ...env.estimate.acceptance import count_trials
from ...env.estimate.confidence import Confidence, DraftRows, unfold
from ...env.estimate.step_rows import Confidences

RESAMPLES = 200  # for intervals


@dataclass(frozen=True, slots=True)
class Judgements:
    """Tokens of one draft position, (n,) each: drafter's confidence, calibrated chance, whether it was accepted."""

    confidence: Floats
    chance: Floats  # by what had been learnt before this token's step
    is_accepted: Bools


@dataclass(frozen=True, slots=True)
class Quality:
    """How good the confidence of one draft position is; NaN where there is too little to tell."""

    position: int  # 1 is the first
    tokens: int
    rejected: int
    acceptance: float
    auc: float
    auc_low: float  # 95 % interval
    auc_high: float
    raw_error: float  # expected calibration error of the drafter's own confidence
    error: float  # ... after online calibration
    curve: tuple[tuple[float, float, int], ...]  # (mean calibrated chance, share accepted, tokens) per bin


def judge(steps: Iterable[Sequence[RequestRow]], k_max: int) -> list[Judgements]:
    """Return the judged tokens of each position up to `k_max`, calibrating along the way as the controller does."""
    calibration = Confidence(k_max)
    found: list[list[Floats]] = [[] for _ in range(k_max)]
    for record, rows in enumerate(steps):
        rows = [row for row in rows if row.confidences]
        if not rows:
            continue
        verified, pruned, accepted = (
            np.array([getattr(row, name) for row in rows], np.int64) for name in ("verified", "pruned", "accepted")
        )
        trials, successes = count_trials(verified, pruned, accepted, k_max)
        confidences = Confidences.of(row.confidences for row in rows)
        logits, depth = unfold(confidences, k_max)
        chance = calibration.probability(logits)
        trials *= np.arange(k_max) < depth[:, None]
        for position in range(k_max):
            judged = trials[:, position] > 0.0
            sure = 1.0 / (1.0 + np.exp(-logits[judged, position]))
            found[position].append(np.stack([sure, chance[judged, position], successes[judged, position]]))
        calibration.learn(DraftRows(confidences, depth, trials, successes, None, record))
    columns = [np.concatenate(parts, axis=1) if parts else np.zeros((3, 0)) for parts in found]
    return [Judgements(sure, chance, hit > 0.0) for sure, chance, hit in columns]


def quality(position: int, judged: Judgements) -> Quality:
    """Return the figures of one position."""
    hit = judged.is_accepted
    area, low, high = interval(judged.confidence, hit)
    return Quality(
        position=position,
        tokens=len(hit),
        rejected=int((~hit).sum()),
        acceptance=float(hit.mean()) if len(hit) else float("nan"),
        auc=area,
        auc_low=low,
        auc_high=high,
        raw_error=calibration_error(judged.confidence, hit),
        error=calibration_error(judged.chance, hit),
        curve=reliability(judged.chance, hit),
    )


def interval(score: Floats, is_accepted: Bools) -> tuple[float, float, float]:
    """Return the AUC and the ends of its 95 % interval, by resampling tokens."""
    area = auc(score, is_accepted)
    if np.isnan(area):
        return area, area, area
    random = np.random.default_rng(0)
    samples = [random.integers(0, len(score), len(score)) for _ in range(RESAMPLES)]
    low, high = np.nanpercentile([auc(score[sample], is_accepted[sample]) for sample in samples], [2.5, 97.5])
    return area, float(low), float(high)


def draw(qualities: list[Quality], path: Path) -> None:
    """Write the reliability curves as SVG."""
    canvas = Figure(figsize=(5.0, 5.0), layout="constrained")
    FigureCanvasSVG(canvas)
    axes = canvas.add_subplot()
    axes.plot([0, 1], [0, 1], color="0.7", linestyle="--", linewidth=1.0)
    for one in qualities:
        if one.curve:
            chance, share, _ = zip(*one.curve, strict=True)
            axes.plot(chance, share, marker="o", markersize=3, label=f"position {one.position}, AUC {one.auc:.2f}")
    axes.set(xlabel="calibrated chance of acceptance", ylabel="share accepted", xlim=(0, 1), ylim=(0, 1))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    canvas.savefig(path, format="svg")

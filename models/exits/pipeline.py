"""From a target and its drafter to exit heads: record, train, judge on held-out prompts, write. One call."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...engine_adapter.arrays import Floats
from ...engine_adapter.protocol import Prune
from ...env.calibration.judgement import auc
from ...env.workload.prompts import held_out_prompts, training_prompts
from .choose import (
    THRESHOLDS,
    WRONG_CEILING,
    ExitOutcome,
    StepSeconds,
    accepted_tokens,
    best,
    ended_by,
    ending,
    judge,
    survival,
)
from .export import export_heads
from .record import ExitRecipe, Recording, record
from .train import predictions, train_heads

Stage = Callable[[str, int, int], None]
HELD_OUT_SHARE = 0.25  # of the training side's tokens, recorded on held-out prompts


@dataclass(frozen=True, slots=True)
class LayerFigures:
    """How one layer's head does on held-out prompts."""

    layer: int
    auc: float
    chosen: ExitOutcome | None  # the best threshold under the ceiling
    beside: ExitOutcome | None  # the same on drafts that end by the drafter's confidence; relative to those


@dataclass(frozen=True, slots=True)
class Figures:
    """What is known after training."""

    layers: list[LayerFigures]
    control_auc: float  # of the drafter's confidence alone, on the same tokens
    confidence: ExitOutcome  # ending drafts where their survival by the drafter's confidence falls short, at its best
    cost: StepSeconds
    tokens: int  # draft tokens that were judged
    acceptance: float  # tokens accepted per draft

    def best(self) -> LayerFigures:
        """Return the layer that saves most time per token."""
        return _fastest(self.layers)


def train_exits(recipe: ExitRecipe, output: Path, command: str, seed: int, stage: Stage) -> Figures:
    """Write `output` and its card; return the figures on held-out prompts."""
    sides = []
    for prompts, share in ((training_prompts(), 1.0), (held_out_prompts(), HELD_OUT_SHARE)):
        shuffled = list(prompts)
        random.Random(seed).shuffle(shuffled)
        sides.append((shuffled, int(share * recipe.tokens)))
    learned, held_out = record(recipe, sides, lambda done, total: stage("recording", done, total))
    return write_exits(recipe, learned, held_out, output, command, seed, stage)


def write_exits(
    recipe: ExitRecipe, learned: Recording, held_out: Recording, output: Path, command: str, seed: int, stage: Stage
) -> Figures:
    """Train on one recording, judge on the other, write."""
    heads = train_heads(learned, seed, lambda done, total: stage("training", done, total))
    predicted = {layer: predictions(held_out, layer, head) for layer, head in heads.items()}
    figures = judge_heads(held_out, predicted, fitted_cost(learned.steps.numpy(), recipe.batch))
    kept = sorted({figures.best().layer, max(figures.layers, key=lambda one: one.auc).layer})
    card = card_of(figures, recipe, learned, command, seed, kept)
    chosen = figures.best().chosen
    released = Prune(chosen.layer, chosen.threshold) if chosen else None
    export_heads(output, {layer: heads[layer] for layer in kept}, learned, card, released)
    return figures


def judge_heads(recording: Recording, predicted: dict[int, Floats], cost: StepSeconds) -> Figures:
    """Compare every layer, and the drafter's own confidence, on the tokens of a recording."""
    accepted = recording.is_accepted.numpy()
    reached = recording.is_reached().numpy()
    drafts = recording.drafts.numpy()
    sure = recording.confidences.double().numpy()
    # Ending a draft is free and leaves outputs alone, so the rival has no ceiling: it takes whatever is fastest.
    chance = survival(drafts, sure)
    control = min((ending(drafts, accepted, chance, t, cost) for t in THRESHOLDS), key=lambda one: one.time_share)
    shorter, kept = ended_by(drafts, chance, control.threshold)
    layers = []
    for layer, scores in predicted.items():
        outcomes = [judge(drafts, accepted, scores, layer, t, recording.layers, cost) for t in THRESHOLDS]
        later = [judge(shorter, accepted[kept], scores[kept], layer, t, recording.layers, cost) for t in THRESHOLDS]
        layers.append(LayerFigures(layer, auc(scores[reached], accepted[reached]), best(outcomes), best(later)))
    return Figures(
        layers,
        auc(sure[reached], accepted[reached]),
        control,
        cost,
        int(reached.sum()),
        float(accepted_tokens(drafts, accepted).mean()),
    )


def fitted_cost(steps: Floats, batch: int) -> StepSeconds:
    """Fit seconds by rows: medians per number of rows, then a line; robust against a busy machine.

    :param steps: (steps, 3) rows, seconds of the forward pass, seconds with LM head and sampler.
    """
    rows, forward, whole = steps.T
    fixed_s, row_s = _line(rows, whole)
    _, layers_s = _line(rows, forward)
    share = min(max(layers_s / row_s, 0.1), 1.0) if row_s > 0 else 0.75
    return StepSeconds(max(fixed_s, 0.0), max(row_s, 1e-6), share, batch=batch)


def _line(x: Floats, y: Floats) -> tuple[float, float]:
    values = np.unique(x)
    if len(values) < 2:
        return 0.0, float(np.median(y / x))
    medians = np.array([np.median(y[x == value]) for value in values])
    weights = np.sqrt([np.count_nonzero(x == value) for value in values])
    slope, start = np.polyfit(values, medians, 1, w=weights)
    return float(start), float(slope)


def card_of(
    figures: Figures, recipe: ExitRecipe, learned: Recording, command: str, seed: int, kept: Sequence[int]
) -> dict[str, Any]:
    """Return the card."""
    chosen = figures.best()
    return {
        "name": f"Exit heads for {recipe.target.name}",
        "kind": "exit-heads",
        "drafter": recipe.drafter.name,
        "license": "that of the target",
        "command": command,
        "seed": seed,
        "recorded_tokens": len(learned.tokens),
        "judged_tokens": figures.tokens,
        "accepted_per_draft": round(figures.acceptance, 4),
        "draft_length": recipe.longest,
        "layers": list(kept),
        "ceiling_of_wrongly_pruned": WRONG_CEILING,
        "auc_of_confidence_alone": round(figures.control_auc, 4),
        "by_layer": [_line_of(one) for one in figures.layers],
        "confidence_alone_before_verification": _outcome(figures.confidence),
        "best": _line_of(chosen),
        "pays": bool(chosen.chosen and chosen.chosen.time_share < 1.0),
        "pays_beside_confidence": pays_beside_confidence(figures),
        "cost": dataclasses.asdict(figures.cost),
    }


def pays_beside_confidence(figures: Figures) -> bool:
    """Tell whether pruning still saves time where drafts already end by the drafter's own confidence."""
    return any(one.beside is not None and one.beside.time_share < 1.0 for one in figures.layers)


def _fastest(layers: Sequence[LayerFigures]) -> LayerFigures:
    return min(layers, key=lambda one: (one.chosen.time_share if one.chosen else 2.0, -one.auc))


def _line_of(figures: LayerFigures) -> dict[str, Any]:
    return {"layer": figures.layer, "auc": round(figures.auc, 4), "rule": _outcome(figures.chosen)} | {
        "beside_confidence": _outcome(figures.beside)
    }


def _outcome(outcome: ExitOutcome | None) -> dict[str, Any] | None:
    if outcome is None:
        return None
    return {name: round(value, 4) for name, value in dataclasses.asdict(outcome).items() if name != "layer"}

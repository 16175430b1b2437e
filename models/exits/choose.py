"""Which layer and threshold save most, and whether any does: replays the rule of a cut over recorded drafts.

Costs are of the recording engine: seconds of a verification step by rows. What a cut saves is rows of the remaining
layers; what it costs is the decision, accepted tokens that are no longer tested, and bonus tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from ...engine_adapter.arrays import Bools, Floats, Ints
from ...engine_adapter.pruning.cut import after_first_failure

WRONG_CEILING: Final = 0.02  # of the tokens that would have been accepted
THRESHOLDS: Final = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6)


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of a step of the engine."""

    fixed_s: float
    row_s: float  # one more row through everything
    layers_share: float = 0.75  # of `row_s`, what the layers cost; the rest is LM head and sampler
    decide_s: float = 0.0005  # a step's decision and cut
    check_s: float = 5e-6  # a token's check
    batch: int = 16
    draft_s: float = 0.0  # drafting beside it


@dataclass(frozen=True, slots=True)
class ExitOutcome:
    """What one layer and threshold would have done."""

    layer: int
    threshold: float
    dropped: float  # share of the rows of draft tokens that left
    wrong: float  # share of the accepted tokens that would not have been tested
    tokens_per_step: float  # emitted, without pruning 1 + accepted
    time_share: float  # seconds per token relative to no pruning; below 1 is a gain


def judge(
    drafts: Ints,
    is_accepted: Bools,
    predicted: Floats,
    layer: int,
    threshold: float,
    depth: int,
    cost: StepSeconds,
) -> ExitOutcome:
    """Replay one rule.

    :param drafts: (drafts,) tokens of each; the other arrays have one entry per token.
    """
    accepted = accepted_tokens(drafts, is_accepted)
    cut = after_first_failure(drafts, predicted >= threshold)
    is_cut = cut.removed > 0
    emitted = np.where(is_cut & (accepted >= cut.tests), cut.tests, accepted + 1)
    rows, dropped = (drafts + 1).mean(), cut.removed.mean()
    plain_s = cost.fixed_s + cost.draft_s + cost.batch * rows * cost.row_s
    gone = dropped * (cost.layers_share * (1.0 - layer / depth) + 1.0 - cost.layers_share)
    pruned_s = plain_s - cost.batch * gone * cost.row_s + cost.decide_s + cost.batch * drafts.mean() * cost.check_s
    lost = accepted - np.minimum(accepted, cut.tests)
    return ExitOutcome(
        layer,
        threshold,
        float(dropped / drafts.mean()),
        float(lost.sum() / max(accepted.sum(), 1)),
        float(emitted.mean()),
        float((pruned_s / emitted.mean()) / (plain_s / (accepted + 1).mean())),
    )


def ending(
    drafts: Ints,
    is_accepted: Bools,
    scores: Floats,
    threshold: float,
    cost: StepSeconds,
) -> ExitOutcome:
    """Replay the rival: drafts end before their first token under the threshold, and a bonus token follows."""
    accepted = accepted_tokens(drafts, is_accepted)
    lengths, _ = ended_by(drafts, scores, threshold)
    kept = np.minimum(accepted, lengths)
    plain_s = cost.fixed_s + cost.draft_s + cost.batch * (drafts + 1).mean() * cost.row_s
    shorter_s = plain_s - cost.batch * (drafts - lengths).mean() * cost.row_s
    return ExitOutcome(
        0,
        threshold,
        float((drafts - lengths).sum() / drafts.sum()),
        float((accepted - kept).sum() / max(accepted.sum(), 1)),
        float((kept + 1).mean()),
        float((shorter_s / (kept + 1).mean()) / (plain_s / (accepted + 1).mean())),
    )


def accepted_tokens(drafts: Ints, is_accepted: Bools) -> Ints:
    """Return per draft how many tokens the target accepts."""
    full = after_first_failure(drafts, is_accepted)
    return np.asarray(np.where(full.has_bonus, drafts, full.kept - 1), dtype=np.int64)


def survival(drafts: Ints, confidences: Floats) -> Floats:
    """Return for each token the product of the confidences of its draft up to it: what ends drafts under a lease."""
    product = confidences.copy()
    starts = np.cumsum(drafts) - drafts
    for place in range(1, int(drafts.max(initial=0))):
        later = starts[drafts > place] + place
        product[later] *= product[later - 1]
    return product


def ended_by(drafts: Ints, scores: Floats, threshold: float) -> tuple[Ints, Bools]:
    """Return the lengths of drafts that end before their first token under the threshold, and which tokens stay."""
    lengths = after_first_failure(drafts, scores >= threshold).kept - 1
    within = np.arange(drafts.sum()) - np.repeat(np.cumsum(drafts) - drafts, drafts)
    return lengths, within < np.repeat(lengths, drafts)


def best(outcomes: list[ExitOutcome]) -> ExitOutcome | None:
    """Return the outcome that saves most time per token under the ceiling, None if none was tried."""
    allowed = [outcome for outcome in outcomes if outcome.wrong <= WRONG_CEILING]
    return min(allowed, key=lambda outcome: outcome.time_share, default=None)

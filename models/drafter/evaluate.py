"""Score a head on held-out conversations: would its drafts have been accepted, and did it know?

The trainer reports it, `faser drafter evaluate` prints it. Answers the target gave greedily make the score the greedy
acceptance; answers drawn at T make it an unbiased estimate of the acceptance of greedy drafts at T. vLLM is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from ...engine_adapter.arrays import Bools, Floats
from ...env.calibration.judgement import auc, calibration_error
from .features import ExampleAddress, FeatureCache
from .network import Batch, DraftHead, pack

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class ConfidenceFigures:
    """How well the head's probability of its own draft foretells acceptance, where all drafts before were right."""

    tested: int
    rejected: int
    auc: float  # chance that an accepted draft was more confident than a rejected one
    calibration_error: float  # expected |confidence - acceptance| over ten equal bins of confidence


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How often the first 1..depth drafts were all right, over `drafts` places where drafting began."""

    temperature: float
    drafts: int
    accepted: tuple[int, ...]
    confidence: tuple[ConfidenceFigures, ...]

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(count / max(1, self.drafts) for count in self.accepted)

    @property
    def mean_length(self) -> float:
        """Tokens per step, the target's own one included."""
        return 1.0 + sum(self.rates)

    def line(self) -> str:
        rates = " ".join(f"{rate:.3f}" for rate in self.rates)
        return f"T={self.temperature:g}: {rates} -> {self.mean_length:.3f} tokens a step over {self.drafts} drafts"


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of one depth for each place where drafting began: the chain's hits so far and the head's confidence."""

    hit: Tensor  # (places,) bool: this and all earlier drafts of the place were right
    was_alive: Tensor  # (places,) bool: all earlier drafts were right
    confidence: Tensor  # (places,) float32


@torch.no_grad()
def draft_chains(head: DraftHead, lm_head: Tensor, vocabulary: Tensor, batch: Batch, depth: int) -> list[Drafts]:
    """Draft `depth` tokens from every row that has so many answer tokens before it."""
    is_place = torch.ones(batch.rows, dtype=torch.bool, device=batch.labels.device)
    for piece in batch.pieces:
        is_place[piece.row_slice][max(0, piece.rows - depth + 1) :] = False
    alive = torch.ones_like(is_place)
    levels = []
    for level, states in enumerate(head.unroll(batch, depth)):
        confidence, best = functional.linear(states, lm_head).float().softmax(-1).max(-1)
        # Depth k at row r belongs to the draft that began at row r-k.
        hit = alive & (vocabulary[best] == batch.labels).roll(-level, 0)
        levels.append(Drafts(hit[is_place], alive[is_place], confidence.roll(-level, 0)[is_place]))
        alive = hit
    return levels


def evaluate(
    head: DraftHead, lm_head: Tensor, vocabulary: Tensor, cache: FeatureCache, depth: int, batch_tokens: int
) -> list[Acceptance]:
    """Score a head over a cache, one figure for each temperature of its answers."""
    figures = []
    for temperature in sorted({address.temperature for address in cache.addresses}):
        chosen = [a for a in cache.addresses if a.temperature == temperature and a.answer_length > depth + 1]
        parts: list[list[Drafts]] = [[] for _ in range(depth)]
        for group in group_by_tokens(chosen, batch_tokens):
            batch = pack([cache.read(address) for address in group], head.device)
            for level, drafts in enumerate(draft_chains(head, lm_head, vocabulary, batch, depth)):
                parts[level].append(drafts)
        figures.append(_acceptance(temperature, [_joined(part) for part in parts if part]))
    return figures


def _acceptance(temperature: float, levels: Sequence[Drafts]) -> Acceptance:
    return Acceptance(
        temperature=temperature,
        drafts=len(levels[0].hit) if levels else 0,
        accepted=tuple(int(level.hit.sum()) for level in levels),
        confidence=tuple(
            judge_confidence(
                level.confidence[level.was_alive].double().cpu().numpy(), level.hit[level.was_alive].cpu().numpy()
            )
            for level in levels
        ),
    )


def _joined(parts: Sequence[Drafts]) -> Drafts:
    return Drafts(
        torch.cat([part.hit for part in parts]),
        torch.cat([part.was_alive for part in parts]),
        torch.cat([part.confidence for part in parts]),
    )


def judge_confidence(confidence: Floats, accepted: Bools) -> ConfidenceFigures:
    """Compare confidences (n,) with what happened (n,)."""
    return ConfidenceFigures(
        len(accepted),
        int((~accepted).sum()),
        auc(confidence, accepted),
        calibration_error(confidence, accepted) if len(accepted) else 0.0,
    )


def group_by_tokens(addresses: Sequence[ExampleAddress], batch_tokens: int) -> list[list[ExampleAddress]]:
    """Cut a sequence of conversations, in order, into batches of at least `batch_tokens` (the last may be smaller)."""
    groups: list[list[ExampleAddress]] = [[]]
    size = 0
    for address in addresses:
        if size >= batch_tokens:
            groups.append([])
            size = 0
        groups[-1].append(address)
        size += address.length
    return [group for group in groups if group]

"""Train exit heads on a recording: one affine map, one probe and one logistic curve per layer, all at once.

The forward pass is that of engine_adapter/pruning/exit_heads.py. The label of a draft token is whether the target's own
choice in the row that tests it is that token. Tokens behind a rejection teach the map too, with less weight; the
curve is fitted anew at the end, on drafts that the map has not seen and on tokens whose draft was accepted so far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as functional

from ...engine_adapter.arrays import Floats
from ...engine_adapter.pruning.exit_heads import FEATURES, candidate_scores, features
from ...engine_adapter.pruning.head_math import Head, moved, normed
from .record import Recording

Tensor = torch.Tensor
Progress = Callable[[int, int], None]
RANK: Final = 48
BATCH: Final = 512
EPOCHS: Final = 3
RATE: Final = 1e-3
DECAY: Final = 0.1
BEHIND_WEIGHT: Final = 0.3  # of tokens behind a rejection
CURVE_SHARE: Final = 0.25  # of the drafts, kept from the map for the curve
CURVE_RIDGE: Final = 1e-3


def train_heads(recording: Recording, seed: int, progress: Progress) -> dict[int, Head]:
    """Return a trained head per recorded layer; every map starts as the target's own last norm."""
    heads = {}
    for done, layer in enumerate(recording.states):
        progress(done, len(recording.states))
        heads[layer] = _train(recording, layer, seed)
    progress(len(recording.states), len(recording.states))
    return heads


def _train(recording: Recording, layer: int, seed: int) -> Head:
    draw = torch.Generator().manual_seed(seed)
    hidden = recording.norm.shape[0]
    head = Head(
        scale=recording.norm.float().clone(),
        down=torch.randn(RANK, hidden, generator=draw) * hidden**-0.5,
        up=torch.zeros(hidden, RANK),
        bias=torch.zeros(hidden),
        probe=torch.zeros(hidden),
        weights=torch.zeros(len(FEATURES) + 1),
    )
    reached = recording.is_reached()
    for_map, for_curve = _split(recording)
    mean, spread = _moments(recording, layer, head, for_map[torch.randperm(len(for_map), generator=draw)[:4096]])
    weights = torch.where(reached, 1.0, BEHIND_WEIGHT)
    head.weights[-2] = 1.0  # the probe, whose own direction starts at zero
    learned = [head.scale, head.down, head.up, head.bias, head.probe, head.weights]
    for tensor in learned:
        tensor.requires_grad_(True)
    # Decay pulls the map towards where it began, not towards zero.
    began = [tensor.detach().clone() for tensor in learned[:5]]
    optimiser = torch.optim.AdamW(learned, lr=RATE, weight_decay=0.0)
    steps = EPOCHS * -(-len(for_map) // BATCH)
    falling = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: max(0.02, 1.0 - step / steps))
    for _ in range(EPOCHS):
        for rows in torch.split(for_map[torch.randperm(len(for_map), generator=draw)], BATCH):
            logits = ((_features(recording, layer, head, rows) - mean) / spread) @ head.weights[:-1] + head.weights[-1]
            labels = recording.is_accepted[rows].float()
            loss = functional.binary_cross_entropy_with_logits(logits, labels, weights[rows])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            with torch.no_grad():
                for tensor, start in zip(learned, began, strict=False):
                    tensor.lerp_(start, DECAY * falling.get_last_lr()[0])
            falling.step()
    plain = {name: getattr(head, name).detach() for name in ("scale", "down", "up", "bias", "probe")}
    fixed = Head(**plain, weights=head.weights.detach())
    return Head(**plain, weights=_curve(recording, layer, fixed, for_curve[reached[for_curve]]))


def _split(recording: Recording) -> tuple[Tensor, Tensor]:
    """Return the tokens of the first drafts and of the last ones."""
    kept = max(1, int(CURVE_SHARE * len(recording.drafts)))
    start = int(recording.drafts[:-kept].sum())
    everything = torch.arange(len(recording.tokens))
    return everything[:start], everything[start:]


def _moments(recording: Recording, layer: int, head: Head, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and spread of the features; the probe's are left as they are while it is zero."""
    seen = _seen(recording, layer, head, rows)
    mean, spread = seen.mean(0), seen.std(0)
    is_flat = spread < 1e-3
    return torch.where(is_flat, 0.0, mean), torch.where(is_flat, 1.0, spread)


def _curve(recording: Recording, layer: int, head: Head, rows: Tensor) -> Tensor:
    """Fit the logistic curve alone, and fold the features' scale into it."""
    mean, spread = _moments(recording, layer, head, rows)
    seen = _seen(recording, layer, head, rows)
    scaled = torch.cat([(seen - mean) / spread, torch.ones(len(seen), 1)], dim=1)
    labels = recording.is_accepted[rows].float()
    weights = torch.zeros(scaled.shape[1], requires_grad=True)
    optimiser = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = functional.binary_cross_entropy_with_logits(scaled @ weights, labels)
        value = value + CURVE_RIDGE * weights[:-1].square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimiser.step(loss)  # type: ignore[no-untyped-call]
    fitted = weights.detach()
    slopes = fitted[:-1] / spread
    return torch.cat([slopes, (fitted[-1] - (slopes * mean).sum())[None]])


def _features(recording: Recording, layer: int, head: Head, rows: Tensor) -> Tensor:
    states = normed(recording.states[layer][rows].float())
    tokens = recording.tokens[rows][:, None].long()
    candidates = recording.candidates[rows].long()
    lm_rows = recording.lm_head[torch.cat([tokens, candidates], dim=1)].float()
    scores = candidate_scores(moved(head, states), lm_rows)
    return features(
        scores, candidates == tokens, recording.confidences[rows], recording.positions[rows], states @ head.probe
    )


@torch.no_grad()
def _seen(recording: Recording, layer: int, head: Head, rows: Tensor) -> Tensor:
    """Return the features of many rows."""
    return torch.cat([_features(recording, layer, head, part) for part in torch.split(rows, 4 * BATCH)])


def predictions(recording: Recording, layer: int, head: Head) -> Floats:
    """Return the predicted acceptance of every recorded token."""
    seen = _seen(recording, layer, head, torch.arange(len(recording.tokens)))
    with torch.no_grad():
        return torch.sigmoid(seen @ head.weights[:-1] + head.weights[-1]).double().numpy()

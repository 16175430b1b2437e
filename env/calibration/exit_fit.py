"""What exit heads did in measured steps, as one `Exit` per layer: what they find, what they miss, what looking takes.

Called by env/calibration/profile_fit.py. The rates are those at the thresholds that were in force while it was
measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...engine_adapter.protocol import Prune
from ..profile.engine_profile import Exit
from .step_fit import solve


@dataclass(frozen=True, slots=True)
class PruneObservation:
    """One step in which heads looked. `drafts`: (verified, pruned, accepted) tokens of each request that had any."""

    layer: int
    spent_s: float
    saved_rows: float  # rows that left, each as the share of the layers that it was spared
    drafts: tuple[tuple[int, int, int], ...]


def fit_exits(looks: Sequence[PruneObservation], released: Prune | None = None) -> tuple[Exit, ...]:
    """Return an exit for each layer, the released one first, else the one that was used most."""
    layers = {look.layer for look in looks}
    exits = {layer: _fit([look for look in looks if look.layer == layer]) for layer in layers}
    used = {layer: sum(look.layer == layer for look in looks) for layer in layers}
    first = released.layer if released is not None else None
    return tuple(exits[layer] for layer in sorted(layers, key=lambda layer: (layer != first, -used[layer], layer)))


def _fit(looks: list[PruneObservation]) -> Exit:
    pruned = sum(row for look in looks for _, row, _ in look.drafts)
    alarms, accepted, hits, misses = np.sum([_verdicts(*draft) for look in looks for draft in look.drafts], axis=0)
    look_s, look_token_s = _spent(looks)
    return Exit(
        layer=looks[0].layer,
        saved_share=min(sum(look.saved_rows for look in looks) / pruned, 1.0) if pruned else 0.0,
        recall=float(hits / (hits + misses)) if hits + misses else 0.0,
        false_alarm=float(alarms / accepted) if accepted else 0.0,
        look_s=look_s,
        look_token_s=look_token_s,
    )


def _verdicts(verified: int, pruned: int, accepted: int) -> tuple[int, int, int, int]:
    """Return (alarms, accepted tokens looked at, cuts at or behind the first rejection, chances for one missed)."""
    tested = verified + 1 - pruned if pruned else verified
    if pruned and accepted == tested:
        return 1, accepted, 0, 0
    missed = (tested - 1 if pruned else tested) - accepted
    return 0, accepted, int(pruned > 0), missed


def _spent(looks: list[PruneObservation]) -> tuple[float, float]:
    """Return seconds per look and per draft token looked at: medians of equal looks, no coefficient below 0."""
    times: dict[int, list[float]] = {}
    for look in looks:
        if look.spent_s > 0.0:
            times.setdefault(sum(verified for verified, _, _ in look.drafts), []).append(look.spent_s)
    if not times:
        return 0.0, 0.0
    tokens = np.array(sorted(times), np.float64)
    medians = np.array([np.median(times[int(count)]) for count in tokens])
    weight = np.sqrt([len(times[int(count)]) for count in tokens])
    step_s, token_s = solve(np.stack([np.ones(len(tokens)), tokens], axis=1), medians, weight).tolist()
    return step_s, token_s

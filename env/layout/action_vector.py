"""A learned policy's action: a few numbers in -1..1 that say at what price requests draft. The one layout of it.

Called by policies (`decode`) and, compiled, by the simulator (env/simulator/action.py); a test holds the two together.
A price instead of a length per request keeps the action small, safe to clip and indifferent to the requests' order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...engine_adapter.arrays import Singles
from ...engine_adapter.protocol import Prune
from ..estimate.engine_state import EngineState
from ..spaces import Action, Capabilities, Lengths, clamp


class Component(NamedTuple):
    """One number of the action. It is -1..1 on the outside; `low` to `high` is what that means."""

    name: str
    unit: str
    low: float
    high: float
    meaning: str


ACTION: Final = (
    Component("threshold", "survival", 0.0, 1.0, "draft while history gives a token this chance to be accepted"),
    Component("depth", "share of k_max", 0.0, 1.0, "no draft is longer"),
    Component("keep", "survival", 0.0, 1.0, "drop a drafted token to whose draft confidence gives less; 0: no rule"),
    Component("go_on", "survival", 0.0, 1.0, "end a draft behind a token to which confidence gives less"),
    Component("overlap", "third", 0.0, 1.0, "draft and verify in turn; two half-batches; draft ahead"),
    Component("split", "part", 0.0, 1.0, "equal parts, one for each split of the engine; the first is unsplit"),
    Component("prune", "sign", -1.0, 1.0, "above 0: prune while verifying, where the exit heads were released to"),
)
NAMES: Final = tuple(component.name for component in ACTION)
THRESHOLD, DEPTH, KEEP, GO_ON, OVERLAP, SPLIT, PRUNE = range(len(ACTION))
SERIAL, PING_PONG, AHEAD = range(3)  # of the overlap
OVERLAPS: Final = 3
RULED_FROM: Final = 0.02  # a stop rule that keeps everything above less is none


def meant(vectors: npt.ArrayLike) -> Singles:
    """Return (..., len(ACTION)) what numbers in -1..1 mean; what is outside is clipped, NaN counts as -1."""
    raw = np.asarray(vectors, np.float32)
    raw = np.minimum(np.where(raw >= -1.0, raw, np.float32(-1.0)), np.float32(1.0))  # a third of nan_to_num's time
    means: Singles = (raw + np.float32(1.0)) * np.float32(0.5)
    means[..., PRUNE] = raw[..., PRUNE]
    return means


def require_numbers(vectors: npt.ArrayLike, names: Sequence[str] = NAMES) -> npt.NDArray[Any]:
    """Return actions, (..., len(names)), as an array; raise ValueError for NaN and infinity, which no agent can mean.

    Learning from a reward of such an action would go wrong unnoticed; what serves an engine reads it as `meant` says.
    """
    actions = np.asarray(vectors)
    if not np.isfinite(actions).all():
        raise ValueError(_odd_number(actions, names))
    return actions


def _odd_number(actions: npt.NDArray[Any], names: Sequence[str]) -> str:
    place = tuple(np.argwhere(~np.isfinite(actions))[0].tolist())
    whose = f" of engine {place[-2]}" if len(place) > 1 else ""
    named = names[place[-1]] if place and place[-1] < len(names) else "one number"
    return (
        f"action{whose}: {named} is {actions[place]}; expected numbers from -1 to 1; "
        "look at what chose it, such as a policy whose training has diverged"
    )


def outside(**means: float) -> Singles:
    """Return the vector (len(ACTION),) in -1..1 of named meanings; what is not named is neutral: no drafts, serial."""
    vector = np.full(len(ACTION), -1.0, np.float32)
    for index, component in enumerate(ACTION):
        if component.name in means:
            value = means.pop(component.name)
            vector[index] = value if component.low < 0.0 else 2.0 * value - 1.0
    if means:
        raise ValueError(f"no component {', '.join(sorted(means))}; expected {', '.join(c.name for c in ACTION)}")
    return vector


def lengths_for(acceptance: npt.ArrayLike, threshold: float, depth: float) -> Lengths:
    """Return (n,) draft lengths from chances of acceptance (n, positions), each given that the one before was."""
    chances = np.asarray(acceptance, np.float32)
    survival = np.cumprod(chances, axis=1, dtype=np.float32)
    lengths: Lengths = (survival[:, : deepest(depth, chances.shape[1])] >= np.float32(threshold)).sum(axis=1)
    return lengths


def deepest(depth: float, k_max: int) -> int:
    """Return the draft length that a share of k_max means."""
    return min(int(depth * k_max + 0.5), k_max)


def choice(value: float, options: int) -> int:
    """Return which of `options` equal parts of 0..1 holds `value`."""
    return min(int(value * options), options - 1)


def decode(vector: npt.ArrayLike, state: EngineState) -> Action:
    """Return the action that `vector` (len(ACTION),) in -1..1 means for the live requests of `state`.

    Overlapping stays in the simulator: a real engine's own gates measure whether groups or drafting ahead pay.
    """
    means = meant(np.reshape(vector, len(ACTION)))
    capabilities = state.capabilities
    # The last row is a stranger: a request that nothing is known about.
    chances = np.concatenate([state.acceptance(), state.population.mean[None, :]])
    lengths = lengths_for(chances, float(means[THRESHOLD]), float(means[DEPTH]))
    keep, go_on = float(means[KEEP]), float(means[GO_ON])
    is_ruled = keep >= RULED_FROM and state.confidence.is_ready
    action = Action(
        lengths[:-1],
        int(lengths[-1]),
        split=choice(float(means[SPLIT]), len(capabilities.splits)),
        prune=_prune(float(means[PRUNE]), capabilities),
        stop=state.confidence.rule(keep, np.full(capabilities.k_max, go_on)) if is_ruled else None,
    )
    return clamp(action, capabilities)


def _prune(sign: float, capabilities: Capabilities) -> Prune | None:
    return capabilities.released_prune if sign > 0.0 else None

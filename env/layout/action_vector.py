"""A learned policy's action: a few numbers in -1..1 that say at what price requests draft. The one layout of it.

Called by the environments and, compiled, by the simulator (env/simulator/action.py); a test holds that to what it means
for the live requests of an engine's state.
A price instead of a length per request keeps the action small, safe to clip and indifferent to the requests' order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ...engine_adapter.arrays import Singles


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

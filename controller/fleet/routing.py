"""Which replica gets the next request. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from .views import ReplicaView


def choose(replicas: Iterable[ReplicaView], without: Collection[str] = ()) -> str | None:
    """Return the serving replica with the fewest requests in flight; None if there is none but `without`.

    Requests in flight come first because they decide how long a step takes and whether drafts pay; of equal replicas
    the one with fewer bytes to read gets it, then the one that has waited longest, so that idle ones take turns.
    """
    serving = (each for each in replicas if each.state == "serving" and each.name not in without)
    best = min(serving, key=lambda each: (each.requests, each.body_bytes, each.chosen_s, each.name), default=None)
    return None if best is None else best.name

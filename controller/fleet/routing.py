"""Which replica gets the next request. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from .views import ReplicaView


def choose(replicas: Iterable[ReplicaView], failed: Collection[str] = ()) -> str | None:
    """Return the serving replica with the fewest requests in flight, None if none serves.

    Requests in flight come first because they decide how long a step takes and whether drafts pay; of equal replicas
    the one with fewer bytes to read gets it, then the one that has waited longest, so that idle ones take turns.

    :param failed: replicas that have failed this request and are asked again only if no other serves
    """
    serving = (each for each in replicas if each.state == "serving")
    best = min(
        serving, default=None,
        key=lambda each: (each.name in failed, each.requests, each.body_bytes, each.chosen_s, each.name),
    )  # fmt: skip
    return None if best is None else best.name

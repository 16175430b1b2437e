"""Which of a sidecar's lives an engine obeys: epochs rise from life to life, also where the hosts' clocks do not.

Called with the hello of an engine, by the session and by the replay. Pure: the same numbers give the same epoch.
"""

from __future__ import annotations

from typing import Final

LARGEST: Final = 1 << 62  # of the wire
STEPS: Final = 1 << 32  # epochs above an engine's own that a start may take


def epoch_above(own: int, obeyed: int) -> int:
    """Return this life's own epoch, or where the engine obeyed one as high, one above that.

    By how much is this life's own, so that two that take over the same engine at once do not meet at one epoch.
    """
    return own if own > obeyed else min(obeyed + 1 + own % STEPS, LARGEST)

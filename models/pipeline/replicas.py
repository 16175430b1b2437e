"""How many replicas a load asks for. Called by the rules of the simulated cluster and by `faser fleet`; pure, light."""

from __future__ import annotations

import math


def replicas_for(ongoing: float, each: float, least: int, most: int) -> int:
    """Return as many replicas as Ray Serve would: requests waiting or under way over what each is to have.

    :param ongoing: requests, a mean over time
    :param each: requests that one replica is to have, above 0
    """
    return min(max(math.ceil(ongoing / each), least), most)

"""Batches through pipelines, event by event; compiled. Called by env/pipeline/cluster.py.

One queue, first come first served. Whenever a first stage is free, it takes a batch of what waits. Its share of that is
all of it divided by the free pipelines; the batch has the size, a power of two or the whole share, that would give the
share the least mean completion if it were sent in such batches, but at least the size at which the pipelines keep up
with the arrivals of late. So a deep pipeline sends a burst one by one where a shallow one packs it: to send everything
in one batch lengthens every stage's time, and doubled the latency of 32 stages at CV 4.

A stage computes one batch at a time; a batch reaches the next stage one hop later, while its own goes on with the next
batch. So departures follow the recursion of a tandem queue exactly:
free[j] = max(free[j - 1] + hop, free[j]) + compute[j] * (1 + slope * log(requests)).
"""

from __future__ import annotations

import math

from ...engine_adapter.arrays import Bools, Floats, Ints
from ...engine_adapter.compiled import compiled


def _best_batch(share: int, most: int, stages: int, slope: float) -> int:
    """Return the size at which so many waiting requests are done soonest on average, sent in batches of it."""
    best, least, size = 1, math.inf, 1
    while True:
        factor = 1.0 + slope * math.log(size)
        mean = factor * (stages + 0.5 * (share / size - 1.0))
        if mean < least:
            best, least = size, mean
        if size == most:
            return best
        size = min(2 * size, most)


best_batch = compiled(_best_batch)


@compiled
def serve(
    until_s: float,
    head: int,
    arrival_s: Floats,
    start_s: Floats,
    finish_s: Floats,
    server: Ints,
    is_open: Bools,
    stages: Ints,
    least: Ints,
    most: Ints,
    compute_s: Floats,
    free_s: Floats,
    used_s: Floats,
    hop_s: float,
    slope: float,
) -> int:
    """Serve until a time and return the first request still waiting.

    :param head: first request that waits
    :param arrival_s, start_s, finish_s: (requests,) seconds; the last two are filled in
    :param server: (requests,) which pipeline served; filled in
    :param is_open, stages, least, most: (pipelines,) takes new batches; number of stages; size that keeps up; batch cap
    :param compute_s, free_s: (pipelines, SEGMENTS) seconds of a batch of one; when each stage is free, changed
    :param used_s: (pipelines,) when the first stage was last taken, changed
    """
    count = len(arrival_s)
    arrived = head
    while head < count:
        soonest_s = math.inf
        for p in range(len(stages)):
            if is_open[p]:
                soonest_s = min(soonest_s, max(free_s[p, 0], arrival_s[head]))
        if not soonest_s < until_s:
            break
        arrived = max(arrived, head)
        while arrived < count and arrival_s[arrived] <= soonest_s:
            arrived += 1
        free, chosen, least_s = 0, -1, math.inf
        for p in range(len(stages)):
            if is_open[p] and free_s[p, 0] <= soonest_s:
                free += 1
                pass_s = (stages[p] - 1) * hop_s
                for j in range(stages[p]):
                    pass_s += compute_s[p, j]
                if pass_s < least_s:
                    chosen, least_s = p, pass_s
        waiting = arrived - head
        share = (waiting + free - 1) // free
        most_now = min(share, most[chosen])
        batch = max(best_batch(share, most_now, stages[chosen], slope), min(least[chosen], most_now))
        factor = 1.0 + slope * math.log(batch)
        time_s = soonest_s
        for j in range(stages[chosen]):
            if j > 0:
                time_s += hop_s
            time_s = max(time_s, free_s[chosen, j]) + compute_s[chosen, j] * factor
            free_s[chosen, j] = time_s
        used_s[chosen] = free_s[chosen, 0]
        for i in range(head, head + batch):
            start_s[i], finish_s[i], server[i] = soonest_s, time_s, chosen
        head += batch
    return head


@compiled
def live(
    now_s: float, first: int, head: int, finish_s: Floats, server: Ints, tokens: Floats, held: Floats, running: Ints
) -> int:
    """Count requests under way by pipeline, and their tokens; return the first that is under way.

    :param first: no request before it is under way
    :param held: (pipelines,) tokens, filled in
    :param running: (pipelines,) requests, filled in
    """
    held[:] = 0.0
    running[:] = 0
    found = head
    for i in range(head - 1, first - 1, -1):
        if finish_s[i] > now_s:
            held[server[i]] += tokens[i]
            running[server[i]] += 1
            found = i
    return found


@compiled
def sustaining(rate_rps: float, compute_s: float, most: int, slope: float, usage: float) -> int:
    """Return the smallest batch, a power of two or the cap, at which a pipeline serves such a rate; else the cap."""
    size = 1
    while size < most and rate_rps * compute_s * (1.0 + slope * math.log(size)) > usage * size:
        size = min(2 * size, most)
    return size

"""Who is left out of the next step, by the lease in force. Called by the scheduler mixin, on the engine thread.

Writes one public attribute of vLLM's Request (0.32), `next_decode_eligible_step`, which keeps a request out of a step;
without a pipeline nobody else writes it. What a request was about to verify waits with it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..protocol import Rest
from .record import Entry


class Resting:
    """Leaves requests out; looks up whom handles stand for only where others are named than in the step before."""

    def __init__(self) -> None:
        self._handles: tuple[int, ...] = ()
        self._named: list[Entry] = []

    def leave_out(self, rest: Rest, running: int, entries: Mapping[str, Entry], step: int, vllm_step: int) -> int:
        """Keep those who rest out of a step, unless they decode in it or nobody else is there; return how many.

        :param running: requests in vLLM's batch
        :param entries: all that are alive, by request id
        :param step: FASER's number of the step, by which those who rest decode in the same ones
        :param vllm_step: vLLM's number of it
        """
        if step % (rest.steps + 1) == 0:
            return 0
        if rest.handles != self._handles:
            handles = frozenset(rest.handles)
            self._named = [entry for entry in entries.values() if entry.handle in handles]
            self._handles = rest.handles
        # Who is in its prompt reads on. Those who wait for blocks count as if they rested, so that somebody is left.
        requests = [
            entry.request
            for entry in self._named
            if entry.emitted and entry.request_id in entries and not entry.request.is_prefill_chunk
        ]
        if len(requests) >= running:
            return 0
        for request in requests:
            request.next_decode_eligible_step = vllm_step + 1
        return len(requests)

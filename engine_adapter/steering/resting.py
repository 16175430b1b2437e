"""Who is left out of the next step, by the lease in force. Called by the scheduler mixin, on the engine thread.

Writes one public attribute of vLLM's Request (0.32), `next_decode_eligible_step`, which keeps a request out of a step.
vLLM's asynchronous scheduler writes it too, but only of those whom it has just scheduled. What a request was about to
verify waits with it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..protocol import Rest
from .record import Entry


class Resting:
    """Leaves requests out, at most so many steps in a row, whatever leases ask for.

    :param is_async: the next step is scheduled before this one's drafts are there: a draft that waited cannot be
        checked against a grammar then, so nobody with one rests
    """

    def __init__(self, is_async: bool) -> None:
        self._is_async = is_async
        self._steps = 0  # in a row in which somebody was left out
        self._handles: tuple[int, ...] = ()
        self._named: list[Entry] = []  # looked up only where others are named than before

    def leave_out(self, rest: Rest | None, running: int, entries: Mapping[str, Entry], vllm_step: int) -> int:
        """Keep those who rest out of a step, unless it is their turn or nobody else is there; return how many.

        :param running: requests in vLLM's batch; under asynchronous scheduling one whose last token is in flight counts
        :param entries: all that are alive, by request id
        :param vllm_step: vLLM's number of the step
        """
        if rest is None or self._steps >= rest.steps:
            self._steps = 0
            return 0
        if rest.handles != self._handles:
            handles = frozenset(rest.handles)
            self._named = [entry for entry in entries.values() if entry.handle in handles]
            self._handles = rest.handles
        # Who decodes: it has a token, is not within a prompt, and has its cache, which a preempted one has not.
        requests = [
            request
            for entry in self._named
            if entry.emitted and entry.request_id in entries
            if not (request := entry.request).is_prefill_chunk and request.num_computed_tokens
        ]
        if self._is_async:
            requests = [request for request in requests if not request.use_structured_output]
        if not 0 < len(requests) < running:
            self._steps = 0
            return 0
        for request in requests:
            request.next_decode_eligible_step = vllm_step + 1
        self._steps += 1
        return len(requests)

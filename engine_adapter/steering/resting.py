"""Who is left out of the next step, by the lease in force. Called by the scheduler mixin, on the engine thread.

Writes one public attribute of vLLM's Request (0.32), `next_decode_eligible_step`, which keeps a request out of a step;
under synchronous scheduling nobody else writes it. What a request was about to verify waits with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..protocol import Rest
from .record import Entry


def leave_out(rest: Rest, running: Iterable[Any], entries: Mapping[str, Entry], step: int, vllm_step: int) -> int:
    """Keep those who rest out of a step, unless they decode in it or nobody else is there; return how many.

    :param running: vLLM's requests in the batch
    :param step: FASER's number of the step, by which those who rest decode in the same ones
    :param vllm_step: vLLM's number of it
    """
    if step % (rest.steps + 1) == 0:
        return 0
    handles, resting, others = frozenset(rest.handles), [], False
    for request in running:
        entry = entries.get(request.request_id)
        is_decoding = request.num_output_tokens and not request.is_prefill_chunk
        if entry is not None and entry.handle in handles and is_decoding:
            resting.append(request)
        else:
            others = True
    if not others:
        return 0
    for request in resting:
        request.next_decode_eligible_step = vllm_step + 1
    return len(resting)

"""How many draft tokens each scheduled request has room for. Called by `Steering` once a step, on the engine thread.

A request is looked at closely only where a limit may bind: in a prompt, near its last token, or if its client allows
less than the engine does. From the others nothing is read of vLLM's objects (benchmarks/adapter.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from .record import Entry, LiveRequest


def latched(
    scheduled: Mapping[str, int],
    entries: Mapping[str, Entry],
    step: int,
    longest: int,
    wanted: tuple[dict[int, int], int],
    copied: int | None = None,
) -> tuple[dict[str, int], dict[str, int]]:
    """Return each request's length, and the tokens that it may copy at most, in the order of `scheduled`.

    :param scheduled: rows by request; of requests that are not among `entries` no limit is known.
    :param step: number of this step; it only ever grows.
    :param longest: longest draft of any request, tokens, copies included; the same in every step.
    :param wanted: lengths by handle, and of the others.
    :param copied: longest copy; None: no rule says when to copy, and the second answer is empty.
    """
    named, default = wanted
    lengths = dict.fromkeys(scheduled, default)
    copies = {} if copied is None else dict.fromkeys(scheduled, copied)
    if not (default or named or copied):
        return lengths, copies
    for request_id, rows in scheduled.items():
        entry = entries.get(request_id)
        if entry is None:
            continue
        length = named.get(entry.handle, default)
        if step >= entry.roomy_until:
            limit = _limit(entry, rows, step, longest)
            length = min(length, limit)
            if copied is not None and copied > limit:
                copies[request_id] = limit
        lengths[request_id] = length
    return lengths, copies


def _limit(entry: Entry, rows: int, step: int, longest: int) -> int:
    """Return the longest draft that may be of use, and note before which step there is no need to ask again."""
    request = entry.request
    emitted = request.num_output_tokens
    if (not emitted or entry.was_preempted) and reads_on(request, rows):
        return 0  # nothing is sampled, so nothing is drafted; it must not deepen the others' rounds
    # This step emits one token at least, and the next one ends with a token of its own: a draft longer than what then
    # remains could never be emitted. A step in flight emits one, too.
    in_flight = request.num_output_placeholders
    room = request.max_tokens - emitted - 2
    if entry.most >= longest and not entry.is_session:
        # No step emits more than the longest draft and one token.
        entry.roomy_until = step + 1 + (room - in_flight - longest - 1) // (longest + 1)
    return min(entry.most, max(room - (in_flight > 0), 0))


def reads_on(request: LiveRequest, rows: int) -> bool:
    """Tell whether so many rows end before the last known token: in a prompt, or in what is read again."""
    return request.num_computed_tokens + rows < request.num_tokens + request.num_output_placeholders

"""Canary mode: a share of the requests, chosen by their ids, gets drawn lengths with known probabilities.

Called by the governor inside `decide`. No random source: a draw is a hash of boot, record and request, so that replay
draws the same. All other requests get exactly what the engine would do alone. What may be estimated from it is
tokens accepted and rows spent per request, never tokens/s: requests share the batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from msgspec.structs import replace

from ...engine_adapter.protocol import RequestEvent
from ...env.estimate.engine_state import EngineState
from ...env.spaces import Action, Capabilities, fit_rows

MAX_MEMBERS: Final = 1 << 16  # requests remembered: more than any engine runs
_SCALE: Final = float(1 << 64)


@dataclass(frozen=True, slots=True)
class Draws:
    """The lengths of one decision's canary requests and how likely each was; (n,) each."""

    handles: list[int]
    lengths: list[int]
    preferred: list[int]  # what the policy asked for
    propensities: list[float]  # probability of the length that was drawn


class Canary:
    """Who is in the canary, and the draw of their lengths."""

    def __init__(self, share: float, epsilon: float) -> None:
        self.share = share
        self.epsilon = epsilon
        self._ids: dict[int, str] = {}  # by handle
        self._chances: dict[int, float] = {}  # handle -> where its id falls in 0..1, of those asked for

    def note(self, events: Sequence[RequestEvent]) -> None:
        """Take in who arrived and who left."""
        for event in events:
            if event.kind == "arrival" and event.request_id:
                self._drop(event.handle)
                self._ids[event.handle] = event.request_id
                if len(self._ids) > MAX_MEMBERS:  # their ends were never reported
                    self._drop(next(iter(self._ids)))

    def forget(self, events: Sequence[RequestEvent]) -> None:
        """Let those go that finished."""
        for event in events:
            if event.kind in ("finish", "abort"):
                self._drop(event.handle)

    def has(self, handle: int) -> bool:
        """Return whether a request is in the canary; one whose id was never heard is not."""
        if handle not in self._chances and handle in self._ids:
            self._chances[handle] = chance(self._ids[handle].encode())
        return self._chances.get(handle, 1.0) < self.share

    def draw(self, action: Action, state: EngineState) -> tuple[Action, Draws | None]:
        """Return the action of a canary; no draws where not all that could be drawn would fit the batch.

        Whether it fits is asked before anything is drawn: leaving out draws that turned out too long would make the
        others likelier than their logged probability.
        """
        capabilities = state.capabilities
        handles: list[int] = state.requests.column("handle").tolist()
        members = [index for index, handle in enumerate(handles) if self.has(handle)]
        names = [handles[index] for index in members]
        longest = np.minimum(state.requests.column("most")[members], capabilities.k_max).tolist()
        preferred = action.lengths[members].tolist()
        alone = default_length(capabilities, state.load.running)
        lengths = np.full(len(handles), alone, np.int64)
        lengths[members] = longest
        draws = None
        max_rows, in_batch = capabilities.max_batched_tokens, state.in_batch()
        if fit_rows(lengths, max_rows, in_batch) is lengths:
            drawn = [self._drawn(state, *each) for each in zip(names, preferred, longest, strict=True)]
            chances = [self.propensity(*each) for each in zip(drawn, preferred, longest, strict=True)]
            draws = Draws(names, drawn, preferred, chances)
        lengths[members] = draws.lengths if draws is not None else preferred
        reason = f"canary, {len(members)} of {len(handles)} requests: {action.reason}"
        result = replace(
            action, lengths=fit_rows(lengths, max_rows, in_batch), default_length=alone,
            split=None, frontier=None, stop=None, prune=None, match=None, rest=None, reason=reason,
        )  # fmt: skip
        return result, draws

    def propensity(self, length: int, preferred: int, longest: int) -> float:
        """Return the chance that `length`, of 0 to `longest`, is drawn where the policy wants `preferred`."""
        even = self.epsilon / (longest + 1)
        return even + (1.0 - self.epsilon if length == preferred else 0.0)

    def _drop(self, handle: int) -> None:
        self._ids.pop(handle, None)
        self._chances.pop(handle, None)

    def _drawn(self, state: EngineState, handle: int, preferred: int, longest: int) -> int:
        fate = chance(f"{state.boot_id}/{state.counter}/{handle}".encode())
        if fate >= self.epsilon:
            return preferred
        return min(int(fate / self.epsilon * (longest + 1)), longest)


def chance(name: bytes) -> float:
    """Return where a name falls in 0..1, evenly and always the same."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) / _SCALE


def default_length(capabilities: Capabilities, batch: int) -> int:
    """Return what the engine does without us: its table's length for this many requests, else its one number."""
    for first, last, length in capabilities.default_table:
        if first <= batch <= last:
            return min(int(length), capabilities.k_max)
    if capabilities.default_table and batch:  # vLLM's lookup goes on with its last row
        return min(int(capabilities.default_table[-1][2]), capabilities.k_max)
    return capabilities.default_length

"""What a step of a simulated engine truly costs, for upper bounds that know it. Simulation only.

Called by models/hindsight.py and models/informed.py. Prompts are left out: they come whatever is drafted.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..env.acceptance import Floats
from ..env.simulator import Simulator
from ..env.step_basis import DRAFT_BASIS, FIRST_EDGES, ROUND_EDGES, ROW_EDGES, VERIFY_BASIS

_ROWS = 2  # place of the first segment of rows in VERIFY_BASIS
_SAMPLED = _ROWS + len(ROW_EDGES)
_KV = VERIFY_BASIS.index("KV tokens")
_FIRST_PASS = 2  # place in DRAFT_BASIS, before the segments of that pass's rows
_FIRST_ROWS = _FIRST_PASS + 1
_DRAFTING = DRAFT_BASIS.index("drafting requests")

Segments: TypeAlias = tuple[Floats, Floats]  # starts and widths
_ROW_SEGMENTS: Segments = (np.array(ROW_EDGES), np.append(np.diff(ROW_EDGES), np.inf))
_FIRST_SEGMENTS: Segments = (np.array(FIRST_EDGES), np.append(np.diff(FIRST_EDGES), np.inf))
_ROUND_SEGMENTS: Segments = (np.array(ROUND_EDGES), np.append(np.diff(ROUND_EDGES), np.inf))


class TrueCost:
    """The coefficients that the simulator draws its times from, without noise."""

    def __init__(self, simulator: Simulator) -> None:
        coefficients = simulator.state.coefficients[0]
        self._verify = coefficients[: len(VERIFY_BASIS)]
        self._draft = coefficients[len(VERIFY_BASIS) : len(VERIFY_BASIS) + len(DRAFT_BASIS)]
        self._host = coefficients[len(VERIFY_BASIS) + len(DRAFT_BASIS) :]
        profile = int(simulator.state.engines[0]["profile"])
        self._skips = int(simulator.world.profiles["catch_up"][profile]) > 0

    def verify_s(self, running: int, drafts: npt.ArrayLike) -> Floats:
        """Return seconds in the target for each number of draft tokens, any shape."""
        drafts = np.asarray(drafts, np.float64)
        rows = running + drafts
        terms = self._verify
        seconds: Floats = (
            terms[0]
            + terms[1] * running
            + _segments(rows, _ROW_SEGMENTS) @ terms[_ROWS:_SAMPLED]
            + terms[_SAMPLED] * rows
            + terms[_SAMPLED + 1] * np.maximum(rows - 16.0, 0.0)
            + terms[_SAMPLED + 2] * (drafts > 0.0)
            + terms[_SAMPLED + 3] * drafts
        )
        return seconds

    def row_s(self, running: int, drafts: float) -> float:
        """Return seconds of one more draft token in the target."""
        least_s, most_s = self.verify_s(running, np.array([drafts, drafts + 1.0])).tolist()
        return float(most_s - least_s)

    def round_prices_s(self, place: int) -> tuple[float, float]:
        """Return seconds of the drafting round at a place (0: the first), and of each token drafted in it."""
        terms = self._draft
        if place == 0:
            skipped = (float(terms[_FIRST_PASS]), float(terms[_FIRST_ROWS])) if self._skips else (0.0, 0.0)
            return skipped[0], float(terms[_DRAFTING]) + skipped[1]
        return float(terms[_DRAFTING + 1]), float(terms[_DRAFTING + 2])

    def beside_s(self, running: int, context: int) -> float:
        """Return seconds that come whatever is drafted: the host's pause, and attention to the tokens so far."""
        return float(self._host[0] + self._host[1] * running + self._verify[_KV] * context)

    def draft_s(self, requests: npt.ArrayLike, rounds: npt.ArrayLike, drawn: npt.ArrayLike) -> Floats:
        """Return seconds of drafting, any shapes that go together.

        Of a drafter that skips who does not draft, the first pass is charged with one row for each request.

        :param requests: that draft at least one token
        :param rounds: of the longest draft
        :param drawn: tokens of all drafts
        """
        requests, rounds, drawn = (np.asarray(each, np.float64) for each in (requests, rounds, drawn))
        terms = self._draft
        further = np.maximum(rounds - 1.0, 0.0)
        mean = np.divide(drawn - requests, further, out=np.zeros(np.broadcast(drawn, further).shape), where=further > 0)
        # A drafter that leaves nothing out reads every new token, whether or not it then drafts.
        first_rows = terms[_FIRST_ROWS : _FIRST_ROWS + len(FIRST_EDGES)]
        own_pass = terms[_FIRST_PASS] * (requests > 0.0) + _segments(requests, _FIRST_SEGMENTS) @ first_rows
        seconds: Floats = (
            terms[0]
            + (own_pass if self._skips else terms[_FIRST_PASS])
            + terms[_DRAFTING] * requests
            + terms[_DRAFTING + 1] * further
            + further * (_segments(mean, _ROUND_SEGMENTS) @ terms[_DRAFTING + 2 : _DRAFTING + 2 + len(ROUND_EDGES)])
        )
        return seconds


def _segments(values: Floats, edges: Segments) -> Floats:
    """Return (..., segments) the part of each value in each segment."""
    starts, widths = edges
    parts: Floats = np.minimum(np.maximum(np.asarray(values)[..., None] - starts, 0.0), widths)
    return parts

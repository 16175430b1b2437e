"""What a request's client asks of FASER, in SamplingParams.extra_args (`vllm_xargs` of the OpenAI API).

Called by steering.py for every new request. Nothing that a client writes there may fail its request: what is no
sensible answer is left out, and said in a fault.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from ..protocol import MAX_DRAFT_LENGTH, TPOT_MS, TTFT_MS
from .record import LiveRequest

CLIENT_LIMIT: Final = "faser_max_draft"
CLIENT_TTFT, CLIENT_TPOT = "faser_ttft_ms", "faser_tpot_ms"
SHOWN: Final = 80  # characters of what was seen


class ClientWishes(NamedTuple):
    """What one client asked for; objectives that are None were not asked for."""

    most: int = MAX_DRAFT_LENGTH  # tokens of its longest draft; 0 opts out of speculation
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    faults: tuple[tuple[str, str], ...] = ()  # (the counter's label, what was seen and expected)


NO_WISHES: Final = ClientWishes()


def wishes_of(request: LiveRequest) -> ClientWishes:
    """Return what a request's client asked for, and what of it makes no sense."""
    extra = getattr(getattr(request, "sampling_params", None), "extra_args", None)
    if not extra:
        return NO_WISHES
    most, too_odd = _most_drafted(extra[CLIENT_LIMIT]) if CLIENT_LIMIT in extra else (MAX_DRAFT_LENGTH, "")
    ttft_ms, no_ttft = _milliseconds(CLIENT_TTFT, extra[CLIENT_TTFT], TTFT_MS) if CLIENT_TTFT in extra else (None, "")
    tpot_ms, no_tpot = _milliseconds(CLIENT_TPOT, extra[CLIENT_TPOT], TPOT_MS) if CLIENT_TPOT in extra else (None, "")
    told = (("extra_args", too_odd), ("objective", no_ttft), ("objective", no_tpot))
    return ClientWishes(most, ttft_ms, tpot_ms, tuple(fault for fault in told if fault[1]))


def _most_drafted(asked: object) -> tuple[int, str]:
    """Return the longest draft that a client allows, and what is wrong with what it asked, if anything."""
    if type(asked) is int and asked >= 0:  # True is an int too
        return min(asked, MAX_DRAFT_LENGTH), ""
    if isinstance(asked, float) and asked.is_integer() and asked >= 0:
        return min(int(asked), MAX_DRAFT_LENGTH), ""
    return MAX_DRAFT_LENGTH, f"{CLIENT_LIMIT} {_shown(asked)}; expected a whole number from 0 on; ignored"


def _milliseconds(name: str, asked: object, bounds: tuple[float, float]) -> tuple[float | None, str]:
    """Return an objective, and what is wrong with what was asked, if anything; numbers may come as text."""
    least, most = bounds
    value = _number(asked)
    if least <= value <= most:
        return value, ""
    return None, f"{name} {_shown(asked)}; expected a number from {least:g} to {most:.0f}; ignored, correct the client"


def _number(asked: object) -> float:
    """Return a number or a text that is one; NaN for anything else."""
    if isinstance(asked, bool) or not isinstance(asked, int | float | str):
        return math.nan
    try:
        return float(asked)
    except (ValueError, OverflowError):
        return math.nan


def _shown(asked: object) -> str:
    """Return what was seen in a few characters; of what is no plain value its type, whose text might be anything."""
    if not isinstance(asked, str | int | float | None):
        return f"of type {type(asked).__name__[:SHOWN]}"
    try:
        return repr(asked[:SHOWN]) if isinstance(asked, str) else str(asked)[:SHOWN]
    except ValueError:  # an integer of more digits than Python writes
        return "a number of very many digits"

"""Whether a forced mechanism did anything, and what in words: of a station's figures alone.

Called by controller/demo/tour/tour_result.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from .station_steps import StationFigures


def _drafts(f: StationFigures) -> str:
    return f"{f.verified} drafted tokens verified, {f.accepted} accepted"


def _lengths(f: StationFigures) -> str:
    return f"lengths differed in {f.mixed_steps} of {f.steps} steps, {f.shortened} tokens not drafted"


def _stops(f: StationFigures) -> str:
    return f"{f.stopped_drafts} drafts ended early, {f.unspent} tokens not drafted"


def _copies(f: StationFigures) -> str:
    return f"{f.copied} tokens copied, {f.accepted_copies} accepted"


def _pruning(f: StationFigures) -> str:
    return (
        f"{f.pruned} of {f.verified} rows left early, worth {f.saved_rows:.0f} whole ones, {f.wrongly_pruned} wrongly"
    )


def _ahead(f: StationFigures) -> str:
    return f"{f.ahead} drafts were there ahead, {f.not_ahead} were guessed wrong; {_hidden(f)}"


def _groups(f: StationFigures) -> str:
    return f"two groups in {f.grouped_steps} of {f.steps} steps; {_hidden(f)}"


def _splits(f: StationFigures) -> str:
    times = f"a step {f.unsplit_ms:.0f} ms unsplit, {f.split_ms:.0f} ms split"
    return f"{f.split_changes} changes, {times}; {_hidden(f)}"


def _hidden(f: StationFigures) -> str:
    return f"{f.hidden_ms:.0f} of {f.draft_ms:.0f} ms of drafting hidden"


_SENTENCES: Final[Mapping[str, Callable[[StationFigures], str]]] = {
    "drafts": _drafts, "lengths": _lengths, "stops": _stops, "copies": _copies, "pruning": _pruning, "ahead": _ahead,
    "groups": _groups, "splits": _splits,
}  # fmt: skip
_DID: Final[Mapping[str, Callable[[StationFigures], bool]]] = {
    "drafts": lambda f: f.accepted > 0,
    "lengths": lambda f: f.mixed_steps > 0,
    "stops": lambda f: f.stopped_drafts > 0,
    "copies": lambda f: f.accepted_copies > 0,
    "pruning": lambda f: f.pruned > 0,
    "ahead": lambda f: f.ahead > 0 and f.hidden_ms > 0.0,
    "groups": lambda f: f.grouped_steps > 0 and f.hidden_ms > 0.0,
    "splits": lambda f: f.split_changes > 0 and f.grouped_steps > 0,
}


def idle_mechanisms(mechanisms: Sequence[str], figures: StationFigures) -> list[str]:
    """Return which of the forced mechanisms left no trace."""
    return [name for name in mechanisms if not _DID[name](figures)]


def told(mechanisms: Sequence[str], figures: StationFigures) -> str:
    """Return what they did, a clause each."""
    return "; ".join(_SENTENCES[name](figures) for name in mechanisms)

"""What a station's steps did, read from the telemetry file: the steps under leases that its policy decided.

Called by controller/demo/tour/tour.py behind the tour. Nothing is reckoned from what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from ....engine_adapter.arrays import Floats
from ....engine_adapter.protocol import RequestRow
from ...telemetry.packing import StepCopies, step_copies, unpack_lengths, unpack_rows
from ...telemetry.schema import open_for_reading

_CELLS: Final = (
    "time_s", "step_s", "schedule_s", "verify_s", "sample_s", "draft_s", "overlap_s", "split", "prefill_tokens",
    "verified", "pruned", "saved_rows", "wrongly_pruned", "accepted", "verified_copies", "accepted_copies",
    "frontier_hits", "frontier_misses",
)  # fmt: skip
_COUNTED: Final = ("limits", "drafted", "mixed", "shortened", "stopped", "spared")


class StationFigures(msgspec.Struct, frozen=True):
    """Sums over a station's steps: tokens unless said otherwise."""

    steps: int = 0
    verified: int = 0
    accepted: int = 0
    mixed_steps: int = 0  # steps in which requests had lengths of their own
    shortened: int = 0  # draft tokens not asked for, since lengths were below the batch's longest
    stopped_drafts: int = 0  # drafts
    unspent: int = 0  # draft tokens never drawn behind such an end
    copied: int = 0  # of those verified
    accepted_copies: int = 0
    pruned: int = 0  # draft tokens whose row left the target early
    saved_rows: float = 0.0  # rows, each as the share of layers saved
    wrongly_pruned: int = 0  # drafts
    ahead: int = 0  # drafts that were there when they were asked for
    not_ahead: int = 0  # drafts that had been guessed wrong, or came late
    draft_ms: float = 0.0
    hidden_ms: float = 0.0  # of it, while something was verified
    grouped_steps: int = 0  # steps under a split of the cores, with two groups
    split_changes: int = 0
    split_ms: float = 0.0  # a step under a split, median
    unsplit_ms: float = 0.0  # another one


@dataclass(frozen=True, slots=True)
class StationSteps:
    """A station's steps in order, (n,) each: the columns of table `steps`, and sums over each step's rows.

    Of those who decode are `limits`, the sum of the lengths in force, and `drafted`. `mixed`: lengths differ, and by
    how many tokens in all they are below the longest (`shortened`); `stopped`: drafts that a rule ended; `spared`:
    tokens not drawn so.
    """

    columns: dict[str, Floats]

    @classmethod
    def of(cls, rows: Iterable[Sequence[Any]]) -> StationSteps:
        """Return them from rows of _CELLS and _COUNTED."""
        names = (*_CELLS, *_COUNTED)
        table = np.array([[cell or 0.0 for cell in row] for row in rows], np.float64).reshape(-1, len(names))
        return cls(dict(zip(names, table.T, strict=True)))

    def __len__(self) -> int:
        return len(self.columns["time_s"])

    def __getitem__(self, name: str) -> Floats:
        return self.columns[name]

    def figures(self) -> StationFigures:
        """Return what they did in all."""

        def total(name: str) -> int:
            return int(self[name].sum())

        split = self["split"] > 0
        plain = self["prefill_tokens"] == 0
        return StationFigures(
            steps=len(self), verified=total("verified"), accepted=total("accepted"), mixed_steps=total("mixed"),
            shortened=total("shortened"), stopped_drafts=total("stopped"), unspent=total("spared"),
            copied=total("verified_copies"), accepted_copies=total("accepted_copies"), pruned=total("pruned"),
            saved_rows=round(float(self["saved_rows"].sum()), 1), wrongly_pruned=total("wrongly_pruned"),
            ahead=total("frontier_hits"), not_ahead=total("frontier_misses"),
            draft_ms=round(1e3 * float(self["draft_s"].sum()), 1),
            hidden_ms=round(1e3 * float(self["overlap_s"].sum()), 1), grouped_steps=int(split.sum()),
            split_changes=int(np.count_nonzero(np.diff(self["split"]))),
            split_ms=_median_ms(self["step_s"][split & plain]), unsplit_ms=_median_ms(self["step_s"][~split & plain]),
        )  # fmt: skip


def read_station(path: Path, boot_id: str, policy: str) -> StationSteps:
    """Return the steps of an engine under leases of a policy; raise StoreError if the file is none of ours."""
    database = open_for_reading(path)
    leads = ("lease_epoch", "lease_sequence", "decision_sequence", "decision_policy", "decision_lengths")
    names = (*leads, "decision_default_length", "rows", "copies", *_CELLS)
    try:
        found = database.execute(
            f"SELECT {', '.join(names)} FROM steps "
            "WHERE engine = (SELECT id FROM engines WHERE boot_id = ?) ORDER BY id",
            [boot_id],
        ).fetchall()
    finally:
        database.close()
    return StationSteps.of(_led_by(policy, found))


def _led_by(policy: str, found: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    decisions: dict[int, tuple[str, bytes, int]] = {}
    counts = RowCounts()
    for epoch, lease, sequence, decider, lengths, default, rows, copies, *cells in found:
        if sequence is not None:
            decisions[sequence] = decider, lengths, default
        leader, named, others = decisions.get(lease, ("", b"", 0)) if epoch else ("", b"", 0)
        asked = unpack_lengths(named) if leader == policy else {}
        counted = counts.of(unpack_rows(rows), step_copies(copies), asked, others)
        if leader == policy:
            yield (*cells, *counted)


class RowCounts:
    """Sums over the rows of one step after another, for which the lengths of the step before are needed."""

    def __init__(self) -> None:
        self._limits: dict[int, int] = {}  # by handle, under which the draft was drawn that is verified now

    def of(
        self, rows: Sequence[RequestRow], copies: StepCopies, asked: Mapping[int, int], default: int
    ) -> tuple[int, ...]:
        """Return one number for each name of _COUNTED.

        :param asked: lengths by handle that the lease asks for; `default` for the others
        """
        decoding = [row for row in rows if row.emitted]
        # Towards its end an answer has room for less than was asked for: that is no length of its own.
        own = [row.draft_limit for row in decoding if row.draft_limit == asked.get(row.handle, default)]
        shortened = max(own, default=0) * len(own) - sum(own)
        # A rule that ends a draft has judged one token more than it kept; a copy was judged by another rule.
        ended = [row for row in decoding if row.handle not in copies.verified and len(row.confidences) > row.verified]
        spared = sum(max(self._limits.get(row.handle, 0) - len(row.confidences), 0) for row in ended)
        self._limits.update((row.handle, row.draft_limit) for row in decoding)
        limits, drafted = (sum(getattr(row, name) for row in decoding) for name in ("draft_limit", "drafted"))
        return limits, drafted, int(len(set(own)) > 1), shortened, len(ended), spared


def _median_ms(seconds: Floats) -> float:
    return round(1e3 * float(np.median(seconds)), 1) if len(seconds) else 0.0

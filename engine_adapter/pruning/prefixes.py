"""Which rows stay where their number is fixed beforehand: the likeliest prefixes, so that nobody waits for the device.

Behind layer L a step goes on with exactly R rows. Rows without a draft token always stay; the others are ranked by the
chance that everything before them is accepted, which no row's own token and nothing behind it can change
(docs/design/pruning.md). Shapes follow from R alone. For forward_v2.py; prefix_kernel.py is the same in Triton, and
this, in plain torch, its reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .cut import places

if TYPE_CHECKING:
    from torch import Tensor

    from ..arrays import Ints


@dataclass(frozen=True, slots=True)
class DraftLayout:
    """Where a step's rows and draft tokens lie, request by request, on the device; the host knows all of it."""

    requests: int
    longest: int  # draft tokens of a request
    rows: int
    drafts: int  # draft tokens of all requests
    firsts: Tensor  # (requests + 1,) int32 first draft token of each request, and the number of all
    lengths: Tensor  # (requests,) int32 rows of each request; those of its drafts are its last
    owner: Tensor  # (draft tokens,) int32 request of each
    place: Tensor  # (draft tokens,) int32, 0 is a request's first

    @classmethod
    def of(cls, drafts: Ints, lengths: Ints, move: object = None) -> DraftLayout:
        """Return the layout of requests with so many draft tokens in so many rows.

        :param move: takes an int32 array to the device; None: it stays on the host
        """
        import torch

        firsts = np.concatenate([[0], np.cumsum(drafts)])
        parts = firsts, lengths, np.repeat(np.arange(len(drafts)), drafts), places(drafts)
        flat = np.concatenate(parts).astype(np.int32)
        moved: Tensor = move(flat) if callable(move) else torch.from_numpy(flat)
        split: list[Tensor] = moved.split([len(part) for part in parts])  # type: ignore[no-untyped-call]
        return cls(len(drafts), int(drafts.max()), int(lengths.sum()), int(firsts[-1]), *split)


@dataclass(frozen=True, slots=True)
class StayingRows:
    """What stays, on the device; the host knows only how much."""

    kept: Tensor  # (requests,) int32 of the drafts + 1 rows of each, how many stay
    left: Tensor  # (requests,) int32 rows that leave
    starts: Tensor  # (requests + 1,) int32 first row of each request among those that stay, and their number
    rows: Tensor  # (R,) int64 of the whole batch
    logits: Tensor  # (requests + draft rows that stay,) int64 of the drafts + 1 logit rows per request
    passing: Tensor  # (1,) int32 draft rows up to each request's first chance under the threshold


def staying_rows(chances: Tensor, threshold: float, layout: DraftLayout, budget: int) -> StayingRows:
    """Return what stays if `budget` draft rows may; plain torch.

    :param chances: (draft tokens,) of acceptance; what is no number counts as none.
    :param budget: 0 to all draft tokens.
    """
    import torch

    owner, place = layout.owner.long(), layout.place.long()
    drafts = layout.firsts[1:] - layout.firsts[:-1]
    table = chances.new_zeros((layout.requests, layout.longest), dtype=torch.float32)
    table[owner, place] = chances.float()
    survival = torch.where(table > 0.0, table.clamp(max=1.0), 0.0).cumprod(1)[owner, place]
    # Of equal ones those before come first, so that what is chosen of a request is always a prefix of it.
    chosen = torch.sort(survival, descending=True, stable=True).indices[:budget]
    kept = torch.ones_like(drafts).index_add_(0, owner[chosen], torch.ones_like(chosen, dtype=torch.int32))
    passes = torch.zeros_like(table, dtype=torch.int32)
    passes[owner, place] = (chances >= threshold).int()
    left = drafts + 1 - kept
    ends, logit_ends = (layout.lengths - left).cumsum(0), kept.cumsum(0)
    return StayingRows(
        kept,
        left,
        torch.cat([ends.new_zeros(1), ends]).int(),
        _behind_gaps(ends, left, layout.rows - layout.drafts + budget),
        _behind_gaps(logit_ends, left, layout.requests + budget),
        passes.cumprod(1).sum(dtype=torch.int32).reshape(1),
    )


def _behind_gaps(ends: Tensor, left: Tensor, count: int) -> Tensor:
    """Return (count,) the places in the whole of what stays: each is moved by all that left before its request."""
    import torch

    place = torch.arange(count, device=ends.device)
    gone = torch.cat([left.new_zeros(1), left.cumsum(0)]).long()
    return place + gone[torch.searchsorted(ends, place, right=True)]


def even_shares(drafts: Ints, budget: int) -> Ints:
    """Return (requests,) about equal shares of the budget, none above a request's drafts: a guess for the host."""
    shares = drafts * budget // max(int(drafts.sum()), 1)
    room = np.repeat(np.arange(len(drafts)), drafts - shares)[: budget - int(shares.sum())]
    np.add.at(shares, room, 1)
    return shares

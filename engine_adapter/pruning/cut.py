"""Which rows leave the forward pass, and where everything lies afterwards: pure index arithmetic, no vLLM, no torch.

Row j of a request that verifies k draft tokens holds token j (row 0: the last confirmed token) and tests token j+1.
Behind the first row whose check fails every row leaves; that row's own test stays, and no bonus token follows it
(docs/design/pruning.md says why nothing less is exact). For `Pruning` in forward pass and sampler, and to train heads.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import Bools, Ints


class CutBatch:
    """One step's shape: what is known of it before any verdict, so that behind layer L little is left to do.

    :param drafts: (requests,) draft tokens under verification.
    :param lengths: (requests,) rows of each request in the batch; those of its drafts and the one before are its last.
    :param spared: (draft tokens,) which of them pass unseen: nothing is known of their request's drafter.
    """

    __slots__ = ("drafts", "kernel", "lengths", "memory", "place", "rows", "spared")

    def __init__(self, drafts: Ints, lengths: Ints, spared: Bools) -> None:
        from ..pruning import cut_kernel

        self.kernel = cut_kernel
        self.drafts, self.lengths, self.spared = drafts, lengths, spared
        self.place: Ints = places(drafts)  # (draft tokens,) 0 is a request's first
        self.rows = int(lengths.sum())
        count, tokens = len(drafts), len(spared)
        wide, narrow = (count, count, self.rows, tokens), (2 * count + 1, 3 * count, tokens)
        self.memory = parts(wide, np.int64) + parts(narrow, np.int32)  # for the one cut that is made

    def kept(self, passes: Bools) -> Ints:
        """Return (requests,) how many of the drafts + 1 rows of each request stay, up to its first failing check.

        :param passes: (draft tokens,) whether the row before each token expects it to be accepted, request by request.
        """
        kept = np.empty_like(self.drafts)
        self.kernel.first_failures(passes, self.spared, self.drafts, kept)
        return kept


class Cut:
    """One batch's cut, and where everything lies behind it, in the batch's memory: a batch is cut once.

    :param batch: before the cut.
    :param kept: (requests,) of the drafts + 1 rows of each request, how many stay: 1..drafts + 1.
    """

    __slots__ = ("drafts", "ends", "kept", "most", "removed", "rows", "starts", "targets", "tested", "tests")

    def __init__(self, batch: CutBatch, kept: Ints) -> None:
        self.drafts, self.kept = batch.drafts, kept
        self.removed, self.tests, rows, tested, self.starts, self.ends, targets = batch.memory
        stay, tests, self.most = batch.kernel.cut(
            batch.lengths, self.drafts, kept, self.removed, self.tests, rows, tested, self.starts, self.ends, targets
        )  # fmt: skip
        self.rows: Ints = rows[:stay]  # (rows that stay,) of the whole batch
        self.tested: Ints = tested[:tests]  # (tested tokens,) of all draft tokens
        self.targets = targets[:tests]  # (tested tokens,) place in the sampler's rows

    @property
    def has_bonus(self) -> Bools:
        """Whether a request that accepts every tested token samples one more."""
        return self.kept > self.drafts

    def logit_rows(self) -> Ints:
        """Return which of the drafts + 1 logit rows per request stay."""
        counts = self.drafts + 1
        return np.flatnonzero(places(counts) < np.repeat(self.kept, counts))

    def sampler_rows(self) -> Ints:
        """Return for each row of the sampler, tests + 1 per request, its place among all logit rows.

        The sampler wants a row for the bonus token of every request; one without a bonus gets a copy of its last row,
        and what is sampled from it is thrown away.
        """
        starts, counts = np.cumsum(self.drafts + 1) - (self.drafts + 1), self.tests + 1
        rows: Ints = np.repeat(starts, counts) + np.minimum(places(counts), np.repeat(self.kept - 1, counts))
        return rows


def after_first_failure(drafts: Ints, passes: Bools) -> Cut:
    """Return the cut of requests that have no rows but those of their drafts."""
    batch = CutBatch(drafts, drafts + 1, np.zeros(len(passes), np.bool_))
    return Cut(batch, batch.kept(passes))


def parts(sizes: tuple[int, ...], kind: type[np.integer[Any]]) -> tuple[npt.NDArray[Any], ...]:
    """Return arrays of these sizes, one behind another in the same memory."""
    whole, ends = np.empty(sum(sizes), kind), list(accumulate(sizes))
    return tuple(whole[end - size : end] for size, end in zip(sizes, ends, strict=True))


def places(sizes: Ints) -> Ints:
    """Return 0, 1, ... within each group of `sizes[i]`."""
    ends = np.cumsum(sizes)
    within: Ints = np.arange(sizes.sum()) - np.repeat(ends - sizes, sizes)
    return within


def warm_up() -> None:
    """Have the loops compiled or read in, before a step waits for them."""
    after_first_failure(np.array([1]), np.array([False]))

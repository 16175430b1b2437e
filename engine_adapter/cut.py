"""Which rows leave the forward pass, and where everything lies afterwards: pure index arithmetic, no vLLM, no torch.

Row j of a request that verifies k draft tokens holds token j (row 0: the last confirmed token) and tests token j+1.
Behind the first row whose check fails every row leaves; that row's own test stays, and no bonus token follows it
(docs/pruning.md says why nothing less is exact). For `Pruning` in forward pass and sampler, and for training heads.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class Batch:
    """One step's shape: what is known of it before any verdict, so that behind layer L little is left to do.

    :param drafts: (requests,) draft tokens under verification.
    :param lengths: (requests,) rows of each request in the batch; those of its drafts and the one before are its last.
    :param spared: (draft tokens,) which of them pass unseen: nothing is known of their request's drafter.
    """

    __slots__ = ("behind", "drafts", "lengths", "owner", "place", "row_owner", "spared")

    def __init__(self, drafts: Ints, lengths: Ints, spared: Bools) -> None:
        requests = np.arange(len(drafts))
        self.drafts, self.lengths, self.spared = drafts, lengths, spared
        self.owner: Ints = np.repeat(requests, drafts)  # (draft tokens,) request
        self.place: Ints = places(drafts)  # (draft tokens,) 0 is a request's first
        self.row_owner: Ints = np.repeat(requests, lengths)  # (rows,) request
        self.behind: Ints = lengths[self.row_owner] - places(lengths)  # (rows,) 1 is a request's last

    def cut(self, passes: Bools) -> Cut:
        """Return the cut behind the first failing check of each request.

        :param passes: (draft tokens,) whether the row before each token expects it to be accepted, request by request.
        """
        kept = self.drafts + 1
        failed = np.flatnonzero(~(passes | self.spared))[::-1]  # backwards: what is written last stays, the first one
        kept[self.owner[failed]] = self.place[failed] + 1
        return Cut(self.drafts, kept)

    def rows(self, cut: Cut) -> Ints:
        """Return the rows of the whole batch that stay."""
        return np.flatnonzero(self.behind > cut.removed[self.row_owner])

    def tested(self, cut: Cut) -> Ints:
        """Return which of all draft tokens are tested."""
        return np.flatnonzero(self.place < cut.tests[self.owner])


class Cut:
    """One batch's cut.

    :param drafts: (requests,) draft tokens under verification.
    :param kept: (requests,) of the drafts + 1 rows of each request, how many stay: 1..drafts + 1.
    """

    __slots__ = ("drafts", "kept", "removed", "tests")

    def __init__(self, drafts: Ints, kept: Ints) -> None:
        self.drafts, self.kept = drafts, kept
        self.removed: Ints = drafts + 1 - kept  # (requests,) rows that leave
        self.tests: Ints = np.minimum(kept, drafts)  # (requests,) draft tokens that are still tested

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
    return Batch(drafts, drafts + 1, np.zeros(len(passes), np.bool_)).cut(passes)


def places(sizes: Ints) -> Ints:
    """Return 0, 1, ... within each group of `sizes[i]`."""
    ends = np.cumsum(sizes)
    within: Ints = np.arange(sizes.sum()) - np.repeat(ends - sizes, sizes)
    return within

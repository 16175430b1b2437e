"""Which rows leave the forward pass, and where everything lies afterwards: pure index arithmetic, no vLLM, no torch.

Row j of a request that verifies k draft tokens holds token j (row 0: the last confirmed token) and tests token j+1.
Behind the first row whose check fails every row leaves; that row's own test stays, and no bonus token follows it
(docs/pruning.md says why nothing less is exact). Used by `Pruning` in the forward pass and in the sampler.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Cut:
    """One batch's cut.

    :param drafts: (requests,) draft tokens under verification.
    :param kept: (requests,) of the drafts + 1 rows of each request, how many stay: 1..drafts + 1.
    """

    drafts: Ints
    kept: Ints

    @property
    def removed(self) -> Ints:
        """Rows that leave, per request."""
        return self.drafts + 1 - self.kept

    @property
    def tests(self) -> Ints:
        """Draft tokens that are still tested, per request."""
        return np.minimum(self.kept, self.drafts)

    @property
    def has_bonus(self) -> Bools:
        """Whether a request that accepts every tested token samples one more."""
        return self.kept > self.drafts

    def batch_rows(self, lengths: Ints) -> Ints:
        """Return the rows of the whole batch that stay.

        :param lengths: (requests,) rows of each request, prompt rows included; the tested ones are its last.
        """
        behind = np.repeat(np.cumsum(lengths), lengths) - np.arange(lengths.sum())  # 1 is a request's last row
        return np.flatnonzero(behind > np.repeat(self.removed, lengths))

    def logit_rows(self) -> Ints:
        """Return which of the drafts + 1 logit rows per request stay."""
        return _heads(self.drafts + 1, self.kept)

    def tested_places(self) -> Ints:
        """Return which of all draft tokens are tested."""
        return _heads(self.drafts, self.tests)

    def sampler_rows(self) -> Ints:
        """Return for each row of the sampler, tests + 1 per request, its place among all logit rows.

        The sampler wants a row for the bonus token of every request; one without a bonus gets a copy of its last row,
        and what is sampled from it is thrown away.
        """
        starts = np.cumsum(self.drafts + 1) - (self.drafts + 1)
        counts = self.tests + 1
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        rows: Ints = np.repeat(starts, counts) + np.minimum(within, np.repeat(self.kept - 1, counts))
        return rows


def after_first_failure(drafts: Ints, passes: Bools) -> Cut:
    """Return the cut behind the first failing check of each request.

    :param passes: (all draft tokens,) whether the row before each token expects it to be accepted, request by request.
    """
    kept = drafts + 1
    failed = np.flatnonzero(~passes)
    owner = np.repeat(np.arange(len(drafts)), drafts)[failed]
    np.minimum.at(kept, owner, failed - (np.cumsum(drafts) - drafts)[owner] + 1)
    return Cut(drafts, kept)


def _heads(sizes: Ints, kept: Ints) -> Ints:
    """Return the places of the first `kept[i]` of each group of `sizes[i]`."""
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return np.flatnonzero(within < np.repeat(kept, sizes))

"""The loops of a cut, compiled: behind layer L every cache is cold, and numpy's calls cost ten times what they do warm.

Used by cut.py, which imports it late: vLLM's CPU worker must be built before numba is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..arrays import Bools, Ints

if TYPE_CHECKING:
    from ..compiled import compiled
else:
    try:
        from ..compiled import compiled
    except ImportError as error:  # numba is missing or broken (benchmarks/gpu has none): the same loops as Python
        from ..operator_log import operator_log

        operator_log(__name__).warning("FASER cuts batches without compiled loops: %s", error)

        def compiled(function):
            """Leave a function as it is."""
            return function


Ints32 = npt.NDArray[np.int32]


@compiled
def first_failures(passes: Bools, spared: Bools, drafts: Ints, kept: Ints) -> None:
    """Write how many of each request's drafts + 1 rows stay: those up to its first check that fails.

    :param passes: (draft tokens,) checks, and `spared` which of them count as passed.
    :param kept: (requests,) the result.
    """
    token = 0
    for request in range(len(drafts)):
        kept[request] = drafts[request] + 1
        for place in range(drafts[request]):
            if not passes[token + place] and not spared[token + place]:
                kept[request] = place + 1
                break
        token += drafts[request]


@compiled
def lay_out(
    lengths: Ints, drafts: Ints, removed: Ints, tests: Ints, rows: Ints, tested: Ints, starts: Ints32, ends: Ints32,
    targets: Ints32,
) -> tuple[int, int, int]:  # fmt: skip
    """Write where everything lies behind the cut; parameters as in `Batch` and `Cut`.

    :param rows: (at most all rows,) of the whole batch, those that stay.
    :param tested: (at most all draft tokens,) of all draft tokens, those that are tested.
    :param starts: (requests + 1 and requests,) first row of each request among those that stay, and their number; then
        the rows that left.
    :param ends: (3 x requests,) draft tokens tested up to and with each request; the same with a row each for a bonus
        token; the place of that row.
    :param targets: (at most all draft tokens,) place of each tested token in the sampler's rows.
    :return: rows that stay, tokens that are tested, most rows of a request.
    """
    requests = len(drafts)
    row = token = stay = test = most = 0
    starts[0] = 0
    for request in range(requests):
        left = lengths[request] - removed[request]
        most = max(most, left)
        for place in range(left):
            rows[stay] = row + place
            stay += 1
        for place in range(tests[request]):
            tested[test] = token + place
            targets[test] = test + request
            test += 1
        starts[request + 1] = stay
        starts[requests + 1 + request] = removed[request]
        ends[request] = test
        ends[requests + request] = test + request + 1
        ends[2 * requests + request] = test + request
        row += lengths[request]
        token += drafts[request]
    return stay, test, most


@compiled
def cut(
    lengths: Ints, drafts: Ints, kept: Ints, removed: Ints, tests: Ints, rows: Ints, tested: Ints, starts: Ints32,
    ends: Ints32, targets: Ints32,
) -> tuple[int, int, int]:  # fmt: skip
    """Write (requests,) rows that leave and draft tokens that are still tested; then `lay_out`, in the same call."""
    for request in range(len(drafts)):
        removed[request] = drafts[request] + 1 - kept[request]
        tests[request] = min(kept[request], drafts[request])
    return lay_out(lengths, drafts, removed, tests, rows, tested, starts, ends, targets)

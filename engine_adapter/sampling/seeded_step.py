"""What the requests with a seed say in one step: their own draws, and drafts only as far as they are the same.

The draw at a position is one of the target's distribution there, made with noise of (seed, position). A draft is kept
while it equals the draw: where the drafter is sure of one token that happens with exactly the chance of vLLM's
rejection rule, and where it draws too, less often. What is said is the draw in any case, so no draft can change it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from .noise import draw, stream_keys

if TYPE_CHECKING:
    from torch import Tensor

GUARDED: Final = "draws by seed"
Guard = Callable[[str, Callable[[], None]], None]


class SeededStep:
    """The draws of one step; `rows` are the batch rows that have a seed."""

    def __init__(
        self, rows: list[int], seeds: Tensor, firsts: Tensor, tests: list[int], guard: Guard, draws_all: bool = False
    ) -> None:
        """Note what is known before the sampler runs.

        :param seeds: (rows,) int64.
        :param firsts: (rows,) int64, where in its sequence the first token is that is drawn.
        :param tests: draft tokens to verify, of every row of the batch.
        :param draws_all: nobody but these rows says anything in the step.
        """
        self.rows, self.tests, self.draws_all = rows, tests, draws_all
        self._seeds, self._firsts, self._guard = seeds, firsts, guard

    def put(self, logits: Tensor, tokens: Tensor) -> bool:
        """Put draws from `logits` (batch, vocabulary), behind all draft tokens, into `tokens` (batch,).

        Return False if that failed.
        """
        return self._done(lambda: self._put(logits, tokens))

    def _done(self, work: Callable[[], None]) -> bool:
        """Do something under the guard; return whether it went well."""
        is_done = False

        def whole() -> None:
            nonlocal is_done
            work()
            is_done = True

        self._guard(GUARDED, whole)
        return is_done

    def _put(self, logits: Tensor, tokens: Tensor) -> None:
        behind = self._firsts.new_tensor([self.tests[row] for row in self.rows])
        own = logits if len(self.rows) == len(logits) else logits[self.rows]
        drawn = draw(own, stream_keys(self._seeds, self._firsts + behind))
        tokens[self.rows] = drawn.to(tokens.dtype)

    def compare(self, logits: Tensor, drafts: Tensor, bonus: Tensor, output: Tensor) -> bool:
        """Put draws up to the first that is not the draft into `output` (batch, longest + 1); -1 behind them.

        Return False if that failed.

        :param logits: (draft tokens of all rows, vocabulary).
        :param bonus: (batch, 1) draws behind the last draft token.
        """
        return self._done(lambda: self._compare(logits, drafts, bonus, output))

    def _compare(self, logits: Tensor, drafts: Tensor, bonus: Tensor, output: Tensor) -> None:
        starts = [0, *accumulate(self.tests)]
        places = [(index, column) for index, row in enumerate(self.rows) for column in range(self.tests[row])]
        if not places:
            return
        indices, columns = map(list, zip(*places, strict=True))
        flat = [starts[self.rows[index]] + column for index, column in places]
        keys = stream_keys(self._seeds[indices], self._firsts[indices] + self._firsts.new_tensor(columns))
        drawn = _draws(logits[flat], keys, drafts[flat], columns)
        said, is_right = output[self.rows], output.new_zeros((len(self.rows), output.shape[1])).bool()
        said[indices, columns] = drawn.to(said.dtype)
        is_right[indices, columns] = drawn == drafts[flat]
        said[range(len(self.rows)), [self.tests[row] for row in self.rows]] = bonus[self.rows, 0].to(said.dtype)
        output[self.rows] = said.where(_is_said(is_right), -1)


def _draws(logits: Tensor, keys: Tensor, drafts: Tensor, columns: list[int]) -> Tensor:
    """Return the draw (draft tokens,) at each draft token; on a CPU -1 for those behind a wrong one."""
    if logits.device.type != "cpu":
        return draw(logits, keys)  # looking whether a draft was right would wait for the device
    drawn, is_right = keys.new_full(keys.shape, -1), True
    for place, column in enumerate(columns):
        is_right = column == 0 or (is_right and bool(drawn[place - 1] == drafts[place - 1]))
        if is_right:
            drawn[place] = draw(logits[place : place + 1], keys[place : place + 1])[0]
    return drawn


def _is_said(is_right: Tensor) -> Tensor:
    """Return which columns (rows, longest + 1) are said: the right drafts from the first on, and one behind them."""
    before = is_right.long().cumprod(1).roll(1, 1)
    before[:, 0] = 1
    return before.bool()

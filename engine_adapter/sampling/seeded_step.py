"""What requests with a seed say in one step: their own draws, and drafts only as far as they are the same.

The draw at a position is one of the target's distribution there, made with noise of (seed, position). A draft is kept
while it equals the draw: where the drafter is sure of one token that happens with exactly the chance of vLLM's
rejection rule, and where it draws too, less often. What is said is the draw in any case, so no draft can change it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from .noise import draw, draw_while_right, stream_keys

if TYPE_CHECKING:
    from torch import Tensor

GUARDED: Final = "draws by seed"
Guard = Callable[[str, Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class Stream:
    """How a batch row's tokens are drawn."""

    row: int
    seed: int = 0  # signed, of 64 bits
    is_greedy: bool = False  # no noise; such rows are here only to spare vLLM's own comparison


class SeededStep:
    """The draws of one step."""

    def __init__(
        self, streams: list[Stream], firsts: Tensor, tests: list[int], guard: Guard, draws_all: bool = False
    ) -> None:
        """Note what is known before the sampler runs.

        :param firsts: (streams,) int64, where in its sequence the first token is that is drawn.
        :param tests: draft tokens to verify, of every row of the batch.
        :param draws_all: nobody but these rows says anything in the step.
        """
        self.tests, self.draws_all = tests, draws_all
        self._streams, self._firsts, self._guard = streams, firsts, guard
        self._seeds = firsts.new_tensor([stream.seed for stream in streams])

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
        # vLLM takes the likeliest token of greedy rows itself.
        chosen = [index for index, stream in enumerate(self._streams) if not stream.is_greedy]
        rows = [self._streams[index].row for index in chosen]
        behind = self._firsts.new_tensor([self.tests[row] for row in rows])
        own = logits if len(rows) == len(logits) else logits[rows]
        drawn = draw(own, stream_keys(self._seeds[chosen], self._firsts[chosen] + behind))
        tokens[rows] = drawn.to(tokens.dtype)

    def compare(self, logits: Tensor, drafts: Tensor, bonus: Tensor, output: Tensor) -> bool:
        """Put draws up to the first that is not the draft into `output` (batch, longest + 1); -1 behind them.

        Return False if that failed.

        :param logits: (draft tokens of all rows, vocabulary).
        :param bonus: (batch, 1) draws behind the last draft token.
        """
        return self._done(lambda: self._compare(logits, drafts, bonus, output))

    def _compare(self, logits: Tensor, drafts: Tensor, bonus: Tensor, output: Tensor) -> None:
        rows, starts = [stream.row for stream in self._streams], [0, *accumulate(self.tests)]
        places = [(index, column) for index, row in enumerate(rows) for column in range(self.tests[row])]
        said, is_right = output[rows], output.new_zeros((len(rows), output.shape[1])).bool()
        if places:
            indices, columns = map(list, zip(*places, strict=True))
            flat = [starts[rows[index]] + column for index, column in places]
            own, held = (logits, drafts) if len(flat) == len(logits) else (logits[flat], drafts[flat])
            keys = stream_keys(self._seeds[indices], self._firsts[indices] + self._firsts.new_tensor(columns))
            is_greedy = [self._streams[index].is_greedy for index in indices]
            drawn = draw_while_right(own, keys, held, columns, is_greedy)
            said[indices, columns] = drawn.to(said.dtype)
            is_right[indices, columns] = drawn == held
        said[range(len(rows)), [self.tests[row] for row in rows]] = bonus[rows, 0].to(said.dtype)
        output[rows] = said.where(_is_said(is_right), -1)


def _is_said(is_right: Tensor) -> Tensor:
    """Return which columns (rows, longest + 1) are said: the right drafts from the first on, and one behind them."""
    before = is_right.long().cumprod(1).roll(1, 1)
    before[:, 0] = 1
    return before.bool()

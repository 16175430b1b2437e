"""The target's CUDA graphs in two halves, so that rows leave between them and every shape is still a captured one.

For each layer that has exit heads: a graph of the layers in front of it for every size that vLLM captured, and one of
the layers behind it. A step replays the first at its own size, then the second at the size of what stays. Both leave
their outputs where vLLM's whole graph does. Owned by `PruningV2`; without them it cuts eager steps only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..patches.pruning_graphs import (
    Output,
    ShortInputs,
    attention_to_capture,
    captured_shapes,
    capturing,
    first_half,
    outputs_of,
    recorded,
    second_half,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ..patches.pruning import PreparedStep, ShortBatch


class Middle(NamedTuple):
    """The stream in front of layer L, (rows, hidden) each."""

    hidden: Tensor
    residual: Tensor


class Halves:
    """The graphs of one layer."""

    _short: ShortInputs  # made where the first half first says how wide its states are

    def __init__(self, runner: Any, decoder: Any, layer: int, groups: list[list[Any]]) -> None:
        """Capture them, on a stream that can be.

        :param groups: attention of the layers from L on, with builders of their own
        """
        self._runner, self._manager = runner, runner.cudagraph_manager
        self._decoder, self._layer, self._groups = decoder, layer, groups
        self._states, self._auxiliary = outputs_of(self._manager)
        self._firsts: dict[Any, Any] = {}  # graphs, by vLLM's descriptor
        self._seconds: dict[Any, Any] = {}
        self._middle: Middle | None = None
        self._ends: list[Tensor] = []  # outputs of the second half: states, then auxiliary ones
        self.replays = 0  # of a second half
        self._early = 0  # auxiliary states that the first half has
        for desc in captured_shapes(runner):  # the largest first: the others fit into its memory
            for graphs, prepare in ((self._firsts, self._prepare_first), (self._seconds, self._prepare_second)):
                prepare(desc)()  # attention may prepare itself where it is first used
                graphs[desc] = recorded(self._manager, prepare(desc))

    @property
    def sizes(self) -> Sequence[int]:
        """Rows for which the layers behind were captured."""
        return sorted(desc.num_tokens for desc in self._seconds)

    def has(self, desc: Any) -> bool:
        """Tell whether a step of this shape can be replayed in halves."""
        return desc in self._firsts

    def replay_first(self, desc: Any) -> Middle:
        """Run the layers in front of L over all rows of a step; return the stream, of the whole shape."""
        assert self._middle is not None
        self._firsts[desc].replay()
        return Middle(*(each[: desc.num_tokens] for each in self._middle))

    def cut(self, desc: Any, step: PreparedStep, short: ShortBatch) -> Any:
        """Write the rows that stay where the second half reads them; return the shape that it has for so many."""
        assert self._middle is not None
        shape = self._shape(desc, len(short.rows))
        self._short.write(step, short, shape, *self._middle)
        return shape

    def replay_second(self, desc: Any, shape: Any, short: ShortBatch) -> None:
        """Run the layers from L on over the rows that stay; what left is zero in the outputs, and nobody reads it."""
        self._seconds[shape].replay()
        self.replays += 1
        rows, late = len(short.rows), self._auxiliary[self._early :]
        for whole, end in zip((self._states, *late), self._ends, strict=True):
            whole[: desc.num_tokens].zero_().index_copy_(0, short.rows, end[:rows])

    def _shape(self, desc: Any, rows: int) -> Any:
        """Return the smallest captured shape that so many rows fit into, of those that take what this one takes."""
        alike = (each for each in self._seconds if each.max_query_len == desc.max_query_len and each.num_tokens >= rows)
        return min(alike, key=lambda each: int(each.num_tokens))

    def _prepare_first(self, desc: Any) -> Callable[[], None]:
        """Return what the first graph of a shape holds."""
        inputs, rows = self._runner.input_buffers, desc.num_tokens
        token_ids, positions = inputs.input_ids[:rows], inputs.positions[:rows]
        attention = attention_to_capture(self._runner, desc)

        def run() -> None:
            with capturing(self._runner, desc, attention):
                found = first_half(self._decoder, self._layer, token_ids, positions)
            self._keep_middle(found)
            for whole, states in zip(self._auxiliary, found.auxiliary, strict=False):
                whole[:rows] = states

        return run

    def _keep_middle(self, found: Output) -> None:
        assert found.residual is not None
        if self._middle is None:
            most = len(self._states)
            self._short = ShortInputs(self._runner, self._groups, most, found)
            self._middle = Middle(self._short.hidden.clone(), self._short.residual.clone())
            self._early = len(found.auxiliary)
        for whole, states in zip(self._middle, (found.states, found.residual), strict=True):
            whole[: len(states)] = states

    def _prepare_second(self, desc: Any) -> Callable[[], None]:
        """Return what the second graph of a shape holds."""
        rows, short = desc.num_tokens, self._short
        positions, hidden, residual = short.positions[:rows], short.hidden[:rows], short.residual[:rows]
        attention = short.attention_to_capture(desc)

        def run() -> None:
            with capturing(self._runner, desc, attention):
                # Layers write to what they read; the next step writes it anew.
                found = second_half(self._decoder, self._layer, positions, hidden, residual)
            ends = [found.states, *found.auxiliary]
            if not self._ends:
                self._ends = [each.new_zeros((len(self._states), each.shape[1])) for each in ends]
            for whole, states in zip(self._ends, ends, strict=True):
                whole[:rows] = states

        return run

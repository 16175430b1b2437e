"""Cuts the target's forward pass of one step in two: behind layer L the rows leave that the step will not need.

Owned by the V1 runner mixin. Heads predict after layer L which draft tokens the target accepts; rows behind each
request's first predicted rejection are dropped from the remaining layers, the LM head and the sampler. The rules
that keep outputs exact are in cut.py and docs/design/pruning.md. Everything is built before anything is replaced, so
any failure is a step without pruning, logged once; vLLM's own tensors are never written to.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import Ints
from ..patches.pruning import (
    attention_layer,
    cut_attention,
    cut_common,
    decoder_of,
    forget_bonus,
    forget_narrowing,
    narrowed_logits,
    shortened_drafts,
    shortened_speculation,
    spread_logits,
    tracks_thinking,
)
from .cut import Cut, CutBatch, warm_up
from .verdict import Checks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from ..protocol import Prune
    from .verdict import TokenHeads

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Notes:
    """What the drafter noted in the last step, by batch row of that step."""

    row_of: dict[str, int]  # request id -> row
    candidates: Tensor | None  # (rows, longest draft, candidates)
    confidences: Tensor | None  # (rows, longest draft)


class Pruning:
    """One step at a time: `open` before the forward pass, `attached` around it, then `narrow` around the sampler."""

    def __init__(self, runner: Any, heads: TokenHeads) -> None:
        warm_up()
        self.heads = heads
        self.cut: Cut | None = None  # in force for the step under way
        self.is_on = True  # False after a failure
        self.layer: int | None = None  # behind which the heads looked in the step under way; None: they did not
        self.decide_s = 0.0  # wall time of the last decision: scoring, index arithmetic, metadata
        self._runner = runner
        self._model = runner.get_model()
        layers = list(decoder_of(self._model).layers)
        names = [attention_layer(layer) for layer in layers]
        self._decoder_layers = layers
        self._behind = {layer: frozenset(names[layer:]) for layer in heads.layers}  # attention layers from there on
        self._states, self._hidden, self._residual = RowBuffer(), RowBuffer(), RowBuffer()
        self._step: _VerifiedStep | None = None

    def open(self, prune: Prune | None, metadata: Any, common: Any, notes: Notes | None) -> bool:
        """Take in what the step will verify; False if it is not pruned.

        :param metadata: vLLM's SpecDecodeMetadata, None without drafts.
        :param common: vLLM's CommonAttentionMetadata.
        """
        self.forget_step()
        if not self.could_open(prune, metadata, common) or (self.heads.candidates and notes is None):
            return False
        assert prune is not None
        self._step = _VerifiedStep(prune, metadata, common, notes, list(self._runner.input_batch.req_ids))
        return True

    def could_open(self, prune: Prune | None, metadata: Any, common: Any) -> bool:
        """Tell whether a step is one to prune, whatever its drafter noted; parameters as of `open`."""
        return (
            self.obeys(prune)
            and metadata is not None
            and common is not None
            and any(metadata.num_draft_tokens)
            and not tracks_thinking(self._runner)
        )

    def obeys(self, prune: Prune | None) -> bool:
        """Tell whether an order asks for something that the heads can do."""
        return self.is_on and prune is not None and prune.layer in self.heads.layers

    def forget_step(self) -> None:
        """Begin a step: nothing was looked at yet, nothing left."""
        self.cut, self._step, self.layer, self.decide_s = None, None, None, 0.0
        forget_narrowing(self._model)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Let the decoder's layers from L on see the rows that stay; whole again behind the block."""
        assert self._step is not None
        first, *later = self._decoder_layers[self._step.prune.layer :]
        handles = [first.register_forward_pre_hook(self._enter)]
        handles += [layer.register_forward_pre_hook(self._pass_on) for layer in later]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, _layer: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        started = time.perf_counter()
        try:
            return self._cut_rows(arguments)
        except Exception:
            self.is_on, self.cut = False, None
            logger.exception("FASER prunes no more after a failure; vLLM verifies every row")
            return None
        finally:
            self.decide_s = time.perf_counter() - started

    def _cut_rows(self, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        step = self._step
        assert step is not None
        positions, hidden, residual, *rest = arguments
        layer = step.prune.layer
        decision = self.heads.decide(layer, step.prune.threshold, self._checks(step, hidden, residual), step.batch)
        self.layer = layer
        cut = Cut(step.batch, decision.kept)
        if len(cut.rows) == step.batch.rows:
            return None
        index = _index(cut.rows, hidden) if decision.rows is None else decision.rows
        kept = self._compacted(index, positions, hidden, residual)
        common = cut_common(step.common, index, cut, kept[0])
        short = shortened_speculation(step.metadata, cut)
        cut_attention(self._runner, common, self._behind[layer])  # builds first, replaces last
        step.index, step.positions, step.short, self.cut = index, kept[0], short, cut
        return (*kept, *rest)

    def _checks(self, step: _VerifiedStep, hidden: Tensor, residual: Tensor) -> Checks:
        """Return what the heads may look at."""
        states = self._states.picked(hidden, step.tested)
        states += self._residual.picked(residual, step.tested)
        return step.checks(states)

    def _compacted(self, index: Tensor, positions: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        """Return the rows that stay. Layers may write to them: they are nobody else's."""
        memory = (self._hidden, self._residual)
        return positions.index_select(0, index), *(m.picked(s, index) for m, s in zip(memory, states, strict=True))

    def _pass_on(self, _layer: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.cut is None:
            return None
        assert self._step is not None
        return (self._step.positions, *arguments[1:])

    def spread(self, output: Any) -> Any:
        """Return the forward pass's output over the original rows; dropped rows are zero and nobody reads them.

        With auxiliary states (EAGLE-3) the layers up to L have every row already.
        """
        if self.cut is None:
            return output
        assert self._step is not None
        rows, index = int(self._step.common.num_actual_tokens), self._step.index
        narrowed_logits(self._model, _index(self.cut.logit_rows(), index))
        if isinstance(output, tuple):
            hidden, auxiliary = output
            return _spread(hidden, index, rows), [_spread(state, index, rows) for state in auxiliary]
        return _spread(output, index, rows)

    def widen_logits(self) -> None:
        """Give the logits one row per scheduled draft token again: a grammar's mask has them."""
        if self.cut is not None:
            assert self._step is not None
            rows = int((self.cut.drafts + 1).sum())
            spread_logits(self._runner, _index(self.cut.logit_rows(), self._step.index), rows)

    def sample(self, sample: Callable[[Any, Any], Any], logits: Tensor, metadata: Any) -> Any:
        """Run vLLM's rejection sampler on what is left of the step."""
        cut, step = self.cut, self._step
        if cut is None or metadata is None:
            return sample(logits, metadata)
        assert step is not None
        rows = cut.sampler_rows()
        if logits.shape[0] != int((cut.drafts + 1).sum()):
            rows = np.searchsorted(cut.logit_rows(), rows)
        with shortened_drafts(self._runner, cut.tests.tolist()):
            output = sample(logits[_index(rows, logits)], step.short)
        ends = np.flatnonzero(~cut.has_bonus)
        forget_bonus(output, _index(ends, logits), _index(cut.tests[ends], logits))
        return output

    def pruned(self) -> list[int]:
        """Return per batch row how many rows left the last forward pass; empty: none."""
        return [] if self.cut is None else [int(rows) for rows in self.cut.removed]

    def saved_rows(self) -> float:
        """Return the rows that left the last forward pass, each as the share of the layers that it was spared."""
        if self.cut is None or self.layer is None:
            return 0.0
        depth = len(self._decoder_layers)
        return float(self.cut.removed.sum()) * (depth - self.layer) / depth


class RowBuffer:
    """Memory for rows that are picked out of the batch in every step: fresh memory of that size costs page faults.

    Grows to the largest batch seen; what it returns is overwritten by the next call.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def picked(self, states: Tensor, index: Tensor) -> Tensor:
        """Return the rows `index` of states (rows, width)."""
        import torch

        memory, count = self._memory, len(index)
        if memory is None or len(memory) < count or memory.shape[1:] != states.shape[1:]:
            memory = self._memory = torch.empty_like(states)
        return torch.index_select(states, 0, index, out=memory[:count])


class _VerifiedStep:
    """What one forward pass verifies: everything about it that is known before it begins."""

    def __init__(self, prune: Prune, metadata: Any, common: Any, notes: Notes | None, request_ids: list[str]) -> None:
        self.prune, self.metadata, self.common, self._notes = prune, metadata, common, notes
        self.index: Any = None
        self.positions: Any = None
        self.short: Any = None
        drafts: Ints = np.asarray(metadata.num_draft_tokens, dtype=np.int64)
        starts: Ints = common.query_start_loc_cpu[: len(drafts) + 1].numpy().astype(np.int64)
        rows = np.asarray([-1 if notes is None else notes.row_of.get(name, -1) for name in request_ids], np.int64)
        note_rows: Ints = np.repeat(rows, drafts)
        # What the drafter's notes lack is left alone; without notes the heads judge by the states only.
        self.batch = CutBatch(drafts, starts[1:] - starts[:-1], (note_rows < 0) & (notes is not None))
        self.tested = metadata.logits_indices[metadata.target_logits_indices]  # rows that test a draft token
        self._columns = _index(self.batch.place, self.tested)
        self._note_rows = _index(np.maximum(note_rows, 0), self.tested)

    def checks(self, states: Tensor) -> Checks:
        """Return what is known of the draft tokens, with the states of the rows that test them."""
        candidates = confidences = None
        if self._notes is not None and self._notes.candidates is not None:
            assert self._notes.confidences is not None
            at = self._note_rows, self._columns
            candidates, confidences = self._notes.candidates[at], self._notes.confidences[at]
        return Checks(states, self.metadata.draft_token_ids, candidates, confidences, self._columns + 1)


def _index(values: Ints, like: Tensor) -> Any:
    import torch

    return torch.from_numpy(values).to(like.device)


def _spread(states: Tensor, index: Tensor, rows: int) -> Tensor:
    if states.shape[0] == rows:
        return states
    return states.new_zeros((rows, *states.shape[1:])).index_copy_(0, index, states)

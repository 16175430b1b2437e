"""Cuts the target's forward pass on vLLM's V2 runner: behind layer L a number of rows goes on that the host has fixed.

Which ones, the device alone decides (prefixes.py); nobody waits for it, so that asynchronous scheduling stays
asynchronous and every shape is known beforehand. What left counts as rejected: at most as many tokens as rows stayed
are said, so that the row that was cut behind still tests its token, and nothing follows it (docs/design/pruning.md).
Owned by runner_v2.py. Everything is built before anything is replaced, so that a failure is a step without pruning.
A step that runs the model is cut by hooks in front of its layers, one that replays a graph by two graphs (halves.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..arrays import Ints
from ..host_copy import HostCopy
from ..operator_log import operator_log
from ..patches.pruning import (
    PreparedStep,
    ShortBatch,
    attention_layer,
    capped,
    decoder_of,
    narrower_logits,
    on_target_device,
    shorter_attention,
)
from ..patches.pruning_graphs import capture_stream, halves_refusal, own_groups, replay_instead
from .halves import Halves
from .prefixes import DraftLayout, even_shares, staying_rows
from .row_budget import RowBudget
from .verdict import Checks

if TYPE_CHECKING:
    from torch import Tensor

    from ..drafting.candidates_v2 import CandidatesV2
    from ..protocol import Prune
    from .prefixes import StayingRows
    from .verdict import TokenHeads

logger = operator_log(__name__)

ANY: Final = 1 << 30  # tokens of a request in a step, where nothing of it left
LOOK: Final = "look"  # the moment of a step at which the heads begin
CUT: Final = "cut"  # ... and at which the rows have left


class PruningV2:
    """One step at a time: `open` before the forward pass, `sample` around the sampler."""

    def __init__(
        self, runner: Any, heads: TokenHeads, notes: CandidatesV2 | None, is_pinned: bool, mark: Callable[[str], None]
    ) -> None:
        """`notes`: what the drafter noted, for heads that ask for it; `mark`: notes a moment of the step."""
        self.heads, self.is_on = heads, True  # off after a failure
        self._runner, self._notes, self._is_pinned, self._mark = runner, notes, is_pinned, mark
        self._model = runner.get_model()
        self._decoder = decoder_of(self._model)
        self._layers = list(self._decoder.layers)
        names = [attention_layer(layer) for layer in self._layers]
        self._behind = {layer: own_groups(runner, names[layer:]) for layer in heads.layers}  # attention from there on
        self._halves: dict[int, Halves] = {}
        self.budgets = {layer: RowBudget() for layer in heads.layers}
        self._move = on_target_device(runner)
        self._step: CutStep | None = None
        self._handles: list[Any] = []

    def capture(self) -> None:
        """Capture the target in two halves for each layer that has heads; once vLLM has captured it whole.

        Raise ValueError where that cannot be; whatever else goes wrong, no step that replays a graph is pruned.
        """
        runner, halves = self._runner, dict[int, Halves]()
        if reason := halves_refusal(runner):
            raise ValueError(reason)
        with capture_stream(runner):  # one for all: memory is taken again on the same stream only
            for layer in self.heads.layers:
                halves[layer] = Halves(runner, self._decoder, layer, self._behind[layer])
            self._warm_up()
        self.budgets = {layer: RowBudget(each.sizes) for layer, each in halves.items()}
        self._halves = halves
        replay_instead(runner.cudagraph_manager, self._replay)

    def _warm_up(self) -> None:
        """Choose once for each octave of requests: a kernel is compiled for each, and no step shall wait for that."""
        longest, most = int(self._runner.num_speculative_steps), int(self._runner.max_num_reqs)
        for requests in (1 << power for power in range(most.bit_length())):
            drafts = np.full(requests, longest)
            layout = DraftLayout.of(drafts, drafts + 1, self._move)
            chances = layout.owner.float() * 0.0
            _chooser(chances)(chances, 0.5, layout, requests)

    def release(self) -> None:
        """Let go of the halves, and of their memory: vLLM measures with graphs that it then throws away."""
        self._halves = {}
        replay_instead(self._runner.cudagraph_manager, None)

    @property
    def replays(self) -> int:
        """How many steps replayed two halves."""
        return sum(each.replays for each in self._halves.values())

    def begin(self) -> None:
        """Begin a step: nothing is looked at yet, nothing left."""
        self._detach()
        self._step = None

    def could_open(self, prune: Prune | None, batch: Any) -> bool:
        """Tell whether a step is one to prune."""
        is_noted = not self.heads.candidates or (self._notes is not None and self._notes.is_on)
        is_asked = self.is_on and prune is not None and prune.layer in self.heads.layers
        return is_asked and is_noted and bool(batch.num_draft_tokens)

    def open(self, prune: Prune, prepared: PreparedStep) -> None:
        """Look at this step behind layer L of its forward pass, and cut it there."""
        step = CutStep(prune, prepared, self._move)
        step.budget = self.budgets[prune.layer].draft_rows(step.layout.rows, step.layout.drafts, prune.threshold)
        first, *later = self._layers[prune.layer :]
        self._handles = [first.register_forward_pre_hook(self._enter)]
        if step.budget is not None:
            self._handles += [layer.register_forward_pre_hook(self._pass_on) for layer in later]
            self._handles.append(self._model.register_forward_hook(self._spread))
        self._step = step

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, _layer: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        try:
            self._mark(LOOK)
            return self._cut_rows(arguments)
        except Exception:
            self.fail("FASER prunes no more after a failure; vLLM verifies every row")
            return None
        finally:
            self._mark(CUT)

    def fail(self, said: str) -> None:
        """Prune no more; from an exception's handler."""
        self.is_on, self._step = False, None  # hooks that hang on layers do nothing from here on
        logger.exception(said)

    def _cut_rows(self, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        step = self._step
        assert step is not None
        positions, hidden, residual, *rest = arguments
        plan = self._choose(step, hidden, residual)
        if step.budget is None:
            step.passing = plan.passing
            return None
        kept = tuple(each.index_select(0, plan.rows) for each in (positions, hidden, residual))
        short = step.short(plan, kept[0])
        shorter_attention(self._runner, step.prepared, self._behind[step.prune.layer], short)
        step.take(plan, kept[0])
        return (*kept, *rest)

    def _choose(self, step: CutStep, hidden: Tensor, residual: Tensor) -> StayingRows:
        layer, threshold = step.prune.layer, step.prune.threshold
        chances = self.heads.chances(layer, threshold, step.checks(hidden, residual, self._notes))
        return _chooser(chances)(chances, threshold, step.layout, step.rows_to_keep)

    def _replay(self, desc: Any) -> bool:
        """Replay a step's halves, with what leaves between them; False: it is no step to prune, or that failed.

        The whole graph then writes anew whatever the first half wrote.
        """
        step = self._step
        halves = None if step is None or step.is_replayed else self._halves.get(step.prune.layer)
        if step is None or halves is None or not halves.has(desc):
            return False
        step.is_replayed = True  # what vLLM replays beside its steps, to warm up, is none of them
        try:
            self._replay_halves(step, halves, desc)
        except Exception:
            self.fail("FASER prunes no more after a failure; vLLM verifies every row")
            return False
        return True

    def _replay_halves(self, step: CutStep, halves: Halves, desc: Any) -> None:
        middle = halves.replay_first(desc)
        self._mark(LOOK)
        plan = self._choose(step, *middle)
        positions = step.prepared.batch.positions.index_select(0, plan.rows)
        short = step.short(plan, positions)
        shape = halves.cut(desc, step.prepared, short)
        self._mark(CUT)
        halves.replay_second(desc, shape, short)
        if step.budget is None:
            step.passing = plan.passing
        else:
            step.take(plan, positions)

    def _pass_on(self, _layer: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        step = self._step
        return None if step is None or step.plan is None else (step.positions, *arguments[1:])

    def _spread(self, _model: Any, _arguments: Any, output: Any) -> Any:
        """Return the forward pass's output over all rows; those that left are zero, and nobody reads them.

        With auxiliary states (EAGLE-3) the layers up to L have every row already.
        """
        step = self._step
        if step is None or step.plan is None:
            return output
        rows, index = int(step.prepared.batch.num_tokens), step.plan.rows
        if isinstance(output, tuple):
            hidden, auxiliary = output
            return _over_all(hidden, index, rows), [_over_all(state, index, rows) for state in auxiliary]
        return _over_all(output, index, rows)

    def sample(self, sample: Callable[[], Any]) -> Any:
        """Run vLLM's sampler; what left counts as rejected."""
        step = self._step
        self._detach()
        if step is None or step.plan is None:
            return sample()
        with narrower_logits(self._model, step.plan.logits):
            sampled = sample()
        step.counts = sampled[1]
        return capped(sampled, step.most)

    def told(self) -> CutNotes | None:
        """Return what the host will know of this step, on its way there; None if nobody looked."""
        step = self._step
        if step is None or step.passing is None:
            return None
        return CutNotes(step, self._is_pinned, self.budgets[step.prune.layer], len(self._layers))


class CutStep:
    """What one forward pass verifies, and what of it stays."""

    is_replayed = False
    budget: int | None = None  # draft rows that go on behind the layer; None: all, nothing is cut
    passing: Tensor | None = None  # (1,) None: nobody has looked yet
    plan: StayingRows | None = None  # None: nothing left
    most: Tensor  # (requests,) tokens that may be said
    positions: Tensor  # (rows that stay,)
    counts: Tensor  # (requests,) tokens that would have been said

    def __init__(self, prune: Prune, prepared: PreparedStep, move: Callable[[Any], Tensor]) -> None:
        self.prune, self.prepared = prune, prepared
        batch = prepared.batch
        self._drafts: Ints = batch.num_draft_tokens_per_req.astype(np.int64)
        self._lengths: Ints = batch.num_scheduled_tokens.astype(np.int64)
        self.layout = DraftLayout.of(self._drafts, self._lengths, move)

    def checks(self, hidden: Tensor, residual: Tensor, notes: CandidatesV2 | None) -> Checks:
        """Return what is known of the draft tokens, with the states of the rows that test them."""
        import torch

        batch, owner, place = self.prepared.batch, self.layout.owner.long(), self.layout.place.long()
        logit_rows = torch.arange(len(owner), device=owner.device) + owner  # each request has one more than it drafts
        tested = batch.logits_indices.index_select(0, logit_rows).long()
        states = hidden.index_select(0, tested) + residual.index_select(0, tested)
        candidates = confidences = None
        if notes is not None:
            candidates, confidences = notes.of(batch.idx_mapping.index_select(0, owner), place)
        return Checks(states, batch.input_ids.index_select(0, tested + 1), candidates, confidences, place + 1)

    @property
    def rows_to_keep(self) -> int:
        """How many draft rows go on."""
        return self.layout.drafts if self.budget is None else self.budget

    def short(self, plan: StayingRows, positions: Tensor) -> ShortBatch:
        """Return the rows that stay, for whoever reads them; `positions`: theirs."""
        return ShortBatch(plan.rows, positions, plan.starts, self._guessed_starts(), plan.left)

    def take(self, plan: StayingRows, positions: Tensor) -> None:
        """Note that a plan is in force."""
        self.passing, self.plan, self.positions = plan.passing, plan, positions
        self.most = plan.kept.masked_fill(plan.left == 0, ANY)

    def _guessed_starts(self) -> Ints:
        """Return about where each request's rows begin behind the cut."""
        shares = self._lengths - self._drafts + even_shares(self._drafts, self.rows_to_keep)
        starts: Any = np.concatenate([[0], np.cumsum(shares)]).astype(np.int32)
        return starts  # type: ignore[no-any-return]


class CutNotes:
    """What a cut did, on its way to the host."""

    def __init__(self, step: CutStep, is_pinned: bool, budget: RowBudget, layers: int) -> None:
        import torch

        assert step.passing is not None
        self.layer, self._budget, self._drafts = step.prune.layer, budget, step.layout.drafts
        self.saved_rows, told = 0.0, step.passing
        if step.plan is not None and step.budget is not None:
            self.saved_rows = (self._drafts - step.budget) * (layers - self.layer) / layers
            is_over = (step.plan.left > 0) & (step.counts > step.plan.kept)
            told = torch.cat([step.passing, step.plan.left, is_over.int()])
        self._copy = HostCopy(told if is_pinned else told.clone(), is_pinned)

    def values(self) -> tuple[list[int], list[bool]] | None:
        """Return rows that left, by batch row, and whose last tested token was accepted; both empty without a cut.

        None while they are under way.
        """
        told = self._copy.values()
        if told is None:
            return None
        passing, *rest = told
        self._budget.note(self._drafts, passing)
        half = len(rest) // 2
        return rest[:half], [bool(each) for each in rest[half:]]


def _chooser(chances: Tensor) -> Callable[[Tensor, float, DraftLayout, int], StayingRows]:
    if chances.is_cuda:
        try:
            from .prefix_kernel import staying_rows as by_kernel
        except ImportError:  # a CUDA build without Triton
            return staying_rows
        return by_kernel
    return staying_rows


def _over_all(states: Tensor, index: Tensor, rows: int) -> Tensor:
    if states.shape[0] == rows:
        return states
    return states.new_zeros((rows, *states.shape[1:])).index_copy_(0, index, states)

"""Ragged drafting on the V1 runner: a request leaves the draft batch after its own number of tokens.

`adopt` puts a mixin on the drafter that vLLM built; the runner mixin sets `lengths` before each call. Lengths never
depend on a drawn token's value, so drafts stay lossless; any failure or unknown case is vLLM's own drafting, cut
to length afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ..operator_log import operator_log
from ..patches.v1 import (
    DrafterHooks,
    UndraftedStep,
    advance_positions,
    draft_context,
    draft_inputs,
    draft_logits,
    keep_draft_probabilities,
    pad_batch,
    sample_draft,
)
from ..steering.stop_rule import DraftEnds
from .candidates import CandidateBook
from .catch_up import CatchUp, FirstRows
from .draft_batch import (
    DraftBatch,
    draft_metadata,
    index_of,
    narrow_metadata,
    narrow_sampling,
    shape_metadata,
)
from .draft_notes import ConfidenceBook, top_probability

if TYPE_CHECKING:
    from torch import Tensor

    from ..protocol import StopRule

logger = operator_log(__name__)

MODEL_METHODS: Final = frozenset({"draft_model", "eagle", "eagle3"})
# Optional per-request fields of vLLM's attention metadata that a cut batch does not carry on.
FOREIGN_METADATA: Final = ("dcp_local_seq_lens", "encoder_seq_lens", "mm_req_doc_ranges", "rswa_prefix_lens")


@dataclass(slots=True)
class FirstPass:
    """What the drafter's first pass left: its outputs and where each request's last row is."""

    indices: Tensor  # (requests,) row of each request's last token
    metadata: Any  # CommonAttentionMetadata of the pass; never changed here
    last: Tensor  # (rows, hidden size) what the LM head reads
    hidden: Tensor  # (rows, hidden size) what the next pass reads


class RaggedModelDrafter(DrafterHooks):
    """Mixin in front of DraftModelProposer and EagleProposer."""

    lengths: list[int] | None = None  # per batch row; None: no opinion, vLLM's own drafting
    is_ragged = True  # False after a failure
    follows: list[bool] | None = None  # per batch row in the middle of its prompt: will draft, so keep it in step
    catch_up: CatchUp | None = None  # None: vLLM's own first pass, over every row of every step
    first_rows = 0  # rows of the last first pass
    caught_up = 0  # missed tokens that the last drafting made up for
    rounds: tuple[int, ...] = ()  # rows that drafted in each round of the last drafting
    stop: StopRule | None = None  # ends drafts within `lengths`; needs a book
    has_book = False  # whether to note confidences
    book: ConfidenceBook | None = None  # of the last drafting
    candidates = 0  # likely tokens to note at each position, for exit heads (candidates.py)
    candidate_book: CandidateBook | None = None  # of the last drafting
    must_cut = False  # a sequence is longer than the drafter's context: vLLM's own pass over all rows would not do
    ends: list[int] | None = None  # per batch row, tokens the last drafting hands over; None: `lengths`
    _drafting: list[int] | None = None  # batch rows of the pass under way; None: all
    _first: tuple[Any, Any] | None = None

    def greedy_tokens(self, hidden: Tensor, inherited: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the most likely tokens; on a CPU by max, which is six times faster than argmax over bf16."""
        if (
            (hidden.device.type != "cpu" and self.book is None)
            or self.use_local_argmax_reduction  # type: ignore[attr-defined]
            or self.use_heterogeneous_vocab  # type: ignore[attr-defined]
        ):
            return inherited(hidden)
        logits, offsets = draft_logits(self.model, hidden)  # type: ignore[attr-defined]
        tokens: Tensor = logits.max(dim=-1).indices
        self._note(logits, tokens, offsets)
        return tokens if offsets is None else tokens + offsets[tokens]

    def before_draw(self, logits: Tensor) -> None:
        """Note the confidences; the drafter draws at the request's temperature, confidence is without it."""
        if self.book is not None:
            self._note(logits, logits.max(dim=-1).indices)

    def _note(self, logits: Tensor, tops: Tensor, offsets: Tensor | None = None) -> None:
        if self.book is None:
            return
        try:
            confidences = top_probability(logits, tops)
            self.book.note(self._drafting, confidences)
            if self.candidate_book is not None:
                likely = logits.topk(self.candidate_book.count, dim=-1).indices
                likely = likely if offsets is None else likely + offsets[likely]
                self.candidate_book.note(self._drafting, likely, confidences)
        except Exception:
            self.book, self.has_book = None, False
            logger.exception("FASER records no confidences any more after a failure; drafting goes on")

    def set_inputs_first_pass(self, *args: Any, **kwargs: Any) -> Any:
        """Keep where each request's last row is; the inputs are vLLM's."""
        prepared = super().set_inputs_first_pass(*args, **kwargs)  # type: ignore[misc]
        self._first = prepared[1], prepared[2]
        return prepared

    def sit_out(self, lengths: list[int], step: UndraftedStep) -> Tensor | None:
        """Return drafts of no length for a step in which nobody drafts or follows; None: `propose` has to be asked.

        vLLM prepares the pass in every step; where speculation does not pay, nobody should pay for that.
        """
        catch_up = self.catch_up
        if catch_up is None or not catch_up.can_keep(step.hidden) or not self.can_cut(lengths, 0, step.metadata):
            return None
        catch_up.keep(step.slots, step.tokens, step.hidden)
        self.ends, self.rounds, self.caught_up, self.first_rows = list(lengths), (), 0, 0
        self.num_speculative_tokens = 0
        self._open_book()
        keep_draft_probabilities(self, None)
        return step.tokens.new_zeros((len(lengths), 0), dtype=_int64())

    def propose(self, num_speculative_tokens: int, **inputs: Any) -> Tensor:
        """Return drafts (requests, num_speculative_tokens); row i holds its first `lengths[i]` columns."""
        inherited: Callable[..., Tensor] = super().propose  # type: ignore[misc]
        lengths = self.lengths
        self.ends = None
        self.caught_up = self.first_rows = 0
        self.rounds = (inputs["common_attn_metadata"].batch_size(),) * num_speculative_tokens  # if vLLM drafts
        self._open_book()
        if self.catch_up is not None and not self.catch_up.can_keep(inputs["target_hidden_states"]):
            self.catch_up = None
            logger.info("FASER lets the drafter skip nothing: target states of this KV cache need too much memory")
        if not self.can_cut(lengths, num_speculative_tokens, inputs["common_attn_metadata"]):
            self.catch_up = None  # it no longer sees every row
            return inherited(num_speculative_tokens, **inputs)
        assert lengths is not None
        try:
            return self._propose_ragged(inherited, lengths, num_speculative_tokens, inputs)
        except Exception:
            self.is_ragged, self.catch_up = False, None
            self.rounds = (len(lengths),) * num_speculative_tokens
            self._open_book()
            logger.exception("FASER's ragged drafting failed; vLLM's own drafting takes over, cut to length")
            if self.must_cut:
                return self._no_drafts(len(lengths), inputs["next_token_ids"])
            return inherited(num_speculative_tokens, **inputs)
        finally:
            self._first = None

    def _no_drafts(self, requests: int, like: Tensor) -> Tensor:
        self.ends, self.rounds = [0] * requests, ()
        return like.new_zeros((requests, 0), dtype=_int64())

    def _open_book(self) -> None:
        self.book = ConfidenceBook() if self.has_book and self.lengths is not None else None
        self.candidate_book = CandidateBook(self.candidates) if self.candidates and self.book is not None else None
        self._drafting = None

    def can_cut(self, lengths: list[int] | None, longest: int, metadata: Any) -> bool:
        """Tell whether a pass over this batch can be cut to the requests that draft up to `longest` tokens."""
        return (
            lengths is not None
            and self.is_ragged
            and len(lengths) == metadata.batch_size()
            and (
                min(lengths, default=longest) < longest
                or self.catch_up is not None
                or (self.stop is not None and longest > 0)
            )
            and metadata.causal is True
            and all(getattr(metadata, name, None) is None for name in FOREIGN_METADATA)
        )

    def _propose_ragged(
        self, inherited: Callable[..., Tensor], lengths: list[int], longest: int, inputs: dict[str, Any]
    ) -> Tensor:
        self.rounds, self.num_speculative_tokens = (), longest
        keep_draft_probabilities(self, None)
        drafts: Tensor = inputs["next_token_ids"].new_zeros((len(lengths), longest), dtype=_int64())
        step = self._first_rows(lengths, inputs)
        ready = set(step.ready)
        lengths = [length if row in ready else 0 for row, length in enumerate(lengths)]
        self.ends = lengths
        if not step.rows:
            return drafts
        first = self._run_first_pass(inherited, longest, step)
        if not ready:
            return drafts
        ends = DraftEnds(lengths)
        batch, probabilities = self._open_batch(first, step, inputs["sampling_metadata"])
        store = _Store(drafts)
        store.put(batch.rows, 0, batch.tokens, probabilities)
        self._judge(ends, 0, batch.rows)
        rounds = [len(batch.rows)]
        for column in range(1, longest):
            places = [place for place, row in enumerate(batch.rows) if ends.lengths[row] > column]
            if not places:
                break
            if len(places) < len(batch.rows):
                batch.keep(places)
            probabilities = self._draft_one(batch, column)
            store.put(batch.rows, column, batch.tokens, probabilities)
            self._judge(ends, column, batch.rows)
            rounds.append(len(places))
        self.rounds = tuple(rounds)
        self.ends = ends.lengths
        keep_draft_probabilities(self, store.probabilities)
        return drafts

    def _judge(self, ends: DraftEnds, column: int, rows: list[int]) -> None:
        # Exact: a confidence depends on the tokens before its own only, so whether a token is dropped never depends
        # on its value; the step then samples from the target after the last token kept, as after any shorter draft.
        if self.stop is not None and self.book is not None and self.book.has_column(column):
            ends.judge(self.stop, column + 1, rows, self.book.newest())

    def _first_rows(self, lengths: list[int], inputs: dict[str, Any]) -> FirstRows:
        if self.catch_up is None:
            ready = [row for row, length in enumerate(lengths) if length > 0]
            return FirstRows(list(range(len(lengths))), ready, inputs, 0)
        step = self.catch_up.plan(lengths, self.follows or [False] * len(lengths), inputs)
        self.caught_up = step.missed
        return step

    def _run_first_pass(self, inherited: Callable[..., Tensor], longest: int, step: FirstRows) -> FirstPass:
        # Asked for no tokens, vLLM runs the pass that keeps the drafter's KV cache in step and stops before the
        # LM head (0.32 llm_base_proposer.py:617). Only some of its requests need the rest.
        with recorded(self.model) as outputs:  # type: ignore[attr-defined]
            inherited(0, **step.inputs)
        self.first_rows = len(step.inputs["target_token_ids"])
        self.num_speculative_tokens = longest
        assert self._first is not None
        indices, metadata = self._first
        output = outputs[-1]
        last, hidden = output if self.model_returns_tuple() else (output, output)  # type: ignore[attr-defined]
        return FirstPass(indices, metadata, last, hidden)

    def _open_batch(self, first: FirstPass, step: FirstRows, sampling: Any) -> tuple[DraftBatch, Tensor | None]:
        rows, chosen = step.ready, first.indices
        metadata = draft_metadata(first.metadata, step.inputs["num_rejected_tokens_gpu"])
        if len(rows) < len(step.rows):
            place_of = {row: place for place, row in enumerate(step.rows)}
            index = index_of([place_of[row] for row in rows], first.last)
            chosen = chosen[index]
            narrow_metadata(metadata, index)
        self._drafting = rows
        sampling = narrow_sampling(sampling, rows)
        tokens, probabilities = sample_draft(self, first.last[chosen], sampling)
        positions = self.positions[chosen]  # type: ignore[attr-defined]
        return DraftBatch(rows, tokens, positions, first.hidden[chosen], metadata, sampling), probabilities

    def _draft_one(self, batch: DraftBatch, column: int) -> Tensor | None:
        size = len(batch.rows)
        self._drafting = batch.rows
        shape_metadata(batch.metadata, size, self)
        mode, padded, across = pad_batch(self, size)
        batch.positions = advance_positions(self, batch.positions, batch.metadata, size, padded)
        _, layers = self.build_per_group_and_layer_attn_metadata(  # type: ignore[attr-defined]
            batch.metadata, draft_index=column
        )
        self.input_ids[:size] = batch.tokens.int()  # type: ignore[attr-defined]
        if self.pass_hidden_states_to_model:  # type: ignore[attr-defined]
            self.hidden_states[:size] = batch.hidden  # type: ignore[attr-defined]
        with draft_context(self, layers, mode, padded, across):
            output = self.model(**draft_inputs(self, padded))  # type: ignore[attr-defined]
        last, hidden = output if self.model_returns_tuple() else (output, output)  # type: ignore[attr-defined]
        batch.hidden = hidden[:size]
        batch.tokens, probabilities = sample_draft(self, last[:size], batch.sampling)
        return probabilities


class RaggedNgramDrafter:
    """Mixin in front of NgramProposer: no search for a request that drafts nothing."""

    lengths: list[int] | None = None
    must_cut = False  # nothing to cut: each request is searched by itself

    def propose(
        self, num_speculative_tokens: int, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any
    ) -> list[list[int]]:
        """Return at most `lengths[i]` tokens for request i."""
        inherited: Callable[..., list[list[int]]] = super().propose  # type: ignore[misc]
        lengths = self.lengths
        if lengths is None or len(lengths) != len(sampled_token_ids):
            return inherited(num_speculative_tokens, sampled_token_ids, *args, **kwargs)
        if not any(lengths):
            return [[] for _ in lengths]
        # vLLM skips a request that sampled nothing.
        searched = [tokens if length else [] for tokens, length in zip(sampled_token_ids, lengths, strict=True)]
        drafts = inherited(num_speculative_tokens, searched, *args, **kwargs)
        return [draft[:length] for draft, length in zip(drafts, lengths, strict=True)]


class _Store:
    """Drafts and, if they are drawn at random, their distributions, as vLLM lays them out."""

    def __init__(self, drafts: Tensor) -> None:
        self.drafts = drafts  # (requests, longest)
        self.probabilities: Tensor | None = None  # (requests, longest, vocabulary); other cells are never read

    def put(self, rows: list[int], column: int, tokens: Tensor, probabilities: Tensor | None) -> None:
        index = slice(None) if len(rows) == len(self.drafts) else index_of(rows, self.drafts)
        self.drafts[index, column] = tokens.to(self.drafts.dtype)
        if probabilities is None:
            return
        if self.probabilities is None:
            self.probabilities = probabilities.new_empty((*self.drafts.shape, probabilities.shape[-1]))
        self.probabilities[index, column] = probabilities


@contextmanager
def recorded(model: Any) -> Iterator[list[Any]]:
    """Yield a list that receives what the model returns; works on every torch module, whatever runs inside."""
    outputs: list[Any] = []
    handle = model.register_forward_hook(lambda _module, _args, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


def adopt(drafter: Any, method: str) -> bool:
    """Put the ragged mixin on a drafter that vLLM built; False for a drafter it does not fit.

    The instance changes its class, so vLLM's own checks of its type and other engines in the process are untouched.
    """
    mixin = _mixin_for(drafter, method)
    if mixin is None:
        return False
    base = type(drafter)
    drafter.__class__ = type(f"Ragged{base.__name__}", (mixin, base), {"__doc__": f"vLLM's {base.__name__}, ragged."})
    return True


def _mixin_for(drafter: Any, method: str) -> type | None:
    if method == "ngram":
        return RaggedNgramDrafter
    if method not in MODEL_METHODS:
        return None
    is_foreign = (
        drafter.parallel_drafting
        or drafter.constant_draft_positions
        or drafter.use_heterogeneous_vocab
        or drafter.uses_mrope
        or drafter.supports_mm_inputs
        or drafter.vllm_config.parallel_config.data_parallel_size > 1
        or drafter.vllm_config.parallel_config.enable_eplb
    )
    return None if is_foreign else RaggedModelDrafter


def _int64() -> Any:
    import torch

    return torch.int64

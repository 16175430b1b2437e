"""What lets a drafter sit out: which tokens its KV cache holds, and what it needs to make up for the others.

vLLM runs the drafter's first pass over every scheduled row of every step, whether or not anybody drafts, so that its
KV cache keeps up with the target's. Here a request that drafts nothing stays out of the pass; when it drafts again,
the pass also runs over the tokens it has missed, with the inputs they would have had. Everything is kept per KV slot,
so prefix-cache hits, preemption, aborts and reordering need no bookkeeping: what is known of a slot follows the block.
Called by the ragged drafter, on a CPU only. It must never touch what the target computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    Numbers = NDArray[np.int64]

MEMORY_LIMIT_BYTES: Final = 1 << 30  # of target states; the system commits only pages that were written
# Up to so many rows, or with so few of rejected drafts among them, vLLM's own pass costs less than cutting it to fit.
WHOLE_ROWS: Final = 8
REJECTED_ROWS: Final = 4


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The one KV cache group that target and drafter share."""

    blocks: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of the drafter's first pass may be spent on missed tokens."""

    step_tokens: int  # missed tokens per step, over all requests
    pass_tokens: int  # rows that the drafter's buffers hold
    extra_tokens: int  # rows that the drafter adds per request


@dataclass(frozen=True, slots=True)
class FirstRows:
    """The first pass of one step, cut to the requests that need it."""

    rows: list[int]  # batch row of each request in the pass
    ready: list[int]  # batch rows that may draft afterwards
    inputs: dict[str, Any]  # what vLLM's propose() takes, for these requests only
    missed: int  # tokens made up for


@dataclass(frozen=True, slots=True)
class _StepRows:
    """Where the rows of one step are; arrays have one entry per request of the batch."""

    offsets: Numbers  # row of its first token in the step's inputs
    firsts: Numbers  # position of that token
    ends: Numbers  # position behind its last token that counts: rejected ones do not
    block_table: Numbers  # (requests, blocks)
    inputs: dict[str, Any]


class CatchUp:
    """Which KV slots the drafter has filled, and for the others the target's tokens and hidden states."""

    def __init__(self, shape: CacheShape, limits: Limits, is_shifted: bool) -> None:
        """`is_shifted`: an EAGLE-class drafter, whose row holds the next token and the target's hidden state."""
        slots = shape.blocks * shape.block_tokens
        self.limits = limits
        self.is_shifted = is_shifted
        self._block_tokens = shape.block_tokens
        self._held: NDArray[np.bool_] = np.zeros(slots, dtype=np.bool_)
        self._tokens: NDArray[np.int32] = np.zeros(slots, dtype=np.int32)
        self._hidden: Tensor | None = None  # (slots, width), allocated by the first row that is kept

    def plan(self, lengths: Sequence[int], follows: Sequence[bool], inputs: dict[str, Any]) -> FirstRows:
        """Return the pass over the requests that draft or follow, if any, and keep the rows of all others.

        `lengths` and `follows` have one entry per batch row; a request in the middle of its prompt cannot draft, but
        follows if it will. A request with more missed tokens than the step may make up for is not ready yet.
        """
        step = _read_step(inputs)
        if self._takes_whole(step, lengths):
            which, positions = spans(step.firsts, step.ends)
            self._held[self._slots(step, which, positions)] = True
            whole = list(range(len(lengths)))
            return FirstRows(whole, whole, inputs, 0)
        starts, stops = self._choose(step, lengths, follows)
        first_kept = np.maximum(step.firsts, stops)
        self._keep(step, *spans(first_kept, step.ends))
        rows = np.flatnonzero(stops > starts)
        if not len(rows):
            return FirstRows([], [], inputs, 0)
        missed = int(np.maximum(np.minimum(stops, step.firsts) - starts, 0)[rows].sum())
        ready = [int(row) for row in rows if stops[row] == step.ends[row] and lengths[row] > 0]
        narrowed = self._narrow(step, rows, starts[rows], stops[rows])
        return FirstRows(rows.tolist(), ready, narrowed, missed)

    def keep(self, slots: Tensor, tokens: Tensor, hidden: Tensor) -> None:
        """Remember what the drafter would have seen in these slots, (rows,) int64.

        :param tokens: (rows,) the target's own input
        :param hidden: (rows, width) the target's states
        """
        places = slots.numpy()
        self._held[places] = False
        self._tokens[places] = tokens.numpy()
        if self.is_shifted:
            if self._hidden is None:
                self._hidden = hidden.new_empty((len(self._held), hidden.shape[-1]))
            self._hidden[slots] = hidden

    def _takes_whole(self, step: _StepRows, lengths: Sequence[int]) -> bool:
        """Tell whether everybody drafts, nobody has missed a token, and little would be cut off."""
        rows = len(step.inputs["target_token_ids"])
        rejected = rows - int((step.ends - step.firsts).sum())
        if not all(lengths) or (rows > WHOLE_ROWS and rejected > REJECTED_ROWS):
            return False
        return bool((self._held_until(step, np.arange(len(lengths))) == step.firsts).all())

    def can_keep(self, hidden: Tensor) -> bool:
        """Tell whether target states like `hidden` (rows, width) may be kept for every slot of the KV cache."""
        needed = len(self._held) * hidden.shape[-1] * hidden.element_size()
        return not self.is_shifted or needed <= MEMORY_LIMIT_BYTES

    def _choose(self, step: _StepRows, lengths: Sequence[int], follows: Sequence[bool]) -> tuple[Numbers, Numbers]:
        """Return the positions [start, stop) that each request's rows cover in the pass; none: start == stop."""
        starts, stops = step.firsts.copy(), step.firsts.copy()
        chosen = np.array([row for row, length in enumerate(lengths) if length > 0 or follows[row]], dtype=np.int64)
        if not len(chosen):
            return starts, stops
        starts[chosen] = self._held_until(step, chosen)
        stops[chosen] = step.ends[chosen]
        if self.is_shifted:  # the last token of a chunk has no next token yet: it waits for the next chunk
            stops[[row for row in chosen if not lengths[row]]] -= 1
        lags = step.firsts - starts
        own = int((step.ends - step.firsts)[chosen].sum()) + self.limits.extra_tokens * len(chosen)
        room = max(0, min(self.limits.step_tokens, self.limits.pass_tokens - own))
        for row in chosen[np.argsort(lags[chosen], kind="stable")]:  # those that get ready soonest come first
            if lags[row] > room:
                stops[row] = starts[row] + room
            room -= min(room, int(lags[row]))
        return starts, stops

    def _held_until(self, step: _StepRows, rows: Numbers) -> Numbers:
        """Return the position of each request's first token that the drafter has not computed, at most `firsts`."""
        firsts = step.firsts[rows]
        blocks = step.block_table[rows, : int(firsts.max()) // self._block_tokens + 1]
        held = self._held.reshape(-1, self._block_tokens)[blocks].reshape(len(rows), -1)
        held[np.arange(held.shape[1]) >= firsts[:, None]] = False
        until: Numbers = held.argmin(axis=1)  # every row has a False, at `firsts` at the latest
        return until

    def _slots(self, step: _StepRows, rows: Numbers, positions: Numbers) -> Numbers:
        blocks, within = np.divmod(positions, self._block_tokens)
        slots: Numbers = step.block_table[rows, blocks] * self._block_tokens + within
        return slots

    def _keep(self, step: _StepRows, rows: Numbers, positions: Numbers) -> None:
        """Remember these positions of this step."""
        import torch

        if not len(rows):
            return
        at = torch.from_numpy(step.offsets[rows] + positions - step.firsts[rows])
        slots = torch.from_numpy(self._slots(step, rows, positions))
        self.keep(slots, step.inputs["target_token_ids"][at], step.inputs["target_hidden_states"][at])

    def _narrow(self, step: _StepRows, rows: Numbers, starts: Numbers, stops: Numbers) -> dict[str, Any]:
        """Return vLLM's inputs for a pass over positions [start, stop) of these requests."""
        import torch

        places, positions = spans(starts, stops)
        owners = rows[places]
        slots = self._slots(step, owners, positions)
        is_old = positions < step.firsts[owners]
        at = np.where(is_old, 0, step.offsets[owners] + positions - step.firsts[owners])
        tokens = np.where(is_old, self._tokens[slots], step.inputs["target_token_ids"].numpy()[at])
        hidden = step.inputs["target_hidden_states"][torch.from_numpy(at)]
        if self.is_shifted and is_old.any():
            assert self._hidden is not None
            hidden[torch.from_numpy(is_old)] = self._hidden[torch.from_numpy(slots[is_old])]
        self._held[slots] = True
        bounds = np.concatenate(([0], np.cumsum(stops - starts))).astype(np.int32)
        return step.inputs | {
            "target_token_ids": torch.from_numpy(tokens.astype(np.int32)),
            "target_positions": torch.from_numpy(positions),
            "target_hidden_states": hidden,
            "next_token_ids": torch.from_numpy(self._next_tokens(step, rows, stops)),
            "token_indices_to_sample": torch.from_numpy(bounds[1:] - 1),
            "common_attn_metadata": _metadata(step, rows, bounds, stops, slots),
            "num_rejected_tokens_gpu": None,
        }

    def _next_tokens(self, step: _StepRows, rows: Numbers, stops: Numbers) -> NDArray[np.int32]:
        """Return the token behind each request's last row: just sampled, of this step, or kept."""
        sampled = step.inputs["next_token_ids"].numpy()[rows]
        is_old, is_sampled = stops < step.firsts[rows], stops == step.ends[rows]
        at = np.where(is_old | is_sampled, 0, step.offsets[rows] + stops - step.firsts[rows])
        kept = self._tokens[self._slots(step, rows, np.where(is_old, stops, 0))]
        scheduled = step.inputs["target_token_ids"].numpy()[at]
        return np.where(is_sampled, sampled, np.where(is_old, kept, scheduled)).astype(np.int32)


def spans(starts: Numbers, stops: Numbers) -> tuple[Numbers, Numbers]:
    """Return for all numbers of all intervals [start, stop), one after the other: their interval and themselves."""
    counts = np.maximum(stops - starts, 0)
    which = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return which, np.arange(counts.sum()) - before[which] + starts[which]


def _read_step(inputs: dict[str, Any]) -> _StepRows:
    metadata = inputs["common_attn_metadata"]
    bounds = metadata.query_start_loc_cpu.numpy().astype(np.int64)
    firsts = inputs["target_positions"].numpy()[bounds[:-1]].astype(np.int64)
    ends = firsts + np.diff(bounds)
    rejected = inputs["num_rejected_tokens_gpu"]
    if rejected is not None:
        ends -= rejected.numpy()
    return _StepRows(bounds[:-1], firsts, ends, metadata.block_table_tensor.numpy(), inputs)


def _metadata(step: _StepRows, rows: Numbers, bounds: NDArray[np.int32], stops: Numbers, slots: Numbers) -> Any:
    import torch
    from vllm.v1.attention.backend import CommonAttentionMetadata

    lengths = torch.from_numpy(stops.astype(np.int32))
    return CommonAttentionMetadata(
        query_start_loc=torch.from_numpy(bounds),
        query_start_loc_cpu=torch.from_numpy(bounds),
        seq_lens=lengths,
        num_reqs=len(rows),
        num_actual_tokens=len(slots),
        max_query_len=int(np.diff(bounds).max()),
        max_seq_len=int(stops.max()),
        block_table_tensor=step.inputs["common_attn_metadata"].block_table_tensor[torch.from_numpy(rows)],
        slot_mapping=torch.from_numpy(slots),
        seq_lens_cpu_upper_bound=lengths.clone(),
    )

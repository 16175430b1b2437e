"""The likeliest prefixes in Triton: chances of acceptance, then the plan for a fixed number of rows; two launches.

The first scores each draft token by itself, as exit_kernel.py does; the second is one program. Both read and write
memory of fixed size and tell the host nothing, so that they can be captured between two halves of a forward pass.
`prefixes.py` is the reference. With TRITON_INTERPRET=1 both run on a CPU, for tests. Cannot be imported without Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
import triton.language as tl

from .exit_kernel import HIDDEN_BLOCK, chance_of
from .head_math import LEAST, NOWHERE, moved, normed
from .prefixes import StayingRows

if TYPE_CHECKING:
    from torch import Tensor

    from .head_math import Head
    from .prefixes import DraftLayout
    from .verdict import Checks

ROWS_AT_ONCE: Final = 64
TOP_BIT: Final = 30  # of the bits of a float from 0 to 1


def chances(head: Head, lm_head: Tensor, checks: Checks) -> Tensor:
    """Return the predicted acceptance (draft tokens,) float32."""
    import torch

    assert checks.candidates is not None
    assert checks.confidences is not None
    states, candidates = normed(checks.states), checks.candidates.shape[1]
    out = torch.empty(len(checks.tokens), dtype=torch.float32, device=states.device)
    _score[(len(checks.tokens),)](
        moved(head, states).contiguous(), lm_head, checks.tokens, checks.candidates.contiguous(),
        checks.confidences.float().contiguous(), checks.positions, (states @ head.probe).float(), head.weights.float(),
        out, states.shape[1], lm_head.stride(0), candidates,
        BLOCK_C=triton.next_power_of_2(candidates + 1), BLOCK_H=HIDDEN_BLOCK, LEAST=LEAST, NOWHERE=NOWHERE,
    )  # fmt: skip
    return out


def staying_rows(chances: Tensor, threshold: float, layout: DraftLayout, budget: int) -> StayingRows:
    """Return what stays if `budget` draft rows may; as the reference does."""
    import torch

    def room(count: int, kind: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(count, dtype=kind, device=chances.device)

    requests, rows, logits = layout.requests, layout.rows - layout.drafts + budget, layout.requests + budget
    made = StayingRows(
        room(requests), room(requests), room(requests + 1), room(rows, torch.int64), room(logits, torch.int64), room(1)
    )
    _plan[(1,)](
        chances.float(), layout.firsts, layout.lengths,
        made.kept, made.left, made.starts, made.rows, made.logits, made.passing,
        threshold, budget, requests, rows, logits,
        BLOCK_Q=triton.next_power_of_2(requests), BLOCK_K=triton.next_power_of_2(layout.longest),
        BLOCK_R=ROWS_AT_ONCE, TOP_BIT=TOP_BIT,
    )  # fmt: skip
    return made


@triton.jit
def _score(
    moved_states, lm_head, tokens, candidates, confidences, positions, probes, weights, out, hidden, stride, width,
    BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr, LEAST: tl.constexpr, NOWHERE: tl.constexpr,
):  # fmt: skip
    """Score draft token `program_id(0)`."""
    token = tl.program_id(0)
    chance = chance_of(
        token, moved_states, lm_head, tokens, candidates, confidences, positions, probes, weights, hidden, stride,
        width, BLOCK_C, BLOCK_H, LEAST, NOWHERE,
    )  # fmt: skip
    tl.store(out + token, chance)


@triton.jit(do_not_specialize=["budget", "requests", "all_rows", "all_logits"])  # each would be compiled anew
def _plan(
    chances, firsts, lengths, kept_out, left_out, starts_out, rows_out, logits_out, passing_out, threshold, budget,
    requests, all_rows, all_logits,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, TOP_BIT: tl.constexpr,
):  # fmt: skip
    """Choose `budget` draft rows and lay out what stays: one program, a row of its block for each request."""
    request = tl.arange(0, BLOCK_Q)
    is_request = request < requests
    first = tl.load(firsts + request, mask=is_request, other=0)
    drafts = tl.load(firsts + request + 1, mask=is_request, other=0) - first
    place = tl.arange(0, BLOCK_K)
    is_draft = place[None, :] < drafts[:, None]
    chance = tl.load(chances + first[:, None] + place[None, :], mask=is_draft, other=0.0)
    bounded = tl.where(chance > 0.0, tl.minimum(chance, 1.0), 0.0)
    # One place after the other: products in another order could grow from one place to the next by rounding.
    running = tl.full([BLOCK_Q], 1.0, tl.float32)
    is_passing = tl.full([BLOCK_Q], 1, tl.int32)
    passing = tl.zeros([BLOCK_Q], dtype=tl.int32)
    survival = tl.zeros([BLOCK_Q, BLOCK_K], dtype=tl.float32)
    for step in tl.static_range(BLOCK_K):
        is_here = place[None, :] == step
        running = running * tl.sum(tl.where(is_here, bounded, 0.0), axis=1)
        survival = tl.where(is_here, running[:, None], survival)
        is_passing = is_passing * tl.sum(tl.where(is_here & is_draft & (chance >= threshold), 1, 0), axis=1)
        passing += is_passing
    # What is not negative is ordered as its bits are: find those of the last one chosen, from the highest bit on.
    bits = survival.to(tl.int32, bitcast=True)
    last = 0
    for step in tl.static_range(TOP_BIT + 1):
        tried = last | (1 << (TOP_BIT - step))
        reach = tl.sum(tl.sum(tl.where(is_draft & (bits >= tried), 1, 0), axis=1), axis=0)
        last = tl.where(reach >= budget, tried, last)
    above = tl.sum(tl.where(is_draft & (bits > last), 1, 0), axis=1)
    equal = tl.sum(tl.where(is_draft & (bits == last), 1, 0), axis=1)
    rest = budget - tl.sum(above, axis=0) - (tl.cumsum(equal, axis=0) - equal)
    kept = 1 + above + tl.minimum(tl.maximum(rest, 0), equal)
    left = drafts + 1 - kept
    length = tl.load(lengths + request, mask=is_request, other=0)
    ends = tl.cumsum(tl.where(is_request, length - left, 0), axis=0)
    logit_ends = tl.cumsum(tl.where(is_request, kept, 0), axis=0)
    gone = tl.where(is_request, left, 0)
    tl.store(kept_out + request, kept, mask=is_request)
    tl.store(left_out + request, left, mask=is_request)
    tl.store(starts_out + 1 + request, ends, mask=is_request)
    tl.store(starts_out, 0)
    tl.store(passing_out, tl.sum(passing, axis=0))
    for begin in range(0, all_rows, BLOCK_R):
        row = begin + tl.arange(0, BLOCK_R)
        before = is_request[None, :] & (ends[None, :] <= row[:, None])
        shift = tl.sum(tl.where(before, gone[None, :], 0), axis=1)
        tl.store(rows_out + row, (row + shift).to(tl.int64), mask=row < all_rows)
    for begin in range(0, all_logits, BLOCK_R):
        row = begin + tl.arange(0, BLOCK_R)
        before = is_request[None, :] & (logit_ends[None, :] <= row[:, None])
        shift = tl.sum(tl.where(before, gone[None, :], 0), axis=1)
        tl.store(logits_out + row, (row + shift).to(tl.int64), mask=row < all_logits)

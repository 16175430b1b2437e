"""The exit heads' decision as one Triton kernel: scores, first rejection of each request, rows that stay.

`ExitHeads` uses it on CUDA; elsewhere `TokenHeads.decide` with plain torch and numpy is the reference. What takes a
matrix product over all tokens (the affine map) is torch's in both. Triton comes with vLLM's CUDA build, and
this file cannot be imported without it; with TRITON_INTERPRET=1 in the environment the kernel runs on a CPU, for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import triton
import triton.language as tl

from .cut import places
from .head_math import LEAST, NOWHERE, moved, normed
from .verdict import Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from ..arrays import Ints
    from .cut import CutBatch
    from .head_math import Head
    from .verdict import Checks

HIDDEN_BLOCK: Final = 256  # of the hidden size, summed at a time
ROW_BLOCK: Final = 1024  # rows of the batch, compacted at a time


def decide(head: Head, lm_head: Tensor, threshold: float, checks: Checks, batch: CutBatch) -> Verdict:
    """Return the decision, computed by the kernel; one copy to the host."""
    import torch

    assert checks.candidates is not None
    assert checks.confidences is not None
    device, tokens, requests = checks.states.device, len(checks.tokens), len(batch.drafts)
    states = normed(checks.states)
    shape = _on_device(batch, device)
    rows = torch.empty(batch.rows, dtype=torch.int64, device=device)
    told = torch.cat([shape.drafts + 1, shape.drafts.new_zeros(2)])  # rows kept by request; rows in all; tokens done
    candidates = checks.candidates.shape[1]
    _decide[(tokens,)](
        moved(head, states).contiguous(), lm_head, checks.tokens, checks.candidates.contiguous(),
        checks.confidences.float().contiguous(), checks.positions, (states @ head.probe).float(), head.weights.float(),
        shape.spared, shape.owner, shape.row_owner, shape.behind, shape.drafts, told, rows,
        threshold, tokens, requests, len(rows), states.shape[1], lm_head.stride(0), candidates,
        BLOCK_C=triton.next_power_of_2(candidates + 1), BLOCK_H=HIDDEN_BLOCK, BLOCK_R=ROW_BLOCK,
        LEAST=LEAST, NOWHERE=NOWHERE,
    )  # fmt: skip
    kept: Ints = told[:-1].cpu().numpy().astype(np.int64)
    return Verdict(kept[:-1], rows[: int(kept[-1])])


@dataclass(frozen=True, slots=True)
class _Shape:
    drafts: Tensor  # (requests,) int32, as all of them
    owner: Tensor  # (draft tokens,) request
    row_owner: Tensor  # (rows,) request
    behind: Tensor  # (rows,) rows of the request from this one on: 1 is its last
    spared: Tensor  # (draft tokens,)


def _on_device(batch: CutBatch, device: Any) -> _Shape:
    """Return the batch's shape as tensors, in one copy."""
    import torch

    requests = np.arange(len(batch.drafts))
    owner, row_owner = np.repeat(requests, batch.drafts), np.repeat(requests, batch.lengths)
    behind = batch.lengths[row_owner] - places(batch.lengths)
    parts = (batch.drafts, owner, row_owner, behind, batch.spared)
    flat = torch.from_numpy(np.concatenate(parts).astype(np.int32)).to(device, non_blocking=True)
    return _Shape(*flat.split([len(part) for part in parts]))


@triton.jit
def chance_of(
    token, moved_states, lm_head, tokens, candidates, confidences, positions, probes, weights, hidden, stride, width,
    BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr, LEAST: tl.constexpr, NOWHERE: tl.constexpr,
):  # fmt: skip
    """Return the predicted acceptance of one draft token."""
    column = tl.arange(0, BLOCK_C)
    own_id = tl.load(tokens + token).to(tl.int64)
    others = tl.load(
        candidates + token * width + column - 1, mask=(column > 0) & (column <= width), other=0
    ).to(tl.int64)  # fmt: skip
    ids = tl.where(column == 0, own_id, others)
    scores = tl.zeros([BLOCK_C], dtype=tl.float32)
    for begin in range(0, hidden, BLOCK_H):
        place = begin + tl.arange(0, BLOCK_H)
        state = tl.load(moved_states + token * hidden + place, mask=place < hidden, other=0.0).to(tl.float32)
        at = lm_head + ids[:, None] * stride + place[None, :]
        weight = tl.load(at, mask=(column[:, None] <= width) & (place[None, :] < hidden), other=0.0)
        scores += tl.sum(weight.to(tl.float32) * state[None, :], axis=1)
    is_other = (column > 0) & (column <= width) & (ids != own_id)
    own = tl.sum(tl.where(column == 0, scores, 0.0), axis=0)
    shown = tl.where(column == 0, own, tl.where(is_other, scores, NOWHERE))
    best_other = tl.max(tl.where(column == 0, NOWHERE, shown), axis=0)
    highest = tl.maximum(own, best_other)
    log_sum = highest + tl.log(tl.sum(tl.exp(shown - highest), axis=0))
    shares = shown - log_sum
    entropy = -tl.sum(tl.exp(shares) * shares, axis=0)
    sure = tl.minimum(tl.maximum(tl.load(confidences + token), LEAST), 1.0 - LEAST)
    value = tl.load(weights + 0) * tl.maximum(own - log_sum, -30.0)
    value += tl.load(weights + 1) * tl.minimum(tl.maximum(own - best_other, -30.0), 30.0)
    value += tl.load(weights + 2) * tl.sum(tl.where(is_other & (scores > own), 1.0, 0.0), axis=0)
    value += tl.load(weights + 3) * entropy
    value += tl.load(weights + 4) * tl.log(sure / (1.0 - sure))
    value += tl.load(weights + 5) * tl.load(positions + token).to(tl.float32)
    value += tl.load(weights + 6) * tl.load(probes + token)
    value += tl.load(weights + 7)
    return 1.0 / (1.0 + tl.exp(-value))


@triton.jit
def _decide(
    moved_states, lm_head, tokens, candidates, confidences, positions, probes, weights, spared, owner, row_owner,
    behind, drafts, told, rows, threshold, count, requests, all_rows, hidden, stride, width,
    BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, LEAST: tl.constexpr,
    NOWHERE: tl.constexpr,
):  # fmt: skip
    """Score draft token `program_id(0)`; the program that ends last compacts the batch's rows."""
    token = tl.program_id(0)
    accept = chance_of(
        token, moved_states, lm_head, tokens, candidates, confidences, positions, probes, weights, hidden, stride,
        width, BLOCK_C, BLOCK_H, LEAST, NOWHERE,
    )  # fmt: skip
    if (accept < threshold) & (tl.load(spared + token) == 0):
        # Behind this token every row leaves; its own test, in the row before it, stays.
        tl.atomic_min(told + tl.load(owner + token), tl.load(positions + token).to(tl.int32))
    tl.debug_barrier()  # all of this program is visible before it counts as done
    if tl.atomic_add(told + requests + 1, 1, sem="acq_rel") == count - 1:
        stayed = 0
        for begin in range(0, all_rows, BLOCK_R):
            row = begin + tl.arange(0, BLOCK_R)
            is_row = row < all_rows
            request = tl.load(row_owner + row, mask=is_row, other=0)
            # Other programs wrote it: read past this processor's own cache.
            kept = tl.load(told + request, mask=is_row, other=0, volatile=True)
            removed = tl.load(drafts + request, mask=is_row, other=0) + 1 - kept
            stays = is_row & (tl.load(behind + row, mask=is_row, other=0) > removed)
            place = stayed + tl.cumsum(stays.to(tl.int32), axis=0) - 1
            tl.store(rows + place, row.to(tl.int64), mask=stays)
            stayed += tl.sum(stays.to(tl.int32), axis=0)
        tl.store(told + requests, stayed)

"""Draws by seed on the V2 runner: vLLM's own draw at each position, and drafts only as far as they are the same.

V2's draws are a function of seed and position already, but its rejection rule makes others; a request with a seed
would say something else under each draft. Called by the V2 runner's mixin; waits for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..patches.v2_sampling import ComparedDrafts

if TYPE_CHECKING:
    from torch import Tensor


def amended(compared: ComparedDrafts) -> tuple[Tensor, Tensor]:
    """Return (sampled, counts) as vLLM has them, with requests that have a seed saying what they draw."""
    import torch

    tokens, counts = said(compared.draws(), compared.drafts, compared.ends.long(), compared.sampled.shape[1])
    by_seed = compared.is_by_seed()
    sampled = torch.where(by_seed[:, None], tokens.to(compared.sampled.dtype), compared.sampled)
    return sampled, torch.where(by_seed, counts.to(compared.counts.dtype), compared.counts)


def said(draws: Tensor, drafts: Tensor, ends: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return each request's draws (requests, width), and how many are said: up to the first that is not the draft.

    :param draws: (rows,) of each request's rows, one behind the other.
    :param drafts: (rows,) the draft token of each row but a request's first, which it was drawn behind.
    :param ends: (requests + 1,) int64, where each request's rows begin.
    """
    import torch

    rows = ends[:-1, None] + torch.arange(width, device=ends.device)
    has_draft, last = rows + 1 < ends[1:, None], len(draws) - 1
    drawn = draws[rows.clamp(max=last)]
    is_right = has_draft & (drawn == drafts[(rows + 1).clamp(max=last)])
    return drawn, is_right.long().cumprod(1).sum(1) + 1

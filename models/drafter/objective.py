"""The loss: cross-entropy between the teacher's leading tokens and the head's distribution over the draft vocabulary.

The trainer calls it once per depth. The gradient with respect to the states is computed in the forward pass, block by
block, so that the (rows, vocabulary) logits never exist as a whole and are not kept for the backward pass.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as functional

Tensor = torch.Tensor
_BLOCK_ROWS: Final = 512


class _LeadingCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, tokens: Tensor, shares: Tensor, weights: Tensor) -> Tensor:
        gradient = torch.empty_like(states)
        total = states.new_zeros((), dtype=torch.float32)
        for start in range(0, len(states), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            share, weight = shares[block], weights[block, None]
            guess = functional.linear(states[block], head).softmax(-1)
            log_guess = guess.gather(1, tokens[block]).float().clamp_min(1e-30).log()
            total -= (share * log_guess * weight).sum()
            guess.mul_(weight.to(guess.dtype))
            guess.scatter_add_(1, tokens[block], (-share * weight).to(guess.dtype))
            gradient[block] = guess @ head
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None, None


def leading_cross_entropy(states: Tensor, head: Tensor, tokens: Tensor, shares: Tensor, weights: Tensor) -> Tensor:
    """Sum the weighted cross-entropy over rows.

    :param states: (rows, hidden), the head's normed output.
    :param head: (draft vocabulary, hidden) of the same type, frozen.
    :param tokens: (rows, top) int64, the teacher's leading draft tokens; `shares` (rows, top) float32 sums to one.
    :param weights: (rows,) float32.
    """
    loss: Tensor = _LeadingCrossEntropy.apply(states, head, tokens, shares, weights)  # type: ignore[no-untyped-call]
    return loss


def teacher_shares(top_logits: Tensor, temperature: float) -> Tensor:
    """Turn the teacher's leading logits (rows, top) into a distribution over them."""
    return (top_logits / temperature).softmax(-1)

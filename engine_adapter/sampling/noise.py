"""Noise that belongs to a seed and a position, and the tokens drawn with it; used by `seeded_runner.py`.

A token's noise is a hash of its stream's key and of its id: no state, nothing depends on what was drawn or drafted
before. SplitMix64 (Steele, Lea, Flood 2014) started at the key is that hash; keys of two streams are so far apart that
their tokens meet with a probability of 1e-14. Pure functions of tensors, alike on every device.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

GOLDEN: Final = 0x9E3779B97F4A7C15 - (1 << 64)  # 64-bit constants as the signed numbers that torch multiplies
_FIRST: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND: Final = 0x94D049BB133111EB - (1 << 64)
DENSE_ELEMENTS: Final = 1 << 24  # of int64 at a time, where all tokens get their noise


def stream_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the key (rows,) int64 of each request's noise at a position; both arguments are (rows,) int64."""
    return _mixed(_mixed(seeds) + positions * GOLDEN)


def noise(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return standard Gumbel noise, float32, of tokens under keys; both are int64 and broadcast."""
    bits = _mixed(keys + (tokens + 1) * GOLDEN)
    # The upper 32 bits as a share; its small end, which makes the largest noise, keeps its precision in float32.
    share = _shifted(bits, 32).float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return share.neg_().log1p_().neg_().log_().neg_()


def draw(logits: Tensor, keys: Tensor) -> Tensor:
    """Return for each row a token with the probability that its logits give it.

    :param logits: (rows, vocabulary) float32; -inf for what must not come.
    :param keys: (rows,) int64, of `stream_keys`.
    :returns: (rows,) int64.
    """
    import torch

    if not len(logits):
        return keys.new_empty(0)
    if logits.device.type == "cpu" and (drawn := _draw_compiled(logits, keys)) is not None:
        return drawn
    rows = max(1, DENSE_ELEMENTS // logits.shape[1])
    parts = zip(torch.split(logits, rows), torch.split(keys, rows), strict=True)
    return torch.cat([draw_among_all(part, some) for part, some in parts])


def draw_among_all(logits: Tensor, keys: Tensor) -> Tensor:
    """Draw with noise for the whole vocabulary; shapes as in `draw`."""
    import torch

    tokens = torch.arange(logits.shape[1], device=logits.device)
    return (logits + noise(keys[:, None], tokens)).argmax(-1)


def draw_while_right(logits: Tensor, keys: Tensor, drafts: Tensor, columns: list[int], is_greedy: list[bool]) -> Tensor:
    """Return (draft tokens,) what each draft is held to: a draw, or the likeliest token in greedy rows.

    On a CPU a negative number stands behind a wrong draft of the same request; elsewhere looking would be waiting.

    :param logits: (draft tokens, vocabulary) float32, those of a request one behind the other.
    :param columns: the place of each draft in its request's, from 0.
    """
    import numpy as np
    import torch

    if logits.device.type != "cpu":
        drawn = draw(logits, keys)
        return drawn.where(~logits.new_tensor(is_greedy).bool(), logits.argmax(-1)) if any(is_greedy) else drawn
    if (kernel := _kernel()) is not None:
        drawn = torch.empty_like(keys)
        kernel.draw_while_right(
            logits.float().contiguous().numpy(), keys.numpy(), drafts.long().numpy(), np.array(columns) == 0,
            np.array(is_greedy), drawn.numpy(),
        )  # fmt: skip
        if not bool((drawn == kernel.NO_DRAW).any()):
            return drawn
    return _one_by_one(logits, keys, drafts, columns, is_greedy)


def _one_by_one(logits: Tensor, keys: Tensor, drafts: Tensor, columns: list[int], is_greedy: list[bool]) -> Tensor:
    drawn, is_right = keys.new_full(keys.shape, -2), True
    for place, column in enumerate(columns):
        is_right = column == 0 or (is_right and bool(drawn[place - 1] == drafts[place - 1]))
        if is_right:
            own = logits[place : place + 1]
            drawn[place] = own.argmax(-1)[0] if is_greedy[place] else draw(own, keys[place : place + 1])[0]
    return drawn


def _draw_compiled(logits: Tensor, keys: Tensor) -> Tensor | None:
    """Draw on a CPU in one pass over each row, about eight times as fast; None without numba."""
    import torch

    if (kernel := _kernel()) is None:
        return None
    drawn = torch.empty_like(keys)
    kernel.draw_in(logits.float().contiguous().numpy(), keys.contiguous().numpy(), drawn.numpy())
    if bool((wrong := drawn == kernel.NO_DRAW).any()):  # numbers are missing, and as in vLLM any token comes
        drawn[wrong] = draw_among_all(logits[wrong], keys[wrong])
    return drawn


@cache
def _kernel() -> ModuleType | None:
    """Return the module of compiled draws, None where numba is missing or broken."""
    try:
        from . import draw_kernel

        return draw_kernel
    except ImportError:
        return None


def warm_up() -> bool:
    """Compile what draws on a CPU while nobody waits for it; return whether draws are compiled."""
    import torch

    zero = torch.zeros(1, dtype=torch.int64)
    draw(torch.zeros((1, 8)), zero)
    draw_while_right(torch.zeros((1, 8)), zero, zero, [0], [False])
    return _kernel() is not None


def _mixed(numbers: Tensor) -> Tensor:
    """Return SplitMix64's mix of 64-bit numbers."""
    numbers = (numbers ^ _shifted(numbers, 30)) * _FIRST
    numbers = (numbers ^ _shifted(numbers, 27)) * _SECOND
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill up with zeros; torch fills up with the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)

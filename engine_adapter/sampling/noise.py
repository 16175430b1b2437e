"""Noise that belongs to a seed and a position, and the tokens drawn with it; used by `seeded_runner.py`.

A token's noise is a hash of its stream's key and of its id: no state, nothing depends on what was drawn or drafted
before. SplitMix64 (Steele, Lea, Flood 2014) started at the key is that hash; keys of two streams are so far apart that
their tokens meet with a probability of 1e-14. Pure functions of tensors, alike on every device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

GOLDEN: Final = 0x9E3779B97F4A7C15 - (1 << 64)  # 64-bit constants as the signed numbers that torch multiplies
_FIRST: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND: Final = 0x94D049BB133111EB - (1 << 64)
MOST_NOISE: Final = 23.0  # -log(2^-33) is 22.87
LEAST_NOISE: Final = -3.0  # -log(-log(2^-24)) is -2.81
MOST_PICKED: Final = 0.25  # of the vocabulary: beyond it picking tokens costs more than their noise
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
    if logits.device.type == "cpu":
        return torch.stack([_draw_among_few(row, key) for row, key in zip(logits, keys, strict=True)])
    rows = max(1, DENSE_ELEMENTS // logits.shape[1])
    parts = zip(torch.split(logits, rows), torch.split(keys, rows), strict=True)
    return torch.cat([draw_among_all(part, some) for part, some in parts])


def draw_among_all(logits: Tensor, keys: Tensor) -> Tensor:
    """Draw with noise for the whole vocabulary; shapes as in `draw`."""
    import torch

    tokens = torch.arange(logits.shape[1], device=logits.device)
    return (logits + noise(keys[:, None], tokens)).argmax(-1)


def _draw_among_few(logits: Tensor, key: Tensor) -> Tensor:
    """Draw from one row (vocabulary,), with noise only for tokens that can win, where most cannot."""
    can_win = logits >= logits.max() - (MOST_NOISE - LEAST_NOISE)
    count = int(can_win.count_nonzero())
    if not 0 < count < len(logits) * MOST_PICKED:  # none: a number is missing, and as in vLLM any token comes
        return draw_among_all(logits[None], key[None])[0]
    few = can_win.nonzero()[:, 0]
    return few[(logits[few] + noise(key, few)).argmax()]


def _mixed(numbers: Tensor) -> Tensor:
    """Return SplitMix64's mix of 64-bit numbers."""
    numbers = (numbers ^ _shifted(numbers, 30)) * _FIRST
    numbers = (numbers ^ _shifted(numbers, 27)) * _SECOND
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill up with zeros; torch fills up with the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)

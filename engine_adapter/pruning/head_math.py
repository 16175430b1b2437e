"""One exit head and the arithmetic that both decisions share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor


LEAST: Final = 1e-6  # confidences are kept this far from 0 and 1 before their logit is taken

EPSILON: Final = 1e-5

NOWHERE: Final = -1e4  # score of a candidate that does not count: finite, so that gradients are


@dataclass(slots=True)
class Head:
    """One layer's head."""

    scale: Tensor  # (hidden size,)
    down: Tensor  # (rank, hidden size)
    up: Tensor  # (hidden size, rank)
    bias: Tensor  # (hidden size,)
    probe: Tensor  # (hidden size,) a direction of the state itself
    weights: Tensor  # (features + 1,) of the logistic curve, the intercept last


def normed(states: Tensor) -> Tensor:
    """Return states (rows, hidden size) at root mean square one."""
    import torch

    return states * torch.rsqrt(states.float().pow(2).mean(-1, keepdim=True) + EPSILON).to(states.dtype)


def moved(head: Head, states: Tensor) -> Tensor:
    """Return normed states (rows, hidden size), moved towards what the LM head reads."""
    return states * head.scale + (states @ head.down.T) @ head.up.T + head.bias

"""The timed decoder's own check: its fused kernels against plain torch, one layer and the whole pass."""

from __future__ import annotations

from typing import Any

import fused
import torch
from machines import device_for

HEADS, KV_HEADS, SLOTS, START = 4, 2, 24, 16
HIDDEN, SIZE = 4096, 128  # of a head: so large that warps must share
TINY_HIDDEN, TINY_SIZE = 48, 16


def measure(is_dry: bool) -> dict[str, Any]:
    """Return the largest difference of each kernel from its reference, relative to the reference's largest value."""
    dtype, device = torch.float32, device_for(is_dry)
    hidden, size = (TINY_HIDDEN, TINY_SIZE) if is_dry else (HIDDEN, SIZE)
    draw = torch.Generator(device).manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, device=device).to(dtype)

    state, weight, residual = normal(5, hidden), normal(hidden), normal(5, hidden)
    residuals = residual.clone(), residual.clone()
    norms = [each(state, own, weight, 1e-6) for each, own in _pair(fused.add_norm, fused.reference_add_norm, residuals)]
    gates = [each(normal_) for each, normal_ in _pair(fused.gate, fused.reference_gate, (state, state))]
    qkv, gains = normal(3, 5, HEADS + 2 * KV_HEADS, size), normal(2, size)
    angles = normal(SLOTS, size // 2)
    turns = torch.stack([angles.cos(), angles.sin()], dim=1).float().contiguous()
    caches = [[torch.zeros(3, KV_HEADS, SLOTS, size, dtype=dtype, device=device) for _ in range(2)] for _ in range(2)]
    queries = [
        each(qkv, gains, turns, *cache, START, 1e-6)
        for each, cache in _pair(fused.rope_store, fused.reference_rope_store, caches)
    ]
    return {
        "add_norm": apart(*norms), "residual": apart(*residuals), "gate": apart(*gates), "queries": apart(*queries),
        "keys": apart(caches[0][0], caches[1][0]), "values": apart(caches[0][1], caches[1][1]),
    }  # fmt: skip


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference, relative."""
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-12))


def _pair(kernel: Any, reference: Any, arguments: Any) -> list[tuple[Any, Any]]:
    return list(zip((kernel, reference), arguments, strict=True))

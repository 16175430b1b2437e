"""The small operations of a decoder layer, each one launch: residual and norm, heads' norm with rotary positions and KV
store, gate times up. Serving engines fuse these; unfused, a drafter's time would be launches and overlap would look
better than it is. Each kernel has its reference in plain torch beside it, which also serves without Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# ------------------------------------------------------------------ in plain torch


def reference_add_norm(state: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Add `state` to `residual` in place; return the residual normed. Both (rows, hidden)."""
    residual += state
    wide = residual.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(state.dtype) * weight


def reference_rope_store(
    qkv: Tensor, norms: Tensor, turns: Tensor, keys: Tensor, values: Tensor, start: int, epsilon: float
) -> Tensor:
    """Norm and turn queries and keys, store keys and values from `start` on; return queries.

    :param qkv: (requests, rows, heads + 2 kv heads, head size)
    :param norms: (2, head size) gains of queries and keys
    :param turns: (slots, 2, head size / 2) cosines and sines, float32
    :param keys: (requests, kv heads, slots, head size), as `values`
    :return: (requests, heads, rows, head size)
    """
    rows, kv = qkv.shape[1], keys.shape[1]
    heads = qkv.shape[2] - 2 * kv
    query, key, value = qkv.transpose(1, 2).split([heads, kv, kv], dim=1)
    cosine, sine = turns[start : start + rows].unbind(1)

    def turned(part: Tensor, gain: Tensor) -> Tensor:
        wide = part.float()
        wide = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(part.dtype) * gain
        low, high = wide.float().chunk(2, dim=-1)
        return torch.cat([low * cosine - high * sine, high * cosine + low * sine], dim=-1).to(part.dtype)

    keys[:, :, start : start + rows] = turned(key, norms[1])
    values[:, :, start : start + rows] = value
    return turned(query, norms[0])


def reference_gate(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of (rows, 2 x intermediate)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate_up.dtype)


# ------------------------------------------------------------------ in Triton


@triton.jit
def _add_norm(state, residual, weight, out, hidden, epsilon, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * hidden
    place = tl.arange(0, BLOCK)
    inside = place < hidden
    total = tl.load(residual + row + place, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(state + row + place, mask=inside, other=0.0).to(tl.float32)
    total = total.to(residual.dtype.element_ty)
    tl.store(residual + row + place, total, mask=inside)
    wide = total.to(tl.float32)
    normed = wide * (1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / hidden + epsilon))
    gain = tl.load(weight + place, mask=inside, other=0.0)
    tl.store(out + row + place, normed.to(out.dtype.element_ty) * gain, mask=inside)


def add_norm(state: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """As `reference_add_norm`, in one launch."""
    out = torch.empty_like(state)
    rows, hidden = state.shape
    _add_norm[(rows,)](state, residual, weight, out, hidden, epsilon, BLOCK=triton.next_power_of_2(hidden))
    return out


@triton.jit
def _rope_store(
    qkv, norms, turns, queries, keys, values, rows, heads, kv_heads, kv_request, kv_head, start, epsilon,
    HALF: tl.constexpr,
):  # fmt: skip
    """One head of one row; keys and values lie alike."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request, own = row // rows, row % rows
    place = tl.arange(0, HALF)
    source = qkv + (row * (heads + 2 * kv_heads) + head) * 2 * HALF + place
    low, high = tl.load(source), tl.load(source + HALF)
    is_query, is_value = head < heads, head >= heads + kv_heads
    kv = tl.where(is_value, head - heads - kv_heads, tl.maximum(head - heads, 0))
    cell = request * kv_request + kv * kv_head + (start + own) * 2 * HALF + place
    if is_value:
        tl.store(values + cell, low)
        tl.store(values + cell + HALF, high)
    else:
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        square = tl.sum(wide_low * wide_low, axis=0) + tl.sum(wide_high * wide_high, axis=0)
        scale = 1.0 / tl.sqrt(square / (2 * HALF) + epsilon)
        gain = norms + tl.where(is_query, 0, 2 * HALF) + place
        normed_low = ((wide_low * scale).to(low.dtype) * tl.load(gain)).to(tl.float32)
        normed_high = ((wide_high * scale).to(high.dtype) * tl.load(gain + HALF)).to(tl.float32)
        turn = turns + (start + own) * 2 * HALF + place
        cosine, sine = tl.load(turn), tl.load(turn + HALF)
        turned_low = (normed_low * cosine - normed_high * sine).to(qkv.dtype.element_ty)
        turned_high = (normed_high * cosine + normed_low * sine).to(qkv.dtype.element_ty)
        if is_query:
            answer = queries + ((request * heads + head) * rows + own) * 2 * HALF + place
            tl.store(answer, turned_low)
            tl.store(answer + HALF, turned_high)
        else:
            tl.store(keys + cell, turned_low)
            tl.store(keys + cell + HALF, turned_high)


def rope_store(
    qkv: Tensor, norms: Tensor, turns: Tensor, keys: Tensor, values: Tensor, start: int, epsilon: float
) -> Tensor:
    """As `reference_rope_store`, in one launch."""
    requests, rows, everything, size = qkv.shape
    kv = keys.shape[1]
    heads = everything - 2 * kv
    queries = torch.empty(requests, heads, rows, size, dtype=qkv.dtype, device=qkv.device)
    _rope_store[(requests * rows, everything)](
        qkv, norms, turns, queries, keys, values, rows, heads, kv, keys.stride(0), keys.stride(1), start, epsilon,
        HALF=size // 2,
    )  # fmt: skip
    return queries


@triton.jit
def _gate(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < width
    gate = tl.load(gate_up + row * 2 * width + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + place, mask=inside, other=0.0).to(tl.float32)
    value = gate * up / (1.0 + tl.exp(-gate))
    tl.store(out + row * width + place, value.to(out.dtype.element_ty), mask=inside)


def gate(gate_up: Tensor) -> Tensor:
    """As `reference_gate`, in one launch."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    _gate[(rows, triton.cdiv(width, 1024))](gate_up, out, width, BLOCK=1024)
    return out

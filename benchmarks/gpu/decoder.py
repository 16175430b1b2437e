"""A decoder of a given shape with random weights and static buffers, cut between any two layers, fit for CUDA graphs.

Every request has the same context, whose keys and values are random: times depend on sizes, not on what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as functional
from shapes import Shape
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's weights and its part of the KV cache."""

    input_norm: Tensor
    qkv: Tensor
    head_norms: Tensor  # (2, head size)
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    keys: Tensor  # (requests, kv heads, slots, head size)
    values: Tensor


@dataclass(frozen=True, slots=True)
class Flow:
    """What passes from layer to layer: the last output, and the residual stream it has yet to be added to."""

    state: Tensor  # (requests * rows, hidden)
    residual: Tensor


def small_operations(is_fused: bool) -> Any:
    """Return add_norm, rope_store and gate: Triton's or plain torch's."""
    if is_fused:
        import fused

        return fused
    from fused import reference_add_norm, reference_gate, reference_rope_store

    return SimpleNamespace(add_norm=reference_add_norm, rope_store=reference_rope_store, gate=reference_gate)


class Decoder:
    """`layers` of the shape's, for up to `requests` requests of `context` tokens and some more."""

    def __init__(
        self, shape: Shape, *, layers: int, requests: int, context: int, room: int, device: torch.device,
        dtype: torch.dtype, is_fused: bool, seed: int = 0,
    ) -> None:  # fmt: skip
        self.shape, self.context, self.device, self.dtype = shape, context, device, dtype
        self.slots = -(-(context + room) // 8) * 8
        self._operations = small_operations(is_fused)
        self._draw = torch.Generator(device).manual_seed(seed)
        queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        cache = (requests, shape.kv_heads, self.slots, shape.head_size)
        self.layers = [
            Layer(
                self._gains(shape.hidden), self._normal(queries + 2 * keys, shape.hidden),
                self._gains(2, shape.head_size), self._normal(shape.hidden, queries), self._gains(shape.hidden),
                self._normal(2 * shape.intermediate, shape.hidden), self._normal(shape.hidden, shape.intermediate),
                self._normal(*cache), self._normal(*cache),
            )
            for _ in range(layers)
        ]  # fmt: skip
        self.embedding = self._normal(shape.vocabulary, shape.hidden)
        self.lm_head = self.embedding if shape.is_tied else self._normal(shape.vocabulary, shape.hidden)
        self.norm = self._gains(shape.hidden)
        speeds = shape.rope_theta ** -(torch.arange(0, shape.head_size, 2, device=device).float() / shape.head_size)
        angles = torch.arange(self.slots, device=device).float()[:, None] * speeds
        self._turns = torch.stack([angles.cos(), angles.sin()], dim=1).contiguous()

    def _normal(self, *size: int) -> Tensor:
        drawn = torch.empty(size, dtype=self.dtype, device=self.device)
        return drawn.normal_(0.0, size[-1] ** -0.5, generator=self._draw)

    def _gains(self, *size: int) -> Tensor:
        return torch.ones(size, dtype=self.dtype, device=self.device)

    def enter(self, tokens: Tensor) -> Flow:
        """Begin a pass over (requests, rows) token ids."""
        state = self.embedding[tokens.flatten()]
        return Flow(state, torch.zeros_like(state))

    def through(self, flow: Flow, requests: int, first: int, last: int, start: int) -> Flow:
        """Run layers first..last-1; the rows stand at positions from `start` on."""
        shape, small = self.shape, self._operations
        rows = len(flow.state) // requests
        state, residual = flow.state, flow.residual
        for layer in self.layers[first:last]:
            normed = small.add_norm(state, residual, layer.input_norm, shape.epsilon)
            qkv = functional.linear(normed, layer.qkv).view(requests, rows, -1, shape.head_size)
            keys, values = layer.keys[:requests], layer.values[:requests]
            query = small.rope_store(qkv, layer.head_norms, self._turns, keys, values, start, shape.epsilon)
            seen = attend(query, keys[:, :, : start + rows], values[:, :, : start + rows])
            state = functional.linear(seen.transpose(1, 2).reshape(requests * rows, -1), layer.output)
            normed = small.add_norm(state, residual, layer.mlp_norm, shape.epsilon)
            state = functional.linear(small.gate(functional.linear(normed, layer.gate_up)), layer.down)
        return Flow(state, residual)

    def leave(self, flow: Flow) -> Tensor:
        """Return the likeliest token (requests * rows,) of each row."""
        normed = self._operations.add_norm(flow.state, flow.residual, self.norm, self.shape.epsilon)
        return functional.linear(normed, self.lm_head).argmax(-1)


def attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend as rows that end the context: row j sees all but what lies behind it.

    :param query: (requests, heads, rows, head size)
    :param keys: (requests, kv heads, seen, head size), as `values`
    """
    rows, seen = query.shape[2], keys.shape[2]
    if rows == 1:
        mask: Any = None
    elif query.is_cuda:
        from torch.nn.attention.bias import causal_lower_right

        mask = causal_lower_right(rows, seen)
    else:
        mask = torch.ones(rows, seen, dtype=torch.bool).tril(seen - rows)
    return functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)

"""The EAGLE-3 head: one decoder layer over the target's auxiliary states, unrolled as it will run when drafting.

The trainer and the evaluation call it. Names of parameters are those of vLLM's checkpoint (llama_eagle3.py of 0.32), so
that the exporter copies them; what is computed here must stay what vLLM computes there.

Index j of a conversation takes token j+1 and the target's states of token j, and predicts token j+2. Depth k of the
training-time test (EAGLE-3, Li et al. 2025) predicts the same token from the head's own states of the last k indices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from .features import Example
from .teacher import TargetShape

Tensor = torch.Tensor
_ATTENTION = "midlayer.self_attn."
_MLP = "midlayer.mlp."
INPUT_NORM = "midlayer.input_layernorm.weight"
HIDDEN_NORM = "midlayer.hidden_norm.weight"
MLP_NORM = "midlayer.post_attention_layernorm.weight"
OUTPUT_NORM = "norm.weight"
FUSION = "fc.weight"
MASKED = -1e30


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The sizes that fix the head's parameters."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate_size: int
    aux_layers: int
    rope_theta: float
    norm_epsilon: float

    @classmethod
    def of(cls, target: TargetShape, aux_layers: int, intermediate_size: int) -> HeadShape:
        return cls(
            target.hidden_size,
            target.heads,
            target.kv_heads,
            target.head_size,
            intermediate_size or target.intermediate_size,
            aux_layers,
            target.rope_theta,
            target.norm_epsilon,
        )

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name every own parameter with its shape; fc_norm has no gain of its own (it would be one more of fc)."""
        hidden, wide = self.hidden_size, self.intermediate_size
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        return {
            FUSION: (hidden, hidden * self.aux_layers),
            _ATTENTION + "q_proj.weight": (queries, 2 * hidden),
            _ATTENTION + "k_proj.weight": (keys, 2 * hidden),
            _ATTENTION + "v_proj.weight": (keys, 2 * hidden),
            _ATTENTION + "o_proj.weight": (hidden, queries),
            _MLP + "gate_proj.weight": (wide, hidden),
            _MLP + "up_proj.weight": (wide, hidden),
            _MLP + "down_proj.weight": (hidden, wide),
            INPUT_NORM: (hidden,),
            HIDDEN_NORM: (hidden,),
            MLP_NORM: (hidden,),
            OUTPUT_NORM: (hidden,),
        }


@dataclass(frozen=True, slots=True)
class Piece:
    """Where one conversation lies in a packed batch; `contexts` counts indices 0..n-3, `rows` those that draft."""

    context_start: int
    contexts: int
    row_start: int
    rows: int

    @property
    def context_slice(self) -> slice:
        return slice(self.context_start, self.context_start + self.contexts)

    @property
    def row_slice(self) -> slice:
        return slice(self.row_start, self.row_start + self.rows)


@dataclass(frozen=True, slots=True)
class Batch:
    """Conversations laid end to end, without padding."""

    pieces: tuple[Piece, ...]
    inputs: Tensor  # (contexts,) int64: token j+1
    positions: Tensor  # (contexts,) int64: j
    aux: Tensor  # (contexts, layers x hidden) bfloat16
    row_contexts: Tensor  # (rows,) int64: which contexts draft
    local_rows: Tensor  # (rows,) int64: row number within its conversation
    labels: Tensor  # (rows,) int64: token j+2
    top_tokens: Tensor  # (rows, top) int64
    top_logits: Tensor  # (rows, top) float32

    @property
    def rows(self) -> int:
        return len(self.labels)


def pack(examples: Sequence[Example], device: torch.device) -> Batch:
    """Lay conversations end to end; the row of index j drafts when token j+1 belongs to the answer, as in serving."""
    pieces: list[Piece] = []
    contexts = rows = 0
    for example in examples:
        length = len(example.tokens)
        piece = Piece(contexts, length - 2, rows, length - 1 - example.prompt_tokens)
        pieces.append(piece)
        contexts, rows = contexts + piece.contexts, rows + piece.rows
    tokens = [example.tokens.long() for example in examples]
    positions = [torch.arange(piece.contexts) for piece in pieces]
    first = [example.prompt_tokens - 1 for example in examples]
    chosen = [
        position[skip:] + piece.context_start for position, skip, piece in zip(positions, first, pieces, strict=True)
    ]
    return Batch(
        pieces=tuple(pieces),
        inputs=torch.cat([ids[1:-1] for ids in tokens]).to(device),
        positions=torch.cat(positions).to(device),
        aux=torch.cat([example.aux[:-2] for example in examples]).to(device),
        row_contexts=torch.cat(chosen).to(device),
        local_rows=torch.cat([torch.arange(piece.rows) for piece in pieces]).to(device),
        labels=torch.cat([ids[skip + 2 :] for ids, skip in zip(tokens, first, strict=True)]).to(device),
        top_tokens=torch.cat([example.top_tokens[1:] for example in examples]).to(device, torch.int64),
        top_logits=torch.cat([example.top_logits[1:] for example in examples]).to(device, torch.float32),
    )


class DraftHead:
    """The head's parameters in float32 and its forward pass in the type of the target's embedding."""

    def __init__(self, shape: HeadShape, weights: Mapping[str, Tensor], embedding: Tensor) -> None:
        """Take the start weights and the target's embedding table (vocabulary, hidden), which stays frozen."""
        self.shape = shape
        self.embedding = embedding
        self.device, self.dtype = embedding.device, embedding.dtype
        self.parameters = {
            name: torch.nn.Parameter(weights[name].detach().to(self.device, torch.float32).clone())
            for name in shape.parameters()
        }
        half = torch.arange(0, shape.head_size, 2, device=self.device).float() / shape.head_size
        self._frequencies = 1.0 / shape.rope_theta**half

    def matrices(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.parameters.values() if parameter.dim() == 2]

    def vectors(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.parameters.values() if parameter.dim() == 1]

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def unroll(self, batch: Batch, depth: int) -> Iterator[Tensor]:
        """Yield normed states (rows, hidden) for depth 0..depth-1; at depth k local rows < k are void."""
        half = {name: parameter.to(self.dtype) for name, parameter in self.parameters.items() if parameter.dim() == 2}
        qkv = torch.cat([half[_ATTENTION + part + "_proj.weight"] for part in "qkv"])
        turns = self._turns(batch.positions)
        row_turns = turns[:, batch.row_contexts]
        fused = functional.linear(batch.aux.to(self.dtype), half[FUSION])
        embedded = self._norm(self.embedding[batch.inputs], INPUT_NORM)
        row_embedded = embedded[batch.row_contexts]
        queries_size = self.shape.heads * self.shape.head_size
        # Prompt indices need keys and values only; queries and the MLP run on the rows that draft.
        context = torch.cat([embedded, self._norm(fused, HIDDEN_NORM)], -1)
        keys, values = self._keys_values(functional.linear(context, qkv[queries_size:]), turns)
        residual = fused[batch.row_contexts].float()
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        for level in range(depth):
            if level == 0:
                projected = functional.linear(context[batch.row_contexts], qkv[:queries_size])
            else:
                # The state for index j is what the head itself gave at j-1.
                residual = residual.roll(1, 0)
                mixed = torch.cat([row_embedded, self._norm(residual, HIDDEN_NORM)], -1)
                both = functional.linear(mixed, qkv)
                projected = both[:, :queries_size]
                key, value = self._keys_values(both[:, queries_size:], row_turns)
                own_keys.append(key)
                own_values.append(value)
            queries = self._rotate(projected.view(-1, self.shape.heads, self.shape.head_size), row_turns)
            attended = self._attend(batch, queries, keys, values, own_keys, own_values)
            residual = residual + functional.linear(attended, half[_ATTENTION + "o_proj.weight"]).float()
            residual = residual + self._mlp(self._norm(residual, MLP_NORM), half).float()
            yield self._norm(residual, OUTPUT_NORM)

    def _mlp(self, states: Tensor, half: Mapping[str, Tensor]) -> Tensor:
        gate = functional.silu(functional.linear(states, half[_MLP + "gate_proj.weight"]))
        return functional.linear(
            gate * functional.linear(states, half[_MLP + "up_proj.weight"]), half[_MLP + "down_proj.weight"]
        )

    def _norm(self, states: Tensor, name: str) -> Tensor:
        full = states.float()
        scale = torch.rsqrt(full.square().mean(-1, keepdim=True) + self.shape.norm_epsilon)
        return (full * scale * self.parameters[name]).to(self.dtype)

    def _turns(self, positions: Tensor) -> Tensor:
        angles = torch.outer(positions.float(), self._frequencies)
        angles = torch.cat([angles, angles], -1)
        return torch.stack([angles.cos(), angles.sin()]).to(self.dtype)[:, :, None]  # (2, n, 1, head_size)

    def _rotate(self, states: Tensor, turns: Tensor) -> Tensor:
        first, second = states.chunk(2, -1)
        return states * turns[0] + torch.cat([-second, first], -1) * turns[1]

    def _keys_values(self, projected: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        pair = projected.view(-1, 2, self.shape.kv_heads, self.shape.head_size)
        return self._rotate(pair[:, 0], turns), pair[:, 1]

    def _attend(
        self,
        batch: Batch,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        own_keys: list[Tensor],
        own_values: list[Tensor],
    ) -> Tensor:
        depth = len(own_keys)
        outputs = []
        for piece in batch.pieces:
            rows, contexts = piece.row_slice, piece.context_slice
            # Row r may see true states up to context r + skip - depth, and its own depth states behind them.
            outputs.append(
                self._attend_piece(
                    queries[rows],
                    keys[contexts],
                    values[contexts],
                    [key[rows].roll(depth - 1 - at, 0) for at, key in enumerate(own_keys)],
                    [value[rows].roll(depth - 1 - at, 0) for at, value in enumerate(own_values)],
                )
            )
        return torch.cat(outputs)

    def _attend_piece(
        self, queries: Tensor, keys: Tensor, values: Tensor, own_keys: list[Tensor], own_values: list[Tensor]
    ) -> Tensor:
        """Attend within one conversation: queries (r, heads, d), keys (c, kv_heads, d); returns (r, heads x d)."""
        rows, contexts, depth = len(queries), len(keys), len(own_keys)
        groups = self.shape.heads // self.shape.kv_heads
        scaled = (queries / math.sqrt(self.shape.head_size)).transpose(0, 1)
        scaled = scaled.reshape(self.shape.kv_heads, groups * rows, self.shape.head_size)
        scores = scaled @ keys.permute(1, 2, 0)  # (kv_heads, groups x rows, contexts)
        seen = torch.ones(rows, contexts, dtype=torch.bool, device=scores.device).tril(contexts - rows - depth)
        scores = scores.view(self.shape.kv_heads, groups, rows, contexts).masked_fill(~seen, MASKED)
        grouped = scaled.view(self.shape.kv_heads, groups, rows, self.shape.head_size)
        own = [(grouped * key.transpose(0, 1)[:, None]).sum(-1, keepdim=True) for key in own_keys]
        shares = torch.cat([scores, *own], -1).softmax(-1)
        out = (
            shares[..., :contexts].reshape(self.shape.kv_heads, groups * rows, contexts) @ values.transpose(0, 1)
        ).view(self.shape.kv_heads, groups, rows, self.shape.head_size)
        for at, value in enumerate(own_values):
            out = out + shares[..., contexts + at : contexts + at + 1] * value.transpose(0, 1)[:, None]
        return out.permute(2, 0, 1, 3).reshape(rows, -1)

"""A Llama-shaped draft model in a process of its own: plain torch, its own KV cache, tokens in and tokens out.

Run by drafter_process.py as `python -m faser.engine_adapter.drafter_llama FOLDER DTYPE MEMORY BELL`. A second, small
implementation because vLLM's needs a whole engine around it. It draws the most likely token, always: that is what
makes its tokens usable whatever the request's temperature is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .confidence import top_probability
from .drafter_server import Task, serve
from .frontier import Drafted
from .mailbox import Tokens

if TYPE_CHECKING:
    from torch import Tensor

CACHE_LIMIT_BYTES: Final = 1 << 30
FIRST_TOKENS: Final = 256  # that a new request's cache has room for; it doubles when it is full
# Only what this file computes; anything else in a config makes the model one that it does not know.
PLAIN: Final = {
    "model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_scaling": None,
}  # fmt: skip


def llama_refusal(folder: str) -> str | None:
    """Return why the draft model in `folder` cannot run here, None if it can."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError) as error:
        return f"{folder}: config.json cannot be read ({error})"
    for name, expected in PLAIN.items():
        if (seen := config.get(name, expected)) != expected:
            return f"{folder}: {name} is {seen!r}; expected {expected!r}"
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        return f"{folder}: rope_type is {rope['rope_type']!r}; expected 'default'"
    if not list(Path(folder).glob("*.safetensors")):
        return f"{folder}: no .safetensors file"
    return None


@dataclass(slots=True)
class Sequence:
    """One request: the tokens whose keys and values are computed, and these."""

    tokens: Tokens
    cache: Tensor  # (layers, 2, KV heads, room, head size)

    def common(self, sequence: Tokens) -> int:
        """Return how many first tokens of `sequence` are computed."""
        size = min(len(self.tokens), len(sequence))
        differ = np.flatnonzero(self.tokens[:size] != sequence[:size])
        return int(differ[0]) if len(differ) else size


@dataclass(slots=True)
class _Layer:
    before_attention: Tensor
    qkv: Tensor
    out: Tensor
    before_mlp: Tensor
    gate_up: Tensor
    down: Tensor


class Llama:
    """The model's forward pass over rows of several requests at once."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import torch
        from safetensors.torch import load_file

        config = json.loads((folder / "config.json").read_text())
        weights: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            weights |= load_file(file)
        kind: Any = getattr(torch, dtype)
        weights = {name: tensor.to(kind) for name, tensor in weights.items()}
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config.get("num_key_value_heads") or self.heads
        self.head_size: int = config.get("head_dim") or config["hidden_size"] // self.heads
        self.epsilon: float = config["rms_norm_eps"]
        self.embedding = weights["model.embed_tokens.weight"]
        self.dtype = self.embedding.dtype
        self.norm = weights["model.norm.weight"]
        self.lm_head = weights.get("lm_head.weight", self.embedding)
        self.layers = [self._layer(weights, f"model.layers.{index}") for index in range(config["num_hidden_layers"])]
        base = (config.get("rope_parameters") or config).get("rope_theta", 10000.0)
        self._turns = base ** -(torch.arange(0, self.head_size, 2, dtype=torch.float32) / self.head_size)

    def _layer(self, weights: dict[str, Tensor], name: str) -> _Layer:
        import torch

        def joined(*parts: str) -> Tensor:
            return torch.cat([weights.pop(f"{name}.{part}.weight") for part in parts])

        attention, mlp = "self_attn", "mlp"
        return _Layer(
            weights[f"{name}.input_layernorm.weight"],
            joined(*(f"{attention}.{part}_proj" for part in "qkv")),
            weights[f"{name}.{attention}.o_proj.weight"],
            weights[f"{name}.post_attention_layernorm.weight"],
            joined(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            weights[f"{name}.{mlp}.down_proj.weight"],
        )

    def new_cache(self, room: int) -> Tensor:
        """Return an empty cache for `room` tokens."""
        import torch

        return torch.empty((len(self.layers), 2, self.kv_heads, room, self.head_size), dtype=self.dtype)

    def cache_bytes(self, room: int) -> int:
        """Return the size of such a cache."""
        return len(self.layers) * 2 * self.kv_heads * room * self.head_size * self.dtype.itemsize

    def forward(self, spans: list[tuple[Tensor, int, Tokens]]) -> Tensor:
        """Return the final state (spans, hidden) of each span's last token.

        :param spans: cache, which is written, number of tokens in it, and the tokens to compute behind them.
        """
        import torch
        from torch.nn.functional import linear, rms_norm, silu

        tokens = torch.from_numpy(np.concatenate([tokens for _, _, tokens in spans]).astype(np.int64))
        positions = torch.cat([torch.arange(start, start + len(tokens)) for _, start, tokens in spans])
        turns = self._rotation(positions)
        ends = torch.tensor([len(tokens) for _, _, tokens in spans]).cumsum(0) - 1
        state = self.embedding[tokens]
        width = (state.shape[-1],)
        for index, layer in enumerate(self.layers):
            qkv = linear(rms_norm(state, width, layer.before_attention, self.epsilon), layer.qkv)
            state = state + linear(self._attend(index, qkv, turns, spans), layer.out)
            gate, up = linear(rms_norm(state, width, layer.before_mlp, self.epsilon), layer.gate_up).chunk(2, dim=-1)
            state = state + linear(silu(gate) * up, layer.down)
        return rms_norm(state[ends], width, self.norm, self.epsilon)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * self._turns
        return angles.cos()[:, None].to(self.dtype), angles.sin()[:, None].to(self.dtype)

    def _attend(
        self, layer: int, qkv: Tensor, turns: tuple[Tensor, Tensor], spans: list[tuple[Tensor, int, Tokens]]
    ) -> Tensor:
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        sizes = [self.heads, self.kv_heads, self.kv_heads]
        queries, keys, values = torch.split(qkv.view(len(qkv), -1, self.head_size), sizes, dim=1)
        queries, keys = _rotated(queries, *turns), _rotated(keys, *turns)
        found, at = [], 0
        for cache, start, tokens in spans:
            count = len(tokens)
            end = start + count
            cache[layer, 0, :, start:end] = keys[at : at + count].transpose(0, 1)
            cache[layer, 1, :, start:end] = values[at : at + count].transpose(0, 1)
            mask = None if count == 1 else torch.ones(count, end, dtype=torch.bool).tril(start)
            attended = scaled_dot_product_attention(
                queries[None, at : at + count].transpose(1, 2),
                cache[layer, 0, None, :, :end],
                cache[layer, 1, None, :, :end],
                attn_mask=mask,
                enable_gqa=True,
            )
            found.append(attended[0].transpose(0, 1).reshape(count, -1))
            at += count
        return torch.cat(found)

    def most_likely(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the most likely tokens (rows,) and their probabilities (rows,) float32."""
        from torch.nn.functional import linear

        logits = linear(states, self.lm_head)
        tops = logits.max(dim=-1).indices
        return tops, top_probability(logits, tops)


def _rotated(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    import torch

    first, second = states.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


class LlamaDrafter:
    """Draws tokens for the server; see `drafter_server.Drafter`."""

    def __init__(self, model: Llama) -> None:
        self.model = model
        self._sequences: dict[int, Sequence] = {}  # the one used last stands last

    def behind(self, key: int, sequence: Tokens) -> int:
        """Return how many tokens of the sequence are not computed."""
        known = self._sequences.get(key)
        return len(sequence) - (0 if known is None else known.common(sequence))

    def forget(self, key: int) -> None:
        """Give the request's cache back."""
        self._sequences.pop(key, None)

    def read(self, key: int, sequence: Tokens, count: int) -> None:
        """Compute the next missing tokens."""
        done = len(sequence) - self.behind(key, sequence)
        self._run([(key, sequence[: done + count])])

    def draft(self, tasks: list[Task], is_cancelled: Callable[[], bool]) -> dict[int, Drafted]:
        """Go on from every task's sequence, all of them in one pass per token."""
        states = self._run([(task.key, task.sequence) for task in tasks])
        found: dict[int, tuple[list[int], list[float]]] = {task.key: ([], []) for task in tasks}
        left = {task.key: task.count for task in tasks}
        keys = [task.key for task in tasks]
        while True:
            tokens, confidences = self.model.most_likely(states)
            for key, token, confidence in zip(keys, tokens.tolist(), confidences.tolist(), strict=True):
                found[key][0].append(token)
                found[key][1].append(confidence)
                left[key] -= 1
            keys = [key for key in keys if left[key] > 0]
            if not keys or is_cancelled():
                break
            states = self._run(
                [(key, np.append(self._sequences[key].tokens, np.int32(found[key][0][-1]))) for key in keys]
            )
        return {key: Drafted(tuple(tokens), tuple(values)) for key, (tokens, values) in found.items()}

    def _run(self, wanted: list[tuple[int, Tokens]]) -> Tensor:
        """Compute what is missing of each sequence, its last token in any case."""
        import torch

        spans = []
        for key, tokens in wanted:
            known = self._opened(key, tokens)
            start = min(known.common(tokens), len(tokens) - 1)
            known.tokens = tokens
            spans.append((known.cache, start, tokens[start:]))
        self._make_room({key for key, _ in wanted})
        with torch.inference_mode():
            return self.model.forward(spans)

    def _opened(self, key: int, tokens: Tokens) -> Sequence:
        known = self._sequences.pop(key, None)
        if known is None:
            known = Sequence(tokens[:0], self.model.new_cache(max(FIRST_TOKENS, len(tokens))))
        elif known.cache.shape[3] < len(tokens):
            larger = self.model.new_cache(2 * len(tokens))
            larger[:, :, :, : known.cache.shape[3]] = known.cache
            known.cache = larger
        self._sequences[key] = known
        return known

    def _make_room(self, in_use: set[int]) -> None:
        """Give back the caches that were not used for the longest time; their requests are read again."""
        total = sum(self.model.cache_bytes(each.cache.shape[3]) for each in self._sequences.values())
        for key in list(self._sequences):
            if total <= CACHE_LIMIT_BYTES:
                return
            if key not in in_use:
                total -= self.model.cache_bytes(self._sequences.pop(key).cache.shape[3])


def main() -> None:
    """Serve the engine that started this process."""
    folder, dtype, memory, bell = sys.argv[1:5]
    serve(int(memory), int(bell), lambda: LlamaDrafter(Llama(Path(folder), dtype)))


if __name__ == "__main__":
    main()

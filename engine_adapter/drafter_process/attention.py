"""What the process's drafters share: attention over a KV cache per request, and how much memory those may take.

Used by llama.py and eagle.py, which both compute in plain torch in the drafter's process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from .mailbox import Tokens

CACHE_LIMIT_BYTES: Final = 1 << 30
FIRST_TOKENS: Final = 256  # that a new request's cache has room for; it doubles when it is full
# Only what these files compute; anything else in a config makes the model one that they do not know.
PLAIN: Final = {
    "model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_scaling": None,
}  # fmt: skip


def shape_refusal(folder: str, plain: dict[str, Any] = PLAIN) -> str | None:
    """Return why the Llama-shaped model in `folder` cannot run in the process, None if it can.

    :param plain: what the config must say of these names, if it says anything.
    """
    try:
        config = json.loads((Path(folder) / "config.json").read_text())
    except (OSError, ValueError) as error:
        return f"{folder}: config.json cannot be read ({error})"
    for name, expected in plain.items():
        if (seen := config.get(name, expected)) != expected:
            return f"{folder}: {name} is {seen!r}; expected {expected!r}"
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        return f"{folder}: rope_type is {rope['rope_type']!r}; expected 'default'"
    if not list(Path(folder).glob("*.safetensors")):
        return f"{folder}: no .safetensors file"
    return None


def load_weights(folder: Path, dtype: str) -> dict[str, Tensor]:
    """Return every floating point tensor of a folder in this dtype, the others as they are."""
    import torch
    from safetensors.torch import load_file

    kind = getattr(torch, dtype)
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    return {name: tensor.to(kind) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


def joined(weights: dict[str, Tensor], prefix: str, parts: Iterable[str]) -> Tensor:
    """Take matrices out of `weights`, stacked."""
    import torch

    return torch.cat([weights.pop(f"{prefix}.{part}_proj.weight") for part in parts])


def common(tokens: Tokens, others: Tokens) -> int:
    """Return how many first tokens are the same."""
    size = min(len(tokens), len(others))
    differ = np.flatnonzero(tokens[:size] != others[:size])
    return int(differ[0]) if len(differ) else size


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of one request in a pass."""

    cache: Tensor  # is written
    start: int  # rows in it
    count: int  # rows behind them


class Attention:
    """Attention of a Llama's layers over the caches of several requests at once."""

    def __init__(self, config: dict[str, Any], layers: int, dtype: str) -> None:
        import torch

        self.layers = layers
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config.get("num_key_value_heads") or self.heads
        self.head_size: int = config.get("head_dim") or config["hidden_size"] // self.heads
        self.dtype: Any = getattr(torch, dtype)
        base = (config.get("rope_parameters") or config).get("rope_theta", 10000.0)
        self._turns = base ** -(torch.arange(0, self.head_size, 2, dtype=torch.float32) / self.head_size)

    def new_cache(self, room: int) -> Tensor:
        """Return an empty cache for `room` tokens: (layers, 2, KV heads, room, head size)."""
        import torch

        return torch.empty((self.layers, 2, self.kv_heads, room, self.head_size), dtype=self.dtype)

    def cache_bytes(self, room: int) -> int:
        """Return the size of such a cache."""
        size: int = self.layers * 2 * self.kv_heads * room * self.head_size * self.dtype.itemsize
        return size

    def rotation(self, spans: list[Span]) -> tuple[Tensor, Tensor]:
        """Return what `attend` turns the spans' rows by."""
        import torch

        positions = torch.cat([torch.arange(span.start, span.start + span.count) for span in spans])
        angles = positions[:, None].float() * self._turns
        return angles.cos()[:, None].to(self.dtype), angles.sin()[:, None].to(self.dtype)

    def attend(self, layer: int, qkv: Tensor, turns: tuple[Tensor, Tensor], spans: list[Span]) -> Tensor:
        """Return the spans' rows of the layer's attention, before its last matrix."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        sizes = [self.heads, self.kv_heads, self.kv_heads]
        queries, keys, values = torch.split(qkv.view(len(qkv), -1, self.head_size), sizes, dim=1)
        queries, keys = _rotated(queries, *turns), _rotated(keys, *turns)
        found, at = [], 0
        for span in spans:
            cache, count = span.cache, span.count
            end = span.start + count
            cache[layer, 0, :, span.start : end] = keys[at : at + count].transpose(0, 1)
            cache[layer, 1, :, span.start : end] = values[at : at + count].transpose(0, 1)
            mask = None if count == 1 else torch.ones(count, end, dtype=torch.bool).tril(span.start)
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


def _rotated(states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    import torch

    first, second = states.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


class Cached(Protocol):
    """Something with a cache."""

    cache: Tensor


Sequence = TypeVar("Sequence", bound=Cached)


class Sequences(Generic[Sequence]):
    """What a drafter keeps of every request, by key, within a limit; the one used last stands last."""

    def __init__(self, attention: Attention, make: Callable[[Tensor], Sequence]) -> None:
        self._attention, self._make = attention, make
        self._kept: dict[int, Sequence] = {}

    def get(self, key: int) -> Sequence | None:
        """Return what is kept of a request."""
        return self._kept.get(key)

    def forget(self, key: int) -> None:
        """Give a request's cache back."""
        self._kept.pop(key, None)

    def opened(self, key: int, room: int) -> Sequence:
        """Return what is kept of a request, new if nothing is, with room for so many tokens."""
        known = self._kept.pop(key, None)
        if known is None:
            known = self._make(self._attention.new_cache(max(FIRST_TOKENS, room)))
        elif known.cache.shape[3] < room:
            larger = self._attention.new_cache(2 * room)
            larger[:, :, :, : known.cache.shape[3]] = known.cache
            known.cache = larger
        self._kept[key] = known
        return known

    def make_room(self, in_use: set[int]) -> None:
        """Give back the caches that were not used for the longest time; their requests are read again."""
        total = sum(self._attention.cache_bytes(each.cache.shape[3]) for each in self._kept.values())
        for key in list(self._kept):
            if total <= CACHE_LIMIT_BYTES:
                return
            if key not in in_use:
                total -= self._attention.cache_bytes(self._kept.pop(key).cache.shape[3])

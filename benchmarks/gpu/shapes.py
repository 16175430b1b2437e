"""The sizes of the models that are timed: Qwen3's, from its published configurations, with random weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with grouped-query attention, normed heads, rotary positions and a gated feed-forward part."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    is_tied: bool  # LM head and embedding are one matrix
    rope_theta: float = 1e6
    epsilon: float = 1e-6

    @property
    def layer_elements(self) -> int:
        """Weights of one layer's matrices."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        return self.hidden * (2 * queries + 2 * keys) + 3 * self.hidden * self.intermediate

    @property
    def vocabulary_elements(self) -> int:
        """Weights of embedding and LM head."""
        return self.vocabulary * self.hidden * (1 if self.is_tied else 2)

    def layers_within(self, free_bytes: float, requests: int, slots: int) -> int:
        """Return how many layers fit beside the KV cache of so many requests of so many tokens, two bytes each."""
        kv = 2 * requests * slots * self.kv_heads * self.head_size
        return max(min(self.layers, int((free_bytes / 2 - self.vocabulary_elements) // (self.layer_elements + kv))), 0)


DRAFTER = Shape("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936, True)
TARGET = Shape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936, False)
# For the dry run: everything once, nothing to be learned from its times.
TINY_DRAFTER = Shape("tiny-drafter", 1, 32, 2, 1, 16, 48, 96, True)
TINY_TARGET = Shape("tiny-target", 4, 48, 4, 2, 16, 64, 96, False)

"""A Llama-shaped draft model in a process of its own: plain torch, its own KV cache, tokens in and tokens out.

Run by process.py as `python -m faser.engine_adapter.drafter_process.llama FOLDER DTYPE MEMORY BELL`. A
second, small implementation because vLLM's needs a whole engine around it. It draws the most likely token, always:
that is what makes its tokens usable whatever the request's temperature is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..drafting.draft_notes import top_probability
from .attention import Attention, Sequences, Span, common, joined, load_weights
from .drafted import Drafted
from .mailbox import StateRows, Tokens
from .server import DraftTask, serve

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class LlamaSequence:
    """One request: the tokens whose keys and values are computed, and these."""

    cache: Tensor
    tokens: Tokens = field(default_factory=lambda: np.empty(0, dtype=np.int32))


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
        config = json.loads((folder / "config.json").read_text())
        weights = load_weights(folder, dtype)
        self.epsilon: float = config["rms_norm_eps"]
        self.embedding = weights["model.embed_tokens.weight"]
        self.norm = weights["model.norm.weight"]
        self.lm_head = weights.get("lm_head.weight", self.embedding)
        self.layers = [self._layer(weights, f"model.layers.{index}") for index in range(config["num_hidden_layers"])]
        self.attention = Attention(config, len(self.layers), dtype)

    @staticmethod
    def _layer(weights: dict[str, Tensor], name: str) -> _Layer:
        return _Layer(
            weights[f"{name}.input_layernorm.weight"],
            joined(weights, f"{name}.self_attn", "qkv"),
            weights[f"{name}.self_attn.o_proj.weight"],
            weights[f"{name}.post_attention_layernorm.weight"],
            joined(weights, f"{name}.mlp", ("gate", "up")),
            weights[f"{name}.mlp.down_proj.weight"],
        )

    def forward(self, tokens: Tokens, spans: list[Span]) -> Tensor:
        """Return the final state (spans, hidden) of each span's last token.

        :param tokens: of all spans, one behind the other.
        """
        import torch
        from torch.nn.functional import linear, rms_norm, silu

        turns = self.attention.rotation(spans)
        ends = torch.tensor([span.count for span in spans]).cumsum(0) - 1
        state = self.embedding[torch.from_numpy(tokens.astype(np.int64))]
        width = (state.shape[-1],)
        for index, layer in enumerate(self.layers):
            qkv = linear(rms_norm(state, width, layer.before_attention, self.epsilon), layer.qkv)
            state = state + linear(self.attention.attend(index, qkv, turns, spans), layer.out)
            gate, up = linear(rms_norm(state, width, layer.before_mlp, self.epsilon), layer.gate_up).chunk(2, dim=-1)
            state = state + linear(silu(gate) * up, layer.down)
        return rms_norm(state[ends], width, self.norm, self.epsilon)

    def most_likely(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the most likely tokens (rows,) and their probabilities (rows,) float32."""
        from torch.nn.functional import linear

        logits = linear(states, self.lm_head)
        tops = logits.max(dim=-1).indices
        return tops, top_probability(logits, tops)


class LlamaDrafter:
    """Draws tokens for the server; see `server.Drafter`."""

    def __init__(self, model: Llama) -> None:
        self.model = model
        self._sequences = Sequences(model.attention, LlamaSequence)

    def learn(self, key: int, sequence: Tokens, states: StateRows) -> bool:
        """Tokens are all that it needs."""
        return True

    def behind(self, key: int, sequence: Tokens) -> int:
        """Return how many tokens of the sequence are not computed."""
        known = self._sequences.get(key)
        return len(sequence) - (0 if known is None else common(known.tokens, sequence))

    def forget(self, key: int) -> None:
        """Give the request's cache back."""
        self._sequences.forget(key)

    def read(self, key: int, sequence: Tokens, count: int) -> None:
        """Compute the next missing tokens."""
        done = len(sequence) - self.behind(key, sequence)
        self._run({key: sequence[: done + count]})

    def draft(self, tasks: list[DraftTask], is_cancelled: Callable[[], bool]) -> dict[int, Drafted]:
        """Go on from every task's sequence, all of them in one pass per token."""
        sequences = {task.key: task.sequence for task in tasks}
        found: dict[int, tuple[list[int], list[float]]] = {task.key: ([], []) for task in tasks}
        left = {task.key: task.count for task in tasks}
        while True:
            tokens, confidences = self.model.most_likely(self._run(sequences))
            for key, token, confidence in zip(sequences, tokens.tolist(), confidences.tolist(), strict=True):
                found[key][0].append(token)
                found[key][1].append(confidence)
                left[key] -= 1
            sequences = {key: np.append(each, np.int32(found[key][0][-1])) for key, each in sequences.items()}
            sequences = {key: each for key, each in sequences.items() if left[key] > 0}
            if not sequences or is_cancelled():
                break
        return {key: Drafted(tuple(tokens), tuple(values)) for key, (tokens, values) in found.items()}

    def _run(self, wanted: dict[int, Tokens]) -> Tensor:
        """Compute what is missing of each sequence, its last token in any case."""
        import torch

        spans, rows = [], []
        for key, tokens in wanted.items():
            known = self._sequences.opened(key, len(tokens))
            start = min(common(known.tokens, tokens), len(tokens) - 1)
            known.tokens = tokens
            spans.append(Span(known.cache, start, len(tokens) - start))
            rows.append(tokens[start:])
        self._sequences.make_room(set(wanted))
        with torch.inference_mode():
            return self.model.forward(np.concatenate(rows), spans)


def main() -> None:
    """Serve the engine that started this process."""
    folder, dtype, memory, bell = sys.argv[1:5]
    serve(int(memory), int(bell), lambda: LlamaDrafter(Llama(Path(folder), dtype)))


if __name__ == "__main__":
    main()

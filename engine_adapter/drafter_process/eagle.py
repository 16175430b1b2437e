"""An EAGLE-3 head in a process of its own: plain torch and a KV cache; tokens and the target's states in, tokens out.

Run by process.py as `python -m faser.engine_adapter.drafter_process.eagle FOLDER TARGET DTYPE STATES_DTYPE
STATES MEMORY BELL`. Row p of a request holds the target's state of token p and the token behind it, as in vLLM (0.32
llm_base_proposer.py:set_inputs_first_pass), so that a sequence of n tokens has n - 1 rows with true states; what is
drafted behind them goes on from the head's own. Own rows are computed again once the target's states are there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from ..drafting.draft_notes import top_probability
from .attention import PLAIN, Attention, Sequences, Span, common, joined, load_weights, shape_refusal
from .drafted import Drafted
from .mailbox import StateRows, Tokens
from .server import DraftTask, serve
from .target_states import TargetStates

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING: Final = "embed_tokens.weight"
# vLLM's head has more variants (0.32 llama_eagle3.py); these are the ones of the published Llama heads.
HEAD: Final = PLAIN | {
    "num_hidden_layers": 1, "norm_before_fc": False, "norm_output": False, "logit_scale": 1.0, "ptd_token_id": None,
}  # fmt: skip


def eagle_refusal(folder: str, target: str) -> str | None:
    """Return why the head in `folder` cannot run here for the target in its folder, None if it can."""
    if (reason := shape_refusal(folder, HEAD)) is not None:
        return reason
    eagle = json.loads((Path(folder) / "config.json").read_text()).get("eagle_config") or {}
    if not eagle.get("use_aux_hidden_state", True) or eagle.get("norm_before_fc", False):
        return f"{folder}: eagle_config is {eagle!r}; expected states of several layers, not normed as a whole"
    shapes = _shapes(folder)
    missing = [name for name in ("fc.weight", "lm_head.weight", "norm.weight") if name not in shapes]
    if missing:
        return f"{folder}: no {missing[0]} in its .safetensors files"
    if EMBEDDING not in shapes and f"model.{EMBEDDING}" not in _shapes(target):
        return f"{target}: no model.{EMBEDDING} in .safetensors files there, which the head shares"
    return None


def states_width(folder: str) -> int:
    """Return how many numbers of the target's states the head reads of each token."""
    return _shapes(folder)["fc.weight"][1]


def _shapes(folder: str) -> dict[str, list[int]]:
    """Return the shapes of a folder's tensors, without reading these."""
    from safetensors import safe_open

    shapes: dict[str, list[int]] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    return shapes


def _target_embedding(folder: Path, dtype: str) -> Tensor:
    import torch
    from safetensors import safe_open

    name = f"model.{EMBEDDING}"
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            if name in opened.keys():  # noqa: SIM118
                found: Tensor = opened.get_tensor(name).to(getattr(torch, dtype))
                return found
    raise FileNotFoundError(f"{folder}: no {name}")


class EagleHead:
    """The head's forward pass over rows of several requests at once (vLLM 0.32 llama_eagle3.py)."""

    def __init__(self, folder: Path, target: Path, dtype: str) -> None:
        config = json.loads((folder / "config.json").read_text())
        # Both names are in use for the one layer.
        weights = {
            name.replace("midlayer.", "layers.0."): tensor for name, tensor in load_weights(folder, dtype).items()
        }
        self.epsilon: float = config["rms_norm_eps"]
        self.is_normed_first: bool = config.get("norm_before_residual", False)
        self.embedding = weights.get(EMBEDDING)
        if self.embedding is None:
            self.embedding = _target_embedding(target, dtype)
        self.norm, self.lm_head, self.offsets = weights["norm.weight"], weights["lm_head.weight"], weights.get("d2t")
        self.fc = weights["fc.weight"]
        self.fc_norms = [weights[name] for name in sorted(weights) if name.startswith("fc_norm.")]
        layer = "layers.0"
        self.of_embedding = weights[f"{layer}.input_layernorm.weight"]
        self.of_state = weights[f"{layer}.hidden_norm.weight"]
        self.before_mlp = weights[f"{layer}.post_attention_layernorm.weight"]
        self.qkv = joined(weights, f"{layer}.self_attn", "qkv")
        self.out = weights[f"{layer}.self_attn.o_proj.weight"]
        self.gate_up = joined(weights, f"{layer}.mlp", ("gate", "up"))
        self.down = weights[f"{layer}.mlp.down_proj.weight"]
        self.attention = Attention(config, 1, dtype)

    def _normed(self, states: Tensor, weight: Tensor) -> Tensor:
        from torch.nn.functional import rms_norm

        return rms_norm(states, (states.shape[-1],), weight, self.epsilon)

    def combined(self, states: Tensor) -> Tensor:
        """Return the target's states (rows, several layers' side by side) as the head's (rows, hidden)."""
        import torch
        from torch.nn.functional import linear

        states = states.to(self.fc.dtype)
        if self.fc_norms:
            chunks = states.chunk(len(self.fc_norms), dim=-1)
            parts = [self._normed(chunk, norm) for chunk, norm in zip(chunks, self.fc_norms, strict=True)]
            states = torch.cat(parts, dim=-1)
        return linear(states, self.fc)

    def forward(self, tokens: Tokens, states: Tensor, spans: list[Span]) -> Tensor:
        """Return the head's own states (rows, hidden).

        :param tokens: of all spans, one behind the other, as are the states (rows, hidden).
        """
        import torch
        from torch.nn.functional import linear, silu

        assert self.embedding is not None
        embedded = self._normed(self.embedding[torch.from_numpy(tokens.astype(np.int64))], self.of_embedding)
        normed = self._normed(states, self.of_state)
        carried = normed if self.is_normed_first else states
        qkv = linear(torch.cat((embedded, normed), dim=-1), self.qkv)
        carried = carried + linear(self.attention.attend(0, qkv, self.attention.rotation(spans), spans), self.out)
        gate, up = linear(self._normed(carried, self.before_mlp), self.gate_up).chunk(2, dim=-1)
        return carried + linear(silu(gate) * up, self.down)

    def most_likely(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Return the most likely tokens (rows,) behind own states, and their probabilities (rows,) float32."""
        from torch.nn.functional import linear

        logits = linear(self._normed(own, self.norm), self.lm_head)
        tops = logits.max(dim=-1).indices
        tokens = tops if self.offsets is None else tops + self.offsets[tops]
        return tokens, top_probability(logits, tops)


@dataclass(slots=True)
class EagleSequence:
    """One request. Rows are computed from true states, then from the head's own; some true ones may be waiting."""

    cache: Tensor
    tokens: Tokens = field(default_factory=lambda: np.empty(0, dtype=np.int32))  # of rows with true states; one more
    rows: int = 0  # computed from true states
    waiting: Tensor | None = None  # (rows, width) states of the rows behind them
    own: list[int] = field(default_factory=list)  # tokens of the rows computed from own states
    states: list[Tensor] = field(default_factory=list)  # own, of the last row of true states and of each behind it

    def told(self) -> int:
        """Return how many rows of true states are known."""
        return self.rows + (0 if self.waiting is None else len(self.waiting))

    def append(self, tokens: Tokens, states: Tensor) -> None:
        """Add rows of true states."""
        import torch

        self.tokens = tokens
        self.waiting = states if self.waiting is None else torch.cat((self.waiting, states))

    def first_waiting(self, count: int) -> Tensor:
        """Take states that wait."""
        assert self.waiting is not None
        taken, rest = self.waiting[:count], self.waiting[count:]
        self.waiting = rest.clone() if len(rest) else None
        return taken


class EagleDrafter:
    """Draws tokens for the server; see `server.Drafter`."""

    def __init__(self, head: EagleHead, target_states: TargetStates) -> None:
        self.head = head
        self._target = target_states
        self._sequences = Sequences(head.attention, EagleSequence)

    def learn(self, key: int, sequence: Tokens, states: StateRows) -> bool:
        """Copy the target's states of the rows that are new; False if they are not there, or were written over."""
        tokens = sequence[: states.count + 1]
        known = self._sequences.get(key)
        if known is not None and common(known.tokens, tokens) < len(known.tokens):
            self._sequences.forget(key)  # another text, or one cut short
            known = None
        told = 0 if known is None else known.told()
        if told == states.count:
            return told > 0
        rows = self._target.read(states, told)
        if rows is None:
            return False
        self._sequences.opened(key, states.count).append(tokens, rows)
        return True

    def behind(self, key: int, sequence: Tokens) -> int:
        """Return how many rows of true states are not computed."""
        known = self._sequences.get(key)
        return 0 if known is None else known.told() - known.rows

    def forget(self, key: int) -> None:
        """Give the request's cache back."""
        self._sequences.forget(key)

    def read(self, key: int, sequence: Tokens, count: int) -> None:
        """Compute the next rows of true states."""
        self._sequences.make_room({key})
        self._read({key: count})

    def draft(self, tasks: list[DraftTask], is_cancelled: Callable[[], bool]) -> dict[int, Drafted]:
        """Go on from every task's sequence, all of them in one pass per token."""
        self._sequences.make_room({task.key for task in tasks})
        behind = {task.key: self.behind(task.key, task.sequence) for task in tasks}
        if any(behind.values()):
            self._read({key: count for key, count in behind.items() if count})
        chains = [self._chain(task) for task in tasks]
        while not is_cancelled():
            self._draw([chain for chain in chains if chain.is_at_end()])
            chains_left = [chain for chain in chains if chain.left > 0]
            if not chains_left:
                break
            self._step(chains_left)
        return {chain.key: chain.drafted() for chain in chains if chain.tokens}

    def _chain(self, task: DraftTask) -> _EagleChain:
        """Return what is to be run for a task; own rows of other tokens than its are dropped."""
        known = self._sequences.opened(task.key, len(task.sequence) + task.count)
        tail = task.sequence[known.rows + 1 :]
        same = common(np.array(known.own, dtype=np.int32), tail)
        del known.own[same:], known.states[same + 1 :]
        return _EagleChain(task.key, known, tail.tolist(), task.count)

    def _read(self, counts: dict[int, int]) -> None:
        """Compute rows of true states, so many of each request."""
        import torch

        known = [each for key in counts if (each := self._sequences.get(key)) is not None]
        states = [each.first_waiting(count) for each, count in zip(known, counts.values(), strict=True)]
        spans = [Span(each.cache, each.rows, len(rows)) for each, rows in zip(known, states, strict=True)]
        for each, span in zip(known, spans, strict=True):
            each.rows += span.count
        tokens = [
            each.tokens[each.rows + 1 - span.count : each.rows + 1] for each, span in zip(known, spans, strict=True)
        ]
        with torch.inference_mode():
            own = self.head.forward(np.concatenate(tokens), self.head.combined(torch.cat(states)), spans)
        ends = np.cumsum([span.count for span in spans]) - 1
        for each, end in zip(known, ends.tolist(), strict=True):
            each.own, each.states = [], [own[end].clone()]

    def _draw(self, chains: list[_EagleChain]) -> None:
        """Draw the next token of each."""
        import torch

        if not chains:
            return
        with torch.inference_mode():
            tokens, confidences = self.head.most_likely(torch.stack([chain.known.states[-1] for chain in chains]))
        for chain, token, confidence in zip(chains, tokens.tolist(), confidences.tolist(), strict=True):
            chain.tail.append(token)
            chain.tokens.append(token)
            chain.confidences.append(confidence)
            chain.left -= 1

    def _step(self, chains: list[_EagleChain]) -> None:
        """Compute one more row of each, from the own state of the row before it."""
        import torch

        tokens = [chain.tail[len(chain.known.own)] for chain in chains]
        spans = [Span(chain.known.cache, chain.known.rows + len(chain.known.own), 1) for chain in chains]
        with torch.inference_mode():
            states = torch.stack([chain.known.states[-1] for chain in chains])
            own = self.head.forward(np.array(tokens), states, spans)
        for chain, token, state in zip(chains, tokens, own, strict=True):
            chain.known.own.append(token)
            chain.known.states.append(state)


@dataclass(slots=True)
class _EagleChain:
    """A task under way: the tokens behind the rows of true states, assumed and drawn."""

    key: int
    known: EagleSequence
    tail: list[int]
    left: int
    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)

    def is_at_end(self) -> bool:
        """Tell whether the row of the last token is computed, so that the next can be drawn."""
        return self.left > 0 and len(self.known.own) == len(self.tail)

    def drafted(self) -> Drafted:
        """Return what was drawn."""
        return Drafted(tuple(self.tokens), tuple(self.confidences))


def main() -> None:
    """Serve the engine that started this process."""
    folder, target, dtype, states_dtype, states, memory, bell = sys.argv[1:8]

    def make() -> EagleDrafter:
        return EagleDrafter(EagleHead(Path(folder), Path(target), dtype), TargetStates(int(states), states_dtype))

    serve(int(memory), int(bell), make)


if __name__ == "__main__":
    main()

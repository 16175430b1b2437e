"""The target as a teacher: its auxiliary hidden states and next-token logits for given text.

Only the feature cache calls it. It checks that the target is of a kind whose head vLLM can load and never trains it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as functional

from ..embedded.cache import sha256_of
from ..embedded.precision import dtype_on
from .drafter_error import DrafterError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class TargetShape:
    """What the head must know of its target."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary_size: int
    rope_theta: float
    norm_epsilon: float
    max_positions: int
    bos_token: int
    eos_token: int

    def default_aux_layers(self) -> tuple[int, int, int]:
        return max(1, self.layers // 10), self.layers // 2 + 1, self.layers


class Teacher:
    """A Llama-family target, in the type that its device multiplies well, with hooks on its auxiliary layers."""

    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        self.shape = read_target_shape(folder)
        self.device = torch.device(device)
        self._model = _load_model(folder, self.device)
        self.embedding: Tensor = self._model.get_input_embeddings().weight.detach()  # (vocabulary, hidden)
        self.head: Tensor = self._model.get_output_embeddings().weight.detach()  # (vocabulary, hidden)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer

        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(self.folder))
        return tokenizer

    def last_layer(self) -> dict[str, Tensor]:
        """Give the target's last layer and final norm, which seed the head."""
        layer: dict[str, Tensor] = dict(self._model.model.layers[-1].state_dict())
        return layer | {"norm.weight": self._model.model.norm.weight.detach()}

    @torch.no_grad()
    def hidden_states(self, rows: Sequence[Sequence[int]], layers: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """Run the target over right-padded rows.

        Returns the residual stream after each of `layers` (1-based) and the final normed states, all
        (rows, longest, hidden) of the target's type.
        """
        longest = max(map(len, rows))
        ids = torch.full((len(rows), longest), self.shape.eos_token, device=self.device)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = torch.tensor(row, device=self.device)
        seen: dict[int, Tensor] = {}
        hooks = [self._model.model.layers[layer - 1].register_forward_hook(_keep(seen, layer)) for layer in set(layers)]
        try:
            # Causal attention and right padding: the pads never reach a real position, no mask is needed.
            final: Tensor = self._model.model(ids, use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return [seen[layer] for layer in layers], final

    def normalised(self, states: Tensor) -> Tensor:
        """Scale hidden states to root mean square one, as the head's fc_norm without gain does."""
        return functional.rms_norm(states.float(), (states.shape[-1],), eps=self.shape.norm_epsilon).to(states.dtype)


def _keep(seen: dict[int, Tensor], layer: int) -> Any:
    def hook(_module: object, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        seen[layer] = output[0] if isinstance(output, tuple) else output

    return hook


def read_target_shape(folder: Path) -> TargetShape:
    """Read config.json and refuse anything but a plain Llama."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise DrafterError(f"target {folder}: {error}; expected a folder with config.json and weights") from error
    if config.model_type != "llama" or config.attention_bias or config.mlp_bias or config.hidden_act != "silu":
        raise DrafterError(
            f"target {folder}: architecture {config.model_type!r}; expected a Llama-family model without biases"
        )
    rope = dict(config.rope_parameters or {})
    if rope.get("rope_type", "default") != "default":
        raise DrafterError(f"target {folder}: rope type {rope['rope_type']!r}; only the default is supported")
    eos = config.eos_token_id
    return TargetShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocabulary_size=config.vocab_size,
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        norm_epsilon=config.rms_norm_eps,
        max_positions=config.max_position_embeddings,
        bos_token=config.bos_token_id or 0,
        eos_token=eos[0] if isinstance(eos, list) else eos or 0,
    )


def _load_model(folder: Path, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as chatter

    chatter.disable_progress_bar()  # type: ignore[no-untyped-call]
    dtype = getattr(torch, dtype_on(device.type))
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise DrafterError(f"target {folder}: its weights do not load: {error}") from error
    return model.to(device).eval().requires_grad_(False)


def weights_digest(folder: Path) -> str:
    """Identify a target by its weight files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DrafterError(f"target {folder}: no .safetensors weights found")
    return hashlib.sha256("".join(sha256_of(file) for file in files).encode()).hexdigest()

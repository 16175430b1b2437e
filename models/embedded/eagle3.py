"""Expand the released EAGLE-3 head into a folder that vLLM loads with `method: eagle3`.

Called by models/embedded/pair.py to fill the model cache. The released file keeps only the head's own weights (int8
matrices with one float16 scale per row); the rows of the LM head are copied from the target. Sizes come from the
weights, layer ids from the card, so that another head of the same layout needs no code.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np

from .cache import CacheError, Progress
from .tensorfile import PendingTensor, Tensor, read, to_bfloat16, write

KIND = "drafter"
_SCALE = ".scale"
_VOCABULARY = "draft_vocab"  # (draft_vocab_size,) int32: the target's token id of each draft token


class DrafterCard(msgspec.Struct, frozen=True):
    """What a released drafter says about itself; unknown fields are for human readers."""

    kind: str  # "drafter"
    method: str  # vLLM's name for it
    target: str
    file: str  # beside the card
    sha256: str  # of `file`
    aux_layers: tuple[int, ...]  # the target's layers whose hidden states the head reads
    license: str


def read_card(path: Path) -> DrafterCard:
    """Return the card; raise CacheError if it cannot be used."""
    try:
        card = msgspec.json.decode(path.read_bytes(), type=DrafterCard)
    except (OSError, msgspec.DecodeError) as error:
        raise CacheError(f"drafter card {path} is unusable: {error}; reinstall faser-vllm") from error
    if card.kind != KIND:
        raise CacheError(f"card {path} is of kind {card.kind!r}; expected {KIND!r}; reinstall faser-vllm")
    return card


def expand_drafter(
    weights: Path, card: DrafterCard, target: Path, folder: Path, progress: Progress | None = None
) -> None:
    """Write model.safetensors (bfloat16) and config.json of the head for the target in folder `target`."""
    stored = read(weights)
    vocabulary = stored[_VOCABULARY].data.astype(np.int64)
    lm_head = _lm_head(target)
    tensors = {name: _dequantized(name, stored) for name in stored if name != _VOCABULARY and not name.endswith(_SCALE)}
    rows = Tensor(lm_head.dtype, lm_head.data[vocabulary])
    tensors["lm_head.weight"] = rows if rows.dtype == "BF16" else to_bfloat16(rows.as_float32())
    tensors["d2t"] = Tensor("I64", vocabulary - np.arange(len(vocabulary)))  # vLLM adds it to a draft token's id
    write(folder / "model.safetensors", [_entry(name, tensors[name]) for name in sorted(tensors)])
    config = _config(tensors, card, json.loads((target / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    if progress:
        progress("expanding the drafter", 1.0)


def _lm_head(target: Path) -> Tensor:
    """Return the target's LM head (vocabulary, hidden); a tied target's is its embedding table."""
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        for file in sorted(target.glob("*.safetensors")):
            if (tensor := read(file).get(name)) is not None:
                return tensor
    raise CacheError(f"{target} has no LM head in its .safetensors files; expected a Llama-family model")


def _dequantized(name: str, stored: dict[str, Tensor]) -> Tensor:
    scale = stored.get(name + _SCALE)
    values = stored[name].as_float32()
    return to_bfloat16(values if scale is None else values * scale.as_float32()[:, None])


def _entry(name: str, tensor: Tensor) -> PendingTensor:
    return PendingTensor(name, tensor.dtype, tensor.data.shape, lambda: tensor)


def _config(tensors: dict[str, Tensor], card: DrafterCard, target: dict[str, object]) -> dict[str, object]:
    """Return the head's config: the target's own, with the sizes found in the weights."""
    hidden, aux_width = tensors["fc.weight"].data.shape
    if aux_width != hidden * len(card.aux_layers):
        raise CacheError(f"the drafter reads {aux_width // hidden} layers, its card names {card.aux_layers}")
    query, _ = tensors["midlayer.self_attn.q_proj.weight"].data.shape
    key, _ = tensors["midlayer.self_attn.k_proj.weight"].data.shape
    head = _head_size(target)
    layers = list(card.aux_layers)
    return {
        **target,
        "hidden_size": hidden,
        "intermediate_size": tensors["midlayer.mlp.gate_proj.weight"].data.shape[0],
        "num_attention_heads": query // head,
        "num_key_value_heads": key // head,
        "num_hidden_layers": 1,
        "draft_vocab_size": len(tensors["d2t"].data),
        "tie_word_embeddings": False,
        "fc_norm": "fc_norm.0.weight" in tensors,
        "norm_before_residual": False,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": layers},
        "eagle_aux_hidden_state_layer_ids": layers,
        "num_aux_hidden_states": len(layers),
    }


def _head_size(target: dict[str, object]) -> int:
    """Return the size of an attention head; older configs leave it to be divided."""
    named, hidden, heads = (target.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if isinstance(named, int):
        return named
    if not isinstance(hidden, int) or not isinstance(heads, int):
        raise CacheError("the target's config.json names no hidden_size and num_attention_heads; expected a Llama's")
    return hidden // heads

"""Weights to start from: own weights of an earlier head, or a ridge regression that already drafts a little.

The trainer calls it before its first step; a resumed run never does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from .drafter_error import DrafterError
from .features import FeatureCache
from .network import FUSION, HIDDEN_NORM, INPUT_NORM, MLP_NORM, OUTPUT_NORM, HeadShape

Tensor = torch.Tensor
_RIDGE_EXAMPLES = 96
_RIDGE_STRENGTH = 0.02


def read_own_weights(path: Path, shape: HeadShape) -> dict[str, Tensor]:
    """Read own weights (int8 with scales, or floating point) as float32; gains of fc_norm are folded into fc."""
    try:
        stored = load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise DrafterError(f"head {path}: {error}; expected a .safetensors file") from error
    weights = {name: _dequantised(name, stored) for name in stored if name in shape.parameters()}
    gains = [stored.get(f"fc_norm.{layer}.weight") for layer in range(shape.aux_layers)]
    if FUSION in weights and all(gain is not None for gain in gains):
        folded = torch.cat([gain.float() for gain in gains if gain is not None])
        if folded.shape[0] == weights[FUSION].shape[1]:
            weights[FUSION] = weights[FUSION] * folded
    wrong = [
        f"{name} {tuple(weights[name].shape) if name in weights else 'missing'} instead of {size}"
        for name, size in shape.parameters().items()
        if name not in weights or tuple(weights[name].shape) != size
    ]
    if wrong:
        raise DrafterError(f"head {path}: made for another target or recipe: {wrong[0]} ({len(wrong)} such)")
    if not all(bool(weight.isfinite().all()) for weight in weights.values()):
        raise DrafterError(f"head {path}: holds values that are not finite; it is corrupt")
    return weights


def _dequantised(name: str, stored: Mapping[str, Tensor]) -> Tensor:
    scale = stored.get(name + ".scale")
    return stored[name].float() if scale is None else stored[name].float() * scale.float()[:, None]


def ridge_start(
    shape: HeadShape, cache: FeatureCache, embedding: Tensor, last_layer: Mapping[str, Tensor], seed: int
) -> dict[str, Tensor]:
    """Solve [aux of t, embedding of t+1] -> last state of t+1 and lay the solution into fc, v and o.

    Attention starts on each row itself (q and k tied on one head per group), the MLP silent (down = 0); gate and up
    are the target's last layer's. The unit is the last state's root mean square: without that learning is slow.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = shape.hidden_size
    solution = _ridge(shape, cache, embedding)  # (aux + hidden, hidden)
    fusion = solution[: shape.aux_layers * hidden].T.contiguous()
    weights = {name: torch.zeros(size) for name, size in shape.parameters().items()}
    weights[FUSION] = fusion
    for name in (INPUT_NORM, HIDDEN_NORM):
        weights[name] = torch.ones(hidden)
    weights[MLP_NORM] = last_layer["post_attention_layernorm.weight"].float().cpu()
    weights[OUTPUT_NORM] = last_layer["norm.weight"].float().cpu()
    _attend_to_self(weights, shape, solution[shape.aux_layers * hidden :].T, generator)
    for part in ("gate_proj", "up_proj"):
        taken = last_layer[f"mlp.{part}.weight"].float().cpu()
        own = torch.randn(shape.intermediate_size, hidden, generator=generator) * 0.02
        rows = min(len(taken), len(own))
        own[:rows] = taken[:rows]
        weights[f"midlayer.mlp.{part}.weight"] = own
    return weights


def _attend_to_self(weights: dict[str, Tensor], shape: HeadShape, linear: Tensor, generator: torch.Generator) -> None:
    """Put `linear` (hidden, hidden), embedding -> state, into v and o at the rank they have."""
    size, kv, groups = shape.head_size, shape.kv_heads, shape.heads // shape.kv_heads
    wide = 2 * shape.hidden_size
    keys = torch.randn(kv * size, wide, generator=generator) / math.sqrt(wide)
    queries = torch.randn(shape.heads * size, wide, generator=generator) * 0.3 / math.sqrt(wide)
    values = torch.randn(kv * size, wide, generator=generator) * 0.006
    output = torch.randn(shape.hidden_size, shape.heads * size, generator=generator) * 0.006
    left, strength, right = torch.linalg.svd(linear)
    rank = kv * size
    values[:, : shape.hidden_size] = strength[:rank].sqrt()[:, None] * right[:rank]
    for head in range(kv):
        own, first = slice(head * size, (head + 1) * size), groups * head * size
        queries[first : first + size] = keys[own]
        output[:, first : first + size] = left[:, own] * strength[own].sqrt()
    for part, matrix in (("q", queries), ("k", keys), ("v", values), ("o", output)):
        weights[f"midlayer.self_attn.{part}_proj.weight"] = matrix


def _ridge(shape: HeadShape, cache: FeatureCache, embedding: Tensor) -> Tensor:
    width = (shape.aux_layers + 1) * shape.hidden_size
    gram, cross = torch.zeros(width, width), torch.zeros(width, shape.hidden_size)
    table = embedding.cpu()
    for address in cache.addresses[:_RIDGE_EXAMPLES]:
        example = cache.read(address)
        first = max(0, example.prompt_tokens - 2)
        rows = table[example.tokens[first + 1 :].long()].float()
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + shape.norm_epsilon)
        inputs = torch.cat([example.aux[first:-1].float(), rows], -1)
        wanted = example.aux[first + 1 :, -shape.hidden_size :].float()
        gram += inputs.T @ inputs
        cross += inputs.T @ wanted
    damping = gram.diagonal().mean() * _RIDGE_STRENGTH
    solution: Tensor = torch.linalg.solve(gram + damping * torch.eye(width), cross)
    return solution

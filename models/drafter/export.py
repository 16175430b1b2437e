"""Export a head: own weights as int8 with a card, and the folder vLLM loads as `method: eagle3`.

Called at the end of training and by `faser drafter export`. The released file leaves out what the target has itself
(the LM head's rows); models/embedded/eagle3.py expands it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..embedded.cache import CacheError, sha256_of
from ..embedded.eagle3 import expand_drafter, read_card
from .drafter_error import DrafterError

Tensor = torch.Tensor
WEIGHTS = "drafter.safetensors"
CARD = "drafter.card.json"


def quantised(weights: Mapping[str, Tensor], vocabulary: Tensor, aux_layers: int) -> dict[str, Tensor]:
    """Round matrices to int8 with one float16 scale per row; vectors stay bfloat16."""
    stored: dict[str, Tensor] = {"draft_vocab": vocabulary.to(torch.int32).cpu()}
    for name, weight in weights.items():
        full = weight.detach().float().cpu()
        if full.dim() == 2:
            scale = (full.abs().amax(1) / 127).clamp_min(1e-6).half()
            stored[name] = (full / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
            stored[name + ".scale"] = scale
        else:
            stored[name] = full.to(torch.bfloat16)
    hidden = weights["norm.weight"].shape[0]
    for layer in range(aux_layers):  # without gain: the trainer keeps it inside fc
        stored[f"fc_norm.{layer}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    return stored


def export_drafter(
    folder: Path,
    target: Path,
    weights: Mapping[str, Tensor],
    vocabulary: Tensor,
    card: Mapping[str, object],
    aux_layers: tuple[int, ...],
) -> Path:
    """Write weights, card and the expanded folder `eagle3`; return the latter."""
    expanded = folder / "eagle3"
    expanded.mkdir(parents=True, exist_ok=True)
    save_file(quantised(weights, vocabulary, len(aux_layers)), str(folder / WEIGHTS))
    full = {**card, "file": WEIGHTS, "sha256": sha256_of(folder / WEIGHTS), "aux_layers": list(aux_layers)}
    (folder / CARD).write_text(json.dumps(full, indent=1) + "\n")
    try:
        expand_drafter(folder / WEIGHTS, read_card(folder / CARD), target, expanded)
    except (CacheError, KeyError) as error:
        raise DrafterError(f"head in {folder} cannot be expanded for vLLM: {error}") from error
    return expanded

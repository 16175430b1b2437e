"""Write exit heads: one safetensors file that the adapter loads, and a card beside it that says how good they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from ...engine_adapter.protocol import Prune
from ...engine_adapter.pruning.exit_file import FORMAT
from ...engine_adapter.pruning.exit_heads import TENSORS
from ...engine_adapter.pruning.head_math import Head
from ..embedded.cache import sha256_of
from .record import Recording

FINGERPRINT: Final = (8, 16)  # a corner of the LM head, to know the target by


def export_heads(
    file: Path,
    heads: Mapping[int, Head],
    recording: Recording,
    card: Mapping[str, object],
    released: Prune | None = None,
) -> None:
    """Write `file` and the card; matrices in bfloat16.

    :param released: the layer and threshold to prune with.
    """
    from safetensors.torch import save_file

    rows, columns = FINGERPRINT
    tensors = {"fingerprint": recording.lm_head[:rows, :columns].float().contiguous()}
    for layer, head in heads.items():
        for name in TENSORS:
            tensors[f"{layer}.{name}"] = getattr(head, name).to(torch.bfloat16).contiguous()
        tensors[f"{layer}.weights"] = head.weights.float()
    vocabulary, hidden = recording.lm_head.shape
    metadata = {
        "format": FORMAT,
        "layers": ",".join(map(str, sorted(heads))),
        "target_layers": str(recording.layers),
        "hidden_size": str(hidden),
        "vocabulary": str(vocabulary),
        "candidates": str(recording.candidates.shape[1]),
    }
    if released is not None:
        metadata["released"] = f"{released.layer},{released.threshold:g}"
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(file), metadata=metadata)
    file.chmod(0o644)
    named = dict(card) | {"file": file.name, "sha256": sha256_of(file)}
    file.with_suffix(".card.json").write_text(json.dumps(named, indent=1) + "\n")

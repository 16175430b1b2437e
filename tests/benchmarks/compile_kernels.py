"""Compile every Triton kernel to Hopper's machine code, no GPU needed; print their names. Or those of given names.

Run by test_gpu_parts.py and test_gpu_sanitizer.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import faser
from faser.engine_adapter.pruning import exit_kernel, prefix_kernel

sys.path.insert(0, str(Path(faser.__file__).parent / "benchmarks" / "gpu"))
import fused
import part_splits

HOPPER = GPUTarget("cuda", 90, 32)
STATE, NUMBER, REAL = "*bf16", "i32", "fp32"


def compiled(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> None:
    """Compile one kernel down to a cubin."""
    if len(sys.argv) > 1 and kernel.__name__ not in sys.argv[1:]:
        return
    signature = {name: "constexpr" if name in constants else types.get(name, NUMBER) for name in kernel.arg_names}
    made = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constants), target=HOPPER)
    assert made.asm["cubin"]
    print(kernel.__name__)


compiled(
    fused._add_norm, dict.fromkeys(("state", "residual", "weight", "out"), STATE) | {"epsilon": REAL}, {"BLOCK": 8192}
)
compiled(fused._gate, {"gate_up": STATE, "out": STATE}, {"BLOCK": 1024})
compiled(
    fused._rope_store,
    dict.fromkeys(("qkv", "norms", "queries", "keys", "values"), STATE) | {"turns": "*fp32", "epsilon": REAL},
    {"HALF": 64},
)
compiled(part_splits._where_am_i, {"out": "*i32"}, {})
compiled(
    exit_kernel._decide,
    {
        "moved_states": STATE,
        "lm_head": STATE,
        "candidates": "*i64",
        "positions": "*i64",
        "rows": "*i64",
        "threshold": REAL,
    }
    | dict.fromkeys(("confidences", "probes", "weights"), "*fp32")
    | dict.fromkeys(("tokens", "spared", "owner", "row_owner", "behind", "drafts", "told"), "*i32"),
    {"BLOCK_C": 16, "BLOCK_H": 256, "BLOCK_R": 1024, "LEAST": exit_kernel.LEAST, "NOWHERE": exit_kernel.NOWHERE},
)
compiled(
    prefix_kernel._score,
    {"moved_states": STATE, "lm_head": STATE, "tokens": "*i32", "candidates": "*i64", "positions": "*i64"}
    | dict.fromkeys(("confidences", "probes", "weights", "out"), "*fp32"),
    {"BLOCK_C": 16, "BLOCK_H": 256, "LEAST": exit_kernel.LEAST, "NOWHERE": exit_kernel.NOWHERE},
)
for requests in (1, 256):
    compiled(
        prefix_kernel._plan,
        {"chances": "*fp32", "threshold": REAL, "rows_out": "*i64", "logits_out": "*i64"}
        | dict.fromkeys(("firsts", "lengths", "kept_out", "left_out", "starts_out", "passing_out"), "*i32"),
        {"BLOCK_Q": requests, "BLOCK_K": 8, "BLOCK_R": prefix_kernel.ROWS_AT_ONCE, "TOP_BIT": prefix_kernel.TOP_BIT},
    )

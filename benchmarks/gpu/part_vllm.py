"""The same shapes inside vLLM, where it is installed: no speculation, vLLM's own, and vLLM with FASER's adapter.

Models have random weights, made by vLLM itself from a configuration; a share of the drafts is accepted by decree
(vLLM's synthetic rejection sampling), so that steps are full and end alike. Each engine is a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checkout import ROOT
from shapes import Shape

ARMS = ("none", "vllm", "faser")
LIMIT_S = 150
ACCEPTED = 0.7  # of drafts that are tested, by decree


def measure(drafter: Shape, target: Shape, requests: int, length: int, tokens: int) -> dict[str, Any]:
    """Return each arm's tokens per second, or why it could not be tried."""
    if importlib.util.find_spec("vllm") is None:
        return {"skipped": "vLLM is not installed"}
    found: dict[str, Any] = {"requests": requests, "length": length, "arms": {}}
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for role, shape in (("drafter", drafter), ("target", target)):
            paths[role] = Path(folder, role)
            paths[role].mkdir()
            (paths[role] / "config.json").write_text(json.dumps(configuration(shape)))
        for arm in ARMS:
            task = {"arm": arm, "requests": requests, "length": length, "tokens": tokens,
                    "accepted": ACCEPTED, "is_eager": False,
                    "target": str(paths["target"]), "drafter": str(paths["drafter"])}  # fmt: skip
            found["arms"][arm] = _run(task, folder)
    return found


def configuration(shape: Shape) -> dict[str, Any]:
    """Return the shape as a Hugging Face configuration."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size, "intermediate_size": shape.intermediate, "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.is_tied, "rope_theta": shape.rope_theta, "rms_norm_eps": shape.epsilon,
        "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "hidden_act": "silu", "bos_token_id": 0,
        "eos_token_id": 1, "attention_bias": False,
    }  # fmt: skip


def _run(task: dict[str, Any], folder: str) -> dict[str, Any]:
    code = Path(__file__).with_name("vllm_engine.py")
    environment = os.environ | {"FASER_ENDPOINT": f"ipc://{folder}/nobody"}
    process = subprocess.Popen(
        [sys.executable, str(code), json.dumps(task)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        cwd=ROOT, env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        told, complaint = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {LIMIT_S} s"}
    finally:
        with contextlib.suppress(ProcessLookupError):  # vLLM's own children too, however it ended
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    answers = [line for line in told.splitlines() if line.startswith("{")]
    if process.returncode or not answers:
        return {"error": (complaint.strip().splitlines() or ["no output"])[-1][:300]}
    answer: dict[str, Any] = json.loads(answers[-1])
    return answer

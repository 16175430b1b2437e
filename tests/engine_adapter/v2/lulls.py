"""Engines whose drafter is left out for steps on end, and what it drafts afterwards."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs import Engine, Gauntlet, counted, prompts
from tiny_models import VOCABULARY

from faser.engine_adapter.drafting.kept_rows import KeptRows
from faser.engine_adapter.patches.speculators.first_pass import LaterPass


def _raise(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken on purpose")


def _never(_: Any, most: int) -> list[Any]:
    return []


def _neighbours_states(first_pass: Any, into: Any, given: dict[str, Any]) -> None:
    KEEP_STATES(first_pass, into, given)
    into.copy_(into.roll(1, 0))


KEEP_STATES = LaterPass._keep_states
CONTROLS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "no catch-up": (KeptRows, "take", _never),
    "neighbour's states": (LaterPass, "_keep_states", _neighbours_states),
    "no ends": (KeptRows, "_outlive", lambda *_: None),
    "failing bookkeeping": (KeptRows, "keep", _raise),
    "failing room": (LaterPass, "_width", _raise),
    "failing copy": (LaterPass, "keep", _raise),
    "failing inputs": (LaterPass, "prepared", _raise),
    "failing pass": (LaterPass, "_run", _raise),
}


def started(given: dict[str, Any]) -> Engine:
    """Start an engine that notes what its drafter proposes, under the control that `break` names."""
    os.environ.update(given.get("environment", {}))
    if "break" in given:
        setattr(*CONTROLS[given["break"]])
    engine = Engine(given)
    engine.proposed = []  # type: ignore[attr-defined]
    inherited = engine.runner.speculator.propose

    def propose(batch: Any, *args: Any, **named: Any) -> Any:
        drafts, rounds = inherited(batch, *args, **named), named["num_speculative_tokens"]
        seen = dict(zip(batch.req_ids, drafts[:, :rounds].tolist(), strict=True)) if rounds else {}
        engine.proposed.append({name.split("-")[0]: tokens for name, tokens in seen.items()})  # type: ignore[attr-defined]
        return drafts

    engine.runner.speculator.propose = propose
    return engine


def stir(given: dict[str, Any]) -> str:
    """Write a head whose attention reads the target's states, which that of the tiny EAGLE-3 leaves out."""
    import torch
    from safetensors.torch import load_file, save_file

    head, folder = Path(given["head"]), Path(given["folder"])
    shutil.copytree(head, folder)
    weights = load_file(head / "model.safetensors")
    torch.manual_seed(3)
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:
            weight.add_(torch.randn_like(weight) * 0.2)
    save_file(weights, folder / "model.safetensors")
    return str(folder)


def facts(engine: Any) -> dict[str, Any]:
    """Return what was drafted and how often the drafter ran."""
    log = engine.steer.log
    sure = [sorted((name.split("-")[0], row["confidences"]) for name, row in entry["rows"].items()) for entry in log]
    caught_up = [entry["caught_up"] for entry in log]
    return engine.facts() | {"proposed": engine.proposed, "sure": sure, "caught_up": caught_up}


def generate_with_lulls(given: dict[str, Any]) -> dict[str, Any]:
    """Let a handful of requests run together, greedily."""
    engine: Any = started(given)
    tokens = answers(engine, prompts(tuple(given["prompts"]), given.get("vocabulary", VOCABULARY)), given["tokens"])
    return facts(engine) | {"tokens": tokens}


def answers(engine: Any, asked: list[Any], most: int) -> list[list[int]]:
    """Return greedy answers of so many tokens, and note how many of each prompt the prefix cache had."""
    from vllm import SamplingParams

    plain = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True, detokenize=False)
    done = engine.llm.generate(asked, plain, use_tqdm=False)
    engine.cached = [request.num_cached_tokens for request in done]
    return [list(request.outputs[0].token_ids) for request in done]


def ask_again(given: dict[str, Any]) -> dict[str, Any]:
    """Let a request begin and end while nobody drafts; then let others go on where it ended, and draft."""
    engine: Any = started(given | {"engine": {"block_size": 32, "max_num_batched_tokens": 128}})
    (asked,) = prompts((90,), given["vocabulary"])
    (said,) = answers(engine, [asked], 8)
    longer = asked["prompt_token_ids"] + said
    tokens = answers(engine, [{"prompt_token_ids": [*longer, token]} for token in (7, 9)], 12)
    return facts(engine) | {"tokens": [said, *tokens], "cached": engine.cached}


def everything_with_lulls(given: dict[str, Any]) -> dict[str, Any]:
    """Put one engine through all that vLLM does in a batch; see `jobs.everything`."""
    engine: Any = started(given | {"engine": {"block_size": 32, "num_gpu_blocks_override": 22}})
    gauntlet = Gauntlet(engine, given["vocabulary"])
    with counted(engine) as preemptions:
        gauntlet.run()
    seen = {"outputs": gauntlet.outputs, "preemptions": len(preemptions), "cached": gauntlet.cached}
    return facts(engine) | seen

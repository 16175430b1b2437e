"""Engines whose drafter is left out for steps on end, and what it drafts afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from jobs import Engine, counted, prompts
from tiny_models import VOCABULARY

from faser.engine_adapter.drafting.kept_rows import KeptRows
from faser.engine_adapter.patches.v2_first_pass import FirstPass


def _raise(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken on purpose")


def _never(_: Any, most: int) -> list[Any]:
    return []


def _neighbours_states(first_pass: Any, into: Any, given: dict[str, Any]) -> None:
    KEEP_STATES(first_pass, into, given)
    into.copy_(into.roll(1, 0))


KEEP_STATES = FirstPass._keep_states
CONTROLS: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "no catch-up": (KeptRows, "take", _never),
    "neighbour's states": (FirstPass, "_keep_states", _neighbours_states),
    "no ends": (KeptRows, "_outlive", lambda *_: None),
    "failing bookkeeping": (KeptRows, "keep", _raise),
    "failing room": (FirstPass, "_width", _raise),
    "failing copy": (FirstPass, "keep", _raise),
    "failing inputs": (FirstPass, "prepared", _raise),
    "failing pass": (FirstPass, "_run", _raise),
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


def facts(engine: Any) -> dict[str, Any]:
    """Return what was drafted and how often the drafter ran."""
    caught_up = [entry["caught_up"] for entry in engine.steer.log]
    return engine.facts() | {"proposed": engine.proposed, "caught_up": caught_up}


def generate_with_lulls(given: dict[str, Any]) -> dict[str, Any]:
    """Let a handful of requests run together, greedily."""
    from vllm import SamplingParams

    engine = started(given)
    plain = SamplingParams(max_tokens=given.get("tokens", 24), temperature=0.0, ignore_eos=True, detokenize=False)
    asked = prompts(tuple(given.get("prompts", (5, 17, 40))), given.get("vocabulary", VOCABULARY))
    done = engine.llm.generate(asked, plain, use_tqdm=False)
    return facts(engine) | {"tokens": [[list(output.token_ids) for output in request.outputs] for request in done]}


__all__ = ["counted", "generate_with_lulls"]

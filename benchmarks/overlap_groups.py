"""Ping-pong groups in overlap.py: two groups against the same requests drafted in turn, and against the bound.

Three arms in turns: all requests in turn, half of them in turn (what a group's phases take alone), and all in two
groups. Rates are of steps in which everybody decodes. Called by overlap.py; its docstring says how the oracle works.
"""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any, Protocol

from faser.env.overlap import PhaseTimes, bound_reached, hidden_draft_share, ping_pong_bound

ARMS = ("in turn", "half in turn", "ping-pong")
BAR = 0.7
Step = dict[str, Any]
Run = dict[str, Any]


class Engine(Protocol):
    """The child's end of overlap_engine.py."""

    def ask(self, *order: Any) -> Any: ...


def measure(engine: Engine, prompts: list[list[int]], options: Any) -> dict[str, Any]:
    """Return what all arms took."""
    said = [engine.ask("record", prompt, options.tokens) for prompt in prompts]
    texts = [prompt + tokens for prompt, tokens in zip(prompts, said, strict=True)]
    engine.ask("equip", texts, 0.0, 0.0)
    for _ in range(2):
        free = engine.ask("run_all", prompts, options.tokens, False)
    pass_s = options.balance * statistics.median(verify_times(free["steps"])) / (len(prompts) * options.length)
    engine.ask("equip", texts, 1.0 - options.acceptance, pass_s)

    def run(arm: str) -> Run:
        asked = len(prompts) // 2 if arm == "half in turn" else len(prompts)
        found: Run = engine.ask("run_all", prompts[:asked], options.tokens, arm == "ping-pong")
        if found["tokens"] != said[:asked]:
            raise SystemExit(f"overlap.py: {asked} requests, {arm}, gave other tokens than the target alone")
        return found

    for arm in ARMS:  # warm
        run(arm)
    runs: dict[str, list[Run]] = {arm: [] for arm in ARMS}
    for round_ in range(options.rounds):
        for arm in ARMS if round_ % 2 == 0 else ARMS[::-1]:
            runs[arm].append(run(arm))
    return summary(runs, len(prompts), pass_s)


def steady(steps: list[Step]) -> list[Step]:
    """Return the steps in which everybody decodes, with what each took."""
    return [
        step | {"step_s": after["began_s"] - step["began_s"]}
        for step, after in pairwise(steps)
        if step["is_steady"] and after["is_steady"]
    ]


def verify_times(steps: list[Step]) -> list[float]:
    """Return the seconds of each steady step without what its core drafted or waited for drafts."""
    return [step["step_s"] - (step["draft"][1] - step["draft"][0]) for step in steady(steps)]


def rate(run: Run) -> float:
    """Return tokens per second."""
    found = steady(run["steps"])
    emitted: int = sum(step["emitted"] for step in found)
    return emitted / sum(step["step_s"] for step in found)


def phases(runs: list[Run]) -> PhaseTimes:
    """Return both phases of the median step of an arm that drafts in turn."""
    verified = [time_s for run in runs for time_s in verify_times(run["steps"])]
    return PhaseTimes(statistics.median(waits(runs)), statistics.median(verified))


def waits(runs: list[Run]) -> list[float]:
    """Return the seconds of each steady step in which the target's core drafted or waited for drafts."""
    return [step["draft"][1] - step["draft"][0] for run in runs for step in steady(run["steps"])]


def spread(values: list[float]) -> dict[str, float]:
    """Return median, least and most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def summary(runs: dict[str, list[Run]], requests: int, pass_s: float) -> dict[str, Any]:
    """Return the report of all runs."""
    whole, half = phases(runs["in turn"]), phases(runs["half in turn"])
    together = [statistics.fmean(step["step_s"] for step in steady(run["steps"])) for run in runs["ping-pong"]]
    hidden = [hidden_draft_share(half, step_s) for step_s in together]
    pairs = zip(runs["in turn"], runs["ping-pong"], strict=True)
    speedup, bound = spread([rate(other) / rate(one) for one, other in pairs]), ping_pong_bound(whole, half)
    return {
        "requests": requests, "runs_per_arm": len(together), "pass_ms": 1e3 * pass_s,
        "verify_ms": {"all": 1e3 * whole.verify_s, "half": 1e3 * half.verify_s},
        "draft_ms": {"all": 1e3 * whole.draft_s, "half": 1e3 * half.draft_s},
        "tokens_per_s": {arm: spread([rate(run) for run in runs[arm]]) for arm in ARMS},
        "step_ms": {"ping-pong": spread([1e3 * step_s for step_s in together])},
        "wait_ms": {"ping-pong": 1e3 * statistics.median(waits(runs["ping-pong"]))},
        "speedup": speedup, "bound": bound, "of_bound": speedup["median"] / bound,
        "bound_reached": bound_reached(speedup["median"], bound), "hidden_share": spread(hidden),
        "holds": {
            f"of its bound >= {BAR}": speedup["median"] >= BAR * bound,
            f"hidden >= {BAR}": statistics.median(hidden) >= BAR,
        },
    }  # fmt: skip

"""The drafter's confidence on held-out prompts, in the real engine, and the draft work it saves.

    python benchmarks/confidence_engine.py quality [--curve docs/confidence.svg] [--json FILE]
    python benchmarks/confidence_engine.py saving [--requests 1 2 4 8] [--rounds 4] [--json FILE]

`quality`: every request drafts four tokens at every step; AUC and calibration error by position, greedy and at T = 0.7.
`saving`: `price`, `price:history` and every fixed length take turns on the same prompts, each deciding on every step
inside the engine's process; tokens drawn, verified and accepted per token emitted, and what drafting without confidence
draws for as much acceptance as `price` has: the best mixture of two of the others. Counts depend on the machine only
through the step costs that the policies learn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drafter_acceptance import chosen_texts
from embedded_engine import chat, start_engine

from faser.controller.engine.machine import provenance
from faser.engine_adapter.protocol import ActionSet, FromController, FromEngine, Hello, StepRecord

K_MAX = 4
SEQUENCE = itertools.count(1)  # of action sets, over both policies: an engine takes rising ones only
TEMPERATURES = (0.0, 0.7)
SETTINGS = "eager, bfloat16, k_max 4, embedded pair, held-out prompts of five kinds up to 600 tokens"


@dataclass
class Sidecar:
    """Stands in for the engine's link: keeps records and, with a decision maker, answers each before the next step."""

    decide: Callable[[StepRecord], ActionSet] | None = None
    records: list[StepRecord] = field(default_factory=list)
    inbox: list[FromController] = field(default_factory=list)
    dropped: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def send(self, message: FromEngine) -> None:
        """Take a record; decide on it."""
        if not isinstance(message, StepRecord):
            return
        self.records.append(message)
        if self.decide is not None:
            self.inbox = [self.decide(message)]

    def send_later(self, make: Callable[[], FromEngine], rest_s: float = 0.0) -> None:
        """Take a record that is still to be made."""
        self.send(make())

    def receive(self) -> list[FromController]:
        """Return the newest action set."""
        inbox, self.inbox = self.inbox, []
        return inbox

    def close(self, wait_s: float = 0.0) -> None:
        """Nothing to close."""


def start_silent_engine(requests: int, default_length: int) -> Any:
    """Return vLLM with FASER in this process, whose link reaches nobody."""
    os.environ |= {"FASER_DEFAULT_K": str(default_length), "FASER_ENDPOINT": "tcp://127.0.0.1:9"}
    engine = start_engine(K_MAX, requests, max_model_len=1024, enable_prefix_caching=False)
    steering_of(engine).link.close()
    return engine


def steering_of(engine: Any) -> Any:
    return engine.llm_engine.engine_core.engine_core.scheduler.steering


def answer(engine: Any, texts: list[str], temperature: float, max_tokens: int) -> float:
    """Answer all prompts; return the seconds it took."""
    started = time.monotonic()
    seed = 1 if temperature else None
    chat(engine, texts, temperature=temperature, max_tokens=max_tokens, seed=seed)
    return time.monotonic() - started


def decision_maker(policy: str, hello: Hello) -> Callable[[StepRecord], ActionSet]:
    """Return what answers an engine's records as the sidecar would under a policy."""
    from faser.controller.decision.decide import LeaseTerms, decide
    from faser.env.estimate.engine_state import EngineState, learn
    from faser.env.spaces import Capabilities
    from faser.models.registry import make_policy

    capabilities = Capabilities.from_hello(hello)
    state, chosen = EngineState(capabilities), make_policy(policy, capabilities)

    def decided(record: StepRecord) -> ActionSet:
        decision = decide(state, record, chosen, LeaseTerms(), 1, next(SEQUENCE))
        learn(state)
        return decision.action_set

    return decided


def measure_quality(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of every position, by temperature; draw the greedy curves."""
    texts = [text for kind in chosen_texts(options.prompts, 1, 600, None).values() for text in kind]
    engine = start_silent_engine(16, K_MAX)
    from faser.controller.calibrate.confidence_report import draw, judge, quality

    sidecar = Sidecar()
    steering_of(engine).link = sidecar
    found = {}
    for temperature in TEMPERATURES:
        sidecar.records.clear()
        answer(engine, texts, temperature, options.max_tokens)
        judged = judge((record.rows for record in sidecar.records), K_MAX)
        qualities = [quality(position, one) for position, one in enumerate(judged, start=1)]
        found[f"{temperature:g}"] = [asdict(one) for one in qualities]
        if options.curve is not None and not temperature:
            draw(qualities, options.curve)
        for one in qualities:
            print(
                f"T={temperature:g} position {one.position}: {one.tokens} tested, {one.rejected} rejected, AUC "
                f"{one.auc:.3f} ({one.auc_low:.3f}-{one.auc_high:.3f}), calibration error raw {one.raw_error:.3f}, "
                f"online {one.error:.3f}",
                flush=True,
            )
    return {"prompts": len(texts), "max_tokens": options.max_tokens, "by_temperature": found}


def measure_saving(options: argparse.Namespace) -> dict[str, Any]:
    """Return what each policy drew, verified and had accepted at each load, over all its turns but the first."""
    texts = [text for kind in chosen_texts(options.prompts, 2, 600, None).values() for text in kind]
    engine = start_silent_engine(max(options.requests), 0)
    loads = {}
    for requests in options.requests:
        engine.llm_engine.engine_core.engine_core.scheduler.max_num_active_reqs = requests
        print(f"{requests} requests at a time", flush=True)
        loads[str(requests)] = measure_load(engine, texts, options)
    return {"prompts": len(texts), "max_tokens": options.max_tokens, "rounds": options.rounds, "loads": loads}


def measure_load(engine: Any, texts: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Return one load's sums by policy; every policy begins anew."""
    steering = steering_of(engine)
    names = ("price", "price:history", *(f"fixed:{k}" for k in range(1, K_MAX + 1)))
    arms = {name: Sidecar(decision_maker(name, steering.hello)) for name in names}
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for round_ in range(options.rounds + 1):
        for name in list(arms) if round_ % 2 else list(arms)[::-1]:
            sidecar = steering.link = arms[name]
            sidecar.records.clear()
            took_s = answer(engine, texts, TEMPERATURES[round_ % 2], options.max_tokens)
            counts = count(sidecar.records) | {"seconds": took_s, "temperature": TEMPERATURES[round_ % 2]}
            print(name, {key: round(value, 3) for key, value in counts.items()}, flush=True)
            if round_:  # the first turn is for learning
                turns[name].append(counts)
    return {"turns": turns, "summary": saving(turns)}


def saving(turns: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return each policy's work per token emitted, and price's beside the least that the others need for as much."""
    summary = {}
    for name, all_counts in turns.items():
        total = {key: sum(counts[key] for counts in all_counts) for key in all_counts[0] if key != "temperature"}
        summary[name] = total | {
            "drawn_per_emitted": total["drawn"] / total["emitted"],
            "accepted_per_emitted": total["accepted"] / total["emitted"],
            "verified_per_emitted": total["verified"] / total["emitted"],
            "accepted_per_drawn": total["accepted"] / max(total["drawn"], 1),
            "rounds_per_step": total["rounds"] / total["steps"],
            "tokens_per_s": total["emitted"] / total["seconds"],
        }
    ours, others = summary["price"], [each for name, each in summary.items() if name != "price"]
    for what in ("drawn", "verified"):
        points = [(each["accepted_per_emitted"], each[f"{what}_per_emitted"]) for each in others]
        ours[f"{what}_without_confidence"] = without = least(points, ours["accepted_per_emitted"])
        print(f"as much accepted: {ours[f'{what}_per_emitted']:.3f} {what} per token, without {without:.3f}")
    return summary


def least(points: list[tuple[float, float]], accepted: float) -> float:
    """Return the least work for `accepted` by any mixture of two of these (accepted, work), or of one and nothing."""
    known = [(0.0, 0.0), *points]
    mixtures = [
        left[1] + (right[1] - left[1]) * (accepted - left[0]) / (right[0] - left[0])
        for left, right in itertools.permutations(known, 2)
        if left[0] <= accepted <= right[0] and right[0] > left[0]
    ]
    return min(mixtures, default=math.inf)


def count(records: list[StepRecord]) -> dict[str, float]:
    """Return sums over the steps: tokens, and passes of the drafter."""
    rows = [row for record in records for row in record.rows]
    return {
        "steps": len(records),
        "emitted": sum(row.emitted for row in rows),
        "drawn": sum(record.drawn_tokens or 0 for record in records),
        "verified": sum(row.verified for row in rows),
        "accepted": sum(row.accepted for row in rows),
        "rounds": sum(record.draft_rounds or 0 for record in records),
    }


def main() -> None:
    """Print the figures and, if asked, write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("quality", "saving"), nargs="?", default="quality")
    parser.add_argument("--prompts", type=int, default=12, help="of each of the five kinds")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8], help="at a time, for saving")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each policy, for saving")
    parser.add_argument("--curve", type=Path, help="write the greedy reliability curves here, as SVG")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    found = measure_quality(options) if options.what == "quality" else measure_saving(options)
    if options.json is not None:
        options.json.write_text(
            json.dumps(provenance() | {"settings": SETTINGS} | found, indent=1, default=_plain) + "\n"
        )


def _plain(value: object) -> object:
    return None if isinstance(value, float) and math.isnan(value) else str(value)


if __name__ == "__main__":
    main()

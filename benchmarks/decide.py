"""Measure the decision core: observe + policy + guard + pack, one thread.

    OMP_NUM_THREADS=1 python benchmarks/decide.py [--policy price] [--k-max 7] [--steps 2000] [--copies] [--json]

Each step's record is made beforehand; every 20th step one request finishes and another arrives. `decide` is the
whole call, `policy` the policy's part alone, `learn` what the record teaches, done after the answer is out. Times are
wall time; run it on an idle core.
"""

from __future__ import annotations

import argparse
import json
import random
import time

import msgspec
import numpy as np
from made_engine import record

from faser.controller.decision.decide import LeaseTerms, decide
from faser.engine_adapter.protocol import RequestEvent, StepRecord
from faser.env.estimate.engine_state import EngineState, learn
from faser.env.spaces import Capabilities
from faser.models.registry import make_policy

BATCHES = (16, 64, 256)
PARTS = ("decide", "policy", "learn")


def make_records(batch: int, k_max: int, steps: int, is_confident: bool, has_copies: bool) -> list[StepRecord]:
    """Return the records of a steady batch in which requests come and go and accept differently.

    :param has_copies: a third of the drafts are copied
    """
    copied: tuple[int, ...] = ()
    chance = random.Random(0)
    handles, newest, time_s, records = list(range(1, batch + 1)), batch, 0.0, []
    for step in range(steps):
        events = []
        if step % 20 == 19:
            gone, newest = handles.pop(0), newest + 1
            handles.append(newest)
            events = [
                RequestEvent("finish", gone, time_s, 99),
                RequestEvent("arrival", newest, time_s, 80, f"r{newest}"),
            ]
        drafts = [_draft(chance, handle, k_max) for handle in handles]
        lengths = [len(sure) for sure, _ in drafts]
        verified = sum(lengths)
        draft_s = 0.004 + 1e-5 * verified
        verify_s = (0.012 + 6e-5 * (batch + verified)) * chance.lognormvariate(0, 0.05)
        time_s += draft_s + verify_s
        confidences = [sure for sure, _ in drafts] if is_confident else ()
        made = record("boot", step, time_s, lengths, [accepted for _, accepted in drafts], confidences, handles)
        verified_copies, copied = copied, tuple(chance.sample(handles, batch // 3)) if has_copies else ()
        records.append(
            msgspec.structs.replace(
                made, step_s=draft_s + verify_s, draft_s=draft_s, verify_s=verify_s, sample_s=0.0, events=events,
                copied=copied, verified_copies=verified_copies,
            )
        )  # fmt: skip
    return records


def _draft(chance: random.Random, handle: int, k_max: int) -> tuple[tuple[float, ...], int]:
    """Return how sure a drafter is of its tokens, and how many of them are accepted."""
    level = 0.5 + 0.4 * (handle % 3 - 1)
    sure = tuple(chance.betavariate(3.0 * level, 3.0 - 3.0 * level) for _ in range(chance.randint(0, k_max)))
    accepted = 0
    while accepted < len(sure) and chance.random() < sure[accepted]:
        accepted += 1
    return sure, accepted


def measure(
    batch: int, policy_name: str, k_max: int, steps: int, is_confident: bool, has_copies: bool
) -> dict[str, float]:
    """Return percentiles in microseconds over the second half of the steps."""
    capabilities = Capabilities(k_max=k_max, copy_max=k_max if has_copies else 0)
    state, policy = EngineState(capabilities), make_policy(policy_name, capabilities)
    whole, alone, after = [], [], []
    for sequence, step in enumerate(make_records(batch, k_max, steps, is_confident, has_copies)):
        start = time.perf_counter()
        decide(state, step, policy, LeaseTerms(), 1, sequence)
        decided = time.perf_counter()
        learn(state)
        learnt = time.perf_counter()
        policy.act(state)
        alone.append(time.perf_counter() - learnt)
        whole.append(decided - start)
        after.append(learnt - decided)
    half = steps // 2
    spread = {name: np.array(times[half:]) * 1e6 for name, times in zip(PARTS, (whole, alone, after), strict=True)}
    return {f"{name}_p{p}_us": float(np.percentile(values, p)) for name, values in spread.items() for p in (50, 99)}


def main() -> None:
    """Print one row per batch size, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="price")
    parser.add_argument("--k-max", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--no-confidence", action="store_true", help="records without the drafter's confidences")
    parser.add_argument("--copies", action="store_true", help="a third of the drafts are copied")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    is_confident, k_max = not arguments.no_confidence, arguments.k_max
    settings = arguments.policy, k_max, arguments.steps, is_confident, arguments.copies
    results = {batch: measure(batch, *settings) for batch in BATCHES}
    if arguments.json:
        setting = {
            "policy": arguments.policy,
            "k_max": k_max,
            "has_confidence": is_confident,
            "has_copies": arguments.copies,
        }
        print(json.dumps(setting | {"requests": results}))
        return
    print(f"{'requests':>8}" + "".join(f" {part + ' p50':>11} {'p99 us':>9}" for part in PARTS))
    for batch, row in results.items():
        print(
            f"{batch:>8}" + "".join(f" {row[f'{part}_p50_us']:>11.0f} {row[f'{part}_p99_us']:>9.0f}" for part in PARTS)
        )


if __name__ == "__main__":
    main()

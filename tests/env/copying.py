"""Engines that copy drafts from requests' own texts, and what is served on them; shared by tests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from faser.engine_adapter.protocol import ActionSet, MatchRule, RequestRow, StepRecord
from faser.env.profile.acceptance_model import QUANTILES, AcceptanceModel
from faser.env.profile.engine_profile import EngineProfile, synthetic_profile
from faser.env.profile.match_model import MatchModel
from faser.env.simulator.scenario import Scenario
from faser.env.simulator.simulated_engine import SimulatedEngine
from faser.env.workload.request_trace import Trace

LONGEST = 8


def match_model(
    after_whole: float = 2.0,
    after_other: float = -1.0,
    spread: float = 1.0,
    mean: float = 1.0,
    lift: float = 0.0,
    surer: float = 0.0,
) -> MatchModel:
    """Return a model of matches of one to eight tokens.

    :param mean: of the logit of the engine's chances; `lift`: by how much the true ones are above
    :param surer: by how much the engine's chances are higher behind a copy that was accepted as a whole
    """
    ranks = np.clip(np.linspace(0.0, 1.0, QUANTILES), 0.01, 0.99)
    logits = mean + 1.2 * np.log(ranks / (1.0 - ranks)) / 1.7
    tokens = AcceptanceModel(
        intercepts=(lift,) * LONGEST, slopes=(1.0,) * LONGEST, quantiles=(tuple(logits.tolist()),) * LONGEST,
        request_share=0.2, carry=0.6, hidden=0.3,
    )  # fmt: skip
    whole = (tuple((logits + surer).tolist()),) * LONGEST
    return MatchModel(after_whole, after_other, spread, (0.1, 0.1, 0.1, 0.1, 0.0, 0.0, 0.1, 0.5), tokens, whole)


def copying_profile(matches: MatchModel | None, requests: int = 16) -> EngineProfile:
    """Return an engine whose drafter drafts up to four tokens."""
    return replace(synthetic_profile(max_requests=requests, k_max=4), matches=matches)


def scenario(matches: MatchModel | None, requests: int = 16) -> Scenario:
    """Return a full batch of answers of 200 to 400 tokens."""
    answers = np.random.default_rng(5).integers(200, 400, 400)
    trace = Trace("full", np.arange(400) * 1e-3, np.full(400, 50), answers)
    return Scenario(
        profiles=(copying_profile(matches, requests),), workloads=(trace,), slots=requests, load=(6.0, 6.0), swing=0.0,
        hardness=0.0, coefficient_spread=0.0,
    )  # fmt: skip


def match_rule(
    keep: float = 0.2, worth: float = 0.0, fewest: int = 1, most: int = LONGEST, slope: float = 1.0,
    intercept: float = 0.0,
) -> MatchRule:  # fmt: skip
    """Return a rule with the same numbers at every position."""
    return MatchRule([slope], [intercept], [keep], most, worth, fewest)


def served(
    matches: MatchModel | None, rule: MatchRule | None, length: int = 0, steps: int = 400, seed: int = 3
) -> Iterator[StepRecord]:
    """Yield the records of an engine under one rule and one length of the drafter's drafts."""
    engine = SimulatedEngine(scenario(matches), seed)
    for sequence in range(1, steps + 1):
        actions = ActionSet("simulated", 1, sequence, sequence + 9, 1e12, length, [], [], match=rule)
        yield engine.step(actions)


def verified_copies(records: Iterator[StepRecord]) -> dict[tuple[int, int], RequestRow]:
    """Return the rows that verified a copy, by handle and tokens of the answer before."""
    emitted: dict[int, int] = {}
    found = {}
    for record in records:
        for row in record.rows:
            before = emitted.get(row.handle, 0)
            if row.handle in record.verified_copies:
                found[row.handle, before] = row
            emitted[row.handle] = before + row.emitted
    return found

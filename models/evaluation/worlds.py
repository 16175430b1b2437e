"""The worlds that policies are trained and judged in: engines, acceptance, load. Held-out ones are never trained in.

Called by models/evaluation/evaluate.py and models/training/train.py. One profile was measured as a whole, the
embedded pair's; the others' costs are of published fits or of the tables in docs/, and each world says which.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import msgspec
import numpy as np

from ...env.profile.acceptance_model import QUANTILES, AcceptanceModel
from ...env.profile.engine_profile import (
    Ahead,
    EngineProfile,
    Exit,
    Split,
    shipped_profile,
    synthetic_profile,
)
from ...env.profile.match_model import MatchModel
from ...env.simulator.scenario import Scenario, ServiceClass
from ...env.workload.request_trace import Trace

LOADS: Final = (1, 2, 4, 8, 16, 32, 64, 128)  # running requests
OVERLOAD: Final = 6.0  # arrivals, as a share of what is served: the batch is always full
CLASSES: Final = (ServiceClass("interactive", 0.8), ServiceClass("batch", 0.2, 50.0, 8.0, 1))


@dataclass(frozen=True, slots=True)
class WorldSpec:
    """One engine and the requests it meets."""

    name: str
    note: str  # where the costs come from
    profile: EngineProfile
    has_confidence: bool = True

    def closed(self, requests: int) -> Scenario:
        """Return the scenario with always so many running requests, which are judged by tokens per second."""
        profile = msgspec.structs.replace(self.profile, max_requests=requests)
        return Scenario(
            profiles=(profile,), workloads=(chat_trace(),), slots=requests, load=(OVERLOAD, OVERLOAD), swing=0.0,
            hardness=0.0, coefficient_spread=0.0, classes=CLASSES, tells_objectives=False,
        )  # fmt: skip

    def drifting(self, slots: int = 64, load: float = 0.9) -> Scenario:
        """Return the scenario whose load and difficulty drift, from almost idle to past what can be served."""
        profile = msgspec.structs.replace(self.profile, max_requests=slots)
        return Scenario(
            profiles=(profile,), workloads=(chat_trace(),), slots=slots, load=(load, load), swing=1.0, swing_steps=60.0,
            hardness=0.6, coefficient_spread=0.0, classes=CLASSES,
        )  # fmt: skip


def chat_trace(rows: int = 4000) -> Trace:
    """Return evenly spaced requests with lengths of short chats: prompts of about 100 tokens, answers of about 150."""
    random = np.random.default_rng(11)
    prompt = np.clip(random.lognormal(math.log(90.0), 0.6, rows), 8, 800).astype(np.int64)
    answer = np.clip(random.lognormal(math.log(140.0), 0.6, rows), 16, 800).astype(np.int64)
    return Trace("chat", np.arange(rows, dtype=np.float64) * 0.1, prompt, answer)


def acceptance(
    k_max: int, mean_logit: float, spread: float, request_share: float, hidden: float = 0.2, fall: float = 0.1
) -> AcceptanceModel:
    """Return an acceptance model whose confidence is calibrated.

    :param spread: standard deviation of the confidence's logit; 2.2 gives an AUC of about 0.88, 1.5 one of 0.81
    :param request_share: of its variance, how much is the request's own
    :param fall: logits that each further position loses
    """
    ranks = np.clip(np.linspace(0.0, 1.0, QUANTILES), 0.004, 0.996)
    normal = np.array([NormalDist().inv_cdf(rank) for rank in ranks])
    quantiles = tuple(tuple((mean_logit - fall * j + spread * normal).tolist()) for j in range(k_max))
    return AcceptanceModel((0.0,) * k_max, (1.0,) * k_max, quantiles, request_share, 0.3, hidden, source="synthetic")


def confidence_auc(world: WorldSpec, position: int = 0) -> float:
    """Return the chance that a draft token that will be accepted has more confidence than one that will not."""
    model = world.profile.acceptance
    logits = np.array(model.quantiles[position])
    ranks = np.linspace(0.0, 1.0, 4001)
    confidence = np.interp(ranks, np.linspace(0.0, 1.0, len(logits)), logits)
    sure = model.intercepts[position] + model.slopes[position] * confidence
    residual = np.array([NormalDist().inv_cdf((i + 0.5) / 200) for i in range(200)])
    hit = (1.0 / (1.0 + np.exp(-(sure[:, None] + model.hidden * residual)))).mean(axis=1)
    miss = 1.0 - hit
    below = miss.cumsum() - 0.5 * miss  # of equal confidence half counts
    return float((hit * below).sum() / (hit.sum() * miss.sum()))


def _profile(name: str, model: AcceptanceModel, **costs: float) -> EngineProfile:
    profile = synthetic_profile(
        name,
        k_max=model.k_max,
        kv_blocks=1 << 16,
        max_requests=256,
        noise=0.03,
        **costs,  # type: ignore[arg-type]
    )
    card = msgspec.structs.replace(profile.card, device="cpu" if name.startswith("cpu") else "cuda")
    return msgspec.structs.replace(profile, acceptance=model, card=card)


K_MAX: Final = 6
LONGEST_COPY: Final = 8


def held_out() -> tuple[WorldSpec, ...]:
    """Return the worlds that policies are judged in."""
    eagle = acceptance(K_MAX, 1.2, 2.2, 0.15)
    weak = acceptance(K_MAX, -0.4, 1.3, 0.2)
    moody = acceptance(K_MAX, 0.6, 1.7, 0.7, hidden=0.6, fall=0.0)
    return (
        WorldSpec(
            "gpu-8b-eagle",
            "published H100 fit: 5.886 ms + 21 us per row, 2.135 ms per round; confidence AUC about 0.88",
            _profile("gpu-8b-eagle", eagle),
        ),
        WorldSpec(
            "gpu-small-knee",
            "a card with little arithmetic: 9 ms + 140 us per row, 0.9 ms per round; confidence AUC about 0.88",
            _profile("gpu-small-knee", eagle, step_s=9e-3, row_s=140e-6, round_s=0.9e-3, kv_token_s=60e-9),
        ),
        WorldSpec(
            "cpu-weak-drafter",
            "about what two cores take: 15 ms + 0.8 ms per row, 2.5 ms per round + 0.35 ms per row; weak drafter",
            _profile("cpu-weak-drafter", weak, step_s=15e-3, row_s=0.8e-3, round_s=2.5e-3, draft_row_s=0.35e-3),
        ),
        WorldSpec(
            "gpu-ngram",
            "drafts that cost nothing, requests that differ much, no confidence: 6 ms + 40 us per row",
            _profile("gpu-ngram", moody, step_s=6e-3, row_s=40e-6, round_s=2e-5),
            has_confidence=False,
        ),
        WorldSpec(
            "cpu-embedded",
            "measured (`faser profile`): the embedded pair, whose drafter reads prompts, sits out and catches up; "
            "with memory for every load",
            msgspec.structs.replace(shipped_profile(), kv_blocks=1 << 12),
        ),
    )  # fmt: skip


def side_by_side() -> tuple[WorldSpec, ...]:
    """Return the worlds that offer splits: where two groups on shares of a device pay at many requests, and where not.

    No device was measured under a split. Verifying on three quarters of it takes a tenth longer, as reading weights
    does, drafting on the rest too, and 95 % of the shorter phase is hidden; the rest is arithmetic
    (env/cost/overlap_bound.py).
    """
    splits = (Split("unsplit"), Split("1:3", 1.1, 1.1, 0.95), Split("1:1", 1.6, 1.05, 0.95))
    heavy = _profile(
        "gpu-heavy-drafter", acceptance(K_MAX, 3.0, 2.0, 0.15), step_s=6e-3, row_s=40e-6, round_s=1e-3,
        draft_row_s=40e-6,
    )  # fmt: skip
    light = _profile("gpu-light-drafter", acceptance(K_MAX, 1.2, 2.2, 0.15))
    return (
        WorldSpec(
            "gpu-heavy-drafter",
            "a good drafter as dear per row as its target: 6 ms + 40 us per row, 1 ms per round + 40 us per row",
            msgspec.structs.replace(heavy, splits=splits),
        ),
        WorldSpec(
            "gpu-light-drafter",
            "the published H100 fit of gpu-8b-eagle, whose drafter is too cheap to be worth hiding",
            msgspec.structs.replace(light, splits=splits),
        ),
    )


def going_ahead() -> tuple[WorldSpec, ...]:
    """Return the worlds that can draft ahead: one where that pays, and the embedded pair.

    The first was not measured: nine of ten drafts are ready in time, and verification is slowed by 2 %.
    """
    good = _profile("gpu-good-drafter", acceptance(K_MAX, 3.0, 2.0, 0.15), round_s=1e-3)
    return (
        WorldSpec(
            "gpu-good-drafter",
            "the published H100 fit of gpu-8b-eagle with a better drafter at half the price: 1 ms per round",
            msgspec.structs.replace(good, ahead=Ahead(ready=0.9, hidden=0.9, verify_factor=1.02, acceptance=0.95)),
        ),
        WorldSpec(
            "cpu-embedded-ahead",
            "measured (`faser profile` with a drafter's process): the embedded pair, a core for each of the two",
            msgspec.structs.replace(shipped_profile("embedded_ahead"), kv_blocks=1 << 12),
        ),
    )  # fmt: skip


def training(
    worlds: int, seed: int, exits_share: float = 0.0, copies_share: float = 0.0
) -> tuple[EngineProfile, ...]:  # fmt: skip
    """Return random engines: costs log-uniform from CPUs to large GPUs, drafters from poor to good.

    :param exits_share: of the engines, have exit heads, from useless to good ones
    :param copies_share: of the engines, copy drafts from requests' own texts, seldom to most of the time
    """
    random, exits_random, copies_random = (np.random.default_rng([seed, key]) for key in (0x7A41, 0xE817, 0xC0B1))

    def between(low: float, high: float) -> float:
        return float(np.exp(random.uniform(math.log(low), math.log(high))))

    profiles = []
    for number in range(worlds):
        model = acceptance(
            K_MAX, float(random.uniform(-1.0, 2.2)), float(random.uniform(0.8, 2.6)), float(random.uniform(0.05, 0.8)),
            float(random.uniform(0.0, 0.8)), float(random.uniform(0.0, 0.3)),
        )  # fmt: skip
        step_s = between(3e-3, 30e-3)
        profile = _profile(
            f"training-{number}", model, step_s=step_s, row_s=step_s * between(1 / 600, 1 / 12),
            round_s=step_s * between(1 / 300, 1 / 2.5), draft_row_s=step_s * between(1e-5, 1 / 40),
            host_s=step_s * between(0.01, 0.2), kv_token_s=step_s * between(1e-7, 2e-5),
        )  # fmt: skip
        if exits_random.random() < exits_share:
            profile = msgspec.structs.replace(profile, exits=(_random_exit(exits_random, step_s),))
        if copies_random.random() < copies_share:
            profile = msgspec.structs.replace(profile, matches=_random_matches(copies_random))
        profiles.append(profile)
    return tuple(profiles)


def _random_matches(random: np.random.Generator) -> MatchModel:
    """Return a model whose chances are what the engine says, less or more by up to a logit."""
    other, rise, spread, ends = random.uniform((-4.0, 0.5, 0.0, 0.0), (0.0, 4.0, 1.5, 0.2)).tolist()
    mean, logits, share, hidden, fall, lift = random.uniform(
        (0.0, 0.6, 0.0, 0.0, -0.3, -1.0), (2.5, 1.8, 0.4, 0.5, 0.1, 1.0)
    ).tolist()
    tokens = acceptance(LONGEST_COPY, mean, logits, share, hidden, fall)
    lengths = [ends * (1.0 - ends) ** length for length in range(LONGEST_COPY - 1)]
    surer = acceptance(LONGEST_COPY, mean + 0.3 * rise, logits, share, hidden, fall)
    return MatchModel(
        other + rise, other, spread, (*lengths, 1.0 - sum(lengths)),
        msgspec.structs.replace(tokens, intercepts=(lift,) * LONGEST_COPY), surer.quantiles,
    )  # fmt: skip


def _random_exit(random: np.random.Generator, step_s: float) -> Exit:
    saved, recall, alarms, looks = random.uniform((0.1, 0.1, 0.0, 0.0), (0.9, 0.95, 0.05, 0.03)).tolist()
    return Exit(16, saved, recall, alarms, looks * step_s, looks * step_s / 100)

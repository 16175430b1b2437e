"""What a simulation is about: engines, workloads, load, service classes, mechanisms, reward; and its constants.

Called by the environment, the replay and the benchmark. Everything random about an episode is drawn from the ranges
given here, by the kernel and by seed; a mechanism is off unless a profile has its numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import NormalDist

import msgspec
import numpy as np

from ...engine_adapter.arrays import Floats, Singles
from ..profile.acceptance_model import AcceptanceModel
from ..profile.engine_profile import Ahead, EngineProfile, Exit, Split, Work, synthetic_profile
from ..profile.match_model import MatchModel
from ..workload.request_trace import Trace, TraceError, shipped_trace
from .constants import (
    CELLS,
    LOGITS,
    NORMAL_CELLS,
    PRICED,
    PROFILE,
    ROW,
    SETTINGS,
    SIGMOID_CELLS,
    VALUES,
    Origins,
    RecordedDrafts,
    Records,
    World,
)


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """Requests with the same objectives, as multiples of what an idle engine without speculation does."""

    name: str
    share: float  # of the requests
    ttft_factor: float = 5.0
    tpot_factor: float = 2.0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class RewardWeights:
    """See env/layout/reward.py; none negative."""

    good: float = 0.02  # per token in time
    token: float = 0.0  # per token
    request: float = 0.0  # per request-second
    waste: float = 0.0  # per wasted row
    discount_per_s: float = 0.1  # 0: no discount


@dataclass(frozen=True, slots=True)
class Scenario:
    """One distribution of episodes."""

    profiles: tuple[EngineProfile, ...] = field(default_factory=lambda: (synthetic_profile(max_requests=64),))
    workloads: tuple[Trace, ...] = field(default_factory=lambda: (shipped_trace("azure-conv"),))
    slots: int = 64  # most requests in a batch
    load: tuple[float, float] = (0.3, 1.2)  # arrivals, as a share of what a full batch without speculation serves
    swing: float = 0.6  # 0..1, largest amplitude of the load's drift
    swing_steps: float = 200.0  # its period is 1 to 10 times as many steps of a full batch
    hardness: float = 0.5  # how far episodes, and times in them, differ in acceptance; standard deviations of a level
    kinds: tuple[float, ...] = (-0.6, -0.2, 0.0, 0.3, 0.6)  # shift of a request's level by its kind of prompt
    coefficient_spread: float = 0.1  # of the log of each cost coefficient between episodes
    noise: float = 1.0  # factor on the profiles' noise
    staleness: int = 0  # steps by which a decision comes later than the next step
    classes: tuple[ServiceClass, ...] = (ServiceClass("interactive", 0.8), ServiceClass("batch", 0.2, 50.0, 8.0, 1))
    tells_objectives: bool = True  # requests say when they want their tokens; False: they only are counted by it
    weights: RewardWeights = field(default_factory=RewardWeights)
    episode_steps: int = 2000
    max_output_tokens: int = 1 << 20  # the most that a request's answer may have, as the request says
    randomises: bool = True  # False: engine, workload and load are the first ones, as they are

    def __post_init__(self) -> None:
        low, high = self.load
        finite = all(map(math.isfinite, (low, high, self.swing, self.hardness, self.coefficient_spread, self.noise)))
        if not finite or not 0.0 < low <= high or not 0.0 <= self.swing <= 1.0 or self.coefficient_spread < 0.0:
            raise ValueError(
                f"load {self.load}, swing {self.swing}, coefficient_spread {self.coefficient_spread}; expected finite "
                "numbers, 0 < lowest load <= highest, swing in 0..1"
            )
        if not self.profiles or not self.workloads or not self.classes:
            raise ValueError("a scenario without profiles, workloads or classes; expected at least one of each")
        if not 1 <= self.slots <= 4096 or self.staleness < 0 or self.episode_steps < 1:
            raise ValueError(
                f"slots {self.slots}, staleness {self.staleness}, episode_steps {self.episode_steps}; expected 1..4096 "
                "slots, staleness of at least 0, at least one step"
            )
        if self.positions < 1:
            raise ValueError("a profile with k_max 0; expected an engine that can speculate")

    @property
    def positions(self) -> int:
        """The longest draft, tokens: what all profiles can do."""
        return min(profile.k_max for profile in self.profiles)

    @property
    def longest_copy(self) -> int:
        """The most tokens of a copied draft that any profile has; 0: none copies."""
        return max(profile.matches.longest if profile.matches else 0 for profile in self.profiles)

    def settings(self, mode: int = PRICED, *, own_rules: bool = False, copies: bool = False) -> Records:
        """Return the numbers that the kernel takes, (1,) of SETTINGS."""
        weights = self.weights
        values = (
            self.positions, self.staleness, mode, own_rules, self.randomises, copies, self.tells_objectives, self.noise,
            weights.discount_per_s, weights.good, weights.token, weights.request, weights.waste,
        )  # fmt: skip
        return np.array([values], SETTINGS)


def build_world(
    scenario: Scenario,
    seed: int,
    settings: Records,
    recording: RecordedDrafts | None = None,
) -> World:
    """Return the constants of a scenario; `seed` deals kinds and service classes to the workloads' rows.

    :param recording: what the mode RECORDED replays
    """
    profiles = scenario.profiles
    ends = np.cumsum([len(trace) for trace in scenario.workloads])
    splits = max(len(profile.splits) for profile in profiles)
    sizes = max(len(profile.graph_sizes) for profile in profiles)
    if recording is None:
        nothing = np.zeros((0, scenario.positions), np.float32)
        recording = RecordedDrafts(np.zeros(1, np.int64), np.zeros(1, np.int8), nothing)
    graphs = [[*profile.graph_sizes, *[0] * (sizes - len(profile.graph_sizes))] for profile in profiles]
    return World(
        settings=settings,
        profiles=np.array([_profile_numbers(profile, scenario) for profile in profiles], PROFILE),
        graphs=np.array(graphs, np.float64).reshape(len(profiles), sizes),
        splits=np.array([_padded_splits(profile, splits) for profile in profiles]),
        tables=np.stack([_acceptance_tables(profile.acceptance, scenario.positions) for profile in profiles]),
        match_tables=np.stack([_match_tables(profile.matches, scenario.longest_copy) for profile in profiles]),
        match_lengths=np.stack([_match_lengths(profile.matches, scenario.longest_copy) for profile in profiles]),
        sigmoid=_sigmoid(np.linspace(-12.0, 12.0, SIGMOID_CELLS, endpoint=False) + 12.0 / SIGMOID_CELLS),
        normal=_normal(),
        rows=_rows(scenario, seed),
        spans=np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1).astype(np.int64),
        objectives=np.array([_objectives(profile, scenario) for profile in profiles]),
        priority=np.array([each.priority for each in scenario.classes], np.float64),
        **recording._asdict(),
    )


def build_origins(scenario: Scenario) -> Origins:
    """Return what the beginning of an episode is drawn from."""
    profiles, workloads = scenario.profiles, scenario.workloads
    return Origins(
        coefficients=np.array([np.concatenate(profile.packed()[:3]) for profile in profiles]),
        capacity=np.array([[_capacity(profile, trace, scenario) for trace in workloads] for profile in profiles]),
        pace_s=np.array([_full_step_s(profile, scenario) for profile in profiles]),
    )


def _profile_numbers(profile: EngineProfile, scenario: Scenario) -> tuple[float, ...]:
    model, noise = profile.acceptance, profile.packed().noise.tolist()
    return (
        profile.kv_blocks, profile.block_size, profile.token_budget, min(profile.max_requests, scenario.slots),
        profile.max_context, profile.catch_up_tokens, profile.k_max, len(profile.splits),
        int(profile.is_adaptive),
        *_released_exit(profile), *_ahead(profile), *noise,
        math.sqrt(model.request_share), math.sqrt(1.0 - model.request_share), model.carry,
        math.sqrt(1.0 - model.carry * model.carry), model.hidden, *_matching(profile.matches),
    )  # fmt: skip


def _released_exit(profile: EngineProfile) -> tuple[float, ...]:
    if not profile.exits:
        return (0.0,) * 5
    first = profile.exits[0]
    return first.saved_share, first.recall, first.false_alarm, first.look_s, first.look_token_s


def _ahead(profile: EngineProfile) -> tuple[float, ...]:
    if (ahead := profile.ahead) is None:
        return (0.0,) * 4
    return ahead.ready, ahead.hidden, ahead.verify_factor, ahead.acceptance


def _matching(matches: MatchModel | None) -> tuple[float, ...]:
    if matches is None:
        return (0,) + (0.0,) * 8
    tokens = matches.tokens
    return (
        matches.longest, matches.after_whole, matches.after_other, matches.spread, math.sqrt(tokens.request_share),
        math.sqrt(1.0 - tokens.request_share), tokens.carry, math.sqrt(1.0 - tokens.carry * tokens.carry),
        tokens.hidden,
    )  # fmt: skip


def _match_tables(matches: MatchModel | None, longest: int) -> Singles:
    """Return (2, 2, longest, CELLS) logits of the engine's chances and of acceptance by score cell, 0 where none is."""
    tables = np.zeros((2, 2, longest, CELLS), np.float32)
    if matches is not None:
        for is_whole, tokens in enumerate((matches.tokens, matches.tokens_whole)):
            tables[is_whole, :, : matches.longest] = _acceptance_tables(tokens, matches.longest)[[LOGITS, VALUES]]
    return tables


def _match_lengths(matches: MatchModel | None, longest: int) -> Floats:
    shares = np.zeros(longest)
    if matches is not None:
        shares[: matches.longest] = matches.lengths
    return np.asarray(np.cumsum(shares))


def _rows(scenario: Scenario, seed: int) -> Records:
    random = np.random.default_rng([seed, 0xFA5E])
    shares = np.array([each.share for each in scenario.classes])
    kinds = np.array(scenario.kinds or (0.0,), np.float32)
    rows = np.zeros(sum(len(trace) for trace in scenario.workloads), ROW)
    rows["gap_s"] = np.concatenate([_gaps(trace) for trace in scenario.workloads])
    rows["prompt"] = np.concatenate([trace.input_tokens for trace in scenario.workloads])
    rows["output"] = np.maximum(np.concatenate([trace.output_tokens for trace in scenario.workloads]), 1)
    rows["limit"] = np.maximum(rows["output"], scenario.max_output_tokens)
    rows["service"] = random.choice(len(shares), size=len(rows), p=shares / shares.sum())
    rows["ease"] = kinds[random.integers(len(kinds), size=len(rows))]
    return rows


def _gaps(trace: Trace) -> Floats:
    if len(trace) < 2 or float(trace.arrival_s[-1]) <= 0.0:
        raise TraceError(f"{trace.name}: {len(trace)} requests in 0 s; expected at least two, some time apart")
    return np.diff(trace.arrival_s, prepend=0.0)


def _padded_splits(profile: EngineProfile, size: int) -> list[tuple[float, float, float]]:
    splits = [*profile.splits, *[Split("unsplit")] * (size - len(profile.splits))]
    return [(each.verify_factor, each.draft_factor, each.overlap) for each in splits]


def _sigmoid(values: Floats) -> Singles:
    return (1.0 / (1.0 + np.exp(-values))).astype(np.float32)


def _normal() -> Singles:
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / NORMAL_CELLS) for i in range(NORMAL_CELLS)], np.float32)


def _acceptance_tables(model: AcceptanceModel, positions: int) -> Singles:
    """Return (3, positions, CELLS) confidence logits, logits of acceptance and calibrated chances by score cell."""
    intercepts, slopes, quantiles, _ = model.tables()
    normal = NormalDist()
    ranks = np.array([normal.cdf((cell + 0.5) * (8.0 / CELLS) - 4.0) for cell in range(CELLS)])
    points = np.linspace(0.0, 1.0, quantiles.shape[1])
    logits = np.stack([np.interp(ranks, points, quantiles[j]) for j in range(positions)])
    values = intercepts[:positions, None] + slopes[:positions, None] * logits
    return np.stack([logits, values, _sigmoid(values)]).astype(np.float32)


def _step_s(profile: EngineProfile, requests: int, prompt: int, output: int, prompt_rows: int = 0) -> float:
    """Return the seconds of a step without speculation, host included."""
    context = requests * (prompt + output // 2)
    sampled = requests + (1 if prompt_rows else 0)
    prompts = 1 if prompt_rows else 0
    work = Work(
        requests + prompts, requests, 0, prompts, prompt_rows, sampled, context + prompt_rows, context,
        0.5 * prompt_rows * (prompt_rows + 1), kept_rows=requests, first_rows=0,
    )  # fmt: skip
    verify_s = float(work.verify_basis(profile.graph_sizes) @ np.array(profile.verify.coefficients))
    host_s = float(work.host_basis() @ np.array(profile.host.coefficients))
    return verify_s + host_s + float(work.draft_basis() @ np.array(profile.draft.coefficients))


def _mean_lengths(traces: tuple[Trace, ...]) -> tuple[int, int]:
    return (
        int(np.mean([trace.input_tokens.mean() for trace in traces])),
        max(int(np.mean([trace.output_tokens.mean() for trace in traces])), 1),
    )


def _batch(profile: EngineProfile, prompt: int, output: int, slots: int) -> int:
    fitting = profile.kv_blocks * profile.block_size // max(prompt + output, 1)
    return max(min(profile.max_requests, slots, fitting), 1)


def _full_step_s(profile: EngineProfile, scenario: Scenario) -> float:
    prompt, output = _mean_lengths(scenario.workloads)
    return _step_s(profile, _batch(profile, prompt, output, scenario.slots), prompt, output)


def _capacity(profile: EngineProfile, trace: Trace, scenario: Scenario) -> float:
    """Return by how much the trace must run faster to keep a full batch without speculation just busy."""
    prompt, output = _mean_lengths((trace,))
    batch = _batch(profile, prompt, output, scenario.slots)
    step_s = _step_s(profile, batch, prompt, output)
    chunk = max(min(prompt, profile.token_budget - batch), 1)
    prefill_s = (_step_s(profile, batch, prompt, output, chunk) - step_s) * prompt / chunk
    served_per_s = 1.0 / (output * step_s / batch + prefill_s)
    return served_per_s * float(trace.arrival_s[-1]) / (len(trace) - 1)


def idle_times_s(profile: EngineProfile, workloads: tuple[Trace, ...]) -> tuple[float, float]:
    """Return the seconds of a mean prompt and of a token on an idle engine without speculation."""
    prompt, output = _mean_lengths(workloads)
    first_s = _step_s(profile, 0, prompt, output, min(prompt, profile.token_budget))
    return first_s, _step_s(profile, 1, prompt, output)


def _objectives(profile: EngineProfile, scenario: Scenario) -> list[tuple[float, float]]:
    first_s, token_s = idle_times_s(profile, scenario.workloads)
    return [(each.ttft_factor * first_s, each.tpot_factor * token_s) for each in scenario.classes]


def with_mechanisms(profile: EngineProfile) -> EngineProfile:
    """Return the profile with overlap and an exit head, as guesses: to try mechanisms out."""
    splits = (Split("unsplit", 1.0, 1.0, 0.4), Split("half", 1.5, 1.3, 0.9), Split("quarter", 1.2, 2.0, 0.9))
    return msgspec.structs.replace(profile, splits=splits, exits=(Exit(16, 0.5),), ahead=Ahead())

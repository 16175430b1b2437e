"""What a learned policy sees: a fixed number of features per request and of the whole engine. The one layout of them.

`observe_vector` computes it from env/estimate/engine_state.py's EngineState, live; the simulator's kernel
(env/simulator/observe.py) computes the same, and a test holds the two together. Bump OBSERVATION_VERSION with every
change: trained weights depend on it. Nothing in it may depend on what only the future tells: true answer lengths,
coming acceptances.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from ...engine_adapter.arrays import Bools, Floats, Ints, Singles
from ...engine_adapter.compiled import compiled
from ..cost.cost_curve import OCTAVES
from ..estimate.engine_state import EngineState

OBSERVATION_VERSION: Final = 2
LOG_10_MS: Final = math.log(0.01)
POSITIONS: Final = 4  # draft positions whose acceptance is shown; the last one known stands for those beyond k_max


class Feature(NamedTuple):
    """One number of the observation; x/(x+c) squeezes counts without a known end into 0..1."""

    name: str
    low: float
    high: float
    unit: str


REQUEST_FEATURES: Final = (
    Feature("is_decoding", 0.0, 1.0, "1: past its prompt"),
    Feature("is_prefilling", 0.0, 1.0, "1: its prompt is being computed"),
    Feature("context", 0.0, 1.0, "x/(x+1024), x computed tokens"),
    Feature("emitted", 0.0, 1.0, "x/(x+128), x tokens of its answer so far"),
    Feature("age", 0.0, 1.0, "x/(x+10), x seconds since its arrival"),
    Feature("priority", -1.0, 1.0, "priority / 8, clipped"),
    Feature("draft_length", 0.0, 1.0, "draft length in force / k_max"),
    *(
        Feature(f"acceptance_{j + 1}", 0.0, 1.0, f"chance that draft token {j + 1} is accepted")
        for j in range(POSITIONS)
    ),
    Feature("survival", 0.0, 1.0, "chance that all k_max draft tokens are accepted"),
    Feature("evidence", 0.0, 1.0, "x/(x+40), x trials of its first draft position, with forgetting"),
    Feature("slack", -1.0, 1.0, "x/(8 + size of x), x tokens ahead of its schedule; 0 without one or a token"),
    Feature("pace", 0.0, 1.0, "x/(x+1), x tokens per step that its objective asks for, at the mean step"),
)
GLOBAL_FEATURES: Final = (
    Feature("running", 0.0, 1.0, "log2(1 + x) / 10, x running requests, at most 1"),
    Feature("decoding", 0.0, 1.0, "log2(1 + x) / 10, x requests past their prompt, at most 1"),
    Feature("waiting", 0.0, 1.0, "x/(x+16), x waiting requests"),
    Feature("kv_usage", 0.0, 1.0, "share of the KV blocks in use"),
    Feature("arrival_rate", 0.0, 1.0, "x/(x+10), x arrivals per second over about 10 s"),
    Feature("prefill_rows", 0.0, 1.0, "x/(x+256), x prompt rows per step, running mean"),
    Feature("prefill_share", 0.0, 1.0, "prompt rows / rows, running mean"),
    Feature("step_time", -1.0, 1.0, "log(x / 10 ms) / 5, x seconds per step, running mean"),
    Feature("token_rate", 0.0, 1.0, "log(1 + x) / 12, x tokens per second, running mean"),
    *(Feature(f"acceptance_{j + 1}", 0.0, 1.0, f"draft token {j + 1}, all requests") for j in range(POSITIONS)),
    Feature("level_deviation", 0.0, 1.0, "how much requests differ in acceptance, relative"),
    Feature("draft_share", 0.0, 1.0, "seconds of drafting / seconds of a step, running means"),
    Feature("rounds", 0.0, 1.0, "drafting rounds / k_max, running mean"),
    *(
        Feature(f"cost_{1 << j}", -1.0, 1.0, f"log(x / mean step) / 4, x seconds at {1 << j} rows but for drafting")
        for j in range(OCTAVES)
    ),
    *(Feature(f"known_{1 << j}", 0.0, 1.0, f"x/(x+8), x steps seen of {1 << j} rows") for j in range(OCTAVES)),
)  # fmt: skip


class Observation(NamedTuple):
    """The observation of one engine; rows beyond the live requests are 0."""

    requests: Singles  # (slots, len(REQUEST_FEATURES)); the order of requests carries no meaning
    globals: Singles  # (len(GLOBAL_FEATURES),)
    handles: Ints  # (n,) of the first n rows
    acceptance: Floats  # (live requests, k_max) as EngineState.acceptance gives it: who acts on it need not ask again


def observe_vector(state: EngineState, slots: int) -> Observation:
    """Return what is known, for at most `slots` requests in the batch; the longest-known ones if there are more."""
    is_running, is_decoding = state.requests.running(state.link.records), state.decoding()
    requests, places = np.zeros((slots, len(REQUEST_FEATURES)), np.float32), np.empty(slots, np.int64)
    acceptance, table = state.acceptance(), state.requests
    slack, tpot_s = table.slack(float(state.time_s)).tokens, table.column("tpot_s")
    shown = _show_requests(
        requests, places, is_running, is_decoding, table.column("context"), table.column("emitted"),
        table.column("arrival_s"), table.column("priority"), table.column("limit"), acceptance, table.trials, slack,
        tpot_s, float(state.time_s), max(state.load.step_s, 1e-6),
    )  # fmt: skip
    handles = table.column("handle")[places[:shown]]
    return Observation(requests, _globals(state, int(np.count_nonzero(is_decoding))), handles, acceptance)


def _globals(state: EngineState, decoding: int) -> Singles:
    load, octaves = state.load, state.octaves
    k_max = state.capabilities.k_max
    mean = state.population.mean.tolist() or [0.0]
    step_s = max(load.step_s, 1e-6)
    log_step = math.log(step_s)
    values = [
        min(math.log2(1.0 + load.running) / 10.0, 1.0),
        min(math.log2(1.0 + decoding) / 10.0, 1.0),
        load.waiting / (load.waiting + 16.0),
        load.kv_usage,
        load.arrival_rate_per_s / (load.arrival_rate_per_s + 10.0),
        load.prefill_rows / (load.prefill_rows + 256.0),
        load.prefill_share,
        min(max((log_step - LOG_10_MS) / 5.0, -1.0), 1.0),
        min(math.log1p(load.tokens_per_s) / 12.0, 1.0),
        *[mean[min(j, len(mean) - 1)] for j in range(POSITIONS)],
        math.sqrt(state.population.level_variance),
        min(octaves.draft_s / step_s, 1.0),
        min(octaves.rounds / max(k_max, 1), 1.0),
        *[
            min(max((log_s - log_step) / 4.0, -1.0), 1.0) if seen > 0.0 else 0.0
            for log_s, seen in zip(octaves.log_s, octaves.visits, strict=True)
        ],
        *[seen / (seen + 8.0) for seen in octaves.visits],
    ]
    return np.array(values, np.float32)


@compiled
def _show_requests(
    shown: Singles, places: Ints, is_running: Bools, is_decoding: Bools, context: Ints, emitted: Ints,
    arrival_s: Floats, priority: Ints, limit: Ints, acceptance: Floats, trials: Floats, slack: Floats, tpot_s: Floats,
    now_s: float, step_s: float,
) -> int:  # fmt: skip
    """Fill in the features and the table's places of the first running requests; return how many there was room for."""
    n, k_max = 0, acceptance.shape[1]
    for i in range(len(is_running)):
        if not is_running[i] or n >= len(places):
            continue
        places[n], row = i, shown[n]
        row[0 if is_decoding[i] else 1] = 1.0
        row[2] = _squeezed(float(context[i]), 1024.0)
        row[3] = _squeezed(float(emitted[i]), 128.0)
        row[4] = _squeezed(max(now_s - arrival_s[i], 0.0), 10.0)
        row[5] = min(max(priority[i] / 8.0, -1.0), 1.0)
        row[6] = limit[i] / max(k_max, 1)
        if k_max > 0:
            survival = 1.0
            for j in range(k_max):
                survival *= acceptance[i, j]
            for j in range(POSITIONS):
                row[7 + j] = acceptance[i, min(j, k_max - 1)]
            row[7 + POSITIONS] = survival
            row[8 + POSITIONS] = _squeezed(trials[i, 0], 40.0)
        if slack[i] < np.inf:
            row[9 + POSITIONS] = slack[i] / (abs(slack[i]) + 8.0)
        if tpot_s[i] < np.inf:
            row[10 + POSITIONS] = _squeezed(step_s / tpot_s[i], 1.0)
        n += 1
    return n


@compiled
def _squeezed(value: float, half: float) -> float:
    """Return x/(x+half), 0..1 for x >= 0."""
    return value / (value + half)

"""The demo's load: a slice of a production trace, scaled to what this machine was just seen to serve.

Called by controller/demo/demo.py. Machines differ in how fast they read prompts by more than in anything else, so
that the number of cores does not tell what is past the knee: a handful of requests at once does.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from ...env.workload.prompts import KINDS, Prompt, held_out_prompts
from ...env.workload.request_trace import shipped_trace
from ...env.workload.workload import Lengths, Swell, TimedRequest, build_workload, swelling_arrivals
from ..engine.load_summary import RequestResult
from ..errors import EngineError

TRACE: Final = "azure-conv"
LENGTHS: Final = Lengths(
    context_tokens=2048, input_scale=0.1, max_input_tokens=200, min_output_tokens=16, max_output_tokens=128
)
# Past the knee for a third of the time, and the queue drains again; at the ends of the run one request at a time.
PEAK_OVER_SERVED: Final = 1.5
PEAK_OVER_LOW: Final = 2.0
LEAST_PEAK_RPS: Final = 0.3  # below, a minute has no load worth the name
MOST_ARRIVALS: Final = 9000  # the trace has some more
TRIAL_REQUESTS: Final = 8
TRIAL_TOKENS: Final = 16
INTERACTIVE, BATCH = "interactive", "batch"
# A class's time per token, as a multiple of what the trial's requests had, eight at once and with drafts: about what
# the load's middle can give to a few, and what it gives to all.
PACES: Final = {INTERACTIVE: 1.0, BATCH: 2.5}


def make_requests(duration_s: float, seed: int, peak_rps: float) -> list[TimedRequest]:
    """Return the demo's load: the same for the same duration, seed and peak."""
    swell = Swell(duration_s, peak_rps / PEAK_OVER_LOW, peak_rps)
    return build_workload(swelling_arrivals(shipped_trace(TRACE), swell, seed), _prompts()[1], LENGTHS, seed=seed)


def with_classes(requests: Sequence[TimedRequest], interactive_share: float, token_ms: float) -> list[TimedRequest]:
    """Return the load with every i-th request interactive and the others of the class batch, each with its objective.

    :param token_ms: what the trial's requests took for a token
    """
    count = [math.floor(at * interactive_share) for at in range(len(requests) + 1)]
    names = [INTERACTIVE if after > before else BATCH for before, after in pairwise(count)]
    return [
        replace(request, class_name=name, tpot_ms=round(PACES[name] * token_ms, 3))
        for request, name in zip(requests, names, strict=True)
    ]


def token_ms(trial: Sequence[RequestResult]) -> float:
    """Return what the trial's requests took for a token in the mean; EngineError if they said nothing."""
    if not (times_ms := [value for each in trial if (value := each.tpot_ms) is not None]):
        raise EngineError("vLLM's first answers are empty", "text", "see the engine's log")
    return sum(times_ms) / len(times_ms)


def trial_requests() -> list[TimedRequest]:
    """Return a few requests, all at once, with short answers."""
    return [TimedRequest(0.0, each.text, each.kind, TRIAL_TOKENS, each.id, each.tokens) for each in _prompts()[0]]


def _prompts() -> tuple[list[Prompt], list[Prompt]]:
    """Return the trial's prompts, of every kind, and the load's: in the load they would come from the prefix cache."""
    short = [prompt for prompt in held_out_prompts() if prompt.tokens <= LENGTHS.max_input_tokens]
    kinds = [[prompt for prompt in short if prompt.kind == kind] for kind in KINDS]
    trial = [kinds[number % len(kinds)][number // len(kinds)] for number in range(TRIAL_REQUESTS)]
    return trial, [prompt for prompt in short if prompt not in trial]


def peak_rps(trial: Sequence[RequestResult], duration_s: float) -> float:
    """Return the peak of the load, requests/s, from what the trial's requests took; EngineError if they said nothing.

    Until the last of them has its first token the engine reads prompts, from then on it answers all of them.
    """
    if any(len(each.token_times_s) == 0 for each in trial):
        raise EngineError("vLLM's first answers are empty", "text", "see the engine's log")
    read_s = max(each.token_times_s[0] for each in trial)
    answered_s = max(each.token_times_s[-1] for each in trial) - read_s
    answered = sum(each.token_counts[-1] - _said_by(each, read_s) for each in trial)
    token_s = answered_s / answered if answered else 0.0
    load = make_requests(60.0, 0, 1.0)
    token_read_s = read_s / sum(each.prompt_tokens for each in trial_requests())
    served_rps = len(load) / sum(each.prompt_tokens * token_read_s + each.max_tokens * token_s for each in load)
    return min(max(round(PEAK_OVER_SERVED * served_rps, 2), LEAST_PEAK_RPS), MOST_ARRIVALS / duration_s)


def _said_by(result: RequestResult, at_s: float) -> int:
    """Return the tokens that a request had by then; it had its first one."""
    return result.token_counts[bisect_right(result.token_times_s, at_s) - 1]

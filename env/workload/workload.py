"""A workload: what to ask, when. Arrivals and lengths from a trace, text from the shipped prompts, all by one seed.

Called by the demo, the benchmarks and their tests. Never reads a clock and never sends anything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ...engine_adapter.arrays import Floats
from .prompts import KINDS, Prompt
from .request_trace import Trace, TraceError

_NEAREST: Final = 12  # prompts of about the wanted length to choose from
_GRID: Final = 2048  # points of the swell's integral


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request to send `arrival_s` seconds after the start; its objectives are those that it says itself."""

    arrival_s: float
    prompt: str
    kind: str
    max_tokens: int
    prompt_id: str = ""
    prompt_tokens: int = 0  # without the chat template
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    class_name: str = ""  # under which it is counted; nothing that a server hears of


@dataclass(frozen=True, slots=True)
class Swell:
    """An arrival rate that rises from `low_rps` to `peak_rps` in the middle of `duration_s` and falls again.

    rate(t) = low + (peak - low) * sin(pi t / duration) ** (2 * sharpness). It ends low, so that a run drains quickly.
    """

    duration_s: float
    low_rps: float
    peak_rps: float
    sharpness: float = 1.5

    def __post_init__(self) -> None:
        values = (self.duration_s, self.low_rps, self.peak_rps, self.sharpness)
        if not all(math.isfinite(value) and value > 0 for value in values) or self.peak_rps < self.low_rps:
            raise TraceError(f"swell of {values}; expected finite numbers above 0 and peak_rps >= low_rps")

    def cumulative(self) -> tuple[Floats, Floats]:
        """Return times (m,) in seconds and the expected number of arrivals (m,) before each."""
        time_s = np.linspace(0.0, self.duration_s, _GRID)
        shape = np.sin(np.pi * time_s / self.duration_s).clip(0.0) ** (2 * self.sharpness)
        rate = self.low_rps + (self.peak_rps - self.low_rps) * shape
        steps = np.diff(time_s) * (rate[1:] + rate[:-1]) / 2
        return time_s, np.concatenate(([0.0], np.cumsum(steps)))


@dataclass(frozen=True, slots=True)
class Lengths:
    """How the trace's lengths become lengths this model can serve. Tokens."""

    context_tokens: int  # the model's: prompt + template + response
    input_scale: float = 1.0
    output_scale: float = 1.0
    max_input_tokens: int = 1 << 30
    min_output_tokens: int = 8
    max_output_tokens: int = 1 << 30
    template_tokens: int = 64  # reserved for the chat template

    def input_tokens(self, traced: int) -> int:
        """Return the prompt length to look for."""
        room = self.context_tokens - self.template_tokens - self.min_output_tokens
        return max(1, min(round(traced * self.input_scale), self.max_input_tokens, room))

    def output_tokens(self, traced: int, prompt_tokens: int) -> int:
        """Return the response's limit, so that prompt and response fit the context."""
        room = self.context_tokens - self.template_tokens - prompt_tokens
        wanted = min(max(round(traced * self.output_scale), self.min_output_tokens), self.max_output_tokens)
        return max(1, min(wanted, room))


@dataclass(slots=True)
class _Deck:
    """The prompts of one kind; deals one of about the wanted length, the least used first."""

    prompts: Sequence[Prompt]
    used: Counter[str] = field(default_factory=Counter)

    def deal(self, wanted_tokens: int, random: np.random.Generator) -> Prompt:
        least = min(self.used[prompt.id] for prompt in self.prompts)
        fresh = [prompt for prompt in self.prompts if self.used[prompt.id] == least]
        near = sorted(fresh, key=lambda prompt: (abs(prompt.tokens - wanted_tokens), prompt.id))[:_NEAREST]
        chosen = near[int(random.integers(len(near)))]
        self.used[chosen.id] += 1
        return chosen


def swelling_arrivals(trace: Trace, swell: Swell, seed: int) -> Trace:
    """Return a slice of the trace, warped in time so that its rate follows the swell.

    The seed chooses where the slice begins. The warp is monotone: the trace's order, lengths and local bursts stay,
    only the clock runs faster where the swell is high. Arrivals lie in [0, duration), the first one at 0.
    """
    time_s, expected = swell.cumulative()
    count = max(1, round(float(expected[-1])))
    if count + 1 > len(trace):
        raise TraceError(f"{count + 1} arrivals asked for, {trace.name} has {len(trace)}; lower the rate or duration")
    first = int(np.random.default_rng(seed).integers(len(trace) - count))
    piece = trace.rows(first, count + 1)  # one more: its arrival closes the last gap
    span_s = float(piece.arrival_s[-1]) or 1.0
    warped_s = np.interp(piece.arrival_s[:-1] / span_s * expected[-1], expected, time_s)
    return Trace(trace.name, warped_s, piece.input_tokens[:-1], piece.output_tokens[:-1])


def build_workload(
    trace: Trace,
    prompts: Sequence[Prompt],
    lengths: Lengths,
    *,
    seed: int,
    mix: Mapping[str, float] | None = None,
) -> list[TimedRequest]:
    """Give each arrival of the trace a prompt of a random kind and about the traced input length.

    The input length is honoured approximately: one of the twelve prompts of the kind that are nearest to it, each
    prompt dealt once before any is dealt again (a repeated prompt would be served from the prefix cache).
    :param mix: weight of each kind; all kinds alike unless given
    """
    weights = dict.fromkeys(KINDS, 1.0) if mix is None else dict(mix)
    limit = lengths.input_tokens(1 << 40)
    decks = {kind: _Deck([p for p in prompts if p.kind == kind and p.tokens <= limit]) for kind in weights}
    if empty := [kind for kind, deck in decks.items() if not deck.prompts]:
        raise TraceError(f"no prompt of kind {', '.join(empty)} within {limit} tokens; expected at least one of each")
    kinds = list(weights)
    share = np.array([weights[kind] for kind in kinds], np.float64)
    if not (np.isfinite(share).all() and (share >= 0).all() and share.sum() > 0):
        raise TraceError(f"mix {weights}; expected weights of at least 0 that are not all 0")
    random = np.random.default_rng(seed)
    drawn = random.choice(len(kinds), size=len(trace), p=share / share.sum())
    return [
        _request(float(arrival_s), decks[kinds[kind]].deal(lengths.input_tokens(int(inputs)), random), lengths, outputs)
        for arrival_s, inputs, outputs, kind in zip(
            trace.arrival_s, trace.input_tokens, trace.output_tokens, drawn, strict=True
        )
    ]


def _request(arrival_s: float, prompt: Prompt, lengths: Lengths, traced_outputs: int) -> TimedRequest:
    max_tokens = lengths.output_tokens(int(traced_outputs), prompt.tokens)
    return TimedRequest(arrival_s, prompt.text, prompt.kind, max_tokens, prompt.id, prompt.tokens)

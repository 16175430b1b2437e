"""What the benchmarks ask: streams of held-out prompts for a closed loop, replayed traces for an open one. Pure.

Called by controller/bench/course.py. Everything follows from the seed, so that every arm gets
the same work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ...env.workload.prompts import KINDS, Prompt, held_out_prompts
from ...env.workload.request_trace import SHIPPED, Trace, TraceError, shipped_trace
from ...env.workload.servegen import draw_trace, shipped_windows
from ...env.workload.workload import Lengths, Swell, TimedRequest, build_workload, swelling_arrivals
from ..errors import UsageError

MIXED: Final = "all"
SERVEGEN: Final = "servegen"
TRACES: Final = (*SHIPPED, SERVEGEN)
MOST_REQUESTS: Final = 3000  # of a closed loop; no load point gets so far
# Azure's prompts of a thousand tokens and more would fill a small model's context, and this machine's minutes.
OPEN_LENGTHS: Final = Lengths(
    context_tokens=2048, input_scale=0.1, max_input_tokens=300, min_output_tokens=16, max_output_tokens=128
)
PEAK_PARTS: Final = 10  # a trace's peak rate is that of its busiest tenth
# The default peak: past the knee, where a token takes twice as long as unloaded, but below what one thread can serve at
# all, for beyond that nobody meets an objective (docs/results.md: 126 tokens/s at 8 requests, 208 at 32).
PEAK_TOKENS_PER_S: Final = 200.0
PEAK_PROMPT_TOKENS_PER_S: Final = 800.0
_WEEK_S: Final = 7 * 86_400.0


@dataclass(frozen=True, slots=True)
class Mix:
    """Kinds of prompts that are sent in turns; `name` is as the user wrote it."""

    name: str
    kinds: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Mix:
        """Return the mix of `all`, one kind, or kinds joined with `+`; raise UsageError for others."""
        kinds = KINDS if text == MIXED else tuple(text.split("+"))
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise UsageError(f"--kinds {', '.join(unknown)}", f"{MIXED} or some of {', '.join(KINDS)}")
        return cls(text, kinds)


def joined(mixes: Sequence[Mix]) -> Mix:
    """Return the mix of all kinds that some mixes have."""
    kinds = tuple(kind for kind in KINDS if any(kind in mix.kinds for mix in mixes))
    return mixes[0] if len(mixes) == 1 else Mix(MIXED if kinds == KINDS else "+".join(kinds), kinds)


def stream_prompts(max_tokens: int, kinds: Sequence[str] = KINDS) -> list[Prompt]:
    """Return the held-out prompts that are short enough, kind by kind."""
    return [prompt for prompt in held_out_prompts(kinds) if prompt.tokens <= max_tokens]


def in_turns(prompts: Sequence[Prompt], random: np.random.Generator, kinds: Sequence[str] = KINDS) -> list[Prompt]:
    """Return prompts in the order in which they are sent: shuffled, the kinds in turn while they last."""
    place = np.array([kinds.index(prompt.kind) for prompt in prompts], np.int64)
    decks = [random.permutation(np.flatnonzero(place == kind)).tolist() for kind in range(len(kinds))]
    return [prompts[deck[at]] for at in range(max(map(len, decks))) for deck in decks if at < len(deck)]


def prompt_pool(mix: Mix, max_prompt_tokens: int, held: int = 0) -> list[Prompt]:
    """Return the prompts that a benchmark may send: those short enough, or `held` of them, the same in every run."""
    prompts = stream_prompts(max_prompt_tokens, mix.kinds)
    if not prompts:
        raise UsageError(f"--max-prompt-tokens {max_prompt_tokens}", f"room for a prompt of {', '.join(mix.kinds)}")
    return in_turns(prompts, np.random.default_rng(0), mix.kinds)[:held] if held else prompts


def staggered(load: int, max_tokens: int, random: np.random.Generator) -> list[int]:
    """Return the tokens of each client's first answer: staggered, so that the load is at once as it stays."""
    return [max(1, round(max_tokens * (place + 1) / load)) for place in random.permutation(load)]


def closed_stream(
    load: int, mix: Mix, max_tokens: int, max_prompt_tokens: int, seed: int, held: int = 0
) -> list[TimedRequest]:
    """Return the requests of `load` clients, each of which sends its next one when its answer is done.

    :param held: draw from so many prompts only, whose answers are recorded; 0 draws from all
    """
    random = np.random.default_rng((seed, load))
    prompts = itertools.cycle(in_turns(prompt_pool(mix, max_prompt_tokens, held), random, mix.kinds))
    lengths = [*staggered(load, max_tokens, random), *itertools.repeat(max_tokens, MOST_REQUESTS)]
    work = zip(prompts, lengths, strict=False)
    return [TimedRequest(0.0, each.text, each.kind, length, each.id, each.tokens) for each, length in work]


def seconds_of_work(trace: str) -> float:
    """Return about how long one thread is at work for a request of a replayed trace; Replay refuses unknown traces."""
    source = shipped_trace(trace if trace in SHIPPED else "azure-conv")  # ServeGen's windows draw their lengths from it
    most = OPEN_LENGTHS.max_input_tokens
    prompt = np.clip(source.input_tokens * OPEN_LENGTHS.input_scale, 1, most).mean()
    answer = np.clip(source.output_tokens, OPEN_LENGTHS.min_output_tokens, OPEN_LENGTHS.max_output_tokens).mean()
    return float(prompt / PEAK_PROMPT_TOKENS_PER_S + answer / PEAK_TOKENS_PER_S)


@dataclass(frozen=True, slots=True)
class Replay:
    """How a trace becomes a load of some seconds."""

    trace: str
    duration_s: float
    peak_rps: float  # of the busiest tenth; rates in between keep the trace's proportions
    warp: float = 60.0  # the trace's clock runs so many times as fast
    low_rps: float | None = None  # a swell from this rate to the peak and back, instead of the trace's own shape

    def __post_init__(self) -> None:
        if self.trace not in TRACES:
            raise UsageError(f"--trace {self.trace}", f"one of {', '.join(TRACES)}")
        if not (math.isfinite(self.warp) and 1.0 <= self.warp <= 10_000.0):
            raise UsageError(f"--warp {self.warp:g}", "1 to 10000")
        if not (math.isfinite(self.duration_s) and 1.0 <= self.duration_s <= 3600.0):
            raise UsageError(f"--trace-seconds {self.duration_s:g}", "1 to 3600")
        if not (math.isfinite(self.peak_rps) and self.peak_rps > 0):
            raise UsageError(f"--peak-rps {self.peak_rps:g}", "a number above 0")

    @property
    def name(self) -> str:
        """Return the name of the load point."""
        return self.trace if self.low_rps is None else f"{self.trace} swell"

    def requests(self, mix: Mix, seed: int, prompts: Sequence[Prompt] | None = None) -> list[TimedRequest]:
        """Return the replay's requests; their prompts are drawn from all held-out ones unless others are given."""
        drawn = held_out_prompts() if prompts is None else prompts
        try:
            arrivals = self._warped(seed) if self.low_rps is None else self._swelling(self.low_rps, seed)
            return build_workload(arrivals, drawn, OPEN_LENGTHS, seed=seed, mix=dict.fromkeys(mix.kinds, 1.0))
        except TraceError as error:
            raise UsageError(f"--trace {self.trace}: {error}") from None

    def _swelling(self, low_rps: float, seed: int) -> Trace:
        return swelling_arrivals(self._source(seed), Swell(self.duration_s, low_rps, self.peak_rps), seed)

    def _source(self, seed: int) -> Trace:
        if self.trace != SERVEGEN:
            return shipped_trace(self.trace)
        span_s = self.duration_s * self.warp
        start_s = float(np.random.default_rng(seed).uniform(0.0, max(_WEEK_S - span_s, 0.0)))
        return draw_trace(shipped_windows(), start_s, span_s, shipped_trace("azure-conv"), seed)

    def _warped(self, seed: int) -> Trace:
        """Cut a part of the trace, run its clock faster, and keep so many requests that the peak rate is as wanted."""
        source = self._source(seed)
        span_s = self.duration_s * self.warp
        length_s = float(source.arrival_s[-1])
        random = np.random.default_rng(seed)
        start_s = float(random.uniform(0.0, max(length_s - span_s, 0.0)))
        piece = source.window(start_s, min(span_s, length_s)).scaled(min(span_s, length_s) / self.duration_s)
        counts, _ = np.histogram(piece.arrival_s, PEAK_PARTS, (0.0, self.duration_s))
        share = self.peak_rps * self.duration_s / PEAK_PARTS / max(int(counts.max()), 1)
        if share > 1.0:
            peak_rps = int(counts.max()) * PEAK_PARTS / self.duration_s
            raise TraceError(f"a peak of {self.peak_rps:g}/s asked for, at warp {self.warp:g} it has {peak_rps:.2g}/s")
        # Every n-th request, by the running sum of the share: random thinning of a few dozen would miss the rate.
        kept = np.flatnonzero(np.diff(np.floor(np.arange(len(piece) + 1) * share + random.random())))
        if not len(kept):
            raise TraceError("no request is left; raise the peak rate or the duration")
        return Trace(self.trace, piece.arrival_s[kept], piece.input_tokens[kept], piece.output_tokens[kept])

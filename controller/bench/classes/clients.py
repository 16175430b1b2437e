"""The clients of all classes at one server, in a closed loop of some seconds; and what its requests came to.

Called by controller/bench/classes/course.py. Slack is judged by the engine's clock, so a turn is never paused: it
begins with an idle server and ends by leaving it.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ....env.workload.workload import TimedRequest
from ...engine.load_generator import LoadGenerator, LoadOptions
from ...engine.load_summary import RequestResult
from ...errors import EngineError
from ..clients import Server
from .plan import ClassShare
from .result import ClassCount

_LONGER: Final = "pass a longer --class-seconds or a shorter --max-tokens"
_AFTER_S: Final = 60.0  # for a request's own limit: the turn's end comes first


@dataclass(frozen=True, slots=True)
class ClassLoad:
    """What one server served of all classes. Seconds since the load's start."""

    results: Mapping[str, Sequence[RequestResult]]
    begin_s: float  # every client has a first token by then: the prompts that all came at once are read
    end_s: float  # the last token

    @property
    def seconds(self) -> float:
        """Return how long it was served."""
        return max(self.end_s - self.begin_s, 1e-9)

    def counts(self) -> dict[str, ClassCount]:
        """Return what each class came to."""
        return {name: self._count(results) for name, results in self.results.items()}

    def _count(self, results: Sequence[RequestResult]) -> ClassCount:
        """Count the answers begun since the begin; of those cut off at the end nobody knows whether they were in time.

        Their tokens are taken to be in time as often as those of the whole answers are.
        """
        whole = [each for each in self.whole(results) if each.is_in_time is not None]
        good = [each for each in whole if each.is_in_time]
        tokens = sum(tokens_between(each, self.begin_s, self.end_s) for each in results)
        answered = sum(each.output_tokens for each in whole)
        share = sum(each.output_tokens for each in good) / answered if answered else 0.0
        return ClassCount(len(whole), len(good), tokens, tokens * share)

    def whole(self, results: Sequence[RequestResult]) -> list[RequestResult]:
        """Return the finished requests that were sent since the begin: the first answers are no whole ones."""
        return [each for each in results if each.outcome == "finished" and (each.sent_s or 0.0) >= self.begin_s]

    def times_per_token_ms(self) -> list[float]:
        """Return the time per token of every whole answer."""
        return [value for each in self._all_whole() if (value := each.tpot_ms) is not None]

    def pieces(self) -> tuple[int, int]:
        """Return in how many pieces the whole answers came, and how many tokens these were."""
        whole = self._all_whole()
        return sum(len(each.token_times_s) for each in whole), sum(each.output_tokens for each in whole)

    def _all_whole(self) -> list[RequestResult]:
        return [each for results in self.results.values() for each in self.whole(results)]


def tokens_between(result: RequestResult, begin_s: float, end_s: float) -> int:
    """Return the tokens that a request received after one moment, until another."""
    counts = [0, *result.token_counts]
    first, last = (bisect_right(result.token_times_s, moment_s) for moment_s in (begin_s, end_s))
    return counts[last] - counts[first]


async def serve_classes(
    server: Server,
    work: Mapping[str, Sequence[TimedRequest]],
    classes: Sequence[ClassShare],
    seconds: float,
    model: str,
    temperature: float = 0.0,
) -> ClassLoad:
    """Let all classes' clients ask for so many seconds, each for its next answer when it has one; then cancel."""
    generators = {
        each.name: LoadGenerator(work[each.name], _options(server, model, temperature, each.clients, seconds))
        for each in classes
    }
    stop = asyncio.Event()
    timer = asyncio.get_running_loop().call_later(seconds, stop.set)
    try:
        await asyncio.gather(*(generator.run(stop) for generator in generators.values()))
    finally:
        timer.cancel()
    _require_sound(server, generators)
    # In a closed loop a request is due when it is sent.
    results = {name: [_due_when_sent(each) for each in found.results] for name, found in generators.items()}
    firsts_s = [_first_s(server, results[each.name][: each.clients], seconds) for each in classes]
    ends_s = [each.token_times_s[-1] for found in results.values() for each in found if each.token_times_s]
    return ClassLoad(results, max(firsts_s), max(ends_s))


def _options(server: Server, model: str, temperature: float, clients: int, seconds: float) -> LoadOptions:
    return LoadOptions(
        server.url, model, temperature, max_connections=clients, ignore_eos=True,
        request_timeout_s=seconds + _AFTER_S, drain_s=seconds + _AFTER_S,
    )  # fmt: skip


def _due_when_sent(result: RequestResult) -> RequestResult:
    return replace(result, due_s=result.due_s if result.sent_s is None else result.sent_s)


def _require_sound(server: Server, generators: Mapping[str, LoadGenerator]) -> None:
    for generator in generators.values():
        if generator.failures:
            raise EngineError(f"{server.name} failed a request: {generator.failures[0]}")
        if all(each.outcome == "finished" for each in generator.results):
            raise EngineError(f"{server.name} served all of its requests before the turn's end")


def _first_s(server: Server, results: Sequence[RequestResult], seconds: float) -> float:
    """Return when the last of some clients had its first token."""
    if any(not each.token_times_s for each in results):
        raise EngineError(f"{server.name} gave not every client a token in {seconds:g} s", remedy=_LONGER)
    return max(each.token_times_s[0] for each in results)


def open_load(generator: LoadGenerator, classes: Sequence[ClassShare]) -> ClassLoad:
    """Return a replay that was served to its end: all of its answers are whole."""
    results = {each.name: [r for r in generator.results if r.class_name == each.name] for each in classes}
    return ClassLoad(results, 0.0, generator.summary().wall_s)

"""Short requests one behind the other, as many at once as an engine takes; used by stage_engine.py.

The same few come again and again: long prompts in chunks, prefixes that others had before, stop strings, and some that
are aborted in mid-flight. What number n says depends on n modulo `DIFFERENT` alone; an aborted one says its beginning.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

DIFFERENT = 48
AT_ONCE = 14  # more than run: some wait
TOKENS = 16
STOPS = ("er", "in", "st")  # within words of random tokens, soon
SHARED = 70  # tokens of a prefix that every third request has
STORY = "The ferry left at nine, and whoever came late had to walk around the lake, past mills, farms and an old wall. "


class ShortRequests:
    """Keeps an engine busy until it is told that it is enough; `said` has (number, tokens, why it ended, text)."""

    def __init__(self, engine: Any, tokenizer: Any, has_aborts: bool) -> None:
        self._engine, self._has_aborts = engine, has_aborts
        self._words: list[int] = tokenizer.encode(STORY * 6)
        self._dice = random.Random(11)
        self._running: dict[str, Any] = {}
        self._to_abort: dict[str, int] = {}  # behind so many tokens
        self.said: list[tuple[int, list[int], str, str]] = []
        self.counts: Counter[str] = Counter()

    def run(self, is_enough: Callable[[int], bool]) -> None:
        """Send requests until it is enough, asked with how many were sent, and wait for all of them."""
        numbers = self._numbers(is_enough)
        self._fill(numbers)
        while self._running:
            for output in self._engine.step():
                self._take(output)
            self._fill(numbers)

    def _numbers(self, is_enough: Callable[[int], bool]) -> Iterator[int]:
        number = 0
        while not is_enough(number):
            yield number
            number += 1

    def _fill(self, numbers: Iterator[int]) -> None:
        while len(self._running) < AT_ONCE and (number := next(numbers, None)) is not None:
            self._send(number)

    def _send(self, number: int) -> None:
        name, prompt, is_stopped = f"s{number}", self._prompt(number % DIFFERENT), number % 4 == 1
        self._running[name] = None
        if self._has_aborts and number % 7 == 3:
            self._to_abort[name] = self._dice.randint(1, TOKENS - 2)
        self._engine.add_request(name, {"prompt_token_ids": prompt}, _parameters(STOPS if is_stopped else ()))

    def _prompt(self, kind: int) -> list[int]:
        """Return a prompt that begins as every third one does, or with words of its own; every fifth one is long."""
        start, length = 5 * kind, 150 + kind if kind % 5 == 0 else 12 + kind
        own = (self._words * 3)[start : start + length]
        return [*self._words[:SHARED], *own] if kind % 3 == 0 else own

    def _take(self, output: Any) -> None:
        name = output.request_id
        if name not in self._running:  # aborted
            return
        self._running[name] = output
        if output.finished:
            self._note(name, output.outputs[0].finish_reason)
            self.counts["prefix_hits"] += bool(output.num_cached_tokens)
            self.counts["long_prompts"] += len(output.prompt_token_ids) >= 150
        elif len(output.outputs[0].token_ids) >= self._to_abort.get(name, TOKENS):
            self._engine.abort_request([name])
            self._note(name, "abort")

    def _note(self, name: str, reason: str) -> None:
        said = self._running.pop(name).outputs[0]
        self.counts[reason] += 1
        self.said.append((int(name[1:]), list(said.token_ids), reason, said.text))


def _parameters(stops: tuple[str, ...]) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, stop=list(stops))

"""An engine whose arms answer the same prompts with the same tokens, whole and taking turns within one answer.

Called by overlap_engine.py, split_engine.py and pruning_gate.py in the engine's process; steady.py makes rates of the
steps. Steps with prompt rows are left out, and so are those after the first request has ended.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final

from embedded_engine import HeldText, add_requests
from steady import Answers, Step, steady_rates

from faser.engine_adapter.gate import Gate
from faser.engine_adapter.steering.steering import BatchOutcome, Steering

SLICE_TOKENS: Final = 12  # of each request
READY_S: Final = 60.0
LEARNING: Final = -1  # as a turn: steps of no answers


def await_process(process: Any) -> None:
    """Wait until a drafter's process takes jobs, a minute at most."""
    ends_s = time.monotonic() + READY_S
    while not process.is_ready and time.monotonic() < ends_s:
        process.collect(1.0)


class Told(Gate):
    """A gate that says what it is told to, and only where it is told nothing what it measured."""

    def __init__(self) -> None:
        super().__init__()
        self.says: bool | None = None
        self.is_deaf = False  # a slice's first steps are no evidence

    def ask(self, requests: int) -> bool:
        """Tell whether the next step may use it."""
        return super().ask(requests) if self.says is None else self.says

    def note(self, requests: int, has_used: bool, time_s: float, tokens: int) -> None:
        """Take in a step."""
        if self.says is None and not self.is_deaf:
            super().note(requests, has_used, time_s, tokens)


class SlicedArms(ABC):
    """The engine, what it answered, and the steps it took.

    :param clock: by which steps are timed
    :param first_steps: of a slice, left out where arms take turns: they verify what another arm drafted
    """

    def __init__(self, llm: Any, clock: Callable[[], float], first_steps: int) -> None:
        self.tokenizer, self.engine = llm.get_tokenizer(), llm.llm_engine
        self.runner: Any = self.engine.model_executor.driver_worker.worker.model_runner
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler
        self.steering: Steering = self.scheduler.steering
        self.gates: tuple[Told, ...] = ()
        self.outcome: Any = None  # of the newest step
        self._clock, self._first_steps = clock, first_steps
        self._held, self._requests = HeldText(self.runner), 0
        self._answers: list[list[int]] = []  # of the last run
        self.forget()
        record, engine = Steering.record, self

        def recorded(steering: Steering, order: Any, outcome: BatchOutcome) -> None:
            engine.outcome = outcome
            record(steering, order, outcome)

        Steering.record = recorded  # type: ignore[method-assign]

    @abstractmethod
    def put_into(self, arm: str) -> None:
        """Put the engine into an arm."""

    @abstractmethod
    def step(self, arm: str) -> tuple[list[Any], str]:
        """Take a step; return vLLM's outputs and what kind of step it was."""

    def forget(self) -> None:
        """Begin a measurement."""
        self.timed: list[Step] = []
        self._answered: dict[str, list[Answers]] = {}

    def record(self, arm: str, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        """Let the engine answer the prompts as it likes; from now on they get the same tokens."""
        self._answers = []
        self.run(arm, prompts, tokens)

    def run(self, arm: str, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Answer the prompts in one arm, as in the last run of them; return tokens per second behind the prompts."""
        names = self._begin(arm, prompts, tokens)
        first = sum(entry.request.num_output_tokens for entry in self.steering.entries.values())
        spent_s, said = 0.0, dict[str, list[int]]()
        while self.engine.has_unfinished_requests():
            began_s = self._clock()
            outputs = self.engine.step()
            spent_s += self._clock() - began_s
            said |= _tokens_of(outputs)
        self._answers = [said[name] for name in names]
        return (tokens * len(prompts) - first) / spent_s

    def turn(
        self, whole: Sequence[str], sliced: tuple[str, ...], prompts: Sequence[Sequence[int]], number: int
    ) -> None:
        """Let arms answer the prompts, each whole, and twice taking turns."""
        for arm in whole:
            steps, emitted = self.answer((arm,), prompts, number)
            self._answered.setdefault(arm, []).append(Answers(tuple(steps), emitted))
        for order in (sliced, sliced[::-1]):
            self.timed += self.answer(order, prompts, number)[0]

    def answer(self, arms: tuple[str, ...], prompts: Sequence[Sequence[int]], number: int) -> tuple[list[Step], int]:
        """Answer the prompts with the arms in slices, the first one first; return the steps, and tokens.

        With several arms the first steps of a slice are left out.
        """
        names = self._begin(arms[0], prompts, len(self._answers[0]))
        emitted, slice_, into, steps, said = 0, 0, 0, list[Step](), dict[str, list[int]]()
        while True:
            if emitted // (SLICE_TOKENS * len(prompts)) > slice_:
                slice_, into = emitted // (SLICE_TOKENS * len(prompts)), 0
                self.put_into(arms[slice_ % len(arms)])
            is_counted = len(arms) == 1 or into >= self._first_steps
            for gate in self.gates:
                gate.is_deaf = not is_counted
            began_s = self._clock()
            outputs, kind = self.step(arms[slice_ % len(arms)])
            took_s = self._clock() - began_s
            said |= _tokens_of(outputs)
            if any(output.finished for output in outputs):
                break
            if is_counted:
                steps.append(Step(kind, number, self._work(emitted), took_s))
            emitted, into = emitted + sum(self.outcome.sampled.counts), into + 1
        for name, found in said.items():
            if found != self._held.texts[name][: len(found)]:
                raise RuntimeError(f"request {name} left the text that it is held to")
        self.engine.abort_request(names)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return steps, emitted

    def answered_steps(self) -> dict[str, list[Step]]:
        """Return by arm the steps of its whole answers."""
        return {arm: [step for each in of_arm for step in each.steps] for arm, of_arm in self._answered.items()}

    def rates(self) -> dict[str, list[float]]:
        """Return by arm tokens per second in every turn."""
        found = steady_rates(self.timed, self._answered)
        return {arm: [round(rate, 4) for rate in rates] for arm, rates in found.items()}

    def _begin(self, arm: str, prompts: Sequence[Sequence[int]], tokens: int) -> list[str]:
        """Send prompts, held to the last run's answers, and let the engine read them; return the requests' names."""
        self.put_into(arm)
        names = [str(self._requests + number) for number in range(len(prompts))]
        self._requests += len(prompts)
        self._held.texts = dict(zip(names, self._answers, strict=False))  # none: they are answered freely
        add_requests(self.engine, names, prompts, tokens)
        while not self._is_decoding(names):
            self.engine.step()
        return names

    def _is_decoding(self, names: Sequence[str]) -> bool:
        counts = {  # vLLM may give ids a suffix
            key.split("-")[0]: entry.request.num_output_tokens for key, entry in self.steering.entries.items()
        }
        return all(counts.get(name) for name in names)

    def _work(self, emitted: int) -> tuple[float, ...]:
        rows, rounds = sum(self.outcome.scheduled.values()), self.outcome.report.rounds or ()
        return (math.log(rows), float(rows), float(len(rounds)), float(sum(rounds)), float(emitted))


def _tokens_of(outputs: Sequence[Any]) -> dict[str, list[int]]:
    return {output.request_id: list(output.outputs[0].token_ids) for output in outputs}

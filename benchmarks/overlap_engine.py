"""The engine of overlap_gate.py, in a process of its own: it answers prompts held to recorded texts, arm by arm.

Started by overlap_gate.py with the most draft tokens, the most requests and the number type; steady.py makes rates of
the steps it returns.
"""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from embedded_engine import HeldText, add_requests, start_engine
from remote import serve
from steady import Answers, Step, steady_rates

from faser.engine_adapter.gate import Gate
from faser.engine_adapter.settings import ALWAYS, AUTO
from faser.engine_adapter.steering.orders import StepOrder
from faser.engine_adapter.steering.steering import BatchOutcome, Steering

FORCED: Final = ("in turn", "ahead", "groups")
GATED: Final = "gated"
SLICE_TOKENS: Final = 12  # of each request
FIRST_STEPS: Final = 2  # of a slice
LEARNING_RUNS: Final = 12  # at most
LEARNING: Final = -1  # as a turn
READY_S: Final = 60.0
MAX_MODEL_LEN: Final = 1024


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


class GatedEngine:
    """Answers `measure`."""

    def __init__(self, length: int, requests: int, dtype: str) -> None:
        llm = start_engine(length, requests, dtype=dtype, max_model_len=MAX_MODEL_LEN)
        self._tokenizer, self._engine = llm.get_tokenizer(), llm.llm_engine
        scheduler = self._engine.engine_core.engine_core.scheduler
        runner = self._engine.model_executor.driver_worker.worker.model_runner
        self._steering, self._groups, self._remote = scheduler.steering, scheduler.ping_pong, runner.remote
        self._held, self._runs = HeldText(runner), 0
        self._wait_for_process()
        self._steering.default.length = self._steering.default.frontier = length
        self._remote.mode = AUTO
        self._outcome: BatchOutcome | None = None  # of the newest step
        self._new_gates()
        record, engine = Steering.record, self

        def recorded(steering: Steering, order: StepOrder, outcome: BatchOutcome) -> None:
            engine._outcome = outcome
            record(steering, order, outcome)

        Steering.record = recorded  # type: ignore[method-assign]

    def _wait_for_process(self) -> None:
        ends_s = time.monotonic() + READY_S
        while not self._remote.process.is_ready and time.monotonic() < ends_s:
            self._remote.process.collect(1.0)

    def _new_gates(self) -> None:
        self._ahead, self._deferred = Told(), Told()
        self._remote._gate, self._groups._gate = self._ahead, self._deferred

    def put_into(self, arm: str) -> None:
        """Have the gates say what makes an arm."""
        self._ahead.says = None if arm == GATED else arm == "ahead"
        self._deferred.says = None if arm == GATED else arm == "groups"
        self._groups.mode = ALWAYS if arm == "groups" else AUTO  # which also asks whether it may pay at all

    def measure(self, sets: list[list[str]], tokens: int) -> dict[str, Any]:
        """Return one load's cell: the first set of prompts is for the gates to learn, each other one is a turn."""
        arms = tuple(arm for arm in FORCED if arm != "groups" or len(sets[0]) > 1)
        timed, deaths = list[Step](), self._remote.process.deaths
        answered: dict[str, list[Answers]] = {arm: [] for arm in (*arms, GATED)}
        self._new_gates()
        self._record(sets[0], tokens)
        for _ in range(LEARNING_RUNS):
            if self._are_settled(len(sets[0])):
                break
            self.answer((GATED,), sets[0], LEARNING)
        for number, texts in enumerate(sets[1:]):
            self._record(texts, tokens)
            for arm in list(answered)[:: -1 if number % 2 else 1]:
                steps, emitted = self.answer((arm,), texts, number)
                answered[arm].append(Answers(tuple(steps), emitted))
            for order in (arms, arms[::-1]):
                timed += self.answer(order, texts, number)[0]
        if self._remote.process.deaths > deaths or not self._remote.is_ready:
            raise RuntimeError("the drafter's process ended while it was measured")
        kinds = {
            arm: _shares(step.kind for answer in of_arm for step in answer.steps) for arm, of_arm in answered.items()
        }
        rates = steady_rates(timed, answered)
        return {
            "requests": len(sets[0]), "timed": len(timed), "kinds": kinds,
            "gain_seen_by_gates": {
                "ahead": self._ahead.gain(len(sets[0])), "groups": self._deferred.gain(len(sets[0])),
            },
            "tokens_per_s": {arm: [round(rate, 4) for rate in found] for arm, found in rates.items()},
        }  # fmt: skip

    def _are_settled(self, requests: int) -> bool:
        """Whether both gates know what they want to; groups that cannot pay at all are not asked about."""
        asks_groups = requests > 1 and self._groups.pace.may_pay()
        return self._ahead.gain(requests) is not None and (not asks_groups or self._deferred.gain(requests) is not None)

    def _record(self, texts: list[str], tokens: int) -> None:
        """Let the engine answer the prompts in turn; from now on they get the same tokens."""
        self.put_into("in turn")
        self._held.texts = {}
        names, said = self._add(texts, tokens), dict[str, list[int]]()
        while self._engine.has_unfinished_requests():
            said |= {output.request_id: list(output.outputs[0].token_ids) for output in self._engine.step()}
        self._answers = [said[name] for name in names]

    def answer(self, arms: tuple[str, ...], texts: list[str], number: int) -> tuple[list[Step], int]:
        """Answer the prompts with the arms in slices, the first one first; return steps that only decode, and tokens.

        With several arms the first steps of a slice are left out.
        """
        self.put_into(arms[0])
        names = self._add(texts, len(self._answers[0]))
        self._held.texts = dict(zip(names, self._answers, strict=True))
        while not self._is_decoding(names):
            self._engine.step()
        emitted, slice_, into, steps, said = 0, 0, 0, list[Step](), dict[str, list[int]]()
        while True:
            if emitted // (SLICE_TOKENS * len(texts)) > slice_:
                slice_, into = emitted // (SLICE_TOKENS * len(texts)), 0
                self.put_into(arms[slice_ % len(arms)])
            is_counted = len(arms) == 1 or into >= FIRST_STEPS
            self._ahead.is_deaf = self._deferred.is_deaf = not is_counted
            outputs, step, fresh = self._timed_step(number, emitted)
            said |= {output.request_id: list(output.outputs[0].token_ids) for output in outputs}
            if any(output.finished for output in outputs):
                break
            steps += [step] if is_counted else []
            emitted, into = emitted + fresh, into + 1
        self._check(said)
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return steps, emitted

    def _add(self, texts: list[str], tokens: int) -> list[str]:
        """Send prompts, to be answered with so many tokens; return the requests' names."""
        names = [str(self._runs + number) for number in range(1, len(texts) + 1)]
        self._runs += len(texts)
        add_requests(self._engine, names, [self._tokenizer.encode(text) for text in texts], tokens)
        return names

    def _is_decoding(self, names: list[str]) -> bool:
        entries = self._steering.entries
        held = [entries.get(name) or self._suffixed(name) for name in names]
        return all(entry is not None and entry.request.num_output_tokens > 0 for entry in held)

    def _suffixed(self, name: str) -> Any:
        """Return the entry of a request whose id vLLM gave a suffix."""
        return next((entry for key, entry in self._steering.entries.items() if key.split("-")[0] == name), None)

    def _timed_step(self, number: int, emitted: int) -> tuple[list[Any], Step, int]:
        """Take a step; return vLLM's outputs, the step as what it was, and the tokens it emitted."""
        was_ahead = self._remote.is_ahead  # the process drafts beside this step's verification
        began_s = time.monotonic()
        outputs = self._engine.step()
        took_s = time.monotonic() - began_s
        outcome, turn = self._outcome, self._groups._turn
        assert outcome is not None
        assert outcome.report is not None
        kind = "groups" if turn.is_deferred or turn.held else "ahead" if was_ahead else "in turn"
        rows, rounds = sum(outcome.scheduled.values()), outcome.report.rounds or ()
        work = (math.log(rows), float(rows), float(len(rounds)), float(sum(rounds)), float(emitted))
        return outputs, Step(kind, number, work, took_s), sum(outcome.sampled.counts)

    def _check(self, said: dict[str, list[int]]) -> None:
        """Raise if answers so far are not what they are held to."""
        for name, tokens in said.items():
            if tokens != self._held.texts[name][: len(tokens)]:
                raise RuntimeError(f"request {name} left the text that it is held to")


def _shares(kinds: Iterable[str]) -> dict[str, float]:
    """Return the share of each kind of step."""
    counts = Counter(kinds)
    return {kind: count / counts.total() for kind, count in sorted(counts.items())}


if __name__ == "__main__":
    length, most_requests, number_type = sys.argv[2:]
    serve(GatedEngine(int(length), int(most_requests), number_type))

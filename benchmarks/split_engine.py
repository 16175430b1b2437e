"""The engine of core_splits.py, in a process of its own.

Started by core_splits.py with the most draft tokens, the most requests and the number type.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter, defaultdict
from typing import Any, Final

from embedded_engine import start_engine
from remote import serve
from sliced_arms import LEARNING, SlicedArms, Told, await_process

from faser.engine_adapter.gate import EVIDENCE_STEPS
from faser.engine_adapter.overlap.ping_pong import PingPong
from faser.engine_adapter.overlap.remote_drafting import RemoteDrafting
from faser.engine_adapter.settings import ALWAYS, AUTO

SPLIT: Final = 1  # of HELLO's splits
FORCED: Final = ("unsplit", "1:1")
GATED: Final = "gated"
LEARNING_RUNS: Final = 12  # at most
MAX_MODEL_LEN: Final = 1024


class SplitEngine(SlicedArms):
    """Answers `measure`."""

    def __init__(self, length: int, requests: int, dtype: str) -> None:
        llm = start_engine(length, requests, dtype=dtype, max_model_len=MAX_MODEL_LEN)
        super().__init__(llm, time.monotonic, first_steps=3)  # in which groups begin, and the drafter catches up
        # With their types, so that a checker sees when what is read of them goes.
        self._groups: PingPong = self.scheduler.ping_pong
        self._remote: RemoteDrafting = self.runner.remote
        await_process(self._remote.process)
        self.steering.default.length = length
        self.steering._split = lambda action: self._asked
        self._asked = 0
        self._new_gate()

    def _new_gate(self) -> None:
        self._told = Told()
        self.gates = (self._told,)
        self._groups._gates[SPLIT] = self._told
        self.phases_ms: dict[str, list[tuple[float, float, int]]] = defaultdict(list)  # verifying, drafting, rows

    def put_into(self, arm: str) -> None:
        """Ask for what makes an arm; `gated` always asks for the split, and the gate decides."""
        self._asked = 0 if arm == "unsplit" else SPLIT
        self._told.says = None if arm == GATED else arm != "unsplit"
        self._groups.mode = AUTO if arm == GATED else ALWAYS

    def step(self, arm: str) -> tuple[list[Any], str]:
        """Take a step; return vLLM's outputs and what the step was, whatever the arm."""
        outputs, kind = self.engine.step(), FORCED[self._groups.split]
        report = self.outcome.report
        if arm != GATED and not report.caught_up:
            rows = sum(self.outcome.scheduled.values())
            self.phases_ms[kind].append((1e3 * report.verify_s, 1e3 * report.draft_s, rows))
        return outputs, kind

    def measure(self, sets: list[list[str]], tokens: int) -> dict[str, Any]:
        """Return one load's cell: the first set of prompts is for the gate to learn, each other one is a turn."""
        first, *others = [[self.tokenizer.encode(text) for text in texts] for texts in sets]
        deaths = self._remote.process.deaths
        self.forget()
        self._new_gate()
        self.record("unsplit", first, tokens)
        runs = 0
        while self._told.gain(len(first)) is None and self._groups.pace.may_pay() and runs < LEARNING_RUNS:
            self.answer((GATED,), first, LEARNING)
            runs += 1
        for number, prompts in enumerate(others):
            self.record("unsplit", prompts, tokens)
            self.turn((*FORCED, GATED)[:: -1 if number % 2 else 1], FORCED, prompts, number)
        if self._remote.process.deaths > deaths:  # one that is late with an answer is only seen as busy
            raise RuntimeError("the drafter's process ended while it was measured")
        kinds = {arm: Counter(step.kind for step in steps) for arm, steps in self.answered_steps().items()}
        return {
            "requests": len(first), "timed": len(self.timed), "learning_runs": runs, "evidence_steps": EVIDENCE_STEPS,
            "kinds": {arm: {kind: n / counts.total() for kind, n in counts.items()} for arm, counts in kinds.items()},
            "gain_seen_by_gate": self._told.gain(len(first)), "tokens_per_s": self.rates(),
            "phases": {kind: _phases(seen) for kind, seen in self.phases_ms.items()},
        }  # fmt: skip


def _phases(seen: list[tuple[float, float, int]]) -> dict[str, float]:
    """Return the medians: under a split the groups are halves, and so are the rows."""
    verify_ms, draft_ms, rows = (statistics.median(values) for values in zip(*seen, strict=True))
    return {"verify_ms": verify_ms, "draft_ms": draft_ms, "rows": rows, "steps": len(seen)}


if __name__ == "__main__":
    length, most_requests, number_type = sys.argv[2:]
    serve(SplitEngine(int(length), int(most_requests), number_type))

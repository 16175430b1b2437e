"""The engine of overlap_gate.py, in a process of its own.

Started by overlap_gate.py with the most draft tokens, the most requests and the number type.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from embedded_engine import start_engine
from remote import serve
from sliced_arms import LEARNING, SlicedArms, Told, await_process

from faser.engine_adapter.overlap.ping_pong import PingPong
from faser.engine_adapter.overlap.remote_drafting import RemoteDrafting
from faser.engine_adapter.settings import ALWAYS, AUTO

FORCED: Final = ("in turn", "ahead", "groups")
GATED: Final = "gated"
LEARNING_RUNS: Final = 12  # at most
MAX_MODEL_LEN: Final = 1024


class GatedEngine(SlicedArms):
    """Answers `measure`."""

    def __init__(self, length: int, requests: int, dtype: str) -> None:
        llm = start_engine(length, requests, dtype=dtype, max_model_len=MAX_MODEL_LEN)
        super().__init__(llm, time.monotonic, first_steps=2)  # in which the process still has another way's drafts
        # With their types, so that a checker sees when what is read of them goes.
        self._groups: PingPong = self.scheduler.ping_pong
        self._remote: RemoteDrafting = self.runner.remote
        await_process(self._remote.process)
        self.steering.default.length = self.steering.default.frontier = length
        self._remote.mode = AUTO
        self._new_gates()

    def _new_gates(self) -> None:
        self.gates = self._ahead, self._deferred = Told(), Told()
        self._remote._gate, self._groups._gate = self.gates

    def put_into(self, arm: str) -> None:
        """Have the gates say what makes an arm."""
        self._ahead.says = None if arm == GATED else arm == "ahead"
        self._deferred.says = None if arm == GATED else arm == "groups"
        self._groups.mode = ALWAYS if arm == "groups" else AUTO  # which also asks whether it may pay at all

    def step(self, arm: str) -> tuple[list[Any], str]:
        """Take a step; return vLLM's outputs and what the step was, whatever the arm."""
        was_ahead = self._remote.is_ahead  # the process drafts beside this step's verification
        outputs, turn = self.engine.step(), self._groups.turn
        return outputs, "groups" if turn.is_deferred or turn.held else "ahead" if was_ahead else "in turn"

    def measure(self, sets: list[list[str]], tokens: int) -> dict[str, Any]:
        """Return one load's cell: the first set of prompts is for the gates to learn, each other one is a turn."""
        first, *others = [[self.tokenizer.encode(text) for text in texts] for texts in sets]
        arms, deaths = tuple(arm for arm in FORCED if arm != "groups" or len(first) > 1), self._remote.process.deaths
        self.forget()
        self._new_gates()
        self.record("in turn", first, tokens)
        for _ in range(LEARNING_RUNS):
            if self._are_settled(len(first)):
                break
            self.answer((GATED,), first, LEARNING)
        for number, prompts in enumerate(others):
            self.record("in turn", prompts, tokens)
            self.turn((*arms, GATED)[:: -1 if number % 2 else 1], arms, prompts, number)
        if self._remote.process.deaths > deaths or not self._remote.is_ready:
            raise RuntimeError("the drafter's process ended while it was measured")
        answered = self.answered_steps()
        return {
            "requests": len(first), "timed": len(self.timed),
            "kinds": {arm: _shares(step.kind for step in answered[arm]) for arm in (*arms, GATED)},
            "gain_seen_by_gates": {"ahead": self._ahead.gain(len(first)), "groups": self._deferred.gain(len(first))},
            "tokens_per_s": self.rates(),
        }  # fmt: skip

    def _are_settled(self, requests: int) -> bool:
        """Whether both gates know what they want to; groups that cannot pay at all are not asked about."""
        asks_groups = requests > 1 and self._groups.pace.may_pay()
        return self._ahead.gain(requests) is not None and (not asks_groups or self._deferred.gain(requests) is not None)


def _shares(kinds: Iterable[str]) -> dict[str, float]:
    """Return the share of each kind of step."""
    counts = Counter(kinds)
    return {kind: count / counts.total() for kind, count in sorted(counts.items())}


if __name__ == "__main__":
    length, most_requests, number_type = sys.argv[2:]
    serve(GatedEngine(int(length), int(most_requests), number_type))

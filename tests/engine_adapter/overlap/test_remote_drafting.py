"""What the engine waits for and what it does not, when it drafts in turn and ahead: a process that only pretends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from faser.engine_adapter.drafter_process.drafted import Drafted
from faser.engine_adapter.drafter_process.mailbox import Reply
from faser.engine_adapter.drafter_process.process import Wish
from faser.engine_adapter.gate import EVIDENCE_STEPS
from faser.engine_adapter.overlap.remote_drafting import FIRST_GUESS_S, PATIENCE, RemoteDrafting
from faser.engine_adapter.protocol import StopRule
from faser.engine_adapter.settings import ALWAYS, AUTO

TOKENS = np.arange(5, dtype=np.int32)


class Pretender:
    """Answers what it is told to, when it is told to."""

    def __init__(self) -> None:
        self.sent: list[list[Wish]] = []
        self.waited: list[float] = []
        self.cancelled = 0
        self.answer: dict[str, Drafted] | None = None  # to the next look; None: not there yet
        self.is_busy = False

    @property
    def is_ready(self) -> bool:
        return not self.is_busy

    def look(self) -> None:
        """Nothing changes by itself."""

    def send(self, wishes: Sequence[Wish]) -> bool:
        if self.is_busy:
            return False
        self.sent.append(list(wishes))
        self.is_busy = True
        return True

    def collect(self, limit_s: float) -> Reply | None:
        if not self.is_busy:
            return None
        self.waited.append(limit_s)
        if self.answer is None:
            return None
        found, self.answer, self.is_busy = self.answer, None, False
        return Reply(1, 0.0, 0.25, {ord(name): drafted for name, drafted in found.items()})

    def cancel(self) -> None:
        self.cancelled += 1

    def requests_of(self, reply: Reply) -> dict[str, int]:
        return {chr(key): key for key in reply.drafted}


@pytest.fixture
def process() -> Pretender:
    return Pretender()


@pytest.fixture
def remote(process: Pretender) -> RemoteDrafting:
    given: Any = process
    made = RemoteDrafting(given, ALWAYS)
    made.begin_step()
    return made


def wish(request: str, chunk: tuple[int, ...] = ()) -> Wish:
    return Wish(request, TOKENS, (5,), chunk, 3)


def test_a_hit_is_had_without_waiting_once_it_is_there(remote: RemoteDrafting, process: Pretender) -> None:
    remote.go_on([wish("a", (6, 7))], 1)
    process.answer = {"a": Drafted((8, 9, 10), (0.9, 0.9, 0.9))}
    remote.begin_step()
    assert remote.take({"a": [6, 7, 8]}, {"a": 5}) == {"a": Drafted((9, 10), (0.9, 0.9))}
    assert (remote.hits, remote.misses, process.cancelled) == (1, 0, 0)
    assert remote.rounds == (1, 1, 1)


def test_what_cannot_be_of_use_is_not_waited_for(remote: RemoteDrafting, process: Pretender) -> None:
    remote.go_on([wish("a", (6, 7))], 1)
    remote.begin_step()
    assert remote.take({"a": [6, 99]}, {"a": 5}) == {}
    assert process.waited == [0.0]
    assert (remote.hits, remote.misses) == (0, 1)


def test_what_may_be_of_use_is_waited_for_as_long_as_drafting_in_turn_takes(
    remote: RemoteDrafting, process: Pretender
) -> None:
    remote.go_on([wish("a", (6, 7)), wish("b", (6,))], 1)
    remote.begin_step()
    assert remote.take({"a": [6, 99], "b": [6, 50]}, {"a": 5, "b": 5}) == {}
    assert process.waited == [FIRST_GUESS_S]
    assert remote.frontiers.outcomes.late == 1


def test_a_miss_leaves_the_frontier_and_drafts_in_turn(remote: RemoteDrafting, process: Pretender) -> None:
    remote.go_on([wish("a", (6, 7))], 1)
    remote.begin_step()
    remote.take({"a": [99]}, {"a": 5})

    def answered(limit_s: float) -> Reply | None:
        process.answer = {"a": Drafted((1, 2), (0.5, 0.5))}
        return Pretender.collect(process, limit_s)

    process.collect = answered  # type: ignore[method-assign]
    assert remote.draft([wish("a")]) == {"a": Drafted((1, 2), (0.5, 0.5))}
    assert process.cancelled == 1
    assert [len(wishes) for wishes in process.sent] == [1, 1]


def test_a_process_that_hangs_is_waited_for_once(remote: RemoteDrafting, process: Pretender) -> None:
    remote.go_on([wish("a", (6, 7))], 1)
    for _ in range(5):
        remote.begin_step()
        remote.take({"a": [6, 7, 8]}, {"a": 5})
        assert remote.draft([wish("a")]) == {}
        remote.go_on([wish("a", (6, 7))], 1)
    assert process.waited == [FIRST_GUESS_S, FIRST_GUESS_S, 0.0, 0.0, 0.0, 0.0]
    assert len(process.sent) == 1


def test_one_that_answers_late_is_waited_for_longer_the_next_time(remote: RemoteDrafting, process: Pretender) -> None:
    assert remote.draft([wish("a")]) == {}
    assert process.waited == [PATIENCE * FIRST_GUESS_S]
    process.answer = {"a": Drafted((1,), (0.5,))}
    remote.begin_step()
    assert remote.serial_s > FIRST_GUESS_S
    remote.draft([wish("a")])
    assert process.waited[-1] > PATIENCE * FIRST_GUESS_S


def test_late_answers_never_fill_the_next_steps_chains(remote: RemoteDrafting, process: Pretender) -> None:
    remote.go_on([wish("a", (6, 7))], 1)
    remote.begin_step()
    remote.take({"a": [6, 7, 8]}, {"a": 5})
    remote.go_on([wish("a", (9,))], 1)  # the process is busy: nothing is sent, so nothing may be taken
    process.answer = {"a": Drafted((8, 9, 10), (0.9, 0.9, 0.9))}
    remote.begin_step()
    assert remote.take({"a": [9, 8]}, {"a": 5}) == {}


def test_only_the_time_before_the_engine_looked_counts_as_overlap(remote: RemoteDrafting, process: Pretender) -> None:
    reply = Reply(1, 10.0, 12.0, {})
    remote._ahead_s = 9.0
    remote._count(reply, 11.5)
    assert remote.overlap_s == 1.5
    remote._count(reply, 11.5)
    assert remote.overlap_s == 1.5, "drafting in turn hides nothing"


DRAFTED = Drafted((8, 9, 10), (0.9, 0.9, 0.9))


def test_what_nobody_waits_for_is_met_in_the_next_step(remote: RemoteDrafting, process: Pretender) -> None:
    assert remote.part([wish("a"), wish("b")], stop=None)
    assert process.waited == []
    assert remote.is_parted
    assert remote.is_ready
    process.answer = {"a": DRAFTED}
    remote.begin_step()
    assert remote.late_drafts == {"a": DRAFTED}
    assert process.waited == [PATIENCE * FIRST_GUESS_S]
    assert remote.rounds == (1, 1, 1)
    assert not remote.is_parted
    remote.begin_step()
    assert remote.late_drafts == {}


def test_the_stop_rule_of_the_step_that_asked_ends_what_is_met(remote: RemoteDrafting, process: Pretender) -> None:
    rule = StopRule([1.0], [0.0], [0.3], [0.0])
    remote.part([wish("a")], rule)
    process.answer = {"a": DRAFTED}
    remote.begin_step()
    assert remote.late_stop is rule


def test_who_goes_on_without_its_draft_never_gets_it(remote: RemoteDrafting, process: Pretender) -> None:
    remote.part([wish("a"), wish("b")], stop=None)
    remote.drop({"a"})
    process.answer = {"a": DRAFTED, "b": DRAFTED}
    remote.begin_step()
    assert remote.late_drafts == {"b": DRAFTED}


def test_a_job_that_nobody_wants_any_more_is_left_for_the_next(remote: RemoteDrafting, process: Pretender) -> None:
    remote.part([wish("a")], stop=None)
    remote.drop({"a"})
    remote.begin_step()
    assert process.waited == []
    process.answer = {"a": DRAFTED}
    assert remote.part([wish("b")], stop=None)
    assert process.cancelled == 1
    assert [[each.request for each in sent] for sent in process.sent] == [["a"], ["b"]]


def test_an_answer_that_does_not_come_is_given_up_and_the_process_not_ready(
    remote: RemoteDrafting, process: Pretender
) -> None:
    remote.part([wish("a")], stop=None)
    remote.begin_step()
    assert remote.late_drafts == {}
    assert process.cancelled == 1
    assert not remote.part([wish("b")], stop=None)
    assert not remote.is_ready
    process.answer = {"a": DRAFTED}
    remote.begin_step()
    assert remote.late_drafts == {}, "too late"
    assert remote.is_ready


def test_parting_ends_frontiers(remote: RemoteDrafting, process: Pretender) -> None:
    remote.go_on([wish("a", (6, 7))], 1)
    process.answer = {"a": DRAFTED}
    remote.begin_step()
    remote.part([wish("a")], stop=None)
    assert process.cancelled == 1
    process.answer = {"a": DRAFTED}
    remote.begin_step()
    assert remote.take({"a": [6, 7, 8]}, {"a": 5}) == {}


def share_ahead(ahead_s: float, steps: int = 8 * EVIDENCE_STEPS) -> float:
    """Return how often the process was sent ahead, late in a run, where a step beside it takes so long, else 50 ms."""
    process: Any = Pretender()
    remote = RemoteDrafting(process, AUTO)
    sent, is_beside = [], False
    for step in range(steps):
        remote.begin_step()
        before = len(process.sent)
        remote.go_on([wish("a", (6, 7))], 4)
        process.is_busy = False
        remote.note_step(4, (ahead_s if is_beside else 0.05) * (1.0 + 0.01 * (step % 3)), 8)
        is_beside = len(process.sent) > before
        sent.append(is_beside)
        remote.frontiers.clear()
    return sum(sent[steps // 2 :]) / (steps - steps // 2)


def test_nothing_is_drafted_ahead_where_steps_beside_a_busy_process_were_slower() -> None:
    assert share_ahead(0.052) < 0.05
    assert share_ahead(0.04) > 0.95


def test_steps_of_another_batch_tell_nothing_of_drafting_ahead() -> None:
    process: Any = Pretender()
    remote = RemoteDrafting(process, AUTO)
    for _ in range(4 * EVIDENCE_STEPS):
        remote.begin_step()
        remote.go_on([wish("a", (6, 7))], 4)
        process.is_busy = False
        remote.note_step(5, 9.9, 8)  # somebody came in between
    assert remote._gate.gain(4) is remote._gate.gain(5) is None

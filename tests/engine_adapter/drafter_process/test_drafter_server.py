"""The drafter's side of the mailbox around a drafter of one line: what is read when, and what is answered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from faser.engine_adapter.drafter_process import server
from faser.engine_adapter.drafter_process.drafted import Drafted
from faser.engine_adapter.drafter_process.mailbox import READY, Ask, Job, Mailbox, Reply, StateRows, Tokens
from faser.engine_adapter.drafter_process.server import NEAR_TOKENS, PORTION_TOKENS, DraftTask, JobServer

LIMIT_S = 60.0
UNKNOWN = 99
LONG = np.arange(1000, 1000 + NEAR_TOKENS + 2 * PORTION_TOKENS, dtype=np.int32)


class Counting:
    """Draws the sequence's last token plus one, and so on; counts what it was made to read."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}
        self.portions: list[int] = []
        self.has_read_all = threading.Event()
        self.told: StateRows | None = None

    def learn(self, key: int, sequence: Tokens, states: StateRows) -> bool:
        self.told = states
        return sequence[0] != UNKNOWN

    def behind(self, key: int, sequence: Tokens) -> int:
        return max(len(sequence) - self.known.get(key, 0), 0)

    def read(self, key: int, sequence: Tokens, count: int) -> None:
        self.known[key] = min(self.known.get(key, 0) + count, len(sequence))
        self.portions.append(count)
        if self.known[key] == len(sequence):
            self.has_read_all.set()

    def draft(self, tasks: list[DraftTask], is_cancelled: Callable[[], bool]) -> dict[int, Drafted]:
        for task in tasks:
            self.known[task.key] = len(task.sequence)
        drawn = {task.key: range(task.sequence[-1] + 1, task.sequence[-1] + 1 + task.count) for task in tasks}
        return {key: Drafted(tuple(map(int, tokens)), (0.5,) * len(tokens)) for key, tokens in drawn.items()}

    def forget(self, key: int) -> None:
        self.known.pop(key, None)


class Engine:
    """The engine's end, and a server in a thread."""

    def __init__(self) -> None:
        self.mailbox, memory, bell = Mailbox.pair()
        self.theirs = Mailbox(memory, bell)
        self.drafter = Counting()
        self.thread = threading.Thread(target=JobServer(self.theirs, self.drafter).run)
        self.thread.start()
        assert self.mailbox.heard(LIMIT_S) == READY
        self.jobs = 0

    def ask(self, *asks: Ask, forget: list[int] | None = None) -> Reply:
        self.jobs += 1
        self.mailbox.post(Job(self.jobs, forget or [], list(asks)))
        assert self.mailbox.heard(LIMIT_S) == self.jobs
        return self.mailbox.read_reply(self.jobs)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.mailbox.close()
    made.thread.join(LIMIT_S)
    assert not made.thread.is_alive(), "it ends with the engine"
    made.theirs.close()


def ask(key: int, start: int, tokens: Tokens, assumed: list[int], count: int = 2) -> Ask:
    return Ask(key, start, tokens, np.array(assumed, dtype=np.int32), count)


def test_only_what_is_new_has_to_be_sent(engine: Engine) -> None:
    assert engine.ask(ask(1, 0, LONG[:3], [50])).drafted == {1: Drafted((51, 52), (0.5, 0.5))}
    # What was assumed is gone: the sequence goes on behind the three tokens that were certain.
    assert engine.ask(ask(1, 3, LONG[3:5], [])).drafted == {1: Drafted((1005, 1006), (0.5, 0.5))}
    assert engine.ask(ask(1, 5, LONG[:0], [70, 80])).drafted == {1: Drafted((81, 82), (0.5, 0.5))}


def test_what_the_target_knows_arrives_with_the_tokens(engine: Engine) -> None:
    states = StateRows(2, 7, np.array([5, 3], dtype=np.int32))
    engine.ask(replace(ask(1, 0, LONG[:3], [50]), states=states), ask(2, 0, LONG[:3], []))
    engine.ask(replace(ask(1, 3, LONG[:0], []), states=states))
    told = engine.drafter.told
    assert told is not None
    assert (told.count, told.writes, told.blocks.tolist()) == (2, 7, [5, 3])
    assert engine.ask(ask(3, 0, np.array([UNKNOWN], dtype=np.int32), [])).drafted == {}, "it cannot go on from that"


def test_a_long_prompt_is_read_when_nobody_waits_and_answered_then(engine: Engine) -> None:
    reply = engine.ask(ask(1, 0, LONG, [7]), ask(2, 0, LONG[:3], []))
    assert reply.drafted == {2: Drafted((1003, 1004), (0.5, 0.5))}, "the others do not wait for it"
    assert engine.drafter.has_read_all.wait(LIMIT_S)
    assert set(engine.drafter.portions) == {PORTION_TOKENS}
    assert engine.ask(ask(1, len(LONG), LONG[:0], [7])).drafted == {1: Drafted((8, 9), (0.5, 0.5))}


def test_a_prompt_nobody_wants_any_more_is_not_read_on(engine: Engine) -> None:
    engine.ask(ask(1, 0, LONG, [7]), forget=[])
    engine.ask(ask(2, 0, LONG[:3], []), forget=[1])
    assert 1 not in engine.drafter.known
    # Told to go on behind tokens it was never told, it has no answer.
    assert engine.ask(ask(1, len(LONG), LONG[:0], [7])).drafted == {}


def test_a_job_says_with_how_many_threads_it_is_computed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is set where a job says nothing, or what the last one said."""
    told: list[int] = []
    monkeypatch.setattr(server, "set_threads", told.append)
    for threads in [0, 2, 2, 1, 0]:
        engine.jobs += 1
        engine.mailbox.post(Job(engine.jobs, [], [], threads))
        assert engine.mailbox.heard(LIMIT_S) == engine.jobs
        engine.mailbox.read_reply(engine.jobs)
    assert told == [2, 1]

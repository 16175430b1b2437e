"""A real drafter process without a model: jobs and replies, death in every state, restarts, and nothing left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from faser.engine_adapter.drafter_process.drafted import Drafted
from faser.engine_adapter.drafter_process.mailbox import (
    JOB_WORDS,
    Ask,
    Job,
    Mailbox,
    MailboxError,
    Reply,
    fitting,
)
from faser.engine_adapter.drafter_process.process import FIRST_PAUSE_S, HUNG_S, DrafterProcess, Wish

KNOWN = Path(__file__).parents[1] / "known_drafter.py"
TEXT = list(range(100, 200))
LIMIT_S = 60.0  # far more than anything here takes


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def start(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., DrafterProcess]]:
    """Return a ready process that knows TEXT."""
    started = []

    def started_one(fault: str = "") -> DrafterProcess:
        file = tmp_path / "known.json"
        file.write_text(json.dumps({"texts": [TEXT], "wrong": 0.0, "fault": fault}))
        process = DrafterProcess([sys.executable, str(KNOWN), str(file)], clock=clock)
        started.append(process)
        assert process.collect(LIMIT_S) is None
        assert process.is_ready
        return process

    yield started_one
    for process in started:
        process.close()


def wish(request: str = "a", tokens: int = 5, chunk: tuple[int, ...] = (106, 107), count: int = 3) -> Wish:
    return Wish(request, np.array(TEXT[:tokens], dtype=np.int32), (TEXT[tokens],), chunk, count)


def answer(process: DrafterProcess, *wishes: Wish) -> dict[str, Drafted]:
    assert process.send(wishes)
    reply = process.collect(LIMIT_S)
    assert reply is not None
    assert reply.ended_s >= reply.began_s
    return {name: reply.drafted[key] for name, key in process.requests_of(reply).items()}


def end_of(pid: int) -> None:
    """Wait until a process that is not our child has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([handle], [], [], LIMIT_S)[0]
    finally:
        os.close(handle)


def test_a_job_is_answered_request_by_request(start: Callable[..., DrafterProcess]) -> None:
    process = start()
    assert answer(process, wish(), wish("b", 7, ())) == {
        "a": Drafted((108, 109, 110), (0.5, 0.5, 0.5)),
        "b": Drafted((108, 109, 110), (0.5, 0.5, 0.5)),
    }
    # The second time only what is new of the tokens is sent; the assumed ones of before are gone.
    assert answer(process, wish(tokens=9, chunk=(), count=2)) == {"a": Drafted((110, 111), (0.5, 0.5))}


def test_a_forgotten_request_that_comes_again_is_told_from_its_beginning(start: Callable[..., DrafterProcess]) -> None:
    process = start()
    answer(process, wish(tokens=50))
    process.forget({"a", "unknown"})
    assert answer(process, wish(tokens=5, chunk=(), count=1)) == {"a": Drafted((106,), (0.5,))}


def test_nothing_is_sent_while_an_answer_is_out(start: Callable[..., DrafterProcess]) -> None:
    process = start()
    assert process.send([wish()])
    assert not process.send([wish("b")])
    assert process.collect(LIMIT_S) is not None
    assert process.collect(0.0) is None


def test_a_killed_process_is_started_again_after_a_pause(start: Callable[..., DrafterProcess], clock: Clock) -> None:
    process = start()
    answer(process, wish())
    first = process.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    end_of(first)
    process.look()
    assert (process.pid, process.deaths, process.is_ready) == (None, 1, False)
    assert not process.send([wish()])
    process.look()
    assert process.pid is None, "not before the pause"
    clock.now_s = FIRST_PAUSE_S
    process.look()
    assert process.pid not in (None, first)
    process.collect(LIMIT_S)
    assert answer(process, wish(tokens=9, chunk=(), count=1)) == {"a": Drafted((110,), (0.5,))}, "all is told again"


def test_one_that_is_killed_over_a_job_answers_nothing(start: Callable[..., DrafterProcess]) -> None:
    process = start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    assert process.send([wish()])
    os.kill(process.pid, signal.SIGKILL)
    assert process.collect(LIMIT_S) is None
    assert process.deaths == 1


def test_one_that_hangs_is_killed(start: Callable[..., DrafterProcess], clock: Clock) -> None:
    process = start()
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    assert process.send([wish()])
    clock.now_s = HUNG_S
    process.look()
    assert process.pid == pid
    clock.now_s = HUNG_S + 1.0
    process.look()
    assert process.pid is None
    assert not Path(f"/proc/{pid}").exists()


def test_pauses_grow_while_it_cannot_start(tmp_path: Path, clock: Clock) -> None:
    process = DrafterProcess([str(tmp_path / "missing")], clock=clock)
    starts = []
    for _ in range(100):
        deaths = process.deaths
        process.look()
        if process.deaths > deaths:
            starts.append(clock.now_s)
        clock.now_s += 1.0
    assert starts == [1.0, 3.0, 7.0, 15.0, 31.0, 63.0]


def test_close_leaves_no_process_and_no_descriptor(start: Callable[..., DrafterProcess]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    process = start()
    pid = process.pid
    process.close()
    process.look()
    assert process.pid is None
    assert not Path(f"/proc/{pid}").exists()
    assert len(os.listdir("/proc/self/fd")) == before


ENGINE = """
import os, sys, time
from faser.engine_adapter.drafter_process.process import DrafterProcess
process = DrafterProcess([sys.executable, sys.argv[1], sys.argv[2]])
process.collect(60.0)
if os.fork() == 0:  # holds the bell's other end
    time.sleep(600)
print(process.pid, flush=True)
time.sleep(600)
"""


def test_an_engine_that_is_killed_takes_its_drafter_along(tmp_path: Path) -> None:
    file = tmp_path / "known.json"
    file.write_text(json.dumps({"texts": [], "wrong": 0.0}))
    command = [sys.executable, "-c", ENGINE, str(KNOWN), str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as engine:
        assert engine.stdout is not None
        drafter = int(engine.stdout.readline())
        engine.kill()
        end_of(drafter)
        os.killpg(engine.pid, signal.SIGKILL)  # its other child


def test_what_is_written_is_read_on_the_other_side() -> None:
    ours, memory, bell = Mailbox.pair()
    theirs = Mailbox(memory, bell)
    tokens = np.arange(70_000, dtype=np.int32)
    ours.post(Job(7, [3, 4], [Ask(1, 9, tokens, tokens[:0], 2), Ask(2, 0, tokens[:3], tokens[5:7], 1)]))
    assert theirs.heard(0.0) == 7
    job = theirs.read_job(7)
    assert (job.number, job.forget, [ask.key for ask in job.asks]) == (7, [3, 4], [1, 2])
    assert job.asks[0].start == 9
    assert np.array_equal(job.asks[0].tokens, tokens)
    assert job.asks[1].tokens.tolist() == [0, 1, 2]
    assert job.asks[1].assumed.tolist() == [5, 6]
    reply = Reply(7, 1.5, 2.25, {2: Drafted((8, 9), (0.25, 1.0)), 1: Drafted()})
    theirs.answer(reply)
    assert ours.heard(0.0) == 7
    assert ours.read_reply(7) == reply
    assert not theirs.is_cancelled(7)
    ours.cancel(7)
    assert theirs.is_cancelled(7)
    ours.close()
    with pytest.raises(MailboxError, match="gone"):
        theirs.heard(0.0)
    theirs.close()


def test_asks_that_do_not_fit_wait() -> None:
    some = np.zeros(JOB_WORDS // 2, dtype=np.int32)
    asks = [Ask(key, 0, some[:size], some[:0], 1) for key, size in ((1, len(some)), (2, len(some)), (3, 10))]
    assert [ask.key for ask in fitting(asks, 0)] == [1, 3]
    assert [ask.key for ask in fitting(asks[2:], JOB_WORDS - 4)] == []

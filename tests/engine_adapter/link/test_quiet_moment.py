"""The quiet moment of a step: who waits for it, for how long, and that a record is made in it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from faser.engine_adapter import protocol as wire
from faser.engine_adapter.link import engine_link as link_module
from faser.engine_adapter.link.engine_link import EngineLink
from faser.engine_adapter.link.quiet_moment import MOST_S, QuietMoments, wait
from faser.engine_adapter.steering import steering
from faser.engine_adapter.steering.steering import LONG_STEP_S, REST_S, rest_s

LONG_S = 30.0


@pytest.fixture
def quiet_moments(monkeypatch: pytest.MonkeyPatch) -> QuietMoments:
    own = QuietMoments()
    monkeypatch.setattr(link_module, "QUIET_MOMENTS", own)
    monkeypatch.setattr(steering, "QUIET_MOMENTS", own)
    return own


@pytest.fixture
def link(quiet_moments: QuietMoments, tmp_path: Path) -> Iterator[EngineLink]:
    made = EngineLink(f"ipc://{tmp_path / 'sock'}", "boot")
    yield made
    made.close(5.0)


def sending(link: EngineLink, wanted_s: float) -> threading.Event:
    is_made = threading.Event()

    def make() -> wire.FromEngine:
        is_made.set()
        return wire.Goodbye("boot")

    link.send_later(make, wanted_s)
    return is_made


def eventually(is_true: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + 10.0
    while not is_true() and time.monotonic() < end_s:
        time.sleep(0.005)
    return is_true()


def told_until(quiet_moments: QuietMoments, is_done: Callable[[], bool]) -> bool:
    def told() -> bool:
        if not is_done():
            quiet_moments.tell()
        return is_done()

    return eventually(told)


def test_a_record_that_rests_is_made_in_the_next_quiet_moment(link: EngineLink, quiet_moments: QuietMoments) -> None:
    is_made = sending(link, LONG_S)
    assert not is_made.wait(0.2), "it did not wait"
    assert told_until(quiet_moments, is_made.is_set)


def heard_one(link: EngineLink, quiet_moments: QuietMoments) -> None:
    quiet_moments.tell()
    assert eventually(lambda: link._hears_quiet_moments)
    time.sleep(0.05)  # what waited was sent behind that


def test_a_quiet_moment_before_the_record_does_not_count(
    link: EngineLink, quiet_moments: QuietMoments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "NEXT_S", LONG_S)
    heard_one(link, quiet_moments)
    is_made = sending(link, LONG_S)
    assert not is_made.wait(0.2)
    assert told_until(quiet_moments, is_made.is_set)


def test_the_last_record_is_made_without_another_quiet_moment(link: EngineLink, quiet_moments: QuietMoments) -> None:
    heard_one(link, quiet_moments)
    # A short rest: on a machine that takes a second from one line to the next quiet moments are not heard any more.
    assert sending(link, 0.2).wait(10.0), "an engine that stands still keeps its last record"
    assert eventually(lambda: not link._hears_quiet_moments)
    assert not sending(link, LONG_S).wait(0.2), "this one woke the thread, and rests"


def test_what_arrives_meanwhile_does_not_hold_the_last_record_back(
    link: EngineLink, quiet_moments: QuietMoments
) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(link._endpoint)
        link.send(wire.Goodbye("boot"))
        assert router.poll(10_000), "connected"
        heard_one(link, quiet_moments)
        is_made, end_s = sending(link, 0.2), time.monotonic() + 10.0
        while not is_made.wait(0.02) and time.monotonic() < end_s:
            router.send_multipart([b"boot", b"junk"])
        assert is_made.is_set()
        assert link.refused, "junk arrived"


def test_where_quiet_moments_are_heard_a_record_does_not_wake_the_thread(
    link: EngineLink, quiet_moments: QuietMoments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "NEXT_S", LONG_S)
    written: list[int] = []
    write = os.eventfd_write
    monkeypatch.setattr(os, "eventfd_write", lambda event, value: (written.append(event), write(event, value)))
    sending(link, LONG_S)
    assert written == [link._wake], "nobody told of a quiet moment yet"
    assert told_until(quiet_moments, lambda: link._hears_quiet_moments)
    written.clear()
    sending(link, LONG_S)
    assert written == []
    sending(link, 0.0)
    assert written == [link._wake], "what must not rest wakes it"


def test_the_end_does_not_wait_for_a_quiet_moment(link: EngineLink) -> None:
    is_made = sending(link, LONG_S)
    assert not is_made.wait(0.2)
    link.close(5.0)
    assert is_made.is_set()


def test_without_a_quiet_moment_the_wait_ends(quiet_moments: QuietMoments) -> None:
    event = quiet_moments.open()
    began_s = time.monotonic()
    wait(event, 0.05)
    assert 0.04 < time.monotonic() - began_s < 5.0
    quiet_moments.close(event)


def test_an_event_given_back_is_not_written(quiet_moments: QuietMoments) -> None:
    kept, given = quiet_moments.open(), quiet_moments.open()
    quiet_moments.close(given)
    quiet_moments.tell()
    assert os.eventfd_read(kept) == 1
    quiet_moments.close(kept)


def test_telling_never_blocks_and_never_raises_whatever_nobody_reads(quiet_moments: QuietMoments) -> None:
    event = quiet_moments.open()
    os.eventfd_write(event, 2**64 - 2)  # full
    quiet_moments.tell()
    os.close(event)  # behind its back
    quiet_moments.tell()


def test_rests_are_those_of_where_the_runner_is(quiet_moments: QuietMoments) -> None:
    assert [rest_s(seconds) for seconds in (2 * LONG_STEP_S, LONG_STEP_S / 2)] == [REST_S, 0.0]
    quiet_moments.tell()
    assert [rest_s(seconds) for seconds in (0.03, 10.0)] == [0.03, MOST_S]


def test_the_runner_tells_behind_the_forward_pass(quiet_moments: QuietMoments, monkeypatch: pytest.MonkeyPatch) -> None:
    from faser.engine_adapter.runner import v1 as runner_v1

    monkeypatch.setattr(runner_v1, "QUIET_MOMENTS", quiet_moments)
    runner, event = object.__new__(runner_v1.FaserRunnerV1), quiet_moments.open()

    def verify() -> str:
        with pytest.raises(BlockingIOError):
            os.eventfd_read(event)
        return "states"

    assert runner.around_verify(verify) == "states"
    assert os.eventfd_read(event) == 1
    quiet_moments.close(event)

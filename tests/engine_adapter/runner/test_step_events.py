"""Times of a step on a device that works while the host goes on; what a CPU's clock shows is tested on real engines."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from faser.engine_adapter.patches.v2 import on_delivery
from faser.engine_adapter.runner.step_events import HostEvent, StepEvents, event_maker, fill_times
from faser.engine_adapter.steering.orders import StepReport

MOMENTS = ("begin", "forward", "verified", "logits", "sampled", "draft", "drafted", "end")


@dataclass
class Stream:
    """Work is issued at once and done when somebody waits."""

    issued_s: float = 0.0
    done_s: float = 0.0


class DeviceEvent:
    def __init__(self, stream: Stream) -> None:
        self._stream, self._at_s = stream, float("inf")

    def record(self) -> None:
        self._at_s = self._stream.issued_s

    def query(self) -> bool:
        return self._at_s <= self._stream.done_s

    def elapsed_time(self, end: DeviceEvent) -> float:
        if not (self.query() and end.query()):
            raise RuntimeError("both events must be completed")  # as CUDA does
        return (end._at_s - self._at_s) * 1000.0


def step_on(stream: Stream) -> StepEvents:
    events = StepEvents(lambda: DeviceEvent(stream))
    for seconds, moment in enumerate(MOMENTS, start=1):
        stream.issued_s += seconds
        events.mark(moment)
    return events


def test_nothing_is_read_before_the_device_is_done() -> None:
    stream, report = Stream(), StepReport()
    events = step_on(stream)
    fill_times(report, events, events)
    assert report == StepReport()
    stream.done_s = stream.issued_s
    fill_times(report, events, None)
    assert (report.verify_s, report.sample_s, report.draft_s, report.runner_s) == (3.0, 5.0, 0.0, 0.0)


def test_drafting_is_that_of_the_step_before() -> None:
    stream, report = Stream(), StepReport()
    previous = step_on(stream)
    stream.done_s = stream.issued_s
    step = step_on(stream)  # nothing of it is done
    fill_times(report, step, previous)
    assert (report.verify_s, report.sample_s, report.draft_s, report.runner_s) == (0.0, 0.0, 7.0, 35.0)


def test_drafting_beside_the_next_step_is_told_once_it_is_done_and_only_once() -> None:
    stream, in_turn = Stream(), StepReport()
    in_place, late, later = (step_on(stream) for _ in range(3))
    late.is_late = later.is_late = True
    stream.issued_s += 1.0
    late.mark("met")
    stream.done_s = stream.issued_s
    step = step_on(stream)
    told = {"late behind late": StepReport(), "late behind one in turn": StepReport(), "in turn": in_turn}
    fill_times(told["late behind late"], step, later, late)
    fill_times(told["late behind one in turn"], step, late, in_place)
    fill_times(told["in turn"], step, in_place, late)
    assert [report.draft_s for report in told.values()] == [7.0, 0.0, 7.0]
    assert [report.overlap_s for report in told.values()] == [7.0, 0.0, 0.0]


def test_drafting_that_was_waited_for_is_hidden_in_part() -> None:
    stream, report = Stream(), StepReport()
    events = StepEvents(lambda: DeviceEvent(stream))
    for at_s, moment in ((1.0, "draft"), (3.0, "met"), (9.0, "drafted")):
        stream.issued_s = at_s
        events.mark(moment)
    events.is_late, stream.done_s = True, stream.issued_s
    fill_times(report, step_on(stream), step_on(stream), None)
    fill_times(report, StepEvents(lambda: DeviceEvent(stream)), late_step(), events)
    assert (report.draft_s, report.overlap_s) == (8.0, 2.0)


def late_step() -> StepEvents:
    events = StepEvents(HostEvent)
    events.is_late = True
    return events


def test_a_moment_that_comes_twice_is_the_first_one() -> None:
    stream = Stream()
    events = step_on(stream)
    stream.issued_s = stream.done_s = 1000.0
    events.mark("end")
    assert events.seconds("begin", "end") == 35.0


def test_each_device_has_its_clock() -> None:
    assert event_maker("cpu") is HostEvent
    assert event_maker("cuda") is not None
    assert event_maker("xpu") is None


class Output:
    """As much of vLLM's AsyncOutput as is needed."""

    def get_output(self) -> str:
        return "tokens"


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_an_output_calls_back_and_frees_its_tensors_at_once(no_garbage_collection: None) -> None:
    output, called = Output(), []
    on_delivery(output, lambda: called.append(1))
    assert output.get_output() == "tokens"
    assert called == [1]
    gone = weakref.ref(output)
    del output
    assert gone() is None

"""Phase times add up within a step, and a device's are read without waiting for it."""

import time
from typing import Any

import pytest

from faser.engine_adapter.runner.phases import UNREAD_LIMIT, DevicePhases, HostPhases


class Event:
    """A CUDA event whose completion the test decides; time is a counter."""

    now_ms = 0.0
    done_until_ms = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at_ms = 0.0

    def record(self) -> None:
        Event.now_ms += 10.0
        self.at_ms = Event.now_ms

    def query(self) -> bool:
        return self.at_ms <= Event.done_until_ms

    def elapsed_time(self, other: "Event") -> float:
        return other.at_ms - self.at_ms


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> DevicePhases:
    import torch

    Event.now_ms = Event.done_until_ms = 0.0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return DevicePhases()


def step(phases: Any) -> None:
    with phases.phase("runner"), phases.phase("verify"):
        pass
    with phases.phase("runner"):
        pass


def test_host_phases_that_run_twice_add_up() -> None:
    phases = HostPhases()
    for _ in range(2):
        with phases.phase("runner"):
            time.sleep(0.002)
    assert 0.004 <= phases.collect()["runner"] < 0.5
    assert phases.collect() == {}


def test_host_phases_survive_an_exception() -> None:
    phases = HostPhases()
    with pytest.raises(KeyError), phases.phase("draft"):
        raise KeyError
    assert "draft" in phases.collect()


def test_device_times_come_one_step_later(device: DevicePhases) -> None:
    step(device)
    assert device.collect() == {}
    Event.done_until_ms = Event.now_ms
    step(device)
    assert device.collect() == {"verify": 0.01, "runner": 0.04}


def test_an_unfinished_step_is_not_waited_for(device: DevicePhases) -> None:
    step(device)
    device.collect()
    Event.done_until_ms = Event.now_ms
    step(device)
    first = device.collect()
    step(device)
    assert device.collect() is first


def test_steps_that_never_finish_do_not_pile_up(device: DevicePhases) -> None:
    for _ in range(3 * UNREAD_LIMIT):
        step(device)
        assert device.collect() == {}
    assert len(device._unread) == UNREAD_LIMIT

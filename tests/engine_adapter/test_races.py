"""Work on several streams, and copies to the host: right in whatever order the device runs what it may.

Each case is run under many seeds of a device that is late, and again with an event left out, which must be noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from faser.engine_adapter.drafting.candidates_v2 import CandidatesV2
from faser.engine_adapter.drafting.late_confidences import LateConfidences
from faser.engine_adapter.host_copy import HostCopy
from faser.engine_adapter.partition.cuda import CudaDevice
from faser.engine_adapter.partition.cuda_graphs import PartitionGraphs
from faser.engine_adapter.partition.shares import STREAMS, make_ready
from faser.engine_adapter.pruning.prefixes import DraftLayout, staying_rows
from faser.engine_adapter.runner.step_events import StepEvents, event_maker

from .late_device import HostWaited, LateCuda, LateDevice, LateEvent, LateStream

SEEDS = range(24)


@contextmanager
def on(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[LateCuda]:
    cuda = LateCuda(device)
    monkeypatch.setattr(torch.cuda, "Event", cuda.Event)
    monkeypatch.setattr(torch.cuda, "current_stream", cuda.current_stream)
    with device:
        yield cuda


def until_told(told: Callable[[], Any]) -> Any:
    """Ask again and again, as steps do, and return what is told in the end."""
    for _ in range(200):
        if told() not in (None, {}):
            return told()
    raise AssertionError("nothing was told")


# --- copies to the host ---


def copied(seed: int, monkeypatch: pytest.MonkeyPatch, has_event: bool = True) -> list[float]:
    device = LateDevice(seed)
    with on(device, monkeypatch):
        values = torch.zeros(3)
        values += 2.0
        copy = HostCopy(values * 3.0, is_pinned=True)
        values.fill_(9.0)  # the next step writes there again
        if not has_event:
            copy._event = None
        found: list[float] = until_told(copy.values)
    return found


def test_a_copy_is_told_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [copied(seed, monkeypatch) for seed in SEEDS] == [[6.0] * 3 for _ in SEEDS]


def test_control_a_copy_without_an_event_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(copied(seed, monkeypatch, has_event=False) != [6.0] * 3 for seed in SEEDS)


class Watched:
    """A speculator, as far as what is noted of its rounds asks for one."""

    max_num_reqs, num_speculative_steps, device = 3, 2, "cpu"
    use_local_argmax_reduction = False

    def __init__(self) -> None:
        self.acceptance_estimator: Any = None

    def load_model(self, target: Any) -> None: ...


def test_confidences_and_candidates_of_a_drafting_are_told_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both watch the same rounds, over slots that others draft for in the next step."""
    logits = torch.tensor([[3.0, 1.0, 0.0, 2.0], [0.0, 5.0, 4.0, 1.0]])
    expected = logits.softmax(-1).amax(-1).tolist()
    for seed in SEEDS:
        device = LateDevice(seed)
        with on(device, monkeypatch):
            speculator = Watched()
            confidences, candidates = LateConfidences(speculator, True), CandidatesV2(speculator, 2)
            speculator.load_model(None)
            slots = torch.arange(2)
            shown = torch.zeros(2, 4)
            shown.copy_(logits)
            for step in range(2):
                speculator.acceptance_estimator.predict(shown, slots, torch.zeros(1) + step)
                shown = shown.flip(0)
            drawn = confidences.take(slots, ["a", "b"], [1, 2])
            ids, sure = candidates.of(slots, torch.zeros(2, dtype=torch.int64))
            kept, also = HostCopy(ids, True), HostCopy(sure, True)
            shown.fill_(0.0)
            speculator.acceptance_estimator.predict(shown, slots, torch.zeros(1))
            told = until_told(drawn.told)
            assert until_told(kept.values) == [[0, 3], [1, 2]]
            assert until_told(also.values) == pytest.approx(expected)
        assert told["a"] == pytest.approx(expected[:1])
        assert told["b"] == pytest.approx(expected[::-1])


def timed(seed: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Mark two moments of a step around work, and ask for the time between until it is told."""
    device, told = LateDevice(seed), list[float]()
    with on(device, monkeypatch):
        make_event = event_maker("cuda")
        assert make_event is not None
        events, values = StepEvents(make_event), torch.zeros(3)
        events.mark("begin")
        values += 1.0
        events.mark("end")
        while not told or told[-1] == 0.0:
            told.append(events.seconds("begin", "end"))
    return told


def test_times_are_told_once_their_events_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    told = [timed(seed, monkeypatch) for seed in SEEDS]
    assert all(each[-1] == 0.001 for each in told)
    assert any(len(each) > 1 for each in told)


def test_control_a_time_that_is_asked_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LateEvent, "query", lambda event: True)
    with pytest.raises(HostWaited):
        timed(0, monkeypatch)


# --- two phases side by side ---


def side_by_side(seed: int, monkeypatch: pytest.MonkeyPatch, is_captured: bool = False) -> list[float]:
    """Draft and verify between what precedes both and what follows them; return what came of three steps."""
    device = LateDevice(seed)
    with on(device, monkeypatch) as cuda:
        partition: Any = make_ready(CudaDevice(cuda=cuda), [STREAMS]).named(STREAMS)
        graphs = PartitionGraphs(cuda)
        inputs, drafted, verified, joined = (torch.zeros(1) for _ in range(4))

        def draft() -> None:
            drafted.copy_(inputs * 2.0 + drafted)

        def verify() -> None:
            verified.copy_(inputs * 10.0 + verified)

        if is_captured:
            graphs.capture(partition, "draft", 1, draft)
            graphs.capture(partition, "verify", 1, verify)
            for each in (drafted, verified):
                each.zero_()
        for step in range(3):
            inputs.fill_(step + 1.0)
            with partition.side_by_side():
                for phase, work in (("draft", draft), ("verify", verify)):
                    if is_captured:
                        graphs.replay(partition, phase, 1)
                        continue
                    with partition.on(phase):
                        work()
            joined += drafted + verified
        device.drain()
    return joined.tolist()


EXPECTED = [12.0 + 36.0 + 72.0]


@pytest.mark.parametrize("is_captured", [False, True], ids=["launched", "replayed"])
def test_two_phases_are_right_in_every_order(monkeypatch: pytest.MonkeyPatch, is_captured: bool) -> None:
    assert [side_by_side(seed, monkeypatch, is_captured) for seed in SEEDS] == [EXPECTED for _ in SEEDS]


def _no_wait(stream: LateStream, event: LateEvent) -> None: ...


def _no_record(event: LateEvent, stream: LateStream | None = None) -> None: ...


@pytest.mark.parametrize(
    ("owner", "name", "missing"), [(LateStream, "wait_event", _no_wait), (LateEvent, "record", _no_record)]
)
def test_control_a_missing_event_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, missing: Callable[..., None]
) -> None:
    monkeypatch.setattr(owner, name, missing)
    assert any(side_by_side(seed, monkeypatch) != EXPECTED for seed in SEEDS)


def test_control_one_missing_join_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the verifying stream is not waited for."""
    inherited, count = LateStream.wait_event, [0]

    def waits(stream: LateStream, event: LateEvent) -> None:
        count[0] += 1
        if count[0] % 4:  # two forks, two joins
            inherited(stream, event)

    monkeypatch.setattr(LateStream, "wait_event", waits)
    assert any(side_by_side(seed, monkeypatch) != EXPECTED for seed in SEEDS)


# --- a cut for which nobody waits ---


def _on_device(array: Any) -> torch.Tensor:
    return torch.zeros(len(array), dtype=torch.int32).copy_(torch.from_numpy(array))


def test_rows_are_chosen_without_waiting_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts, lengths = np.array([3, 0, 4]), np.array([4, 3, 5])
    chances = torch.tensor([0.9, 0.2, 0.9, 0.5, 0.6, 0.1, 0.3])
    expected = staying_rows(chances, 0.5, DraftLayout.of(drafts, lengths), 4)
    for seed in SEEDS:
        device = LateDevice(seed)
        with on(device, monkeypatch):
            layout, shown = DraftLayout.of(drafts, lengths, _on_device), torch.zeros(7)
            shown.copy_(chances)
            made = staying_rows(shown, 0.5, layout, 4)
            device.drain()
        for name in ("kept", "left", "starts", "rows", "logits", "passing"):
            assert getattr(made, name).tolist() == getattr(expected, name).tolist()


def test_control_waiting_for_the_device_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with on(LateDevice(0), monkeypatch):
        shown = torch.zeros(3) + 1.0
        with pytest.raises(HostWaited):
            int(shown.sum())
        with pytest.raises(HostWaited):
            shown[shown > 0.5]

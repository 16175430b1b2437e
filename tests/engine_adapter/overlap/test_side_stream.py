"""The drafter's stream against a device that runs work late and out of order wherever events allow."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from faser.engine_adapter.overlap.side_stream import CudaSideStream, NoSideStream, side_stream
from faser.engine_adapter.partition.cpu import CpuDevice
from faser.engine_adapter.partition.cuda import CudaDevice, CudaPartition
from faser.engine_adapter.partition.shares import opened

from ..late_device import LateCuda, LateDevice


def add(number: torch.Tensor, seen: torch.Tensor, turn: int) -> None:
    number.add_(1)
    seen[turn : turn + 1].copy_(number)


def handed_back_and_forth(
    seed: int, *, is_waited_for: bool = True, is_behind: bool = True, splits: tuple[str, ...] = ()
) -> list[int]:
    """Let the engine's stream and another add to one number in turn, on each split in turn; return what each saw."""
    device = LateDevice(seed)
    cuda = LateCuda(device)
    side = CudaSideStream(None, opened(CudaDevice(cuda=cuda), splits), cuda)
    if not is_behind:
        side._handed.record = lambda *_: None  # type: ignore[method-assign]
    number, seen = torch.zeros(1), torch.zeros(6)
    device.own(number, seen)
    with device:
        for turn in range(0, 6, 2):
            add(number, seen, turn)
            side.launch(partial(add, number, seen, turn + 1), turn // 2 % (1 + len(splits)))
            if is_waited_for:
                side.wait()
        device.drain()
    return [int(value) for value in seen]


@pytest.mark.parametrize("splits", [(), ("streams",)])
@pytest.mark.parametrize("seed", range(20))
def test_work_runs_behind_what_was_launched_before_it_and_is_waited_for(seed: int, splits: tuple[str, ...]) -> None:
    assert handed_back_and_forth(seed, splits=splits) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("splits", [(), ("streams",)])
@pytest.mark.parametrize("missing", ["is_waited_for", "is_behind"])
def test_a_missing_event_is_found(missing: str, splits: tuple[str, ...]) -> None:
    flags = {"is_waited_for": True, "is_behind": True} | {missing: False}
    seen = [handed_back_and_forth(seed, **flags, splits=splits) for seed in range(20)]
    assert any(each != [1, 2, 3, 4, 5, 6] for each in seen)


def test_work_that_fails_leaves_an_event_to_wait_for() -> None:
    device = LateDevice(0)
    side = CudaSideStream(None, cuda=LateCuda(device))

    def fail() -> None:
        raise RuntimeError("broken on purpose")

    with device:
        with pytest.raises(RuntimeError, match="on purpose"):
            side.launch(fail)
        side.wait()
        device.drain()


def test_a_device_without_streams_does_the_work_at_once() -> None:
    side, done = side_stream(SimpleNamespace(type="cpu"), opened(CpuDevice(), ())), list[int]()
    assert isinstance(side, NoSideStream)
    side.launch(lambda: done.append(1))
    side.wait()
    assert done == [1]


def test_work_under_a_split_is_launched_on_the_drafters_stream_of_that_split() -> None:
    """Else a confined drafter would have the whole device, and nothing else would show it."""
    cuda = LateCuda(LateDevice(0))
    splits = opened(CudaDevice(cuda=cuda), ("streams",))
    side, seen = CudaSideStream(None, splits, cuda), list[object]()
    home = cuda.current_stream()
    for split in (1, 0):
        side.launch(lambda: seen.append(cuda.current_stream()), split)
        side.wait()
    partition = splits.ready[1]
    assert isinstance(partition, CudaPartition)
    assert seen[0] is partition.stream("draft")
    assert seen[1] not in (home, partition.stream("draft"), partition.stream("verify"))

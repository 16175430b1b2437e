"""KV blocks between two ranks, over a wire that delivers when it is waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from faser.engine_adapter.stages.kv_transfer import KvTransfer
from faser.engine_adapter.stages.orders import BlockCopy

Post = dict[tuple[int, int], Any]


@dataclass
class Work:
    """What `wait` does."""

    finish: Callable[[], None]

    def wait(self) -> None:
        self.finish()


class Wire:
    """In place of a process group: letters by (receiver, tag)."""

    def __init__(self) -> None:
        self.letters: Post = {}
        self.waits = 0

    def isend(self, data: Any, to: int, group: Any, tag: int) -> Work:
        self.letters[to, tag] = data.clone()
        return Work(lambda: None)

    def irecv(self, data: Any, source: int, group: Any, tag: int) -> Work:
        def finish() -> None:
            self.waits += 1
            data.copy_(self.letters.pop((1 - source, tag)))

        return Work(finish)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    made = Wire()
    monkeypatch.setattr("torch.distributed.isend", made.isend)
    monkeypatch.setattr("torch.distributed.irecv", made.irecv)
    return made


def ends() -> tuple[KvTransfer, KvTransfer]:
    """Return ranks 0 and 1, whose caches hold block + 10 * layer and 0."""
    first, second = KvTransfer(None, [0, 1], 0), KvTransfer(None, [0, 1], 1)
    first.caches = [torch.arange(6.0).reshape(6, 1).repeat(1, 2) + 10 * layer for layer in range(2)]
    second.caches = [torch.zeros(6, 2) for _ in range(2)]
    return first, second


def test_blocks_of_several_layers_travel_in_one_parcel(wire: Wire) -> None:
    first, second = ends()
    copies = [BlockCopy(0, 0, 1, (2, 4)), BlockCopy(1, 0, 1, (5,))]
    for end in (first, second):
        end.post(copies, step=1)
    assert len(wire.letters) == 1
    assert second.caches[0].sum() == 0, "nothing is waited for"
    second.receive_all()
    assert second.caches[0][:, 0].tolist() == [0, 0, 2, 0, 4, 0]
    assert second.caches[1][:, 0].tolist() == [0, 0, 0, 0, 0, 15]
    assert (first.sent_bytes, second.received_bytes) == (24, 24)


def test_what_was_sent_is_the_block_as_it_was_then(wire: Wire) -> None:
    first, second = ends()
    for end in (first, second):
        end.post([BlockCopy(0, 0, 1, (3,))], step=1)
    first.caches[0][3] = 99.0
    second.receive_all()
    assert second.caches[0][3, 0] == 3.0


def test_a_later_copy_of_a_block_wins(wire: Wire) -> None:
    first, second = ends()
    for step in (1, 2):
        first.caches[0][3] = float(step)
        for end in (first, second):
            end.post([BlockCopy(0, 0, 1, (3,))], step)
    second.receive_all()
    assert second.caches[0][3, 0] == 2.0


def test_only_what_is_old_is_waited_for(wire: Wire) -> None:
    first, second = ends()
    for step in (1, 2, 3):
        for end in (first, second):
            end.post([BlockCopy(0, 0, 1, (step,))], step)
    second.settle(before=3)
    assert wire.waits == 2
    assert second.caches[0][:, 0].tolist() == [0, 1, 2, 0, 0, 0]


def test_a_rank_that_has_no_part_in_a_copy_does_nothing(wire: Wire) -> None:
    third = KvTransfer(None, [0, 1, 2], 2)
    third.post([BlockCopy(0, 0, 1, (1,))], step=1)
    third.receive_all()
    assert not wire.letters

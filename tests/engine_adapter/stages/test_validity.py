"""Which tokens of a block a rank holds, token by token."""

from __future__ import annotations

import numpy as np

from faser.engine_adapter.stages.validity import Validity, Write, writes_of

OWNERS = [0, 1]  # of two layers
LIVE, DEAD = np.ones(3, np.bool_), np.zeros(3, np.bool_)


def test_a_request_writes_from_its_tokens_on() -> None:
    assert writes_of([7, 8, 9], 4, computed=3, scheduled=1) == [Write(7, 3, 4)]
    assert writes_of([7, 8, 9], 4, computed=2, scheduled=7) == [Write(7, 2, 4), Write(8, 0, 4), Write(9, 0, 1)]
    assert writes_of([7, 8, 9], 4, computed=4, scheduled=2) == [Write(8, 0, 2)]


def test_who_computes_a_layer_holds_it_and_nobody_else() -> None:
    held = Validity(2, 2, 3, block_tokens=4)
    held.write(OWNERS, [Write(1, 0, 3)])
    assert held.tokens[:, :, 1].tolist() == [[3, 0], [0, 3]]
    assert held.missing(0, 0, 1, LIVE) == [1]
    assert held.missing(0, 1, 0, LIVE) == []


def test_a_copy_stays_valid_for_the_tokens_it_has() -> None:
    held = Validity(2, 2, 3, block_tokens=4)
    held.write(OWNERS, [Write(1, 0, 2)])
    held.copy(0, 0, 1, [1])
    assert held.missing(0, 0, 1, LIVE) == []
    held.write(OWNERS, [Write(1, 2, 3)])
    assert held.tokens[1, 0, 1] == 2
    assert held.missing(0, 0, 1, LIVE) == [1]


def test_a_token_written_again_spoils_the_copy_from_there_on() -> None:
    held = Validity(2, 2, 3, block_tokens=4)
    held.write(OWNERS, [Write(1, 0, 4)])  # two of them were drafts
    held.copy(0, 0, 1, [1])
    held.write(OWNERS, [Write(1, 2, 3)])
    assert held.tokens[:, 0, 1].tolist() == [3, 2]


def test_a_block_that_changed_hands_is_worth_nothing_elsewhere() -> None:
    held = Validity(2, 2, 3, block_tokens=4)
    held.write(OWNERS, [Write(1, 0, 4)])
    held.copy(0, 0, 1, [1])
    held.write(OWNERS, [Write(1, 0, 1)])
    assert held.tokens[1, 0, 1] == 0


def test_of_a_request_that_ended_only_full_blocks_are_read_again() -> None:
    held = Validity(2, 2, 3, block_tokens=4)
    held.write(OWNERS, [Write(0, 0, 4), Write(1, 0, 3)])
    assert held.missing(0, 0, 1, DEAD) == [0]


def test_a_block_copied_by_vllm_is_held_as_its_source_is() -> None:
    held = Validity(2, 2, 3, block_tokens=4)
    held.write(OWNERS, [Write(0, 0, 3)])
    held.clone(0, 2)
    assert held.tokens[:, :, 2].tolist() == [[3, 0], [0, 3]]

"""Rows that a drafter has not read: whose they are, through ends, preemption and blocks that change hands."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest

from faser.engine_adapter.drafting.kept_rows import CacheTables, KeptRows, Missed

BLOCK_TOKENS = 4


def rows(room: int = 64, is_reused: bool = True) -> KeptRows:
    return KeptRows(room, CacheTables(requests=4, blocks=8, block_tokens=BLOCK_TOKENS, is_reused=is_reused))


def keep(kept: KeptRows, **spans: tuple[int, int]) -> None:
    """Keep positions [first, stop) of requests in slots `r0`, `r1`, ..., in one step."""
    slots, firsts, stops = zip(*((int(name[1:]), *span) for name, span in spans.items()), strict=True)
    kept.keep(np.array(slots), np.array(firsts), np.array(stops) - np.array(firsts))


def read(missed: Missed) -> list[tuple[int, list[int], list[int], list[int]]]:
    """Return for each sequence its length, the places and positions of its rows and their KV slots."""
    bounds = list(zip(missed.starts[:-1], missed.starts[1:], strict=True))
    arrays = missed.places, missed.positions, missed.slots
    return [
        (int(length), *(each[first:stop].tolist() for each in arrays))  # type: ignore[misc]
        for length, (first, stop) in zip(missed.lengths, bounds, strict=True)
    ]


def test_rows_of_several_steps_become_one_pass_sequence_by_sequence() -> None:
    kept = rows()
    kept.add_blocks(2, [5, 6], 0)
    kept.add_blocks(0, [3], 0)
    keep(kept, r2=(0, 4), r0=(2, 3))
    keep(kept, r0=(3, 4), r2=(4, 5))
    (missed,) = kept.take(8)
    assert read(missed) == [
        (4, [4, 5], [2, 3], [14, 15]),  # short ones come first
        (5, [0, 1, 2, 3, 6], [0, 1, 2, 3, 4], [20, 21, 22, 23, 24]),
    ]
    assert missed.blocks.tolist() == [[3, 0], [5, 6]]
    assert (kept.used, kept.take(8)) == (0, [])


def test_passes_have_at_most_so_many_sequences_the_oldest_first() -> None:
    kept = rows()
    for slot, block in ((3, 1), (0, 2), (2, 3)):
        kept.add_blocks(slot, [block], 0)
        keep(kept, **{f"r{slot}": (0, 2)})
    assert [[length for length, *_ in read(each)] for each in kept.take(2)] == [[2, 2], [2]]
    assert kept.take(2) == []


def test_whole_blocks_of_a_request_that_ended_are_read_with_its_own_blocks() -> None:
    kept = rows()
    kept.add_blocks(1, [5, 6, 7], 0)
    keep(kept, r1=(0, 10))
    kept.end(1)
    kept.add_blocks(1, [5, 6, 9], 2 * BLOCK_TOKENS)  # its successor found two blocks
    keep(kept, r1=(8, 9))
    first, second = sorted(read(kept.take(8)[0]), key=lambda each: each[2])
    assert first == (8, list(range(8)), list(range(8)), list(range(20, 28)))
    assert second == (9, [10], [8], [36])


def test_without_a_prefix_cache_a_request_that_ended_is_forgotten() -> None:
    kept = rows(is_reused=False)
    kept.add_blocks(1, [5, 6], 0)
    keep(kept, r1=(0, 8))
    kept.end(1)
    assert kept.take(8) == []


def test_a_block_that_changes_hands_takes_its_rows_and_those_behind_along() -> None:
    kept = rows()
    kept.add_blocks(1, [5, 6, 7], 0)
    keep(kept, r1=(0, 12))
    kept.end(1)
    kept.add_blocks(2, [9], 0)
    kept.add_blocks(2, [6], None)
    assert read(kept.take(8)[0]) == [(4, [0, 1, 2, 3], [0, 1, 2, 3], [20, 21, 22, 23])]


def test_rows_with_a_hole_are_not_read() -> None:
    kept = rows()
    kept.add_blocks(1, [5, 6], 0)
    keep(kept, r1=(0, 2))
    keep(kept, r1=(3, 4))
    assert kept.take(8) == []


@pytest.mark.parametrize("seed", range(20))
def test_every_block_that_can_be_found_again_holds_what_was_kept_for_it(seed: int) -> None:
    """A random life of requests against a plain model: who owns each KV slot, and which row was kept for it last."""
    chance = random.Random(seed)
    kept, free = rows(room=400), list(range(1, 30))
    owned: dict[int, list[int]] = {}
    reached: dict[int, int] = {}
    expected: dict[int, int] = {}  # KV slot -> place of the row that belongs there
    place = 0
    for _ in range(60):
        for slot in list(owned):
            if chance.random() < 0.1:
                whole = reached[slot] // BLOCK_TOKENS
                for block in owned[slot][whole:]:
                    expected = {at: row for at, row in expected.items() if at // BLOCK_TOKENS != block}
                kept.end(slot)
                free += owned.pop(slot)
                chance.shuffle(free)
        spans = {}
        for slot in range(4):
            count = chance.choice([1, 1, 1, 5])
            first = reached[slot] if slot in owned else 0
            needed = -(-(first + count) // BLOCK_TOKENS)
            if needed > 8 or needed > len(free) or place + count > 300:
                continue
            new = [free.pop() for _ in range(needed - len(owned.get(slot, [])))]
            kept.add_blocks(slot, new, None if slot in owned else 0)
            for block in new:  # what was kept for the block's last owner, and behind it, cannot be found any more
                expected = {at: row for at, row in expected.items() if at // BLOCK_TOKENS != block}
            owned.setdefault(slot, []).extend(new)
            reached[slot] = first + count
            spans[f"r{slot}"] = (first, first + count)
        if spans:
            for name, (first, stop) in spans.items():
                for position in range(first, stop):
                    block = owned[int(name[1:])][position // BLOCK_TOKENS]
                    expected[block * BLOCK_TOKENS + position % BLOCK_TOKENS] = place
                    place += 1
            keep(kept, **spans)
    seen: dict[int, list[int]] = defaultdict(list)
    for missed in kept.take(3):
        for slot_of, row in zip(missed.slots.tolist(), missed.places.tolist(), strict=True):
            seen[slot_of].append(row)
    live = {block for blocks in owned.values() for block in blocks}
    assert all(len(each) == 1 for each in seen.values())
    assert {at: each[0] for at, each in seen.items()}.items() <= expected.items()
    of_live = {at: row for at, row in expected.items() if at // BLOCK_TOKENS in live}
    assert of_live.items() <= {at: each[0] for at, each in seen.items()}.items()

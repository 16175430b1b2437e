"""What V2's requests with a seed say, from draws and drafts of any lengths; the others stay as they were."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from faser.engine_adapter.sampling.seeded_v2 import amended, said  # noqa: E402

WIDTH = 5


def batch(chance: random.Random) -> tuple[list[list[int]], list[list[int]]]:
    """Return draws and drafts of some requests: one draw more than drafts, which are -1, right or wrong."""
    lengths = [chance.randint(0, WIDTH - 1) for _ in range(chance.randint(1, 6))]
    draws = [[chance.randrange(3) for _ in range(length + 1)] for length in lengths]
    return draws, [[chance.choice([-1, token, token, token]) for token in row[:-1]] for row in draws]


def flat(draws: list[list[int]], drafts: list[list[int]]) -> tuple[Any, Any, Any]:
    inputs = [token for row in drafts for token in (1, *row)]  # behind what was said last
    ends = torch.tensor([0, *(len(row) for row in draws)]).cumsum(0)
    return torch.tensor([token for row in draws for token in row]), torch.tensor(inputs), ends


def test_draws_are_said_up_to_the_first_that_no_draft_foretold() -> None:
    chance = random.Random(2)
    for _ in range(500):
        draws, drafts = batch(chance)
        tokens, counts = said(*flat(draws, drafts), WIDTH)
        for row, (drawn, drafted) in enumerate(zip(draws, drafts, strict=True)):
            right = next(
                (n for n, pair in enumerate(zip(drawn, drafted, strict=False)) if len({*pair}) > 1), len(drafted)
            )
            assert tokens[row, : counts[row]].tolist() == drawn[: right + 1]


def test_requests_without_a_seed_say_what_vllm_says() -> None:
    draws, drafts, ends = flat([[1, 2], [0, 1], [2, 2, 2]], [[1], [1], [2, 2]])
    theirs, counts = torch.full((3, WIDTH), 9), torch.tensor([2, 1, 1], dtype=torch.int32)
    compared: Any = SimpleNamespace(
        draws=lambda: draws, drafts=drafts, ends=ends.int(), sampled=theirs, counts=counts,
        is_by_seed=lambda: torch.tensor([True, False, True]),
    )  # fmt: skip
    sampled, said_counts = amended(compared)
    assert said_counts.tolist() == [2, 1, 3]
    assert said_counts.dtype == counts.dtype
    assert sampled[1].tolist() == [9] * WIDTH
    assert (sampled[0, :2].tolist(), sampled[2, :3].tolist()) == ([1, 2], [2, 2, 2])

"""A fixed number of rows: which ones stay, and that the kernels choose the same ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faser.engine_adapter.pruning.prefixes import DraftLayout, even_shares, staying_rows

CASES = Path(__file__).parents[1] / "prefix_kernel_cases.py"


def plainly(chances: list[list[float]], budget: int) -> list[int]:
    """Return how many rows of each request stay, chosen one by one."""
    kept, left = [1] * len(chances), [1.0] * len(chances)
    for _ in range(budget):
        values = [
            (left[at] * own[kept[at] - 1], -at) if kept[at] <= len(own) else (-1.0, -at)
            for at, own in enumerate(chances)
        ]
        best = max(range(len(chances)), key=lambda at: values[at])
        left[best] = values[best][0]
        kept[best] += 1
    return kept


@given(
    chances=st.lists(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=5), min_size=1, max_size=6),
    prompts=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    share=st.floats(0.0, 1.0),
)
@settings(deadline=None)
def test_the_likeliest_prefixes_stay(chances: list[list[float]], prompts: list[int], share: float) -> None:
    chances[0] = chances[0] or [0.5]
    drafts = np.array([len(own) for own in chances])
    lengths = drafts + 1 + np.array(prompts[: len(chances)])
    layout = DraftLayout.of(drafts, lengths)
    budget = round(share * layout.drafts)
    made = staying_rows(torch.tensor([each for own in chances for each in own]), 0.5, layout, budget)
    kept = plainly(chances, budget)
    assert made.kept.tolist() == kept
    firsts, counts = np.cumsum(lengths) - lengths, lengths - (drafts + 1 - kept)
    rows = [first + place for first, count in zip(firsts, counts, strict=True) for place in range(count)]
    assert made.rows.tolist() == rows
    assert made.starts.tolist() == [0, *np.cumsum(counts)]
    logits = np.cumsum(drafts + 1) - (drafts + 1)
    assert made.logits.tolist() == [at + place for at, one in zip(logits, kept, strict=True) for place in range(one)]
    passing = [next((at for at, each in enumerate(own) if each < 0.5), len(own)) for own in chances]
    assert made.passing.tolist() == [sum(passing)]


def test_whether_a_row_stays_does_not_depend_on_the_token_that_it_tests_or_on_what_lies_behind() -> None:
    """The rule of exactness: row j tests token j+1, so only the chances of tokens 1 to j may decide on it."""
    draw = torch.Generator().manual_seed(1)
    layout = DraftLayout.of(np.array([4, 3, 5]), np.array([5, 4, 6]))
    first = int(layout.firsts[2])
    changed = 0
    for _ in range(300):
        chances, budget = torch.rand(12, generator=draw), int(torch.randint(1, 12, (1,), generator=draw))
        before = int(staying_rows(chances, 0.5, layout, budget).kept[2])
        for place in range(5):  # chance number `place` of the last request and all behind it change
            other = chances.clone()
            other[first + place :] = torch.rand(5 - place, generator=draw).round(decimals=1)
            after = int(staying_rows(other, 0.5, layout, budget).kept[2])
            # Rows up to number `place` were decided on by chances that have not changed.
            assert min(before, place + 1) == min(after, place + 1)
            changed += before != after
    assert changed > 100  # it does matter


@given(drafts=st.lists(st.integers(0, 6), min_size=1, max_size=6), share=st.floats(0.0, 1.0))
def test_the_hosts_guess_has_the_right_sum(drafts: list[int], share: float) -> None:
    budget = round(share * sum(drafts))
    shares = even_shares(np.array(drafts), budget)
    assert shares.sum() == budget
    assert (shares <= drafts).all()


def test_the_kernels_agree_with_the_reference_and_the_controls_fail() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stdout[-4000:]
    assert "5 passed" in result.stdout

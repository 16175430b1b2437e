"""The kernels that choose a fixed number of rows, in Triton's interpreter, against the reference in plain torch.

Run by test_prefixes.py in a process of its own: TRITON_INTERPRET=1 must be set before anything imports Triton.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faser.engine_adapter.pruning.prefixes import DraftLayout, StayingRows, staying_rows

from .exit_kernel_cases import LAYER, Case


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    from faser.engine_adapter.pruning import prefix_kernel

    return prefix_kernel


def layout_of(drafts: list[int], prompts: list[int]) -> DraftLayout:
    lengths = [1 + count + prompt for count, prompt in zip(drafts, prompts, strict=True)]
    return DraftLayout.of(np.array(drafts), np.array(lengths))


def told(made: StayingRows) -> list[list[int]]:
    return [each.tolist() for each in (made.kept, made.left, made.starts, made.rows, made.logits, made.passing)]


CHANCE = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 0.5, 1.0, float("nan")]), st.floats(0.0, 1.0, width=32))


@given(
    shape=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=7),
    draw=st.data(),
    share=st.floats(0.0, 1.0),
    threshold=st.sampled_from([-1.0, 0.25, 0.5, 0.9, 2.0]),
)
@settings(max_examples=40, deadline=None)
def test_it_chooses_as_the_reference_does(
    kernel: ModuleType, shape: list[tuple[int, int]], draw: st.DataObject, share: float, threshold: float
) -> None:
    drafts = [count for count, _ in shape]
    drafts[0] = max(drafts[0], 1)  # a step without drafts is never asked about
    layout = layout_of(drafts, [prompt for _, prompt in shape])
    chances = torch.tensor(draw.draw(st.lists(CHANCE, min_size=layout.drafts, max_size=layout.drafts)))
    budget = round(share * layout.drafts)
    made = kernel.staying_rows(chances, threshold, layout, budget)
    assert told(made) == told(staying_rows(chances, threshold, layout, budget))


def test_more_rows_than_a_block_are_laid_out_in_order(kernel: ModuleType) -> None:
    layout = layout_of([4] * 9, [0, 2 * kernel.ROWS_AT_ONCE, 0, 70, 0, 0, 3, 0, 1])
    chances = torch.rand(layout.drafts, generator=torch.Generator().manual_seed(3))
    made = kernel.staying_rows(chances, 0.5, layout, 11)
    assert told(made) == told(staying_rows(chances, 0.5, layout, 11))


@given(
    drafts=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    hidden=st.sampled_from([8, 40, 300]),
    candidates=st.integers(1, 9),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=8, deadline=None)
def test_chances_are_those_of_the_reference(
    kernel: ModuleType, drafts: list[int], hidden: int, candidates: int, seed: int
) -> None:
    drafts[0] = max(drafts[0], 1)
    case = Case(drafts, [0] * len(drafts), hidden, candidates, seed)
    expected = case.heads().accepts(LAYER, case.checks)
    torch.testing.assert_close(kernel.chances(case.head, case.lm_head, case.checks), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("broken", ["one draft row more", "other requests' chances"])
def test_control_a_kernel_that_is_asked_something_else_is_noticed(kernel: ModuleType, broken: str) -> None:
    layout, noticed = layout_of([5, 4, 6], [0, 0, 3]), 0
    for seed in range(5):
        chances = torch.rand(layout.drafts, generator=torch.Generator().manual_seed(seed))
        others = chances.roll(4) if broken == "other requests' chances" else chances
        made = kernel.staying_rows(others, 0.5, layout, 6 + (broken == "one draft row more"))
        noticed += told(made) != told(staying_rows(chances, 0.5, layout, 6))
    assert noticed == 5

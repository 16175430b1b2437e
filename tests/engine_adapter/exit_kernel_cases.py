"""The exit heads' Triton kernel, in Triton's interpreter, against the reference in torch and numpy.

Run by test_exit_kernel.py in a process of its own: TRITON_INTERPRET=1 must be set before anything imports Triton.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from faser.engine_adapter.pruning.cut import Cut, CutBatch
from faser.engine_adapter.pruning.exit_heads import FEATURES, ExitHeads
from faser.engine_adapter.pruning.head_math import Head
from faser.engine_adapter.pruning.verdict import Checks, Verdict

VOCABULARY = 50
LAYER = 3


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    from faser.engine_adapter.pruning import exit_kernel

    return exit_kernel


class Case:
    """Made-up heads and a made-up step of theirs."""

    def __init__(self, drafts: list[int], prompts: list[int], hidden: int, candidates: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw)

        tokens = sum(drafts)
        self.head = Head(1.0 + 0.1 * normal(hidden), normal(2, hidden) / hidden, normal(hidden, 2), normal(hidden) / 5,
                         normal(hidden) / hidden, normal(len(FEATURES) + 1) / 3)  # fmt: skip
        self.lm_head = normal(VOCABULARY, hidden) / hidden**0.5
        ids = torch.randint(VOCABULARY, (tokens, candidates), generator=draw)
        drawn = torch.randint(VOCABULARY, (tokens,), generator=draw).int()
        own = torch.rand(tokens, generator=draw) < 0.6
        ids[:, 0] = torch.where(own, drawn.long(), ids[:, 0])  # mostly the drafter's likeliest is what it drew
        positions = torch.cat([torch.arange(1, count + 1) for count in drafts]).long()
        self.checks = Checks(normal(tokens, hidden), drawn, ids, torch.rand(tokens, generator=draw), positions)
        lengths = [1 + count + prompt for count, prompt in zip(drafts, prompts, strict=True)]
        spared = (torch.rand(tokens, generator=draw) < 0.1).numpy()
        self.batch = CutBatch(np.array(drafts), np.array(lengths), spared)

    def reference(self, threshold: float) -> Verdict:
        return self.heads().decide(LAYER, threshold, self.checks, self.batch)

    def heads(self) -> ExitHeads:
        return ExitHeads({LAYER: self.head}, self.lm_head, self.checks.candidates.shape[1])  # type: ignore[union-attr]

    def threshold(self, share: float) -> float:
        """Return a threshold that about `share` of the tokens miss, and that rounding cannot decide."""
        accepts = np.sort(self.heads().accepts(LAYER, self.checks).numpy().astype(np.float64))
        edges = np.concatenate([[-1.0], accepts, [2.0]])
        gaps = np.flatnonzero(np.diff(edges) > 1e-4)
        at = gaps[int(share * (len(gaps) - 1))]
        return float(edges[at] + edges[at + 1]) / 2


def rows_of(decision: Verdict, batch: CutBatch) -> list[int]:
    rows: list[int] = (Cut(batch, decision.kept) if decision.rows is None else decision).rows.tolist()  # type: ignore[union-attr]
    return rows


def agree(case: Case, one: Verdict, other: Verdict) -> bool:
    return one.kept.tolist() == other.kept.tolist() and rows_of(one, case.batch) == rows_of(other, case.batch)


@given(
    shape=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=6),
    hidden=st.sampled_from([8, 40, 300]),
    candidates=st.integers(1, 9),
    share=st.floats(0.0, 1.0),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=40, deadline=None)
def test_it_decides_as_the_reference_does(
    kernel: ModuleType, shape: list[tuple[int, int]], hidden: int, candidates: int, share: float, seed: int
) -> None:
    drafts, prompts = [count for count, _ in shape], [prompt for _, prompt in shape]
    drafts[0] = max(drafts[0], 1)  # a step without drafts is never asked about
    case = Case(drafts, prompts, hidden, candidates, seed)
    threshold = case.threshold(share)
    assert agree(
        case, kernel.decide(case.head, case.lm_head, threshold, case.checks, case.batch), case.reference(threshold)
    )


def test_none_and_all_are_pruned_at_the_ends(kernel: ModuleType) -> None:
    case = Case([3, 0, 5, 1], [0, 7, 0, 2], 40, 4, 1)
    case.batch.spared[:] = False
    whole = kernel.decide(case.head, case.lm_head, -1.0, case.checks, case.batch)
    assert whole.kept.tolist() == [4, 1, 6, 2]
    assert whole.rows.tolist() == list(range(int(case.batch.lengths.sum())))
    cut = kernel.decide(case.head, case.lm_head, 2.0, case.checks, case.batch)
    assert cut.kept.tolist() == [1, 1, 1, 1]
    assert len(cut.rows) == 4 + 7 + 2
    case.batch.spared[:] = True
    assert agree(case, kernel.decide(case.head, case.lm_head, 2.0, case.checks, case.batch), whole)


def test_more_rows_than_a_block_are_compacted_in_order(kernel: ModuleType) -> None:
    case = Case([4] * 8, [0, kernel.ROW_BLOCK, 0, 900, 0, 0, 500, 0], 8, 3, 2)
    threshold = case.threshold(0.5)
    assert agree(
        case, kernel.decide(case.head, case.lm_head, threshold, case.checks, case.batch), case.reference(threshold)
    )


@pytest.mark.parametrize("broken", ["positions", "candidates", "confidences"])
def test_control_a_kernel_that_reads_something_else_is_noticed(kernel: ModuleType, broken: str) -> None:
    noticed = 0
    for seed in range(10):
        case = Case([5, 4, 6], [0, 0, 3], 40, 4, seed)
        threshold = case.threshold(0.5)
        expected = case.reference(threshold)
        value = getattr(case.checks, broken)
        setattr(case.checks, broken, value.flip(0))
        noticed += not agree(case, kernel.decide(case.head, case.lm_head, threshold, case.checks, case.batch), expected)
    assert noticed >= 5

"""How layers are dealt to ranks, and which ranks a step visits."""

from __future__ import annotations

import pytest

from faser.engine_adapter.stages.cut import CutError, StageCut


def test_every_layer_has_one_owner_and_ranges_may_be_empty() -> None:
    cut = StageCut.checked((0, 5, 5), layers=8, ranks=4)
    assert [list(cut.range_of(rank)) for rank in range(4)] == [[], [0, 1, 2, 3, 4], [], [5, 6, 7]]
    assert cut.owners() == [1, 1, 1, 1, 1, 3, 3, 3]


@pytest.mark.parametrize("bounds", [(3,), (5, 3, 8), (0, 4, 9), (-1, 4, 8)])
def test_a_cut_that_does_not_fit_is_refused(bounds: tuple[int, ...]) -> None:
    with pytest.raises(CutError, match="expected"):
        StageCut.checked(bounds, layers=8, ranks=4)


def test_stages_are_cut_evenly_on_the_last_ranks() -> None:
    assert StageCut.even(4, layers=30, ranks=4).bounds == (8, 15, 22)
    assert StageCut.even(2, layers=30, ranks=4).bounds == (0, 0, 15)
    assert StageCut.even(1, layers=30, ranks=4).bounds == (0, 0, 0)


@pytest.mark.parametrize(("stages", "layers", "ranks"), [(5, 30, 4), (4, 3, 4), (0, 30, 4)])
def test_more_stages_than_layers_or_ranks_are_refused(stages: int, layers: int, ranks: int) -> None:
    with pytest.raises(CutError, match=f"stages: {stages} for {layers} layers on {ranks} ranks"):
        StageCut.even(stages, layers, ranks)


def test_a_rank_without_layers_costs_no_hop() -> None:
    assert StageCut((0, 0, 0), 30).path(can_start_anywhere=True) == (3,)
    assert StageCut((0, 0, 15), 30).path(can_start_anywhere=True) == (2, 3)
    assert StageCut((10, 10, 20), 30).path(can_start_anywhere=True) == (0, 2, 3)


def test_the_last_rank_samples_whatever_it_runs() -> None:
    assert StageCut((30, 30, 30), 30).path(can_start_anywhere=True) == (0, 3)


def test_only_rank_0_starts_where_no_other_can_embed() -> None:
    assert StageCut((0, 0, 15), 30).path(can_start_anywhere=False) == (0, 2, 3)


def test_a_rank_loads_what_it_did_not_run() -> None:
    now, later = StageCut((4, 8, 8), 12), StageCut((6, 6, 9), 12)
    assert [now.gained(rank, later) for rank in range(4)] == [[4, 5], [], [6, 7, 8], []]

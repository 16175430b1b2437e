"""What exit heads did in measured steps: verdicts by hand, known rates found again."""

import numpy as np
import pytest

from faser.engine_adapter.protocol import Prune
from faser.env.calibration.exit_fit import PruneObservation, fit_exits
from faser.env.profile.engine_profile import Exit


@pytest.mark.parametrize(
    ("draft", "recall", "false_alarm"),
    [
        ((4, 0, 4), 0.0, 0.0),  # everything accepted, nothing cut
        ((4, 4, 0), 1.0, 0.0),  # cut at the first token, which is rejected
        ((4, 4, 1), 0.0, 1.0),  # cut there, and accepted after all
        ((4, 2, 3), 0.0, 1 / 3),  # three accepted, the third one cut
        ((4, 2, 1), 0.5, 0.0),  # the second token is rejected, the cut comes at the third
        ((4, 0, 1), 0.0, 0.0),  # three chances missed
    ],
)
def test_one_draft_by_hand(draft: tuple[int, int, int], recall: float, false_alarm: float) -> None:
    (found,) = fit_exits([PruneObservation(5, 0.0, 0.8 * draft[1], (draft,))])
    assert (found.recall, found.false_alarm) == pytest.approx((recall, false_alarm))
    assert found.saved_share == pytest.approx(0.8 if draft[1] else 0.0)


def test_a_look_costs_what_it_cost_whatever_else_ran_meanwhile() -> None:
    chance = np.random.default_rng(0)
    looks = []
    for number in range(400):
        requests = 1 + number % 8
        spent_s = 1e-3 + 2e-5 * 4 * requests + (0.5 if chance.random() < 0.1 else 0.0)  # some steps lost their core
        looks.append(PruneObservation(5, spent_s, 0.0, ((4, 0, 4),) * requests))
    (found,) = fit_exits(looks)
    assert found.look_s == pytest.approx(1e-3, rel=0.01)
    assert found.look_token_s == pytest.approx(2e-5, rel=0.01)


def test_the_released_layer_comes_first_else_the_one_that_was_used_most() -> None:
    looks = [PruneObservation(layer, 1e-3, 1.0, ((4, 1, 0),)) for layer in (5, 25, 25, 15)]
    assert [each.layer for each in fit_exits(looks)] == [25, 5, 15]
    assert [each.layer for each in fit_exits(looks, Prune(15, 0.2))] == [15, 25, 5]
    assert all(isinstance(each, Exit) for each in fit_exits(looks))

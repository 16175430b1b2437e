"""The price policy on simulated engines that can copy: it gains where texts repeat themselves, and loses nowhere."""

from __future__ import annotations

from msgspec.structs import replace

from faser.controller.cli.evaluate import decided
from faser.env.profile.match_model import MatchModel
from faser.models.evaluation.evaluate import Cell, CellRun, simulate
from faser.models.evaluation.worlds import WorldSpec, held_out

from ...env.copying import match_model

EAGLE = held_out()[0]


def run(policy: str, matches: MatchModel, seed: int, requests: int = 8) -> CellRun:
    world = WorldSpec("copying", "", replace(EAGLE.profile, matches=matches))
    return simulate(Cell(policy, "copying", requests, seed, 400), decided, [world])


def test_where_texts_repeat_themselves_copies_bring_more_than_the_drafter_alone() -> None:
    many = match_model(after_whole=3.0, after_other=0.0, mean=3.0)
    assert run("price", many, 1).tokens_per_s > 1.2 * run("price:drafter", many, 1).tokens_per_s


def test_where_every_match_is_wrong_it_learns_not_to_copy() -> None:
    wrong = match_model(after_other=0.0, mean=2.0, lift=-9.0)
    lead = [
        run("price", wrong, seed).tokens_per_s / run("price:drafter", wrong, seed).tokens_per_s for seed in (1, 2, 3)
    ]
    assert sum(lead) / len(lead) > 0.97

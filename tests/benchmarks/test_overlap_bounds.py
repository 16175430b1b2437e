"""The bounds of overlap on the shipped profile: what docs/overlap.md shows is what the profile says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import faser
from faser.env.engine_model import shipped_profile
from faser.env.overlap import draft_ahead_bound, ping_pong_bound

ROOT = Path(faser.__file__).parent
CONTEXT = 200


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("overlap_bounds")


def test_the_documented_table_is_the_shipped_profiles(script: ModuleType) -> None:
    assert len(script.documented().splitlines()) == 14
    assert script.documented() in (ROOT / "docs" / "overlap.md").read_text()


def test_bounds_are_those_of_the_profiles_own_step_times(script: ModuleType) -> None:
    profile = shipped_profile("embedded")
    (row,) = (each for each in script.bounds(profile, 4, CONTEXT) if each.requests == 8)
    half = script.phase_times(profile, 4, 4, CONTEXT)
    assert row.ping_pong == ping_pong_bound(row.times, half)
    assert row.ahead[0.5] == draft_ahead_bound(row.times, 0.5)
    assert half.verify_s < row.times.verify_s


def test_one_request_has_no_groups_and_what_was_never_measured_no_row(script: ModuleType) -> None:
    rows = script.bounds(shipped_profile("embedded"), 4, CONTEXT)
    assert [each.requests for each in rows if each.ping_pong is None or each.halved is None] == [1]
    assert script.bounds(shipped_profile("embedded"), 5, CONTEXT) == []


def test_the_picture_has_a_panel_per_length(script: ModuleType, tmp_path: Path) -> None:
    profile = shipped_profile("embedded")
    script.draw({length: script.bounds(profile, length, CONTEXT) for length in (1, 4)}, tmp_path / "bounds.svg")
    drawn = (tmp_path / "bounds.svg").read_text()
    assert "1 draft tokens" in drawn
    assert "4 draft tokens" in drawn

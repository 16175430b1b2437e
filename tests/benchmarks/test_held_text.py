"""Which rows of a step are held to which tokens."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def held(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("held_text")


def test_a_request_has_a_row_for_each_draft_and_one_more(held: ModuleType) -> None:
    texts = [[10, 11, 12, 13], [20, 21, 22], [30, 31]]
    assert held.held_rows(texts, [1, 0, 1], [2, 0, 1]) == ([0, 1, 2, 3, 4], [11, 12, 13, 20, 31])


def test_behind_the_end_of_a_text_and_without_one_nothing_is_held(held: ModuleType) -> None:
    assert held.held_rows([[10], [], [30, 31]], [1, 5, 0], [1, 1, 1]) == ([4, 5], [30, 31])

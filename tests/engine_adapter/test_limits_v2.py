"""The table of V2's limits names what holds for a configuration, and the captured lengths are vLLM's own."""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from faser.engine_adapter.limits_v2 import LIMITS_V2, DraftingFacts, captured_lengths, limits_for

TABLES = [
    [(1, 4, 3), (5, 16, 1), (17, 32, 0)],
    [(1, 1, 5), (8, 9, 2)],
    [(1, 64, 9)],
    [(1, 2, 4), (40, 50, 1)],
]


def configuration(method: str = "eagle3", table: Any = None, is_adaptive: bool = False, k_max: int = 4) -> Any:
    return SimpleNamespace(
        method=method,
        num_speculative_tokens=k_max,
        num_speculative_tokens_per_batch_size=table,
        enable_adaptive_verification=is_adaptive,
    )


def names(method: str, is_adaptive: bool = False) -> set[str]:
    return {limit.name for limit in limits_for(DraftingFacts.of(configuration(method, is_adaptive=is_adaptive)))}


def test_every_limit_says_what_it_costs_and_what_to_do() -> None:
    assert len({limit.name for limit in LIMITS_V2}) == len(LIMITS_V2)
    for limit in LIMITS_V2:
        assert limit.what
        assert f"cost: {limit.cost}; remedy: {limit.remedy}" in limit.line()


def test_limits_follow_the_method() -> None:
    assert "draft rounds of draft_model" in names("draft_model")
    assert "draft rounds of draft_model" not in names("eagle3")
    assert "draft graphs per length" in names("eagle3")
    assert "draft graphs per length" not in names("draft_model")
    assert "ragged drafting" not in names("ngram_gpu")
    assert "adaptive verification" in names("eagle", is_adaptive=True)
    assert "adaptive verification" not in names("eagle")


def test_without_a_table_only_the_longest_length_is_captured() -> None:
    assert captured_lengths(configuration(), 32) == [4]


def test_adaptive_verification_captures_every_length() -> None:
    assert captured_lengths(configuration(is_adaptive=True), 32) == [0, 1, 2, 3, 4]


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs an installed vLLM")
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("max_requests", [1, 4, 7, 16, 64])
def test_a_tables_lengths_are_those_vllm_captures(table: list[tuple[int, int, int]], max_requests: int) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
    dense = build_dynamic_sd_schedule_lookup(table, max_requests, 5)
    assert captured_lengths(configuration(table=table, k_max=5), max_requests) == sorted(set(dense[1:]))

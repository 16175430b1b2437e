"""The table of V2's limits names what holds for a configuration."""

from types import SimpleNamespace
from typing import Any

from faser.engine_adapter.runner.v2_limits import LIMITS_V2, VERIFICATION_GRAPHS, DraftingFacts, limits_for


def configuration(method: str = "eagle3", is_adaptive: bool = False) -> Any:
    return SimpleNamespace(
        method=method,
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
    assert {"ragged drafting", "first drafting pass", "stop rules"} <= names("eagle3") & names("draft_model")
    assert not {"ragged drafting", "first drafting pass", "stop rules"} & names("ngram_gpu")
    assert "stop rules" not in names("eagle", is_adaptive=True)
    assert "stop rules" in names("dflash")


def test_block_verification_is_warned_of() -> None:
    facts = [
        DraftingFacts.of(SimpleNamespace(method="eagle3", rejection_sample_method=how)) for how in ("block", "standard")
    ]
    seen = ["block verification" in {limit.name for limit in limits_for(fact)} for fact in facts]
    assert seen == [True, False]


def test_what_the_attention_backend_decides_is_said_when_it_is_known() -> None:
    assert VERIFICATION_GRAPHS in {limit.name for limit in LIMITS_V2}
    assert VERIFICATION_GRAPHS not in names("eagle3")

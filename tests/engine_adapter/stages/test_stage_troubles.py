"""Pipelines in trouble: stages that cannot move are off with one line while requests and drafts go on, and a rank that
is killed in the middle of a move ends its engine as it ends vLLM's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .scenarios import QUICK, SHORT, Run, left_after

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]  # `make proof`

DRAFTING = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


CONNECTOR = {
    "kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"shared_storage_path": ""},
}  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"enforce_eager": False}, "compiled graphs"),
        ({"enable_lora": True}, "a LoRA adapter"),
        ({"kv_transfer_config": CONNECTOR}, "a KV connector"),
        ({"model_impl": "transformers"}, "its forward pass does not read start_layer and end_layer"),
    ],
    ids=["compiled", "lora", "connector", "architecture"],
)
def test_what_cannot_move_is_said_in_one_line_and_requests_and_drafts_go_on(
    stage_engine: Run, short_answers: dict[str, Any], engine: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    if engine.get("kv_transfer_config") is CONNECTOR:
        storage = {"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}
        engine = {"kv_transfer_config": CONNECTOR | storage}
    scenario = {"engine": engine | {"speculative_config": DRAFTING}, "phases": [SHORT]}
    result = stage_engine(2, scenario, FASER_DEFAULT_K="3")
    assert result["code"] == 0, result["log"]
    lines = {line for line in result["log"].splitlines() if "stages are off: " in line}
    assert len({line.partition("stages are off: ")[2] for line in lines}) == 1
    assert all(reason in line for line in lines)
    print(reason, result["phases"][0]["drafted"], lines)
    assert result["phases"][0]["rounds"][0] == short_answers
    assert result["phases"][0]["drafted"] > 20
    assert result["ranks"] == [None, None]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_in_a_move_ends_the_engine_as_it_ends_vllms_own(
    stage_engine: Run, tiny: Path, rank: int
) -> None:
    scenario = {"model": str(tiny), "phases": [], "lost_rank": rank, "pace": QUICK}
    moving, still = stage_engine(2, scenario), stage_engine(2, scenario, FASER_STAGES="0")
    print([(result["died_of"], result["text"], result["died_s"], result["code"]) for result in (moving, still)])
    for result in (moving, still):
        assert result["died_of"], result["log"]
        assert len(result["processes"]) == 2
        assert left_after(result["processes"]) == []
    assert (moving["died_of"], moving["code"]) == (still["died_of"], still["code"])

"""Length 0 for the whole batch on vLLM's real V2 runner: the drafter is left out, and drafts afterwards as if it was not."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.engine

JOB = "lulls:generate_with_lulls"
NEVER = {"environment": {"FASER_SKIPPED_TOKENS": "0"}}
WAVES = {"waves": [0, 0, 0, 0, 0, 3, 2]}
MODES = [False, True]


@pytest.fixture(scope="module")
def kept_in_step(forks: Any, tiny: Any) -> Any:
    """Return `run(method, is_async)`: of an engine whose drafter runs in every step."""
    seen: dict[Any, Any] = {}

    def run(method: str, is_async: bool) -> Any:
        key = method, is_async
        if key not in seen:
            seen[key] = forks(JOB, **tiny.scenario(method), is_async=is_async, rule=WAVES, **NEVER)
        return seen[key]

    return run


@pytest.mark.parametrize("is_async", MODES, ids=["sync", "async"])
@pytest.mark.parametrize("method", ["near", "eagle", "eagle3"])
def test_a_drafter_that_was_left_out_drafts_the_same(
    forks: Any, tiny: Any, kept_in_step: Any, method: str, is_async: bool
) -> None:
    run, whole = forks(JOB, **tiny.scenario(method), is_async=is_async, rule=WAVES), kept_in_step(method, is_async)
    print(method, is_async, run["passes"], whole["passes"], run["caught_up"], run["check"]["records"], run["faults"])
    assert run["faults"] == {}
    assert run["tokens"] == whole["tokens"]
    assert run["proposed"] == whole["proposed"]
    assert run["passes"] < whole["passes"]

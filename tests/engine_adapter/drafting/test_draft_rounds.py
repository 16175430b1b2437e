"""What HELLO says of drafts of different length, by what the worker noted and else by configuration."""

from types import SimpleNamespace as Config
from typing import Any

import pytest

from faser.engine_adapter.drafting.draft_rounds import note_rounds, told_rounds


def configured(runner: str, method: str | None, device: str = "cpu") -> Any:
    drafting = None if method is None else Config(method=method)
    return Config(
        speculative_config=drafting, use_v2_model_runner=runner == "v2", device_config=Config(device_type=device)
    )


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle", "eagle3"])
def test_v1_drafts_each_request_its_own_length(method: str) -> None:
    assert told_rounds(configured("v1", method, "cuda")) == "ragged"


def test_v1_drafts_the_longest_with_what_is_not_cut() -> None:
    assert told_rounds(configured("v1", "medusa")) == "longest"


@pytest.mark.parametrize(
    ("method", "device", "told"),
    [
        ("eagle3", "cpu", "ragged"), ("mtp", "cpu", "ragged"), ("eagle3", "cuda", "longest"),
        ("draft_model", "cpu", "longest"), ("ngram_gpu", "cuda", "longest"),
    ],
)  # fmt: skip
def test_on_v2_the_usual_holds_where_nobody_noted_more(method: str, device: str, told: str) -> None:
    assert told_rounds(configured("v2", method, device)) == told


@pytest.mark.parametrize(("is_ragged", "told"), [(True, "ragged"), (False, "longest")])
def test_what_the_worker_noted_holds(is_ragged: bool, told: str) -> None:
    for device in ("cpu", "cuda"):
        config = configured("v2", "eagle3", device)
        note_rounds(config, is_ragged)
        assert told_rounds(config) == told


def test_an_engine_that_does_not_draft_says_nothing_else_than_before() -> None:
    assert told_rounds(configured("v2", None, "cuda")) == "ragged"

"""`faser demo --stages`: what it refuses, how tokens are compared and steps summed up, and the real thing in short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from faser.controller.demo.options import DemoOptions
from faser.controller.demo.stage_load import ANSWER_TOKENS, PROMPTS, Answer, chosen_prompts, wrong_tokens
from faser.controller.demo.stage_result import Timeline, stages_of, write_stages_picture
from faser.controller.errors import UsageError

FASER = [sys.executable, "-P", "-c", "from faser.controller.__main__ import main; main()"]


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"stages": 1}, "--stages 1; expected 2 to 8 ranks"),
        ({"stages": 9}, "--stages 9; expected 2 to 8 ranks"),
        ({"stages": 2, "has_classes": True}, "--classes with --stages; expected one of the two"),
        ({"stages": 2, "splits": "1:1"}, "--splits with --stages"),
        ({"stages": 2, "method": "ngram"}, "--method with --stages"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(options: dict[str, object], seen: str) -> None:
    with pytest.raises(UsageError) as caught:
        DemoOptions(**options)  # type: ignore[arg-type]
    assert seen in str(caught.value)


def test_a_token_is_wrong_where_another_was_expected_or_one_is_missing() -> None:
    assert wrong_tokens([1, 2, 3], [1, 2, 3]) == 0
    assert wrong_tokens([1, 9, 3], [1, 2, 3]) == 1
    assert wrong_tokens([1, 2], [1, 2, 3]) == wrong_tokens([1, 2, 3], [1, 2]) == 1
    assert wrong_tokens([], [1, 2]) == 2


def test_prompts_are_short_and_as_many_as_are_asked_for() -> None:
    assert len(set(chosen_prompts())) == PROMPTS


def test_stages_are_the_ranks_with_layers() -> None:
    assert [stages_of(text) for text in ("", "0", "15", "0,15", "0,0,0", "8,15,22")] == [1, 1, 2, 2, 1, 4]


def test_rates_are_by_number_of_stages_and_leave_moves_out(tmp_path: Path) -> None:
    stages = np.array([2, 2, np.nan, 1, 1])
    timeline = Timeline(np.arange(5.0), np.full(5, 0.1), np.array([4.0, 6.0, 50.0, 2.0, 2.0]), stages, 1)
    assert timeline.tokens_per_s() == {"1": 20.0, "2": 50.0}
    write_stages_picture(timeline, [Answer(1.0, 8, 0, 20.0), Answer(2.0, 8, 1, 21.0)], picture := tmp_path / "s.svg")
    assert "<svg" in picture.read_text()


@pytest.mark.engine
@pytest.mark.slow  # `make proof`; test_stages_engine.py has moves that a sidecar orders
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_short_demo_moves_stages_and_no_token_is_wrong(tmp_path: Path) -> None:
    output = tmp_path / "run"
    command = [*FASER, "demo", "--stages", "2", "--duration", "40", "--json"]
    done = subprocess.run(
        [*command, "--policy", "off+stages:turns:40", "--output", str(output)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["moves"] >= 2
    assert result["wrong_tokens"] == result["failed"] == 0
    assert result["tokens"] == ANSWER_TOKENS * result["answers"] > 1000
    assert set(result["tokens_per_s"]) == {"1", "2"}
    assert (output / "stages.svg").is_file()
    assert "15+15 layers" in done.stderr

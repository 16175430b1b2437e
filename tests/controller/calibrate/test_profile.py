"""faser profile: its load and its refusals; and, with a real engine, a tiny grid from end to end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from faser.controller.calibrate.profile import ProfileOptions, command_line
from faser.controller.calibrate.starvation import compute_process
from faser.controller.calibrate.survey_load import Grid, SurveyLoad
from faser.controller.errors import UsageError
from faser.engine_adapter.protocol import Prune
from faser.env.estimate.engine_state import EngineState
from faser.env.profile.engine_profile import load_profile
from faser.env.spaces import Capabilities
from faser.models.policies.policy import PolicyError
from faser.models.policies.profiling import REST, SPLIT_RECORDS, Deck, ProfilingPolicy, dealt, patterns
from faser.models.registry import make_policy

FASER = [sys.executable, "-P", "-c", "from faser.controller.cli.main import main; main()"]


def test_the_grid_fits_the_engine() -> None:
    stops = Grid().stops(max_requests=16, max_context=512, kv_tokens=4000)
    assert {stop.requests for stop in stops} <= set(range(17))
    assert all(stop.context_tokens + 3 * stop.steps < 512 for stop in stops)
    assert all(stop.requests * (stop.context_tokens + 3 * stop.steps) < 4000 for stop in stops)
    assert any(stop.requests > 1 for stop in stops)
    assert Grid().stops(1, 64, 100) == []


def test_no_two_prompts_of_the_survey_begin_alike() -> None:
    load = SurveyLoad("http://x", "m", [], seed=0)
    starts = set()
    for _ in range(50):
        load._serial += 1
        starts.add(load._prompt(40)[:8])
    assert len(starts) == 50


@pytest.mark.parametrize("requests", [1, 2, 7, 64])
def test_every_pattern_of_lengths_is_another_one(requests: int) -> None:
    found = [tuple(sorted(dealt(pattern, requests).tolist())) for pattern in patterns(requests, 4) if pattern != REST]
    assert len(set(found)) == len(found)
    assert {(length,) * requests for length in range(5)} <= set(found)
    assert all(0 <= length <= 4 for lengths in found for length in lengths)


def test_a_deck_deals_all_patterns_before_any_comes_again() -> None:
    import random

    deck = Deck(patterns(4, 3), random.Random(0))
    size = len(deck.patterns)
    first, second = ([deck.deal() for _ in range(size)] for _ in range(2))
    assert sorted(first) == sorted(second) == sorted(deck.patterns)
    assert first != second


def test_the_survey_is_a_policy_with_a_seed() -> None:
    assert isinstance(make_policy("survey:3", Capabilities(k_max=2)), ProfilingPolicy)
    with pytest.raises(PolicyError, match="expected a number"):
        make_policy("survey:sheep", Capabilities(k_max=2))


def test_the_survey_prunes_in_half_of_the_steps_where_there_are_exit_heads() -> None:
    state = EngineState(Capabilities(k_max=2))
    plain, pruning = (
        ProfilingPolicy(Capabilities(k_max=2)),
        ProfilingPolicy(Capabilities(k_max=2, released_prune=Prune(5, 0.25))),
    )
    assert {plain.act(state).prune for _ in range(50)} == {None}
    asked = [pruning.act(state).prune for _ in range(200)]
    assert set(asked) == {None, Prune(5, 0.25)}
    assert 60 < asked.count(None) < 140


def test_each_split_has_some_steps_between_as_many_on_the_whole_device() -> None:
    capabilities = Capabilities(k_max=2, splits=("unsplit", "1:1", "1:3"))
    state, survey = EngineState(capabilities), ProfilingPolicy(capabilities)
    asked = [survey.act(state).split for _ in range(6 * SPLIT_RECORDS)]
    assert asked[::SPLIT_RECORDS] == [0, 1, 0, 2, 0, 1]
    assert len(set(asked[:SPLIT_RECORDS])) == 1
    whole = Capabilities(k_max=2)
    assert ProfilingPolicy(whole).act(EngineState(whole)).split is None


@pytest.mark.parametrize("bad", [{"minutes": float("nan")}, {"minutes": 0.0}, {"seed": -1}])
def test_bad_options_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="--"):
        ProfileOptions(**bad)  # type: ignore[arg-type]


def test_paths_are_left_out_of_the_card() -> None:
    assert command_line(("faser", "profile", "-o", "/some/where/p.json")) == "faser profile -o p.json"


def test_a_tree_without_a_compute_process_has_no_waiting_time() -> None:
    assert compute_process(2**22 - 1) is None


@pytest.mark.engine
def test_a_smoke_run_writes_a_profile_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = subprocess.run(
        [*FASER, "profile", "--smoke", "--json", "--minutes", "1", "-o", str(tmp_path / "p.json")],
        capture_output=True, text=True, check=False, cwd=tmp_path, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert {"verify", "draft", "host", "acceptance"} <= set(json.loads(done.stdout.splitlines()[-1]))
    profile = load_profile(tmp_path / "p.json")
    assert profile.k_max == 4
    assert profile.domain["requests"].high >= 3
    assert profile.card.command.startswith("faser profile --smoke")
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]


def test_a_model_without_a_drafter_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = subprocess.run(
        [*FASER, "profile", "some/model", "-o", str(tmp_path / "p.json")], capture_output=True, text=True, check=False,
        cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert done.returncode == 5
    assert "no drafter configured for some/model" in done.stderr
    assert not list(tmp_path.iterdir())

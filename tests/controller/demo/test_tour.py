"""`faser demo --tour`: its plan, what it makes of a telemetry file, verdict, picture; and the real thing in short."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from faser.controller.config import Config, LinkConfig, PolicyConfig, StoreConfig
from faser.controller.demo.options import DemoOptions
from faser.controller.demo.stage_load import ANSWER_TOKENS, chosen_prompts
from faser.controller.demo.tour import tour as module
from faser.controller.demo.tour.plan import APART, SPLIT, STATIONS, WHOLE, Station, engines_of, refusal, tour_launch
from faser.controller.demo.tour.sentences import idle_mechanisms, told
from faser.controller.demo.tour.station_steps import RowCounts, StationFigures, StationSteps, read_station
from faser.controller.demo.tour.tour import StationAnswers, Tour, run_tour
from faser.controller.demo.tour.tour_picture import curves_of, shown_from, write_tour_picture
from faser.controller.demo.tour.tour_result import StationResult, TourResult
from faser.controller.engine import sidecar_child
from faser.controller.engine.sidecar_child import change_policy, own_sidecar
from faser.controller.errors import EngineError, UsageError
from faser.controller.link.ask import ask
from faser.controller.link.endpoint import socket_folder
from faser.controller.telemetry.packing import StepCopies
from faser.controller.telemetry.store import EngineEntry, RunEntry, StepEntry, Store
from faser.engine_adapter.protocol import ActionSet, Hello, RequestRow, StepRecord
from faser.models.embedded.pair import EMBEDDED_K_MAX, EmbeddedPair
from faser.models.forced.forced_policy import MECHANISMS

FASER = [sys.executable, "-P", "-c", "from faser.controller.__main__ import main; main()"]
PAIR = EmbeddedPair(Path("target"), Path("drafter"))


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"stages": 2}, "--stages with --tour"),
        ({"policy": "off"}, "--policy with --tour"),
        ({"has_classes": True}, "--classes with --tour"),
        ({"splits": "1:1"}, "--splits with --tour"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(options: dict[str, object], seen: str) -> None:
    with pytest.raises(UsageError) as caught:
        DemoOptions(has_tour=True, **options)  # type: ignore[arg-type]
    assert seen in str(caught.value)


def test_every_mechanism_has_a_station_of_its_own_and_one_beside_others() -> None:
    alone = {station.mechanisms[0] for station in STATIONS if len(station.mechanisms) == 1}
    together = {name for station in STATIONS if len(station.mechanisms) > 1 for name in station.mechanisms}
    assert alone == set(MECHANISMS)
    assert together | {"drafts", "groups"} == set(MECHANISMS)  # groups come with splits
    names = [station.name for station in STATIONS]
    assert len(set(names)) == len(names)


def test_a_station_is_compared_with_one_of_the_same_engine_that_was_served_before() -> None:
    served: dict[str, Station] = {}
    for station in STATIONS:
        if station.beside:
            # Unsplit an engine with splits has all cores, as the one without.
            assert served[station.beside].engine == {SPLIT: WHOLE}.get(station.engine, station.engine)
        served[station.name] = station
    assert engines_of(STATIONS) == [WHOLE, SPLIT, APART]


def test_on_one_core_what_needs_two_says_so() -> None:
    refused = {station.name for station in STATIONS if refusal(station, 1)}
    assert refused == {"groups", "splits", "together split", "drafts apart", "ahead", "together apart"}
    assert not any(refusal(station, 2) for station in STATIONS)


def test_engines_hold_their_gates_open_and_deal_out_the_cores() -> None:
    launches = [tour_launch(name, PAIR, "ipc://here", [2, 3, 5]) for name in (WHOLE, SPLIT, APART)]
    assert {launch.arguments[-1] for launch in launches} == {"--no-enable-prefix-caching"}
    whole, split, settled = (launch.environment({}) for launch in launches)
    assert (whole["FASER_PRUNE"], whole["OMP_NUM_THREADS"]) == ("always", "3")
    assert "FASER_SPLITS" not in whole, "where groups can be nothing is pruned"
    assert (split["FASER_SPLITS"], split["FASER_PING_PONG"], split["OMP_NUM_THREADS"]) == ("1:1", "always", "3")
    assert (settled["FASER_DRAFTER_CORES"], settled["VLLM_CPU_OMP_THREADS_BIND"]) == ("5", "2,3")
    assert (settled["OMP_NUM_THREADS"], settled["FASER_DRAFT_AHEAD"]) == ("2", "always")
    assert "FASER_SPLITS" not in settled


# -- what steps did -----------------------------------------------------------------------------------------------


def row(handle: int, limit: int, drafted: int, verified: int, confidences: int = 0, accepted: int = 0) -> RequestRow:
    return RequestRow(
        handle, verified + 1, limit, drafted, verified, 0, accepted, accepted + 1, 50, False, (0.5,) * confidences
    )


def test_a_rule_ended_a_draft_where_one_token_more_was_judged_than_kept() -> None:
    counts, none = RowCounts(), StepCopies()
    assert counts.of([row(1, 4, 2, 0), row(2, 4, 4, 0)], none, {}, 4) == (8, 6, 0, 0, 0, 0)
    # Of the first only 3 of 4 were drawn, of which 2 were kept; the second went to its end.
    assert counts.of([row(1, 2, 2, 2, 3), row(2, 4, 4, 4, 4)], none, {1: 2}, 4) == (6, 6, 1, 2, 1, 1)
    is_copy = StepCopies(frozenset(), frozenset({1}))
    assert counts.of([row(1, 2, 2, 2, 3)], is_copy, {}, 2)[-2:] == (0, 0), "another rule judged the copy"


def test_a_length_that_an_answer_s_end_cut_is_no_length_of_its_own() -> None:
    rows = [row(1, 4, 4, 0), row(2, 1, 1, 0), row(3, 4, 4, 0)]
    assert RowCounts().of(rows, StepCopies(), {1: 4, 2: 4}, 4)[2:4] == (0, 0)
    assert RowCounts().of(rows, StepCopies(), {1: 4, 2: 1}, 4)[2:4] == (1, 3)


def hello(boot_id: str) -> Hello:
    return Hello(
        boot_id, 1, "host", "0.1.0", "0.32.0", "target", "cpu", "v1", False, "eagle3", "drafter", 6, 0, [], 256, 8192,
        100_000, [], ["unsplit", "1:1"], [5], 1, 1, 1, 0, 32, 1000, [],
    )  # fmt: skip


def step(counter: int, boot_id: str, lease: int, split: int = 0, hidden_s: float = 0.0) -> StepRecord:
    rows = [row(1, 4, 4, 3, accepted=2), row(2, 1, 1, 1)]
    return StepRecord(
        boot_id, counter, counter, counter * 0.05, 0.04 + 0.01 * split, 1e-3, 0.02, 1e-3, 0.01, hidden_s, 1e-5, 2, 0, 0,
        2, 4, 0.5, split, None, 7 if lease else 0, lease, 0, 0, [], rows, verified_copies=(1,), wrongly_pruned=1,
        saved_rows=0.5, frontier_hits=1,
    )  # fmt: skip


@pytest.fixture
def telemetry(tmp_path: Path) -> Path:
    """Two policies on one engine, one of them on another: a decision leads the steps under its lease, no others."""
    path = tmp_path / "telemetry.sqlite"
    store = Store(path, RunEntry(7, 1_000, "0.1.0", "{}"), flush_s=0.01)
    for boot_id in ("one", "two"):
        store.put(EngineEntry(hello(boot_id), 10))
    for counter, (boot, lease, policy) in enumerate(
        [
            ("one", 0, "force:copies"),  # under no lease
            ("one", 1, "force:copies"),
            ("one", 2, "force:splits"),  # still under what the first policy decided
            ("one", 3, "force:splits"),
            ("two", 0, "force:copies"),
            ("two", 5, "force:copies"),
        ],
        start=1,
    ):
        action = ActionSet(boot, 7, counter, counter + 32, 1.5, 1, [1], [4])
        record = step(counter, boot, lease, split=int(lease == 3), hidden_s=0.005)
        store.put(StepEntry(record, 11, action, "because", 5e-5, True, policy))
    store.close()
    return path


def test_a_station_has_the_steps_that_its_policy_led_on_its_engine(telemetry: Path) -> None:
    assert [len(read_station(telemetry, "one", f"force:{name}")) for name in ("copies", "splits", "stops")] == [2, 1, 0]
    assert len(read_station(telemetry, "two", "force:copies")) == 1
    assert len(read_station(telemetry, "three", "force:copies")) == 0


def test_figures_are_sums_of_what_the_records_say(telemetry: Path) -> None:
    found = read_station(telemetry, "one", "force:copies").figures()
    assert found == StationFigures(
        steps=2, verified=8, accepted=4, mixed_steps=2, shortened=6, copied=6, accepted_copies=4, saved_rows=1.0,
        wrongly_pruned=2, ahead=2, draft_ms=20.0, hidden_ms=10.0, unsplit_ms=40.0,
    )  # fmt: skip
    split = read_station(telemetry, "one", "force:splits").figures()
    assert (split.grouped_steps, split.split_changes, split.split_ms) == (1, 0, 50.0)


BUSY = StationFigures(
    steps=10, verified=40, accepted=20, mixed_steps=8, shortened=9, stopped_drafts=3, unspent=5, copied=6,
    accepted_copies=4, pruned=7, saved_rows=5.0, ahead=2, draft_ms=9.0, hidden_ms=4.0, grouped_steps=5, split_changes=2,
)  # fmt: skip


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_that_left_no_trace_is_noticed(name: str) -> None:
    assert idle_mechanisms([name], BUSY) == []
    assert idle_mechanisms([name], StationFigures(steps=10)) == [name]
    assert told([name], BUSY)


# -- the verdict --------------------------------------------------------------------------------------------------


def result(name: str = "pruning", rate: float = 90.0, **more: object) -> StationResult:
    given = {"tokens": 384, "tokens_per_s": rate, "over_none": rate / 100.0, "beside": "drafts", "note": "n"} | more
    return msgspec.convert(
        {"name": name, "engine": WHOLE, "mechanisms": [name], "policy": f"force:{name}"} | given, StationResult
    )


def verdict(*stations: StationResult) -> TourResult:
    return TourResult(prompts=6, tokens=384, plain_tokens_per_s=100.0, stations=list(stations))


def test_one_wrong_token_one_idle_mechanism_or_one_failure_fails_the_tour() -> None:
    fine, refused = result().with_steps(BUSY), result("ahead", tokens=0, refused="one core").with_steps(BUSY)
    assert verdict(fine, refused).exit_code == 0
    for bad in (
        result(wrong_tokens=1).with_steps(BUSY),
        result().with_steps(StationFigures()),
        result(failed="HTTP 500", tokens=0).with_steps(BUSY),
    ):
        assert verdict(fine, bad).exit_code == 1
    assert verdict().exit_code == 1
    few = msgspec.structs.replace(BUSY, pruned=0)
    assert verdict(result(mechanisms=["stops", "pruning"]).with_steps(few)).exit_code == 0, "stops left none to prune"
    assert verdict(result(mechanisms=["stops", "pruning"]).with_steps(StationFigures())).exit_code == 1
    assert msgspec.structs.replace(verdict(fine), is_interrupted=True).exit_code == 130


def test_a_rate_stands_beside_no_speculation_and_beside_the_same_drafts() -> None:
    both = verdict(result("drafts", 120.0, beside=""), result("pruning", 90.0)).against_their_drafts()
    assert [each.over_beside for each in both.stations] == [None, 0.75]
    told = "\n".join(both.closing_lines())
    assert "0 of 768 tokens other than no speculation says" in told
    assert "pruning 0.75" in told
    assert "FASER_PRUNE" in told


def test_rates_beside_other_work_are_marked() -> None:
    busy = msgspec.structs.replace(
        verdict(result(disturbed="0.4 cores used by others").with_steps(BUSY)), disturbed="x"
    )
    assert "of drafts*;" in busy.stations[0].line()
    assert busy.closing_lines()[-1].endswith("no speculation (x), pruning (0.4 cores used by others)")
    assert "disturbed" not in "".join(verdict(result().with_steps(BUSY)).closing_lines())
    assert busy.exit_code == 0


def test_lines_say_what_was_not_seen_and_what_cannot_be_had() -> None:
    assert result().with_steps(StationFigures()).line().count("NOTHING SEEN of pruning") == 1
    assert "cannot be had here: one core" in result(refused="one core", tokens=0).line()
    assert "7 of 40 rows left early" in result().with_steps(BUSY).line()
    assert verdict(result().with_steps(BUSY), result("ahead", refused="one core", tokens=0)).table().row_count == 2


def test_rounds_are_held_to_the_answers_prompt_by_prompt() -> None:
    expected = [[1, 2], [3, 4]]
    assert StationAnswers([[1, 2], [3, 4], [1, 2], [3, 4]], 1.0).wrong(expected) == 0
    assert StationAnswers([[1, 2], [3, 4], [1, 9], [3]], 1.0).wrong(expected) == 2


# -- the picture --------------------------------------------------------------------------------------------------


def test_steps_are_shown_from_the_middle_and_without_prompts() -> None:
    is_prompt = np.zeros(40, bool)
    assert shown_from(is_prompt, 10) == 15
    is_prompt[20] = True
    assert shown_from(is_prompt, 10) in (10, 21)
    assert shown_from(np.ones(40, bool), 10) == 15
    assert shown_from(np.zeros(3, bool), 10) == 0


def test_the_picture_has_a_row_for_each_station(telemetry: Path, tmp_path: Path) -> None:
    steps = read_station(telemetry, "one", "force:copies")
    stations: dict[str, tuple[Sequence[str], StationSteps]] = {name: ([name], steps) for name in MECHANISMS}
    write_tour_picture(stations | {"nothing": (["stops"], StationSteps.of([]))}, picture := tmp_path / "tour.svg")
    assert "<svg" in picture.read_text()
    assert curves_of(["copies"], steps).whole.tolist() == [3.0, 3.0]
    assert curves_of(["copies"], steps).part.tolist() == [2.0, 2.0]
    assert curves_of(["copies", "stops"], steps).label.startswith("draft tokens")


# -- a sidecar that is told another policy ------------------------------------------------------------------------


def test_a_running_sidecar_takes_another_policy_and_says_so_where_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket_folder("tour") as sockets:
        link = LinkConfig(f"ipc://{sockets / 'engine.sock'}", f"ipc://{sockets / 'status.sock'}")
        config = Config(link=link, policy=PolicyConfig("force:drafts"), store=StoreConfig(enabled=False))
        file = tmp_path / "policy.toml"
        with own_sidecar(config, tmp_path / "sidecar.log", file) as sidecar:
            end_s = time.monotonic() + 30.0
            while "sidecar listens" not in sidecar.log.read_text() and time.monotonic() < end_s:
                time.sleep(0.05)
            assert ask(link).policy == "force:drafts"
            change_policy(sidecar, link, file, "force:lengths+stops")
            assert ask(link).policy == "force:lengths+stops"
            monkeypatch.setattr(sidecar_child, "_CHANGE_S", 1.0)
            with pytest.raises(EngineError, match="does not take the policy force:luck"):
                change_policy(sidecar, link, file, "force:luck")
            assert ask(link).policy == "force:lengths+stops"
            assert sidecar.poll() is None


# -- the real thing -----------------------------------------------------------------------------------------------

SHORT = (
    Station("drafts", ("drafts",), WHOLE, ""),
    Station("pruning", ("pruning",), WHOLE),
    Station("copies", ("copies",), WHOLE, ""),
    Station("ahead where it cannot be", ("ahead",), WHOLE),
)


@pytest.mark.engine
@pytest.mark.slow  # `make proof`: two engines, two minutes beside other work
@pytest.mark.alone
@pytest.mark.timeout(600)
def test_a_short_tour_forces_mechanisms_and_notices_a_wrong_token_and_an_idle_mechanism(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One token of what plain vLLM said is changed: every station, and nothing else, is wrong by that one."""
    recorded = Tour._without_speculation

    def poisoned(self: Tour, pair: EmbeddedPair) -> StationAnswers:
        reference = recorded(self, pair)
        reference.answers[0][10] += 1
        return reference

    monkeypatch.setattr(module.Tour, "_without_speculation", poisoned)
    options = DemoOptions(duration_s=1.0, json=True, has_tour=True, output=tmp_path / "run")
    code = run_tour(options, SHORT, chosen_prompts()[::6])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 1
    stations = {each["name"]: each for each in found["stations"]}
    rounds = [each["tokens"] / (3 * ANSWER_TOKENS) for each in stations.values()]  # beside other work two
    assert [each["wrong_tokens"] for each in stations.values()] == rounds
    assert set(rounds) <= {1.0, 2.0}
    assert {name: each["idle"] for name, each in stations.items() if each["idle"]} == {
        "ahead where it cannot be": ["ahead"]
    }
    assert stations["pruning"]["figures"]["pruned"] > 10
    assert stations["copies"]["figures"]["accepted_copies"] > 5
    others = stations["copies"]["figures"]["verified"] - stations["copies"]["figures"]["copied"]
    assert 0 <= others <= 3 * EMBEDDED_K_MAX, "its first step verifies what the station before may have drafted"
    assert stations["drafts"]["figures"]["pruned"] == stations["drafts"]["figures"]["copied"] == 0
    assert (tmp_path / "run" / "tour.svg").is_file()


@pytest.mark.engine
@pytest.mark.slow  # `make proof`; the short one above has negative controls
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_the_whole_tour_shows_every_mechanism_and_no_token_is_wrong(tmp_path: Path) -> None:
    output = tmp_path / "run"
    command = [*FASER, "demo", "--tour", "--duration", "1", "--json", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [each["name"] for each in found["stations"]] == [station.name for station in STATIONS]
    assert all(each["did"] or each["refused"] for each in found["stations"])
    assert sum(each["wrong_tokens"] for each in found["stations"]) == 0
    times = [int(line.split()[1]) for line in done.stderr.splitlines() if line.startswith("faser: ")]
    assert max(later - earlier for earlier, later in pairwise(times)) < 60, "it was silent for a minute"
    assert (output / "tour.svg").is_file()

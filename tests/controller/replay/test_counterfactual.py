"""Counterfactual speed: what the simulator predicts for another policy is what that policy then does; or it is refused.

The recording is of a simulated engine of known costs, written by the real store, so that the truth can be had by
running the other policy on it.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from faser.controller.cli.replay import ReplayOptions, run_replay
from faser.controller.errors import ModelError, StoreError, UsageError
from faser.controller.replay.counterfactual import LIMIT, NAMES, Speed, estimate_speed
from faser.controller.telemetry.store import EngineEntry, RunEntry, StepEntry, Store
from faser.engine_adapter.protocol import Hello, StepRecord
from faser.env.profile.engine_profile import EngineProfile, save_profile, shipped_profile
from faser.env.simulator.serve_requests import Orders, ServedRequests, replay
from faser.models.policies.policy import PolicyError

REQUESTS = 30
COSTS = shipped_profile()


def hello(profile: EngineProfile, boot_id: str = "simulated") -> Hello:
    card = profile.card
    return Hello(
        boot_id=boot_id, pid=1, host="h", adapter_version="0.1.0", vllm_version=card.vllm_version, model=card.model,
        device=card.device, runner="v1", is_async=False, method=card.method, drafter=card.drafter, k_max=profile.k_max,
        default_length=0, default_table=[], max_requests=profile.max_requests,
        max_batched_tokens=profile.token_budget, kv_tokens=profile.kv_blocks * profile.block_size, graph_sizes=[],
        splits=["unsplit"], exit_layers=[], tensor_parallel=1, pipeline_parallel=1, data_parallel=1,
        data_parallel_rank=0, lease_steps=32, lease_ms=1000, roster=[],
    )  # fmt: skip


def serve(length: int, seed: int, records: list[StepRecord] | None = None) -> ServedRequests:
    """Serve the requests of these tests under one length for all."""
    chance = np.random.default_rng(5)
    arrivals = np.cumsum(chance.exponential(0.25, REQUESTS))
    prompts, answers = chance.integers(20, 120, REQUESTS), chance.integers(40, 160, REQUESTS)

    def decide(record: StepRecord) -> Orders:
        if records is not None:
            records.append(record)
        return Orders({}, length)

    return replay(arrivals, prompts, answers, decide, COSTS, seed=seed)


def write(path: Path, records: list[StepRecord], *boots: Hello) -> Path:
    store = Store(path, RunEntry(1, 1, "test", '{"policy":{"spec":"off"},"lease":{}}'), flush_s=0.01)
    for boot in boots:
        store.put(EngineEntry(boot, 1))
        for record in records:
            store.put(StepEntry(msgspec.structs.replace(record, boot_id=boot.boot_id), 1))
    store.close(30.0)
    return path


@pytest.fixture(scope="module")
def records() -> list[StepRecord]:
    """Return a run without drafts."""
    found: list[StepRecord] = []
    serve(0, 1000, found)
    return found


@pytest.fixture(scope="module")
def telemetry(records: list[StepRecord], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("counterfactual") / "run.sqlite", records, hello(COSTS))


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command make two runs instead of eight."""
    monkeypatch.setattr("faser.controller.cli.replay.estimate_speed", partial(estimate_speed, runs=2))


def test_what_is_predicted_for_another_policy_is_what_it_then_does(telemetry: Path) -> None:
    found = estimate_speed(telemetry, "fixed:2", runs=4)
    assert found.refusal == ""
    assert REQUESTS - 3 <= found.requests < REQUESTS, "the last step is not in the recording, nor who ended in it"
    truth = [serve(2, seed) for seed in range(2000, 2004)]
    base = [serve(0, seed) for seed in range(2000, 2004)]
    for speed in found.speeds:
        names = {"tokens_per_s": "tokens_per_s"}
        figures = [
            float(np.mean([np.nanmean(getattr(run, names.get(speed.name, f"{speed.name}_s"))) for run in runs]))
            for runs in (truth, base)
        ]
        change = figures[0] / figures[1] - 1.0
        assert abs(speed.change - change) <= speed.error + speed.spread + 0.03, speed.name
    tpot = next(speed for speed in found.speeds if speed.name == "tpot")
    assert tpot.error < 0.15, "one run of thirty requests, against the mean of four"
    assert abs(tpot.change) > 0.02, "the other policy does make a difference here"


def test_the_recorded_policy_itself_is_no_different(telemetry: Path) -> None:
    found = estimate_speed(telemetry, "off", runs=2)
    assert [speed.name for speed in found.speeds] == list(NAMES)
    assert {speed.verdict() for speed in found.speeds} == {"within the error"}
    assert estimate_speed(telemetry, "off", runs=2) == found, "the same again"


def test_a_policy_that_decides_by_state_is_driven_by_simulated_records(telemetry: Path) -> None:
    found = estimate_speed(telemetry, "price", runs=2)
    assert found.refusal == ""
    assert len(found.speeds) == 4


def test_text_json_and_report_carry_the_error_beside_the_figure(
    telemetry: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], quickly: None
) -> None:
    page = tmp_path / "replay.html"
    run_replay(ReplayOptions(telemetry, "fixed:2", is_counterfactual=True, report=page, json=True))
    found = json.loads(capsys.readouterr().out)["counterfactual"]
    html = page.read_text()
    for speed in found["speeds"]:
        line = "".join(
            f'<td class="number">{cell}</td>'
            for cell in (
                f"{speed['recorded']:.1f}", f"{speed['simulated']:.1f}", f"{speed['alternative']:.1f}",
                f"{speed['change']:+.1%} ± {speed['spread']:.1%}", f"{speed['error']:.1%}",
            )
        )  # fmt: skip
        assert f"<th>{NAMES[speed['name']]}</th>{line}" in html
    run_replay(ReplayOptions(telemetry, "fixed:2", is_counterfactual=True))
    left_out = f"({REQUESTS - found['requests']} more did not finish in the file and are left out)"
    assert f"{found['requests']} requests {left_out}, 2 runs" in capsys.readouterr().out
    assert left_out in html


def test_copies_which_no_simulator_makes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quickly: None
) -> None:
    found: list[StepRecord] = []
    serve(2, 1000, found)
    copied = [(record, next((row for row in record.rows if row.accepted), None)) for record in found]
    records = [
        msgspec.structs.replace(record, verified_copies=(row.handle,)) if row else record for record, row in copied
    ]
    path = write(tmp_path / "copies.sqlite", records, hello(COSTS))
    run_replay(ReplayOptions(path, "off", is_counterfactual=True))
    tokens = sum(row.accepted for _, row in copied if row is not None)
    assert f"; {tokens} copied tokens are served one by one." in capsys.readouterr().out


def test_a_simulator_that_is_far_off_is_refused_in_words(
    telemetry: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], quickly: None
) -> None:
    slow = msgspec.structs.replace(
        COSTS,
        verify=msgspec.structs.replace(COSTS.verify, coefficients=tuple(3.0 * c for c in COSTS.verify.coefficients)),
    )
    profile, page = tmp_path / "slow.json", tmp_path / "replay.html"
    save_profile(slow, profile)
    run_replay(ReplayOptions(telemetry, "fixed:2", is_counterfactual=True, profile=profile, report=page))
    assert "No counterfactual: the simulator misses this file's" in capsys.readouterr().out
    html = page.read_text()
    assert "No counterfactual: the simulator misses this file&#39;s" in html
    assert f"expected {LIMIT:.0%} at most" in html
    assert "mean over requests" not in html


@pytest.mark.parametrize(
    ("change", "error", "spread", "name", "verdict"),
    [
        (0.10, 0.06, 0.04, "tpot", "within the error"),
        (0.11, 0.06, 0.04, "tpot", "worse by at least 1.0%"),
        (-0.2, 0.06, 0.04, "e2e", "better by at least 10.0%"),
        (-0.2, 0.06, 0.04, "tokens_per_s", "worse by at least 10.0%"),
        (0.2, 0.06, 0.04, "tokens_per_s", "better by at least 10.0%"),
        (0.2, float("nan"), 0.04, "tpot", "within the error"),
    ],
)
def test_a_difference_counts_beyond_error_and_spread(
    change: float, error: float, spread: float, name: str, verdict: str
) -> None:
    assert Speed(name, 1.0, 1.0, 1.0, error, change, spread).verdict() == verdict


def test_what_cannot_be_simulated_is_an_error_of_ours(
    telemetry: Path, records: list[StepRecord], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PolicyError):
        estimate_speed(telemetry, "nonsense")
    stranger = msgspec.structs.replace(hello(COSTS), model="another")
    with pytest.raises(ModelError, match=r"a profile of model .*; expected another.*; profile again"):
        estimate_speed(write(tmp_path / "stranger.sqlite", records, stranger), "fixed:2")
    two = write(tmp_path / "two.sqlite", records, hello(COSTS), hello(COSTS, "second"))
    with pytest.raises(StoreError, match=r"on 2 boots of an engine; expected 2 or more, on one"):
        estimate_speed(two, "fixed:2")
    monkeypatch.setattr("faser.controller.extras.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="no numba and no scipy here; expected the extra train"):
        estimate_speed(telemetry, "fixed:2")
    with pytest.raises(UsageError, match="add --counterfactual"):
        ReplayOptions(telemetry, "fixed:2", profile=tmp_path / "p.json")

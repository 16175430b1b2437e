"""faser calibrate and faser fidelity on recorded telemetry: what they find, and what they refuse by file and row."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from io import StringIO
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

import faser
from faser.controller.calibrate.calibrate import CalibrateOptions, calibrate, load_profile_or_fail
from faser.controller.calibrate.fidelity import FidelityOptions, recorded_requests, run_fidelity
from faser.controller.calibrate.measured import ahead_steps, read_measured, trials
from faser.controller.calibrate.profile import ProfileOptions, run_profile
from faser.controller.calibrate.starvation import Waiting, freed, load_waiting, save_waiting
from faser.controller.errors import EngineError, ModelError, StoreError, UsageError
from faser.controller.telemetry.store import EngineEntry, RunEntry, StepEntry, Store
from faser.engine_adapter.protocol import Hello, Prune, RequestEvent, RequestRow, StepRecord
from faser.env.calibration.accept_traces import SHIPPED
from faser.env.calibration.profile_fit import with_ahead
from faser.env.profile.engine_profile import (
    Ahead,
    Card,
    Exit,
    Work,
    load_profile,
    save_profile,
    shipped_profile,
    synthetic_profile,
)
from faser.env.simulator.serve_requests import Orders, replay
from faser.env.simulator.simulated_record import hello
from faser.env.simulator.simulator import Simulator

from ...env.copying import copying_profile, match_model, match_rule, scenario, served
from ..older_files import BEFORE_COPIES, older

CONSOLE = Console(quiet=True)
ERRORS = ("ttft_error", "tpot_error", "e2e_error", "tokens_per_s_error")


PRUNED_PROFILE = msgspec.structs.replace(
    synthetic_profile(
        step_s=0.01, row_s=1e-3, round_s=2e-3, host_s=1e-3, kv_token_s=0.0, k_max=4, kv_blocks=350, block_size=128,
        token_budget=512, max_requests=64, max_context=2048, noise=0.01,
    ),
    exits=(Exit(15, 0.5, recall=0.7, false_alarm=0.1, look_s=1e-3, look_token_s=2e-5),),
    catch_up_tokens=512,
)  # fmt: skip


BASE_S, ROW_S, ROUND_S, PAUSE_S = 0.02, 0.0005, 0.002, 0.001


def make_hello(**changes: object) -> Hello:
    """Return an introduction."""
    fields: dict[str, object] = {
        "boot_id": "boot-1", "pid": 1, "host": "h", "adapter_version": "0.1.0", "vllm_version": "0.32.0",
        "model": "/cache/target", "device": "cpu", "runner": "v1", "is_async": False, "method": "eagle3",
        "drafter": "/cache/drafter", "k_max": 4, "default_length": 0, "default_table": [], "max_requests": 64,
        "max_batched_tokens": 512, "kv_tokens": 45_000, "graph_sizes": [], "splits": ["unsplit"], "exit_layers": [],
        "tensor_parallel": 1, "pipeline_parallel": 1, "data_parallel": 1, "data_parallel_rank": 0, "lease_steps": 32,
        "lease_ms": 1000, "roster": [],
    }  # fmt: skip
    return Hello(**(fields | changes))  # type: ignore[arg-type]


def make_records(batches: int = 30, noise: float = 0.01, seed: int = 0) -> list[StepRecord]:
    """Return the steps of `batches` batches: each of 1 to 8 requests with lengths 0, 2 or 4 that change every step."""
    chance = np.random.default_rng(seed)
    now_s, handle, records = 100.0, 0, []
    for batch in range(batches):
        count = (1, 2, 3, 4, 6, 8)[batch % 6]
        handles = list(range(handle + 1, handle + count + 1))
        handle += count
        arrived_s, now_s = now_s, now_s + PAUSE_S
        contexts, emitted = [20] * count, [0] * count
        verified = 0
        for number in range(14):
            drafted = (4, 0, 2)[int(chance.integers(3))] if number < 12 else 0
            is_prompt = number == 0
            accepted = [0 if is_prompt else int(chance.binomial(verified, 0.6)) for _ in handles]
            scheduled = [20 if is_prompt else 1 + verified] * count
            fresh = [1 + took for took in accepted]
            contexts = [20 if is_prompt else context + new for context, new in zip(contexts, fresh, strict=True)]
            emitted = [done + new for done, new in zip(emitted, fresh, strict=True)]
            verify_s = (BASE_S + ROW_S * sum(scheduled)) * float(np.exp(noise * chance.standard_normal()))
            draft_s = (0.0005 + drafted * ROUND_S) * float(np.exp(noise * chance.standard_normal()))
            now_s += verify_s + draft_s
            events = [RequestEvent("arrival", one, arrived_s, 20, f"r{one}") for one in handles] if is_prompt else []
            if is_prompt:
                events += [RequestEvent("first_token", one, now_s, 1) for one in handles]
            if number == 13:
                events += [RequestEvent("finish", one, now_s, done) for one, done in zip(handles, emitted, strict=True)]
            rows = [
                RequestRow(one, rows_, drafted, drafted, verified, 0, took, new, context, is_prompt, (0.7,) * verified)
                for one, rows_, took, new, context in zip(handles, scheduled, accepted, fresh, contexts, strict=True)
            ]
            records.append(
                StepRecord(
                    boot_id="boot-1", counter=len(records) + 1, step=len(records) + 1, time_s=now_s,
                    step_s=verify_s + draft_s, schedule_s=1e-4, verify_s=0.9 * verify_s, sample_s=1e-4,
                    draft_s=draft_s, overlap_s=0.0, adapter_s=2e-5, running=0 if number == 13 else count, waiting=0,
                    prefill_tokens=20 * count if is_prompt else 0, decode_tokens=0 if is_prompt else count,
                    draft_tokens=verified * count, kv_usage=0.1, split=None, frontier=None, lease_epoch=1,
                    lease_sequence=1, dropped=0, rejected=0, events=events, rows=rows, caught_up=0,
                    draft_rounds=drafted, drawn_tokens=drafted * count,
                )
            )  # fmt: skip
            verified = drafted
            now_s += PAUSE_S
        now_s += 0.05
    return records


SPLIT_STEPS = 40  # in turn


def make_split_records(verify_factor: float, draft_factor: float, hidden: float, batches: int = 40) -> list[StepRecord]:
    """Return steps of which every other few dozen ran under a split, the first three of each as if there were none.

    The last one of each waits for both groups' drafts.
    """
    records, late_s = [], 0.0
    for at, record in enumerate(make_records(batches)):
        index, since = at // SPLIT_STEPS % 2, at % SPLIT_STEPS
        verify_s, draft_s, overlap_s = record.step_s - record.draft_s, record.draft_s, 0.0
        if index and since >= 3:
            verify_s, draft_s = verify_s * verify_factor, draft_s * draft_factor
            overlap_s = hidden * min(verify_s, draft_s)
            if since == SPLIT_STEPS - 1:
                draft_s, overlap_s = 9.0 * draft_s, 0.0
        step_s = verify_s + draft_s - overlap_s
        late_s += step_s - record.step_s
        records.append(
            msgspec.structs.replace(
                record, split=index, step_s=step_s, draft_s=draft_s, overlap_s=overlap_s,
                time_s=record.time_s + late_s,
            )
        )  # fmt: skip
    return records


def test_splits_are_fitted_beside_what_unsplit_steps_cost(
    telemetry: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hello = make_hello(splits=["unsplit", "1:1", "1:3"])
    survey = write_telemetry(tmp_path / "splits.sqlite", make_split_records(1.5, 1.25, 0.8), hello)
    said = StringIO()
    options = CalibrateOptions((survey,), tmp_path / "p.json", held_out=False)
    calibrate(options, Console(file=said, width=200))
    split, plain = load_profile(tmp_path / "p.json").splits[1], load_profile(tmp_path / "p.json")
    assert [each.name for each in plain.splits] == ["unsplit", "1:1"]
    found = split.verify_factor, split.draft_factor, split.overlap
    assert found == pytest.approx((1.5, 1.25, 0.8), rel=0.02)
    assert "not fitted: split 1:3: 0 steps that verify and draft; expected 20 or more" in said.getvalue()
    assert "1:1" in capsys.readouterr().out
    calibrate(CalibrateOptions((telemetry,), tmp_path / "whole.json", held_out=False), CONSOLE)
    whole = load_profile(tmp_path / "whole.json")
    for phase in ("verify", "draft"):
        costs = [sum(getattr(each, phase).coefficients) for each in (plain, whole)]
        assert costs[0] == pytest.approx(costs[1], rel=0.06), "unsplit costs are of unsplit steps alone"


def test_files_of_other_splits_are_not_put_together_but_those_without_any_are(telemetry: Path, tmp_path: Path) -> None:
    one, other = (
        write_telemetry(tmp_path / f"{at}.sqlite", make_records(6), make_hello(splits=["unsplit", name]))
        for at, name in enumerate(("1:1", "1:3"))
    )
    with pytest.raises(StoreError, match="splits unsplit, 1:3; expected unsplit, 1:1 as in"):
        calibrate(CalibrateOptions((telemetry, one, other), tmp_path / "p.json"), CONSOLE)
    calibrate(CalibrateOptions((telemetry, one), tmp_path / "p.json", held_out=False), CONSOLE)


def test_on_the_v2_runner_a_steps_drafting_is_what_later_steps_told(tmp_path: Path) -> None:
    """The next step tells it, under a split the one behind that."""
    records = [
        msgspec.structs.replace(record, draft_s=0.001 * record.counter, split=0 if record.counter < 6 else 1)
        for record in make_records(1)
    ]
    split = {"splits": ["unsplit", "1:1"]}
    v1, v2 = (
        read_measured(
            write_telemetry(tmp_path / f"{runner}.sqlite", records, make_hello(runner=runner, **split))
        ).samples
        for runner in ("v1", "v2")
    )
    count = len(records)
    assert v1.draft_s == pytest.approx(0.001 * np.arange(1, count + 1))
    expected = [0.001 * (at + (1 if at < 6 else 2)) for at in range(1, count + 1)]
    expected[-2:] = [np.nan, np.nan]
    assert v2.draft_s == pytest.approx(np.array(expected), nan_ok=True)
    assert v2.verify_s == pytest.approx(v1.verify_s, nan_ok=True), "the step's time holds what it told"


def write_telemetry(path: Path, records: list[StepRecord], hello: Hello | None = None) -> Path:
    """Write them as a sidecar does."""
    store = Store(path, RunEntry(1, 1, "test", "{}"), flush_s=0.01)
    store.put(EngineEntry(hello or make_hello(), 1))
    for record in records:
        store.put(StepEntry(record, 1))
    store.close(30.0)
    return path


@pytest.fixture(scope="module")
def telemetry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_telemetry(tmp_path_factory.mktemp("telemetry") / "run.sqlite", make_records())


@pytest.fixture(scope="module")
def profile(telemetry: Path) -> Path:
    path = telemetry.with_name("profile.json")
    assert calibrate(CalibrateOptions((telemetry,), path, held_out=False), CONSOLE) == 0
    return path


def test_copies_in_telemetry_give_a_model_of_matches_and_none_give_none(
    tmp_path: Path, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, found, model = tmp_path / "base.json", tmp_path / "found.json", match_model()
    save_profile(copying_profile(None), base)
    records = list(served(model, match_rule(), 2))
    telemetry = write_telemetry(tmp_path / "run.sqlite", records, hello(Simulator(scenario(model), 1)))
    options = CalibrateOptions((telemetry,), found, base=base, keeps_costs=True, held_out=False)
    assert calibrate(options, CONSOLE) == 0
    matches = load_profile(found).matches
    assert matches is not None
    assert matches.longest == model.longest
    assert matches.copies == sum(len(record.verified_copies) for record in records)
    assert matches.after_whole > matches.after_other + 1.0
    assert f"{matches.copies} copied drafts" in capsys.readouterr().out
    assert load_profile(profile).matches is None


def test_known_costs_are_found_again_from_telemetry(profile: Path) -> None:
    found = load_profile(profile)
    work = Work(4, 12, 8, sampled_rows=12, kv_tokens=140, attended_tokens=420, drafting_requests=4, rounds=2,
                draft_rows=8, first_rows=8, draft_attended_tokens=280)  # fmt: skip
    times = found.step_time(work)
    assert times.verify_s == pytest.approx(BASE_S + 12 * ROW_S, rel=0.05)
    assert times.draft_s == pytest.approx(0.0005 + 2 * ROUND_S, rel=0.1)
    assert found.card.model == "target"
    assert found.token_budget == 512
    assert found.acceptance.means[0] == pytest.approx(0.84, abs=0.15)


def make_pruned_records(seed: int) -> list[StepRecord]:
    """Return what a simulated engine did whose drafts of four tokens are pruned in every other step."""
    chance, records = np.random.default_rng(seed), list[StepRecord]()

    def decide(record: StepRecord) -> Orders:
        records.append(record)
        return Orders({}, (2, 4)[int(chance.integers(2))], prunes=bool(chance.integers(2)))

    arrivals = np.sort(chance.uniform(0.0, 12.0, 40))
    replay(arrivals, chance.integers(10, 60, 40), chance.integers(40, 90, 40), decide, PRUNED_PROFILE, seed=seed)
    return records


def test_pruning_is_found_again_from_telemetry_and_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hello = make_hello(boot_id="simulated", exit_layers=[15], released_prune=Prune(15, 0.25))
    first, second = (
        write_telemetry(tmp_path / f"{seed}.sqlite", make_pruned_records(seed), hello) for seed in (1, 2)
    )  # fmt: skip
    steps = read_measured(first).steps
    looked = ~np.isnan(steps.prune_layer)
    assert 50 < looked.sum() < len(steps) - 50
    assert steps.wrongly_pruned.sum() > 10
    calibrate(CalibrateOptions((first,), tmp_path / "p.json", held_out=False, json=True), CONSOLE)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["exits"][0]["layer"] == 15
    found, true = load_profile(tmp_path / "p.json"), PRUNED_PROFILE.exits[0]
    (seen,) = found.exits
    assert seen.saved_share == pytest.approx(true.saved_share)
    assert seen.recall == pytest.approx(true.recall, abs=0.06)
    assert seen.false_alarm == pytest.approx(true.false_alarm, abs=0.03)
    assert seen.look_s == pytest.approx(true.look_s, rel=0.02)
    assert seen.look_token_s == pytest.approx(true.look_token_s, rel=0.02)
    work = read_measured(second).samples
    predicted = work.basis("verify") @ np.array(found.verify.coefficients)
    cut = work.pruned_rows > 0
    assert cut.sum() > 50
    assert np.median(np.abs(predicted / work.verify_s - 1.0)[cut]) < 0.02
    uncut = replace(work, pruned_rows=np.zeros(len(work)), saved_rows=np.zeros(len(work)))
    assert np.median((uncut.basis("verify") @ np.array(found.verify.coefficients) / work.verify_s)[cut]) > 1.05
    run_fidelity(FidelityOptions(second, tmp_path / "p.json", runs=4, json=True))
    errors = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert errors["step_time_error"]["median"] < 0.03
    assert errors["tokens_per_s_error"] < 0.05
    assert errors["tpot_error"] < 0.2  # of a median request of fifty tokens, whose luck is drawn anew
    slow, bare = tmp_path / "slow.json", tmp_path / "bare.json"
    save_profile(msgspec.structs.replace(found, exits=(msgspec.structs.replace(seen, look_s=0.2),)), slow)
    run_fidelity(FidelityOptions(second, slow, runs=1, json=True))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tpot_error"] > 0.5  # it looks where they looked
    save_profile(msgspec.structs.replace(found, exits=()), bare)
    with pytest.raises(ModelError, match="exit heads"):
        run_fidelity(FidelityOptions(second, bare, json=True))


AHEAD = Ahead(ready=0.6, hidden=0.8, verify_factor=1.2, acceptance=0.7)
AHEAD_PROFILE = msgspec.structs.replace(PRUNED_PROFILE, exits=(), ahead=AHEAD)


def make_ahead_records(seed: int, share: float, requests: int = 60, seconds: float = 12.0) -> list[StepRecord]:
    """Return what a simulated engine did that drafts ahead in this share of its steps, in stretches of 20."""
    chance, records = np.random.default_rng(seed), list[StepRecord]()

    def decide(record: StepRecord) -> Orders:
        records.append(record)
        goes_ahead = np.random.default_rng([seed, len(records) // 20]).random() < share
        return Orders({}, (2, 4)[int(chance.integers(2))], goes_ahead=bool(goes_ahead))

    arrivals = np.sort(chance.uniform(0.0, seconds, requests))
    prompts, answers = chance.integers(10, 60, requests), chance.integers(40, 90, requests)
    replay(arrivals, prompts, answers, decide, AHEAD_PROFILE, seed=seed)
    return records


def test_drafting_ahead_is_found_again_from_telemetry_and_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = make_hello(boot_id="simulated", frontier=4)
    first, second, third = (
        write_telemetry(tmp_path / f"{seed}.sqlite", make_ahead_records(seed, share), hello)
        for seed, share in ((1, 0.5), (2, 1.0), (3, 0.0))
    )
    card = Card("target", "drafter", vllm_version="0.32.0")
    serial = msgspec.structs.replace(AHEAD_PROFILE, ahead=None, card=card)
    slower = msgspec.structs.replace(serial.verify, coefficients=tuple(2.0 * c for c in serial.verify.coefficients))
    base = tmp_path / "base.json"
    save_profile(msgspec.structs.replace(serial, verify=slower), base)
    calibrate(CalibrateOptions((first,), tmp_path / "p.json", base=base, json=True), CONSOLE)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = load_profile(tmp_path / "p.json").ahead
    assert found is not None
    assert told["ahead"] == msgspec.to_builtins(found)
    assert told["levels"]["verify"] == pytest.approx(0.5, rel=0.03)  # of the quiet steps
    assert told["levels"]["draft"] == pytest.approx(1.0, rel=0.05)
    assert found.ready == pytest.approx(AHEAD.ready, abs=0.08)
    assert found.hidden == pytest.approx(AHEAD.hidden, abs=0.15)
    assert found.verify_factor == pytest.approx(AHEAD.verify_factor, rel=0.03)
    run_fidelity(FidelityOptions(second, tmp_path / "p.json", runs=4, json=True))
    errors = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert errors["verify_error"]["median"] < 0.03
    assert errors["draft_error"]["median"] < 0.15
    assert errors["tokens_per_s_error"] < 0.05
    blind, profile = tmp_path / "blind.json", load_profile(tmp_path / "p.json")
    measured = read_measured(first)
    steps = ahead_steps(measured, measured.samples)
    few = replace(steps, is_busy=steps.is_busy & (np.cumsum(steps.is_busy) < 9))
    same, (refusal,) = with_ahead(profile, few)
    assert same is profile
    assert "beside which drafts were made ahead" in refusal
    out = StringIO()
    with monkeypatch.context() as never_enough:
        never_enough.setattr("faser.env.calibration.ahead_fit.LEAST_STEPS", 1000)
        calibrate(CalibrateOptions((first,), tmp_path / "few.json", base=base, json=True), Console(file=out, width=200))
    assert "drafting ahead is not fitted: " in out.getvalue()
    assert load_profile(tmp_path / "few.json").ahead is None
    save_profile(msgspec.structs.replace(profile, ahead=Ahead(ready=0.0, acceptance=1.0)), blind)
    run_fidelity(FidelityOptions(second, blind, runs=4, json=True))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["verify_error"]["median"] > 0.1
    calibrate(CalibrateOptions((third,), tmp_path / "serial.json", base=base, json=True), CONSOLE)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ahead"] is None
    with pytest.raises(ModelError, match="drafts made ahead"):
        run_fidelity(FidelityOptions(second, tmp_path / "serial.json", json=True))
    with pytest.raises(ModelError, match="without drafting ahead"):
        calibrate(CalibrateOptions((second,), tmp_path / "q.json", base=base), CONSOLE)


def test_confidences_are_kept_by_the_decision_whose_drafts_they_are_of(tmp_path: Path) -> None:
    """Those of a step's verified drafts belong to what was decided in the step before, for that request."""
    records = [
        msgspec.structs.replace(
            record,
            rows=[
                msgspec.structs.replace(row, confidences=(record.counter * 1e-3 + row.handle * 1e-6,) * row.verified)
                for row in record.rows
            ],
        )
        for record in make_records(4)
    ]
    measured = read_measured(write_telemetry(tmp_path / "t.sqlite", records))
    seen = 0
    for life, request in recorded_requests(measured, load_waiting(measured.path)):
        emitted = 0
        for record in records:
            for row in (row for row in record.rows if row.handle == life.handle):
                if row.verified:
                    draft = request.drafted(emitted)
                    assert draft.confidences == pytest.approx(row.confidences)
                    assert (draft.emitted, draft.handed) == (emitted, row.verified)
                    seen += 1
                emitted += row.emitted
    assert seen > 30


def test_copied_drafts_are_verified_by_the_target_and_nothing_of_the_drafters(tmp_path: Path) -> None:
    """Every second request copies whatever is drafted for it."""
    plain = make_records(12)
    records = [
        msgspec.structs.replace(
            record,
            copied=(copied := tuple(row.handle for row in record.rows if row.handle % 2 == 0)),
            verified_copies=copied,
            drawn_tokens=sum(row.drafted for row in record.rows if row.handle % 2),
        )
        for record in plain
    ]
    before = read_measured(write_telemetry(tmp_path / "plain.sqlite", plain))
    after = read_measured(write_telemetry(tmp_path / "copies.sqlite", records))
    assert list(trials(after)) == [draft for draft in trials(before) if draft.request[1] % 2]
    for name in ("requests", "decode_rows", "draft_tokens", "sampled_rows", "attended_tokens"):
        assert getattr(after.samples, name).tolist() == getattr(before.samples, name).tolist(), name
    drafting = [sum(row.drafted > 0 and row.handle % 2 for row in record.rows) for record in records]
    assert after.samples.drafting_requests.tolist() == drafting
    assert set(ahead_steps(after, after.samples).samples.drafting_requests - drafting) == {0.0}
    for life, request in recorded_requests(after, load_waiting(after.path)):
        is_drafted = life.handle % 2 == 1
        assert any(draft.handed for draft in request.drafts) == is_drafted
        assert any(draft.confidences for draft in request.drafts) == is_drafted
    assert after.copied_tokens == sum(row.accepted for r in plain for row in r.rows if row.handle % 2 == 0) > 50


def test_a_file_from_before_there_were_copies_is_measured_as_before(tmp_path: Path) -> None:
    path = write_telemetry(tmp_path / "old.sqlite", make_records(4))
    before = list(trials(read_measured(path)))
    older(path, BEFORE_COPIES)
    measured = read_measured(path)
    assert list(trials(measured)) == before
    assert measured.copied_tokens == 0


def test_only_the_drafters_own_drafts_follow_one_another(tmp_path: Path) -> None:
    row = RequestRow(1, 3, 2, 2, 2, 0, 2, 3, 50, False)  # all of a draft is accepted, and there is another
    records = [msgspec.structs.replace(record, rows=[row]) for record in make_records(1)[1:6]]
    records[1] = msgspec.structs.replace(records[1], copied=(1,))
    records[2] = msgspec.structs.replace(records[2], verified_copies=(1,))
    measured = read_measured(write_telemetry(tmp_path / "t.sqlite", records))
    chains = ahead_steps(measured, measured.samples).chains
    assert chains.step.tolist() == [0, 3, 4]
    assert chains.was_next_accepted[:2].tolist() == [1.0, 1.0]


def test_fidelity_says_how_many_copied_tokens_it_replays_one_by_one(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = make_records(seed=5)
    place, row = next((place, row) for place, one in enumerate(records) for row in one.rows if row.accepted > 1)
    records[place] = msgspec.structs.replace(records[place], verified_copies=(row.handle,))
    told = write_telemetry(tmp_path / "told.sqlite", records)
    assert run_fidelity(FidelityOptions(told, profile, runs=1)) == 0
    assert f"{row.accepted} copied tokens are replayed" in " ".join(capsys.readouterr().out.split())
    other = write_telemetry(tmp_path / "other.sqlite", make_records(seed=5))
    assert run_fidelity(FidelityOptions(other, profile, runs=1)) == 0
    assert "copied" not in capsys.readouterr().out


def test_a_replay_looks_where_the_recording_did() -> None:
    lengths = [[3] * 41] * 8
    slow_to_look = msgspec.structs.replace(PRUNED_PROFILE, exits=(Exit(15, 0.5, look_s=0.1),))
    asked = ([1e-3 * number for number in range(8)], [10] * 8, [40] * 8, lengths, slow_to_look)
    never, always, late = (
        replay(*asked, pruned=[[number >= first for number in range(41)]] * 8, noise=0.0) for first in (99, 0, 30)
    )
    assert never.duration_s == replay(*asked, noise=0.0).duration_s
    assert always.duration_s - never.duration_s == pytest.approx(0.1 * (always.steps - 1), abs=0.15)
    assert always.drafted == pytest.approx(never.drafted, rel=0.1)
    assert 0.2 < late.duration_s - never.duration_s < 0.6 * (always.duration_s - never.duration_s)


def test_json_ends_with_the_figures(telemetry: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calibrate(CalibrateOptions((telemetry,), tmp_path / "p.json", json=True, held_out=False), CONSOLE)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"verify", "draft", "host", "acceptance"} <= set(found)
    assert found["verify"]["cells"] >= 15


def test_a_base_profile_keeps_its_shape_and_takes_on_the_level_of_the_telemetry(profile: Path, tmp_path: Path) -> None:
    records = [
        msgspec.structs.replace(record, step_s=1.3 * (record.step_s - record.draft_s) + record.draft_s)
        for record in make_records(12)
    ]
    slower = write_telemetry(tmp_path / "slower.sqlite", records)
    calibrate(CalibrateOptions((slower,), tmp_path / "p.json", base=profile), CONSOLE)
    before, after = (load_profile(path) for path in (profile, tmp_path / "p.json"))
    assert np.divide(
        after.verify.coefficients,
        before.verify.coefficients,
        where=np.array(before.verify.coefficients) > 0,
        out=np.full(len(before.verify.coefficients), 1.3),
    ) == pytest.approx(1.3, rel=0.03)
    assert sum(after.draft.coefficients) == pytest.approx(sum(before.draft.coefficients), rel=0.03)


def test_a_base_profile_may_keep_its_costs_altogether(profile: Path, tmp_path: Path) -> None:
    slower = [msgspec.structs.replace(record, step_s=2.0 * record.step_s) for record in make_records(12)]
    telemetry = write_telemetry(tmp_path / "slower.sqlite", slower)
    calibrate(CalibrateOptions((telemetry,), tmp_path / "p.json", base=profile, keeps_costs=True), CONSOLE)
    before, after = (load_profile(path) for path in (profile, tmp_path / "p.json"))
    assert (after.verify, after.draft, after.host) == (before.verify, before.draft, before.host)
    assert after.acceptance.source == "slower.sqlite"
    with pytest.raises(UsageError, match="--keep-costs without --base"):
        CalibrateOptions((telemetry,), tmp_path / "p.json", keeps_costs=True)


def test_the_script_behind_the_documents_fits_and_replays(telemetry: Path, tmp_path: Path) -> None:
    script = Path(faser.__file__).parent / "benchmarks" / "fidelity.py"
    made = {"profile": tmp_path / "p.json", "json": tmp_path / "figures.json"}
    flags = [part for name, path in made.items() for part in (f"--{name}", str(path))]
    hello = make_hello(boot_id="simulated", frontier=4)
    both, ahead = (
        write_telemetry(tmp_path / f"{seed}.sqlite", make_ahead_records(seed, share, requests, 2.0 * requests), hello)
        for seed, share, requests in ((1, 0.5, 100), (2, 1.0, 20))
    )
    runs = {"answers": telemetry, "level": telemetry, "run": telemetry, "repeat": telemetry}
    runs |= {"ahead-survey": both, "ahead": ahead}
    flags += [part for name, path in runs.items() for part in (f"--{name}", str(path))]
    command = [sys.executable, str(script), str(telemetry), *flags, "--ahead-repeat", str(ahead)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(made["json"].read_text())
    assert load_profile(made["profile"]).name == "embedded"
    assert told["calibration"]["verify"]["cells"] > 8
    assert told["closed_loop"]["repeat_spread"] == {"ttft": 0.0, "tpot": 0.0, "e2e": 0.0, "tokens_per_s": 0.0}
    assert set(told["published"]) == set(SHIPPED)
    assert told["closed_loop"]["levels"] == pytest.approx({"verify": 1.0, "draft": 1.0, "host": 1.0}, abs=0.05)
    assert told["ahead"]["calibration"]["ahead"]["ready"] == pytest.approx(AHEAD.ready, abs=0.1)
    assert told["ahead"]["closed_loop"]["repeat_spread"]["tpot"] == 0.0


def test_fidelity_replays_another_run_of_the_same_engine(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_telemetry(tmp_path / "other.sqlite", make_records(seed=5))
    again = write_telemetry(tmp_path / "again.sqlite", make_records(seed=6))
    assert run_fidelity(FidelityOptions(other, profile, again, runs=4, json=True)) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found) >= {"step_time_error", "draft_error", "verify_error", "repeat_spread", *ERRORS}
    assert found["verify_error"]["median"] < 0.03
    assert found["draft_error"]["p90"] < 0.1
    assert all(found[name] < 0.25 for name in ERRORS), found
    assert set(found["repeat_spread"]) == {"ttft", "tpot", "e2e", "tokens_per_s"}


def test_time_spent_waiting_for_a_core_is_taken_out_of_the_steps(telemetry: Path) -> None:
    measured = read_measured(telemetry)
    end_s = measured.steps.time_s
    times = [float(end_s[0] - 1.0), *map(float, end_s), float(end_s[-1] + 1.0)]
    waiting = Waiting(times, [0.002 * number for number in range(len(times))])
    clean = freed(measured.samples, measured.steps, waiting)
    lost = (measured.samples.verify_s - clean.verify_s) + (measured.samples.draft_s - clean.draft_s)
    assert np.nanmean(lost[5:]) == pytest.approx(0.002, rel=0.3)
    assert np.isfinite(clean.verify_s).mean() > 0.9


def test_a_recorded_request_did_not_live_while_its_engine_waited_for_a_drafter_without_a_core(telemetry: Path) -> None:
    measured = read_measured(telemetry)
    ends_s = measured.steps.time_s
    plain = [life for life, _ in recorded_requests(measured, Waiting([], []))]
    times = [float(ends_s[0] - 1.0), *map(float, ends_s), float(ends_s[-1] + 1.0)]
    nobody, drafter = [0.0] * len(times), [0.002 * number for number in range(len(times))]
    alone = [life for life, _ in recorded_requests(measured, Waiting(times, nobody))]
    waited = [life for life, _ in recorded_requests(measured, Waiting(times, nobody, drafter))]
    spans = [sum(life.end_s - life.arrival_s for life in lives) for lives in (plain, alone, waited)]
    assert spans[1] == pytest.approx(spans[0])
    assert spans[2] < 0.999 * spans[1]


def test_a_clock_stands_still_while_the_engine_waits() -> None:
    waiting = Waiting([10.0, 11.0, 12.0], [5.0, 5.0, 5.8])
    assert waiting.undisturbed(np.array([9.0, 10.5, 12.0])) == pytest.approx([9.0, 10.5, 11.2])
    late = Waiting([10.0, 10.6, 11.0, 11.1], [0.0, 0.0, 0.0, 0.5])  # waited from 10.6 on, counted at 11.1
    assert late.undisturbed(np.array([10.5, 10.8, 11.1])) == pytest.approx([10.5, 10.6, 10.6])
    assert (np.diff(late.undisturbed(np.linspace(9.0, 12.0, 100))) >= -1e-12).all()
    assert Waiting([], []).undisturbed(np.array([3.0])) == pytest.approx([3.0])


def test_steps_that_waited_most_of_their_time_or_that_nobody_watched_are_left_out(telemetry: Path) -> None:
    measured = read_measured(telemetry)
    end_s = measured.steps.time_s
    middle = float(end_s[200])
    waiting = Waiting([float(end_s[0]) - 1.0, float(end_s[99]), float(end_s[100]), middle], [0.0, 0.0, 0.9, 0.9])
    clean = freed(measured.samples, measured.steps, waiting)
    assert np.isnan(clean.verify_s[100])
    assert np.isnan(clean.verify_s[201:]).all()
    assert np.isfinite(clean.verify_s[1:99]).all()
    assert freed(measured.samples, measured.steps, Waiting([], [])) is measured.samples


def test_waiting_times_beside_a_file_survive(tmp_path: Path) -> None:
    waiting = Waiting([1.0, 2.0], [0.0, 0.5])
    save_waiting(waiting, tmp_path / "t.sqlite")
    assert load_waiting(tmp_path / "t.sqlite") == waiting
    assert load_waiting(tmp_path / "none.sqlite").time_s == []


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({"step_s": 0.0}, "step 40: step_s is 0"),
        ({"draft_s": -1.0}, "step 40: draft_s is -1"),
        ({"verify_s": float("inf")}, "step 40: verify_s is inf"),
        ({"time_s": 1.0}, "step 40: time_s goes back"),
        ({"rows": []}, "step 40: no requests"),
    ],
)
def test_times_that_cannot_be_are_refused_by_row(tmp_path: Path, change: dict[str, object], seen: str) -> None:
    records = make_records(6)
    records[39] = msgspec.structs.replace(records[39], **change)
    path = write_telemetry(tmp_path / "bad.sqlite", records)
    with pytest.raises(StoreError, match=rf"bad\.sqlite, engine 1, {seen}"):
        calibrate(CalibrateOptions((path,), tmp_path / "p.json"), CONSOLE)
    assert not list(tmp_path.glob("*.json"))


def foreign(path: Path) -> None:
    database = sqlite3.connect(path)
    database.execute("CREATE TABLE sheep (id)")
    database.commit()
    database.close()


def truncated(path: Path) -> None:
    whole = write_telemetry(path.with_name("whole.sqlite"), make_records(12))
    database = sqlite3.connect(whole)
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()
    path.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])


@pytest.mark.parametrize(
    ("make", "seen"),
    [
        (lambda path: None, "no telemetry file"),
        (lambda path: path.write_bytes(b""), "another program"),
        (lambda path: path.write_text("boot,step\n1,2\n" * 100), "cannot be read"),
        (foreign, "another program"),
        (truncated, "bad.sqlite"),
        (lambda path: write_telemetry(path, []), "holds no steps"),
    ],
)  # fmt: skip
def test_files_that_are_no_telemetry_are_refused_by_name_and_nothing_is_written(
    tmp_path: Path, make: object, seen: str
) -> None:
    path = tmp_path / "bad.sqlite"
    make(path)  # type: ignore[operator]
    for refused in (
        lambda: calibrate(CalibrateOptions((path,), tmp_path / "p.json"), CONSOLE),
        lambda: run_fidelity(FidelityOptions(path, tmp_path / "p.json")),
    ):
        with pytest.raises(StoreError, match=seen):
            refused()
    assert not list(tmp_path.glob("*.json"))


def test_another_model_or_version_is_refused(telemetry: Path, profile: Path, tmp_path: Path) -> None:
    for change, seen in (({"model": "/cache/sheep"}, "model sheep|sheep"), ({"vllm_version": "0.33.0"}, "0.33.0")):
        other = write_telemetry(tmp_path / f"{seen[:4]}.sqlite", make_records(12), make_hello(**change))
        with pytest.raises(ModelError, match=seen):
            run_fidelity(FidelityOptions(other, profile))
        with pytest.raises(StoreError, match=seen):
            calibrate(CalibrateOptions((telemetry, other), tmp_path / "p.json"), CONSOLE)
    assert not list(tmp_path.glob("*.json"))


def test_acceptance_can_come_from_a_published_trace(telemetry: Path, profile: Path, tmp_path: Path) -> None:
    options = CalibrateOptions((telemetry,), tmp_path / "p.json", base=profile, acceptance="sentiment_analysis__eagle")
    assert calibrate(options, CONSOLE) == 0
    found = load_profile(tmp_path / "p.json").acceptance
    assert (found.k_max, found.source) == (4, "sentiment_analysis__eagle")
    with pytest.raises(UsageError, match=r"sheep\.jsonl: cannot be read"):
        calibrate(CalibrateOptions((telemetry,), tmp_path / "q.json", acceptance="sheep.jsonl"), CONSOLE)


def test_a_shipped_profile_goes_by_its_name() -> None:
    assert load_profile_or_fail(Path("embedded")) == shipped_profile("embedded")
    with pytest.raises(ModelError, match=r"sheep: cannot be read"):
        load_profile_or_fail(Path("sheep"))


def test_too_little_telemetry_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    path = write_telemetry(tmp_path / "short.sqlite", make_records(1))
    with pytest.raises(ModelError, match=r"short\.sqlite: .* kinds of steps"):
        calibrate(CalibrateOptions((path,), tmp_path / "p.json"), CONSOLE)
    assert not list(tmp_path.glob("*.json"))


def test_what_was_measured_stays_where_it_is_too_little_for_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_short(_: ProfileOptions, telemetry: Path, __: Console) -> None:
        write_telemetry(telemetry, make_records(1))

    output = tmp_path / "p.json"
    monkeypatch.setattr("faser.controller.calibrate.profile.measure", too_short)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ModelError, match="kinds of steps") as refused:
        run_profile(ProfileOptions(output=output))
    (kept,) = tmp_path.glob("faser-profile-*/telemetry.sqlite")
    assert str(kept) in str(refused.value)
    assert f"stays in {kept}" in capsys.readouterr().err.replace("\n", "")

    def stopped(_: ProfileOptions, telemetry: Path, __: Console) -> None:
        telemetry.touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("faser.controller.calibrate.profile.measure", stopped)
    assert run_profile(ProfileOptions(output=output)) == 130
    assert list(tmp_path.iterdir()) == [kept.parent]

    def no_engine(_: ProfileOptions, telemetry: Path, __: Console) -> None:
        telemetry.with_suffix(".engine.log").write_text("why")
        raise EngineError("vLLM ended")

    shutil.rmtree(kept.parent)
    monkeypatch.setattr("faser.controller.calibrate.profile.measure", no_engine)
    with pytest.raises(EngineError):
        run_profile(ProfileOptions(output=output))
    assert [path.name for path in tmp_path.glob("faser-profile-*/*")] == ["telemetry.engine.log"]


def test_a_smoke_run_is_fitted_to_steps_that_never_came_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(_: ProfileOptions, telemetry: Path, __: Console) -> None:
        write_telemetry(telemetry, make_records(3))

    monkeypatch.setattr("faser.controller.calibrate.profile.measure", short)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ModelError, match="kinds of steps with at least 3 repeats"):
        run_profile(ProfileOptions(output=tmp_path / "p.json"))
    assert run_profile(ProfileOptions(output=tmp_path / "p.json", smoke=True)) == 0


def test_a_profile_that_cannot_be_kept_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("faser.controller.calibrate.profile.measure", lambda *_: pytest.fail("it was measured"))
    same, none = tmp_path / "p.json", tmp_path / "none" / "t.sqlite"
    for telemetry, seen in ((same, "telemetry file itself"), (none, "--telemetry .* no folder")):
        with pytest.raises(UsageError, match=seen):
            run_profile(ProfileOptions(output=same, telemetry=telemetry))
    assert not list(tmp_path.iterdir())


def test_a_profile_goes_where_a_link_points_and_into_a_pipe(telemetry: Path, tmp_path: Path) -> None:
    target, link, pipe = (tmp_path / name for name in ("target.json", "link.json", "pipe"))
    link.symlink_to(target)
    assert calibrate(CalibrateOptions((telemetry,), link, held_out=False), CONSOLE) == 0
    assert link.is_symlink()
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        assert calibrate(CalibrateOptions((telemetry,), pipe, held_out=False), CONSOLE) == 0
        assert reader.stdout is not None
        assert reader.stdout.read() == target.read_bytes()
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    "damage",
    [
        "DROP VIEW request_summary",
        "UPDATE events SET time_s = 'x' WHERE kind = 'finish'",
        "UPDATE events SET tokens = 1e12 WHERE kind = 'arrival'",
        "UPDATE steps SET caught_up = 9223372036854775807",
        "UPDATE steps SET running = -3",
    ],
)
def test_damaged_requests_and_counts_are_refused(damage: str, profile: Path, tmp_path: Path) -> None:
    path = write_telemetry(tmp_path / "bad.sqlite", make_records(12))
    with closing(sqlite3.connect(path)) as database:
        database.execute(damage)
        database.commit()
    with pytest.raises(StoreError, match=r"^[^\n]*bad\.sqlite[^\n]*$"):
        run_fidelity(FidelityOptions(path, profile))


def test_the_telemetry_is_never_overwritten(telemetry: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="telemetry file itself"):
        CalibrateOptions((telemetry,), telemetry)
    with pytest.raises(UsageError, match="is a folder"):
        CalibrateOptions((telemetry,), tmp_path)

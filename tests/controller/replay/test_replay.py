"""Replay: a recorded run decides the same bytes again; estimates for another policy are right, or refused."""

from __future__ import annotations

import random
import re
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from faser.controller.cli.replay import ReplayOptions, run_replay
from faser.controller.config import Config, ObjectivesConfig, PolicyConfig
from faser.controller.daemon.daemon import Daemon
from faser.controller.errors import StoreError, UsageError
from faser.controller.link.ask import ask, order
from faser.controller.link.status_orders import Switch
from faser.controller.replay.offpolicy import Sample, estimate
from faser.controller.replay.replay import Replayer, replay
from faser.controller.telemetry.maintenance import check
from faser.controller.telemetry.retention import NS_PER_HOUR
from faser.controller.telemetry.schema import event_row, open_for_reading
from faser.controller.telemetry.sessions import EVENT_CELLS, read_event, read_sessions
from faser.engine_adapter.protocol import MAX_DRAFT_LENGTH, ActionSet, RequestEvent, RequestRow, StepRecord
from faser.models.policies.policy import PolicyError

from ..older_files import BEFORE_COPIES, older

REQUESTS = 12


class Engine:
    """A fake engine that does what it is asked: drafts the lengths of its lease, accepts by chance."""

    def __init__(self, fake: Any, make_record: Any, seed: int = 1, copies: float = 0.0) -> None:
        self.fake, self._make, self._mix = fake, make_record, random.Random(seed)
        self._copies = copies  # share of drafts that it copies, longer and surer than the drafter's
        self.waiting: dict[int, int] = {}  # handle -> draft that waits for verification
        self.copied: tuple[int, ...] = ()  # whose draft that is a copy
        self.lease: ActionSet | None = None
        self.start = 1

    def step(self, counter: int) -> StepRecord:
        asked = dict(zip(self.lease.handles, self.lease.lengths, strict=True)) if self.lease else {}
        default = self.lease.default_length if self.lease else 0
        events = [] if counter > 1 else [
            RequestEvent("arrival", handle, 0.0, 50, f"req-{handle}") for handle in range(1, REQUESTS + 1)
        ]  # fmt: skip
        if counter % 40 == 0:  # one leaves, one comes
            events += [RequestEvent("finish", self.start, counter * 0.01, 30)]
            self.start += 1
            events += [RequestEvent("arrival", self.start + REQUESTS - 1, 0.0, 50, f"req-{self.start + REQUESTS - 1}")]
        rows, verified_copies, copied = [], self.copied, list[int]()
        for handle in range(self.start, self.start + REQUESTS):
            draft, length = self.waiting.get(handle, 0), asked.get(handle, default)
            chance = 0.95 if handle in verified_copies else 0.7
            accepted = next((k for k in range(draft) if self._mix.random() > chance), draft)
            confidences = tuple(self._mix.random() for _ in range(draft))
            if is_copy := bool(self._copies) and self._mix.random() < self._copies:
                copied.append(handle)
            handed = 6 if is_copy else length
            rows.append(RequestRow(handle, 1 + draft, length, handed, draft, 0, accepted, accepted + 1, 60 + counter,
                                   False, confidences))  # fmt: skip
            self.waiting[handle] = handed
        self.copied = tuple(copied)
        record: StepRecord = msgspec.structs.replace(
            self._make("boot-1", counter, 1, self.lease),
            copied=self.copied, verified_copies=tuple(row.handle for row in rows if row.handle in verified_copies),
            events=events, rows=rows, decode_tokens=REQUESTS, draft_tokens=sum(row.verified for row in rows),
            step_s=0.01 + self._mix.random() * 1e-3,
        )  # fmt: skip
        return record

    def run(self, steps: range) -> None:
        for counter in steps:
            self.fake.send(self.step(counter))
            self.lease = self.fake.action()


@pytest.fixture
def run(start_daemon: Any, make_engine: Any, make_record: Any, config: Config) -> Callable[..., Path]:
    """Return a function that records a run: 150 steps active, then as many in the mode that is given."""

    def record(
        spec: str = "price", mode: str = "active", steps: int = 300, epsilon: float = 0.5, copies: float = 0.0
    ) -> Path:
        settings = replace(config.mode, canary_share=0.8, canary_epsilon=epsilon)
        daemon = start_daemon(policy=PolicyConfig(spec), mode=settings)
        fake = make_engine()
        fake.hello(copy_max=6 if copies > 0.0 else 0)
        engine = Engine(fake, make_record, copies=copies)
        engine.run(range(1, steps // 2))
        order(config.link, Switch("*", mode))  # type: ignore[arg-type]
        if mode == "advisory":
            for counter in range(steps // 2, steps):
                fake.send(engine.step(counter))
                while ask(config.link).engines[0].records < counter:  # one at a time: each is decided on
                    pass
        else:
            engine.run(range(steps // 2, steps))
        daemon.stop()
        return config.store.path

    return record


@pytest.mark.parametrize(("spec", "mode"), [("price", "active"), ("price", "canary"), ("price", "advisory"),
                                            ("price:history", "canary"), ("fixed:2", "active")])  # fmt: skip
def test_every_decision_comes_out_as_the_same_bytes_again(run: Any, spec: str, mode: str) -> None:
    report = replay(run(spec, mode))
    assert report.differing == []
    assert (report.records, report.sessions, report.unrecorded) == (299, 1, 0)
    assert report.identical == report.decisions > (150 if mode == "advisory" else 290)


def test_objectives_and_who_was_alive_are_lived_again(
    start_daemon: Any, make_engine: Any, make_record: Any, config: Config
) -> None:
    daemon = start_daemon(policy=PolicyConfig("price"), objectives=ObjectivesConfig("slow:0:9000:"))
    engine = make_engine()
    roster = [RequestEvent("arrival", 1, -1.0, 90, "r1", 7, tpot_ms=20.0), RequestEvent("arrival", 99, 0.0, 90, "r99")]
    engine.hello(roster=roster)
    for counter in range(2, 6):
        engine.send(make_record("boot-1", counter))
        engine.action()
    (lived,) = daemon.daemon._sessions.values()
    daemon.stop()
    with closing(open_for_reading(config.store.path)) as database:
        session = list(read_sessions(database))[-1]
    replayer = Replayer(session, None)
    for recorded in session.steps:
        replayer.step(recorded)
    assert replayer._state.handles().tolist() == [1, 99, 2, 3, 4]
    for name in ("arrival_s", "first_token_s", "ttft_s", "tpot_s"):
        assert replayer._state.requests.column(name).tolist() == lived.state.requests.column(name).tolist()
    assert replayer._state.requests.column("ttft_s").tolist()[:2] == [float("inf"), 9.0]
    assert replayer._state.requests.column("tpot_s").tolist()[0] == 0.02
    assert replay(config.store.path).differing == []


def test_a_run_that_was_reloaded_is_replayed_with_what_was_in_force(
    make_record: Any, make_engine: Any, config: Config
) -> None:
    changed = replace(config, policy=PolicyConfig("price"), lease=replace(config.lease, steps=7))
    daemon = Daemon(config, lambda: changed)
    loop = threading.Thread(target=daemon.run)
    loop.start()
    fake = make_engine()
    fake.hello()
    engine = Engine(fake, make_record)
    engine.run(range(1, 50))
    daemon.reload()
    while ask(config.link).policy != "price":
        pass
    engine.run(range(50, 100))
    daemon.stop()
    loop.join()
    daemon.close()
    report = replay(config.store.path)
    assert (report.identical, report.decisions, report.differing) == (99, 99, [])
    with closing(open_for_reading(config.store.path)) as database:
        (session,) = read_sessions(database)
    assert [step.settings.lease_steps for step in session.steps[:1] + session.steps[-1:]] == [32, 7]


def test_a_clock_that_is_set_back_and_forth_changes_nothing(
    make_record: Any, make_engine: Any, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = replace(config, policy=PolicyConfig("fixed:4"), lease=replace(config.lease, steps=7))
    daemon = Daemon(config, lambda: changed)
    apart_h = [0]
    monkeypatch.setattr(daemon._ledger.clock, "_read_ns", lambda: time.time_ns() + apart_h[0] * NS_PER_HOUR)
    loop = threading.Thread(target=daemon.run)
    loop.start()
    fake = make_engine()
    fake.hello()
    while not ask(config.link).engines:
        pass
    apart_h[0] = -1
    engine = Engine(fake, make_record)
    engine.run(range(1, 20))
    daemon.reload()
    while ask(config.link).policy != "fixed:4":
        pass
    apart_h[0] = -2
    engine.run(range(20, 40))
    apart_h[0] = 24
    engine.run(range(40, 60))
    daemon.stop()
    loop.join()
    daemon.close()
    report = replay(config.store.path)
    assert (report.sessions, report.partial_sessions) == (1, 0)
    assert (report.identical, report.decisions, report.differing) == (59, 59, [])


def test_a_session_with_copies_is_replayed_with_them_and_tells_them_apart(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run(copies=0.4)
    report = replay(path)
    assert report.identical == report.decisions > 290
    with closing(open_for_reading(path)) as database:
        (session,) = read_sessions(database)
        totals = database.execute(
            "SELECT sum(verified - verified_copies), sum(accepted - accepted_copies), sum(verified_copies),"
            " sum(accepted_copies) FROM steps"
        ).fetchone()
    assert session.hello.copy_max
    assert sum(map(bool, (step.record.copied for step in session.steps))) > 250
    drafter, copies = report.sources["drafter"], report.sources["copies"]
    assert (drafter.verified, drafter.accepted, copies.verified, copies.accepted) == totals
    assert copies.accepted / copies.verified > 0.75 > drafter.accepted / drafter.verified > 0.0
    assert run_replay(ReplayOptions(path)) == 0
    shown = capsys.readouterr().out
    assert f"{copies.accepted} of {copies.verified} verified tokens accepted" in shown


def test_copies_that_are_taken_for_the_drafters_change_decisions(run: Any) -> None:
    path = run(copies=0.4)
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("UPDATE steps SET copies = NULL")
        raw.commit()
    report = replay(path)
    assert not report.is_exact()
    assert report.identical < 0.9 * report.decisions


def test_a_file_from_before_there_were_copies_is_replayed(run: Any) -> None:
    path = run()
    older(path, BEFORE_COPIES)
    report = replay(path)
    assert report.identical == report.decisions > 290
    assert set(report.sources) == {"drafter"}


def test_a_record_that_was_changed_is_noticed(run: Any) -> None:
    path = run("price")
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("UPDATE steps SET step = step + 1 WHERE counter = 100")
        raw.commit()
    report = replay(path)
    assert report.differing == ["boot-1 record 100, decision 100"]
    assert not report.is_exact()
    assert report.identical == 298


def test_whatever_stands_in_a_cell_a_damaged_file_is_refused_in_one_line(run: Any) -> None:
    path = run("fixed:2", steps=20)
    damage: list[tuple[str, str, object]] = [
        ("steps", "counter", "many"), ("steps", "received_ns", b"\xff"), ("steps", "step_s", 1e308),
        ("steps", "kv_usage", "x"), ("steps", "waiting", -1), ("steps", "rows", b"\xff" * 9),
        ("steps", "copies", b"\xff" * 9), ("steps", "copies", "text"),
        ("steps", "decision_default_length", None), ("steps", "decision_mode", "loud"),
        ("steps", "decision_lengths", "text"), ("events", "priority", "high"), ("events", "time_s", b""),
        ("events", "received_ns", "now"), ("runs", "epoch", "x"), ("runs", "config", None), ("engines", "hello", None),
    ]  # fmt: skip
    for table, column, value in damage:
        mutant = path.with_name("mutant.sqlite")
        shutil.copy(path, mutant)
        with closing(sqlite3.connect(mutant)) as raw:
            raw.execute("PRAGMA ignore_check_constraints = ON")
            raw.execute(f"UPDATE OR IGNORE {table} SET {column} = ?", [value])
            raw.commit()
        with pytest.raises(StoreError):
            replay(mutant, "fixed:3")
        if table == "steps":
            assert len(check(mutant).faults) == 19, column
    assert check(path).faults == []


def test_what_retention_left_is_replayed_but_not_compared(run: Any) -> None:
    path = run("price")
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("DELETE FROM steps WHERE counter < 50")
        raw.commit()
    report = replay(path)
    assert (report.partial_sessions, report.partial, report.identical) == (1, report.decisions, 0)
    assert report.is_exact()


def test_another_policy_is_asked_on_the_same_states(run: Any) -> None:
    path = run("fixed:2")
    report = replay(path, "fixed:5")
    assert report.identical == report.decisions
    assert (report.agreement, set(report.alternative_lengths)) == (0.0, {5})
    assert replay(path, "fixed:2").agreement == 1.0
    assert report.off_policy is not None
    assert (report.off_policy.samples, report.off_policy.accepted) == (0, None)
    with pytest.raises(PolicyError):
        replay(path, "nonsense")
    with pytest.raises(UsageError, match="add --policy"):
        ReplayOptions(path, is_counterfactual=True)


def test_an_estimate_from_a_canary_is_near_what_the_policy_earns(
    run: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # a table's line is one line
    path = run("fixed:2", "canary", 500, 0.6)
    report = replay(path, "fixed:4")
    off = report.off_policy
    assert off is not None
    assert off.refusal == ""
    truth = sum(0.7**k for k in range(1, 5))  # tokens accepted of a draft of 4
    assert off.accepted is not None
    assert off.rows is not None
    assert abs(off.accepted.mean - truth) < 2.5 * off.accepted.half_width < 1.0
    assert off.rows.mean == pytest.approx(4.0, abs=0.05)
    assert off.rows_logged is not None
    assert off.rows_logged.mean < 3.5
    refused = replay(path, "fixed:4", floor=1e5).off_policy
    assert refused is not None
    assert refused.accepted is None
    assert "effective samples" in refused.refusal
    page = path.with_name("replay.html")
    assert run_replay(ReplayOptions(path, "fixed:4", report=page)) == 0
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if "tokens accepted per request and step" in line]
    html = page.read_text()
    assert line.split("│")[3].strip() in html, "the same estimate stands in the report"
    assert f"Estimated from {off.effective_samples:.0f} effective samples" in html
    assert run_replay(ReplayOptions(path, "fixed:4", report=page, floor=1e5)) == 0
    html = page.read_text()
    assert f"No estimate: {refused.refusal}." in html
    assert f"fixed:4 {off.accepted.mean:.3f}" not in html, "what is refused is not shown"
    assert f"{off.coverage:.1%}" in html


def test_the_estimator_is_right_on_average_and_its_interval_covers() -> None:
    truth, covered, means = 2.0, 0, []
    for seed in range(100):
        mix = random.Random(seed)
        samples = []
        for request in range(60):
            quality = mix.gauss(0.0, 0.5)
            for _ in range(20):
                is_match = mix.random() < 0.2
                earned = truth + quality + mix.gauss(0.0, 1.0) if is_match else 9.0
                samples.append(Sample(request, 0.2 if is_match else 0.8, is_match, earned, 4))  # type: ignore[arg-type]
        result = estimate(samples)
        assert result.accepted is not None
        means.append(result.accepted.mean)
        covered += abs(result.accepted.mean - truth) < result.accepted.half_width
    assert sum(means) / 100 == pytest.approx(truth, abs=0.03)
    assert covered >= 88


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([], "0 effective samples"),
        ([Sample(n, 0.5, False, 1, 1) for n in range(500)], "0 effective samples"),
        ([Sample(n, 0.5, True, 1, 1) for n in range(99)], "99 effective samples"),
        ([Sample(n, 0.9, True, 1, 1) for n in range(99)] + [Sample(1, 1e-4, True, 1, 1)], "1 effective samples"),
        ([Sample(n % 3, 0.5, True, 1, 1) for n in range(300)], "3 requests"),
    ],
)
def test_too_little_is_refused_not_shown(samples: list[Sample], reason: str) -> None:
    result = estimate(samples)
    assert reason in result.refusal
    assert result.accepted is None


def test_the_report_is_one_file_that_says_what_was_found_and_what_was_not_asked(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run("price")
    page = path.with_name("replay.html")
    assert run_replay(ReplayOptions(path, "fixed:2", report=page)) == 0
    html, printed = page.read_text(), capsys.readouterr().out
    assert f"report: {page}" in printed
    assert "All 299 decisions that can be compared came out as the same bytes (100 %)." in html
    assert "No estimate: the file has no canary decisions" in html
    assert "Not asked for: add --counterfactual." in html
    found = replay(path, "fixed:2")
    for length, count in found.lengths.items():
        assert re.search(rf"<th>{length}</th><td class=\"number\">{count}</td>", html)
    assert f"The same length in {found.agreement:.1%} of request-decisions." in html
    outside = [
        link
        for link in re.findall(r"""(?:src|href)="([^"]*)|url\(([^)]*)""", html)
        if not "".join(link).startswith("#")
    ]
    assert outside == []
    pictures = re.findall(r"<svg.*?</svg>", html, re.S)
    assert len(pictures) == 2
    for picture in pictures:
        assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert run_replay(ReplayOptions(path, report=page)) == 0, "without a policy it says so"
    assert "None was asked: add --policy NAME." in page.read_text()


def test_a_report_of_decisions_that_differ_says_so_and_rounds_down(run: Any) -> None:
    path = run("price")
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("UPDATE steps SET step = step + 1 WHERE counter = 100")
        raw.commit()
    page = path.with_name("replay.html")
    assert run_replay(ReplayOptions(path, report=page)) == 1
    assert "298 of 299 decisions came out as the same bytes (99.6 %)." in page.read_text()
    assert "boot-1 record 100, decision 100" in page.read_text()


def test_a_report_never_replaces_its_input_and_is_whole_or_absent(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run("price", steps=20)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="is the input itself"):
        ReplayOptions(path, report=path)
    with pytest.raises(StoreError, match="cannot be written"):
        run_replay(ReplayOptions(path, report=path.with_name("no") / "folder" / "a.html"))
    assert path.read_bytes() == before


@pytest.mark.parametrize("most", [0, 3, MAX_DRAFT_LENGTH])
def test_a_clients_limit_comes_back_out_of_the_file(most: int) -> None:
    event = RequestEvent("arrival", 5, 1.0, 90, "r", 2, most)
    row = event_row(event, 1, 1)
    assert read_event(*(row[name] for name in EVENT_CELLS.split(", "))) == event

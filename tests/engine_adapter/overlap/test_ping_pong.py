"""Groups on a scheduler's requests: who is kept out of a step, which draft may still come, when it is worth it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from faser.engine_adapter.gate import EVIDENCE_STEPS
from faser.engine_adapter.overlap import splits
from faser.engine_adapter.overlap.groups import GroupTurn
from faser.engine_adapter.overlap.ping_pong import PingPong, chosen_groups
from faser.engine_adapter.settings import load_settings
from faser.engine_adapter.steering.orders import StepReport

LENGTH = 3


@dataclass
class Request:
    request_id: str
    num_output_tokens: int = 5
    is_prefill_chunk: bool = False
    num_output_placeholders: int = 0  # tokens that are under way, under asynchronous scheduling
    spec_token_ids: list[int] = field(default_factory=list)
    next_decode_eligible_step: int = 0


@dataclass
class Engine:
    """Steps of an engine: those are scheduled whom nothing keeps out."""

    groups: PingPong
    running: list[Request]
    step: int = 0
    flying: list[Request] = field(default_factory=list)  # their drafts are under way

    def run(self, is_ready: bool = True, time_s: float = 1.0, verify_s: float = 1.0, draft_s: float = 1.0) -> set[str]:
        self.groups.deal(self.running, self.step + 1)
        self.step += 1
        ready = [r for r in self.running if self.step >= r.next_decode_eligible_step]
        scheduled = {r.request_id: 1 + len(r.spec_token_ids) for r in ready}
        come = self.flying if self.groups.is_deferred or self.flying else []
        self.flying = ready if self.groups.is_deferred else []
        for request in ready:  # as vLLM does: a draft is there until it is scheduled, and again when it has come
            request.spec_token_ids = []
        for request in come if self.groups.is_deferred else [*come, *ready]:
            request.spec_token_ids = [0] * LENGTH
        self.groups.latch(self.step, dict.fromkeys(scheduled, LENGTH))
        report = StepReport(verify_s=verify_s, draft_s=draft_s, is_drafter_ready=is_ready)
        self.groups.note(self.step, scheduled, len(scheduled), time_s, report)
        return set(scheduled)


@dataclass
class SplitEngine(Engine):
    """The same, where a lease asks for splits."""

    splits: list[int | None] = field(default_factory=list)  # in force, of each step

    def run_asked(self, split: int, **named: Any) -> set[str]:
        scheduled = self.run(**named)
        self.splits.append(self.groups.in_force(split))
        return scheduled


def split_engine(mode: str = "always") -> SplitEngine:
    return SplitEngine(PingPong(mode, by_split=True), [Request(name) for name in "abcd"])


def engine(mode: str = "always", names: str = "abcd") -> Engine:
    return Engine(PingPong(mode), [Request(name) for name in names])


ALL = set("abcd")


def test_groups_take_turns_once_the_process_is_ready() -> None:
    one = engine()
    assert one.run(is_ready=False) == ALL
    assert one.run() == ALL
    first, second, third = one.run(), one.run(), one.run()
    assert first | second == ALL
    assert not first & second
    assert third == first
    assert one.groups.is_deferred


@pytest.mark.parametrize("requests", [2, 4, 8, 16])
def test_equal_requests_stay_in_two_equal_groups(requests: int) -> None:
    """Also while the drafts of one of them are under way, and its requests have none."""
    one = engine(names="abcdefghijklmnop"[:requests])
    one.run()
    one.groups.pace.note(verify_s=0.4, rows=80, draft_s=0.1, tokens=26)
    parties = [frozenset(one.run()) for _ in range(12)]
    assert set(parties[0::2]) == {parties[0]}
    assert set(parties[1::2]) == {parties[1]}
    assert len(parties[0]) == len(parties[1]) == requests // 2


def test_steps_between_one_group_and_two_are_no_evidence() -> None:
    """Half of the requests are verified in each of them, and in the last one all drafts are waited for."""
    one, told = engine("auto"), list[tuple[bool, int]]()
    inherited = one.groups._gate.note

    def note(requests: int, has_used: bool, time_s: float, tokens: int) -> None:
        told.append((has_used, tokens))
        inherited(requests, has_used, time_s, tokens)

    one.groups._gate.note = note  # type: ignore[method-assign]
    for _ in range(EVIDENCE_STEPS):
        one.run()
    assert set(told) == {(False, 4), (True, 2)}
    assert EVIDENCE_STEPS / 2 < len(told) < 0.9 * EVIDENCE_STEPS


def test_a_process_that_takes_no_job_ends_the_groups_at_once() -> None:
    one = engine()
    one.run()
    one.run()
    one.run(is_ready=False)
    assert one.run(is_ready=False) == ALL
    assert not one.groups.is_deferred


def test_whoever_reads_a_prompt_is_in_every_step() -> None:
    one = engine()
    one.run()
    one.running += [Request("p", num_output_tokens=0), Request("q", is_prefill_chunk=True)]
    for _ in range(4):
        assert one.run() >= {"p", "q"}


def test_only_drafts_that_may_still_come_keep_their_length() -> None:
    one = engine()
    one.run()
    first = one.run()
    held = one.run()
    assert one.groups.latch(one.step, {}) == dict.fromkeys(first, LENGTH), "their drafts come in this step"
    one.groups.drop(min(first))
    assert one.groups.latch(one.step, {})[min(first)] == 0, "it was preempted meanwhile"
    assert held.isdisjoint(first)


def test_nobody_is_kept_out_where_nobody_drafts() -> None:
    one = engine()
    for _ in range(3):
        one.groups.deal(one.running, one.step + 1)
        one.groups.latch(one.step, dict.fromkeys(ALL, 0))
        one.groups.note(one.step, dict.fromkeys(ALL, 1), 4, 1.0, StepReport(is_drafter_ready=True))
        assert not one.groups.is_deferred


@pytest.mark.parametrize(("apart_s", "share"), [(0.3, 0.9), (0.7, 0.0)])
def test_auto_settles_for_what_was_measured_to_be_faster(apart_s: float, share: float) -> None:
    """Two half steps against a whole one of 1 s."""
    one = engine("auto")
    deferred = 0
    for step in range(8 * EVIDENCE_STEPS):
        one.run(time_s=apart_s if one.groups.is_deferred else 1.0)
        deferred += one.groups.is_deferred and step >= 4 * EVIDENCE_STEPS
    assert share <= deferred / (4 * EVIDENCE_STEPS) <= share + 0.1


def test_auto_tries_nothing_where_a_phase_is_too_short_to_hide() -> None:
    one = engine("auto")
    assert all(one.run(draft_s=0.01) == ALL for _ in range(3 * EVIDENCE_STEPS))


def test_groups_are_dealt_while_a_split_is_asked_for_and_no_longer() -> None:
    """A step behind the order, which is latched when the step is dealt already; drafts under way keep their cores."""
    one = split_engine()
    for split in [0, 0, 1, 1, 1, 1, 0, 0, 0]:
        one.run_asked(split)
    assert one.splits == [0, 0, 0, 1, 1, 1, 1, 1, 0]
    assert one.run_asked(0) == ALL


def test_another_split_takes_over_between_two_steps() -> None:
    one = split_engine()
    for split in [1, 1, 1, 2, 2, 2]:
        one.run_asked(split)
    assert one.splits == [0, 1, 1, 1, 2, 2]
    assert one.groups.is_deferred


def test_a_process_that_takes_no_job_ends_the_split() -> None:
    one = split_engine()
    for is_ready in [True, True, True, False, False, False]:
        one.run_asked(1, is_ready=is_ready)
    assert one.splits == [0, 1, 1, 1, 0, 0]


@pytest.mark.parametrize(("apart_s", "share"), [(0.3, 0.9), (0.7, 0.0)])
def test_auto_goes_back_from_a_split_that_was_measured_to_be_slower(apart_s: float, share: float) -> None:
    """Asked for all the time: two half steps under the split against a whole unsplit one of 1 s."""
    one = split_engine("auto")
    for _ in range(8 * EVIDENCE_STEPS):
        one.run_asked(1, time_s=apart_s if one.groups.is_deferred else 1.0)
    late = one.splits[4 * EVIDENCE_STEPS :]
    assert share <= sum(map(bool, late)) / len(late) <= share + 0.1


def test_each_split_has_its_own_evidence() -> None:
    """The second one is faster, the first one slower than unsplit; a policy asks for both by turns."""
    one, late = split_engine("auto"), dict[int, list[int | None]]()
    for step in range(40 * EVIDENCE_STEPS):
        asked = 1 + step // 64 % 2
        apart_s = 0.7 if one.groups._newest.split == 1 else 0.3
        one.run_asked(asked, time_s=apart_s if one.groups.is_deferred else 1.0)
        if step >= 20 * EVIDENCE_STEPS:
            late.setdefault(asked, []).append(one.splits[-1])
    assert late[1].count(1) < 0.1 * len(late[1])
    assert late[2].count(2) > 0.8 * len(late[2])


def test_steps_in_which_the_drafter_catches_up_are_no_evidence_against_being_unsplit() -> None:
    one, told = split_engine("auto"), list[bool]()
    for _ in range(64):
        one.run_asked(1)
    gate = one.groups._gates[1]
    gate.note = lambda requests, has_used, time_s, tokens: told.append(has_used)  # type: ignore[method-assign]
    one.groups._newest = replace(one.groups._newest, turn=GroupTurn(), could_part=True, is_between=False)
    for caught_up in [5, 0]:
        report = StepReport(is_drafter_ready=True, caught_up=caught_up)
        one.groups.latch(one.step, {})
        one.groups.note(one.step, dict.fromkeys(ALL, 1), 4, 1.0, report)
    assert told == [False]


def test_a_step_whose_report_comes_late_is_evidence_of_what_it_was() -> None:
    """Under asynchronous scheduling the next step is dealt before."""
    one, told = engine("auto"), list[tuple[int, bool]]()
    one.groups._gate.note = lambda requests, has_used, time_s, tokens: told.append((requests, has_used))  # type: ignore[method-assign]
    whole = replace(one.groups._newest, decoding=frozenset(ALL), could_part=True)
    half = replace(whole, turn=GroupTurn(frozenset("cd"), is_deferred=True))
    for step, dealt in enumerate([whole, half, whole], start=1):
        one.groups._newest = dealt
        one.groups.latch(step, {})
    for step, scheduled in ((1, ALL), (2, "ab")):
        one.groups.note(step, dict.fromkeys(scheduled, 1), 1, 1.0, StepReport(is_drafter_ready=True))
    assert told == [(4, False), (4, True)]
    one.groups.note(4, dict.fromkeys(ALL, 1), 1, 1.0, StepReport(is_drafter_ready=True))
    assert (len(told), one.groups._dealt) == (2, {}), (
        "a step that was never dealt says nothing, the third had no tokens"
    )


def test_a_request_whose_first_token_is_under_way_decodes() -> None:
    one = engine()
    one.running[0].num_output_tokens, one.running[0].num_output_placeholders = 0, 1
    one.run()
    assert len({name for _ in range(2) for name in one.run()}) == 4
    assert len(one.run()) == 2


def test_without_splits_on_offer_none_is_in_force() -> None:
    one = engine()
    one.run()
    assert one.groups.in_force(None) is None


def test_a_setting_that_nothing_can_be_made_of_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config: Any = SimpleNamespace(use_v2_model_runner=False)
    given = {"FASER_PING_PONG": "always", "FASER_ENDPOINT": "inproc://x"}
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    assert chosen_groups(load_settings({"FASER_ENDPOINT": "inproc://x"}), config) is None
    assert caplog.messages == []
    assert chosen_groups(load_settings(given), config) is None
    assert "FASER_DRAFTER_CORES is not set" in caplog.messages[-1]
    monkeypatch.setattr(splits, "chosen_drafter", lambda cores, config: ([], "method ngram"))
    assert chosen_groups(load_settings(given | {"FASER_DRAFTER_CORES": "1"}), config) is None
    assert "method ngram" in caplog.messages[-1]
    assert len(caplog.messages) == 2
    monkeypatch.setattr(splits, "chosen_drafter", lambda cores, config: (["drafter"], None))
    made = chosen_groups(load_settings(given | {"FASER_DRAFTER_CORES": "1"}), config)
    assert made is not None
    assert made.mode == "always"


def test_the_first_step_under_another_split_is_no_evidence_of_it() -> None:
    """It verifies what was drafted under the split before it."""
    one, between = split_engine(), list[bool]()
    for split in (1, 1, 1, 1, 2, 2, 2):
        one.run_asked(split)
        between.append(one.groups._newest.is_between)
    assert one.splits[-3:] == [1, 2, 2], "what is asked is in force from the next step on"
    assert between[-3:] == [False, True, False]
    assert not any(between[2:4])

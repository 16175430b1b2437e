"""Traces, prompts and workloads: what ships can be read, a seed fixes all, bad rows are named."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from faser.env.workload.held_out import is_held_out_prompt
from faser.env.workload.prompts import KINDS, PromptError, held_out_prompts, read_prompts, training_prompts
from faser.env.workload.request_trace import SHIPPED, Trace, TraceError, read_trace, shipped_trace
from faser.env.workload.workload import Lengths, Swell, TimedRequest, build_workload, swelling_arrivals

SWELL = Swell(duration_s=45.0, low_rps=0.4, peak_rps=7.0)
LENGTHS = Lengths(context_tokens=1024, input_scale=0.1, max_input_tokens=400, max_output_tokens=128)


def workload(seed: int, mix: dict[str, float] | None = None) -> list[TimedRequest]:
    arrivals = swelling_arrivals(shipped_trace("azure-conv"), SWELL, seed)
    return build_workload(arrivals, held_out_prompts(), LENGTHS, seed=seed, mix=mix)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_trace_is_in_order_and_plausible(name: str) -> None:
    trace = shipped_trace(name)
    assert len(trace) > 5000
    assert (np.diff(trace.arrival_s) >= 0).all()
    assert 1500 < trace.arrival_s[-1] < 1900


def test_mooncake_arrivals_do_not_all_lie_on_ticks() -> None:
    assert len(np.unique(shipped_trace("mooncake").arrival_s)) > 5000


def test_the_same_seed_gives_the_same_arrivals_and_prompts() -> None:
    assert workload(3) == workload(3)
    assert workload(3) != workload(4)


def test_every_kind_is_asked_and_every_prompt_is_held_out() -> None:
    requests = workload(0)
    assert {request.kind for request in requests} == set(KINDS)
    assert all(is_held_out_prompt(request.prompt) for request in requests)


def test_no_prompt_is_on_both_sides() -> None:
    held_out, training = held_out_prompts(), training_prompts()
    assert not {p.text for p in held_out} & {p.text for p in training}
    assert min(sum(p.kind == kind for p in held_out) for kind in KINDS) >= 50


def test_a_meeting_stays_on_one_side() -> None:
    def meetings(side: list[str]) -> set[str]:
        return {prompt_id.rsplit("-part-", 1)[0] for prompt_id in side}

    held_out = meetings([p.id for p in held_out_prompts(["summarisation"])])
    assert not held_out & meetings([p.id for p in training_prompts(["summarisation"])])


def test_the_load_swings_from_low_to_the_peak_and_back() -> None:
    arrival_s = np.array([request.arrival_s for request in workload(0)])
    assert arrival_s[0] == 0.0
    assert arrival_s[-1] < SWELL.duration_s
    per_second = np.histogram(arrival_s, bins=9, range=(0, 45))[0] / 5
    assert per_second[0] < 1.5
    assert per_second[-1] < 1.5
    assert per_second[3:6].mean() > 5


def test_lengths_fit_the_context() -> None:
    for request in workload(1):
        assert request.prompt_tokens <= 400
        assert 1 <= request.max_tokens <= 128
        assert request.prompt_tokens + request.max_tokens + LENGTHS.template_tokens <= LENGTHS.context_tokens


def test_longer_traced_inputs_get_longer_prompts() -> None:
    requests = workload(2)
    trace = swelling_arrivals(shipped_trace("azure-conv"), SWELL, 2)
    assert np.corrcoef(trace.input_tokens, [request.prompt_tokens for request in requests])[0, 1] > 0.2


def test_a_prompt_is_not_repeated_before_all_were_used() -> None:
    ids = [request.prompt_id for request in workload(0)]
    assert len(ids) == len(set(ids))


def test_a_mix_of_one_kind_asks_only_that() -> None:
    assert {request.kind for request in workload(0, {"code": 1.0})} == {"code"}


def test_a_kind_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TraceError, match="no prompt of kind poetry"):
        workload(0, {"poetry": 1.0})


def test_a_swell_longer_than_the_trace_is_refused() -> None:
    trace = shipped_trace("azure-code")
    with pytest.raises(TraceError, match="arrivals asked for"):
        swelling_arrivals(trace, Swell(duration_s=4000, low_rps=1, peak_rps=9), 0)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("arrival_s,input_tokens,output_tokens\n0,5,5\n2,5,5\n1,5,5\n", r"trace.csv, line 4: negative gap"),
        ("arrival_s,input_tokens,output_tokens\n0,5,5\n1,five,5\n", r"trace.csv, line 3: '1,five,5'"),
        ("arrival_s,input_tokens,output_tokens\n0,5\n", r"trace.csv, line 2: '0,5'"),
        ("arrival_s,input_tokens,output_tokens\n0,5,5,5\n", r"trace.csv, line 2"),
        ("arrival_s,input_tokens,output_tokens\nnan,5,5\n", r"trace.csv, line 2"),
        ("arrival_s,input_tokens,output_tokens\n0,0,5\n", r"trace.csv, line 2"),
        ("time,in,out\n0,5,5\n", r"trace.csv, line 1: header"),
        ("arrival_s,input_tokens,output_tokens\n", r"trace.csv: no rows"),
    ],
)
def test_a_bad_trace_is_refused_with_file_and_row(tmp_path: Path, content: str, named: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(content)
    with pytest.raises(TraceError, match=named):
        read_trace(file)


def test_a_missing_and_a_truncated_trace_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress(b"arrival_s,input_tokens,output_tokens\n" * 50)[:-9])
    with pytest.raises(TraceError, match=r"cut.csv.gz: cannot be read"):
        read_trace(tmp_path / "cut.csv.gz")


def test_a_bad_prompt_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text('{"id":"1","source":"s","kind":"chat","task":"t","tokens":3,"text":"hi"}\n{"id":"2"}\n')
    with pytest.raises(PromptError, match=r"chat.jsonl, line 2: Object missing required field"):
        read_prompts(file)


def test_scaling_and_windows_keep_lengths() -> None:
    trace = Trace("t", np.array([0.0, 1.0, 4.0]), np.array([1, 2, 3]), np.array([4, 5, 6]))
    assert trace.scaled(2.0).arrival_s.tolist() == [0.0, 0.5, 2.0]
    assert trace.window(1.0, 3.0).input_tokens.tolist() == [2]
    with pytest.raises(TraceError, match="rate scale 0"):
        trace.scaled(0.0)

"""The serving benchmark for GPUs without a GPU: its dry run end to end, and its arithmetic by hand."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import faser
from faser.engine_adapter.drafting.draft_notes import ConfidenceBook
from faser.env.profile.acceptance_model import AcceptanceModel

FOLDER = Path(faser.__file__).parent / "benchmarks" / "gpu"
SMALL = ["--targets", "qwen3-8b", "--loads", "1", "16", "--rounds", "2", "--answers", "2", "--trace-seconds", "5"]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("serve", "serve_load", "serve_engine", "imposed", "run", "shapes", "checkout", "part_vllm")
    for name in names:
        sys.modules.pop(name, None)
    yield importlib.import_module("serve")
    for name in names:
        sys.modules.pop(name, None)


def run(serve: ModuleType, monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    monkeypatch.setattr(sys, "argv", ["serve.py", *flags])
    status: int = serve.main()
    return status


def test_the_dry_run_does_every_part_once_goes_on_and_sums_up(
    serve: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "serve.json"
    flags = ["--dry-run", *SMALL, "--output", str(output)]
    assert run(serve, monkeypatch, *flags, "--only", "qwen3-8b/k3") == 0
    first = json.loads(output.read_text())["parts"]
    assert list(first) == ["qwen3-8b/k3/0", "qwen3-8b/k3/1"]
    capsys.readouterr()
    assert run(serve, monkeypatch, *flags) == 0
    told = capsys.readouterr().out
    content = json.loads(output.read_text())
    assert set(content["parts"]) == {f"qwen3-8b/{arm}/{round_}" for arm in serve.ARMS for round_ in (0, 1)}
    assert {name: content["parts"][name] for name in first} == first
    assert content["machine"] == {"is_dry_run": True}
    found = json.loads(told.splitlines()[-1])
    assert [point["load"] for point in found["points"]] == ["1", "16", "azure-conv"]
    assert [point["metric"] for point in found["points"]] == ["tokens_per_s", "tokens_per_s", "goodput"]
    assert all(point["envelope_ratio"] > 0 and point["throughput_over_static"] > 0 for point in found["points"])
    assert found["paper_throughput"]["verdict"] in ("hit", "missed")


def test_arms_of_a_round_take_turns(serve: ModuleType) -> None:
    options = serve.arguments(["--dry-run", *SMALL, "--output", "x", "--arms", "none", "k3", "faser"])
    assert [name.split("/", 1)[1] for name, _ in serve.plan(options)] == [
        "none/0", "k3/0", "faser/0", "k3/1", "faser/1", "none/1",
    ]  # fmt: skip


def test_a_closed_loop_keeps_its_clients_busy_and_counts_the_full_batch_only(serve: ModuleType) -> None:
    load = importlib.import_module("serve_load")
    engine, most = load.DryEngine("none"), 0
    step = engine.step

    def watched() -> Any:
        nonlocal most
        most = max(most, len(engine._requests))
        return step()

    engine.step = watched
    asked = load.closed_requests(4, 3, 0)
    found = load.drive(engine, asked, 4)
    assert (most, len(asked), len(found["requests"])) == (4, 16, 12)
    # Four rows a step and nothing accepted; a prompt, taken in where an answer ended, delays it.
    step_s = engine.STEP_S + 4 * engine.ROW_S
    assert 0.9 * 4 / step_s < found["tokens_per_s"] <= 4 / step_s
    assert all(tokens == load.ANSWER_TOKENS for _, _, tokens in found["requests"])


def test_a_replay_sends_requests_when_they_are_due(serve: ModuleType) -> None:
    load = importlib.import_module("serve_load")
    engine = load.DryEngine("none")
    found = load.drive(engine, [load.Asked(0.0, 10, 4), load.Asked(5.0, 10, 4)], None)
    step_ms = 1e3 * (engine.STEP_S + engine.ROW_S)
    assert found["seconds"] == pytest.approx(5.0 + 4 * step_ms / 1e3, abs=0.01)
    for ttft_ms, tpot_ms, tokens in found["requests"]:
        assert ttft_ms == pytest.approx(step_ms, abs=0.2)
        assert (tpot_ms, tokens) == (pytest.approx(step_ms, abs=1e-3), 4)


def made_up(**rates: list[float]) -> dict[str, Any]:
    """Return results in which an arm has so many tokens/s in each round, and its latency is the inverse."""
    return {
        "parts": {
            f"t/{arm}/{round_}": {
                "result": {"4": {"tokens_per_s": rate, "requests": [[10.0, 1e3 / rate, 64.0]], "seconds": 1.0}}
            }
            for arm, values in rates.items()
            for round_, rate in enumerate(values)
        }
    }


def test_ratios_and_the_papers_verdicts_are_those_worked_out_by_hand(serve: ModuleType) -> None:
    content = made_up(none=[100.0, 102.0, 98.0], k3=[120.0, 118.0, 122.0], faser=[192.0, 188.8, 195.2])
    content["parts"]["t/adaptive/0"] = {"error": "not on this runner"}
    found = serve.summary(content)
    (point,) = found["points"]
    assert (point["envelope_ratio"], point["best_rival"]) == (1.6, ["k3"])
    assert found["failed"] == {"t/adaptive/0": "not on this runner"}  # and no loss, no win
    assert found["paper_throughput"] == {"bar": 1.53, "best": 1.6, "verdict": "hit"}
    assert found["paper_latency"] == {"bar": 1.92, "best": 1.6, "verdict": "missed"}


def test_of_a_trace_only_requests_within_five_and_two_times_the_unloaded_latency_count(serve: ModuleType) -> None:
    unloaded = {0: {"requests": [[100.0, 10.0, 64.0]]}}
    requests = [[400.0, 15.0, 50.0], [600.0, 15.0, 30.0], [400.0, 25.0, 20.0]]
    found = {"tokens_per_s": 200.0, "requests": requests}
    assert serve._rate(unloaded, True, found) == pytest.approx(100.0)
    assert serve._rate(unloaded, False, found) == 200.0
    assert serve._rate(unloaded, True, found | {"requests": requests[1:]}) == 100.0  # as one ordinary request


def test_acceptance_by_decree_is_the_measured_one(serve: ModuleType) -> None:
    rates = serve.acceptance_rates(5)
    assert rates == sorted(rates, reverse=True)
    assert 0.0 < rates[4] < rates[0] < 1.0
    engine = importlib.import_module("serve_engine")
    task = {"arm": "k3", "drafter": "d", "length": 5, "rates": rates, "generator": None}
    config = engine.speculation(task)
    assert (config["num_speculative_tokens"], config["synthetic_acceptance_rates"]) == (3, rates[:3])
    assert engine.speculation(task | {"arm": "none"}) is None
    assert engine.speculation(task | {"arm": "adaptive"})["enable_adaptive_verification"] is True
    assert "enable_adaptive_verification" not in engine.speculation(task | {"arm": "faser"})
    by_request = engine.speculation(task | {"rates": None, "generator": {"some": "model"}})
    assert not {"rejection_sample_method", "synthetic_acceptance_rates"} & set(by_request)


def fates_of(serve: ModuleType, seed: int = 0) -> Any:
    imposed = importlib.import_module("imposed")
    return imposed.Fates(msgspec.convert(serve.generator()[0], AcceptanceModel), seed)


def test_fates_are_those_of_the_measured_run_and_requests_differ(serve: ModuleType) -> None:
    model, auc = serve.generator()
    fates, requests, places = fates_of(serve), range(300), range(40)
    accepted = np.array([[[fates.is_accepted(r, p, j) for j in range(3)] for p in places] for r in requests])
    for position in (0, 2):  # means are of drafts that were accepted up to there
        survived = accepted[:, :, :position].all(axis=2)
        chance = accepted[survived, position].mean()
        assert chance == pytest.approx(model["means"][position], abs=0.03)
        counts = survived.sum(axis=1)
        hits = (accepted[:, :, position] & survived).sum(axis=1)[counts > 0]
        counts = counts[counts > 0]
        assert (hits / counts).var() > 1.2 * (chance * (1.0 - chance) / counts).mean()  # beyond luck
    logits = np.array([[fates.logit(r, p, 0) for p in places] for r in requests]).ravel()
    first = accepted[:, :, 0].ravel()
    ranks = logits.argsort().argsort() + 1.0
    hits, misses = first.sum(), (~first).sum()
    found = (ranks[first].sum() - hits * (hits + 1) / 2) / (hits * misses)
    assert found == pytest.approx(auc, abs=0.03)
    assert 0.7 < auc < 0.9
    assert all(0.0 < fates.confidence(r, 3, 1) < 1.0 for r in requests)


def test_every_arm_meets_the_same_luck_whatever_it_asks_first(serve: ModuleType) -> None:
    one, other, third = fates_of(serve), fates_of(serve), fates_of(serve, seed=1)
    asked = [(request, place, place % 4) for request in (3, 8) for place in range(30)]
    told = [(one.confidence(*each), one.is_accepted(*each)) for each in asked]
    assert [(other.confidence(*each), other.is_accepted(*each)) for each in reversed(asked)] == told[::-1]
    assert [third.is_accepted(*each) for each in asked] != [accepted for _, accepted in told]


class Hooked:
    """A module of a runner: what is registered on it is called before it, or behind it."""

    def register_forward_pre_hook(self, hook: Callable[..., None]) -> None:
        """Keep the hook."""
        self.before = hook

    def register_forward_hook(self, hook: Callable[..., None]) -> None:
        """Keep the hook."""
        self.after = hook


def test_the_decree_raises_a_drafts_own_token_where_its_fate_is_to_be_accepted_and_another_elsewhere(
    serve: ModuleType,
) -> None:
    fates = fates_of(serve)
    emitted = {"4": 2, "9-x": 0, "5": 7}  # the second reads its prompt: a row, and no drafts
    book = ConfidenceBook()
    drafter = SimpleNamespace(book=book, _drafting=[0, 2])
    runner = SimpleNamespace(
        sampler=Hooked(), rejection_sampler=Hooked(), drafter=drafter,
        input_batch=SimpleNamespace(req_ids=list(emitted)),
        requests={name: SimpleNamespace(output_token_ids=[0] * many) for name, many in emitted.items()},
    )  # fmt: skip
    importlib.import_module("imposed").Decree(runner, fates)
    drafts, counts = [3, 4, 5, 6, -1], [3, 0, 2]
    logits = torch.zeros(8, 11)
    verified = SimpleNamespace(draft_token_ids=torch.tensor(drafts, dtype=torch.int32), num_draft_tokens=counts)
    runner.rejection_sampler.before(None, (verified, None, logits, None))
    places = [(0, 4, 2, 0), (1, 4, 2, 1), (2, 4, 2, 2), (5, 5, 7, 0), (6, 5, 7, 1)]  # row, request, begin, position
    for draft, (row, *key) in zip(drafts, places, strict=True):
        is_kept = draft >= 0 and fates.is_accepted(*key)
        assert (int(logits[row].argmax()) == draft) == is_kept
        assert (logits[row] > 1.0).sum() == 1
    assert not logits[[3, 4, 7]].any()  # bonus rows and the prompt's own are the target's
    runner.sampler.after(None, (), SimpleNamespace(sampled_token_ids=torch.tensor([[1], [1]])))  # for bonus rows
    sampled = torch.tensor([[3, 4, -1, -1], [7, -1, -1, -1], [6, -1, -1, -1]])
    runner.rejection_sampler.after(None, (), SimpleNamespace(sampled_token_ids=sampled))
    for column, rows in enumerate(([0, 2], [2])):
        drafter._drafting = rows
        drafter._note(torch.zeros(len(rows), 11), torch.zeros(len(rows), dtype=torch.long))
        wanted = [fates.confidence(*((4, 4) if row == 0 else (5, 8)), 0) for row in rows]  # behind two tokens, and one
        if column:
            wanted = [fates.confidence(5, 8, 1)]
        assert book.newest() == pytest.approx(wanted)
    drafter.book = None
    drafter._note(torch.zeros(1, 11), torch.zeros(1, dtype=torch.long))  # nobody wants to know


def test_what_is_imposed_per_request_is_told_and_arms_of_the_other_runner_are_left_out(
    serve: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "serve.json"
    small = [*SMALL[:-6], "--rounds", "1", "--answers", "2", "--trace-seconds", "0"]
    assert run(serve, monkeypatch, "--dry-run", "--impose", "requests", *small, "--output", str(output)) == 0
    content = json.loads(output.read_text())
    assert {name.split("/")[1] for name in content["parts"]} == {"none", "k1", "k3", "k5", "faser"}
    asked = content["settings"]
    assert asked["impose"] == "requests"
    assert asked["confidence_auc"] == serve.generator()[1]
    with pytest.raises(SystemExit):
        serve.arguments(["--impose", "requests", "--arms", "none", "adaptive"])
    assert "adaptive with --impose requests" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"), [(["--dry-run"], "give an --output"), (["--loads", "0"], "above 0"), (["--answers", "1"], "2")]
)
def test_bad_options_are_refused(
    serve: ModuleType, flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve.arguments(flags)
    assert told in capsys.readouterr().err


@pytest.mark.engine
@pytest.mark.slow
def test_every_arm_of_the_part_with_vllm_drafts_what_it_says(
    serve: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in (("VLLM_CPU_KVCACHE_SPACE", "1"), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    target = serve.Shape("target", 4, 256, 4, 2, 64, 256, 96, False)
    drafter = serve.Shape("drafter", 1, 128, 2, 1, 64, 128, 96, True)
    paths = {role: serve._written(shape, tmp_path / role) for role, shape in (("target", target), ("drafter", drafter))}
    task = paths | {"requests": 2, "length": 3, "tokens": 12, "accepted": None, "is_eager": True}
    part = importlib.import_module("part_vllm")
    found = {arm: part._run(task | {"arm": arm}, str(tmp_path)) for arm in part.ARMS}
    assert all(each.get("tokens") == 24 for each in found.values()), found
    assert found["none"]["draft_tokens"] == 0
    assert found["faser"]["draft_tokens"] >= 0.8 * found["vllm"]["draft_tokens"] > 50


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("arm", ["none", "k1", "faser"])
def test_the_engines_side_serves_every_load_on_a_cpu(
    serve: ModuleType, arm: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in (("VLLM_CPU_KVCACHE_SPACE", "1"), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    target = serve.Shape("target", 4, 256, 4, 2, 64, 256, 96, False)
    drafter = serve.Shape("drafter", 1, 128, 2, 1, 64, 128, 96, True)
    paths = {role: serve._written(shape, tmp_path / role) for role, shape in (("target", target), ("drafter", drafter))}
    loads = [("1", 1, [(0.0, 32, 12)] * 3), ("4", 4, [(0.0, 32, 12)] * 12), ("azure-conv", None, [(0.0, 32, 12)] * 4)]
    task = paths | {"arm": arm, "length": 3, "rates": None, "generator": None, "loads": loads, "most": 8,
                    "is_eager": True}  # fmt: skip
    found = serve.run_engine(task | {"load_format": "dummy"})
    assert {load: len(each["requests"]) for load, each in found.items()} == {"1": 2, "4": 8, "azure-conv": 4}
    assert all(each["tokens_per_s"] > 0 for each in found.values())
    assert all(tokens == 12 for each in found.values() for _, _, tokens in each["requests"])


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("arm", ["k3", "faser"])
def test_the_engine_accepts_what_is_imposed_on_each_request(
    serve: ModuleType, arm: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in (("VLLM_CPU_KVCACHE_SPACE", "1"), ("OMP_NUM_THREADS", "1"), ("FASER_DEFAULT_K", "3")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    target = serve.Shape("target", 4, 256, 4, 2, 64, 256, 96, False)
    drafter = serve.Shape("drafter", 1, 128, 2, 1, 64, 128, 96, True)
    paths = {role: serve._written(shape, tmp_path / role) for role, shape in (("target", target), ("drafter", drafter))}
    loads = [("4", 4, [(0.0, 32, 96)] * 24)]
    task = paths | {"arm": arm, "length": 3, "rates": None, "generator": serve.generator()[0], "loads": loads,
                    "most": 8, "is_eager": True, "load_format": "dummy"}  # fmt: skip
    found = serve.run_engine(task)["4"]
    fates, tested, accepted = fates_of(serve), 0, 0
    for request in range(24):  # what drafts of three come to, all of them
        place = 0
        while arm == "k3" and place < 96 - 1:
            length = min(3, 96 - 1 - place - 1)
            hits = next((j for j in range(length) if not fates.is_accepted(request, place + 1 + j, j)), length)
            place, tested, accepted = place + 1 + hits, tested + length, accepted + hits
    assert found["draft_tokens"] > 300
    if arm == "k3":
        assert found["accepted_tokens"] / found["draft_tokens"] == pytest.approx(accepted / tested, abs=0.03)
    else:  # drafts end where the imposed confidence is low: more of them is accepted
        assert 0.3 < found["accepted_tokens"] / found["draft_tokens"] <= 1.0
    assert all(tokens == 96 for _, _, tokens in found["requests"])

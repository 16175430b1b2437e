"""Float32 greedy tokens of a pipeline whose stages move while it serves are those of one rank; see stage_engine.py.

Random bounds at every step or two, chunked prefill, prefix hits, preemption, aborts, stop strings, structured output.
"""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest

from .scenarios import QUICK, SHORT, Run, left_after

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LEAST_DIFFERENCE = 1e-3  # of log probabilities; rows of another batch are rounded otherwise
GAUNTLET: dict[str, Any] = {}
LAYERS = 30


def different(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the requests of a round that said something else."""
    return [name for name, said in other.items() if not _is_same(one.get(name), said)]


def _is_same(one: Any, other: Any) -> bool:
    if not isinstance(other[0], list):  # tokens alone
        return bool(one == other)
    if one is None or [sample[:3] for sample in one] != [sample[:3] for sample in other]:
        return False
    pairs = [(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x[3], y[3], strict=True)]
    return all(a.keys() == b.keys() and all(abs(a[t] - b[t]) < LEAST_DIFFERENCE for t in a) for a, b in pairs)


@pytest.fixture(scope="module")
def reference(stage_engine: Run) -> dict[str, Any]:
    """What vLLM says by itself on one rank."""
    result = stage_engine(1, {"phases": [GAUNTLET, SHORT]})
    assert result["code"] == 0, result["log"]
    return result


@pytest.fixture(scope="module")
def gauntlet(reference: dict[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = reference["phases"][0]["rounds"][0]
    return said


@pytest.fixture(scope="module")
def short(reference: dict[str, Any]) -> dict[str, Any]:
    said: dict[str, Any] = reference["phases"][1]["rounds"][0]
    return said


@pytest.mark.slow  # `make proof`; test_thousand_moves.py has a short form in `make test`
def test_moving_stages_change_no_token(stage_engine: Run, gauntlet: dict[str, Any], short: dict[str, Any]) -> None:
    phases = [
        GAUNTLET | {"seed": 1, "moves": 30},
        SHORT | {"seed": 2, "control": "stale"},  # first: else the block would hold the same prompt's tokens anyhow
        SHORT | {"seed": 2, "control": "none"},
        SHORT | {"once": [0]},
    ]
    result = stage_engine(2, {"phases": phases, "pace": QUICK})
    assert result["code"] == 0, result["log"]
    moving, stale, unmoved, once = result["phases"]
    print(result["counts"], result["ranks"], [(phase["moves"], phase["phase_s"]) for phase in result["phases"]])
    assert [different(said, gauntlet) for said in moving["rounds"]] == [[] for _ in moving["rounds"]]
    assert len(different(unmoved["rounds"][0], short)) > 3, "the control: KV stayed where it was"
    assert len(different(stale["rounds"][0], short)) > 0, "the control: one block was left behind"
    assert moving["moves"] >= 30
    assert moving["preempted"] >= 1
    assert moving["cached_tokens"] >= 128
    assert result["counts"]["most_tail_blocks"] == 1
    assert result["counts"]["tail_blocks"] > 100
    assert result["counts"]["ahead_blocks"] > 100
    # Who ordered it is gone: the move was completed, and the stages stay.
    assert once["bounds"] == [0]
    assert different(once["rounds"][0], short) == []
    assert result["ranks"][0]["held"] == []
    assert result["ranks"][1]["held"] == list(range(LAYERS))
    assert result["ranks"][0]["skipped_steps"] > 30


@pytest.mark.slow  # `make proof`
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "moves"), [(2, 500), (4, 500)])
def test_a_thousand_moves_change_no_token(stage_engine: Run, gauntlet: dict[str, Any], ranks: int, moves: int) -> None:
    result = stage_engine(ranks, {"phases": [GAUNTLET | {"seed": 7, "moves": moves}], "pace": QUICK})
    assert result["code"] == 0, result["log"]
    (phase,) = result["phases"]
    rounds, requests = len(phase["rounds"]), sum(map(len, phase["rounds"]))
    print(f"{ranks} ranks: {phase['moves']} moves in {rounds} rounds of {requests} requests, {result['counts']}")
    print(result["ranks"])
    assert [different(said, gauntlet) for said in phase["rounds"]] == [[] for _ in phase["rounds"]]
    assert phase["moves"] >= moves
    assert phase["preempted"] >= rounds
    assert result["counts"]["most_tail_blocks"] == 1


@pytest.mark.slow  # `make proof`
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_pipeline_of_vllms_own_serves_on_the_cpu(stage_engine: Run, short: dict[str, Any], ranks: int) -> None:
    result = stage_engine(ranks, {"phases": [SHORT]}, FASER_STAGES="0")
    assert result["code"] == 0, result["log"]
    assert different(result["phases"][0]["rounds"][0], short) == []
    assert result["ranks"] == [None] * ranks


@pytest.mark.slow  # `make proof`
def test_drafts_out_of_the_text_go_with_moving_stages(stage_engine: Run, gauntlet: dict[str, Any]) -> None:
    drafting = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}}
    scenario = {"engine": drafting, "phases": [GAUNTLET | {"seed": 3, "moves": 30}], "pace": QUICK}
    result = stage_engine(2, scenario, FASER_DEFAULT_K="3")
    assert result["code"] == 0, result["log"]
    (phase,) = result["phases"]
    assert [different(said, gauntlet) for said in phase["rounds"]] == [[] for _ in phase["rounds"]]
    assert phase["drafted"] > 100


@pytest.mark.slow  # `make proof`
def test_a_rank_holds_the_weights_that_it_runs(stage_engine: Run) -> None:
    cuts = [[30], [0], [15], [0], [15], [30]]  # the first two touch every layer's KV cache on both ranks
    phases = [SHORT | {"once": cut} for cut in cuts]
    result = stage_engine(2, {"phases": phases, "pace": QUICK})
    assert result["code"] == 0, result["log"]
    assert [phase["bounds"] for phase in result["phases"]] == cuts
    even, last, again, first = ([*phase["uss_mib"]] for phase in result["phases"][2:])
    half = 15 * 3_540_096 * 4 / (1 << 20)  # of the embedded target's layers, in float32
    print(
        f"USS in MiB by rank: even {even}, last {last}, even again {again}, first {first}; half the layers {half:.0f}"
    )
    assert last[1] - even[1] == pytest.approx(half, rel=0.25)
    assert even[0] - last[0] == pytest.approx(half, rel=0.25)
    assert again[1] - even[1] < 0.15 * half
    assert first[0] - again[0] == pytest.approx(half, rel=0.25)


@pytest.mark.slow  # `make proof`
def test_a_killed_engine_leaves_no_rank_behind(stage_engine: Run) -> None:
    result = stage_engine(2, {"phases": [], "is_killed": True})
    assert result["code"] == -9, result["log"]
    ranks = json.loads(result["said"].strip().splitlines()[-1])
    assert len(ranks) == 2
    assert left_after(ranks) == []


@pytest.mark.slow  # `make proof`
@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"enforce_eager": False}, "compiled graphs"),
        ({"enable_lora": True}, "a LoRA adapter"),
    ],
)
def test_stages_that_cannot_move_are_off_with_one_line_and_requests_are_served(
    stage_engine: Run, engine: dict[str, Any], reason: str, short: dict[str, Any]
) -> None:
    result = stage_engine(2, {"engine": engine, "phases": [SHORT]})
    assert result["code"] == 0, result["log"]
    assert "stages are off: " + reason in result["log"]
    assert len(result["phases"][0]["rounds"][0]) == SHORT["requests"]


@pytest.mark.slow  # `make proof`
def test_a_drafter_that_would_crash_is_refused_with_a_reason(stage_engine: Run) -> None:
    from faser.models.embedded.pair import ensure_embedded_drafter

    drafting = {"method": "eagle3", "model": str(ensure_embedded_drafter()), "num_speculative_tokens": 3}
    result = stage_engine(2, {"engine": {"speculative_config": drafting}, "phases": []})
    assert result["code"] != 0
    assert "method eagle3 with pipeline_parallel_size=2" in result["log"]


@pytest.mark.slow  # `make proof`; benchmarks/stages.py measures it
@pytest.mark.alone
def test_steps_are_back_to_their_time_soon_behind_a_move(stage_engine: Run) -> None:
    work = {"requests": 8, "tokens": 160, "cuts": [[15], [0], [15], [8]], "steps_each": 60}
    still = [{"requests": 1, "tokens": 60, "once": cut} for cut in ([0], [15], [30])]
    result = stage_engine(2, {"phases": [SHORT, work, *still]})
    assert result["code"] == 0, result["log"]
    _, phase, *others = result["phases"]
    waits, told = recovery(phase["times_s"], phase["switches"], ranks=2)
    print(told, result["ranks"])
    medians = [1e3 * statistics.median(other["times_s"][-40:]) for other in others]
    print("ms a step of one request: one stage on the last rank, two, one on rank 0", medians)
    assert phase["moves"] >= 4
    assert statistics.median(waits) <= 3  # pp + 1; of single moves a busy machine tells nothing


def recovery(times_s: list[float], switches: list[int], ranks: int) -> tuple[list[int], str]:
    """Return in how many steps each move's steps were back under 1.2 times the 25th percentile, and say it."""
    quick = 1.2 * statistics.quantiles(times_s, n=4)[0]
    at = [step for step in range(1, len(switches)) if switches[step] > switches[step - 1]]
    waits = [next((n for n, t in enumerate(times_s[step:]) if t <= quick), len(times_s)) for step in at]
    soon = sum(wait <= ranks + 1 for wait in waits)
    lost = [1e3 * sum(times_s[step : step + wait]) for step, wait in zip(at, waits, strict=True)]
    return waits, (
        f"{len(at)} moves, P25 {1e3 * quick / 1.2:.1f} ms; back within {ranks + 1} steps: {soon}; "
        f"steps {waits}; ms {[round(ms) for ms in lost]}"
    )


@pytest.mark.slow  # `make proof`
def test_a_checkpoint_whose_layers_cannot_be_read_one_by_one_is_served_as_vllm_cuts_it(
    stage_engine: Run, short: dict[str, Any], tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file

    from faser.models.embedded.pair import ensure_embedded_target

    target = ensure_embedded_target()
    for file in target.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, tmp_path / file.name)
    torch.save(load_file(target / "model.safetensors"), tmp_path / "pytorch_model.bin")
    result = stage_engine(2, {"model": str(tmp_path), "phases": [SHORT]})
    assert result["code"] == 0, result["log"]
    assert "stages are off: no weights of layer 0 in safetensors files" in result["log"]
    assert different(result["phases"][0]["rounds"][0], short) == []
    assert result["ranks"] == [None, None]

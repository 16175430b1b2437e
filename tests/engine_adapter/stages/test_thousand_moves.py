"""A thousand moves of a tiny model's layers among two and four ranks, at bounds that are new at nearly every step.

Short requests go on meanwhile (short_requests.py): prompts in chunks, prefix hits, preemptions, aborts, stop strings.
Every token, end and text is what one rank of vLLM says by itself; both controls break it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .scenarios import QUICK, Run
from .short_requests import DIFFERENT

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

Answer = tuple[int, list[int], str, str]  # number, tokens, why it ended, text
ENGINE = {"num_gpu_blocks_override": 36, "max_model_len": 320}  # blocks below what twelve requests need
WHOLE = {"least": DIFFERENT, "has_aborts": False}


def wrong(said: list[Answer], expected: dict[int, Answer]) -> list[int]:
    """Return the numbers of the requests that said something else; an aborted one has said its beginning."""
    return [answer[0] for answer in said if not _is_same(answer, expected[answer[0] % DIFFERENT])]


def _is_same(answer: Answer, expected: Answer) -> bool:
    if answer[2] == "abort":
        return bool(answer[1]) and answer[1] == expected[1][: len(answer[1])]
    return answer[1:] == expected[1:]


@pytest.fixture(scope="module")
def expected(stage_engine: Run, tiny: Path) -> dict[int, Answer]:
    """What vLLM says by itself on one rank, whatever else runs beside it."""
    result = stage_engine(1, {"model": str(tiny), "engine": ENGINE, "phases": [WHOLE]})
    assert result["code"] == 0, result["log"]
    said = result["phases"][0]["rounds"][0]["said"]
    assert len({tuple(tokens) for _, tokens, *_ in said}) > DIFFERENT // 2
    return {number: [number, *rest] for number, *rest in said}


def moved(stage_engine: Run, tiny: Path, ranks: int, moves: int, *controls: str) -> list[dict[str, Any]]:
    """Return what happened in a run with so many moves, and in a short one under each control before it."""
    moving = {"least": 0, "has_aborts": True, "seed": 5}
    phases = [{**moving, "moves": 40, "control": control} for control in controls]
    scenario = {"model": str(tiny), "engine": ENGINE, "phases": [*phases, {**moving, "moves": moves}], "pace": QUICK}
    result = stage_engine(ranks, scenario)
    assert result["code"] == 0, result["log"]
    print(result["counts"], result["ranks"])
    return [phase | phase["rounds"][0] | {"totals": result["counts"]} for phase in result["phases"]]


SLOW = pytest.mark.slow  # `make proof`; for two ranks test_sidecar_moves.py is in `make test`


@pytest.mark.parametrize(
    ("ranks", "moves"), [pytest.param(*given, marks=SLOW) for given in ((4, 100), (2, 1000), (4, 1000))]
)
def test_many_moves_change_no_token(
    stage_engine: Run, tiny: Path, expected: dict[int, Answer], ranks: int, moves: int
) -> None:
    stale, unmoved, phase = moved(stage_engine, tiny, ranks, moves, "stale", "none")
    counts, steps = phase["counts"], len(phase["times_s"])
    print(
        f"{ranks} ranks: {phase['moves']} moves in {steps} steps, {phase['phase_s']:.0f} s; {len(phase['said'])} "
        f"requests, {sum(len(tokens) for _, tokens, *_ in phase['said'])} tokens; {phase['preempted']} preemptions, "
        f"{counts}; wrong under the controls {len(wrong(stale['said'], expected))} of {len(stale['said'])}, "
        f"{len(wrong(unmoved['said'], expected))} of {len(unmoved['said'])}"
    )
    assert wrong(phase["said"], expected) == []
    assert wrong(stale["said"], expected), "the control: one block was left behind"
    assert wrong(unmoved["said"], expected), "the control: KV stayed where it was"
    assert phase["moves"] >= moves
    assert phase["totals"]["most_tail_blocks"] == 1
    seen = {name: counts[name] for name in ("prefix_hits", "long_prompts", "abort", "stop")}
    assert min(phase["preempted"], *seen.values()) >= moves // 25
    assert counts["length"] > counts["stop"]

"""The table of swing.py's results, for docs/figures.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from closed_loop_result import Settings, Turn

from faser.controller.bench_machine import Machine
from faser.controller.bench_ratio import OURS, Floats, Ratio, paired_ratio, wider_interval
from faser.controller.bench_result import name_of as arm_name
from faser.controller.bench_table import described

RESULT: Final = Path(__file__).resolve().parent / "results" / "swing.json"
SWING: Final = 0  # in the place of a number of requests
TABLE: Final = "table"
SWINGING: Final = "While the load swings from one request"


class Swings(msgspec.Struct):
    """The whole file."""

    machine: Machine
    versions: dict[str, str]
    commits: list[str]
    settings: Settings
    table: list[list[int]]  # vLLM's lengths by batch size, of the arm `table`
    turns: list[Turn] = []

    def arms(self) -> list[str]:
        """Return the arms, FASER last."""
        return sorted(
            {turn.arm for turn in self.turns}, key=lambda arm: (arm == OURS, arm == TABLE, arm != "none", arm)
        )

    def rates(self) -> dict[str, Floats]:
        """Return tokens/s by arm, (rounds,) each, of the rounds in which no arm was disturbed, if there are three."""
        dirty = {turn.round for turn in self.turns if turn.is_disturbed}
        rounds = sorted({turn.round for turn in self.turns})
        quiet = [round_ for round_ in rounds if round_ not in dirty]
        counted = quiet if len(quiet) >= 3 else rounds
        rate = {(turn.arm, turn.round): turn.tokens_per_s for turn in self.turns}
        return {arm: np.array([rate[arm, round_] for round_ in counted]) for arm in self.arms()}


def name_of(arm: str, table: Sequence[Sequence[int]]) -> str:
    """Return an arm's name for people."""
    return f"best table ({described(table)})" if arm == TABLE else arm_name(arm)


def over(rates: dict[str, Floats], arm: str) -> Ratio | None:
    """Return FASER over an arm, None before there are two rounds."""
    if len(rates[arm]) < 2:
        return None
    return paired_ratio(np.log(rates[OURS]) - np.log(rates[arm]), wider_interval)


def lines(results: Swings) -> list[str]:
    """Return the table, and which fixed length was the best in hindsight."""
    rates, rows = results.rates(), []
    for arm in results.arms():
        own = [turn for turn in results.turns if turn.arm == arm]
        emitted = sum(turn.tokens - turn.accepted_tokens for turn in own)
        length = sum(turn.draft_tokens for turn in own) / max(emitted, 1)
        ratio = None if arm == OURS else over(rates, arm)
        median = f"{np.median(rates[arm]):.1f}" if len(rates[arm]) else ""
        rows.append(f"| {name_of(arm, results.table)} | {median} | {length:.2f} | {'' if ratio is None else ratio} |")
    dirty = len({turn.round for turn in results.turns if turn.is_disturbed})
    swings = len({turn.round for turn in results.turns})
    told = [
        f"{swings} swings, {dirty} of them disturbed by other work or stolen time; {results.machine.name}, "
        f"commit {', '.join(results.commits)}.",
        "",
        "| arm | tokens/s | draft tokens a step and request | FASER over it |",
        "| --- | --: | --: | --: |",
        *rows,
    ]
    if best := best_fixed(rates):
        arm, ratio = best
        told += ["", f"The best of the measured lengths in hindsight: {arm_name(arm)}; FASER over it {ratio}."]
    return told


def best_fixed(rates: dict[str, Floats]) -> tuple[str, Ratio] | None:
    """Return the fixed length that was the best in hindsight, and FASER over it; None before there are two rounds."""
    found = {arm: ratio for arm in rates if arm not in (OURS, TABLE) and (ratio := over(rates, arm)) is not None}
    return min(found.items(), key=lambda item: item[1].value) if found else None


def sentence() -> str:
    """Return the README's line."""
    results = read()
    rates = results.rates()
    best, tuned = best_fixed(rates), over(rates, TABLE)
    if best is None or tuned is None:
        raise SystemExit(f"{RESULT.name} has fewer than two swings; run benchmarks/swing.py --resume")
    arm, ratio = best
    return (
        f"{SWINGING} to some twenty and back ({len(rates[OURS])} swings, {results.machine.name}), FASER's tokens/s are "
        f"{spread(ratio)} times those of {arm_name(arm)}, the best fixed length in hindsight, and {spread(tuned)} "
        "times those of the best table: [results](docs/results.md#a-swinging-load)."
    )


def spread(ratio: Ratio) -> str:
    """Return a ratio with its interval, short."""
    return f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def read() -> Swings:
    """Return the results file."""
    return msgspec.json.decode(RESULT.read_bytes(), type=Swings)


def table() -> str:
    """Return the table of the file."""
    return "\n".join(lines(read())) if RESULT.is_file() else "Not measured yet."

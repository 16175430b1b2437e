"""The table of a replayed trace in docs/bench.md, made from the file of a run: `python benchmarks/bench_trace.py`.

The run: `faser bench --trace azure-conv --swell --loads 1 --rivals none,k1,k3,table --pairs 3 --minutes 0
--out benchmarks/results/bench_trace.json`. A rival's row compares FASER with it alone, round by round, so the best
fixed length *in hindsight* is the smallest ratio of its rows; no rival is chosen.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from faser.controller.bench_ratio import OURS, Floats, paired_ratio, wider_interval
from faser.controller.bench_result import Results, Turn, name_of, read_results
from faser.controller.bench_table import described

RESULT: Final = Path(__file__).resolve().parent / "results" / "bench_trace.json"


def ratio(ours: Floats, theirs: Floats) -> str:
    """Return ours over theirs, (rounds,) each, with its 95 % interval."""
    logs = np.log(ours) - np.log(theirs)
    found = paired_ratio(logs[~np.isnan(logs)], wider_interval)
    return str(found) if found.pairs > 1 else f"{found.value:.3f}"


def _median(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return format(float(np.median(known)), form) if known else ""


def lines(results: Results, trace: str) -> list[str]:
    """Return the table of one trace."""
    kinds = next(kinds for load, kinds in results.load_points() if load == trace)
    turns = results.turns_at(trace, kinds)
    goodput = results.rates(trace, kinds)
    speed = {arm: 1.0 / rate for arm, rate in results.rates(trace, kinds, what="mean_tpot_ms").items()}
    names = (
        "arm",
        "goodput, tokens/s",
        "in time",
        "tokens/s",
        "TPOT, ms",
        "goodput of FASER over it",
        "speed per token",
    )
    rows = [names, ("---",) * len(names)]
    for arm in (arm for arm in results.arms() if arm in goodput):
        own: list[Turn] = [turn for turn in turns if turn.arm == arm]
        rows.append(
            (
                f"{name_of(arm)} ({described(results.table)})" if arm == "table" else name_of(arm),
                _median([turn.rate for turn in own], ".1f"), _median([turn.good_share for turn in own], ".0%"),
                _median([turn.tokens_per_s for turn in own], ".1f"),
                _median([turn.mean_tpot_ms for turn in own], ".1f"),
                "" if arm == OURS else ratio(goodput[OURS], goodput[arm]),
                "" if arm == OURS else ratio(speed[OURS], speed[arm]),
            )
        )  # fmt: skip
    rounds, disturbed = {turn.round for turn in turns}, {turn.round for turn in turns if turn.disturbed}
    said = (
        f"Rounds: {len(rounds)}, {len(disturbed)} of them disturbed; {results.machine.name}, commit {results.commit}."
    )
    return [said, "", *(f"| {' | '.join(row)} |" for row in rows)]


def table() -> str:
    """Return the table of the trace in the file."""
    results = read_results(RESULT)
    return "\n".join(lines(results, next(load for load, _ in results.load_points() if isinstance(load, str))))


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")

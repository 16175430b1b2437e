"""What docs/results.md says of pipeline policies is in the committed runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import faser

ROOT = Path(faser.__file__).parent
TOLD = ("reactive:4", "flexpipe", "weigh", "weigh:1.5", "learned", "hindsight")


def committed() -> dict[str, Any]:
    """Return the committed table, by load and policy."""
    loads: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "pipeline.json").read_text())["loads"]
    return loads


def section() -> str:
    return (
        (ROOT / "docs" / "results.md")
        .read_text()
        .partition("## Pipeline stages in simulation")[2]
        .partition("\n## ")[0]
    )


def over_fixed(row: dict[str, Any]) -> str:
    low, high = row["fixed"]["ci"]
    return f"{row['fixed']['latency_ratio']:.3f} ({low:.3f} to {high:.3f})"


def test_the_table_is_the_committed_runs() -> None:
    rows = [
        line.strip("| ").split(" | ") for line in section().splitlines() if re.match(r"\| *(\S+)? \| \S+ \| \d", line)
    ]
    told = [row if row[0] in committed() else ["", *row] for row in rows]
    load, expected = "", []
    for name, policies in committed().items():
        for policy in TOLD:
            row, fixed = policies[policy], policies[policy]["fixed"]
            figures = f"{row['mean_s']['mean']:.3f} ± {row['mean_s']['half_width']:.3f}", f"{row['p99_s']['mean']:.2f}"
            shares = (
                f"{100 * row['attainment']['mean']:.1f}",
                f"{row['gpus']['mean']:.1f}",
                f"{row['moves']['mean']:.0f}",
            )
            theirs = f"{row['cost']['mean']:.3f}", f"{fixed['mean_s']:.3f}", f"{100 * fixed['attainment']:.1f}"
            expected.append([name if name != load else "", policy, *figures, *shares, *theirs, over_fixed(row)])
            load = name
    assert told == expected


def test_what_is_said_of_bursts_and_swells_is_in_the_table() -> None:
    loads, said = committed(), " ".join(section().split())
    weigh, heavy, known = (
        {load: over_fixed(rows[name]) for load, rows in loads.items()} for name in ("weigh", "weigh:1.5", "hindsight")
    )
    assert f"On swell {weigh['swell']}: {loads['swell']['weigh']['gpus']['mean']:.1f} GPUs" in said
    bursts = [heavy[load] for load in ("azure-code", "gamma-4", "gamma-8")]
    assert "`weigh:1.5` has {} on azure-code, {} on gamma-4, {} on gamma-8".format(*bursts) in said
    assert f"`weigh` {weigh['azure-code']}, {weigh['gamma-4']} and {weigh['gamma-8']}." in said
    assert f"has {known['azure-code']}, {known['gamma-4']} and {known['gamma-8']}: gamma gaps" in said
    slowest = max(rows[name]["decision_ms"]["mean"] for rows in loads.values() for name in ("weigh", "weigh:1.5"))
    assert f"A decision takes at most {slowest:.1f} ms" in said

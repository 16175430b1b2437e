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
    page = (ROOT / "docs" / "results.md").read_text()
    return page.partition("## Pipeline stages in simulation")[2].partition("\n## ")[0]


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


def test_what_is_said_of_swells_bursts_and_smooth_loads_is_in_the_table() -> None:
    loads, said = committed(), " ".join(section().split())
    weigh, heavy, known = (
        {load: over_fixed(rows[name]) for load, rows in loads.items()} for name in ("weigh", "weigh:1.5", "hindsight")
    )
    gpus = {name: f"{row['gpus']['mean']:.1f}" for name, row in loads["swell"].items()}
    assert f"On swell {weigh['swell']}: {gpus['weigh']} GPUs are faster" in said
    assert f"holds {gpus['weigh:1.5']} and is at {heavy['swell']}" in said
    assert f"hindsight needs {gpus['hindsight']}" in said
    assert (
        "azure-conv {}, mooncake {}, gamma-1 {};".format(*(weigh[n] for n in ("azure-conv", "mooncake", "gamma-1")))
        in said
    )
    own = "azure-code-own-clock"
    costs = loads[own]["weigh"]["cost"]["mean"], loads[own]["weigh"]["fixed"]["cheapest_cost"]
    assert f"and has {weigh[own]} at a cost of {costs[0]:.3f}, `weigh:1.5` {heavy[own]};" in said
    assert f"({loads[own]['weigh']['fixed']['cheapest']}) is at {costs[1]:.3f}. Fixed sets" in said
    assert f"Hindsight has {known[own]}: it loads" in said
    bursts = ("azure-code", "gamma-4", "gamma-8")
    moves = max(loads[load][name]["moves"]["mean"] for load in bursts for name in ("weigh", "weigh:1.5"))
    assert f"with at most {moves:.0f} moves in 20 minutes" in said
    assert "`weigh:1.5` has {} on azure-code, {} on gamma-4, {} on gamma-8".format(*(heavy[n] for n in bursts)) in said
    assert "`weigh` {}, {} and {}: with".format(*(weigh[n] for n in bursts)) in said
    assert "has {}, {} and {}: gamma gaps".format(*(known[n] for n in bursts)) in said
    slowest = max(rows[name]["decision_ms"]["mean"] for rows in loads.values() for name in ("weigh", "weigh:1.5"))
    assert f"A decision takes at most {slowest:.1f} ms" in said


def test_what_is_said_of_costs_is_in_the_table() -> None:
    loads, said = committed(), " ".join(section().split())

    def costs(load: str) -> tuple[str, str, str]:
        weigh, hindsight = loads[load]["weigh"], loads[load]["hindsight"]
        told = weigh["cost"]["mean"], weigh["fixed"]["cheapest_cost"], hindsight["cost"]["mean"]
        return f"{told[0]:.3f}", f"{told[1]:.3f}", f"{told[2]:.3f}"

    assert (
        "it is at {} on azure-code, the cheapest fixed set (static:32:2) at {}, hindsight at {};".format(
            *costs("azure-code")
        )
        in said
    )
    assert "on gamma-8 {}, {} and {}; on gamma-4 {}, {} and {}.".format(*costs("gamma-8"), *costs("gamma-4")) in said
    assert loads["azure-code"]["weigh"]["fixed"]["cheapest"] == "static:32:2"


def test_what_is_said_of_foresight_is_in_its_runs() -> None:
    runs = json.loads((ROOT / "benchmarks" / "results" / "pipeline_foresight.json").read_text())
    said = " ".join(section().split())
    assert f"at commit {runs['commit']}; `pipeline_foresight.json`" in said
    fast = [over_fixed(runs["loads"][load]["hindsight:5"]) for load in ("gamma-4", "gamma-8", "azure-code")]
    assert "has {} of the fixed sets' latency on gamma-4, {} on gamma-8 and {} on azure-code".format(*fast) in said
    half = [f"{committed()[load]['hindsight']['fixed']['latency_ratio']:.3f}" for load in ("gamma-4", "gamma-8")]
    assert f"with half a request (above) {half[0]}, {half[1]} and 0.935" in said
    assert min(committed()["gamma-4"]["hindsight"]["fixed"]["ci"][1], 1.0) == 1.0, (
        "foresight is not below with an interval"
    )

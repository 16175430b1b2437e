"""The README's costs in one file: `python benchmarks/measured.py`, some ten minutes on an idle machine.

Runs the benchmarks of the adapter, the decision, the round trip, the store, the simulator and the fleet, those that
vary most several times, and keeps what they print in benchmarks/results/measured.json; `python docs/figures.py` then
writes the README's lines. docs/simulator.md's speed: `--only simulator --times 5 --out
benchmarks/results/simulator_speed.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from faser.controller.bench_machine import provenance

FOLDER: Final = Path(__file__).resolve().parent
RUNS: Final = {"adapter": 3, "decide": 1, "round_trip": 5, "store": 1, "simulator": 2, "fleet": 1}
MODULES: Final = {"simulator": "faser.env.bench"}  # the others are files of this folder
OPTIONS: Final = {"store": ("--seconds", "10"), "fleet": ("--engines", "8", "16", "24", "32", "40", "48")}


def measure(name: str) -> Any:
    """Return what a benchmark prints as JSON."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    what = ["-m", MODULES[name]] if name in MODULES else [str(FOLDER / f"{name}.py")]
    command = [sys.executable, *what, "--json", *OPTIONS.get(name, ())]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode and not done.stdout.rstrip().endswith("}"):  # with figures it is a verdict, and stands in them
        raise SystemExit(f"measured: {name} ended with code {done.returncode}: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout.splitlines()[-1])


def speed() -> str:
    """Return the simulator's speed, a line for each run kept."""
    found = json.loads((FOLDER / "results" / "simulator_speed.json").read_text())
    columns = ("steps_per_s", "steps_per_s_one_core", "steps_per_s_one_batch")
    rows = [f"| {' | '.join(f'{run[column]:,}' for column in columns)} |" for run in found["simulator"]]
    machine = found["machine"]
    said = f"{machine['cpu']}, {machine['cores']} cores, commit {found['commit']}; a line for each run:"
    head = "| engine steps/s, a batch on each of two cores | one core | one batch on two cores |"
    return "\n".join([said, "", head, "|---|---|---|", *rows])


def main() -> None:
    """Run all, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(RUNS), action="append", help="one of them, for a file of its own")
    parser.add_argument("--times", type=int, help="runs of each, in place of one or two")
    parser.add_argument("--note", default="", help="a remark kept in the results")
    parser.add_argument("--out", type=Path, default=FOLDER / "results" / "measured.json")
    options = parser.parse_args()
    found: dict[str, Any] = {
        **provenance(), "load_average": os.getloadavg()[0], "note": options.note,
    }  # fmt: skip
    for name in options.only or RUNS:
        print(f"measured: {name}", flush=True)
        found[name] = [measure(name) for _ in range(options.times or RUNS[name])]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

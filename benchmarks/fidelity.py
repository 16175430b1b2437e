"""What the simulator's model is worth: `python benchmarks/fidelity.py SURVEY... [--profile FILE] [--run A --repeat B]`.

SURVEY is what `faser profile --telemetry FILE` kept. Fits it as `faser calibrate` does, with whole cells held out, and
writes the profile (env/profiles/embedded.json unless told otherwise), docs/simulator_steps.svg and the figures of
docs/simulator.md into benchmarks/results/fidelity.json. A and B are telemetry of two runs of one load, never fitted
(`faser demo --seed N --output FOLDER`, twice): `faser fidelity` replays A through that profile. Then run
`python docs/figures.py`. Takes a minute.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import msgspec
from profile_plot import DEFAULT_OUTPUT, draw_surveys

from faser.controller.bench_machine import commit, machine_facts, versions
from faser.env.accept_traces import SHIPPED, shipped_accept_trace
from faser.env.acceptance_fit import describe, fit_acceptance

ROOT: Final = Path(__file__).resolve().parent.parent
RESULT: Final = ROOT / "benchmarks" / "results" / "fidelity.json"
PROFILE: Final = ROOT / "env" / "profiles" / "embedded.json"


def told(*arguments: object) -> dict[str, Any]:
    """Return the last line that a command of faser prints, which is JSON."""
    command = [str(Path(sys.executable).with_name("faser")), *map(str, arguments), "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def published() -> dict[str, Any]:
    """Return the acceptance generator beside each shipped accept trace."""
    found = {}
    for name in SHIPPED:
        drafts = shipped_accept_trace(name)
        seen = describe(fit_acceptance(drafts, drafts[0].verified, name), drafts)
        found[name] = {
            "tested": sum(seen.trials), "measured": seen.measured_means, "model": seen.model_means,
        }  # fmt: skip
    return found


def main() -> None:
    """Fit, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("surveys", type=Path, nargs="+", metavar="SURVEY")
    parser.add_argument("--profile", type=Path, default=PROFILE, help="the profile to write")
    parser.add_argument("--run", type=Path, help="telemetry of a run that is not fitted")
    parser.add_argument("--repeat", type=Path, help="telemetry of the same load again")
    parser.add_argument("--json", type=Path, default=RESULT, help="the figures to write")
    parser.add_argument("--picture", type=Path, default=DEFAULT_OUTPUT, help="predicted against measured step times")
    options = parser.parse_args()
    if (options.run is None) != (options.repeat is None):
        parser.error("--run and --repeat go together: the engine's own spread stands beside every figure")
    calibration = told("calibrate", *options.surveys, "-o", options.profile, "--name", "embedded")
    closed_loop = None
    if options.run is not None:
        closed_loop = told("fidelity", options.run, "--profile", options.profile, "--repeat", options.repeat)
    report = {
        "machine": msgspec.to_builtins(machine_facts()), "versions": versions(), "commit": commit(),
        "surveys": len(options.surveys), "calibration": calibration, "closed_loop": closed_loop,
        "published": published(),
    }  # fmt: skip
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    draw_surveys(options.surveys, options.picture)
    print(json.dumps(report))


if __name__ == "__main__":
    main()

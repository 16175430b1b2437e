"""What the simulator's model is worth: `python benchmarks/fidelity.py SURVEY --answers FILE --run A --repeat B`.

SURVEY is what `faser profile --telemetry FILE` kept. Fits it as `faser calibrate` does, with whole cells held out, and
writes the profile (env/profiles/embedded.json unless told otherwise), docs/simulator_steps.svg and the figures of
docs/simulator.md into benchmarks/results/fidelity.json. Acceptance is refitted to the answers in FILE, if given
(`faser demo --policy fixed:4 --seed N --output FOLDER`): a survey's own texts repeat themselves. A and B are telemetry
of two runs of one load, never fitted (`faser demo --seed M`, twice): `faser fidelity` replays A through that profile,
levelled to --level if given: telemetry of another load just before, because a shared machine has faster and slower
hours.

With --both, --ahead and --ahead-repeat, runs of an engine with a drafter's process (docs/simulator.md, drafting
ahead), costs are levelled and drafting ahead is fitted to the first ones, and --ahead is replayed. Then run
`python docs/figures.py`. Takes a minute or two.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
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


def closed_loop(options: argparse.Namespace) -> dict[str, Any] | None:
    """Return how far a replay is from a run that nothing was fitted to."""
    if options.run is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        profile, levels = options.profile, None
        if options.level is not None:
            profile = Path(folder) / "levelled.json"
            levels = told("calibrate", options.level, "--base", options.profile, "-o", profile)["levels"]
        replayed = told("fidelity", options.run, "--profile", profile, "--repeat", options.repeat)
    return replayed | {"levels": levels}


def drafting_ahead(options: argparse.Namespace) -> dict[str, Any] | None:
    """Return what was fitted to a run that drafts ahead at times, and how far a replay is from one that always does."""
    if options.both is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "ahead.json"
        fitted = told("calibrate", *options.both, "--base", options.profile, "-o", profile)
        replayed = told("fidelity", options.ahead, "--profile", profile, "--repeat", options.ahead_repeat)
    return {"fitted": fitted["ahead"], "closed_loop": replayed}


def main() -> None:
    """Fit, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("surveys", type=Path, nargs="+", metavar="SURVEY")
    parser.add_argument("--profile", type=Path, default=PROFILE, help="the profile to write")
    parser.add_argument(
        "--answers", type=Path, nargs="+", default=[], help="telemetry of real answers at a fixed length"
    )
    parser.add_argument("--level", type=Path, help="telemetry that tells how fast the machine is beside --run")
    parser.add_argument("--both", type=Path, nargs="+", help="telemetry with steps that draft ahead and that do not")
    parser.add_argument("--ahead", type=Path, help="telemetry of one that always does")
    parser.add_argument("--ahead-repeat", type=Path, help="telemetry of the same load again")
    parser.add_argument("--run", type=Path, help="telemetry of a run that is not fitted")
    parser.add_argument("--repeat", type=Path, help="telemetry of the same load again")
    parser.add_argument("--json", type=Path, default=RESULT, help="the figures to write")
    parser.add_argument("--picture", type=Path, default=DEFAULT_OUTPUT, help="predicted against measured step times")
    options = parser.parse_args()
    if (options.run is None) != (options.repeat is None):
        parser.error("--run and --repeat go together: the engine's own spread stands beside every figure")
    if len({path is None for path in (options.both, options.ahead, options.ahead_repeat)}) > 1:
        parser.error("--both, --ahead and --ahead-repeat go together")
    calibration = told("calibrate", *options.surveys, "-o", options.profile, "--name", "embedded")
    if options.answers:
        kept = ("--base", options.profile, "--keep-costs", "-o", options.profile)
        calibration["acceptance"] = told("calibrate", *options.answers, *kept)["acceptance"]
    report = {
        "machine": msgspec.to_builtins(machine_facts()), "versions": versions(), "commit": commit(),
        "surveys": len(options.surveys), "calibration": calibration, "closed_loop": closed_loop(options),
        "ahead": drafting_ahead(options), "published": published(),
    }  # fmt: skip
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    draw_surveys(options.surveys, options.picture)
    print(json.dumps(report))


if __name__ == "__main__":
    main()

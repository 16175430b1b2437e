"""What the simulator's model is worth: `python benchmarks/fidelity.py SURVEY --answers FILE --run A --repeat B`.

SURVEY is what `faser profile --telemetry FILE` kept. Fits it as `faser calibrate` does, with whole cells held out, and
writes the profile (env/profile/profiles/embedded.json unless told otherwise) and the figures of docs/results.md into
benchmarks/results/fidelity.json. Acceptance is refitted to the answers in FILE, if given
(`faser demo --policy fixed:4 --seed N --output FOLDER`): a survey's own texts repeat themselves. A and B are telemetry
of two runs of one load, never fitted (`faser demo --seed M --peak-rps R`, twice): `faser fidelity` replays A through
that profile, levelled to --level if given: telemetry of another load just before, because a shared machine has faster
and slower hours.

With --ahead-survey, --ahead and --ahead-repeat the same for an engine with a drafter's process (docs/results.md,
drafting ahead): a survey that drafts ahead at times, and two runs that always do; its profile is written beside the
other, as embedded_ahead.json. With --pruned-survey, --pruned and --pruned-repeat for one that prunes. A mechanism that
is not given stays in the file as it was, without SURVEY so does all else; a new profile without --run has no replay.
Takes a minute or two.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from faser.controller.engine.machine import provenance
from faser.env.calibration.accept_traces import SHIPPED, shipped_accept_trace
from faser.env.calibration.acceptance_fit import describe, fit_acceptance

ROOT: Final = Path(__file__).resolve().parent.parent
RESULT: Final = ROOT / "benchmarks" / "results" / "fidelity.json"
PROFILE: Final = ROOT / "env" / "profile" / "profiles" / "embedded.json"
MECHANISMS: Final = {"ahead": "ahead", "pruned": "exits"}  # and what of a profile they are
NAME: Final = "embedded"
KEPT: Final = ("ahead",)  # whose profile ships, beside the one without


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


def replay(profile: Path, level: Path | None, run: Path, again: Path) -> dict[str, Any]:
    """Return how far a replay is from a run that nothing was fitted to, through a profile levelled to another run."""
    with tempfile.TemporaryDirectory() as folder:
        levels = None
        if level is not None:
            levelled = Path(folder) / "levelled.json"
            levels = told("calibrate", level, "--base", profile, "-o", levelled)["levels"]
            profile = levelled
        return told("fidelity", run, "--profile", profile, "--repeat", again) | {"levels": levels}


def with_mechanism(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return what a survey with a mechanism on came to, and how far a replay is from a run with it."""
    asked = {key: getattr(options, f"{name}_{key}") for key in ("survey", "level", "repeat")}
    where = provenance()  # before the profile is written, which is a change of the tree itself
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / f"{name}.json"
        fitted = told("calibrate", *asked["survey"], "-o", profile, "--name", f"{NAME}_{name}")
        if options.answers:
            told("calibrate", *options.answers, "--base", profile, "--keep-costs", "-o", profile)
        replayed = replay(profile, asked["level"], getattr(options, name), asked["repeat"])
        if name in KEPT:
            shutil.copyfile(profile, options.profile.with_name(f"{options.profile.stem}_{name}.json"))
    parts = {part: fitted[part] for part in ("verify", "draft", MECHANISMS[name])}
    return {"calibration": parts, "closed_loop": replayed} | where


def without(options: argparse.Namespace) -> dict[str, Any]:
    """Fit the shipped profile, and return what its surveys came to and how far a replay is from a run."""
    where = provenance()
    calibration = told("calibrate", *options.surveys, "-o", options.profile, "--name", NAME)
    if options.answers:
        kept = ("--base", options.profile, "--keep-costs", "-o", options.profile)
        calibration["acceptance"] = told("calibrate", *options.answers, *kept)["acceptance"]
    found = {"surveys": len(options.surveys), "calibration": calibration, "closed_loop": None}
    if options.run is not None:
        found["closed_loop"] = replay(options.profile, options.level, options.run, options.repeat)
    return where | found | {"published": published()}


def main(arguments: list[str] | None = None) -> None:
    """Fit, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("surveys", type=Path, nargs="*", metavar="SURVEY")
    parser.add_argument("--profile", type=Path, default=PROFILE, help="the profile to write")
    parser.add_argument(
        "--answers", type=Path, nargs="+", default=[], help="telemetry of real answers at a fixed length"
    )
    parser.add_argument("--level", type=Path, help="telemetry that tells how fast the machine is beside --run")
    parser.add_argument("--run", type=Path, help="telemetry of a run that is not fitted")
    parser.add_argument("--repeat", type=Path, help="telemetry of the same load again")
    for name in MECHANISMS:
        parser.add_argument(f"--{name}-survey", type=Path, action="append", help="a survey with it on at times")
        parser.add_argument(f"--{name}-level", type=Path, help="as --level, of an engine with it")
        parser.add_argument(f"--{name}", type=Path, help="telemetry of an engine with it always on")
        parser.add_argument(f"--{name}-repeat", type=Path, help="telemetry of the same load again")
    parser.add_argument("--json", type=Path, default=RESULT, help="the figures to write")
    options = parser.parse_args(arguments)
    if (options.run is None) != (options.repeat is None):
        parser.error("--run and --repeat go together: the engine's own spread stands beside every figure")
    given = []
    for name in MECHANISMS:
        parts = [getattr(options, part) for part in (f"{name}_survey", name, f"{name}_repeat")]
        if any([*parts, getattr(options, f"{name}_level")]) and not all(parts):
            parser.error(f"--{name}-survey, --{name} and --{name}-repeat go together, with --{name}-level if at all")
        given += [name] if all(parts) else []
    if not options.surveys and (options.run or options.level):
        parser.error("--run, --repeat and --level are compared with the profile of SURVEY; none is given")
    if not options.surveys and not given:
        parser.error("nothing to fit; expected SURVEY or the survey of a mechanism")
    report = json.loads(options.json.read_text()) if options.json.exists() else {}
    if options.surveys:
        report |= without(options)
    for name in given:
        report[name] = with_mechanism(options, name)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()

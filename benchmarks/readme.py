"""What the README shows of its two commands: `python benchmarks/readme.py demo` and `... readme.py tests LOG`.

`demo` runs `faser demo --duration 45 --json` and keeps what it prints; `tests` keeps the last line of each part of
`make test` from a file with its output. Both end up in benchmarks/results/readme.json, and from there in the README, by
docs/figures.py.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from faser.controller.bench_machine import provenance

RESULTS = Path(__file__).resolve().parent / "results" / "readme.json"
COMMAND = ("faser", "demo", "--duration", "45", "--json")
SUMMARY = re.compile(r"=+ (\d+ passed.*) in [\d.]+s.* =+")
PLACES = ("telemetry_path", "report_path")
DEMO_FIGURES = (
    "engine", "requests", "tokens_per_s", "ttft_ms", "tpot_ms", "steps", "decisions", "steps_under_lease",
    "dropped_records", "gaps", "acceptance_rate", "mean_draft_length", "draft_length_histogram",
    "lease_share_after_first_second", "steps_with_mixed_lengths", "adapter_us_per_step", "adapter_share", "peak_rps",
    "peak_running", "telemetry_path", "report_path",
)  # fmt: skip
WIDTH = 125
NAMED = ("model", "drafter")  # of the engine: places, too


def run_demo(command: tuple[str, ...]) -> dict[str, Any]:
    """Run the demo and return what it printed; raise SystemExit with its last lines if it failed."""
    done = subprocess.run([Path(sys.executable).with_name(command[0]), *command[1:]], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return told_demo(command, done.stderr, done.stdout)


def told_demo(command: tuple[str, ...], progress: str, output: str) -> dict[str, Any]:
    """Return what is kept of a demo: its progress, and its result without the places of this machine."""
    result = json.loads(output.splitlines()[-1])
    for name in PLACES:
        result[name] = "..."
    for name in NAMED:
        del result["engine"][name]
    lines = [line.rstrip() for line in progress.splitlines() if line.startswith("faser: ")]
    return {"command": " ".join(command), "printed": lines, "result": result}


def told_tests(log: str) -> list[str]:
    """Return the last line of each part of `make test`; raise SystemExit unless both parts passed."""
    found = [match.group(0) for match in map(SUMMARY.search, log.splitlines()) if match]
    if len(found) != 2:
        raise SystemExit(f"{len(found)} parts of `make test` that passed; expected 2")
    return found


def read() -> Any:
    """Return the results file."""
    return json.loads(RESULTS.read_text())


def demo() -> str:
    """Return what the README shows of the demo: four lines of its progress, and the first figures of its result."""
    told = read()["demo"]
    progress = [line for line in told["printed"] if line.startswith("faser: time ")]
    dropped = set(progress) - {progress[round(place * (len(progress) - 1) / 3)] for place in range(4)}
    result = {name: told["result"][name] for name in DEMO_FIGURES}
    pieces = json.dumps(result, separators=(",", ":")).replace(',"', ',\0"').split("\0")
    lines = [f"$ {told['command']}", *(line for line in told["printed"] if line not in dropped), ""]
    for piece in pieces:
        if len(lines[-1]) + len(piece) > WIDTH:
            lines.append("")
        lines[-1] += piece
    return "\n".join(["```", *lines, "```"])


def tests() -> str:
    """Return what the README shows of the tests."""
    first, second = read()["tests"]["lines"]
    return "\n".join(["```", "$ make test", "...", first, "...", second, "```"])


def main() -> None:
    """Run or read, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("demo", "tests"))
    parser.add_argument("log", type=Path, nargs="?", help="what `make test` printed")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.what == "tests" and given.log is None:
        parser.error("tests: expected a file with what `make test` printed")
    told = run_demo(COMMAND) if given.what == "demo" else {"lines": told_tests(given.log.read_text(errors="replace"))}
    told |= provenance()
    kept = json.loads(given.out.read_text()) if given.out.exists() else {}
    given.out.write_text(json.dumps(kept | {given.what: told}, indent=1) + "\n")


if __name__ == "__main__":
    main()

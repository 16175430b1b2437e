"""What the gates make of drafting ahead and groups for the embedded pair: `python benchmarks/overlap_gate.py`.

One engine (vLLM V1, CPU, greedy, one core for the target and one for the drafter's process), held-out prompts of five
kinds, 1 to 16 requests at once. Four arms: `in turn` (the process drafts after verification), `ahead` (it goes on while
the target verifies), `groups` (two groups take turns), `gated` (both where the gates have measured that they pay: what
a user gets who switches both on). All are held to the same recorded answers, and steady.py makes rates
that a shared machine's bursts do not reach: in a turn each arm answers one set of prompts, which tells its steps; and
twice the forced arms answer it taking turns after some tokens, which tells what steps take. A step counts as what it
was, so that those of `gated` have the times of the arm whose code they ran; the first two of a slice, in which the
process still has another way's drafts, are left out, and so are those after the first request has ended. Times are wall
time. The gates learn before they are measured. Each of them then tries what it has found slower in 8 of 512 steps or
fewer, which may fall into the answers of few requests, and does not into those of many: there up to 0.2 % is missing.
The file is written when a load is done; a run that is started again goes on behind the last one. Half an hour on two
quiet cores; --quick is a dry run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec
from measured_cells import begun, fill
from remote import Remote
from tables import table

from faser.controller.engine.machine import machine_facts, versions
from faser.engine_adapter.settings import AUTO
from faser.env.workload.prompts import KINDS, held_out_prompts
from faser.models.embedded.precision import dtype_on

FOLDER: Final = Path(__file__).resolve().parent
RESULT: Final = FOLDER / "results" / "overlap_gate.json"
ENGINE: Final = FOLDER / "overlap_engine.py"
MAX_PROMPT_TOKENS: Final = 300
QUICK_TOKENS: Final = 60  # enough for a slice of each arm


def prompt_sets(count: int, requests: int) -> list[list[str]]:
    """Return sets of prompts, the kinds in turn; another set has others."""
    kinds = [[each.text for each in held_out_prompts([kind]) if each.tokens <= MAX_PROMPT_TOKENS] for kind in KINDS]
    found = []
    for set_ in range(count):
        numbers = range(set_ * requests, (set_ + 1) * requests)
        found.append([(of := kinds[number % len(kinds)])[number // len(kinds) % len(of)] for number in numbers])
    return found


def turns_of(turns: int, requests: int) -> int:
    """Return how many turns a load takes: few requests take more."""
    return max(turns * 40 // (2 * requests + 8), 2)


def read_options() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=4, help="at 16 requests; fewer requests take more")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="loads")
    parser.add_argument("--length", type=int, default=4, help="tokens of a chunk and of a frontier")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--dtype", default=dtype_on("cpu"))
    parser.add_argument("--cores", type=int, nargs=2, default=sorted(os.sched_getaffinity(0))[:2])
    parser.add_argument("--quick", action="store_true", help="two loads, one turn, few tokens: no measurement")
    parser.add_argument("--json", type=Path, default=RESULT, help="write the report here")
    options = parser.parse_args()
    if len(set(options.cores)) < 2:
        parser.error(f"cores {options.cores}; expected two, one for the target and one for the drafter")
    if options.quick and options.json == RESULT:
        parser.error("--quick is a dry run; name another file with --json")
    if options.quick:
        options.requests, options.tokens, options.turns = [1, 2], QUICK_TOKENS, 1
    return options


def main() -> None:
    """Measure what is not there yet."""
    options = read_options()
    said = {
        "length": options.length, "tokens": options.tokens, "turns": options.turns, "dtype": options.dtype,
        "machine": msgspec.to_builtins(machine_facts()), "versions": versions(),
    }  # fmt: skip
    report = begun(options.json, said, {"loads": []})
    target, drafter = options.cores
    arguments = [str(options.length), str(max(options.requests)), options.dtype]
    with tempfile.TemporaryDirectory(prefix="faser-") as folder:
        environment = {
            "FASER_DRAFTER_CORES": str(drafter), "FASER_PING_PONG": AUTO,
            "FASER_ENDPOINT": f"ipc://{folder}/engine.sock",  # where nobody listens
            "VLLM_CPU_OMP_THREADS_BIND": str(target), "KMP_BLOCKTIME": "0",
        }  # fmt: skip

        def measure(requests: int) -> dict[str, Any]:
            sets = prompt_sets(1 + turns_of(options.turns, requests), requests)
            found: dict[str, Any] = engine.ask("measure", sets, options.tokens)
            return found

        with Remote(str(ENGINE), arguments, folder, environment) as engine:
            fill(options.json, report, "loads", options.requests, lambda load: load["requests"], measure)
    print(table(report))


if __name__ == "__main__":
    main()

"""What a split of the cores takes and brings, beside all cores in turn: `python benchmarks/core_splits.py`.

One engine (vLLM V1, CPU, greedy, all cores), held-out prompts of five kinds, several requests at once. Three arms:
`unsplit` (target and vLLM's own drafter in turn, each with all cores), `1:1` (two groups: the target on one half of the
cores, the drafter's process on the other), `gated` (the split is asked for in every step, and the engine's gate
decides). Both forced arms also take turns within an answer, so the engine switches every few steps. Method and limits
are those of overlap_gate.py, whose prompts these are; `phases` has the medians of each phase by itself (unsplit) and
beside the other one. The gate learns before it is measured: `learning_runs` says over how many runs of the prompts.
A quarter of an hour on two quiet cores; --quick is a dry run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec
from measured_cells import begun, fill
from overlap_gate import prompt_sets, turns_of
from remote import Remote
from tables import table

from faser.controller.engine.machine import machine_facts, versions
from faser.models.embedded.precision import dtype_on

FOLDER: Final = Path(__file__).resolve().parent
RESULT: Final = FOLDER / "results" / "core_splits.json"
ENGINE: Final = FOLDER / "split_engine.py"
QUICK_TOKENS: Final = 60  # enough for a slice of each arm


def read_options() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=4, help="at 16 requests; fewer requests take more")
    parser.add_argument("--requests", type=int, nargs="+", default=[2, 4, 8, 16], help="loads")
    parser.add_argument("--length", type=int, default=4, help="tokens of a draft")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--dtype", default=dtype_on("cpu"))
    parser.add_argument("--quick", action="store_true", help="one load, one turn, few tokens: no measurement")
    parser.add_argument("--json", type=Path, default=RESULT, help="write the report here")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("one core; expected two, which can be split")
    if options.quick and options.json == RESULT:
        parser.error("--quick is a dry run; name another file with --json")
    if options.quick:
        options.requests, options.tokens, options.turns = [2], QUICK_TOKENS, 1
    return options


def main() -> None:
    """Measure what is not there yet."""
    options = read_options()
    said = {
        "length": options.length, "tokens": options.tokens, "turns": options.turns, "dtype": options.dtype,
        "machine": msgspec.to_builtins(machine_facts()), "versions": versions(),
    }  # fmt: skip
    report = begun(options.json, said, {"loads": []})
    arguments = [str(options.length), str(max(options.requests)), options.dtype]
    with tempfile.TemporaryDirectory(prefix="faser-") as folder:
        cores = str(len(os.sched_getaffinity(0)))
        environment = {
            "FASER_SPLITS": "1:1", "FASER_ENDPOINT": f"ipc://{folder}/engine.sock",  # where nobody listens
            "OMP_NUM_THREADS": cores, "NUMBA_NUM_THREADS": cores, "KMP_BLOCKTIME": "5",
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

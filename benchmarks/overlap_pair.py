"""What drafting ahead and groups win for the embedded pair: `python benchmarks/overlap_pair.py [--json FILE]`.

SmolLM2-135M-Instruct and its EAGLE-3 head on vLLM (V1, CPU, greedy), held-out prompts of five kinds, 1 to 16 requests
at once. Six arms in turns, prompt set by prompt set. With one core for the target and one for the drafter's process:
`own` (vLLM's own drafter on the target's core), `in turn` (the process drafts after verification), `ahead` (and goes
on while the target verifies, where a request's hits promise to pay), `groups` (two groups take turns wherever they
can), `gated` (ahead, and groups where they were measured to pay: what a user gets who switches both on). `unsplit` is a
second engine with both cores for both phases and no process. Prints JSON: tokens per second of each arm with median and
spread, ratios of pairs of runs, how often frontiers were of use, and how many tokens were accepted of those drafted in
turn and ahead. An hour on two quiet cores, most of it at 16 requests; the file is written when a load is done, with
those before it. --quick is a dry run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from remote import Remote, serve

from faser.engine_adapter.settings import ALWAYS, AUTO, NEVER
from faser.models.embedded.precision import dtype_on

SPLIT = ("own", "in turn", "ahead", "groups", "gated")
ARMS = (*SPLIT, "unsplit")
PAIRS = (("ahead", "in turn"), ("ahead", "own"), ("ahead", "unsplit"), ("own", "unsplit"), ("groups", "in turn"),
         ("gated", "in turn"), ("gated", "ahead"), ("gated", "groups"))  # fmt: skip
GATE_RUNS = 8  # each gate wants 64 steps of either kind before it settles
READY_S = 60.0
MAX_MODEL_LEN = 1024
MAX_PROMPT_TOKENS = 300
Run = dict[str, Any]


class Engine:
    """In the child: answers `run`."""

    def __init__(self, length: int, requests: int, dtype: str) -> None:
        from vllm import LLM

        from faser.models.embedded.pair import ensure_embedded_drafter, ensure_embedded_target

        classes: dict[str, Any] = {
            "scheduler_cls": "faser.engine_adapter.scheduler.FaserScheduler",
            "worker_cls": "faser.engine_adapter.worker.FaserWorker",
            "speculative_config": {
                "method": "eagle3", "model": str(ensure_embedded_drafter()), "num_speculative_tokens": length,
            },
        }  # fmt: skip
        self._llm = LLM(
            str(ensure_embedded_target()), dtype=dtype, enforce_eager=True, max_model_len=MAX_MODEL_LEN,
            max_num_seqs=requests, **classes,
        )  # fmt: skip
        core: Any = self._llm.llm_engine.engine_core
        executor: Any = self._llm.llm_engine.model_executor
        self._scheduler = core.engine_core.scheduler
        self._steering, self._groups = self._scheduler.steering, self._scheduler.ping_pong
        self._remote = executor.driver_worker.worker.model_runner.remote
        self._length = length
        self._runs = 0
        if self._remote is not None:
            self._go_on = self._remote.go_on
            self._wait_for_process()

    def _wait_for_process(self) -> None:
        ends_s = time.monotonic() + READY_S
        while not self._remote.process.is_ready and time.monotonic() < ends_s:
            self._remote.process.collect(1.0)

    def run(self, texts: list[str], tokens: int, arm: str) -> Run:
        """Answer prompts at once; return tokens per second of decoding, and what the process did."""
        default, remote = self._steering.default, self._remote
        default.length, default.frontier = self._length, 0 if arm in ("own", "unsplit") else self._length
        self._scheduler.ping_pong = self._groups if arm in ("groups", "gated") else None
        if self._groups is not None:
            self._groups.mode = ALWAYS if arm == "groups" else AUTO
        if remote is not None:
            remote.mode = AUTO if arm == "gated" else ALWAYS
            remote.go_on = self._go_on if arm in ("ahead", "gated") else lambda *_: self._go_on([], 0)
        before = self._counts()
        found = self._generate(texts, tokens)
        return found | {name: after - before[name] for name, after in self._counts().items()}

    def _counts(self) -> dict[str, int]:
        if self._remote is None:
            return {}
        outcomes, in_turn, ahead = self._remote.frontiers.outcomes, self._remote.in_turn, self._remote.ahead
        return {
            "hits": outcomes.hits, "rejected": outcomes.rejected, "other_bonus": outcomes.other_bonus,
            "late": outcomes.late, "handed_in_turn": in_turn.handed, "accepted_in_turn": in_turn.accepted,
            "handed_ahead": ahead.handed, "accepted_ahead": ahead.accepted,
        }  # fmt: skip

    def _add(self, texts: list[str], tokens: int) -> list[str]:
        """Send prompts, to be answered with so many tokens; return the requests' names."""
        from vllm import SamplingParams

        tokenizer: Any = self._llm.get_tokenizer()
        limits = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        names = []
        for text in texts:
            self._runs += 1
            names.append(str(self._runs))
            self._llm.llm_engine.add_request(names[-1], {"prompt_token_ids": tokenizer.encode(text)}, limits)
        return names

    def _generate(self, texts: list[str], tokens: int) -> Run:
        engine: Any = self._llm.llm_engine
        said = dict.fromkeys(self._add(texts, tokens), 0)
        began_s, first, steps = 0.0, 0, 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                said[output.request_id] = len(output.outputs[0].token_ids)
            steps += 1
            if not first and all(said.values()):  # every prompt is read: from here on it is decoding
                began_s, first, steps = time.monotonic(), sum(said.values()), 0
        took_s = time.monotonic() - began_s
        decoded = sum(said.values()) - first
        return {"rate": decoded / took_s, "tokens": decoded, "step_ms": 1e3 * took_s / max(steps, 1)}


def start(options: argparse.Namespace, folder: str, is_split: bool, script: str = __file__) -> Remote:
    """Return an engine's process that is ready; `script` serves in it."""
    target, drafter = options.cores
    cores = str(target) if is_split else f"{target},{drafter}"
    environment = {
        "FASER_DRAFTER_CORES": str(drafter) if is_split else "",
        "FASER_PING_PONG": AUTO if is_split else NEVER,
        "FASER_ENDPOINT": f"ipc://{folder}/{'split' if is_split else 'unsplit'}.sock",  # where nobody listens
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "KMP_BLOCKTIME": "0",
    }
    arguments = [str(options.length), str(max(options.requests)), options.dtype]
    engine = Remote(script, arguments, folder, 1 if is_split else 2, environment)
    engine.wait_ready()
    return engine


def prompt_sets(options: argparse.Namespace, requests: int) -> list[list[str]]:
    """Return the prompts of each round, the kinds in turn; another round has others."""
    from faser.env.workload.prompts import KINDS, held_out_prompts

    kinds = [[each.text for each in held_out_prompts([kind]) if each.tokens <= MAX_PROMPT_TOKENS] for kind in KINDS]
    found = []
    for round_ in range(options.rounds):
        numbers = range(round_ * requests, (round_ + 1) * requests)
        found.append([(of := kinds[number % len(kinds)])[number // len(kinds) % len(of)] for number in numbers])
    return found


def measure(engines: dict[str, Remote], options: argparse.Namespace, requests: int) -> dict[str, Any]:
    """Return all arms at one load; every round has the same prompts for each, in another order."""
    runs: dict[str, list[Run]] = {arm: [] for arm in ARMS}
    sets = prompt_sets(options, requests)
    for arm in ARMS + ("gated",) * GATE_RUNS:  # warm
        engines[arm].ask("run", sets[0], options.tokens, arm)
    for round_, texts in enumerate(sets):
        turn = round_ % len(ARMS)
        for arm in ARMS[turn:] + ARMS[:turn]:
            runs[arm].append(engines[arm].ask("run", texts, options.tokens, arm))
        say(f"{requests} requests: {round_ + 1} of {len(sets)} rounds")
    return summary(runs)


def say(text: str) -> None:
    """Tell the user how far it is."""
    print(f"overlap_pair {time.strftime('%H:%M:%S')}: {text}", file=sys.stderr, flush=True)


def spread(values: list[float]) -> dict[str, float]:
    """Return median, least and most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def summary(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Return one load's report."""
    rates = {arm: [run["rate"] for run in runs[arm]] for arm in ARMS}
    return {
        "tokens_per_s": {arm: spread(rates[arm]) for arm in ARMS},
        "step_ms": {arm: spread([run["step_ms"] for run in runs[arm]]) for arm in ARMS},
        "ratios": {
            f"{one} / {other}": spread([a / b for a, b in zip(rates[one], rates[other], strict=True)])
            for one, other in PAIRS
        },
        "ahead": {
            name: sum(run[name] for run in runs["ahead"])
            for name in ("hits", "rejected", "other_bonus", "late", "handed_in_turn", "accepted_in_turn",
                         "handed_ahead", "accepted_ahead")
        },
        "runs": runs,
    }  # fmt: skip


def read_pair_options(parser: argparse.ArgumentParser, result: Path | None = None) -> argparse.Namespace:
    """Return the command line; `result` is the file that is written unless another one is named."""
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="loads")
    parser.add_argument("--length", type=int, default=4, help="tokens of a chunk and of a frontier")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--dtype", default=dtype_on("cpu"))
    parser.add_argument("--cores", type=int, nargs=2, default=sorted(os.sched_getaffinity(0))[:2])
    parser.add_argument("--quick", action="store_true", help="two loads, one round, few tokens: no measurement")
    parser.add_argument("--json", type=Path, default=result, help="write the report here as well")
    options = parser.parse_args()
    if len(set(options.cores)) < 2:
        parser.error(f"cores {options.cores}; expected two, one for the target and one for the drafter")
    if options.quick:
        options.requests, options.tokens = [1, 2], 12
    return options


def read_options() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    options = read_pair_options(parser)
    options.rounds = 1 if options.quick else options.rounds
    return options


def main() -> None:
    """Measure and print."""
    from faser.controller.engine.machine import provenance

    options = read_options()
    loads: dict[str, Any] = {}
    report = {
        **provenance(), "length": options.length, "dtype": options.dtype, "cores": options.cores,
        "tokens": options.tokens, "rounds": options.rounds, "loads": loads,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="faser-") as folder:
        split = start(options, folder, is_split=True)
        try:
            unsplit = start(options, folder, is_split=False)
            try:
                engines = dict.fromkeys(ARMS, split) | {"unsplit": unsplit}
                for requests in options.requests:
                    loads[str(requests)] = measure(engines, options, requests)
                    if options.json:
                        options.json.write_text(json.dumps(report, indent=1) + "\n")
            finally:
                unsplit.end()
        finally:
            split.end()
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    if "--child" in sys.argv:
        serve(Engine(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
    else:
        main()

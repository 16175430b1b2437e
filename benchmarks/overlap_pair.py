"""What drafting ahead and groups win for the embedded pair: `python benchmarks/overlap_pair.py [--json FILE]`.

SmolLM2-135M-Instruct and its EAGLE-3 head on vLLM (V1, CPU, greedy), held-out prompts of five kinds, 1 to 16 requests
at once. Six arms, each an engine of its own, that take turns in slices of about a second: a slice ends at the same
total of tokens for all, its first step is not measured. All are held to the same answers, recorded before without
speculation (held_text.py). With one core for the target and one for the drafter's process:
`own` (vLLM's own drafter on the target's core), `in turn` (the process drafts after verification), `ahead` (and goes
on while the target verifies, where a request's hits promise to pay), `groups` (two groups take turns wherever they
can), `gated` (ahead, and groups where they were measured to pay: what a user gets who switches both on). `unsplit` has
both cores for both phases and no process. Prints JSON: tokens per second of each arm with median and spread, ratios
within rounds with their intervals, `gated` over the best of in turn, ahead and groups, which is chosen on every other
round and compared on those between, how often frontiers were of use, and how many tokens were accepted of those drafted
in turn and ahead. After --rounds rounds of all arms a load goes on with `gated` and the best of what its gates choose
from, until their ratio's interval is narrow enough or the load's minutes are over. An hour at most on two quiet cores;
the file is written when a load is done, with those before it. --quick is a dry run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from held_text import HeldText
from remote import Remote, serve

from faser.controller.bench_plan import NEAR, turn_order
from faser.controller.bench_ratio import Envelope, Floats, Ratio, envelope, paired_ratio
from faser.controller.bench_turn import slice_ends, slice_tokens
from faser.engine_adapter.settings import ALWAYS, AUTO, NEVER

SPLIT = ("own", "in turn", "ahead", "groups", "gated")
ARMS = (*SPLIT, "unsplit")
PAIRS = (("ahead", "in turn"), ("ahead", "own"), ("ahead", "unsplit"), ("own", "unsplit"), ("groups", "in turn"),
         ("gated", "in turn"), ("gated", "ahead"), ("gated", "groups"))  # fmt: skip
CHOICES = ("in turn", "ahead", "groups")  # what the gates choose from
SETS = 8  # of prompts, that rounds have in turn
GATE_RUNS = 8  # each gate wants 64 steps of either kind before it settles
SLICE_S = 1.0
ENGINE_GIB = 3.0  # of memory an engine and its drafter's process take
READY_S = 60.0
MAX_MODEL_LEN = 1024
MAX_PROMPT_TOKENS = 300
Run = dict[str, Any]


class Asked(Protocol):
    """The parent's end of an engine (`Remote`)."""

    def ask(self, *order: Any) -> Any: ...


class Engine:
    """In the child: answers `record`, `begin`, `go` and `counts`."""

    def __init__(self, length: int, requests: int, dtype: str) -> None:
        from vllm import LLM

        from faser.models.embedded import ensure_embedded_drafter, ensure_embedded_target

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
        self._engine: Any = self._llm.llm_engine
        core: Any = self._engine.engine_core
        executor: Any = self._engine.model_executor
        self._scheduler = core.engine_core.scheduler
        self._steering, self._groups = self._scheduler.steering, self._scheduler.ping_pong
        runner = executor.driver_worker.worker.model_runner
        self._remote, self._held = runner.remote, HeldText(runner)
        self._length = length
        self._said: dict[str, list[int]] = {}  # tokens, by request
        self._sent = 0
        self._before: dict[str, int] = {}
        if self._remote is not None:
            self._go_on = self._remote.go_on
            self._wait_for_process()

    def _wait_for_process(self) -> None:
        ends_s = time.monotonic() + READY_S
        while not self._remote.process.is_ready and time.monotonic() < ends_s:
            self._remote.process.collect(1.0)

    def record(self, texts: list[str], tokens: int) -> list[list[int]]:
        """Return what the target says to prompts without speculation."""
        self._steering.default.length = self._steering.default.frontier = 0
        self._scheduler.ping_pong = None
        self._add(texts, tokens)
        while self._engine.has_unfinished_requests():
            self._step()
        return list(self._said.values())

    def begin(self, texts: list[str], answers: list[list[int]], arm: str) -> None:
        """Read prompts, to be answered at once with these tokens."""
        default, remote = self._steering.default, self._remote
        default.length, default.frontier = self._length, 0 if arm in ("own", "unsplit") else self._length
        self._scheduler.ping_pong = self._groups if arm in ("groups", "gated") else None
        if self._groups is not None:
            self._groups.mode = ALWAYS if arm == "groups" else AUTO
        if remote is not None:
            remote.mode = AUTO if arm == "gated" else ALWAYS
            remote.go_on = self._go_on if arm in ("ahead", "gated") else lambda *_: self._go_on([], 0)
        self._before = self._counts()
        self._add(texts, len(answers[0]))
        self._held.texts = dict(zip(self._said, answers, strict=True))
        while not all(self._said.values()):  # from here on it is decoding
            self._step()

    def go(self, until: int) -> Run:
        """Decode until so many tokens are said in all or all is said; return what the measured steps took."""
        if self._engine.has_unfinished_requests():
            self._step()
        before, began_s, steps = self._emitted(), time.monotonic(), 0
        while self._engine.has_unfinished_requests() and self._emitted() < until:
            self._step()
            steps += 1
        return {"seconds": time.monotonic() - began_s, "tokens": self._emitted() - before, "steps": steps}

    def counts(self) -> dict[str, int]:
        """Return what the process did since `begin`."""
        if self._said != self._held.texts:
            raise RuntimeError("an answer left the text that it is held to")
        self._held.texts = {}
        return {name: after - self._before[name] for name, after in self._counts().items()}

    def _counts(self) -> dict[str, int]:
        if self._remote is None:
            return {}
        outcomes, in_turn, ahead = self._remote.frontiers.outcomes, self._remote.in_turn, self._remote.ahead
        return {
            "hits": outcomes.hits, "rejected": outcomes.rejected, "other_bonus": outcomes.other_bonus,
            "late": outcomes.late, "handed_in_turn": in_turn.handed, "accepted_in_turn": in_turn.accepted,
            "handed_ahead": ahead.handed, "accepted_ahead": ahead.accepted,
        }  # fmt: skip

    def _add(self, texts: list[str], tokens: int) -> None:
        from vllm import SamplingParams

        tokenizer: Any = self._llm.get_tokenizer()
        limits = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self._said = {}
        for text in texts:
            self._sent += 1
            self._said[str(self._sent)] = []
            self._engine.add_request(str(self._sent), {"prompt_token_ids": tokenizer.encode(text)}, limits)

    def _step(self) -> None:
        for output in self._engine.step():
            self._said[output.request_id] = list(output.outputs[0].token_ids)

    def _emitted(self) -> int:
        return sum(map(len, self._said.values()))


def start(options: argparse.Namespace, folder: str, arm: str) -> Remote:
    """Return an engine's process that is getting ready."""
    target, drafter = options.cores
    is_split = arm in SPLIT
    cores = str(target) if is_split else f"{target},{drafter}"
    environment = {
        "FASER_DRAFTER_CORES": str(drafter) if is_split else "",
        "FASER_PING_PONG": AUTO if is_split else NEVER,
        "FASER_ENDPOINT": f"ipc://{folder}/{arm.replace(' ', '-')}.sock",  # where nobody listens
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "KMP_BLOCKTIME": "0",
    }
    arguments = [str(options.length), str(max(options.requests)), options.dtype]
    return Remote(__file__, arguments, folder, 1 if is_split else 2, environment)


def prompt_sets(options: argparse.Namespace, requests: int) -> list[list[str]]:
    """Return the sets of prompts that rounds have in turn, the kinds in turn in each."""
    from faser.env.prompt import KINDS, held_out_prompts

    kinds = [[each.text for each in held_out_prompts([kind]) if each.tokens <= MAX_PROMPT_TOKENS] for kind in KINDS]
    found = []
    for set_ in range(options.sets):
        numbers = range(set_ * requests, (set_ + 1) * requests)
        found.append([(of := kinds[number % len(kinds)])[number // len(kinds) % len(of)] for number in numbers])
    return found


def take_turns(
    engines: Mapping[str, Asked], texts: list[str], answers: list[list[int]], ends: Sequence[int], turn: int
) -> dict[str, Run]:
    """Have every arm answer the same prompts, slice by slice, beginning with another arm each time."""
    parts: dict[str, list[Run]] = {arm: [] for arm in engines}
    for arm in engines:
        engines[arm].ask("begin", texts, answers, arm)
    for at, end in enumerate(ends):
        for arm in turn_order(list(engines), turn + at):
            parts[arm].append(engines[arm].ask("go", end))
    return {arm: whole(parts[arm]) | engines[arm].ask("counts") for arm in engines}


def whole(parts: Sequence[Run]) -> Run:
    """Return the sums of an arm's slices."""
    seconds, tokens, steps = (sum(part[name] for part in parts) for name in ("seconds", "tokens", "steps"))
    return {"rate": tokens / seconds, "tokens": tokens, "step_ms": 1e3 * seconds / max(steps, 1), "slices": len(parts)}


def measure(engines: Mapping[str, Asked], options: argparse.Namespace, requests: int) -> dict[str, Any]:
    """Return all arms at one load; a round has the same prompts for each."""
    sets, total = prompt_sets(options, requests), requests * options.tokens
    answers = [engines["own"].ask("record", texts, options.tokens) for texts in sets]
    rate = take_turns(engines, sets[0], answers[0], [total], 0)["in turn"]["rate"]  # warm
    for _ in range(GATE_RUNS):
        take_turns({"gated": engines["gated"]}, sets[0], answers[0], [total], 0)
    # The last slice ends when all is said.
    ends = [requests + end for end in slice_ends(total - requests, slice_tokens(rate, SLICE_S, requests))]
    rounds: list[dict[str, Run]] = []
    over_s = time.monotonic() + 60.0 * options.minutes
    while (round_ := len(rounds)) < options.rounds or not is_done(rounds, over_s):
        arms = ARMS if round_ < options.rounds else contenders(rounds)
        texts, said = sets[round_ % len(sets)], answers[round_ % len(sets)]
        rounds.append(take_turns({arm: engines[arm] for arm in arms}, texts, said, ends, round_))
        say(f"{requests} requests, round {round_ + 1}: gated over the best {gated_over_best(rounds).ratio}")
    return summary(rounds)


def is_done(rounds: Sequence[Mapping[str, Run]], over_s: float) -> bool:
    """Return whether a load's minutes are over or its ratio is narrow enough."""
    return time.monotonic() > over_s or gated_over_best(rounds).ratio.is_sharp()


def rates_of(rounds: Sequence[Mapping[str, Run]], arm: str) -> Floats:
    """Return an arm's tokens/s, (rounds,); NaN where it was not measured."""
    return np.array([round_[arm]["rate"] if arm in round_ else math.nan for round_ in rounds])


def contenders(rounds: Sequence[Mapping[str, Run]]) -> tuple[str, ...]:
    """Return the arms that the gates' ratio still needs: themselves, and the choices that may be the best."""
    ours = np.log(rates_of(rounds, "gated"))
    level = {arm: float(np.nanmean(np.log(rates_of(rounds, arm)) - ours)) for arm in CHOICES}
    least = max(level.values()) + math.log(NEAR)
    return (*(arm for arm in CHOICES if level[arm] >= least), "gated")


def gated_over_best(rounds: Sequence[Mapping[str, Run]]) -> Envelope:
    """Return what the gates leave of the best of what they choose from."""
    return envelope({arm: rates_of(rounds, arm) for arm in (*CHOICES, "gated")}, "gated")


def say(text: str) -> None:
    """Tell the user how far it is."""
    print(f"overlap_pair {time.strftime('%H:%M:%S')}: {text}", file=sys.stderr, flush=True)


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return median, least and most of those that are numbers."""
    values = [value for value in values if not math.isnan(value)]
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def told(ratio: Ratio) -> dict[str, Any]:
    """Return a ratio with its 95 % interval, which takes two rounds."""
    low, high = (None if ratio.pairs < 2 else value for value in (ratio.low, ratio.high))
    return {"value": ratio.value, "low": low, "high": high, "pairs": ratio.pairs}


def summary(rounds: Sequence[Mapping[str, Run]]) -> dict[str, Any]:
    """Return one load's report."""
    rates = {arm: rates_of(rounds, arm) for arm in ARMS}
    best = gated_over_best(rounds)
    return {
        "rounds": len(rounds),
        "tokens_per_s": {arm: spread(rates[arm].tolist()) for arm in ARMS},
        "step_ms": {arm: spread(each[arm]["step_ms"] for each in rounds if arm in each) for arm in ARMS},
        "ratios": {
            f"{one} / {other}": told(paired_ratio(np.log(rates[one]) - np.log(rates[other]))) for one, other in PAIRS
        },
        "gated_over_best": told(best.ratio) | {"best": list(dict.fromkeys(best.rivals))},
        "ahead": {
            name: sum(each["ahead"][name] for each in rounds if "ahead" in each)
            for name in ("hits", "rejected", "other_bonus", "late", "handed_in_turn", "accepted_in_turn",
                         "handed_ahead", "accepted_ahead")
        },
        "runs": rounds,
    }  # fmt: skip


def read_options() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="loads")
    parser.add_argument("--length", type=int, default=4, help="tokens of a chunk and of a frontier")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--sets", type=int, default=SETS, help="of prompts, that rounds have in turn")
    parser.add_argument("--rounds", type=int, default=4, help="of all arms at each load")
    parser.add_argument("--minutes", type=float, default=8.0, help="of a load at most")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cores", type=int, nargs=2, default=sorted(os.sched_getaffinity(0))[:2])
    parser.add_argument("--quick", action="store_true", help="two loads, one round, few tokens: no measurement")
    parser.add_argument("--json", type=Path, help="write the report here as well")
    options = parser.parse_args()
    if len(set(options.cores)) < 2:
        parser.error(f"cores {options.cores}; expected two, one for the target and one for the drafter")
    if options.quick:
        options.requests, options.sets, options.rounds, options.minutes, options.tokens = [1, 2], 2, 2, 0.0, 12
    return options


def main() -> None:
    """Measure and print."""
    from faser.controller.bench_machine import commit, machine_facts, require_memory, versions

    options = read_options()
    loads: dict[str, Any] = {}
    report = {
        "machine": msgspec.to_builtins(machine_facts()), "versions": versions(), "commit": commit(),
        "length": options.length, "dtype": options.dtype, "cores": options.cores, "tokens": options.tokens,
        "sets": options.sets, "loads": loads,
    }  # fmt: skip
    require_memory(len(ARMS), ENGINE_GIB)
    with tempfile.TemporaryDirectory(prefix="faser-") as folder, contextlib.ExitStack() as stack:
        engines = {}
        for arm in ARMS:
            engines[arm] = start(options, folder, arm)
            stack.callback(engines[arm].end)
            engines[arm].wait_ready()
            say(f"{arm} is ready")
        for requests in options.requests:
            loads[str(requests)] = measure(engines, options, requests)
            if options.json:
                options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    if "--child" in sys.argv:
        serve(Engine(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
    else:
        main()

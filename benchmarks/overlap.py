"""What drafting ahead and ping-pong groups win: `python benchmarks/overlap.py [--json FILE] [--trace FILE]`.

One request at a time on vLLM (V1, CPU, float32, greedy), an oracle in the drafter's process: it knows a recorded run
and errs at a stated rate, but computes for each token, so that a frontier takes about as long as a verification. Two
arms in turns, in one engine, with the same two pinned cores: the drafter works after the target, or beside it. Prints
JSON: medians, spread, bound, how much of the drafting was hidden, and the phases of a few steps; --trace is for
chrome://tracing or Perfetto. Then --requests at once, in turn and in two groups (overlap_groups.py), with an oracle
that takes --balance of a verification. Takes under ten minutes on two quiet cores; --quick is a dry run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import overlap_groups
from remote import Remote

from faser.controller.bench_machine import provenance
from faser.env.overlap import PhaseTimes, bound_reached, draft_ahead_bound, hidden_draft_share

PROMPTS = (
    "The lighthouse keeper wrote a letter every evening.",
    "A recipe for bread begins with",
    "The three most important things about rivers are",
    "def fibonacci(n):",
)
ARMS = ("in turn", "ahead")
SHOWN_STEPS = 6
Step = dict[str, Any]


class Benchmark:
    """The engine, what it said without speculation, and how much the oracle works."""

    def __init__(self, options: argparse.Namespace, folder: str) -> None:
        self.options = options
        target, drafter = options.cores
        environment = {
            "FASER_DRAFTER_CORES": str(drafter),
            "FASER_DRAFT_AHEAD": "always",
            "FASER_PING_PONG": "always",
            "FASER_ENDPOINT": f"ipc://{folder}/engine.sock",  # where nobody listens
            "VLLM_CPU_OMP_THREADS_BIND": str(target),
            "KMP_BLOCKTIME": "0",
        }
        script = str(Path(__file__).with_name("overlap_engine.py"))
        sizes = [str(options.length), str(options.requests)]
        self.engine = Remote(script, sizes, folder, environment=environment)
        self.engine.wait_ready()

    def prepare(self) -> None:
        """Record what the target says, time a verification, and give the oracle as much work."""
        options, ask = self.options, self.engine.ask
        self.prompts = [ask("tokenize", text) for text in PROMPTS[: options.prompts]]
        self.said = [ask("record", prompt, options.tokens) for prompt in self.prompts]
        texts = [prompt + said for prompt, said in zip(self.prompts, self.said, strict=True)]
        ask("equip", texts, 0.0, 0.0)
        free = [ask("run", self.prompts[0], options.tokens, False) for _ in range(2)][-1]
        self.free_step_s = statistics.median(step_times(free["steps"]))
        self.pass_s = options.work * self.free_step_s / (options.length + 1)
        ask("equip", texts, 1.0 - options.acceptance, self.pass_s)
        for arm in ARMS:  # warm
            self.run(arm, 0)

    def ping_pong(self) -> dict[str, Any]:
        """Return what two groups were worth."""
        asked = [f"{index}. {PROMPTS[index % len(PROMPTS)]}" for index in range(self.options.requests)]
        return overlap_groups.measure(self.engine, [self.engine.ask("tokenize", text) for text in asked], self.options)

    def run(self, arm: str, prompt: int) -> dict[str, Any]:
        """Return one run; its output must be the target's own."""
        run: dict[str, Any] = self.engine.ask("run", self.prompts[prompt], self.options.tokens, arm == "ahead")
        if run["tokens"] != self.said[prompt]:
            raise SystemExit(f"overlap.py: prompt {prompt} drafted {arm} gave other tokens than the target alone")
        return run


def step_times(steps: list[Step]) -> list[float]:
    """Return seconds per step, without the prompt's and the last one."""
    starts = [step["began_s"] for step in steps]
    return [after - before for before, after in pairwise(starts[1:])]


def waits(steps: list[Step]) -> list[float]:
    """Return the seconds of each of these steps in which the target's core drafted or waited for drafts."""
    return [step["draft"][1] - step["draft"][0] for step in steps[1:-1]]


def measure(benchmark: Benchmark) -> dict[str, Any]:
    """Return what both arms took, in turns, and the newest run of each."""
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for round_ in range(benchmark.options.rounds):
        for prompt in range(len(benchmark.prompts)):
            for arm in ARMS if (round_ + prompt) % 2 == 0 else ARMS[::-1]:
                runs[arm].append(benchmark.run(arm, prompt))
    return summary(benchmark, runs)


def spread(values: list[float]) -> dict[str, float]:
    """Return median, least and most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def summary(benchmark: Benchmark, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the report of all runs."""
    options = benchmark.options
    seconds = {arm: [sum(step_times(run["steps"])) for run in runs[arm]] for arm in ARMS}
    steps = {arm: [statistics.fmean(step_times(run["steps"])) for run in runs[arm]] for arm in ARMS}
    drafting = [statistics.fmean(waits(run["steps"])) for run in runs["in turn"]]
    times = [PhaseTimes(draft, step - draft) for draft, step in zip(drafting, steps["in turn"], strict=True)]
    hidden = [hidden_draft_share(each, ahead) for each, ahead in zip(times, steps["ahead"], strict=True)]
    gains = [serial / ahead for serial, ahead in zip(seconds["in turn"], seconds["ahead"], strict=True)]
    hits, misses = (sum(run[name] for run in runs["ahead"]) for name in ("hits", "misses"))
    typical = PhaseTimes(statistics.median(drafting), statistics.median(each.verify_s for each in times))
    bound = draft_ahead_bound(typical, hits / (hits + misses))
    gain = spread(gains)
    return {
        **provenance(), "length": options.length, "acceptance": options.acceptance, "cores": options.cores,
        "runs_per_arm": len(gains), "tokens_per_run": options.tokens,
        "verify_ms": 1e3 * typical.verify_s, "draft_ms": 1e3 * typical.draft_s, "pass_ms": 1e3 * benchmark.pass_s,
        "step_ms": {arm: spread([1e3 * value for value in steps[arm]]) for arm in ARMS},
        "wait_ms": {arm: spread([1e3 * statistics.fmean(waits(run["steps"])) for run in runs[arm]]) for arm in ARMS},
        "hits": hits, "misses": misses, "speedup": gain, "bound": bound,
        "bound_reached": bound_reached(gain["median"], bound), "hidden_share": spread(hidden),
        "holds": {"speedup >= 1.25": gain["median"] >= 1.25, "hidden >= 0.7": statistics.median(hidden) >= 0.7},
        "timeline": {arm: timeline(runs[arm][-1]["steps"]) for arm in ARMS},
    }  # fmt: skip


def timeline(steps: list[Step]) -> list[dict[str, Any]]:
    """Return the phases of a few steps in the middle of a run, in milliseconds from the first one's begin."""
    first = max(1, len(steps) // 2 - SHOWN_STEPS // 2)
    shown = steps[first : first + SHOWN_STEPS]
    zero_s, end_s = shown[0]["began_s"], shown[-1]["draft"][1]
    spans = []
    for step in shown:
        spans += [("target", name, *step[name]) for name in ("verify", "sample", "draft") if name in step]
    # A job is collected by the step that needs it, which may be the one behind.
    jobs = [job for step in steps for job in step["jobs"] if job[1] > zero_s and job[0] < end_s]
    spans += [("drafter", "draft", began_s, ended_s) for began_s, ended_s in jobs]
    return [
        {"core": core, "phase": "wait for drafts" if (core, phase) == ("target", "draft") else phase,
         "began_ms": 1e3 * (began_s - zero_s), "ended_ms": 1e3 * (ended_s - zero_s)}
        for core, phase, began_s, ended_s in sorted(spans, key=lambda span: span[2])
    ]  # fmt: skip


def chrome_trace(report: dict[str, Any]) -> dict[str, Any]:
    """Return the timelines in the trace event format, a process per arm and a thread per core."""
    events: list[dict[str, Any]] = []
    for pid, arm in enumerate(ARMS, start=1):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"drafting {arm}"}})
        for tid, core in enumerate(("target", "drafter"), start=1):
            events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": core}})
            events += [
                {"name": span["phase"], "ph": "X", "pid": pid, "tid": tid, "ts": 1e3 * span["began_ms"],
                 "dur": 1e3 * (span["ended_ms"] - span["began_ms"])}
                for span in report["timeline"][arm] if span["core"] == core
            ]  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the picture: a panel per arm, a row per core."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "faser"
    colours = {"verify": "tab:blue", "sample": "tab:cyan", "draft": "tab:orange", "wait for drafts": "0.85"}
    figure, panels = plt.subplots(len(ARMS), 1, figsize=(9, 3.6), sharex=True)
    for panel, arm in zip(panels, ARMS, strict=True):
        for span in report["timeline"][arm]:
            row = ("drafter", "target").index(span["core"])
            width = span["ended_ms"] - span["began_ms"]
            panel.broken_barh([(span["began_ms"], width)], (row - 0.4, 0.8), color=colours[span["phase"]])
        panel.set_yticks([0, 1], ["drafter's core", "target's core"])
        panel.set_title(f"drafting {arm}", fontsize=10)
    panels[-1].set_xlabel("milliseconds")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    panels[-1].legend(handles, colours, fontsize=8, frameon=False, loc="center right")  # the shorter arm leaves room
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def read_options() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4, help="tokens of a chunk and of a frontier")
    parser.add_argument("--acceptance", type=float, default=0.98, help="share of the oracle's tokens that are right")
    parser.add_argument("--work", type=float, default=0.9, help="a frontier's time as a share of a step without drafts")
    parser.add_argument("--tokens", type=int, default=160, help="per run")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=8, help="at once, for ping-pong groups; an even number")
    parser.add_argument("--balance", type=float, default=0.9, help="the oracle's time as a share of a verification")
    parser.add_argument("--cores", type=int, nargs=2, default=sorted(os.sched_getaffinity(0))[:2])
    parser.add_argument("--quick", action="store_true", help="one prompt, one round, few tokens: no measurement")
    parser.add_argument("--json", type=Path, help="write the report here as well")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace of a few steps here")
    parser.add_argument("--picture", type=Path, help="draw the same steps here")
    options = parser.parse_args()
    if len(set(options.cores)) < 2:
        parser.error(f"cores {options.cores}; expected two, one for the target and one for the drafter")
    if options.requests < 2 or options.requests % 2:
        parser.error(f"--requests {options.requests}; expected an even number of at least 2")
    if options.quick:
        options.prompts, options.rounds, options.tokens = 1, 1, 32
        options.requests = min(options.requests, 4)
    return options


def main() -> None:
    """Measure, print, draw."""
    options = read_options()
    with tempfile.TemporaryDirectory(prefix="faser-") as folder:
        benchmark = Benchmark(options, folder)
        try:
            benchmark.prepare()
            report = measure(benchmark)
            report["ping_pong"] = benchmark.ping_pong()
        finally:
            benchmark.engine.end()
    text = json.dumps(report, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    if options.trace:
        options.trace.write_text(json.dumps(chrome_trace(report)) + "\n")
    if options.picture:
        draw(report, options.picture)


if __name__ == "__main__":
    main()

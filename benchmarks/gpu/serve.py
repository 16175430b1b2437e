"""FASER beside what vLLM offers on a GPU, in parts of minutes: `python benchmarks/gpu/serve.py`.

Every part is one arm's engine at every load, once; rounds take the arms in turns. Each part's result is in the JSON
file before the next begins; run again, it goes on behind what is done. `--dry-run` does all of it without vLLM and
without a GPU, on made-up engines. `--summarise` prints the ratios of what is there. serve.md says what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))

from checkout import ROOT, make_importable  # noqa: E402 - the folder must be on the path first
from run import Part, Results, run_parts  # noqa: E402
from serve_load import OPEN, DryEngine, closed_requests, drive  # noqa: E402
from shapes import DRAFTER, TARGETS, Shape  # noqa: E402

DEFAULT_OUTPUT = FOLDER.parent / "results" / "gpu_serve.json"
ARMS = ("none", "k1", "k3", "k5", "adaptive", "faser")
V2_ARMS = ("adaptive",)  # of vLLM's second runner alone, on which acceptance cannot be imposed per request
LENGTH = 5  # the longest draft of the arms that choose
TRACE = "spec_bench__eagle"
LIMIT_S = 500  # of a part, its engine's start included
STATIC = "k3"
PAPER_THROUGHPUT, PAPER_LATENCY = 1.53, 1.92  # "up to", over static speculation

Load = tuple[str, int | None, list[tuple[float, int, int]]]  # name, clients, requests


def acceptance_rates(length: int) -> list[float]:
    """Return the share of drafts of which so many tokens at least were accepted, from a measured run."""
    make_importable()
    from faser.env.calibration.accept_traces import shipped_accept_trace

    drafts = shipped_accept_trace(TRACE)
    return [round(sum(draft.accepted > place for draft in drafts) / len(drafts), 4) for place in range(length)]


@cache
def generator() -> tuple[dict[str, Any], float]:
    """Return the acceptance generator fitted to that run, and the AUC of its confidence at the first position."""
    make_importable()
    import msgspec

    from faser.env.calibration.accept_traces import shipped_accept_trace
    from faser.env.calibration.acceptance_fit import describe, fit_acceptance

    drafts = shipped_accept_trace(TRACE)
    model = fit_acceptance(drafts, LENGTH, TRACE)
    found: dict[str, Any] = msgspec.to_builtins(model)
    return found, round(describe(model, drafts).model_auc[0], 3)


def imposed(options: argparse.Namespace) -> dict[str, Any]:
    """Return what is imposed, as it stands in the results."""
    if options.impose == "positions":
        return {"acceptance": acceptance_rates(LENGTH)}
    model, auc = generator()
    return {"impose": options.impose, "acceptance": [round(mean, 4) for mean in model["means"]], "confidence_auc": auc}


def loads(options: argparse.Namespace, seed: int) -> list[Load]:
    """Return the loads of a round: closed loops, then the trace."""
    found: list[Load] = []
    for load in options.loads:
        asked = closed_requests(load, options.answers, seed)
        found.append((f"{load}", load, [(each.arrival_s, each.prompt_tokens, each.answer_tokens) for each in asked]))
    if options.trace_seconds:
        found.append((OPEN, None, arrivals(options.trace_seconds, options.peak_rps, seed)))
    return found


def arrivals(seconds: float, peak_rps: float, seed: int) -> list[tuple[float, int, int]]:
    """Return (arrival, prompt, answer) of the trace, bent to rise to the peak and fall again, its lengths cut."""
    make_importable()
    from faser.env.workload.request_trace import shipped_trace
    from faser.env.workload.workload import Swell, swelling_arrivals

    trace = swelling_arrivals(shipped_trace(OPEN), Swell(seconds, peak_rps / 35.0, peak_rps), seed)
    return [
        (round(float(at_s), 4), min(max(int(prompt), 8), 1024), min(max(int(answer), 8), 256))
        for at_s, prompt, answer in zip(trace.arrival_s, trace.input_tokens, trace.output_tokens, strict=True)
    ]


def plan(options: argparse.Namespace) -> Iterator[tuple[str, Part]]:
    """Yield every part: target/arm/round, the arms in turns, another one first in each round."""
    for target in options.targets:
        for round_ in range(options.rounds):
            first = round_ % len(options.arms)
            for arm in (*options.arms[first:], *options.arms[:first]):
                yield f"{target}/{arm}/{round_}", partial(measure, options, target, arm, round_)


def measure(options: argparse.Namespace, target: str, arm: str, round_: int) -> dict[str, Any]:
    """Serve every load with one arm."""
    work = loads(options, round_)
    if options.dry_run:
        from serve_load import Asked

        return {
            name: drive(DryEngine(arm, round_), [Asked(*request) for request in requests], load)
            for name, load, requests in work
        }
    with tempfile.TemporaryDirectory() as folder:
        paths = {role: _written(shape, Path(folder, role)) for role, shape in
                 (("drafter", DRAFTER), ("target", TARGETS[target]))}  # fmt: skip
        by_request = options.impose == "requests"
        task = paths | {"arm": arm, "length": LENGTH, "loads": work, "most": 256, "is_eager": False,
                        "load_format": "dummy", "rates": None if by_request else acceptance_rates(LENGTH),
                        "generator": generator()[0] if by_request else None}  # fmt: skip
        return run_engine(task)


def _written(shape: Shape, folder: Path) -> str:
    from part_vllm import configuration

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(configuration(shape)))
    return str(folder)


def run_engine(task: dict[str, Any]) -> dict[str, Any]:
    """Run one arm in a process of its own, which leaves nothing behind on the GPU."""
    process = subprocess.Popen(
        [sys.executable, str(FOLDER / "serve_engine.py"), json.dumps(task)], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    try:
        told, complaint = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no answer within {LIMIT_S} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):  # vLLM's own children and the sidecar too, however it ended
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    answers = [line for line in told.splitlines() if line.startswith("{")]
    if process.returncode or not answers:
        raise RuntimeError((complaint.strip().splitlines() or ["no output"])[-1][:300])
    found: dict[str, Any] = json.loads(answers[-1])
    return found


def summary(content: dict[str, Any]) -> dict[str, Any]:
    """Return ratios at each target and load, and whether the paper's gains over static speculation were hit."""
    make_importable()
    from faser.controller.bench.ratio import envelope

    told: dict[str, Any] = {"points": [], "failed": {}}
    kept: dict[tuple[str, str], dict[str, dict[int, dict[str, Any]]]] = {}
    for name, part in content["parts"].items():
        target, arm, round_ = name.split("/")
        if "error" in part:
            told["failed"][name] = part["error"]
            continue
        for load, found in part["result"].items():
            kept.setdefault((target, load), {}).setdefault(arm, {})[int(round_)] = found
    for (target, load), arms in kept.items():
        if "faser" not in arms or "none" not in arms:
            continue
        unloaded = kept.get((target, "1"), {}).get("none", {})
        rates = _by_round(arms, partial(_rate, unloaded, load == OPEN))
        times = _by_round(arms, _mean_tpot_ms)
        best = envelope(rates)
        point = {
            "target": target, "load": load, "metric": "goodput" if load == OPEN else "tokens_per_s",
            "medians": {arm: _median(values) for arm, values in rates.items()},
            "envelope_ratio": _number(best.ratio.value), "ci": [_number(best.ratio.low), _number(best.ratio.high)],
            "best_rival": list(dict.fromkeys(best.rivals)), "rounds": len(next(iter(rates.values()))),
        }  # fmt: skip
        if STATIC in rates:
            point["throughput_over_static"] = _over(rates["faser"], rates[STATIC])
            point["latency_over_static"] = _over(times[STATIC], times["faser"])
        told["points"].append(point)
    for name, bar in (("throughput", PAPER_THROUGHPUT), ("latency", PAPER_LATENCY)):
        found = [each for point in told["points"] if (each := point.get(f"{name}_over_static")) is not None]
        told[f"paper_{name}"] = {
            "bar": bar, "best": max(found, default=None),
            "verdict": "not measured" if not found else "hit" if max(found) >= bar else "missed",
        }  # fmt: skip
    return told


def _by_round(arms: dict[str, dict[int, dict[str, Any]]], read: Any) -> dict[str, Any]:
    """Return (rounds,) figures by arm, NaN where a part is missing."""
    import numpy as np

    rounds = sorted({round_ for each in arms.values() for round_ in each})
    return {
        arm: np.array([read(each[round_]) if round_ in each else np.nan for round_ in rounds])
        for arm, each in arms.items()
    }


def _rate(unloaded: dict[int, dict[str, Any]], is_open: bool, found: dict[str, Any]) -> float:
    """Return tokens per second; of a trace those of requests within 5 times the unloaded TTFT and twice the TPOT."""
    if not is_open or not unloaded:
        return float(found["tokens_per_s"])
    alone = [request for each in unloaded.values() for request in each["requests"]]
    ttft_ms, tpot_ms = (_median([request[at] for request in alone]) for at in (0, 1))
    good = sum(count for first, each, count in found["requests"] if first <= 5 * ttft_ms and each <= 2 * tpot_ms)
    everything = sum(count for _, _, count in found["requests"])
    return max(found["tokens_per_s"] * good / everything, found["tokens_per_s"] / len(found["requests"]))


def _mean_tpot_ms(found: dict[str, Any]) -> float:
    each = [tpot_ms for _, tpot_ms, count in found["requests"] if count > 1]
    return sum(each) / len(each) if each else float("nan")


def _over(one: Any, other: Any) -> float | None:
    import numpy as np

    logs = np.log(one) - np.log(other)
    return _number(float(np.exp(np.nanmean(logs)))) if (~np.isnan(logs)).any() else None


def _median(values: Any) -> float:
    import numpy as np

    return round(float(np.nanmedian(values)), 3)


def _number(value: float) -> float | None:
    return round(value, 4) if value == value else None


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Return the options; the dry run's are small unless given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=None, help="JSON file; what is in it is not run again")
    parser.add_argument("--dry-run", action="store_true", help="made-up engines, no GPU")
    parser.add_argument("--summarise", action="store_true", help="run nothing, print the ratios of what is there")
    parser.add_argument("--only", default="", help="parts whose name begins so, such as qwen3-8b/k3")
    parser.add_argument("--seconds", type=float, default=500.0, help="begin no part that would end after these")
    parser.add_argument("--targets", nargs="+", default=["qwen3-8b", "qwen3-32b"], choices=list(TARGETS))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), help="default: all that can be")
    parser.add_argument(
        "--impose", default="positions", choices=["positions", "requests"],
        help="acceptance alike for all requests, or each request's own, with a confidence",
    )  # fmt: skip
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 4, 16, 64, 128])
    parser.add_argument("--answers", type=int, default=3, help="of each client in a closed loop, after its first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trace-seconds", type=float, default=40.0, help="of the replayed trace; 0: none")
    parser.add_argument("--peak-rps", type=float, default=40.0, help="its peak; the trough is a 35th of it")
    options = parser.parse_args(given)
    if min(*options.loads, options.rounds) < 1 or options.answers < 2 or options.peak_rps <= 0:
        parser.error("loads, rounds and peak: expected numbers above 0; answers: at least 2")
    possible = [arm for arm in ARMS if options.impose == "positions" or arm not in V2_ARMS]
    options.arms = options.arms or possible
    if impossible := [arm for arm in options.arms if arm not in possible]:
        parser.error(f"arm {', '.join(impossible)} with --impose requests: expected some of {', '.join(possible)}")
    if options.output is None:
        if options.dry_run:
            parser.error("--dry-run: give an --output; its figures are not to be taken for measured ones")
        options.output = DEFAULT_OUTPUT
    return options


def facts(is_dry: bool) -> dict[str, Any]:
    """Return the machine: with a GPU the GPU's, driver's and torch's names."""
    if is_dry:
        return {"is_dry_run": True}
    from importlib.metadata import version

    from machines import CudaMachine

    return CudaMachine().facts() | {"vllm": version("vllm")}


def main() -> int:
    """Run what is not done, then print the summary."""
    options = arguments()
    if options.summarise:
        print(json.dumps(summary(json.loads(options.output.read_text())), indent=1))
        return 0
    if not options.dry_run:
        import torch

        if not torch.cuda.is_available():
            print("gpu: no CUDA device; expected one, or --dry-run --output FILE", file=sys.stderr)
            return 2
    names = ("targets", "arms", "loads", "answers", "rounds", "trace_seconds", "peak_rps")
    asked = {name: getattr(options, name) for name in names} | imposed(options)
    results = Results(options.output, facts(options.dry_run), asked)
    status = run_parts(plan(options), results, options, lambda: None)
    print(json.dumps(summary(json.loads(options.output.read_text()))))
    return status


if __name__ == "__main__":
    sys.exit(main())

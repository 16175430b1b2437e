"""What `faser evaluate --pipeline` does and prints. Called by controller/cli/evaluate.py."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...env.pipeline.arrivals import LOADS, draw_arrivals
from ...env.pipeline.constants import PipelineConstants
from ...models.pipeline.judge import PipelineComparison, judge, judgement
from ...models.pipeline.names import DEFAULT, make_pipeline_policy
from ..engine.machine import provenance
from ..errors import UsageError

HEADER = (
    f"{'load':20} {'policy':14} {'mean s':>13} {'p99 s':>6} {'in time':>8} {'GPUs':>5} {'moves':>6} "
    f"{'cost':>6}  {'fixed, as many GPUs: s':>22} {'in time':>8}  latency over theirs"
)


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """What was asked for; empty: the default."""

    policies: str
    traces: str
    seeds: int
    minutes: float
    is_serial: bool
    command: str


def plan_of(options: PipelineOptions) -> PipelineComparison:
    """Return the plan; raise UsageError for an unknown trace, PolicyError for an unknown policy."""
    traces = tuple(dict.fromkeys(name for name in options.traces.split(",") if name)) or LOADS
    policies = tuple(dict.fromkeys(options.policies.split())) or DEFAULT
    nobody = draw_arrivals("gamma-1", 0, 1.0)
    for policy in policies:
        make_pipeline_policy(policy, PipelineConstants(), nobody, 0)
    for trace in traces:
        draw_arrivals(trace, 0, 30.0)
    if options.minutes < 1.0:
        raise UsageError(f"--minutes {options.minutes:g}", "at least 1: the paper's windows are minutes long")
    seeds = tuple(101 + number for number in range(options.seeds))
    return PipelineComparison(policies, traces, seeds, 60.0 * options.minutes, is_serial=options.is_serial)


def evaluate_pipeline(
    options: PipelineOptions, executor: Executor | None, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Return the whole result, with the command that made it."""
    plan = plan_of(options)
    return {"command": options.command} | judgement(plan, judge(plan, executor, progress)) | provenance()


def drawn_table(result: dict[str, Any]) -> str:
    """Return the result as text, a block per load."""
    blocks = []
    for load, rows in result["loads"].items():
        blocks.append("\n".join(_line(load, policy, row) for policy, row in rows.items()))
    plan = result["plan"]
    batches = "one request a batch" if plan["is_serial"] else "batches by equation (3)"
    length = f"{len(plan['seeds'])} seeds of {plan['duration_s'] / 60:g} minutes"
    foot = f"{length} at {plan['rate_rps']:g} requests/s, {batches}"
    return "\n\n".join((HEADER, *blocks, foot))


def _line(load: str, policy: str, row: dict[str, Any]) -> str:
    mean, half = row["mean_s"]["mean"], row["mean_s"]["half_width"]
    seconds = f"{mean:.3f}" + ("" if half is None else f" ± {half:.3f}")
    fixed = row["fixed"]
    span = "" if fixed["ci"] is None else " ({:.3f} to {:.3f})".format(*fixed["ci"])
    sets = " ".join(name.removeprefix("static:") for name in fixed["sets"])
    return (
        f"{load:20} {policy:14} {seconds:>13} {row['p99_s']['mean']:6.2f} {row['attainment']['mean']:8.2%} "
        f"{row['gpus']['mean']:5.1f} {row['moves']['mean']:6.0f} {row['cost']['mean']:6.3f}  "
        f"{sets + format(fixed['mean_s'], '8.3f'):>22} {fixed['attainment']:8.2%}  {fixed['latency_ratio']:.3f}{span}"
    )


def write_picture(result: dict[str, Any], place: Path) -> None:
    """Write the picture of a result as SVG."""
    from .picture import draw

    place.write_text(draw(result))

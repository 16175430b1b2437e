"""Tables of what fidelity.py measured, for docs/figures.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

RESULT: Final = Path(__file__).parent / "results" / "fidelity.json"
BARS: Final = {"ttft": 0.18, "tpot": 0.07, "e2e": 0.07, "tokens_per_s": 0.05}
NAMES: Final = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E", "tokens_per_s": "tokens/s"}


def read() -> Any:
    """Return the results file."""
    return json.loads(RESULT.read_text())


def percent(share: float | None) -> str:
    """Return a share as it is shown."""
    return "-" if share is None else f"{100.0 * share:.1f} %"


def calibration() -> str:
    """Return the errors in cells that were never fitted."""
    lines = [
        "| phase | cells | held out, of 7 repeats or more | median error | p90 | engine's own spread "
        "| one step around its median |",
        "|---|---|---|---|---|---|---|",
    ]
    found = read()["calibration"]
    for phase in ("verify", "draft", "host"):
        each = found[phase]
        errors = " | ".join(
            percent(each[name]) for name in ("held_out_median", "held_out_p90", "repeat_spread", "step_spread")
        )
        lines.append(f"| {phase} | {each['cells']} | {each['held_out_cells']} | {errors} |")
    return "\n".join(lines)


def acceptance() -> str:
    """Return what the generator makes of the embedded pair's drafts."""
    found = read()["calibration"]["acceptance"]
    columns = [found[name] for name in ("measured_means", "model_means", "measured_auc", "model_auc")]
    lines = ["| position | measured | model | AUC measured | AUC model |", "|---|---|---|---|---|"]
    for position, values in enumerate(zip(*columns, strict=True), start=1):
        lines.append(f"| {position} | {' | '.join(f'{value:.3f}' for value in values)} |")
    return "\n".join(lines)


def published() -> str:
    """Return what it makes of published accept lengths."""
    lines = ["| trace | tested | measured | model |", "|---|---|---|---|"]
    for name, each in read()["published"].items():
        both = (" / ".join(f"{mean:.2f}" for mean in each[column]) for column in ("measured", "model"))
        lines.append(f"| {name} | {each['tested']} | {' | '.join(both)} |")
    return "\n".join(lines)


def closed_loop() -> str:
    """Return how far a replayed run is from the real one."""
    return _replayed(read()["closed_loop"])


def ahead() -> str:
    """Return what drafting ahead came to, and how far a replayed run that does so is from the real one."""
    found = read().get("ahead")
    if found is None:
        return _replayed(None)
    fitted = found["calibration"]["ahead"]
    told = (
        f"Fitted: the next draft was there behind {percent(fitted['ready'])} of the drafts that were accepted as a "
        f"whole, {percent(fitted['hidden'])} of its time was hidden, it was accepted {fitted['acceptance']:.2f} "
        f"times as often, and verification beside a busy drafter took {fitted['verify_factor']:.3f} times as long."
    )
    return "\n".join([_where(found), _held_out(found), told, "", _replayed(found["closed_loop"])])


def pruned() -> str:
    """Return what pruning came to, and how far a replayed run that prunes is from the real one."""
    found = read().get("pruned")
    if found is None:
        return _replayed(None)
    told = [
        f"Fitted, behind layer {each['layer']}: {percent(each['recall'])} of the rejections found, "
        f"{percent(each['false_alarm'])} of the accepted tokens cut, {percent(each['saved_share'])} of the layers "
        f"spared; a look took {1e3 * each['look_s']:.2f} ms and {1e6 * each['look_token_s']:.0f} us a draft token."
        for each in found["calibration"]["exits"]
    ]
    return "\n".join([_where(found), _held_out(found), *told, "", _replayed(found["closed_loop"])])


def _where(found: Any) -> str:
    return f"{found['machine']['cpu']}, commit {found['commit']}."


def _held_out(found: Any) -> str:
    cells = "; ".join(
        f"{phase} {percent(each['held_out_median'])} and {percent(each['held_out_p90'])} in {each['held_out_cells']}"
        for phase in ("verify", "draft")
        for each in [found["calibration"][phase]]
    )
    return f"Held-out cells, median and p90: {cells} cells."


def _replayed(found: Any) -> str:
    if found is None:
        return "Not measured with this profile yet."
    lines = []
    if levels := found.get("levels"):
        told = ", ".join(f"{phase} {level:.2f}" for phase, level in levels.items())
        lines += [f"Of what the profile has, the run before took: {told}.", ""]
    lines += [
        f"| {found['requests']} requests, {found['steps']} steps, {found['runs']} replays | error "
        "| engine's own spread | bar |",
        "|---|---|---|---|",
    ]
    spread = found["repeat_spread"]
    lines += [
        f"| {NAMES[name]} | {percent(found[f'{name}_error'])} | {percent(spread[name])} | {100.0 * bar:.0f} % |"
        for name, bar in BARS.items()
    ]
    single = found["verify_error"]
    lines.append(f"| single steps, verify: median, p90 | {percent(single['median'])}, {percent(single['p90'])} | | |")
    return "\n".join(lines)

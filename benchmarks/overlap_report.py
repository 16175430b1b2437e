"""Tables of what overlap.py, overlap_pair.py and overlap_gate.py measured, for docs/figures.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
from pruning_report import markdown

from faser.controller.bench_ratio import LEAST_RATIO, envelope, paired_ratio, wider_interval

RESULT: Final = Path(__file__).parent / "results" / "overlap.json"
PAIR_RESULT: Final = RESULT.with_name("overlap_pair.json")
GATE_RESULT: Final = RESULT.with_name("overlap_gate.json")
EVICT_RESULT: Final = RESULT.with_name("overlap_evict.json")
FORCED: Final = ("in turn", "ahead", "groups")  # what the gates choose from


def read() -> Any:
    """Return the results file."""
    return json.loads(RESULT.read_text())


def spread(found: dict[str, float], digits: int) -> str:
    """Return a median with the least and the most."""
    return f"{found['median']:.{digits}f} ({found['least']:.{digits}f} to {found['most']:.{digits}f})"


def hidden(found: dict[str, Any]) -> str:
    """Return the median share of drafting that was hidden; runs are compared, so it can come out above all of it."""
    return f"{min(found['hidden_share']['median'], 1.0) * 100:.0f} %"


def evictions() -> str:
    """Return the table of what leaving half of the batch out in turns costs vLLM's own book-keeping."""
    found = json.loads(EVICT_RESULT.read_text())
    rows = []
    for requests, arms in found["by_requests"].items():
        same, turns = arms["half in every step"], arms["halves in turns"]
        kept = [f"{arm['schedule_ms']:.2f} / {arm['update_ms']:.2f}" for arm in (same, turns)]
        more = sum(turns.values()) - sum(same.values())
        rows.append([requests, *kept, f"{more:.2f}"])
    told = f"{found['machine']['cpu']}, commit {found['commit']}; CPU time of a step, medians."
    head = ["requests", "the same half in every step: schedule / batch, ms", "halves in turns", "more, ms"]
    return "\n".join([told, "", *markdown(head, rows)])


def drafting_ahead() -> str:
    """Return the table of drafting ahead with an oracle, forced on."""
    found = read()
    turn, ahead = ({part: found[part][arm] for part in ("step_ms", "wait_ms")} for arm in ("in turn", "ahead"))
    steps, waits = ([spread(arm[part], 1) for arm in (turn, ahead)] for part in ("step_ms", "wait_ms"))
    return "\n".join(
        (
            f"| {found['runs_per_arm']} pairs of runs, chunks of {found['length']} tokens | in turn | ahead |",
            "|---|---|---|",
            f"| step, ms (median, least to most) | {steps[0]} | {steps[1]} |",
            f"| of it waiting for drafts, ms | {waits[0]} | {waits[1]} |",
            f"| tokens per second over drafting in turn | | {spread(found['speedup'], 2)} |",
            f"| of the bound for these phases at this hit rate | | {found['bound_reached']:.2f} |",
            f"| drafting time hidden | | {hidden(found)} |",
            f"| frontiers of use / of no use | | {found['hits']} / {found['misses']} |",
        )
    )


def drafting_ahead_row() -> str:
    """Return the README's line on drafting ahead."""
    found = read()
    return (
        "| drafting ahead with an oracle, one request, over drafting in turn / drafting hidden "
        f"| {spread(found['speedup'], 2)} / {hidden(found)} | 1.25 / 70 % "
        "| `benchmarks/overlap.py` |"
    )


def ping_pong() -> str:
    """Return the table of two groups with an oracle, forced on."""
    found = read()["ping_pong"]
    rates, verify, draft = found["tokens_per_s"], found["verify_ms"], found["draft_ms"]
    waited = found["wait_ms"]["ping-pong"]
    return "\n".join(
        (
            f"| {found['requests']} requests, {found['runs_per_arm']} runs of each | in turn | half of them in turn "
            "| two groups |",
            "|---|---|---|---|",
            f"| tokens/s (median, least to most) | {' | '.join(spread(rate, 1) for rate in rates.values())} |",
            f"| verification of a step, ms | {verify['all']:.1f} | {verify['half']:.1f} | |",
            f"| drafting of a step, or waiting for it, ms | {draft['all']:.1f} | {draft['half']:.1f} | {waited:.1f} |",
            f"| tokens per second over drafting in turn | | | {spread(found['speedup'], 2)} |",
            f"| bound for these phases / share of it | | | {found['bound']:.2f} / {found['of_bound']:.2f} |",
            f"| drafting time hidden | | | {hidden(found)} |",
        )
    )


def pair_rates() -> str:
    """Return the embedded pair's tokens per second in each arm."""
    found = json.loads(PAIR_RESULT.read_text())
    arms = list(next(iter(found["loads"].values()))["tokens_per_s"])
    lines = [f"| requests, {found['rounds']} rounds | {' | '.join(arms)} |", "|---" * (len(arms) + 1) + "|"]
    for requests, load in found["loads"].items():
        lines.append(f"| {requests} | {' | '.join(spread(load['tokens_per_s'][arm], 1) for arm in arms)} |")
    return "\n".join(lines)


def pair_ratios() -> str:
    """Return what drafting ahead and groups bring the embedded pair, and what the gates leave of it."""
    found = json.loads(PAIR_RESULT.read_text())
    lines = [
        "| requests | ahead / in turn | groups / in turn | gated / the best of these three | that is "
        "| chunks of use / tried ahead | accepted of those handed over ahead / in turn |",
        "|---|---|---|---|---|---|---|",
    ]
    for requests, load in found["loads"].items():
        best = max(FORCED, key=lambda arm: load["tokens_per_s"][arm]["median"])
        ratios, ahead = load["ratios"], load["ahead"]
        tried = ahead["hits"] + ahead["rejected"] + ahead["other_bonus"] + ahead["late"]
        shares = [
            f"{ahead[f'accepted_{how}'] / max(ahead[f'handed_{how}'], 1) * 100:.0f} %" for how in ("ahead", "in_turn")
        ]
        lines.append(
            f"| {requests} | {spread(ratios['ahead / in turn'], 2)} | {spread(ratios['groups / in turn'], 2)} "
            f"| {spread(ratios[f'gated / {best}'], 2)} | {best} | {ahead['hits']} / {tried} | {' / '.join(shares)} |"
        )
    return "\n".join(lines)


def gates() -> str:
    """Return what the gates leave of drafting ahead and groups, beside the best way to be forced into."""
    if not GATE_RESULT.is_file():
        return "Not measured yet."
    found, cells, ratios = json.loads(GATE_RESULT.read_text()), [], []
    for load in found["loads"]:
        rates = {arm: np.array(values) for arm, values in load["tokens_per_s"].items()}
        chosen = envelope(rates, "gated", wider_interval)
        ratios.append(chosen.ratio)
        levels = {arm: paired_ratio(np.log(values), wider_interval) for arm, values in rates.items()}
        level = {arm: f"{each.value:.1f} ({each.low:.1f} to {each.high:.1f})" for arm, each in levels.items()}
        kinds = ", ".join(f"{kind} {share:.1%}" for kind, share in load["kinds"]["gated"].items())
        cells.append(
            (
                f"{load['requests']}", *(level.get(arm, "") for arm in (*FORCED, "gated")), str(chosen.ratio),
                " / ".join(dict.fromkeys(chosen.rivals)), kinds,
            )
        )  # fmt: skip
    sets = [str(len(load["tokens_per_s"]["gated"])) for load in found["loads"]]
    names = ("requests", *FORCED, "gated", "gated over the best of these", "that is", "steps of gated")
    low = min(ratio.value for ratio in ratios)
    machine, timed = found["settings"]["machine"], sorted(load["timed"] for load in found["loads"])
    return "\n".join(
        (
            f"Tokens/s with 95 % intervals, over {', '.join(sets)} sets of prompts; "
            f"each load from {timed[0]} to {timed[-1]} timed steps; {machine['cpu']} in {machine['dtype']}, "
            f"commit {', '.join(sorted({load['commit'] for load in found['loads']}))}.",
            "",
            *markdown(names, cells),
            "",
            f"Lowest: {low:.3f}, {'not under' if low >= LEAST_RATIO else 'under'} {LEAST_RATIO}.",
        )
    )

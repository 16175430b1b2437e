"""What overlap can win at most on a profiled engine: `python benchmarks/overlap_bounds.py [PROFILE.json]`.

Reads phase times off a profile (the shipped one of the embedded pair by default), prints the bounds of ping-pong and
drafting ahead over the number of requests and draws them. docs/overlap.md shows and explains the result. Measures
nothing: a bound is for phases that each keep the machine they were profiled on.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from faser.env.engine_model import EngineProfile, OutsideProfile, Work, load_profile, shipped_profile
from faser.env.overlap import PhaseTimes, draft_ahead_bound, halving_gain, ping_pong_bound

DEFAULT_OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "overlap_bounds.svg"
REQUESTS = (1, 2, 4, 8, 16, 32)
HIT_RATES = (1.0, 0.75, 0.5)
LENGTHS = (1, 4)  # draft tokens per request
CONTEXT = 200  # tokens of each request


@dataclass(frozen=True, slots=True)
class Bounds:
    """One batch size at one draft length."""

    requests: int
    length: int
    times: PhaseTimes
    ping_pong: float | None  # None: one request cannot be dealt into two groups
    halved: float | None  # two groups one after the other
    ahead: dict[float, float]  # hit rate -> bound


def phase_times(profile: EngineProfile, requests: int, length: int, context: int) -> PhaseTimes:
    """Return both phases of a step in which every request verifies and drafts `length` tokens."""
    rows, drafts = requests * (1 + length), requests * length
    work = Work(
        requests=requests, decode_rows=rows, draft_tokens=drafts, sampled_rows=rows, kv_tokens=requests * context,
        attended_tokens=rows * context, drafting_requests=requests, rounds=length, draft_rows=drafts, first_rows=rows,
        draft_attended_tokens=drafts * context,
    )  # fmt: skip
    time = profile.step_time(work)
    return PhaseTimes(time.draft_s, time.verify_s)


def bounds(profile: EngineProfile, length: int, context: int) -> list[Bounds]:
    """Return the bounds wherever the profile was measured."""
    found = []
    for requests in REQUESTS:
        try:
            times = phase_times(profile, requests, length, context)
        except OutsideProfile:
            continue
        ping_pong = halved = None
        if requests > 1:
            half = phase_times(profile, requests // 2, length, context)
            ping_pong, halved = ping_pong_bound(times, half), halving_gain(times, half)
        ahead = {rate: draft_ahead_bound(times, rate) for rate in HIT_RATES}
        found.append(Bounds(requests, length, times, ping_pong, halved, ahead))
    return found


def table(found: list[Bounds]) -> str:
    """Return a Markdown table."""
    ahead = (f"ahead, hits {rate:.0%}" for rate in HIT_RATES)
    heads = ["requests", "k", "draft, ms", "verify, ms", "halves in turn", "ping-pong", *ahead]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for each in found:
        groups = ["" if gain is None else f"{gain:.2f}" for gain in (each.halved, each.ping_pong)]
        cells = [
            str(each.requests), str(each.length), f"{1e3 * each.times.draft_s:.1f}", f"{1e3 * each.times.verify_s:.1f}",
            *groups, *(f"{bound:.2f}" for bound in each.ahead.values()),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def documented() -> str:
    """Return the table of the shipped profile, for docs/figures.py."""
    profile = shipped_profile("embedded")
    return table([each for length in LENGTHS for each in bounds(profile, length, CONTEXT)])


def draw(found: dict[int, list[Bounds]], output: Path) -> None:
    """Write the picture: a panel per draft length."""
    matplotlib.rcParams["svg.hashsalt"] = "faser"
    figure, panels = plt.subplots(1, len(found), figsize=(4.6 * len(found), 3.8), sharey=True, squeeze=False)
    for panel, (length, points) in zip(panels[0], found.items(), strict=True):
        for name, label, style in (("ping_pong", "ping-pong", "o-"), ("halved", "halves, no overlap", "o:")):
            pairs = [(each.requests, getattr(each, name)) for each in points if each.requests > 1]
            panel.plot(*zip(*pairs, strict=True), style, ms=4, color="tab:blue", label=label)
        for rate, style in zip(HIT_RATES, ("-", "--", ":"), strict=True):
            ahead = [(each.requests, each.ahead[rate]) for each in points]
            panel.plot(
                *zip(*ahead, strict=True), "s", ls=style, ms=3, color="tab:orange", label=f"ahead, {rate:.0%} hits"
            )
        panel.axhline(1.0, color="0.6", lw=0.8)
        panel.set_xscale("log", base=2)
        panel.set_xticks([each.requests for each in points], [str(each.requests) for each in points])
        panel.set_title(f"{length} draft tokens", fontsize=10)
        panel.set_xlabel("requests")
        panel.legend(frameon=False, fontsize=8)
    panels[0][0].set_ylabel("at most so many times faster")
    figure.tight_layout()
    figure.savefig(output, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Read, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path, nargs="?", default=None)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="draft tokens per request")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of each request's context")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    options = parser.parse_args()
    profile = load_profile(options.profile) if options.profile else shipped_profile("embedded")
    found = {length: bounds(profile, length, options.context) for length in options.lengths}
    print(table([each for points in found.values() for each in points]))
    draw(found, options.output)


if __name__ == "__main__":
    main()

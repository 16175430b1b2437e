"""Draw what run.py found, and print it as a table: `python benchmarks/gpu/plot.py RESULTS.json [--output FILE.svg]`.

`ahead` is drafting the next chunk under the verification of this one, all requests at once, if every chunk is of use;
`ping-pong` is two groups of half the requests that take turns, from the times measured at half the batch size. Both
stand beside their bounds, reckoned from the phases alone on the whole device.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from checkout import make_importable

make_importable()
from faser.env.estimate.overlap_bound import PhaseTimes, draft_ahead_bound, hidden_share, ping_pong_bound  # noqa: E402


@dataclass(frozen=True, slots=True)
class Row:
    """One target, batch size and partition."""

    target: str
    requests: int
    partition: str
    allocated: tuple[int, int]
    draft_ms: float  # alone, on the partition's share
    verify_ms: float
    ahead: float  # times faster than one phase after the other, unsplit
    ahead_bound: float
    hidden: float  # share of the shorter phase, of those on the partition's shares
    ping_pong: float | None  # None: half the batch was not measured
    ping_pong_bound: float | None


def rows(results: dict[str, Any]) -> list[Row]:
    """Return a row for every partition of every finished overlap part."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for name, part in results["parts"].items():
        if name.startswith("overlap ") and "result" in part:
            target, requests = name.removeprefix("overlap ").split("/")
            found[target, int(requests)] = part["result"]["partitions"]
    answer = []
    for (target, requests), partitions in sorted(found.items()):
        half = found.get((target, requests // 2)) if requests % 2 == 0 else None
        whole = _times(partitions["unsplit"])
        for name, own in partitions.items():
            if name == "unsplit":
                continue
            ping_pong = bound = None
            if half is not None and name in half:
                ping_pong = _median(partitions["unsplit"], "step_ms") / (2.0 * _median(half[name], "step_ms"))
                bound = ping_pong_bound(whole, _times(half["unsplit"]))
            answer.append(
                Row(
                    target, requests, name, tuple(own["allocated"]), _median(own, "draft_ms"),
                    _median(own, "verify_ms"), own["gain"]["median"], draft_ahead_bound(whole),
                    hidden_share(_times(own), _median(own, "step_ms") / 1e3), ping_pong, bound,
                )
            )  # fmt: skip
    return answer


def _median(partition: dict[str, Any], name: str) -> float:
    return float(partition[name]["median"])


def _times(partition: dict[str, Any]) -> PhaseTimes:
    return PhaseTimes(_median(partition, "draft_ms") / 1e3, _median(partition, "verify_ms") / 1e3)


def table(found: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    head = (
        "target", "requests", "partition", "allocated", "draft, ms", "verify, ms", "ahead", "bound", "hidden",
        "ping-pong", "bound",
    )  # fmt: skip
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in found:
        two = ["", ""] if row.ping_pong is None else [f"{row.ping_pong:.2f}", f"{row.ping_pong_bound:.2f}"]
        cells = [
            row.target, str(row.requests), row.partition, f"{row.allocated[0]}+{row.allocated[1]}",
            f"{row.draft_ms:.2f}", f"{row.verify_ms:.2f}", f"{row.ahead:.2f}", f"{row.ahead_bound:.2f}",
            f"{row.hidden:.0%}", *two,
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(results: dict[str, Any], output: Path) -> None:
    """Write the picture: draft-ahead, ping-pong and pruning, a row of panels per target."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams["svg.hashsalt"] = "faser"
    found = rows(results)
    targets = sorted({row.target for row in found})
    if not targets:
        raise SystemExit("no overlap part is finished; run run.py first")
    figure, panels = plt.subplots(len(targets), 3, figsize=(14, 3.8 * len(targets)), squeeze=False)
    for line, target in zip(panels, targets, strict=True):
        own = [row for row in found if row.target == target]
        for panel, kind in zip(line, ("ahead", "ping_pong"), strict=False):
            for name in dict.fromkeys(row.partition for row in own):
                points = [(row.requests, getattr(row, kind)) for row in own if row.partition == name]
                points = [point for point in points if point[1] is not None]
                panel.plot(*zip(*points, strict=True), "o-", ms=3, lw=1, label=name) if points else None
            bounds = sorted({(row.requests, getattr(row, f"{kind}_bound")) for row in own if getattr(row, kind)})
            panel.plot(*zip(*bounds, strict=True), "k--", lw=1, label="bound") if bounds else None
            panel.set_title(f"{target}: {'drafting ahead' if kind == 'ahead' else 'ping-pong'}", fontsize=10)
            panel.legend(frameon=False, fontsize=7)
        _draw_pruning(line[2], results, target)
        for panel in line:
            panel.axhline(1.0, color="0.6", lw=0.8)
            panel.set_xscale("log", base=2)
            panel.set_xlabel("requests")
            panel.set_ylabel("times faster")
    machine = results["machine"]
    where = (
        "dry run: these times mean nothing" if machine["is_dry_run"] else f"{machine['gpu']}, torch {machine['torch']}"
    )
    figure.suptitle(where, fontsize=10)
    figure.tight_layout()
    figure.savefig(output, metadata={"Date": None})
    plt.close(figure)


def _draw_pruning(panel: Any, results: dict[str, Any], target: str) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for name, part in results["parts"].items():
        if name.startswith(f"pruning {target}/") and "result" in part:
            for arm, gain in part["result"]["gain"].items():
                lines.setdefault(arm, []).append((part["result"]["requests"], gain["median"]))
    for arm, points in lines.items():
        panel.plot(*zip(*sorted(points), strict=True), "o-", ms=3, lw=1, label=f"{arm} rows kept")
    panel.set_title(f"{target}: pruned at half depth", fontsize=10)
    if lines:
        panel.legend(frameon=False, fontsize=7)


def main() -> None:
    """Read, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--output", type=Path, default=None, help="SVG; without it only the table is printed")
    options = parser.parse_args()
    results = json.loads(options.results.read_text())
    print(table(rows(results)))
    if options.output is not None:
        draw(results, options.output)


if __name__ == "__main__":
    main()

"""How much two equal arms of a benchmark differ on this machine, by the length of the slices they take turns in.

    python benchmarks/slices.py [--minutes 5] [--out benchmarks/results/slices.json]

One thread repeats the same products of matrices, as a small model's layers are. The run is then cut into slices that
belong to arm A and arm B in turn: what they differ by is the machine's doing. `half_width` is that of the 95 % interval
of a ratio after the same minutes, so a length that is too short for nothing but its noise does not look better.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from faser.controller.bench_machine import provenance
from faser.controller.bench_ratio import paired_ratio

RESULT: Final = Path(__file__).resolve().parent / "results" / "slices.json"
LENGTHS_S: Final = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
LAYERS: Final = 60
ROWS, WIDTH, INNER = 8, 576, 1536  # of SmolLM2-135M at 8 requests


def measured_s(minutes: float) -> npt.NDArray[np.float64]:
    """Return the times of equal pieces of work, one after the other."""
    import torch

    torch.set_num_threads(1)
    weights = [torch.randn(WIDTH, INNER, dtype=torch.bfloat16) for _ in range(LAYERS)]
    rows = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    times, end_s = [], time.monotonic() + 60.0 * minutes
    while time.monotonic() < end_s:
        began_s = time.perf_counter()
        for weight in weights:
            rows @ weight
        times.append(time.perf_counter() - began_s)
    return np.array(times)


def pair_logs(times_s: npt.NDArray[np.float64], slice_s: float) -> npt.NDArray[np.float64]:
    """Return the logarithms of speed of A over B, one per pair of slices of about this length."""
    ends_s = np.cumsum(times_s)
    cuts = np.searchsorted(ends_s, np.arange(slice_s, ends_s[-1], slice_s))
    speeds = np.diff(cuts) / np.diff(ends_s[cuts])
    whole = len(speeds) // 2 * 2
    return np.log(speeds[0:whole:2]) - np.log(speeds[1:whole:2])


def summary(times_s: npt.NDArray[np.float64], lengths_s: Sequence[float] = LENGTHS_S) -> dict[str, Any]:
    """Return spread and half-width at each length of which the run holds three pairs."""
    rows = []
    for length_s in lengths_s:
        logs = pair_logs(times_s, length_s)
        if len(logs) >= 3:
            spread, half_width = float(logs.std(ddof=1)), paired_ratio(logs).half_width
            rows.append({"slice_s": length_s, "spread": round(spread, 4), "half_width": round(half_width, 4)})
    return {"seconds": round(float(times_s.sum()), 1), "pieces": len(times_s), "lengths": rows}


def table() -> str:
    """Return the table of docs/bench.md."""
    found = json.loads(RESULT.read_text())
    lines = [
        f"One thread's products of matrices, {found['seconds'] / 60:.0f} minutes, on {found['machine']['cpu']}:",
        "",
        "| slices of | two equal arms differ by (standard deviation) | half-width of their ratio after the whole run |",
        "| --: | --: | --: |",
    ]
    for row in found["lengths"]:
        lines.append(f"| {row['slice_s']:g} s | {row['spread']:.1%} | {row['half_width']:.1%} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    found = {**provenance(), **summary(measured_s(options.minutes))}
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

"""Judge the drafter's confidence in telemetry files: AUC, calibration error and reliability curve by position.

    python benchmarks/confidence.py [TELEMETRY ...] [--curve reliability.svg] [--json]

Several files are read one after the other, each with a calibration that starts anew. Without a file, or from files
without confidences, there are no figures.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np

from faser.controller.confidence_report import Judgements, Quality, draw, judge, quality
from faser.controller.telemetry import read_engines, read_request_rows


def measure(paths: list[Path]) -> list[Quality]:
    """Return the quality of each position over all files."""
    k_max = max((engine.k_max for path in paths for engine in read_engines(path)), default=0)
    files = [judge(read_request_rows(path), k_max) for path in paths]
    together = [
        Judgements(
            np.concatenate([one.confidence for one in parts]),
            np.concatenate([one.chance for one in parts]),
            np.concatenate([one.is_accepted for one in parts]),
        )
        for parts in zip(*files, strict=True)
    ]
    return [quality(position, judged) for position, judged in enumerate(together, start=1)]


def main() -> None:
    """Print one row per position, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("telemetry", nargs="*", type=Path)
    parser.add_argument("--curve", type=Path, help="write the reliability curves here, as SVG")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    qualities = measure(arguments.telemetry)
    if arguments.curve is not None:
        draw(qualities, arguments.curve)
    if arguments.json:
        rows = [
            {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}
            for row in map(asdict, qualities)
        ]
        print(json.dumps({"positions": rows}))
        return
    print(
        f"{'position':>8} {'tokens':>8} {'rejected':>8} {'accepted':>8} {'AUC':>6} {'95 %':>13} {'raw':>7} {'ECE':>7}"
    )
    for one in qualities:
        span = f"{one.auc_low:.3f}-{one.auc_high:.3f}"
        print(
            f"{one.position:>8} {one.tokens:>8} {one.rejected:>8} {one.acceptance:>8.3f} {one.auc:>6.3f} {span:>13} "
            f"{one.raw_error:>7.3f} {one.error:>7.3f}"
        )


if __name__ == "__main__":
    main()

"""What benchmarks in simulated worlds share: every world at every load over some seeds, with a bar, into a file.

Called by splits.py and objectives.py.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress
from scipy import stats

from faser.controller.bench_machine import provenance
from faser.models.worlds import WorldSpec

Compare = Callable[[WorldSpec, int, range], dict[str, Any]]  # a world at a load, over seeds


def half_width(values: Sequence[float]) -> float:
    """Return half of Student's 95 % interval of the mean."""
    reach = float(stats.t.ppf(0.975, len(values) - 1))
    return reach * statistics.stdev(values) / math.sqrt(len(values))


def measure(
    about: str, result: Path, worlds: Sequence[WorldSpec], loads: Sequence[int], seed: int, compare: Compare
) -> None:
    """Read the command line, compare at every point, write the file.

    :param seed: the first one
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=result)
    options = parser.parse_args()
    points, found = [(world, load) for world in worlds for load in loads], []
    with Progress() as bar:
        task = bar.add_task("comparing", total=len(points))
        for world, load in points:
            found.append(compare(world, load, range(seed, seed + options.seeds)))
            bar.advance(task)
    kept = {**provenance(), "seeds": options.seeds, "points": found}
    options.json.write_text(json.dumps(kept, indent=1) + "\n")

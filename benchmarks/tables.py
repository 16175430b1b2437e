"""The Markdown table of a results file: `python benchmarks/tables.py benchmarks/results/pruning_gate.json [WORD ...]`.

Called by the scripts that measure cells, when they are done. A row is a cell of the file: a load, a batch, a world, a
run; with words only the columns whose names hold one of them are shown. Repeated measurements are told as their
geometric mean with the least and the greatest; where a gate was measured beside what it chooses from, its ratio to the
better of those is shown too. `faser bench --table` does the same for the files of `faser bench`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from faser.controller.bench.markdown import markdown_table
from faser.controller.bench.ratio import envelope, wider_interval

CELLS: Final = ("cells", "loads", "points", "runs", "by_temperature")  # what a file's rows are called
CONDITIONS: Final = ("machine", "versions", "commit", "commits", "settings", "note")
GATES: Final = ("gate", "gated")  # arms that choose among the others

Row = dict[str, str]


def table(found: dict[str, Any], words: Sequence[str] = ("",)) -> str:
    """Return a table of a results file's cells; of a file without cells, one of its figures.

    :param words: parts of the columns' names that are wanted
    """
    name = next((name for name in CELLS if found.get(name)), None)
    if name is None:
        figures = flat({key: value for key, value in found.items() if key not in CONDITIONS})
        return markdown_table(("what", "seen"), figures.items())
    rows = [row for label, cell in labelled(found[name]) for row in rows_of(label, cell)]
    known = dict.fromkeys(name for row in rows for name in row)
    names = [name for name in known if not name or any(word in name for word in words)]
    return markdown_table(names, ([row.get(name, "") for name in names] for row in rows))


def labelled(cells: Any) -> Iterator[tuple[str, Any]]:
    """Yield the cells of a list, or of a dictionary with what each is called."""
    for label, cell in cells.items() if isinstance(cells, dict) else (("", cell) for cell in cells):
        for each in cell if isinstance(cell, list) else [cell]:
            yield label, each


def rows_of(label: str, cell: dict[str, Any]) -> Iterator[Row]:
    """Yield a cell's row, or one for each of the rows inside it."""
    named = {"": label} if label else {}
    for inner in cell.get("rows") or [{}]:
        yield named | flat(cell) | flat(inner) | gate_ratio(cell)


def flat(found: dict[str, Any], above: str = "") -> Row:
    """Return a dictionary's figures by their whole names; lists of anything but numbers are left out."""
    row: Row = {}
    for name, value in found.items():
        where = f"{above}{name}"
        if isinstance(value, dict):
            row |= {where: spread(value)} if "median" in value else flat(value, f"{where}: ")
        elif isinstance(value, list):
            row |= {where: repeated(value)} if value and all(isinstance(each, int | float) for each in value) else {}
        else:
            row[where] = shown(value)
    return row


def shown(value: object) -> str:
    """Return a single value; numbers to four digits."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def repeated(values: list[float]) -> str:
    """Return the geometric mean of repeated measurements, least to greatest; of others than rates, their mean."""
    mean = statistics.geometric_mean(values) if min(values) > 0 else statistics.mean(values)
    return f"{shown(float(mean))} ({shown(float(min(values)))} to {shown(float(max(values)))})"


def spread(found: dict[str, Any]) -> str:
    """Return a median with what is known of its spread."""
    rest = [shown(value) for name, value in found.items() if name != "median"]
    return f"{shown(found['median'])} ({' to '.join(rest)})" if rest else shown(found["median"])


def gate_ratio(cell: dict[str, Any]) -> Row:
    """Return a gate's tokens per second over those of the better of the ways it chooses from, with a 95 % interval."""
    arms = cell.get("tokens_per_s")
    known = arms if isinstance(arms, dict) else {}
    rates = {arm: np.array(values) for arm, values in known.items() if isinstance(values, list)}
    gate = next((arm for arm in GATES if arm in rates), None)
    if gate is None or len(rates) < 2:
        return {}
    best = envelope(rates, gate, wider_interval)
    return {f"{gate} over the better": str(best.ratio), "which": " / ".join(dict.fromkeys(best.rivals))}


if __name__ == "__main__":
    path, *words = sys.argv[1:]
    sys.stdout.write(table(json.loads(Path(path).read_text()), words or ("",)) + "\n")

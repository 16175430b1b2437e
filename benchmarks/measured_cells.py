"""The file of a benchmark that measures one cell after the other: what was started again goes on behind the last one.

Called by ablation.py, overlap_gate.py and pruning_gate.py.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from faser.controller.engine.machine import commit
from faser.controller.whole_file import replacing


def begun(path: Path, settings: dict[str, Any], cells: Any) -> dict[str, Any]:
    """Return what a file has, or the empty one; end with one line if it was measured otherwise.

    :param cells: the name and the empty value of what is measured, such as {"loads": []}
    """
    kept: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"settings": settings, **cells}
    if kept["settings"] != settings:
        raise SystemExit(f"{path} has settings {kept['settings']}; expected {settings}; move it away or name another")
    return kept


def write(path: Path, kept: dict[str, Any]) -> None:
    """Write the file, whole or not at all."""
    with replacing(path) as place:
        place.write_text(json.dumps(kept, indent=1) + "\n")


def fill(
    path: Path,
    kept: dict[str, Any],
    name: str,
    wanted: Iterable[Any],
    key: Callable[[dict[str, Any]], Any],
    measure: Callable[[Any], dict[str, Any]],
) -> None:
    """Measure what is wanted and not there yet, and write the file behind each cell.

    :param name: what the file's cells are called
    :param key: of a cell, what was wanted
    """
    for one in wanted:
        if one not in map(key, kept[name]):
            kept[name] = sorted([*kept[name], measure(one) | {"commit": commit()}], key=key)
            write(path, kept)
            print(f"{time.strftime('%H:%M:%S')} {one}: done", file=sys.stderr, flush=True)

"""Make `faser` importable from the checkout this file stands in, installed or not, and leave out what is not needed.

What the parts below the engine use (engine_adapter/partition, engine_adapter/pruning, env/cost/overlap_bound.py)
needs torch, numpy and Triton alone: neither msgspec nor pyzmq, numba nor vLLM.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The environment's: monotonic time when a part will be ended. FASER's sidecar refuses names of FASER's that it does not
# know, so this is none.
ENDS_S = "GPU_PART_ENDS_S"


class Missing(Exception):
    """What a part needs is not there, or refuses; the part is recorded as skipped, with this as the reason."""


def part_ends_s() -> float:
    """Return the monotonic time when this part will be ended, with nothing of it kept; by itself it has minutes."""
    return float(os.environ.get(ENDS_S, time.monotonic() + 150.0))


def make_importable() -> None:
    """Register the checkout's root as the package `faser`, unless it is that already."""
    present = getattr(sys.modules.get("faser"), "__file__", None)
    if present is not None and Path(present).resolve() == ROOT / "__init__.py":
        return
    spec = importlib.util.spec_from_file_location("faser", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["faser"] = package
    spec.loader.exec_module(package)

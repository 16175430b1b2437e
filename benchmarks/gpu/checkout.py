"""Make `faser` importable from the checkout this file stands in, installed or not, and leave out what is not needed.

What the parts below the engine use (engine_adapter/partition, engine_adapter/pruning, env/cost/overlap_bound.py)
needs torch, numpy and Triton alone: neither msgspec nor pyzmq, numba nor vLLM.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Missing(Exception):
    """What a part needs is not there, or refuses; the part is recorded as skipped, with this as the reason."""


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

"""What calibration needs installed."""

from __future__ import annotations

from importlib.util import find_spec

from ..errors import UsageError


def require_libraries() -> None:
    """Raise UsageError where the simulator's libraries are missing."""
    missing = [name for name in ("numba", "scipy") if find_spec(name) is None]
    if missing:
        raise UsageError(f"no {' and no '.join(missing)} here", "the extra train", "pip install 'faser-vllm[train]'")

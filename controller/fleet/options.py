"""What `faser fleet` is asked for, checked before anything starts. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..errors import UsageError
from .sizing import SizeRule

MOST_REPLICAS: Final = 4096
# What vLLM must not be told: the fleet sets it, or counts on its being as it is.
_OURS: Final = {
    "--scheduler-cls": "FASER's own class",
    "--worker-cls": "FASER's own class",
    "--data-parallel-size": "none: --replicas are servers of their own",
    "-dp": "none: --replicas are servers of their own",
    "--uds": "none: engines listen where the entry point reaches them",
    "--ssl-keyfile": "none: TLS ends in front of the entry point",
    "--ssl-certfile": "none: TLS ends in front of the entry point",
}


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The command's options."""

    model: str
    arguments: tuple[str, ...] = ()  # vLLM's
    replicas: str = "1:2"
    cores_per_replica: int | None = None
    requests_per_replica: float = 8.0
    idle_s: float = 300.0
    host: str = "127.0.0.1"
    port: int = 8000
    address: str | None = None


def size_rule(options: FleetOptions) -> SizeRule:
    """Return the rule of an operator's options; raise UsageError for what cannot be."""
    least, most = replica_range(options.replicas)
    if not (math.isfinite(options.requests_per_replica) and options.requests_per_replica > 0.0):
        raise UsageError(f"--requests-per-replica {options.requests_per_replica:g}", "a number above 0")
    if not (math.isfinite(options.idle_s) and options.idle_s >= 0.0):
        raise UsageError(f"--idle-s {options.idle_s:g}", "seconds, 0 or more")
    return SizeRule(least, most, options.requests_per_replica, options.idle_s)


def replica_range(text: str) -> tuple[int, int]:
    """Return the least and the most of LEAST:MOST, or of one number for both."""
    found = re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", text, re.ASCII)
    if found is None:
        raise UsageError(f"--replicas {text!r}", "LEAST:MOST such as 1:4, or one number")
    least, most = int(found[1]), int(found[2] or found[1])
    if least > most:
        raise UsageError(f"--replicas {text}", "LEAST:MOST with LEAST not above MOST", f"pass {most}:{least}")
    if not 1 <= most <= MOST_REPLICAS:
        raise UsageError(f"--replicas {text}", f"1 to {MOST_REPLICAS} at most")
    return least, most


def cores_each(options: FleetOptions, most: int, cores: int, is_cpu: bool) -> int:
    """Return the cores of a replica: as asked for; else on a CPU an even share of this machine's, beside GPUs one.

    :param cores: of this machine
    """
    each = options.cores_per_replica
    if each is None:
        return max(cores // most, 1) if is_cpu else 1
    if each < 1:
        raise UsageError(f"--cores-per-replica {each}", "1 or more")
    return each


def require_ours(arguments: Sequence[str]) -> None:
    """Raise UsageError for what vLLM must not be told here."""
    for argument in arguments:
        name = argument.partition("=")[0]
        name = name.replace("_", "-") if name.startswith("--") else name
        if name in _OURS:
            raise UsageError(f"{name} with faser fleet", _OURS[name], "drop it")

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
_OUR_FLAGS: Final = ("--scheduler-cls", "--worker-cls", "--data-parallel-size", "-dp", "--uds")


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
        raise UsageError(
            f"--replicas {text}: at least {least} and at most {most}", "LEAST:MOST", f"pass {most}:{least}"
        )
    if not 1 <= most <= MOST_REPLICAS:
        raise UsageError(f"--replicas {text}", f"a most of 1 to {MOST_REPLICAS}")
    return least, most


def cores_each(options: FleetOptions, most: int, cores: int) -> int:
    """Return the cores of a replica on a CPU: what was asked for, or an even share of this machine's.

    :param cores: of this machine
    """
    each = options.cores_per_replica
    if each is None:
        return max(cores // most, 1)
    if each < 1:
        raise UsageError(f"--cores-per-replica {each}", "1 or more")
    return each


def require_ours(arguments: Sequence[str]) -> None:
    """Raise UsageError for what vLLM must not be told here."""
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if name in _OUR_FLAGS:
            raise UsageError(f"{name} with faser fleet", "nothing there: the fleet sets it or does its work", "drop it")

"""Every error a user can meet, as one tree. Raised on the controller's side, printed as one line by the CLI.

    FaserError                     1
    ├── UsageError                 2   a flag or argument that cannot be used
    │   ├── ConfigError            2   configuration: unknown key, wrong type, value out of bounds
    │   └── UnknownPolicyError     2   no such policy, or a specification that cannot be read
    ├── EndpointError              3   socket: in use, unsafe directory, not on loopback
    │   └── NotRunningError        3   no sidecar answers
    ├── StoreError                 4   telemetry file: unwritable, not ours, other schema
    ├── EngineError                5   vLLM: does not start, is gone, has no drafter
    │   └── UnsupportedError       5   a version or a combination FASER does not work with
    └── ModelError                 6   a model's files: missing, corrupt, not convertible

The number is the process's exit code. A message is one line: what was seen, what was expected, what to do.
"""

from __future__ import annotations

from typing import ClassVar


class FaserError(Exception):
    """An error that ends a command with one line on stderr."""

    exit_code: ClassVar[int] = 1

    def __init__(self, seen: str, expected: str = "", remedy: str = "") -> None:
        parts = (seen, f"expected {expected}" if expected else "", remedy)
        super().__init__("; ".join(" ".join(part.split()) for part in parts if part))
        self.seen = seen
        self.expected = expected
        self.remedy = remedy


class UsageError(FaserError):
    """A flag or an argument cannot be used."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration key or value cannot be used."""


class UnknownPolicyError(UsageError):
    """A policy specification names no policy."""


class EndpointError(FaserError):
    """A socket cannot be opened where it was asked for."""

    exit_code = 3


class NotRunningError(EndpointError):
    """No sidecar answers."""


class StoreError(FaserError):
    """The telemetry file cannot be written or read."""

    exit_code = 4


class EngineError(FaserError):
    """The engine did not start, went away or cannot speculate."""

    exit_code = 5


class UnsupportedError(EngineError):
    """A version or a combination that FASER does not work with."""


class ModelError(FaserError):
    """The files of a model are missing, corrupt or cannot be converted."""

    exit_code = 6

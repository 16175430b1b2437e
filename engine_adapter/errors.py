"""The root of every error a user can meet, and its kinds by exit code; controller/errors.py draws the whole tree.

Every floor derives its own from these. The CLI prints one as a line; nothing of them is raised into vLLM.
"""

from __future__ import annotations

from typing import ClassVar


class FaserError(Exception):
    """An error that ends a command with one line on stderr: what was seen, what was expected, what to do."""

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


class EndpointError(FaserError):
    """A socket cannot be opened where it was asked for."""

    exit_code = 3


class StoreError(FaserError):
    """The telemetry file cannot be written or read."""

    exit_code = 4


class EngineError(FaserError):
    """The engine did not start, went away or cannot speculate."""

    exit_code = 5


class ModelError(FaserError):
    """The files of a model are missing, corrupt or cannot be converted."""

    exit_code = 6

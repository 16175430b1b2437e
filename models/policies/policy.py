"""The one interface all policies share, and the parser of their names.

Called by the decision core, training and evaluation. A policy may keep state of its own between calls, but no
clock, file or random source: the same sequence of states gives the same actions.
"""

from __future__ import annotations

from typing import Protocol

from ...engine_adapter.errors import UsageError
from ...env.estimate.engine_state import EngineState
from ...env.spaces import Action


class PolicyError(UsageError):
    """A policy's name that cannot be used; the message says what was seen, what is possible, what to do."""


class Policy(Protocol):
    """Turns what is known about an engine into what it is asked for."""

    name: str

    def act(self, state: EngineState) -> Action:
        """Return the action for the next step, lengths aligned with `state.handles()`."""
        ...

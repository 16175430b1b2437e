"""The one interface all policies share, and the parser of their names.

Called by the decision core, training and evaluation. A policy may keep state of its own between calls, but no
clock, file or random source: the same sequence of states gives the same actions.
"""

from __future__ import annotations

from typing import Protocol

from ..env.spaces import Action, Capabilities
from ..env.state import EngineState

POLICIES = {
    "off": "no speculation",
    "fixed:K": "K draft tokens for every request, e.g. fixed:3",
    "table:ROWS": "draft tokens by requests in the batch, e.g. table:1-4=3,5-16=1,17-=0",
    "price": "each request drafts until its next token stops paying for its row, by history and drafter confidence",
    "price:history": "the same without the drafter's confidence",
}


class PolicyError(ValueError):
    """A policy's name that cannot be used; the message says what was seen, what is possible, what to do."""


class Policy(Protocol):
    """Turns what is known about an engine into what it is asked for."""

    name: str

    def act(self, state: EngineState) -> Action:
        """Return the action for the next step, lengths aligned with `state.handles()`."""
        ...


def make_policy(spec: str, capabilities: Capabilities) -> Policy:
    """Return the policy that `spec` names; raise PolicyError with the possible names otherwise."""
    # Imported here: each policy's module imports this one for the interface and the error.
    from .baselines import FixedLength, LengthTable, Off
    from .price import PricePolicy
    from .survey import Survey

    name, _, argument = spec.strip().partition(":")
    if name == "off" and not argument:
        return Off()
    if name == "fixed" and argument:
        return FixedLength.parse(argument, capabilities)
    if name == "table" and argument:
        return LengthTable.parse(argument, capabilities)
    if name == "price" and argument in ("", "history"):
        return PricePolicy(capabilities, use_confidence=not argument)
    if name == "survey":  # not among POLICIES: it serves `faser profile`, no operator
        return Survey.parse(argument or "0", capabilities)
    raise PolicyError(f"unknown policy {spec!r}: possible are {', '.join(POLICIES)}")

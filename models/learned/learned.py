"""The learned policy: the price policy under the advice of a network on what tokens are worth. No torch.

Called once per record; advice is renewed every 16. Without objectives nobody is asked, and it is price to the bit.
Where the observation is not a number or unlike everything it was trained in, price decides alone, and the reason says
so; both are counted.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from ...engine_adapter.arrays import Singles
from ...engine_adapter.compiled import compiled
from ...env.estimate.engine_state import EngineState
from ...env.layout.observation import observe_vector
from ...env.spaces import Action, Capabilities
from ..policies.policy import PolicyError
from ..policies.price import PricePolicy
from .advice import NEUTRAL, SPAN_DECISIONS, Advice
from .network import Network, load_network

RELEASED = Path(__file__).parents[1] / "weights" / "policy.json"
SLOTS = 256  # requests that the network looks at
STRANGE_FEATURES = 3  # global features out of the range of training at once: not a world it knows
MARGIN, LEAST_MARGIN = 0.1, 0.02  # beyond the range of training: a share of it, and so much more
UNREADABLE = "the observation holds NaN"


class LearnedPolicy:
    """Greedy: the advice is the mean of what the network was trained to say."""

    def __init__(self, network: Network, capabilities: Capabilities, name: str = "learned") -> None:
        self.name = name
        self._network = network
        self._price = PricePolicy(capabilities)
        low, high = (np.array(values, np.float32) for values in (network.manifest.low, network.manifest.high))
        slack = MARGIN * (high - low) + LEAST_MARGIN
        self._low, self._high = low - slack, high + slack
        self.unreadable = 0  # observations with NaN
        self.strange = 0  # ... unlike training
        self._until_advice = 0  # decisions
        self._why = ""  # nobody advises price; empty: somebody does
        self._preface = ""  # of reasons, meanwhile

    @classmethod
    def parse(cls, text: str, capabilities: Capabilities) -> LearnedPolicy:
        """Load the released policy, or the one whose manifest learned:PATH names."""
        return cls(load_network(manifest_path(text)), capabilities, f"learned:{text}" if text else "learned")

    @property
    def handed_over(self) -> int:
        """Return how many observations price decided on alone."""
        return self.unreadable + self.strange

    def act(self, state: EngineState) -> Action:
        """Return price's action under the advice in force; ask for new advice when its span is over."""
        has_objectives = state.requests.column("tpot_s").min(initial=np.inf) < np.inf
        if state.capabilities.k_max == 0 or not has_objectives:
            self._until_advice = 0
            return self._price.act(state)
        if self._until_advice == 0:
            self._until_advice = SPAN_DECISIONS
            self._renew(state)
        elif self._why:
            self.unreadable += self._why == UNREADABLE
            self.strange += self._why != UNREADABLE
        self._until_advice -= 1
        action = self._price.act(state)
        return msgspec.structs.replace(action, reason=self._preface + action.reason)

    def _renew(self, state: EngineState) -> None:
        """Ask the network, or leave price alone."""
        seen = observe_vector(state, min(state.requests.size, SLOTS))
        requests = seen.requests[: len(seen.handles)]
        self._why = self._judged(requests, seen.globals)
        advice = NEUTRAL if self._why else Advice.of(self._network.forward(requests, seen.globals))
        told = ", ".join(f"{name} {value:+.2f}" for name, value in advice._asdict().items())
        self._preface = f"{self._why}: price decides; " if self._why else f"learned: {told}; "
        self._price.follow(advice.values())

    def _judged(self, requests: Singles, overall: Singles) -> str:
        """Return why price has to decide on this observation, and count it; nothing where the network can advise."""
        is_finite, unlike = _read(requests, overall, self._low, self._high)
        if not is_finite:
            self.unreadable += 1
            return UNREADABLE
        if unlike >= STRANGE_FEATURES:
            self.strange += 1
            return f"{unlike} features unlike training"
        return ""


def manifest_path(text: str) -> Path:
    """Return the manifest that learned:TEXT names, the released one for none; raise PolicyError for no one's home."""
    try:
        return Path(text).expanduser() if text else RELEASED
    except RuntimeError:
        raise PolicyError(
            f"policy 'learned:{text}': no such home; expected the path of a trained policy's manifest"
        ) from None


@compiled
def _read(requests: Singles, overall: Singles, low: Singles, high: Singles) -> tuple[bool, int]:
    """Return whether all features are numbers, and how many of the engine's lie outside `low` to `high`."""
    is_finite, unlike = True, 0
    for i in range(requests.shape[0]):
        for j in range(requests.shape[1]):
            is_finite &= bool(np.isfinite(requests[i, j]))
    for j in range(len(overall)):
        is_finite &= bool(np.isfinite(overall[j]))
        unlike += 1 if overall[j] < low[j] or overall[j] > high[j] else 0
    return is_finite, unlike

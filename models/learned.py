"""The learned policy: observation in, the network's action out, within what the engine can run. No torch.

Called once per record. A network with the advice head speaks every 16 records, to the price policy, which plans. Where
the observation is not a number or unlike everything it was trained in, price decides alone, and the reason says so;
both are counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..engine_adapter.compiled import compiled
from ..env.acceptance import Floats, Ints
from ..env.action_vector import RULED_FROM, deepest, outside
from ..env.observation import Observation, Singles, observe_vector
from ..env.spaces import Action, Capabilities, clamp
from ..env.state import EngineState
from .advice import NEUTRAL, SPAN_DECISIONS, Advice
from .network import OUTPUTS, Network, load_network
from .policy import PolicyError
from .price import PricePolicy

Array = npt.NDArray[Any]

RELEASED = Path(__file__).parent / "weights" / "policy.json"
SLOTS = 256  # requests it looks at; others get the default length
STRANGE_FEATURES = 3  # global features out of the range of training at once: not a world it knows
MARGIN = 0.1  # of the range
UNREADABLE = "the observation holds NaN"
ONE, HALF = np.float32(1.0), np.float32(0.5)


class LearnedPolicy:
    """Greedy: the mean of the price or the advice head, or the likeliest length of each request."""

    def __init__(self, network: Network, capabilities: Capabilities, name: str = "learned") -> None:
        manifest = network.manifest
        if manifest.head == "lengths" and manifest.k_max < capabilities.k_max:
            raise PolicyError(
                f"policy {name!r}: trained for drafts of up to {manifest.k_max}, the engine has {capabilities.k_max}; "
                "expected at least as many; train again or use price"
            )
        self.name = name
        self._network = network
        self._fallback = PricePolicy(capabilities)
        low, high = np.array(manifest.low, np.float32), np.array(manifest.high, np.float32)
        slack = MARGIN * (high - low) + 0.02
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
        """Return how many observations price decided on."""
        return self.unreadable + self.strange

    def act(self, state: EngineState) -> Action:
        """Return the network's action, or price's."""
        if state.capabilities.k_max == 0 or not state.requests.size:
            return self._fallback.act(state)
        if self._network.manifest.head == "advice":
            return self._advised(state)
        seen = observe_vector(state, min(state.requests.size, SLOTS))
        requests = seen.requests[: len(seen.handles)]
        if why := self._judged(requests, seen.globals):
            return self._handed_over(state, why)
        values = self._network.forward(requests, seen.globals)
        if self._network.manifest.head == "price":
            return self._priced(state, values, seen)
        return self._lengths(state, seen.handles, values)

    def _judged(self, requests: Singles, overall: Singles) -> str:
        """Return why price has to decide on this observation, and count it; nothing where the network can."""
        is_finite, unlike = _read(requests, overall, self._low, self._high)
        if not is_finite:
            self.unreadable += 1
            return UNREADABLE
        if unlike >= STRANGE_FEATURES:
            self.strange += 1
            return f"{unlike} features unlike training"
        return ""

    def _advised(self, state: EngineState) -> Action:
        """Return price's action under the advice in force; ask for new advice when its span is over."""
        if self._until_advice == 0:
            self._until_advice = SPAN_DECISIONS
            seen = observe_vector(state, min(state.requests.size, SLOTS))
            requests = seen.requests[: len(seen.handles)]
            self._why = self._judged(requests, seen.globals)
            advice = NEUTRAL if self._why else Advice.of(self._network.forward(requests, seen.globals))
            told = ", ".join(f"{name} {value:+.2f}" for name, value in advice._asdict().items())
            self._preface = f"{self._why}: price decides; " if self._why else f"learned: {told}; "
            self._fallback.follow(advice)
        elif self._why:
            self.unreadable += self._why == UNREADABLE
            self.strange += self._why != UNREADABLE
        self._until_advice -= 1
        action = self._fallback.act(state)
        return msgspec.structs.replace(action, reason=self._preface + action.reason)

    def _priced(self, state: EngineState, values: Array, seen: Observation) -> Action:
        """Return what env/action_vector.py's `decode` makes of these outputs (a test compares), without its clamps."""
        limited = np.minimum(np.maximum(values, -ONE), ONE)  # np.clip takes several times as long
        threshold, depth, keep, go_on = ((limited + ONE) * HALF).tolist()
        k_max = state.capabilities.k_max
        lengths = np.empty(len(seen.acceptance), np.int64)
        rounds = deepest(depth, k_max)
        default = _place(seen.acceptance, state.population.mean, np.float32(threshold), rounds, lengths)
        stop = None
        if keep >= RULED_FROM and state.confidence.is_ready and not state.capabilities.is_async:
            stop = state.confidence.rule(keep, np.full(k_max, go_on))
        reason = (
            f"{len(seen.handles)} running: learned, survival {threshold:.2f} in up to {rounds} rounds, "
            f"kept above {keep:.2f}"
        )
        return Action(
            lengths, default, prune=state.capabilities.released_prune, stop=stop, reason=reason
        )  # fmt: skip

    def _lengths(self, state: EngineState, handles: Array, logits: Array) -> Action:
        chosen = logits[:, : state.capabilities.k_max + 1].argmax(axis=1)
        default = int(np.median(chosen)) if len(chosen) else 0
        lengths = np.full(state.requests.size, default, np.int64)
        known = state.requests.column("handle")
        lengths[np.searchsorted(known, handles) if _ascends(known) else _places(known, handles)] = chosen
        reason = f"{len(handles)} running: learned lengths, mean {chosen.mean() if len(chosen) else 0.0:.1f}"
        return clamp(
            Action(lengths, default, prune=state.capabilities.released_prune, reason=reason), state.capabilities
        )  # fmt: skip

    def _handed_over(self, state: EngineState, why: str) -> Action:
        action = self._fallback.act(state)
        return msgspec.structs.replace(action, reason=f"{why}: price decides; {action.reason}")


def manifest_path(text: str) -> Path:
    """Return the manifest that learned:TEXT names, the released one for none; raise PolicyError for no one's home."""
    try:
        return Path(text).expanduser() if text else RELEASED
    except RuntimeError:
        raise PolicyError(
            f"policy 'learned:{text}': no such home; expected the path of a trained policy's manifest"
        ) from None


def outside_of(values: Array) -> Array:
    """Return the whole action vector for the price head's outputs, (..., len(OUTPUTS)).

    The rest is neutral, but that it asks for pruning where there are exit heads.
    """
    neutral = outside(prune=1.0)
    vector = np.broadcast_to(neutral, (*values.shape[:-1], len(neutral))).copy()
    vector[..., : len(OUTPUTS)] = values
    return vector


def _ascends(handles: Array) -> bool:
    return bool((np.diff(handles) > 0).all())


def _places(known: Array, handles: Array) -> Array:
    place = {handle: index for index, handle in enumerate(known.tolist())}
    return np.array([place[handle] for handle in handles.tolist()], np.int64)


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


@compiled
def _place(acceptance: Floats, mean: Floats, threshold: np.float32, rounds: int, lengths: Ints) -> int:
    """Fill in (n,) lengths as env/action_vector.py's `lengths_for` does; return that of a request not known."""
    n = len(lengths)
    for i in range(n + 1):
        chances = acceptance[i] if i < n else mean
        survival, length = np.float32(1.0), 0
        while length < rounds:
            survival *= np.float32(chances[length])
            if survival < threshold:
                break
            length += 1
        if i == n:
            return length
        lengths[i] = length
    return 0

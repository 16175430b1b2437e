"""Rules that maximise goodput, expected tokens per second of a step: SmartSpec's, AdaSpec's, adaptive verification's.

All three ask the state's cost table, so that they differ in their rule alone, not in how well they know the machine.
Sources: SmartSpec (arXiv 2406.14066), AdaSpec (arXiv 2503.05096), vLLM 0.32's `enable_adaptive_verification`.
Simplified: where the papers profile the machine beforehand, the cost table learns it as it goes; SmartSpec's second
drafter, n-grams, is left out; AdaSpec's objective is one time per token for all requests; adaptive verification fits
acceptance online and cuts on the device after all is drafted, here what FASER has learnt says what is not drafted.
"""

from __future__ import annotations

import re

import numpy as np
from msgspec.structs import replace

from ...engine_adapter.arrays import Floats, Ints
from ...env.estimate.confidence import EDGES, Forecast
from ...env.estimate.engine_state import EngineState
from ...env.spaces import Action, Capabilities
from ..policies.baselines import uniform
from ..policies.policy import PolicyError
from .watch import Seen, StepWatch

GAIN = 0.05  # of SmartSpec's moving acceptance
FIRST_ACCEPTANCE = 0.7
FREE = len(EDGES) - 1  # the bin that lets everything pass


class SmartSpec:
    """One length for the batch: the k with the most expected tokens per second under one moving acceptance rate.

    Expected tokens of a request are (1 - a^(k+1)) / (1 - a), a the share of verified draft tokens that were accepted;
    a step costs verification of n (k + 1) rows and k rounds of drafting.
    """

    name = "smartspec"

    def __init__(self, capabilities: Capabilities) -> None:
        self._k_max = capabilities.k_max
        self.acceptance = FIRST_ACCEPTANCE
        self._watch = StepWatch()

    def act(self, state: EngineState) -> Action:
        """Return the length for all."""
        seen = self._watch.look(state)
        if seen is not None:
            self.learn(seen)
        if self._k_max == 0:
            return uniform(state.requests.size, 0, "nothing to speculate on")
        requests = max(int(np.count_nonzero(state.decoding())), 1)  # with nobody: for who comes next
        rate = self.goodput(state, requests)
        length = int(rate.argmax())
        return uniform(
            state.requests.size, length, f"{requests} decoding at acceptance {self.acceptance:.2f}: length {length}"
        )

    def learn(self, seen: Seen) -> None:
        """Follow the share of tested draft tokens that were accepted; those behind a rejected one are not tested."""
        tested = np.minimum(seen.accepted + 1, seen.drafted).sum()
        if tested:
            self.acceptance += GAIN * (float(seen.accepted.sum()) / float(tested) - self.acceptance)

    def goodput(self, state: EngineState, requests: int) -> Floats:
        """Return (k_max + 1,) tokens per second."""
        lengths: Floats = np.arange(self._k_max + 1, dtype=np.float64)
        a = min(max(self.acceptance, 0.01), 0.99)
        tokens = requests * (1.0 - a ** (lengths + 1.0)) / (1.0 - a)
        rate: Floats = tokens / uniform_step_s(state, requests, lengths)
        return rate


def uniform_step_s(state: EngineState, requests: int, lengths: Floats) -> Floats:
    """Return seconds of a step in which `requests` draft and verify so many tokens each."""
    rows = requests * (lengths + 1.0)
    step_s: Floats = state.unsplit_cost.verify_time_s(rows) + state.unsplit_cost.draft_time_s(
        rows, lengths, requests * lengths
    )
    return step_s


class AdaptiveVerification:
    """Everybody drafts, the best tokens are verified: all (request, position) pairs ranked by survival, the number
    of rows that maximises expected tokens per second over the cost of verifying them. Drafting counts as given.

    With calibrated confidences the cut is a threshold on survival, applied while drafting; without, it is
    made by each request's acceptance so far, and what would be cut is not drafted.
    """

    name = "goodput"

    def __init__(self, capabilities: Capabilities) -> None:
        self._k_max = capabilities.k_max
        self._most_rows = capabilities.max_batched_tokens or 1 << 30
        self._can_stop = not capabilities.is_async

    def act(self, state: EngineState) -> Action:
        """Return the longest drafts with a cut by confidence, or lengths by rank."""
        decoding = state.decoding()
        requests = int(np.count_nonzero(decoding))
        if self._k_max == 0:
            return uniform(state.requests.size, 0, "nothing to speculate on")
        forecast = state.confidence.forecast
        if self._can_stop and forecast is not None and state.confidence.is_ready:
            return self._by_confidence(state, forecast, max(requests, 1))  # with nobody: for who comes next
        if requests == 0:
            return uniform(state.requests.size, self._k_max, "nobody decodes: who comes next is ranked then")
        survival = state.acceptance()[decoding].cumprod(axis=1)
        chosen = self.ranked(state, survival)
        lengths = np.full(state.requests.size, self._k_max, np.int64)
        lengths[decoding] = chosen
        return Action(lengths, self._k_max, reason=f"{requests} decoding: {chosen.sum()} rows worth verifying")

    def ranked(self, state: EngineState, survival: Floats) -> Ints:
        """Return (n,) lengths for requests whose survival, (n, k_max), is given."""
        requests = len(survival)
        order = np.argsort(-survival, axis=None, kind="stable")[: max(self._most_rows - requests, 0)]
        tokens = requests + np.append(0.0, survival.ravel()[order].cumsum())
        rows = requests + np.arange(len(order) + 1.0)
        budget = int((tokens / state.unsplit_cost.verify_time_s(rows)).argmax())
        # Survival never rises along a draft, and equal ones keep their order: what is chosen is a prefix of each.
        return np.bincount(order[:budget] // survival.shape[1], minlength=requests)

    def _by_confidence(self, state: EngineState, forecast: Forecast, requests: int) -> Action:
        kept, gain = (values[:, FREE, :].sum(axis=0) for values in (forecast.kept, forecast.gain))
        rate = (1.0 + gain) / state.unsplit_cost.verify_time_s(requests * (1.0 + kept))
        keep = int(rate.argmax())
        reason = f"{requests} decoding: {requests * kept[keep]:.0f} tokens verified, above {EDGES[keep]:.2f}"
        return _ruled(state, self._k_max, keep, reason)


def _ruled(state: EngineState, length: int, keep: int, reason: str) -> Action:
    """Return the same length for all; tokens below EDGES[keep] are dropped, nobody's draft ends early by itself."""
    action = uniform(state.requests.size, length, reason)
    if keep == FREE or length == 0:
        return action
    return replace(action, stop=state.confidence.rule(float(EDGES[keep]), np.zeros(state.capabilities.k_max)))


class AdaSpec:
    """The batch drafts as many rounds as raise its goodput, then the surest tokens are verified, within the objective.

    Rounds and the threshold to verify are chosen together by expected tokens per second of draft and verification;
    with an objective, among what keeps the mean time per token within it, or else by that time.
    """

    def __init__(self, capabilities: Capabilities, objective_ms: float | None = None) -> None:
        self.name = "adaspec" if objective_ms is None else f"adaspec:{objective_ms:g}"
        self._k_max = capabilities.k_max
        self._objective_s = None if objective_ms is None else objective_ms / 1e3
        self._can_stop = not capabilities.is_async

    @classmethod
    def parse(cls, text: str, capabilities: Capabilities) -> AdaSpec:
        """Read the TPOT_MS of adaspec:TPOT_MS."""
        if not text:
            return cls(capabilities)
        if not re.fullmatch(r"\d{1,6}(\.\d{1,3})?", text) or float(text) <= 0.0:
            raise PolicyError(f"policy 'adaspec:{text}': expected milliseconds per token, e.g. adaspec:50")
        return cls(capabilities, float(text))

    def act(self, state: EngineState) -> Action:
        """Return the depth for all, and what is kept of it."""
        if self._k_max == 0:
            return uniform(state.requests.size, 0, "nothing to speculate on")
        requests = max(int(np.count_nonzero(state.decoding())), 1)  # with nobody: for who comes next
        kept, gain = self._expected(state)
        rounds = np.arange(self._k_max + 1.0)[:, None]
        rows = requests * (1.0 + kept)
        step_s = state.unsplit_cost.verify_time_s(rows) + state.unsplit_cost.draft_time_s(
            rows, rounds, requests * rounds
        )
        rate = (1.0 + gain) / step_s  # of one request
        if self._objective_s is not None and (rate * self._objective_s >= 1.0).any():
            rate = np.where(rate * self._objective_s >= 1.0, rate, 0.0)
        depth, keep = divmod(int(rate.argmax()), rate.shape[1])
        reason = f"{requests} decoding: {depth} rounds, {requests * kept[depth, keep]:.0f} tokens verified"
        return _ruled(state, depth, keep if rate.shape[1] > 1 else FREE, reason)

    def _expected(self, state: EngineState) -> tuple[Floats, Floats]:
        """Return verified and accepted draft tokens of a request by rounds and threshold, (k_max + 1, bins or 1)."""
        forecast = state.confidence.forecast
        if self._can_stop and forecast is not None and state.confidence.is_ready:
            kept, gain = forecast.kept[:, FREE, :], forecast.gain[:, FREE, :]
        else:
            kept, gain = np.ones((self._k_max, 1)), state.population.mean.cumprod()[:, None]
        return _summed(kept), _summed(gain)


def _summed(values: Floats) -> Floats:
    return np.concatenate([np.zeros((1, values.shape[1])), values.cumsum(axis=0)])

"""One simulated engine as the decision core meets a real one: step records come out, action sets go in.

Called by models/evaluation/evaluate.py. Wraps a Simulator of one engine. Whether drafting ahead pays is left to the
gate that a real engine has (`FASER_DRAFT_AHEAD=auto`).
"""

from __future__ import annotations

import numpy as np

from ...engine_adapter.arrays import Singles
from ...engine_adapter.gate import Gate
from ...engine_adapter.protocol import ActionSet, MatchRule, Rest, StepRecord, StopRule
from ...engine_adapter.steering.stop_rule import fitted_to
from ..layout.action_vector import AHEAD, OVERLAPS, PING_PONG, outside
from ..spaces import Capabilities
from .constants import LOGITS, NAMED
from .scenario import Scenario
from .simulated_record import Recorder, hello
from .simulator import Simulator
from .state import DRAFTS, FREE, GO_ON_FROM, HANDLE, KEEP_FROM, PHASE


class SimulatedEngine:
    """An engine with records; two of the same scenario and seed meet the same requests."""

    def __init__(self, scenario: Scenario, seed: int, *, has_confidence: bool = True) -> None:
        self.simulator = Simulator(scenario, 1, mode=NAMED, seed=seed, own_rules=True)
        self.simulator.reset()
        self._number = int(self.simulator.state.engines["profile"][0])
        self.profile = scenario.profiles[self._number]
        self.capabilities = Capabilities.from_hello(hello(self.simulator))
        self._recorder = Recorder(self.simulator, has_confidence=has_confidence)
        self._lengths = np.full((1, scenario.slots), -1, np.int8)
        self._rule: StopRule | None = None
        self._gate = Gate()

    @property
    def clock_s(self) -> float:
        """The engine's time."""
        return float(self.simulator.state.engines["clock_s"][0])

    def step(self, actions: ActionSet | None) -> StepRecord:
        """Run one step under these actions (None: no drafts) and return its record."""
        state = self.simulator.state
        running = int(state.engines["running"][0])
        frontier = 0 if actions is None else min(actions.frontier or 0, self.capabilities.frontier)
        could = bool(frontier and state.ints[0, DRAFTS].any()) and not (actions and actions.split)
        may_go_on = could and self._gate.ask(running)
        self.simulator.step(self._ask(actions, may_go_on), self._lengths)
        if actions is None:
            return self._recorder.record(frontier=frontier)
        record = self._recorder.record(actions.sequence, epoch=actions.epoch, split=actions.split, frontier=frontier)
        if could and len(record.rows) == running and not record.prefill_tokens:
            self._gate.note(running, may_go_on, record.step_s, sum(row.emitted for row in record.rows))
        return record

    def _ask(self, actions: ActionSet | None, may_go_on: bool) -> Singles:
        """Fill in lengths and stop rule; return the vector that carries the default length."""
        state, k_max = self.simulator.state, self.capabilities.k_max
        self._lengths[:] = -1
        if actions is None:
            self._set_match_rule(None)
            self._set_rest(None)
            return outside()
        named = dict(zip(actions.handles, actions.lengths, strict=True))
        taken = np.flatnonzero(state.ints[0, PHASE] != FREE)
        for i, handle in zip(taken.tolist(), state.ints[0, HANDLE, taken].tolist(), strict=True):
            self._lengths[0, i] = named.get(handle, actions.default_length)
        if actions.stop is not None and actions.stop is not self._rule:
            rule = actions.stop
            slope, intercept = (np.array(values[:k_max])[:, None] for values in (rule.slopes, rule.intercepts))
            state.chances[0] = 1.0 / (1.0 + np.exp(-(intercept + slope * self._logits())))
            state.rules[0, KEEP_FROM], state.rules[0, GO_ON_FROM] = rule.keep[:k_max], rule.go_on[:k_max]
        self._rule = actions.stop
        self._set_match_rule(actions.match)
        self._set_rest(actions.rest)
        return outside(
            depth=actions.default_length / max(k_max, 1),
            keep=0.0 if self._rule is None else 1.0,
            prune=0.0 if actions.prune is None else 1.0,
            **self._side_by_side(actions.split, may_go_on),
        )

    def _set_match_rule(self, rule: MatchRule | None) -> None:
        """Let drafts be copied by this rule from now on; None: none are."""
        engine, longest = self.simulator.state.engines[0], self.capabilities.copy_max
        engine["copy_most"] = min(rule.most, longest) if rule is not None else 0
        if rule is not None and longest:
            engine["copy_fewest"], engine["copy_worth"], engine["copy_least"] = rule.fewest, rule.worth, rule.least
            curves = (rule.slopes, rule.intercepts, rule.keep)
            self.simulator.state.copy_rules[0, :, :longest] = [fitted_to(values, longest) for values in curves]
            weights = dict(zip(rule.handles, rule.weights, strict=True))
            ints = self.simulator.state.ints[0]
            named = [weights.get(handle, 1.0) for handle in ints[HANDLE].tolist()]
            self.simulator.state.copy_weights[0] = np.where(ints[PHASE] == FREE, 1.0, named)  # who comes is not named

    def _set_rest(self, rest: Rest | None) -> None:
        """Leave these requests out of steps from now on; None: nobody is."""
        state = self.simulator.state
        state.engines[0]["rest_steps"] = 0 if rest is None else rest.steps
        if rest is not None:
            state.rests[0] = np.isin(state.ints[0, HANDLE], rest.handles) & (state.ints[0, PHASE] != FREE)

    def _side_by_side(self, split: int | None, may_go_on: bool) -> dict[str, float]:
        """Return the meanings of a split, on whose shares two groups take turns, or of drafting ahead, if any."""
        if not split:
            return {"overlap": (AHEAD + 0.5) / OVERLAPS} if may_go_on else {}
        return {"split": (split + 0.5) / len(self.capabilities.splits), "overlap": (PING_PONG + 0.5) / OVERLAPS}

    def _logits(self) -> Singles:
        """Return (k_max, cells) the confidences that the drafter reports."""
        logits: Singles = self.simulator.world.tables[self._number, LOGITS]
        return logits

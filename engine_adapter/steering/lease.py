"""What is in force now: one controller's newest action set, until its step or its time is past.

Pure: the caller gives step number and time. Engine-side truth: whatever a controller asks, the limits here hold.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

import msgspec

from ..protocol import ActionSet, Admission, MatchRule, Release
from .stop_rule import fitted, fitted_to


class Lease:
    """At most one action set, owned by one epoch.

    :param boot_id: this engine's identity; action sets for another one are refused.
    :param k_max: longest draft the engine's buffers hold, tokens.
    :param max_steps: longest validity in engine steps.
    :param max_s: longest validity in seconds.
    :param copy_max: longest copied draft, tokens; 0: none.
    :param rest_steps: most steps in a row that a request may be left out of; 0: none.
    :param exit_layers: layers behind which rows may be pruned; empty: no pruning.
    """

    def __init__(
        self,
        boot_id: str,
        k_max: int,
        max_steps: int,
        max_s: float,
        exit_layers: Collection[int] = (),
        copy_max: int = 0,
        rest_steps: int = 0,
    ) -> None:
        self.boot_id = boot_id
        self.k_max = k_max
        self.copy_max = copy_max
        self.max_steps = max_steps
        self.max_s = max_s
        self.exit_layers = exit_layers
        self.rest_steps = rest_steps
        self.epoch = 0  # the highest ever granted: epochs are monotone
        self._sequence = -1
        self._action: ActionSet | None = None
        self._late_step = self._last_step = -1
        self._last_s = 0.0

    def offer(self, action: ActionSet, step: int, now_s: float, looked_s: float | None = None) -> str | None:
        """Take an action set, or return why not: foreign, advisory, stale, owned, old_epoch, reordered.

        :param looked_s: when the engine looked for messages before, its idle time since then not counted. It came after
            that, and if it was not stale then it holds for this one step at least: a step may take longer than a lease
            (a long prompt on a CPU).
        """
        reason = self._refusal(action, step, now_s, now_s if looked_s is None else looked_s)
        if reason is None:
            self.epoch, self._sequence, self._action = action.epoch, action.sequence, self._clamped(action)
            self._late_step = -1 if looked_s is None else step
            self._last_step = min(action.valid_until_step, step + self.max_steps)
            self._last_s = min(action.valid_until_s, now_s + self.max_s)
        return reason

    def _refusal(self, action: ActionSet, step: int, now_s: float, looked_s: float) -> str | None:
        if action.boot_id != self.boot_id:
            return "foreign"
        if action.mode in ("advisory", "off"):
            return "advisory"
        if action.valid_until_step < step or action.valid_until_s < looked_s:
            return "stale"
        if action.epoch < self.epoch:
            return "old_epoch"
        if action.epoch > self.epoch and self.in_force(step, now_s) is not None:
            return "owned"
        if action.epoch == self.epoch and action.sequence <= self._sequence:
            return "reordered"
        return None

    def _clamped(self, action: ActionSet) -> ActionSet:
        k_max = self.k_max
        action.default_length = min(action.default_length, k_max)
        if action.lengths and max(action.lengths) > k_max:
            action.lengths = [min(length, k_max) for length in action.lengths]
        if action.stop is not None:
            action.stop = fitted(action.stop, k_max)
        if action.prune is not None and action.prune.layer not in self.exit_layers:
            action.prune = None
        if action.match is not None:
            action.match = fitted_match(action.match, self.copy_max)
            if len(action.match.handles) != len(action.match.weights):
                action.match = None
        if action.rest is not None and action.rest.steps > self.rest_steps:
            action.rest = msgspec.structs.replace(action.rest, steps=self.rest_steps) if self.rest_steps else None
        if action.admission is not None and not is_sound(action.admission, len(action.handles)):
            action.admission = None
        return action

    def release(self, release: Release) -> bool:
        """End the lease if its owner asks for it."""
        if release.boot_id != self.boot_id or release.epoch != self.epoch:
            return False
        self._action = None
        return True

    def in_force(self, step: int, now_s: float) -> ActionSet | None:
        """Return the action set that holds at this step and time, None for the engine's own default."""
        is_late = step > self._last_step or now_s > self._last_s
        if self._action is not None and is_late and step != self._late_step:
            self._action = None
        return self._action


def fitted_match(rule: MatchRule, longest: int) -> MatchRule:
    """Return the rule for drafts of at most so many tokens, with one entry per position."""
    if rule.most <= longest == len(rule.slopes) == len(rule.intercepts) == len(rule.keep):
        return rule  # a controller knows the buffers' length: as a rule nothing is to be done
    slopes, intercepts, keep = (fitted_to(values, longest) for values in (rule.slopes, rule.intercepts, rule.keep))
    return msgspec.structs.replace(rule, slopes=slopes, intercepts=intercepts, keep=keep, most=min(rule.most, longest))


def is_sound(admission: Admission, handles: int) -> bool:
    """Tell whether the rows rise, each has its seconds, and there are weights for all named requests or for none."""
    rows = admission.rows
    is_rising = all(low < high for low, high in pairwise(rows))
    return is_rising and len(rows) == len(admission.seconds) and len(admission.weights) in (0, handles)

"""What drafting ahead did in measured steps, as one `Ahead`: how often it was of use, what that hid, what it slowed.

Called by env/calibration/profile_fit.py and controller/calibrate/fidelity.py. A step is busy if the drafter worked
beside its verification; step costs come from the other steps, and what is fitted here is by how much busy ones
differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...engine_adapter.arrays import Bools, Floats, Ints
from ..profile.engine_profile import Ahead
from .step_fit import CalibrationError, phase_level
from .step_samples import StepSamples

LEAST_STEPS = 20  # of either kind
LEAST_DRAFTS = 20  # made ahead, before their acceptance is believed


@dataclass(frozen=True, slots=True)
class Chains:
    """Requests whose drafts were accepted as a whole and that got another draft; (n,) each."""

    step: Ints  # index of the step that accepted and drafted
    was_next_accepted: Floats  # whether the next draft's first token was: 1 or 0; NaN: not known


@dataclass(frozen=True, slots=True)
class AheadSteps:
    """n steps that may have drafted ahead; every array is (n,).

    :param samples: times, and work as if all drafts that were handed over had been made in turn
    :param is_busy: the drafter worked beside the verification
    :param hits: requests whose draft had been made ahead
    """

    samples: StepSamples
    is_busy: Bools
    hits: Floats
    chains: Chains

    @classmethod
    def joined(cls, parts: list[AheadSteps]) -> AheadSteps:
        """Return all parts as one."""
        starts = np.cumsum([0, *(len(part.samples) for part in parts[:-1])])
        where = [part.chains.step + start for part, start in zip(parts, starts, strict=True)]
        return cls(
            StepSamples.joined([part.samples for part in parts]),
            np.concatenate([part.is_busy for part in parts]),
            np.concatenate([part.hits for part in parts]),
            Chains(np.concatenate(where), np.concatenate([part.chains.was_next_accepted for part in parts])),
        )

    @property
    def waited_s(self) -> Floats:
        """Return what was waited for drafts, beyond the verification; NaN: not known."""
        return self.samples.draft_s - self.samples.overlap_s

    @property
    def is_usual(self) -> bool:
        """Whether most steps that verify drafts have some made ahead beside them."""
        return bool(self.is_busy.sum() * 2 > (self.samples.draft_tokens > 0.0).sum())

    def serial_s(self, draft_coefficients: Floats) -> Floats:
        """Return what drafting all of it in turn takes."""
        serial_s: Floats = self.samples.basis("draft") @ draft_coefficients
        return serial_s

    def hideable_s(self, serial_s: Floats, verify_s: Floats) -> Floats:
        """Return what those drafts take that were there, as far as a verification is long enough to hide it."""
        share = self.hits / np.maximum(self.samples.drafting_requests, 1.0)
        hideable_s: Floats = np.minimum(serial_s * share, verify_s)
        return hideable_s


def fit_ahead(
    steps: AheadSteps, verify_coefficients: Floats, draft_coefficients: Floats, graph_sizes: tuple[int, ...] = ()
) -> Ahead:
    """Return how busy steps differ from what the coefficients say, which were fitted to the others."""
    decodes = steps.samples.prompt_tokens == 0.0
    busy = steps.is_busy & decodes
    if busy.sum() < LEAST_STEPS:
        raise CalibrationError(
            f"{int(busy.sum())} steps without prompts beside which drafts were made ahead; expected {LEAST_STEPS} or "
            "more; measure longer, or with FASER_DRAFT_AHEAD=always"
        )
    ready, acceptance = _use(steps)
    return Ahead(
        ready=ready,
        hidden=_hidden_share(steps, busy, draft_coefficients),
        verify_factor=phase_level(steps.samples.where(busy), "verify", verify_coefficients, graph_sizes),
        acceptance=acceptance,
    )


def _use(steps: AheadSteps) -> tuple[float, float]:
    """Return how often a draft was there behind an accepted one, and how the chance of its first token compares.

    Which of a step's requests were hit is not told, so tokens are compared of steps in which all of them were, or none.
    """
    chains = steps.chains
    in_step = np.bincount(chains.step, minlength=len(steps.samples))
    hits = np.minimum(steps.hits, in_step)
    could = int(in_step[steps.is_busy].sum())
    known = np.isfinite(chains.was_next_accepted)
    is_ahead = known & steps.is_busy[chains.step] & (hits == in_step)[chains.step]
    in_turn = known & (hits == 0)[chains.step]
    ready = float(hits[steps.is_busy].sum()) / could if could else 0.0
    if is_ahead.sum() < LEAST_DRAFTS or in_turn.sum() < LEAST_DRAFTS:
        return ready, Ahead().acceptance
    ahead, turn = (float(chains.was_next_accepted[chosen].mean()) for chosen in (is_ahead, in_turn))
    return ready, min(ahead / turn, 1.0) if turn > 0.0 else Ahead().acceptance


def _hidden_share(steps: AheadSteps, busy: Bools, draft_coefficients: Floats) -> float:
    """Return the share of the hideable time that nobody waited for; drafting in turn is levelled by steps without."""
    serial_s = steps.serial_s(draft_coefficients)
    drafts = busy & (steps.samples.drafting_requests > 0.0) & np.isfinite(steps.waited_s)
    missed, hit = drafts & (steps.hits == 0.0), drafts & (steps.hits > 0.0)
    if missed.sum() >= LEAST_STEPS:
        serial_s = serial_s * (steps.waited_s[missed].sum() / serial_s[missed].sum())
    hideable_s = float(steps.hideable_s(serial_s, steps.samples.verify_s)[hit].sum())
    hidden_s = float((serial_s - steps.waited_s)[hit].sum())
    return min(max(hidden_s / hideable_s, 0.0), 1.0) if hideable_s > 0.0 else Ahead().hidden

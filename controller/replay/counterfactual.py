"""What another policy would have done to speed: the recorded requests through the calibrated simulator, with its error.

Called by the replay. Arrivals and lengths are the recording's, acceptances are drawn from the profile's model. The
simulator runs twice: under the recorded draft lengths, which tells how far it is from this file, and under the other
policy. A difference counts beyond that error and the spread between seeds; a simulator that is too far off is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from ...engine_adapter.protocol import StepRecord
from ...env.estimate.engine_state import EngineState
from ...env.spaces import Capabilities
from ...models.policies.policy import Policy
from ...models.registry import make_policy
from ..decision.decide import LeaseTerms, decide
from ..errors import StoreError
from ..extras import require_simulator
from ..telemetry.telemetry_file import TelemetryFile

if TYPE_CHECKING:
    from ...env.profile.engine_profile import EngineProfile
    from ...env.simulator.serve_requests import Orders
    from ..calibrate.fidelity import Run

RUNS: Final = 8  # seeds
LIMIT: Final = 0.5  # of the recorded figure: a simulator that is further off says nothing
NAMES: Final = {"ttft": "TTFT, ms", "tpot": "TPOT, ms", "e2e": "E2E, ms", "tokens_per_s": "tokens/s"}


@dataclass(frozen=True, slots=True)
class Speed:
    """One figure, a mean over requests in ms, or tokens/s.

    :param error: of the simulator on this file: the larger one of the mean's and the median request's, a share
    :param spread: half-width of `change` over seeds, 95 %
    """

    name: str
    recorded: float
    simulated: float  # under the recorded lengths
    alternative: float  # under the other policy
    error: float
    change: float  # alternative / simulated - 1
    spread: float

    def verdict(self) -> str:
        """Say whether the two differ, in words."""
        doubt = self.error + self.spread
        if not abs(self.change) > doubt:  # also where one is not a number
            return "within the error"
        is_better = (self.change > 0.0) == (self.name == "tokens_per_s")
        return f"{'better' if is_better else 'worse'} by at least {abs(self.change) - doubt:.1%}"


@dataclass(frozen=True, slots=True)
class Counterfactual:
    """What the simulator says; `speeds` is empty if `refusal` says why."""

    policy: str
    profile: str
    requests: int
    left_out: int  # requests that did not finish in the file: their load is missing, which the error shows
    runs: int
    refusal: str = ""
    speeds: tuple[Speed, ...] = ()
    copied_tokens: int = 0  # accepted in the recording, of copied drafts; both runs are without any


def estimate_speed(path: Path, policy: str, profile: Path | None = None, runs: int = RUNS) -> Counterfactual:
    """Run a telemetry file's requests through the simulator under its own lengths and under a policy's."""
    require_simulator()
    from ..calibrate.calibrate import require_same
    from ..calibrate.fidelity import EDGE_REQUESTS, fitting_profile, recorded_requests, replayed, run_of
    from ..calibrate.measured import read_measured
    from ..calibrate.starvation import load_waiting

    measured = read_measured(path)
    hello = require_same([measured])
    model = fitting_profile(hello, profile)
    found = recorded_requests(measured, load_waiting(path))
    engines = {life.engine for life, _ in found}
    if len(found) < EDGE_REQUESTS or len(engines) > 1:
        raise StoreError(
            f"{path}: {len(found)} requests that arrived and finished, on {len(engines)} boots of an engine",
            f"{EDGE_REQUESTS} or more, on one",
        )
    capabilities = Capabilities.from_hello(hello)
    requests = [request for _, request in found]
    arrivals = [request.arrival_s for request in requests]
    prompts, answers = ([getattr(request, name) for request in requests] for name in ("prompt_tokens", "output_tokens"))
    # Acceptances of both from the profile's model alone: of what another policy would have drafted nobody recorded
    # confidences.
    same = [replayed(model, requests, seed, by_confidence=False) for seed in range(runs)]
    other = [_under(policy, capabilities, model, (arrivals, prompts, answers), seed) for seed in range(runs)]
    speeds, refusal = _compared(run_of([life for life, _ in found]), same, other)
    named = profile.name if profile else "the shipped profile"
    left_out = _arrived(path) - len(found)
    return Counterfactual(policy, named, len(found), left_out, runs, refusal, speeds, measured.copied_tokens)


def _arrived(path: Path) -> int:
    with TelemetryFile(path) as file:
        return file.arrived_requests()


class _Asked:
    """The decision core as the simulator calls it: a record in, orders out."""

    def __init__(self, policy: Policy, capabilities: Capabilities, staleness: int) -> None:
        self._policy, self._state, self._staleness = policy, EngineState(capabilities), staleness

    def __call__(self, record: StepRecord) -> Orders:
        from ...env.simulator.serve_requests import Orders

        sequence = record.lease_sequence + self._staleness  # the step from which the orders are in force
        actions = decide(self._state, record, self._policy, LeaseTerms(), 1, sequence).action_set
        return Orders(dict(zip(actions.handles, actions.lengths, strict=True)), actions.default_length, actions.stop)


def _under(
    spec: str,
    capabilities: Capabilities,
    profile: EngineProfile,
    requests: tuple[list[float], list[int], list[int]],
    seed: int,
) -> Run:
    from ...env.simulator.serve_requests import replay
    from ..calibrate.fidelity import Run

    policy = make_policy(spec, capabilities)
    served = replay(*requests, _Asked(policy, capabilities, profile.lease_staleness), profile, seed=seed)
    return Run(served.ttft_s, served.tpot_s, served.e2e_s, served.tokens_per_s)


def _compared(real: Run, same: Sequence[Run], other: Sequence[Run]) -> tuple[tuple[Speed, ...], str]:
    """Return the figures, or none and why they are refused."""
    from ..calibrate.fidelity import run_errors

    per_request = run_errors(real, list(same))
    speeds = []
    for name in NAMES:
        recorded = _mean(real, name)
        simulated, alternative = ([_mean(run, name) for run in runs] for runs in (same, other))
        ratios = np.array(alternative) / np.array(simulated) - 1.0
        error = max(abs(float(np.mean(simulated)) / recorded - 1.0), per_request[name])
        spread = 1.96 * float(np.std(ratios, ddof=1)) / sqrt(len(ratios)) if len(ratios) > 1 else 0.0
        speeds.append(
            Speed(
                name, recorded, float(np.mean(simulated)), float(np.mean(alternative)), error,
                float(np.mean(ratios)), spread,
            )
        )  # fmt: skip
    worst = max(speeds, key=lambda speed: speed.error if np.isfinite(speed.error) else np.inf)
    if not worst.error <= LIMIT:
        return (), (
            f"the simulator misses this file's {worst.name} by {worst.error:.0%}; expected {LIMIT:.0%} at most: "
            "calibrate it to this machine (faser calibrate FILE --base embedded -o NEW, then --profile NEW), "
            "or record longer"
        )
    return tuple(speeds), ""


def _mean(run: Run, name: str) -> float:
    if name == "tokens_per_s":
        return run.tokens_per_s
    return 1e3 * float(np.nanmean(getattr(run, f"{name}_s")))

"""How long an engine step takes: non-negative coefficients of a physics basis, and the profile that carries them.

Called by the simulator, by calibration and by the CLI; the basis is env/profile/step_basis.py's.
A step lasts host + verify + draft: host is the pause between two steps, draft the drafter's part, verify everything
else of a step (scheduling, the target's forward pass, LM head, sampler). Must never extrapolate silently.
"""

from __future__ import annotations

import importlib.resources
import math
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from ...engine_adapter.arrays import Floats
from ...engine_adapter.errors import ModelError
from .acceptance_model import AcceptanceModel, default_acceptance
from .match_model import MatchModel, fault_of
from .step_basis import (
    BASES,
    DRAFT_BASIS,
    HOST_BASIS,
    ROUND_EDGES,
    ROW_EDGES,
    VERIFY_BASIS,
    fill_draft_basis,
    fill_host_basis,
    fill_verify_basis,
    padded_rows,
    segments,
)

PROFILE_VERSION: Final = 1
SHIPPED: Final = ("embedded", "embedded_ahead")


class OutsideProfile(ValueError):
    """A step outside the measured domain; the message names the quantity, its value and the measured range."""


class ProfileError(ModelError):
    """A profile that cannot be used; the message names file and field, what was seen and what was expected."""


class PhaseModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One phase's fit. `basis` is repeated in the file, so that a file of another basis is refused."""

    basis: tuple[str, ...]
    coefficients: tuple[float, ...]  # seconds per unit, >= 0
    noise: float  # standard deviation of the log of a single step's time around the prediction
    # Relative covariance of the coefficients, row by row, from refits on resampled cells; empty: not known.
    covariance: tuple[tuple[float, ...], ...] = ()
    held_out_median: float | None = None  # |predicted / measured - 1| over held-out cells
    held_out_p90: float | None = None
    held_out_cells: int = 0
    fitted_cells: int = 0


class Range(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was measured of one quantity."""

    low: float
    high: float


class Split(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One partition of the machine: factors on both phases.

    `overlap` is the share of the shorter phase that two groups of requests hide by taking turns.
    """

    name: str
    verify_factor: float = 1.0
    draft_factor: float = 1.0
    overlap: float = 0.0


class Exit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One exit layer: what a row saves that leaves there, what its heads find, and what looking takes.

    The first one of a profile is where the engine's heads were released to prune, at their released threshold.
    """

    layer: int
    saved_share: float  # of the layers, 0..1
    recall: float = 0.6  # share of the first rejected tokens, and of those behind them, at which a draft is cut
    false_alarm: float = 0.01  # share of the accepted tokens at which a draft is cut
    look_s: float = 0.0  # of each step whose drafts are looked at: deciding, cutting, metadata
    look_token_s: float = 0.0  # of each draft token that is looked at


class Ahead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Drafting ahead while the target verifies: how often it is of use, what that hides, and what all of it slows."""

    ready: float = 1.0  # share of the requests with all drafts accepted whose next draft had been made ahead
    hidden: float = 1.0  # of what those drafts take in turn, the share that nobody waits for
    verify_factor: float = 1.0  # verification beside a busy drafter, over the same alone
    acceptance: float = 0.9  # factor on the chance that a token drafted ahead is accepted


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a profile comes from."""

    model: str
    drafter: str = ""
    method: str = ""
    vllm_version: str = ""
    device: str = "cpu"
    machine: str = ""
    threads: int = 0
    date: str = ""
    spread: float | None = None  # of repeats: median over cells of the standard error of a cell's median, relative
    step_spread: float | None = None  # ... of the standard deviation of single steps, relative
    command: str = ""
    commit: str = ""
    note: str = ""


Positive = Annotated[int, Meta(ge=1)]


class EngineProfile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a simulation needs to know of one engine."""

    version: int
    name: str
    card: Card
    verify: PhaseModel
    draft: PhaseModel
    host: PhaseModel
    domain: dict[str, Range]  # names as in DOMAIN
    k_max: Annotated[int, Meta(ge=0, le=64)]
    kv_blocks: Positive
    block_size: Positive
    token_budget: Positive  # rows per step
    max_requests: Positive
    max_context: Positive  # tokens of one request, prompt and answer
    acceptance: AcceptanceModel
    catch_up_tokens: int = 512  # missed tokens per step that a drafter makes up for; 0: it skips none
    lease_staleness: int = 1  # steps from a record to the drafting under the action set it led to
    graph_sizes: tuple[int, ...] = ()  # rows; empty: eager, any size
    splits: tuple[Split, ...] = (Split("unsplit"),)
    exits: tuple[Exit, ...] = ()
    ahead: Ahead | None = None  # None: this engine drafts nothing ahead
    is_adaptive: bool = False  # all rounds are drafted in full, and of the drafts what pays is verified
    matches: MatchModel | None = None  # None: this engine copies no drafts from requests' own texts

    def packed(self) -> PackedProfile:
        """Return the numbers as arrays, for compiled code."""
        return PackedProfile(
            np.array(self.verify.coefficients, np.float64),
            np.array(self.draft.coefficients, np.float64),
            np.array(self.host.coefficients, np.float64),
            np.array([self.verify.noise, self.draft.noise, self.host.noise], np.float64),
            np.array(self.graph_sizes, np.float64),
        )

    def require_inside(self, work: Work) -> None:
        """Raise OutsideProfile if a step was not covered by the measurement."""
        for name, value in work.quantities().items():
            known = self.domain.get(name)
            if known is not None and not known.low <= value <= known.high:
                raise OutsideProfile(f"{name} {value:g}; {self.name} was measured from {known.low:g} to {known.high:g}")

    def step_time(self, work: Work) -> StepTime:
        """Return what a step of this work takes; raise OutsideProfile where nothing was measured."""
        self.require_inside(work)
        means, deviations = [], []
        for model, basis in ((self.verify, work.verify_basis(self.graph_sizes)), (self.draft, work.draft_basis())):
            coefficients = np.array(model.coefficients)
            mean = float(basis @ coefficients)
            means.append(mean)
            deviations.append(_deviation(model, basis * coefficients, mean))
        return StepTime(means[0], means[1], deviations[0], deviations[1])


class PackedProfile(NamedTuple):
    """What compiled code needs of a profile."""

    verify: Floats  # (len(VERIFY_BASIS),) seconds per unit
    draft: Floats  # (len(DRAFT_BASIS),)
    host: Floats  # (len(HOST_BASIS),)
    noise: Floats  # (3,) of verify, draft, host: standard deviation of the log
    graph_sizes: Floats  # (m,) rows, ascending; empty: none


class StepTime(NamedTuple):
    """A prediction in seconds; the deviations say how well the mean is known, not how single steps scatter."""

    verify_s: float
    draft_s: float
    verify_deviation_s: float
    draft_deviation_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """What one step does; names as the parameters of fill_verify_basis and fill_draft_basis."""

    requests: int
    decode_rows: int
    draft_tokens: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    sampled_rows: int = 0
    kv_tokens: int = 0
    attended_tokens: int = 0
    attended_prompt_tokens: float = 0.0
    drafting_requests: int = 0
    rounds: int = 0
    draft_rows: int = 0
    first_rows: int = 0
    kept_rows: int = 0
    draft_attended_tokens: int = 0
    arrivals: int = 0

    def verify_basis(self, graph_sizes: tuple[int, ...] = ()) -> Floats:
        """Return (len(VERIFY_BASIS),)."""
        out = np.zeros(len(VERIFY_BASIS))
        rows = float(self.decode_rows + self.prompt_tokens)
        padding = padded_rows(rows, np.array(graph_sizes, np.float64)) - rows if graph_sizes else 0.0
        fill_verify_basis(
            out, self.requests, self.decode_rows + padding, self.draft_tokens, self.prompts, self.prompt_tokens,
            self.sampled_rows, self.kv_tokens, self.attended_tokens, self.attended_prompt_tokens,
        )  # fmt: skip
        return out

    def draft_basis(self) -> Floats:
        """Return (len(DRAFT_BASIS),)."""
        out = np.zeros(len(DRAFT_BASIS))
        fill_draft_basis(
            out, self.drafting_requests, self.rounds, self.draft_rows, self.first_rows, self.kept_rows,
            self.draft_attended_tokens,
        )  # fmt: skip
        return out

    def host_basis(self) -> Floats:
        """Return (len(HOST_BASIS),)."""
        out = np.zeros(len(HOST_BASIS))
        fill_host_basis(out, self.requests, self.arrivals)
        return out

    def quantities(self) -> dict[str, float]:
        """Return the values whose measured ranges make up a profile's domain."""
        return {
            "requests": float(self.requests),
            "rows": float(self.decode_rows + self.prompt_tokens),
            "prompt_tokens": float(self.prompt_tokens),
            "kv_tokens": float(self.kv_tokens),
            "draft_tokens": float(self.draft_tokens),
            "rounds": float(self.rounds),
            "draft_rows": float(self.draft_rows),
            "first_rows": float(self.first_rows),
        }


DOMAIN: Final = tuple(Work(1, 1).quantities())


def _deviation(model: PhaseModel, parts: Floats, mean: float) -> float:
    if model.covariance:
        return math.sqrt(max(float(parts @ np.array(model.covariance) @ parts), 0.0))
    return mean * (model.held_out_median if model.held_out_median is not None else model.noise)


def load_profile(path: Path | Traversable) -> EngineProfile:
    """Read a profile; raise ProfileError for anything but a whole one of this version."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read ({error.strerror}); expected a profile") from None
    try:
        version = msgspec.json.decode(content, type=_Versioned).version
        if version != PROFILE_VERSION:
            raise ProfileError(f"{path}: profile version {version}; expected {PROFILE_VERSION}; profile again")
        profile = msgspec.json.decode(content, type=EngineProfile)
    except msgspec.MsgspecError as error:
        raise ProfileError(f"{path}: {error}; expected a profile as `faser profile` writes it") from None
    check(profile, str(path))
    return profile


class _Versioned(msgspec.Struct):
    version: int


def check(profile: EngineProfile, where: str) -> None:
    """Raise ProfileError for numbers that cannot be: another basis, negative or non-finite coefficients."""
    for phase, basis in BASES.items():
        model: PhaseModel = getattr(profile, phase)
        if model.basis != basis or len(model.coefficients) != len(basis):
            raise ProfileError(f"{where}, {phase}.basis: other terms than this version's; profile or calibrate again")
        numbers = (*model.coefficients, model.noise)
        if not all(math.isfinite(value) and value >= 0.0 for value in numbers):
            raise ProfileError(f"{where}, {phase}: {numbers}; expected finite numbers of at least 0")
    for exit_ in profile.exits:
        shares = (exit_.saved_share, exit_.recall, exit_.false_alarm)
        if not all(0.0 <= share <= 1.0 for share in shares) or not all(
            math.isfinite(value) and value >= 0.0 for value in (exit_.look_s, exit_.look_token_s)
        ):
            raise ProfileError(f"{where}, exits: {exit_}; expected shares in 0..1 and finite seconds of at least 0")
    if (ahead := profile.ahead) is not None:
        shares = (ahead.ready, ahead.hidden, ahead.acceptance)
        if not all(0.0 <= share <= 1.0 for share in shares) or not 0.0 < ahead.verify_factor < math.inf:
            raise ProfileError(f"{where}, ahead: {ahead}; expected shares in 0..1 and a finite factor above 0")
    if profile.matches is not None and (fault := fault_of(profile.matches)):
        raise ProfileError(f"{where}, matches: {fault}")
    if unknown := sorted(set(profile.domain) - set(DOMAIN)):
        raise ProfileError(f"{where}, domain: {', '.join(unknown)}; expected {', '.join(DOMAIN)}")


def save_profile(profile: EngineProfile, path: Path) -> None:
    """Write a profile; raise ProfileError, with nothing written, for one that no engine can have."""
    check(profile, str(path))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")


def shipped_profile(name: str = "embedded") -> EngineProfile:
    """Return a profile that comes with the package: one of SHIPPED."""
    if name not in SHIPPED:
        raise ProfileError(f"no shipped profile {name!r}; expected one of {', '.join(SHIPPED)}")
    return load_profile(importlib.resources.files(__package__) / "profiles" / f"{name}.json")


def synthetic_profile(
    name: str = "synthetic-gpu",
    *,
    step_s: float = 5.886e-3,
    row_s: float = 21.0e-6,
    free_rows: int = 0,
    kv_token_s: float = 39.0e-9,
    round_s: float = 2.135e-3,
    draft_row_s: float = 0.0,
    host_s: float = 1.207e-3,
    noise: float = 0.02,
    k_max: int = 8,
    kv_blocks: int = 16_384,
    block_size: int = 16,
    token_budget: int = 8192,
    max_requests: int = 256,
    max_context: int = 8192,
    graph_sizes: tuple[int, ...] = (),
) -> EngineProfile:
    """Return a profile that nobody measured as a whole, for machines that are not at hand; its card says so.

    The defaults are a published fit of an 8B target with an EAGLE drafter on an H100: 5.886 ms per step, 21 us per
    row, 39 ns per KV token, 2.135 ms per drafting round, 1.207 ms around a step.
    :param free_rows: rows that cost nothing while the weights are read (rounded to an edge of ROW_EDGES)
    """
    verify = dict.fromkeys(VERIFY_BASIS, 0.0)
    verify["step"], verify["KV tokens"] = step_s, kv_token_s
    for term, start in zip(segments("rows", ROW_EDGES), ROW_EDGES, strict=True):
        verify[term] = row_s if start >= free_rows else 0.0
    draft = dict.fromkeys(DRAFT_BASIS, 0.0)
    draft["first pass"] = draft["further rounds"] = round_s
    draft["drafting requests"] = draft_row_s
    for term in segments("further rows", ROUND_EDGES):
        draft[term] = draft_row_s
    host = dict.fromkeys(HOST_BASIS, 0.0)
    host["step"] = host_s
    profile = EngineProfile(
        version=PROFILE_VERSION,
        name=name,
        card=Card("none", device="cuda", note="synthetic: composed from published cost fits, not measured"),
        verify=PhaseModel(VERIFY_BASIS, tuple(verify.values()), noise),
        draft=PhaseModel(DRAFT_BASIS, tuple(draft.values()), noise),
        host=PhaseModel(HOST_BASIS, tuple(host.values()), noise),
        domain={},
        k_max=k_max,
        kv_blocks=kv_blocks,
        block_size=block_size,
        token_budget=token_budget,
        max_requests=max_requests,
        max_context=max_context,
        acceptance=default_acceptance(k_max),
        catch_up_tokens=0,
        graph_sizes=graph_sizes,
    )
    check(profile, name)
    return profile

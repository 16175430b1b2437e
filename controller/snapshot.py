"""What the sidecar tells about itself, as JSON: the reply to status questions.

Built by the daemon, read by `faser status`, `faser top` and the demo. Fields may be added; readers ignore unknown ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Literal

import msgspec

from ..engine_adapter.protocol import Mode, Stages
from .errors import EndpointError

SNAPSHOT_VERSION: Final = 1
MAX_SHOWN: Final = 256
QUESTION: Final = b"status"

# busy: stepping; idle: nothing to do; silent: busy when last heard, too long ago; stopped: said goodbye; gone: died
Presence = Literal["busy", "idle", "silent", "stopped", "gone"]
Stance = Literal["steer", "hold", "fallback"]
# of a draft: the model that drafts, or the request's own text, where the same words were followed by something before
Source = Literal["drafter", "copies"]


class SteeringStatus(msgspec.Struct, frozen=True):
    """What mode and guard do with one engine."""

    name: str = ""  # outlives the engine's restart; a mode may be switched by it
    mode: Mode = "active"
    stance: Stance = "steer"
    reason: str = ""  # why it does not steer
    counts: dict[str, int] = {}  # records not steered on, by stance and reason
    envelope_ratio: float | None = None  # tokens/s over those of no speculation; none: not measured yet
    lag_s: float = 0.0  # of the newest record behind the quickest ones


class PruningStatus(msgspec.Struct, frozen=True):
    """What pruned verification did since the sidecar met the engine."""

    steps: int = 0  # in which exit heads looked
    pruned_rows: int = 0
    saved_rows: float = 0.0  # each as the share of the layers that it was spared
    wrongly_pruned: int = 0  # drafts cut at a token that was then accepted
    spent_s: float = 0.0  # deciding and cutting


class SourceStatus(msgspec.Struct, frozen=True):
    """What became of the drafts of one source: over the last seconds, and in tokens, unless said otherwise."""

    share: float = 0.0  # 0..1 of the decoding requests' steps: those that verified such a draft
    verified: int = 0
    accepted: int = 0
    acceptance_rate: float | None = None
    waste: float | None = None  # rejected, or drawn and never verified, per token that the engine emitted
    verified_total: int = 0  # since the sidecar met the engine
    accepted_total: int = 0


class AttainmentStatus(msgspec.Struct, frozen=True):
    """Requests of one class of objectives since the sidecar met the engine; aborted ones do not count."""

    finished: int = 0
    in_time: int = 0  # their first token within its objective, and the mean of the others


class LastStep(msgspec.Struct, frozen=True):
    """The newest record: times in ms, and one entry per request in batch order, at most MAX_SHOWN."""

    step: int
    schedule_ms: float
    draft_ms: float
    verify_ms: float
    sample_ms: float
    overlap_ms: float
    other_ms: float
    handles: list[int]
    lengths: list[int]  # in force when the step drafted
    accepted: list[int]


def layers_by_rank(stages: Stages, bounds: Sequence[int]) -> list[int]:
    """Return how many layers each rank of a pipeline runs under these bounds."""
    return [high - low for low, high in pairwise((0, *bounds, stages.layers))]


def told_layers(layers: Sequence[int]) -> str:
    """Say how many each rank runs."""
    return f"{'+'.join(map(str, layers))} layers"


class StagesStatus(msgspec.Struct, frozen=True):
    """A pipeline whose stages can move, as its last step showed it."""

    layers: list[int]  # of each rank, in order
    moves: int  # completed since its boot
    is_moving: bool

    def told(self) -> str:
        """Say it: layers by rank, and the moves."""
        return f"{told_layers(self.layers)}, {self.moves} moves" + (", moving" if self.is_moving else "")


class EngineStatus(msgspec.Struct, frozen=True):
    """One engine: totals since the sidecar met it, rates over the last seconds of its own clock.

    `acceptance_rate`, `acceptance_by_position`, `mean_draft_length` and `length_histogram` are those of all drafts,
    whoever made them, as in telemetry and in vLLM's own counters; `sources` tells the drafter's from copied ones.
    """

    boot_id: str
    pid: int
    host: str
    model: str
    drafter: str
    method: str
    device: str
    vllm_version: str
    adapter_version: str
    k_max: int
    presence: Presence
    last_record_age_s: float | None
    running: int
    waiting: int
    kv_usage: float  # 0..1
    steps_per_s: float
    tokens_per_s: float
    step_ms: float
    adapter_us: float  # of the last step
    acceptance_rate: float | None
    acceptance_by_position: list[float | None]
    mean_draft_length: float
    length_histogram: list[int]  # request-steps by drafted tokens, 0..k_max
    lease_share: float  # 0..1 of the window's steps
    lease_age_s: float | None  # since the action set in force was sent; None: the engine's default holds
    records: int
    decisions: int
    sends_dropped: int
    failures: int  # records on which deciding failed
    gaps: int
    lost_records: int
    late_records: int
    engine_dropped: int  # records the engine could not send
    engine_rejected: int  # our messages the engine refused
    decision_us_p50: float
    decision_us_p99: float
    reason: str  # of the last decision, or why there is none
    steering: SteeringStatus = SteeringStatus()
    last_step: LastStep | None = None
    pruning: PruningStatus = PruningStatus()
    clamped: int = 0  # decisions in which the policy asked for what the engine cannot run
    handed_over: int = 0  # observations that a learned policy left to price
    unverified_tokens: int = 0  # drawn, and by a stop rule not handed over for verification
    sat_out: int = 0  # requests of the last step whose drafter sits out: a sequence is longer than its context
    rested: int = 0  # requests left out of the last step for those who are behind their objectives
    sources: dict[Source, SourceStatus] = {}  # copies: only of an engine that can copy
    attainment: dict[str, AttainmentStatus] = {}  # by class, "own" for requests that spoke for themselves
    miscounted: int = 0  # tokens since its boot by which the engine's records differ from vLLM's own counters
    split: str = ""  # of its device, drafter to target, in force in the last step; empty: it offers none
    stages: StagesStatus | None = None  # of its pipeline; None: one rank, or stages that cannot move


class LinkStatus(msgspec.Struct, frozen=True):
    """The wire, all engines together."""

    endpoint: str
    received: int
    sent: int
    dropped: dict[str, int]  # by reason
    disconnects: int


class StoreStatus(msgspec.Struct, frozen=True):
    """The telemetry file; an empty path: not recording by configuration."""

    path: str
    written: int
    queued: int
    dropped: int
    error: str
    file_bytes: int = 0
    log_bytes: int = 0  # of SQLite's write-ahead log beside the file
    pinned_s: float = 0.0  # for which a reader has kept a log that is too large from being cut; 0: none does


class AuditStatus(msgspec.Struct, frozen=True):
    """The file of decisions; an empty path: none is kept by configuration."""

    path: str = ""
    written: int = 0
    dropped: int = 0
    failures: int = 0  # writes that failed, of many decisions each
    error: str = ""  # of the last write; empty: it went well


class Snapshot(msgspec.Struct, frozen=True):
    """The whole sidecar at one moment."""

    version: int
    faser_version: str
    pid: int
    epoch: int
    uptime_s: float
    policy: str
    link: LinkStatus
    store: StoreStatus
    engines: list[EngineStatus]
    modes: dict[str, Mode] = {}  # what was switched, by boot id, engine name or * for all
    default_mode: Mode = "active"
    mode_error: str = ""  # why switched modes will not survive a restart
    audit: AuditStatus = AuditStatus()


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """Return the snapshot as one JSON object."""
    return msgspec.json.encode(snapshot)


def decode_snapshot(content: bytes) -> Snapshot:
    """Return the snapshot of a reply; raise EndpointError for anything else."""
    try:
        snapshot = msgspec.json.decode(content, type=Snapshot)
    except msgspec.MsgspecError as error:
        raise EndpointError(
            f"a status reply that cannot be read ({error})", "a sidecar of this version", "update both"
        ) from None
    if snapshot.version != SNAPSHOT_VERSION:
        raise EndpointError(f"status version {snapshot.version}", str(SNAPSHOT_VERSION), "update FASER or the sidecar")
    return snapshot

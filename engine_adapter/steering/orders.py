"""What scheduler and model runner tell each other about one step, inside vLLM.

`StepOrder` rides down on SchedulerOutput as attribute `faser`, `StepReport` rides back on ModelRunnerOutput as
attribute `faser`; vLLM's multiprocess executor keeps both. Plain and picklable: nothing here imports vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..protocol import MatchRule, Prune, StopRule


@dataclass(slots=True)
class StepOrder:
    """What the runner is asked to do in this step, and what the scheduler must remember of it."""

    lengths: dict[str, int]  # request id -> draft tokens to propose for the next step
    step: int = 0
    started_s: float = 0.0  # engine's monotonic clock when schedule() began
    schedule_s: float = 0.0
    lease_epoch: int = 0  # 0: the engine's default
    lease_sequence: int = 0
    stop: StopRule | None = None  # ends drafts on confidence, within `lengths`
    prune: Prune | None = None  # for the verification in this step: ordered before its drafts were drawn
    next_prune: Prune | None = None  # for the verification of what is drafted in this step
    frontier: int = 0  # tokens to draft ahead of each chunk that this step hands over; 0: nothing is drafted ahead
    sat_out: int = 0  # requests whose length is 0 since a sequence is longer than the drafter's context
    costs: tuple[list[int], list[float]] | None = None  # rows and seconds for adaptive verification; None: vLLM's own
    weights: dict[str, float] = field(default_factory=dict)  # of requests in the step, mean 1; empty: all alike
    match: MatchRule | None = None  # None: nothing is copied
    match_lengths: dict[str, int] = field(default_factory=dict)  # request id -> tokens to copy at most
    match_weights: dict[str, float] = field(default_factory=dict)  # what a copied token is worth; 1 if not named
    salts: dict[str, str] = field(default_factory=dict)  # by new request that shares its answer: whom it shares it with
    is_deferred: bool = False  # this step's requests sit out the next one: nobody waits for their drafts
    split: int | None = None  # of HELLO's splits: asked for, and from the latch on in force; None: none is offered
    rested: int = 0  # requests that were left out of this step

    def longest(self) -> dict[str, int]:
        """Return how many tokens each request may have drafted, by whatever."""
        if self.match is None:
            return self.lengths
        copied = self.match_lengths
        return {name: max(length, copied[name]) for name, length in self.lengths.items()}

    @property
    def is_drafting(self) -> bool:
        """Tell whether anybody may draft."""
        return any(self.lengths.values())


@dataclass(slots=True)
class StepReport:
    """What the runner did in this step; times in seconds, lists aligned with the batch's rows."""

    verify_s: float = 0.0
    sample_s: float = 0.0
    draft_s: float = 0.0
    overlap_s: float = 0.0
    runner_s: float = 0.0
    caught_up: int = 0  # tokens the drafter had skipped and made up for in this step's `draft_s`
    drafted: list[int] = field(default_factory=list)  # tokens handed to verification
    confidences: list[tuple[float, ...]] = field(default_factory=list)  # and of a dropped one; empty: not recorded
    pruned: list[int] = field(default_factory=list)  # rows that left the target's forward pass; empty: none
    # Whose last token that was tested was accepted, of cut drafts; empty: the tokens themselves tell (the V1 runner).
    is_last_accepted: list[bool] = field(default_factory=list)
    prune_layer: int | None = None  # behind which exit heads looked at the drafts; None: they did not
    prune_s: float = 0.0  # part of `verify_s`: deciding which rows leave, and cutting
    saved_rows: float = 0.0  # rows that left, each as the share of the layers that it was spared
    frontier: int = 0  # tokens drafted ahead at most, as ordered; 0 without a process that does so
    frontier_hits: int = 0  # requests whose draft had been drafted ahead
    frontier_misses: int = 0  # requests whose frontier was of no use, or late
    rounds: tuple[int, ...] | None = None  # rows that drafted in each pass of the drafter; None: not told
    sat_out: int = 0  # requests that were to draft and did not: a sequence is longer than the drafter's context
    is_drafter_ready: bool = False  # its process takes jobs, or is at one that an earlier step asked for
    admitted: list[int] | None = None  # drafts verified per row by adaptive verification; None: all that were scheduled
    split: int | None = None  # of HELLO's splits: which one the step ran under; None: none is offered
    # By request: confidences of the drafts that this step verifies, which the V2 runner tells only now.
    late_confidences: dict[str, tuple[float, ...]] = field(default_factory=dict)
    copied: list[int] = field(default_factory=list)  # batch rows whose `drafted` tokens are a match's
    # By request that is not in the step: confidences of the draft that came for it, and of a dropped token.
    deferred: dict[str, tuple[float, ...]] = field(default_factory=dict)

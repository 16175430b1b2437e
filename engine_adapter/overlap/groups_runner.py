"""Ping-pong groups on the V1 runner: drafts that come a step after they were asked for, for requests not in the batch.

The scheduler's part (ping_pong.py) says whose drafts nobody waits for. Here they are asked for, taken behind the next
step's verification and handed to the scheduler by request id. vLLM evicts whoever is not in a step from its batch and
adds it again: what belongs to a request is kept by its id alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..settings import NEVER, load_settings
from .frontier_runner import FrontierRunner, kept_of

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.v1.outputs import DraftTokenIds

    from ..steering.orders import StepReport
    from .remote_drafting import RemoteDrafting


class GroupsRunner(FrontierRunner):
    """Mixin in front of CPUModelRunner."""

    _late_drafts: dict[str, tuple[int, ...]] | None = None  # drafts to hand over, of requests that are not in this step
    _late_confidences: dict[str, tuple[float, ...]] | None = None  # of those, and of the tokens that a stop rule cut
    _late_tokens: dict[str, int]  # tokens of each request's newest such draft, until its next step

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._late_tokens = {}

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Start the drafter's process."""
        super().initialize_kv_cache(*args, **kwargs)
        is_always = self.shares is None and load_settings().ping_pong != NEVER  # else by each step's split
        self.is_paired = self.remote is not None and is_always

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the target for one step; whoever is in it goes on without the drafts that were under way for it."""
        self._late_drafts = None
        self._remotely(lambda remote: remote.drop(scheduler_output.num_scheduled_tokens))
        for name in scheduler_output.finished_req_ids:
            self._late_tokens.pop(name, None)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def draft_remotely(self, sampled: Tensor | list[list[int]], lengths: list[int] | None) -> None:
        """Draft what the process can, and meet what it drafted meanwhile."""
        super().draft_remotely(sampled, lengths)

        def meet(remote: RemoteDrafting) -> None:
            found, remote.late_drafts = remote.late_drafts, {}
            self._late_drafts = {name: kept_of(drafted, remote.late_stop) for name, drafted in found.items()}
            self._late_confidences = {name: drafted.confidences for name, drafted in found.items()}

        self._remotely(meet)

    def with_late_drafts(self, drafts: DraftTokenIds | None) -> DraftTokenIds | None:
        """Return the drafts of this step's requests and behind them the late ones."""
        late, self._late_drafts = self._late_drafts, None
        if not late:
            return drafts
        from vllm.v1.outputs import DraftTokenIds

        names, tokens = ([], []) if drafts is None else (drafts.req_ids, drafts.draft_token_ids)
        return DraftTokenIds([*names, *late], [*tokens, *map(list, late.values())])

    def report_frontiers(self, report: StepReport) -> None:
        """Add what the process did; late drafts count where their request has its next row."""
        super().report_frontiers(report)
        remote = self.remote
        if remote is None or self._order is None:
            return
        report.is_drafter_ready = remote.is_ready
        if remote.is_parted:
            report.frontier = 0
        self._count_late_drafts(report)

    def _count_late_drafts(self, report: StepReport) -> None:
        tokens_of, late, confidences = self._late_tokens, self._late_drafts or {}, self._late_confidences or {}
        names = self.input_batch.req_ids  # type: ignore[attr-defined]
        report.drafted = [count + tokens_of.pop(name, 0) for count, name in zip(report.drafted, names, strict=True)]
        tokens_of.update((name, len(tokens)) for name, tokens in late.items())
        if getattr(self.drafter, "has_book", False):  # type: ignore[attr-defined]
            report.deferred = {name: confidences[name][: len(tokens) + 1] for name, tokens in late.items()}

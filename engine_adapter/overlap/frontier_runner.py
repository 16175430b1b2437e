"""Drafting ahead on the V1 runner: the part of FASER's mixin that asks a drafter's process and hands its tokens over.

While the target verifies a chunk, the process goes on behind it as if all of it were accepted (frontier.py). Where
that held, the next chunk is there already; where it did not, the process drafts in turn; where the process has no
answer in time, vLLM's own drafter does what it always did. A row that got its draft here has length 0 for vLLM's
drafter, which catches up when it is asked again. Without a process this does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..drafter_process.choice import chosen_drafter, drafter_cores, states_of_target
from ..drafter_process.mailbox import NO_STATES, StateRows
from ..drafter_process.process import DrafterProcess, Wish
from ..drafter_process.target_states import TargetStates
from ..operator_log import operator_log
from ..partition.core_shares import UNSPLIT_INDEX, CoreShares
from ..patches.v1 import shared_cache, target_rows
from ..settings import ANYWHERE, load_settings
from ..steering.stop_rule import kept_tokens
from .remote_drafting import RemoteDrafting
from .splits import are_offered, chosen_splits

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from ..drafter_process.drafted import Drafted
    from ..partition.cpu import CpuPartition
    from ..partition.shares import Partitions
    from ..protocol import StopRule
    from ..steering.orders import StepOrder, StepReport

logger = operator_log(__name__)


class FrontierRunner:
    """Mixin in front of CPUModelRunner; `remote` is None while no process drafts."""

    remote: RemoteDrafting | None = None
    shares: CoreShares | None = None  # None: the cores are settled
    is_paired = False  # the process also drafts in turn where nothing is drafted ahead, between ping-pong groups
    _order: StepOrder | None = None  # of the step under way
    _states: TargetStates | None = None  # None: the process needs none
    _blocks: NDArray[Any] | None = None  # of this step, (requests, blocks): where its states are
    _owes_states = False  # the target ran and nobody has kept its states yet
    _is_decoding = False  # no prompt is read in the step under way

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Let vLLM set up its KV cache; then start the drafter's process, which loads while vLLM warms up."""
        super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        try:
            self._start_drafter()
        except Exception as error:  # no cores, an unknown model, an unreadable file
            self._end_remote()
            logger.warning("FASER drafts nothing ahead: %s", error)

    def _start_drafter(self) -> None:
        settings = load_settings()
        splits = chosen_splits(settings, self.vllm_config)  # type: ignore[attr-defined]
        cores = ANYWHERE if are_offered(splits) else settings.drafter_cores
        command, reason = chosen_drafter(cores, self.vllm_config)  # type: ignore[attr-defined]
        if reason is not None:
            raise ValueError(reason)
        if not command or self.remote is not None:
            return
        self._states = self._shared_states()
        partition = self._share_cores(splits) if are_offered(splits) else self._settle_cores(cores)
        shared = [] if self._states is None else [self._states.descriptor]
        process = DrafterProcess([*command, *map(str, shared)], partition, shared=shared)
        self.remote = RemoteDrafting(process, settings.draft_ahead)

    @staticmethod
    def _settle_cores(cores: str) -> CpuPartition | None:
        import torch

        partition = drafter_cores(cores, torch.get_num_threads())
        if partition is not None:
            partition.confine("verify")
            logger.info("FASER: the drafter's process gets its own cores, %s", partition)
        return partition

    def _share_cores(self, splits: Partitions) -> CpuPartition:
        import torch

        self.shares = CoreShares(splits, torch.get_num_threads())
        return self.shares.largest_draft

    def _shared_states(self) -> TargetStates | None:
        """Return memory for the target's states, for a process that needs them."""
        needed = states_of_target(self.vllm_config)  # type: ignore[attr-defined]
        if needed is None:
            return None
        shape = shared_cache(self)
        if shape is None:
            raise ValueError("target and drafter do not share one KV cache group that keeps every token")
        return TargetStates.create(*shape, *needed)

    def shutdown(self) -> None:
        """End the drafter's process."""
        self._end_remote()
        super().shutdown()  # type: ignore[misc]

    def _end_remote(self) -> None:
        if self.shares is not None:
            self.shares.take(UNSPLIT_INDEX)
        if self.remote is not None:
            self.remote.process.close()
            self.remote = None
        if self._states is not None:
            self._states.close()
            self._states = None

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the target for one step."""
        self._order = getattr(scheduler_output, "faser", None)
        if self.remote is not None:
            verified = sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
            rows = len(scheduler_output.num_scheduled_tokens) + verified
            self._is_decoding = scheduler_output.total_num_scheduled_tokens == rows
        self._remotely(lambda remote: remote.forget(scheduler_output.finished_req_ids))
        self._remotely(lambda remote: self._take_share(remote, scheduler_output))
        if self._states is not None:
            if self._owes_states:  # vLLM drafts nothing where a request is too long for its drafter
                self._states.clear()
            self._owes_states = scheduler_output.total_num_scheduled_tokens > 0
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _take_share(self, remote: RemoteDrafting, scheduled: Any) -> None:
        """Let target and process have the cores that the step's split gives them."""
        if self.shares is None:
            return
        asked = None if self._order is None else self._order.split  # None: FASER steers no more
        logits = len(scheduled.num_scheduled_tokens) + sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
        index = self.shares.take(asked or UNSPLIT_INDEX, scheduled.total_num_scheduled_tokens, logits)
        self.is_paired = index != UNSPLIT_INDEX
        remote.process.threads = self.shares.at(index).allocated.draft if self.is_paired else 0

    def _remotely(self, action: Callable[[RemoteDrafting], None]) -> None:
        if self.remote is None:
            return
        try:
            action(self.remote)
        except Exception:
            self._end_remote()
            logger.exception("FASER drafts nothing ahead any more after a failure; vLLM's own drafter goes on")

    def keep_states(self, scheduled: Any, step: tuple[Any, ...]) -> None:
        """Keep the target's states of this step for the process, whether or not it is asked.

        :param step: what vLLM gives to `propose_draft_token_ids`.
        """

        def keep(remote: RemoteDrafting) -> None:
            assert self._states is not None
            rows = target_rows(scheduled, step)
            self._states.keep(rows.slots, rows.parts)
            self._blocks = rows.block_table.numpy()
            self._owes_states = False

        if self._states is not None:
            self._remotely(keep)

    def draft_remotely(self, sampled: Tensor | list[list[int]], lengths: list[int] | None) -> None:
        """Draft what the process can; the rows that are served get length 0 for vLLM's drafter."""
        if lengths is None:
            return

        def draft(remote: RemoteDrafting) -> None:
            remote.begin_step()
            order = self._order
            if order is None or not (order.frontier or self.is_paired):
                return
            turns = self._turns(sampled, lengths)
            if order.is_deferred and remote.part(list(turns.values()), order.stop):
                for row in turns:
                    lengths[row] = 0
                return
            wanted = {turn.request: lengths[row] for row, turn in turns.items()}
            drafted = remote.take({turn.request: list(turn.sampled) for turn in turns.values()}, wanted)
            wishes = [turn for turn in turns.values() if turn.request not in drafted]
            if wishes:
                drafted |= remote.draft(wishes)
            remote.turns = turns
            remote.drafted = {row: drafted[turn.request] for row, turn in turns.items() if turn.request in drafted}
            for row in remote.drafted:
                lengths[row] = 0

        self._remotely(draft)

    def _turns(self, sampled: Tensor | list[list[int]], lengths: list[int]) -> dict[int, Wish]:
        """Return by batch row what the process needs to go on from what was just sampled."""
        batch = self.input_batch  # type: ignore[attr-defined]
        is_booked = isinstance(sampled, list)  # then vLLM has written the tokens to its batch already
        rows = sampled if isinstance(sampled, list) else sampled.tolist()
        found = {}
        for row, length in enumerate(lengths):
            tokens = tuple(token for token in rows[row] if token >= 0) if length else ()
            if tokens:
                end = int(batch.num_tokens_no_spec[row]) - (len(tokens) if is_booked else 0)
                known, states = batch.token_ids_cpu[row, :end], self._states_of(row, end + len(tokens) - 1)
                found[row] = Wish(batch.req_ids[row], known, tokens, count=length, states=states)
        return found

    def _states_of(self, row: int, count: int) -> StateRows:
        """Return where the states of a request's first tokens are."""
        if self._states is None or self._blocks is None:
            return NO_STATES
        return StateRows(count, self._states.writes, self._blocks[row, : self._states.blocks_of(count)])

    def hand_over(self, drafts: Tensor | list[list[int]], drafted: list[int]) -> Tensor | list[list[int]]:
        """Return vLLM's drafts with the process's among them, and let the process go on behind all of them.

        :param drafted: tokens handed over of each row; changed where a row has the process's.
        """
        if self.remote is None or not self.remote.turns:
            return drafts
        joined = drafts

        def join(remote: RemoteDrafting) -> None:
            nonlocal joined
            stop = None if self._order is None else self._order.stop
            kept = {row: kept_of(found, stop) for row, found in remote.drafted.items()}
            joined = joined_drafts(drafts, kept)
            for row, tokens in kept.items():
                drafted[row] = len(tokens)
            if self._order is not None and self._order.frontier:
                remote.go_on(self._behind(remote.turns, joined, drafted), len(drafted))

        self._remotely(join)
        return joined

    def note_ahead(self, runner_s: float, sampled: list[list[int]]) -> None:
        """Tell the gate of drafting ahead what the step took; one that read a prompt says nothing."""
        if self.remote is not None and self._is_decoding:
            self.remote.note_step(len(sampled), runner_s, sum(map(len, sampled)))

    def report_frontiers(self, report: StepReport) -> None:
        """Add what the process did in this step: its time counts as drafting, and as overlap where it was hidden."""
        remote = self.remote
        if remote is None:
            return
        if self._order is not None and remote.process.pid is not None:
            report.frontier = self._order.frontier
        report.split = None if self.shares is None else self.shares.index
        report.frontier_hits, report.frontier_misses = remote.hits, remote.misses
        report.overlap_s = remote.overlap_s
        report.draft_s += remote.overlap_s
        if report.rounds is not None:
            report.rounds = remote.rounds + report.rounds
        if report.confidences:
            for row, found in remote.drafted.items():
                report.confidences[row] = found.confidences[: report.drafted[row] + 1]

    def _behind(self, turns: dict[int, Wish], drafts: Tensor | list[list[int]], drafted: list[int]) -> list[Wish]:
        """Return what to draft ahead: behind every chunk a guess of the next token, and as much as may be asked."""
        assert self._order is not None
        found = []
        for row, turn in turns.items():
            chunk = drafts[row][: drafted[row]]
            if drafted[row]:
                tokens = tuple(chunk if isinstance(chunk, list) else chunk.tolist())
                found.append(replace(turn, chunk=tokens, count=1 + min(self._order.frontier, turn.count)))
        return found


def kept_of(found: Drafted, stop: StopRule | None) -> tuple[int, ...]:
    """Return the tokens of a draft that are handed to verification."""
    return found.tokens if stop is None else found.tokens[: kept_tokens(stop, found.confidences)]


def joined_drafts(drafts: Tensor | list[list[int]], put: dict[int, tuple[int, ...]]) -> Tensor | list[list[int]]:
    """Return drafts whose rows of `put` hold these tokens; vLLM's are wide enough only where it drafted itself."""
    if isinstance(drafts, list):
        return [list(put.get(row, draft)) for row, draft in enumerate(drafts)]
    longest = max(map(len, put.values()), default=0)
    wide = drafts
    if longest > drafts.shape[1]:
        wide = drafts.new_zeros((len(drafts), longest))
        wide[:, : drafts.shape[1]] = drafts
    for row, tokens in put.items():
        wide[row, : len(tokens)] = wide.new_tensor(tokens)
    return wide

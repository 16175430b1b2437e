"""Length 0 for the whole batch on the V2 runner: the drafter is left out, and catches up when somebody drafts again.

What its first pass would have read is kept on the device, so many rows of it; when there is no room for a step's, the
drafter catches up as well. It begins where no drafts are verified: then every row counts and the host knows its
position. Decided by the ordered lengths and the scheduler's numbers only, the same on every rank. It must never touch
what the target computes; what goes wrong costs acceptance, and from then on vLLM drafts in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..hook_guard import HookGuard
from ..patches.speculators.first_pass import (
    LaterPass,
    after_load,
    drafters_tables,
    has_pictures,
    may_skip,
    steps_under_way,
)
from ..patches.speculators.rounds import has_peers
from ..patches.v2 import watch_blocks, watch_ends
from .kept_rows import CacheTables, KeptRows, Missed

if TYPE_CHECKING:
    from ..patches.v2 import Proposal

T = TypeVar("T")


class CatchUpV2:
    """The rows that one runner's drafter has not read yet."""

    caught_up = 0  # rows made up for in the last step
    _pass: LaterPass | None = None  # None: the drafter is not loaded, or never left out
    _kept: KeptRows | None = None
    _group = 0  # of the KV cache that the drafter's layers are in
    _steps_without_drafts = 0

    def __init__(self, runner: Any, guard: HookGuard, room: int) -> None:
        self._runner, self._guard = runner, guard
        if room > 0 and may_skip(runner.speculator):
            self._room = min(room, runner.speculator.max_num_tokens)
            after_load(runner, partial(self._try, self._allocate))
            watch_ends(runner, self._end)

    def _allocate(self) -> None:
        if self._pass is None:  # weights may be loaded again
            self._pass = LaterPass(self._runner, self._room)

    def set_up(self) -> None:
        """Look at the KV cache, which is new."""
        self._kept = None
        found = None if self._pass is None else drafters_tables(self._runner)
        if found is not None:
            self._group, shape = found
            self._kept = KeptRows(self._room, CacheTables(*shape))
            watch_blocks(self._runner, self._group, self._add_blocks)

    def close(self) -> None:
        """Let go of the device's memory; nothing is skipped any more."""
        self._pass = self._kept = None

    def _end(self, request: int) -> None:
        if self._kept is not None:
            self._try(partial(self._kept.end, request))

    def _add_blocks(self, request: int, blocks: Sequence[int], known_tokens: int | None) -> None:
        if self._kept is not None:
            self._try(partial(self._kept.add_blocks, request, blocks, known_tokens))

    def _try(self, work: Callable[[], T]) -> T | None:
        """Do it; what fails ends skipping, and returns None."""
        done: list[T] = []
        self._guard("skipping of the drafter", lambda: done.append(work()))
        if not done:
            self.close()
            return None
        return done[0]

    def _try_beside_peers(self, work: Callable[[], bool]) -> bool:
        """Do what other ranks do at the same time: they would wait for ever for one that went another way."""
        return work() if has_peers() else self._try(work) is not None

    def begin(self, batch: Any) -> None:
        """Note that a step gets to drafting."""
        self.caught_up = 0
        self._steps_without_drafts = 0 if batch.num_draft_tokens else self._steps_without_drafts + 1

    def sits_out(self, proposal: Proposal) -> bool:
        """Keep what the drafter would read in a step that drafts nothing, if that may be; else it shall run."""
        kept, first_pass, batch = self._kept, self._pass, proposal.batch
        if kept is None or first_pass is None or proposal.rounds != 0 or batch.num_tokens > kept.room:
            return False
        given = self._try(proposal.named)
        if given is None or not self._try(partial(self._may_keep, proposal, given)):
            return False
        if kept.used + batch.num_tokens > kept.room:
            self.catch_up()
        at = None if self._kept is None else self._try(partial(_note, kept, batch))
        return at is not None and self._try_beside_peers(partial(first_pass.keep, at, batch, given))

    def _may_keep(self, proposal: Proposal, given: dict[str, Any]) -> bool:
        """Tell whether the host knows the rows' positions, and the pass is one that can be run later."""
        is_told = self._steps_without_drafts >= steps_under_way(self._runner)
        return is_told and not has_pictures(given) and self._pass is not None and self._pass.fits(given)

    def catch_up(self) -> None:
        """Let the drafter read what was kept."""
        kept = self._kept
        if kept is not None and kept.used:
            passes = self._try(partial(kept.take, self._runner.speculator.max_num_reqs))
            for missed in passes or ():
                if not self._read(missed):
                    break

    def _read(self, missed: Missed) -> bool:
        first_pass = self._pass
        run = None if first_pass is None else self._try(partial(first_pass.prepared, self._group, missed))
        is_read = run is not None and self._try_beside_peers(run)
        self.caught_up += len(missed.places) if is_read else 0
        return is_read


def _note(kept: KeptRows, batch: Any) -> int:
    firsts, counts = (each.astype(np.int64) for each in (batch.num_computed_tokens_np, batch.num_scheduled_tokens))
    return kept.keep(batch.idx_mapping_np, firsts, counts)

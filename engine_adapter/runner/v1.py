"""What FASER adds to vLLM's V1 model runner (CPU and CUDA): phase times, ragged drafting, a report per step.

`with_faser` is called by the worker. The mixin reads StepOrder from SchedulerOutput.faser and leaves StepReport on
ModelRunnerOutput.faser. It calls vLLM exactly once per phase, whatever happens to its own bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from ..drafting.catch_up import CacheShape, CatchUp, Limits
from ..drafting.ragged import RaggedModelDrafter, RaggedNgramDrafter, adopt
from ..hook_guard import HookGuard
from ..link.quiet_moment import QUIET_MOMENTS
from ..matching.matching_runner import MatchingRunner
from ..operator_log import operator_log
from ..overlap.groups_runner import GroupsRunner
from ..patches.v1 import RunnerHooks, drafter_context, inner_output, shared_cache, undrafted_step
from ..pruning.runner import PruningRunner
from ..settings import load_settings
from ..steering.orders import StepOrder, StepReport
from .phases import DevicePhases, HostPhases, Phases

if TYPE_CHECKING:
    from vllm.v1.outputs import DraftTokenIds

logger = operator_log(__name__)


class FaserRunnerV1(RunnerHooks, PruningRunner, MatchingRunner, GroupsRunner):
    """Mixin in front of CPUModelRunner or the V1 GPUModelRunner."""

    phases: Phases | None = None  # None while nothing is timed: before the first step and during graph capture
    order: StepOrder | None = None
    drafted: list[int] | None = None  # per batch row, of the drafting in this step: tokens handed to verification
    _handed: dict[str, int] | None = None  # the same by request
    _has_drafted = False  # somebody was asked for drafts in this step; else vLLM holds zeros in their place
    _room: list[int] | None = None  # per batch row, tokens that its drafter's context still takes; None: enough for all
    _sat_out = 0  # requests that were to draft and did not, for want of that room

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._guard = HookGuard("model runner", logger)
        self.faults = self._guard.faults
        self._stopwatch: Phases = HostPhases()
        self._guard("set-up", self._set_up)

    def _set_up(self) -> None:
        if self.device.type == "cuda":  # type: ignore[attr-defined]
            self._stopwatch = DevicePhases()
        config = self.speculative_config
        drafter = getattr(self, "drafter", None)  # absent on pipeline ranks before the last
        if config is None or drafter is None:
            return
        if not adopt(drafter, config.method):
            logger.info(
                "FASER: method %s drafts the batch's longest length for every request; drafts are cut afterwards",
                config.method,
            )
        # With async scheduling nobody waits for this step's drafts, so nobody may wait for their confidences.
        is_waited_for = not self.use_async_scheduling  # type: ignore[attr-defined]
        if isinstance(drafter, RaggedModelDrafter):
            drafter.has_book = is_waited_for and load_settings().has_confidence

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Let vLLM set up its KV cache; now it is known whether the drafter may skip tokens."""
        super().initialize_kv_cache(*args, **kwargs)
        self._guard("set-up of skipping", self._set_up_skipping)

    def _set_up_skipping(self) -> None:
        drafter: Any = getattr(self, "drafter", None)
        tokens = load_settings().catch_up_tokens
        # On a GPU, looking up what the drafter holds would wait for the device, and its graphs have fixed shapes.
        is_plain = self.device.type == "cpu" and not self.use_async_scheduling  # type: ignore[attr-defined]
        if not isinstance(drafter, RaggedModelDrafter) or not is_plain or not tokens:
            return
        shape = shared_cache(self)
        if shape is not None:
            limits = Limits(tokens, drafter.max_num_tokens, drafter.net_num_new_slots_per_request)  # type: ignore[attr-defined]
            drafter.catch_up = CatchUp(CacheShape(*shape), limits, drafter.pass_hidden_states_to_model)  # type: ignore[attr-defined]

    def _timed(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self.phases is None else self.phases.phase(name)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the target for one step."""
        self.order = getattr(scheduler_output, "faser", None)
        self.drafted = self._handed = self._room = None
        self._has_drafted, self._sat_out = False, 0
        self.phases = self._stopwatch
        try:
            with self._timed("runner"):
                return super().execute_model(scheduler_output, *args, **kwargs)
        finally:
            self.phases = None

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, draft for the next step, and attach the report."""
        self.phases = self._stopwatch
        try:
            with self._timed("runner"):
                output = super().sample_tokens(*args, **kwargs)
        finally:
            self.phases = None
        self._guard("report", lambda: self._attach(output))
        return output

    def may_prepare_plainly(self) -> bool:
        """Tell whether the drafter can do without vLLM's record of what was verified, where nothing was."""
        return getattr(getattr(self, "drafter", None), "catch_up", None) is not None

    def around_verify(self, verify: Callable[[], Any]) -> Any:
        """Time the target's forward pass."""
        with self._timed("verify"):
            hidden = verify()
        QUIET_MOMENTS.tell()
        return hidden

    def drafter_fits(self, fits: bool, metadata: Any) -> bool:
        """Let those draft whose sequence the drafter's context takes, where the pass can be cut to them."""
        if not fits and metadata is not None:
            self._guard("look at sequences", lambda: self._look_for_room(metadata))
        return fits or self._room is not None

    def _look_for_room(self, metadata: Any) -> None:
        ordered = self.row_lengths() or []
        if not self._drafts_apart(ordered, metadata):
            self._sat_out = sum(map(bool, ordered))
            return
        context, sequences = drafter_context(self), metadata.seq_lens[: len(ordered)].tolist()
        self._room = [max(context - tokens, 0) for tokens in sequences]
        self._sat_out = sum(1 for length, free in zip(ordered, self._room, strict=True) if length and not free)

    def _drafts_apart(self, ordered: list[int], metadata: Any) -> bool:
        """Tell whether the drafter may leave rows out: ngram searches each by itself, a model must catch up later."""
        drafter: Any = getattr(self, "drafter", None)
        if isinstance(drafter, RaggedNgramDrafter):
            return True
        return getattr(drafter, "catch_up", None) is not None and bool(drafter.can_cut(ordered, 0, metadata))

    def around_sample(self, sample: Callable[[], Any]) -> Any:
        """Time the sampler."""
        with self._timed("sample"):
            return sample()

    def propose_draft_token_ids(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Draft, each request at most its own number of tokens."""
        drafter = self.drafter  # type: ignore[attr-defined]
        self._has_drafted = True
        lengths = self.row_lengths()
        drafter.lengths, drafter.follows, drafter.must_cut = lengths, self._followers(), self._room is not None
        drafter.stop = None if self.order is None else self.order.stop
        try:
            with self._timed("draft"):
                self.keep_states(scheduler_output, args)
                self.copy_drafts(self.order, args[0], lengths)
                self.draft_remotely(args[0], lengths)
                drafts = self._sit_out(scheduler_output, args)
                if drafts is None:
                    drafts = super().propose_draft_token_ids(scheduler_output, *args, **kwargs)
        finally:
            drafter.lengths = drafter.follows = drafter.stop = None
        self._guard("count of drafts", lambda: self._count(drafts, lengths))
        return self._joined(drafts)

    def _joined(self, drafts: Any) -> Any:
        """Return the drafts with those of the drafter's process and copied ones among them."""
        if self.drafted is None:
            return drafts
        drafts = self.with_copies(self.hand_over(drafts, self.drafted), self.drafted)
        is_foreign = self.remote is not None and (self.remote.drafted or self.remote.is_parted)
        if is_foreign or (self.matches is not None and self.matches.tokens):
            self._notes, self._could_note = None, False  # only the drafter notes candidates: such drafts stay whole
        self._handed = dict(zip(self.input_batch.req_ids, self.drafted, strict=True))  # type: ignore[attr-defined]
        return drafts

    def _sit_out(self, scheduler_output: Any, step: tuple[Any, ...]) -> Any:
        """Return drafts of no length where nobody drafts and the drafter need not run; None: vLLM is asked."""
        drafter, found = self.drafter, None  # type: ignore[attr-defined]

        def look() -> None:
            nonlocal found
            undrafted = undrafted_step(self, scheduler_output, step)
            found = None if undrafted is None else drafter.sit_out(drafter.lengths, undrafted)

        is_skipping = getattr(drafter, "catch_up", None) is not None and drafter.lengths is not None
        if is_skipping and not any(drafter.lengths) and not any(drafter.follows or ()):
            self._guard("sitting out", look)
        return found

    def row_lengths(self) -> list[int] | None:
        """Return the draft length of each batch row; rows in the middle of a prompt draft nothing."""
        lengths: list[int] | None = None

        def look_up() -> None:
            nonlocal lengths
            if self.order is None:
                return
            batch = self.input_batch  # type: ignore[attr-defined]
            if not self.order.is_drafting:
                lengths = [0] * batch.num_reqs
                return
            has_sampled = ~self.discard_request_mask.np[: batch.num_reqs]  # type: ignore[attr-defined]
            ordered = self.order.lengths
            lengths = [
                ordered.get(request_id, 0) if sampled else 0
                for request_id, sampled in zip(batch.req_ids, has_sampled.tolist(), strict=True)
            ]
            if self._room is not None:
                lengths = list(map(min, lengths, self._room))

        self._guard("look-up of lengths", look_up)
        return lengths

    def _followers(self) -> list[bool] | None:
        """Return for each batch row whether its request is in the middle of a prompt and will draft behind it."""
        if self.order is None or not self.order.is_drafting:
            return None
        batch = self.input_batch  # type: ignore[attr-defined]
        is_inside = self.discard_request_mask.np[: batch.num_reqs].tolist()  # type: ignore[attr-defined]
        lengths = self.order.lengths
        follows = [inside and lengths.get(name, 0) > 0 for name, inside in zip(batch.req_ids, is_inside, strict=True)]
        room = self._room or [1] * len(follows)
        return [row and free > 0 for row, free in zip(follows, room, strict=True)]

    def _count(self, drafts: Any, lengths: list[int] | None) -> None:
        ends = getattr(self.drafter, "ends", None)  # type: ignore[attr-defined]
        if isinstance(drafts, list):
            self.drafted = [len(draft) for draft in drafts]
        elif lengths is None:
            self.drafted = [drafts.shape[1]] * drafts.shape[0]
        else:
            self.drafted = [min(length, drafts.shape[1]) for length in ends or lengths]
        self._handed = dict(zip(self.input_batch.req_ids, self.drafted, strict=True))  # type: ignore[attr-defined]

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return the drafts on the host, each cut to its request's length; None where nobody has any."""
        return self.with_late_drafts(self._take_this_steps())

    def _take_this_steps(self) -> DraftTokenIds | None:
        # A request that was scheduled holds no drafts any more (0.32 scheduler.py:876): there is nothing to replace.
        # Where nobody was asked for drafts, vLLM holds zeros in their place (0.32 gpu_model_runner.py:4460).
        if not self._has_drafted or (self._handed is not None and not any(self._handed.values())):
            return None
        drafts: DraftTokenIds | None = super().take_draft_token_ids()  # type: ignore[misc]
        if drafts is not None and self.order is not None:
            self._guard("cut of drafts", lambda: self._cut(drafts))
        return drafts

    def _cut(self, drafts: DraftTokenIds) -> None:
        assert self.order is not None
        lengths = self.order.lengths if self._handed is None else self._handed
        drafts.draft_token_ids = [
            tokens[: lengths.get(request_id, 0)]
            for request_id, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True)
        ]

    def _attach(self, output: Any) -> None:
        inner = inner_output(output)
        spent = self._stopwatch.collect()
        request_ids = getattr(inner, "req_ids", None)
        if not request_ids:  # vLLM's empty output is one object for all
            return
        drafter = getattr(self, "drafter", None) if self.drafted else None
        for note in self.note_step, self.note_ahead:
            note(spent.get("runner", 0.0), inner.sampled_token_ids)
        inner.faser = StepReport(
            verify_s=spent.get("verify", 0.0),
            sample_s=spent.get("sample", 0.0),
            draft_s=spent.get("draft", 0.0),
            runner_s=spent.get("runner", 0.0),
            caught_up=getattr(drafter, "caught_up", 0),
            rounds=getattr(drafter, "rounds", None),
            drafted=self.drafted or [0] * len(request_ids),
            confidences=self._confidences(),
            sat_out=self._sat_out,
        )
        self.report_pruning(inner.faser)
        self.report_frontiers(inner.faser)
        self.report_copies(inner.faser)

    def _confidences(self) -> list[tuple[float, ...]]:
        book = getattr(getattr(self, "drafter", None), "book", None)
        if book is None or self.drafted is None:
            return []
        found: list[tuple[float, ...]] = book.read(self.drafted)
        return found


def with_faser(runner_class: type) -> type:
    """Return vLLM's V1 runner class with FASER's mixin in front."""
    name = f"Faser{runner_class.__name__}"
    return type(name, (FaserRunnerV1, runner_class), {"__doc__": f"vLLM's {runner_class.__name__} with FASER."})

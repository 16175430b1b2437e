"""What FASER adds to vLLM's V2 model runner (the CUDA default): drafts of their own length, and a report per step.

`with_faser` is called by the worker. Verified lengths need no work here: the scheduler mixin gives each request k_i
placeholders, V2 builds a ragged verification from their number, and the drafts never leave the device. The mixin
must never wait for the device and never raise; LIMITS_V2 says what V2 cannot do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ..drafting.draft_rounds import note_rounds
from ..drafting.drafting_v2 import DraftingV2
from ..drafting.late_confidences import Drawn
from ..hook_guard import HookGuard
from ..host_copy import HostCopy
from ..operator_log import operator_log
from ..overlap.late_drafting import LateDrafting
from ..overlap.side_stream import WHOLE_DEVICE, side_stream
from ..overlap.splits import can_deal_groups, chosen_splits, note_refusal
from ..patches.speculators.draft_inputs import copying_refusal
from ..patches.v2 import (
    Proposal,
    RunnerV2Hooks,
    around_propose,
    before_forward,
    inner_output,
    is_dummy,
    on_delivery,
    sampling_rows,
)
from ..patches.v2_sampling import ComparedDrafts, around_comparison
from ..pruning.forward_v2 import CutNotes
from ..pruning.runner_v2 import PruningRunnerV2
from ..sampling.seeded_step import GUARDED
from ..sampling.seeded_v2 import amended
from ..settings import load_settings
from ..steering.orders import StepOrder, StepReport
from .adaptive_verification import SteeredVerification
from .step_events import StepEvents, event_maker, fill_times
from .v2_graphs import GraphsV2
from .v2_limits import DraftingFacts, limits_for

logger = operator_log(__name__)

BESIDE: Final = "drafting beside the next step"


class FaserRunnerV2(RunnerV2Hooks, PruningRunnerV2):
    """Mixin in front of the V2 GPUModelRunner."""

    drafting: DraftingV2 | None = None  # None: no drafter, or vLLM's own drafting
    graphs: GraphsV2 | None = None  # None: no drafter, or vLLM's own graphs
    events: StepEvents | None = None  # of the step under way; None while nothing is timed
    previous: StepEvents | None = None
    earlier: StepEvents | None = None  # of the step before that one
    late: LateDrafting | None = None  # None: drafts are made before the next step begins
    caught_up = 0  # rows that the drafter made up for in the step before, whose `draft_s` is told in this one
    order: StepOrder | None = None
    lengths: list[int] | None = None  # per batch row, tokens to draft in this step
    rounds: tuple[int, ...] | None = None  # rows in each drafting round of this step
    verification: SteeredVerification | None = None  # None: every scheduled draft is verified

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.drawn: dict[str, Drawn] = {}  # by request, confidences of the drafts that this step verifies
        self._untold: dict[str, Drawn] = {}  # and of drafts that no step has verified yet
        self._guard = HookGuard("V2 model runner", logger)
        self.faults = self._guard.faults
        self._make_event: Callable[[], Any] | None = None
        self._guard("set-up", self._set_up)
        self._guard("choice of graphs", self._choose_graphs)

    def _choose_graphs(self) -> None:
        if self.speculator is not None:  # type: ignore[attr-defined]
            settings = load_settings()
            self.graphs = GraphsV2(self, settings.is_varlen, settings.draft_graphs)

    def _set_up(self) -> None:
        before_forward(self, partial(self._mark_step, "forward"))
        self._make_event = event_maker(self.device.type)  # type: ignore[attr-defined]
        config = self.speculative_config  # type: ignore[attr-defined]
        if config is None or not around_propose(self, self.around_draft):
            return
        for limit in limits_for(DraftingFacts.of(config)):
            logger.info("FASER on vLLM's V2 runner: %s", limit.line())
        self.drafting = DraftingV2(self, self._is_pinned, self._guard, load_settings().skipped_tokens)

    @property
    def _is_pinned(self) -> bool:
        return bool(self.device.type == "cuda")  # type: ignore[attr-defined]

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Build what the KV cache needs: adaptive verification and graph managers, of which none has captured yet."""
        result = super().initialize_kv_cache(*args, **kwargs)
        self._guard("adaptive verification", self._set_up_verification)
        if self.drafting is not None:
            self._guard("skipping of the drafter", self.drafting.catch_up.set_up)
            self._guard("note on drafting rounds", self._note_rounds)
            self._guard(BESIDE, self._set_up_late)
        self._guard(GUARDED, lambda: self._tell_of_seeds(around_comparison(self, self._say_by_seed)))
        if self.graphs is not None:
            self._guard("graphs", self.graphs.extend)
        return result

    def shutdown(self) -> None:
        """Let go of what vLLM frees."""
        self._settle()
        self.late = None
        if self.drafting is not None:
            self.drafting.catch_up.close()
        self.drafting = self.graphs = self.verification = None
        self.drawn, self._untold = {}, {}
        super().shutdown()

    def _set_up_late(self) -> None:
        settings, config = load_settings(), self.vllm_config  # type: ignore[attr-defined]
        if not can_deal_groups(settings, config):
            return  # the scheduler's part says why
        if (reason := copying_refusal(self)) is not None:
            note_refusal(config, reason)  # the scheduler's part, which is made later, says it
            return
        self.late = LateDrafting(self, side_stream(self.device, chosen_splits(settings, config)))  # type: ignore[attr-defined]

    def _set_up_verification(self) -> None:
        self.verification = SteeredVerification.of(self, self._is_pinned, self._guard)

    def _tell_of_seeds(self, holds: bool) -> None:
        if not holds and self.speculator is not None:  # type: ignore[attr-defined]
            logger.info("FASER: with this sampler requests with a seed say something else under other drafts")

    def _say_by_seed(self, compared: ComparedDrafts) -> tuple[Any, Any] | None:
        said = None

        def say() -> None:
            nonlocal said
            said = amended(compared)

        failures = self.faults[GUARDED]
        self._guard(GUARDED, say)
        if self.faults[GUARDED] > failures:
            logger.warning("FASER could not draw by seed: what requests with one say in this step may differ next time")
        return said

    def _note_rounds(self) -> None:
        note_rounds(self.vllm_config, self.drafting is not None and self.drafting.is_ragged)  # type: ignore[attr-defined]

    def _mark(self, moment: str, events: StepEvents | None) -> None:
        if events is not None:
            self._guard("clock", partial(events.mark, moment))

    def _mark_step(self, moment: str) -> None:
        self._mark(moment, self.events)

    def mark_pruning(self, moment: str) -> None:
        """Put a moment of a cut on the clock."""
        self._mark_step(moment)

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the target for one step."""
        inherited = super().execute_model
        if is_dummy(args, kwargs):
            self._settle()
            return inherited(scheduler_output, *args, **kwargs)
        if self.late is not None:
            self._guard(BESIDE, partial(self.late.meet, scheduler_output))
        self.order = getattr(scheduler_output, "faser", None)
        self.lengths = self.rounds = None
        if self.verification is not None:
            self.verification.begin(self.order)
        for name in scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set()):
            self._untold.pop(name, None)
        names = scheduler_output.num_scheduled_tokens
        self.drawn = {name: self._untold.pop(name) for name in names if name in self._untold}
        self.events = None if self._make_event is None else StepEvents(self._make_event)
        self._mark_step("begin")
        result = inherited(scheduler_output, *args, **kwargs)
        self._mark_step("verified")
        return result

    def around_sample(self, sample: Callable[[], Any], input_batch: Any) -> Any:
        """Sample, and note on the way what each row shall draft."""
        self._mark_step("logits")
        result = sample()
        self._mark_step("sampled")
        self._guard("look at the batch", lambda: self._note_rows(input_batch))
        return result

    def _note_rows(self, input_batch: Any) -> None:
        if self.order is not None:
            ordered = self.order.lengths
            self.lengths = [
                ordered.get(request_id, 0) if samples else 0
                for request_id, samples in zip(input_batch.req_ids, sampling_rows(input_batch), strict=True)
            ]

    def around_draft(self, proposal: Proposal) -> Any:
        """Draft for the next step, or put it off where nobody waits for it."""
        rounds: int = self.num_speculative_steps if proposal.rounds is None else proposal.rounds  # type: ignore[attr-defined]
        if self.late is not None and self._may_wait():
            stand_in = self.late.hold(proposal, rounds, self.events)
            if stand_in is not None:
                self.rounds = (proposal.batch.num_reqs,) * rounds
                return stand_in
        self._settle()
        drafts, self.rounds = self._draft(proposal, rounds, self.lengths, self.events)
        return drafts

    def _settle(self) -> None:
        if self.late is not None:
            self._guard(BESIDE, self.late.settle)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Replace weights once no drafting reads them any more."""
        self._settle()
        super().reload_weights(*args, **kwargs)  # type: ignore[misc]

    def _may_wait(self) -> bool:
        return self.order is not None and self.order.is_deferred and self.lengths is not None and any(self.lengths)

    def _draft(
        self, proposal: Proposal, rounds: int, lengths: list[int] | None, events: StepEvents | None
    ) -> tuple[Any, tuple[int, ...]]:
        """Draft for the next step of a batch; return the drafts, and how many rows each round had."""
        self._mark("draft", events)
        if self.drafting is None:
            drafts, rows = proposal.run(), (proposal.batch.num_reqs,) * rounds
        else:
            drafts = self.drafting.draft(proposal, lengths, rounds)
            rows = self.drafting.rounds
            self._guard("note on confidences", partial(self._note_drawn, self.drafting.drawn))
        self._mark("drafted", events)
        return drafts, rows

    def _note_drawn(self, drawn: Drawn | None) -> None:
        if drawn is not None:
            names = (name for name, length in zip(drawn.names, drawn.lengths, strict=True) if length)
            self._untold |= dict.fromkeys(names, drawn)

    def _draft_late(self, late: LateDrafting) -> None:
        """Launch what was put off in this step; whenever it is done, it is this step's."""
        step, lengths, events = self.order, self.lengths, self.events

        def draft(proposal: Proposal, rounds: int) -> Any:
            drafts, rows = self._draft(proposal, rounds, lengths, events)
            if self.order is step:
                self.rounds = rows
            return drafts

        late.launch(draft, (step.split or WHOLE_DEVICE) if step is not None else WHOLE_DEVICE)

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, draft for the next step, and attach the report."""
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        self._mark_step("end")
        if self.late is not None:
            self._guard(BESIDE, partial(self._draft_late, self.late))
        self._guard("report", lambda: self._attach(output))
        self.earlier, self.previous, self.events = self.previous, self.events, None
        self.caught_up = 0 if self.drafting is None else self.drafting.catch_up.caught_up
        return output

    def _attach(self, output: Any) -> None:
        inner = inner_output(output)
        request_ids = getattr(inner, "req_ids", None)
        if not request_ids:  # other pipeline ranks, and vLLM's empty output, which is one object for all
            return
        report = StepReport(drafted=self._drafted(len(request_ids)), rounds=self.rounds, caught_up=self.caught_up)
        report.is_drafter_ready = self.late is not None and self.late.is_on
        if self.order is not None and self.order.split is not None:
            report.split = self.order.split if report.is_drafter_ready else WHOLE_DEVICE
        inner.faser = report
        if self.cut is not None:
            report.prune_layer, report.saved_rows = self.cut.layer, self.cut.saved_rows
        admitted = None if self.verification is None else self.verification.admitted
        late = Late(self.events, (self.previous, self.earlier), self.drawn, admitted, self.cut)
        on_delivery(output, partial(self._guard, "late report", partial(late.complete, report)))

    def _drafted(self, requests: int) -> list[int]:
        if self.lengths is None or not self.rounds:
            return [0] * requests
        return [min(length, len(self.rounds)) for length in self.lengths]


@dataclass(slots=True)
class Late:
    """What of a step is known once its tokens are on the host; completed in whichever thread vLLM fetches them."""

    events: StepEvents | None
    before: tuple[StepEvents | None, StepEvents | None]  # of the last step, and of the one before
    drawn: dict[str, Drawn]
    admitted: HostCopy | None
    cut: CutNotes | None = None

    def complete(self, report: StepReport) -> None:
        """Fill in times, confidences and what was verified."""
        if self.admitted is not None:
            report.admitted = self.admitted.values()
        sure = {drawn: drawn.told() for drawn in set(self.drawn.values())}
        report.late_confidences = {name: sure[of][name] for name, of in self.drawn.items() if name in sure[of]}
        if self.cut is not None and (told := self.cut.values()) is not None:
            report.pruned, report.is_last_accepted = told
        if self.events is not None:
            fill_times(report, self.events, *self.before)


def with_faser(runner_class: type) -> type:
    """Return vLLM's V2 runner class with FASER's mixin in front."""
    name = f"Faser{runner_class.__name__}"
    return type(name, (FaserRunnerV2, runner_class), {"__doc__": f"vLLM's {runner_class.__name__} with FASER."})

"""What FASER adds to vLLM's V2 model runner (the CUDA default): phase times and a report per step.

`with_faser` is called by the worker. Lengths need no work here: the scheduler mixin gives each request k_i
placeholders, V2 builds a ragged verification from their number, and the drafts never leave the device. The mixin
must never wait for the device and never raise; LIMITS_V2 says what V2 cannot do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from ..operator_log import operator_log
from ..patches.v2 import (
    RunnerV2Hooks,
    around_propose,
    before_forward,
    inner_output,
    is_dummy,
    on_delivery,
    sampling_rows,
)
from ..steering.orders import StepOrder, StepReport
from .v2_limits import DraftingFacts, limits_for

logger = operator_log(__name__)

REPORT_LIMIT = 1  # log lines per failing hook; further failures are only counted


class StepEvents:
    """Events on the current CUDA stream at named moments of one step; read only when they are done."""

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._make_event = make_event
        self._events: dict[str, Any] = {}

    def mark(self, moment: str) -> None:
        """Put an event on the stream; the first mark of a moment holds."""
        if moment not in self._events:
            event = self._make_event()
            event.record()
            self._events[moment] = event

    def seconds(self, first: str, last: str) -> float:
        """Return the device's time between two moments; 0.0 if either was not marked or is still to come."""
        started, ended = self._events.get(first), self._events.get(last)
        if started is None or ended is None or not ended.query():
            return 0.0
        return float(started.elapsed_time(ended)) / 1000.0


def _make_cuda_event() -> Any:
    from torch.cuda import Event

    make: Callable[..., Any] = Event
    return make(enable_timing=True)


class FaserRunnerV2(RunnerV2Hooks):
    """Mixin in front of the V2 GPUModelRunner."""

    events: StepEvents | None = None  # of the step under way; None while nothing is timed
    previous: StepEvents | None = None
    order: StepOrder | None = None
    rounds: int = 0  # drafting rounds of this step
    samples: list[bool] | None = None  # per batch row, whether it drafts for a next step

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.faults: Counter[str] = Counter()
        self._is_timed = False
        self._guard("set-up", self._set_up)

    def _set_up(self) -> None:
        config = self.speculative_config  # type: ignore[attr-defined]
        if config is not None and around_propose(self, self.around_draft):
            for limit in limits_for(DraftingFacts.of(config)):
                logger.info("FASER on vLLM's V2 runner: %s", limit.line())
        before_forward(self, partial(self._mark, "forward"))
        self._is_timed = self.device.type == "cuda"  # type: ignore[attr-defined]

    def _guard(self, name: str, hook: Callable[[], None]) -> None:
        try:
            hook()
        except Exception:
            self.faults[name] += 1
            if self.faults[name] <= REPORT_LIMIT:
                logger.exception("FASER's %s failed in the V2 model runner; vLLM goes on without it", name)

    def _mark(self, moment: str) -> None:
        if self.events is not None:
            self._guard("clock", partial(self.events.mark, moment))

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the target for one step."""
        inherited = super().execute_model  # type: ignore[misc]
        if is_dummy(args, kwargs):
            return inherited(scheduler_output, *args, **kwargs)
        self.order = getattr(scheduler_output, "faser", None)
        self.rounds, self.samples = 0, None
        self.events = StepEvents(_make_cuda_event) if self._is_timed else None
        self._mark("begin")
        result = inherited(scheduler_output, *args, **kwargs)
        self._mark("verified")
        return result

    def around_sample(self, sample: Callable[[], Any], input_batch: Any) -> Any:
        """Sample, and note on the way which rows are past their prompt."""
        self._mark("logits")
        result = sample()
        self._mark("sampled")
        self._guard("look at the batch", lambda: self._note_rows(input_batch))
        return result

    def _note_rows(self, input_batch: Any) -> None:
        self.samples = sampling_rows(input_batch)

    def around_draft(self, propose: Callable[[], Any], rounds: int | None) -> Any:
        """Draft for the next step."""
        self.rounds = self.num_speculative_steps if rounds is None else rounds  # type: ignore[attr-defined]
        self._mark("draft")
        drafts = propose()
        self._mark("drafted")
        return drafts

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Sample, draft for the next step, and attach the report."""
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        self._mark("end")
        self._guard("report", lambda: self._attach(output))
        self.previous, self.events = self.events, None
        return output

    def _attach(self, output: Any) -> None:
        inner = inner_output(output)
        request_ids = getattr(inner, "req_ids", None)
        if not request_ids:  # other pipeline ranks, and vLLM's empty output, which is one object for all
            return
        report = StepReport(drafted=self._drafted(request_ids))
        inner.faser = report
        if self.events is not None:
            on_delivery(output, partial(self._guard, "times", partial(fill_times, report, self.events, self.previous)))

    def _drafted(self, request_ids: list[str]) -> list[int]:
        if self.order is None or self.samples is None:
            return [0] * len(request_ids)
        lengths, rounds = self.order.lengths, self.rounds
        return [
            min(lengths.get(request_id, 0), rounds) if samples else 0
            for request_id, samples in zip(request_ids, self.samples, strict=True)
        ]


def fill_times(report: StepReport, step: StepEvents, previous: StepEvents | None) -> None:
    """Fill in the device's times once the step's tokens are on the host; waits for nothing.

    Everything before those tokens on the stream is done by then: this step's verification and sampling, and the
    drafting of the step before. This step's own drafting may still run, so `draft_s` and `runner_s` are one step old.
    """
    report.verify_s = step.seconds("forward", "verified")
    report.sample_s = step.seconds("logits", "sampled")
    if previous is not None:
        report.draft_s = previous.seconds("draft", "drafted")
        report.runner_s = previous.seconds("begin", "end")


def with_faser(runner_class: type) -> type:
    """Return vLLM's V2 runner class with FASER's mixin in front."""
    name = f"Faser{runner_class.__name__}"
    return type(name, (FaserRunnerV2, runner_class), {"__doc__": f"vLLM's {runner_class.__name__} with FASER."})

"""When the named moments of one step on the V2 runner were: events on the device's stream, read only once it is done.

Owned by the runner mixin. Waits for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ..steering.orders import StepReport


class HostEvent:
    """The host's clock in the place of a CUDA event, on a CPU: the work is done when the call returns."""

    _at_s = 0.0

    def record(self) -> None:
        """Note the time."""
        self._at_s = time.perf_counter()

    def query(self) -> bool:
        """Tell whether the moment has come."""
        return self._at_s > 0.0

    def elapsed_time(self, end: HostEvent) -> float:
        """Return milliseconds until a later event, as CUDA's do."""
        return (end._at_s - self._at_s) * 1000.0


def event_maker(device_type: str) -> Callable[[], Any] | None:
    """Return what makes a timing event on this kind of device, None where there are none."""
    if device_type == "cpu":
        return HostEvent
    return _make_cuda_event if device_type == "cuda" else None


def _make_cuda_event() -> Any:
    from torch.cuda import Event

    make: Callable[..., Any] = Event
    return make(enable_timing=True)


class StepEvents:
    """Events at named moments of one step."""

    is_late = False  # its drafting runs beside the next step

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
        if started is None or ended is None or not (started.query() and ended.query()):  # on two streams, perhaps
            return 0.0
        return float(started.elapsed_time(ended)) / 1000.0


def fill_times(
    report: StepReport, step: StepEvents, previous: StepEvents | None, earlier: StepEvents | None = None
) -> None:
    """Fill in the device's times once the step's tokens are on the host.

    Everything before those tokens on the stream is done by then: this step's verification and sampling, and the
    drafting of the step before. This step's own drafting may still run, so `draft_s` and `runner_s` are one step old.

    :param earlier: of the step before `previous`, whose drafting is told where that of `previous` may still run
    """
    report.verify_s = step.seconds("forward", "verified")
    report.sample_s = step.seconds("logits", "sampled")
    report.prune_s = step.seconds("look", "cut")
    if previous is not None:
        report.runner_s = previous.seconds("begin", "end")
    drafting = earlier if previous is not None and previous.is_late else previous
    if drafting is not None and (drafting is previous or drafting.is_late):  # else it was told a step ago
        report.draft_s = drafting.seconds("draft", "drafted")
        # Nobody waited for it before "met", where the engine's stream came to need its drafts.
        report.overlap_s = max(min(drafting.seconds("draft", "met"), report.draft_s), 0.0)

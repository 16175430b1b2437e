"""Private names of vLLM's scheduler: private calls become the public hooks of `SchedulerHooks`.

The hooks do nothing by themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class SchedulerHooks:
    """Mixin in front of vLLM's Scheduler or AsyncScheduler."""

    def before_latch(self, output: SchedulerOutput) -> None:
        """Called when a step's batch is fixed, before its draft lengths are."""

    def after_latch(self, output: SchedulerOutput) -> None:
        """Called when vLLM has put its draft placeholders on the requests (async scheduling only)."""

    def on_leave(self, request: Request) -> None:
        """Called when a request finished or was aborted."""

    def on_preempt(self, request: Request) -> None:
        """Called when a request lost its KV cache."""

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        self.before_latch(scheduler_output)
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]
        self.after_latch(scheduler_output)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.on_leave(request)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.on_preempt(request)
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

"""FASER's scheduler for an unmodified vLLM: `--scheduler-cls faser.engine_adapter.scheduler.FaserScheduler`.

A mixin in front of whichever scheduler vLLM would have used. It latches a draft length per request, writes step
records and never raises into vLLM: after any failure of ours the engine runs on with its own default.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import msgspec

from .errors import FaserError
from .hello import describe_engine, drafter_context, refusal
from .link.engine_link import EngineLink
from .link.keys import engine_keys
from .operator_log import operator_log
from .overlap.ping_pong import PingPong, chosen_groups
from .patches.pipeline.scheduler import one_batch_at_a_time
from .patches.scheduler import SchedulerHooks
from .patches.versions import unsupported_reason, vllm_version
from .settings import ensure_private_folder, load_settings
from .stages.desk import OrderedBounds, StageDesk, open_desk
from .steering.lease import Lease
from .steering.sampled_tokens import SampledTokens, delivered_tokens, vllms_count
from .steering.steering import BatchOutcome, Default, Steering

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request

logger = operator_log(__name__)
P = ParamSpec("P")


def FaserScheduler(vllm_config: VllmConfig, **arguments: Any) -> Any:
    """Return vLLM's own scheduler for this configuration, steered by FASER where that is possible."""
    base = vllms_own(vllm_config.scheduler_config)
    reason = _off_reason(vllm_config)
    if reason is not None:
        logger.warning("FASER is off: %s", reason)
        return base(vllm_config=vllm_config, **arguments)
    is_async = bool(vllm_config.scheduler_config.async_scheduling)
    scheduler = steered(base, is_async)(vllm_config=vllm_config, **arguments)
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        set_up_pipeline(vllm_config, scheduler, arguments.get("kv_cache_config"))
    try:
        start_steering(vllm_config, scheduler)
    except Exception as error:
        logger.warning("FASER is off: %s", in_one_line(error))
    return scheduler


def set_up_pipeline(vllm_config: VllmConfig, scheduler: Any, kv_cache_config: Any) -> None:
    """Let a pipeline draft, and its stages move if the operator wants that; both hold without steering, too."""
    try:
        settings = load_settings()
        if not settings.is_enabled:
            return
        if vllm_config.speculative_config is not None and not vllm_config.use_v2_model_runner:
            one_batch_at_a_time(vllm_config)
        if settings.has_stages:
            scheduler.stages = open_desk(vllm_config, kv_cache_config)
    except Exception as error:
        logger.warning("FASER's stages are off: %s", in_one_line(error))


def vllms_own(scheduler_config: Any) -> type[Any]:
    """Return the scheduler that vLLM takes without FASER, by its own word: an unknown version may keep it elsewhere."""
    plain = copy(scheduler_config)
    plain.scheduler_cls = None
    chosen: type[Any] = plain.get_scheduler_cls()
    return chosen


def _off_reason(config: VllmConfig) -> str | None:
    """Return why this engine cannot be steered, None if it can; of an unknown vLLM nothing else is looked at."""
    try:
        return unsupported_reason(vllm_version()) or refusal(config)
    except Exception as error:
        return in_one_line(error)


def in_one_line(error: Exception) -> str:
    """Return what an error says; one that is none of FASER's own says of which kind it is, too."""
    said = " ".join(str(error).split())
    return said if isinstance(error, FaserError) else f"{type(error).__name__}: {said}"


def start_steering(vllm_config: VllmConfig, scheduler: Any) -> None:
    """Connect to the sidecar, say hello and steer, unless switched off by FASER_ENABLED=0."""
    settings = load_settings()
    if not settings.is_enabled:
        logger.info("FASER is off: FASER_ENABLED=0")
        return
    hello, stages = describe_engine(vllm_config, settings), scheduler.stages
    if stages is not None:
        hello = msgspec.structs.replace(hello, stages=stages.told())
    default = Default(settings.default_length, frontier=settings.frontier)
    if scheduler.dynamic_sd_lookup is not None:
        default.lookup = list(scheduler.dynamic_sd_lookup)
    elif hello.k_max:
        # vLLM pads one-token requests with k_max placeholder drafts while this is None (0.32 scheduler.py:1131), and
        # if FASER should fail, here or at run time, this is what vLLM goes on with.
        scheduler.dynamic_sd_lookup = [default.length] * (scheduler.max_num_running_reqs + 1)
    if settings.endpoint.startswith("ipc://"):
        ensure_private_folder(_folder_of(settings.endpoint))
    keys, groups = engine_keys(settings), chosen_groups(settings, vllm_config)
    lease = Lease(
        hello.boot_id,
        hello.k_max,
        settings.lease_steps,
        settings.lease_ms / 1000,
        hello.exit_layers,
        hello.copy_max,
        hello.rest_steps,
    )
    context = drafter_context(vllm_config)
    steering = Steering(hello, EngineLink(settings.endpoint, hello.boot_id, keys), lease, default, context)
    steering.is_sharing = bool(settings.shared_mib and hello.copy_max)
    steering.introduce()
    scheduler.steering, scheduler.ping_pong = steering, groups
    if stages is not None:
        stages.orders = OrderedBounds(steering)
    logger.info("FASER %s steers this engine over %s", hello.adapter_version, settings.endpoint)


def _folder_of(endpoint: str) -> Path:
    from pathlib import Path

    return Path(endpoint.removeprefix("ipc://")).parent


def harmless(hook: Callable[Concatenate[Any, Steering, P], None]) -> Callable[Concatenate[Any, P], None]:
    """Run a hook only while FASER steers, count its CPU time, and end steering if it fails."""

    def guarded(scheduler: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
        steering: Steering | None = scheduler.steering
        if steering is None:
            return
        started = time.thread_time()
        try:
            hook(scheduler, steering, *args, **kwargs)
        except Exception:
            scheduler.steering = None
            _abandon(steering)
            logger.exception("FASER is off for this engine after a failure of its own; vLLM goes on without it")
        finally:
            steering.cost_s += time.thread_time() - started

    update_wrapper(guarded, hook)
    return guarded


def _abandon(steering: Steering) -> None:
    try:
        steering.abandon()
    except Exception:
        logger.exception("FASER could not close its link")


class SteeredScheduler(SchedulerHooks):
    """Mixin in front of Scheduler or AsyncScheduler; `steering` is None when FASER is off."""

    steering: Steering | None = None
    _started_s = 0.0
    _noted_s = 0.0  # when the newest step's tokens had come
    ping_pong: PingPong | None = None  # None: all requests are verified in every step
    _latched: dict[str, int] | None = None
    _sampled: SampledTokens | None = None  # of the step that vLLM digests
    stages: StageDesk | None = None  # None: the pipeline stays as vLLM cut it, or there is none

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Time vLLM's own scheduling."""
        self._started_s = time.monotonic()
        self.choose_batch()
        inherited = super().schedule  # type: ignore[misc]
        if self.stages is None:
            return inherited(*args, **kwargs)  # type: ignore[no-any-return]
        return self.stages.schedule(self, lambda: inherited(*args, **kwargs))  # type: ignore[no-any-return]

    @harmless
    def choose_batch(self, steering: Steering) -> None:
        """Leave those out of the next step whose turn it is not."""
        if self.ping_pong is not None:
            self.ping_pong.deal(self.running, self.current_step + 1)  # type: ignore[attr-defined]
        else:
            steering.leave_out(len(self.running), self.current_step + 1)  # type: ignore[attr-defined]

    @harmless
    def before_latch(self, steering: Steering, output: SchedulerOutput) -> None:
        """Fix the lengths of the drafting in this step, which are those of the next verification."""
        order = steering.order(output.num_scheduled_tokens, self._started_s)
        self._latched = order.longest()
        if self.ping_pong is not None:
            self._latched = self.ping_pong.latch(order.step, self._latched)
            order.split = self.ping_pong.in_force(order.split)
            # A draft that waits for its turn was drawn before the prune order of the step that verifies it.
            order.is_deferred, order.prune, order.next_prune = self.ping_pong.is_deferred, None, None
        output.num_spec_tokens_to_schedule = max(order.lengths.values(), default=0)
        output.faser = order  # type: ignore[attr-defined]

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Cut drafts to the latched lengths (a runner without FASER drafts the batch's longest for all)."""
        self.cut_drafts(draft_token_ids)
        super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]

    @harmless
    def cut_drafts(self, steering: Steering, draft_token_ids: DraftTokenIds) -> None:
        """Truncate in place; independent of the tokens' values, so it never changes the output's distribution."""
        latched = self._latched or {}
        for request_id, tokens in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            length = latched.get(request_id, 0)
            if len(tokens) > length:
                del tokens[length:]

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """Let vLLM digest the step, then record it."""
        self._sampled = None
        self.note_sampled(model_runner_output)
        result = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        self.record_step(scheduler_output, model_runner_output, result)
        return result

    @harmless
    def note_sampled(self, steering: Steering, output: ModelRunnerOutput) -> None:
        """Count what the target emitted before vLLM cuts these lists behind a stop (0.32 scheduler.py:2508)."""
        report = getattr(output, "faser", None)
        self._sampled = SampledTokens.of(output.sampled_token_ids, report is not None and bool(report.pruned))

    @harmless
    def record_step(
        self, steering: Steering, scheduled: SchedulerOutput, output: ModelRunnerOutput, result: dict[int, Any]
    ) -> None:
        """Write the step record; steps without tokens (connector work only) are not steps of ours."""
        order = getattr(scheduled, "faser", None)
        if order is None or self._sampled is None or not scheduled.num_scheduled_tokens:
            return
        running, waiting = self.get_request_counts()  # type: ignore[attr-defined]
        outcome = BatchOutcome(
            scheduled=scheduled.num_scheduled_tokens,
            drafts=scheduled.scheduled_spec_decode_tokens,
            row_of=output.req_id_to_index,
            sampled=self._sampled,
            delivered=delivered_tokens(result),
            running=running,
            waiting=waiting,
            kv_usage=self.get_kv_cache_usage(),  # type: ignore[attr-defined]
            report=getattr(output, "faser", None),
            invalid=scheduled.num_invalid_spec_tokens or {},
            counted=vllms_count(result),
            stages=None if self.stages is None else self.stages.standing(),
        )
        if self.ping_pong is not None:
            emitted, now_s = sum(outcome.delivered.values()), time.monotonic()
            time_s = now_s - max(order.started_s, self._noted_s)  # under async scheduling steps overlap
            self.ping_pong.note(order.step, outcome.scheduled, emitted, time_s, outcome.report)
            self._noted_s = now_s
        steering.record(order, outcome)

    def add_request(self, request: Request) -> None:
        """Count a request in."""
        is_new = request.request_id not in self.requests  # type: ignore[attr-defined]
        super().add_request(request)  # type: ignore[misc]
        if is_new:
            self.on_arrival(request)
        else:
            self.on_turn(request)

    @harmless
    def on_arrival(self, steering: Steering, request: Request) -> None:
        """Give the request a handle."""
        steering.arrive(request.request_id, request)

    @harmless
    def on_turn(self, steering: Steering, request: Request) -> None:
        """Note that a streaming session goes on."""
        steering.go_on(request.request_id)

    @harmless
    def on_leave(self, steering: Steering, request: Request) -> None:
        """Count a finished or aborted request out."""
        from vllm.v1.request import RequestStatus

        has_stop_strings = bool(request.sampling_params is not None and request.sampling_params.stop)
        steering.leave(request.request_id, request.status == RequestStatus.FINISHED_ABORTED, has_stop_strings)
        self._drop_draft(request)

    @harmless
    def on_preempt(self, steering: Steering, request: Request) -> None:
        """Note the preemption."""
        steering.preempt(request.request_id)
        self._drop_draft(request)

    def _drop_draft(self, request: Request) -> None:
        if self.ping_pong is not None:
            self.ping_pong.drop(request.request_id)

    def shutdown(self) -> None:
        """Say goodbye to the sidecar."""
        super().shutdown()  # type: ignore[misc]
        self.say_goodbye()

    @harmless
    def say_goodbye(self, steering: Steering) -> None:
        """Close the link; nothing is steered afterwards."""
        self.steering = None
        steering.close()


class SteeredAsyncScheduler(SteeredScheduler):
    """Mixin in front of AsyncScheduler, which schedules a step before it has seen the drafts of the last one."""

    @harmless
    def after_latch(self, steering: Steering, output: SchedulerOutput) -> None:
        """Give each request its own number of placeholders; vLLM's list is shared, so never change it in place."""
        order = output.faser  # type: ignore[attr-defined]
        output.faser = None  # type: ignore[attr-defined]  # a runner must not draft by an order that was not kept
        requests = self.requests  # type: ignore[attr-defined]
        longest = output.num_spec_tokens_to_schedule
        for request_id, length in order.lengths.items():
            request = requests[request_id]
            if length < longest and len(request.spec_token_ids) > length:
                request.spec_token_ids = request.spec_token_ids[:length]
        output.faser = order  # type: ignore[attr-defined]


def steered(base: type, is_async: bool) -> type[Any]:
    """Return `base`, vLLM's Scheduler or AsyncScheduler, with FASER's mixin in front."""
    mixin = SteeredAsyncScheduler if is_async else SteeredScheduler
    return type(f"Faser{base.__name__}", (mixin, base), {"__doc__": f"vLLM's {base.__name__}, steered."})

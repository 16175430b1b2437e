"""The scheduler's part: what it tells the ranks, and that it never raises into vLLM."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from types import SimpleNamespace as Namespace
from typing import Any

from faser.engine_adapter.patches.pipeline.scheduler import KvShape
from faser.engine_adapter.stages.cut import StageCut
from faser.engine_adapter.stages.desk import StageDesk
from faser.engine_adapter.stages.move import MovePace
from faser.engine_adapter.stages.orders import StageStep

SHAPE = KvShape(layers=4, blocks=8, block_tokens=4, block_bytes=100)


@dataclass
class Orders:
    """Wants what it is told to want."""

    bounds: tuple[int, ...] | None = None

    def wanted(self) -> tuple[int, ...] | None:
        return self.bounds


@dataclass
class Scheduler:
    """One request of so many tokens a step, and what vLLM's scheduler has beside it."""

    blocks: list[int] = field(default_factory=lambda: [3, 5])
    computed: int = 0
    limits: list[tuple[int, int]] = field(default_factory=list)
    max_num_scheduled_tokens: int = 64
    num_spec_tokens: int = 0
    adaptive_long_prefill_threshold: bool = True

    def __post_init__(self) -> None:
        self.scheduler_config = Namespace(long_prefill_token_threshold=0)
        self.requests = {"a": None}
        self.kv_cache_manager = Namespace(get_block_ids=lambda name: (self.blocks,))

    def get_request_counts(self) -> tuple[int, int]:
        return 1, 0

    def step(self, tokens: int) -> Any:
        self.limits.append((self.scheduler_config.long_prefill_token_threshold, self.max_num_scheduled_tokens))
        new = [Namespace(req_id="a", num_computed_tokens=self.computed)]
        self.computed += tokens
        cached = Namespace(req_ids=[], num_computed_tokens=[])
        return Namespace(
            total_num_scheduled_tokens=tokens, num_scheduled_tokens={"a": tokens}, scheduled_new_reqs=new,
            scheduled_cached_reqs=cached, kv_cache_block_copies=None,
        )  # fmt: skip


def desk(orders: Any) -> StageDesk:
    made = StageDesk(StageCut.even(2, 4, 2), SHAPE)
    made.orders = orders
    return made


def ordered(stages: StageDesk, scheduler: Scheduler, tokens: int) -> StageStep:
    step: StageStep = stages.schedule(scheduler, lambda: scheduler.step(tokens)).faser_stages
    return step


def test_a_step_without_tokens_says_nothing_about_stages() -> None:
    stages, scheduler = desk(Orders((1,))), Scheduler()
    assert not hasattr(stages.schedule(scheduler, lambda: scheduler.step(0)), "faser_stages")


def test_full_blocks_of_a_request_go_ahead_and_the_tail_at_the_switch() -> None:
    orders = Orders()
    stages, scheduler = desk(orders), Scheduler()
    assert ordered(stages, scheduler, 6) == StageStep((2,))
    orders.bounds = (1,)
    ahead, switch = ordered(stages, scheduler, 1), ordered(stages, scheduler, 1)
    assert [copy.blocks for copy in ahead.ahead] == [(3,)]
    assert switch.is_switch
    assert [copy.blocks for copy in switch.tail] == [(5,)]


def test_a_prompt_is_held_back_for_one_step_and_the_limits_come_back() -> None:
    stages, scheduler = desk(Orders((1,))), Scheduler(blocks=list(range(8)))
    ordered(stages, scheduler, 8)
    ordered(stages, scheduler, 1)
    assert scheduler.limits == [(1, 1), (1, 1)]
    assert scheduler.max_num_scheduled_tokens == 64
    assert scheduler.scheduler_config.long_prefill_token_threshold == 0
    assert scheduler.adaptive_long_prefill_threshold


def test_a_refused_order_is_said_once_for_each_move(vllm_log: io.StringIO) -> None:
    orders = Orders((0,))
    stages, scheduler = desk(orders), Scheduler()
    stages.plan.pace = MovePace(layers_per_step=1)
    ordered(stages, scheduler, 1)
    for bounds in ((4,), (1,)):
        orders.bounds = bounds
        ordered(stages, scheduler, 1)
    assert vllm_log.getvalue().count("is under way") == 1
    assert "a move to [0] is under way; order [4] again later" in vllm_log.getvalue()


def test_bounds_that_do_not_fit_are_said_once_and_nothing_moves(vllm_log: io.StringIO) -> None:
    stages, scheduler = desk(Orders((9,))), Scheduler()
    for _ in range(3):
        assert ordered(stages, scheduler, 1) == StageStep((2,))
    assert vllm_log.getvalue().count("stages: bounds [9]; expected rising numbers from 0 to 4, the layers") == 1


def test_a_failure_of_ours_leaves_the_stages_where_they_are(vllm_log: io.StringIO) -> None:
    stages, scheduler = desk(Namespace()), Scheduler()
    for _ in range(2):
        output = stages.schedule(scheduler, lambda: scheduler.step(1))
        assert not hasattr(output, "faser_stages")
    assert vllm_log.getvalue().count("stages stay where they are after a failure") == 1

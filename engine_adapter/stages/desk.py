"""The scheduler's part: asks for orders, books what each step writes, and tells the ranks what to do about stages.

`open_desk` is called by FaserScheduler at engine start, `schedule` by its mixin for every step. It never raises into
vLLM: after a failure the stages stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..operator_log import operator_log
from ..patches.pipeline.scheduler import KvShape, blocks_of, computed_tokens, copied_blocks, held_blocks, thin_chunks
from ..protocol import Stages
from ..steering.record import StageStanding
from .cut import CutError, StageCut
from .move import StagePlan
from .orders import ATTRIBUTE, StageOrders
from .refusal import model_layers, stages_refusal
from .validity import Validity, Write, writes_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..steering.steering import Steering

logger = operator_log(__name__)


@dataclass(slots=True)
class NoOrders:
    """Nobody decides: the stages stay as they are."""

    def wanted(self) -> tuple[int, ...] | None:
        """Return None."""
        return None


def open_desk(config: VllmConfig, kv_cache_config: Any) -> StageDesk | None:
    """Return the desk of an engine whose ranks hold movable layers, None where stages stay as vLLM cut them."""
    ranks, layers = config.parallel_config.pipeline_parallel_size, model_layers(config)
    if ranks == 1 or stages_refusal(config) is not None:  # every worker has said why
        return None
    shape = KvShape.of(kv_cache_config)
    if shape.layers != layers:  # the ranks know the model, and have said why they keep vLLM's own cut
        return None
    logger.info("FASER can move the stages of this pipeline: %d layers on %d ranks", layers, ranks)
    return StageDesk(StageCut.even(ranks, layers, ranks), shape)


class OrderedBounds:
    """What the sidecar last asked for; a lease that ends moves nothing."""

    def __init__(self, steering: Steering) -> None:
        self._steering = steering

    def wanted(self) -> tuple[int, ...] | None:
        """Return bounds, None while nothing was asked for."""
        return self._steering.stage_bounds


class StageDesk:
    """The stages of one engine, seen from its scheduler."""

    def __init__(self, cut: StageCut, shape: KvShape) -> None:
        validity = Validity(cut.ranks, cut.layers, shape.blocks, shape.block_tokens)
        self.plan = StagePlan(cut, validity, shape.block_bytes)
        self.orders: StageOrders = NoOrders()
        self._shape = shape
        self._is_on = True
        self._told: object = None  # the move, or the bad order, about which the log has a line

    def told(self) -> Stages:
        """Return what HELLO says."""
        return Stages(self.plan.cut.layers, self.plan.cut.bounds)

    def standing(self) -> StageStanding:
        """Return what a record says."""
        return StageStanding(self.plan.cut.bounds, self.plan.counts.moves, self.plan.move is not None)

    def schedule(self, scheduler: Any, inherited: Callable[[], Any]) -> Any:
        """Return vLLM's next step, with the ranks' orders about stages on it."""
        is_thin = bool(self._guarded(lambda: self._look(scheduler)))
        with thin_chunks(scheduler, is_thin):
            output = inherited()
        if output.total_num_scheduled_tokens:
            self._guarded(lambda: self._attach(scheduler, output))
        return output

    def _guarded(self, action: Callable[[], Any]) -> Any:
        if not self._is_on:
            return None
        try:
            return action()
        except Exception:
            self._is_on = False
            logger.exception("FASER's stages stay where they are after a failure of its own; vLLM goes on")
            return None

    def _look(self, scheduler: Any) -> bool:
        wanted = self.orders.wanted()
        try:
            self._tell(self.plan.order(wanted), self.plan.move)
        except CutError as error:
            self._tell(str(error), wanted)
        return self.plan.is_thin(self._held(scheduler))

    def _tell(self, reason: str | None, cause: object) -> None:
        """Log why an order was not taken, once for each move that it met."""
        if reason is not None and cause != self._told:
            self._told = cause
            logger.warning("FASER: %s", reason)

    def _attach(self, scheduler: Any, output: Any) -> None:
        step = self.plan.step(self._writes(scheduler, output), self._held(scheduler), copied_blocks(output))
        setattr(output, ATTRIBUTE, step)

    def _held(self, scheduler: Any) -> list[list[int]]:
        """Return what requests hold, which nobody asks for unless a move is under way."""
        return [] if self.plan.move is None else held_blocks(scheduler)

    def _writes(self, scheduler: Any, output: Any) -> list[Write]:
        computed, tokens = computed_tokens(output), self._shape.block_tokens
        return [
            write
            for name, scheduled in output.num_scheduled_tokens.items()
            for write in writes_of(blocks_of(scheduler, name), tokens, computed[name], scheduled)
        ]

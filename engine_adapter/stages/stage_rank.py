"""A rank whose layers come and go: carries out what the scheduler says about stages, and runs the step.

The worker mixin makes one where stages can move and hands it every step.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from ..patches.pipeline.loading import checkpoint_files
from ..patches.pipeline.ranks import PipelineRank, kv_caches, update_states
from .cut import StageCut
from .kv_transfer import KvTransfer
from .orders import ATTRIBUTE, StageStep
from .shelf import Shelf


@dataclass(slots=True)
class RankCounts:
    """What a rank did so far; times in seconds."""

    switches: int = 0
    loaded: int = 0
    skipped_steps: int = 0
    switch_s: float = 0.0
    longest_switch_s: float = 0.0
    load_s: float = 0.0


class StageRank:
    """One rank's stages: its range of layers, its weights, and KV that travels."""

    def __init__(self, pipeline: PipelineRank, group: Any) -> None:
        self.pipeline = pipeline
        self.counts = RankCounts()
        self.transfer = KvTransfer(group, pipeline.ranks, pipeline.number)
        self.shelf: Shelf
        self.cut: StageCut
        self._can_start_anywhere = False
        self._sends: list[Any] = []
        self._step = 0

    def adopt(self, model: Any, config: Any) -> None:
        """Take a model over that has been built and not loaded yet; raise ImmovableModelError if that cannot be."""
        layers, ranks = config.model_config.hf_text_config.num_hidden_layers, len(self.pipeline.ranks)
        self.cut = StageCut.even(ranks, layers, ranks)
        self.shelf = Shelf(model, config, self.cut.range_of(self.pipeline.number), checkpoint_files(config))

    def loaded(self) -> None:
        """Finish what needs the weights of this rank."""
        self._can_start_anywhere = self.shelf.embed_anywhere()

    def execute(self, runner: Any, scheduled: Any) -> Any:
        """Run a step in place of vLLM's worker; return what that would return."""
        import torch

        with torch.inference_mode():
            return self._execute(runner, scheduled)

    def _execute(self, runner: Any, scheduled: Any) -> Any:
        for send in self._sends:
            send.wait()
        self._sends = []
        if not scheduled.total_num_scheduled_tokens:
            return runner.execute_model(scheduled, None)
        order: StageStep | None = getattr(scheduled, ATTRIBUTE, None)
        if order is not None:
            self._obey(order, runner)
        output = self._visit(runner, scheduled)
        if order is not None and order.is_switch:  # behind the step, which somebody waits for
            self.shelf.keep(self.cut.range_of(self.pipeline.number))
        return output

    def _obey(self, order: StageStep, runner: Any) -> None:
        self._step += 1
        if not self.transfer.caches:
            self.transfer.caches = kv_caches(runner)
        # By then every rank has passed the step that sent it: at most one step per rank is in flight.
        self.transfer.settle(self._step - len(self.pipeline.ranks))
        self.transfer.post((*order.ahead, *order.tail), self._step)
        self._load([layer for rank, layer in order.loads if rank == self.pipeline.number])
        if order.is_switch:
            self._switch(order)

    def _load(self, layers: list[int]) -> None:
        started = time.perf_counter()
        for layer in layers:
            self.shelf.load(layer)
        self.counts.loaded += len(layers)
        self.counts.load_s += time.perf_counter() - started

    def _switch(self, order: StageStep) -> None:
        started = time.perf_counter()
        self.transfer.receive_all()
        self.cut = StageCut(order.bounds, self.cut.layers)
        self.shelf.run(self.cut.range_of(self.pipeline.number))
        spent = time.perf_counter() - started
        self.counts.switches += 1
        self.counts.switch_s += spent
        self.counts.longest_switch_s = max(self.counts.longest_switch_s, spent)

    def _visit(self, runner: Any, scheduled: Any) -> Any:
        path, me = self.cut.path(self._can_start_anywhere), self.pipeline.number
        if me not in path:
            self.counts.skipped_steps += 1
            update_states(runner, scheduled)
            return None
        place = path.index(me)
        output = self._compute(runner, scheduled, path[place - 1] if place else None)
        if me == path[-1]:
            return output
        self._sends = self.pipeline.send(output, path[place + 1])
        return None

    def _compute(self, runner: Any, scheduled: Any, source: int | None) -> Any:
        if source is None:
            with self.pipeline.as_first():
                return runner.execute_model(scheduled, None)
        return runner.execute_model(scheduled, self.pipeline.receive(source))

    def report(self) -> dict[str, Any]:
        """Return counts of this rank, for tests and measurements."""
        sent, received = self.transfer.sent_bytes, self.transfer.received_bytes
        return asdict(self.counts) | {
            "rank": self.pipeline.number,
            "bounds": list(self.cut.bounds),
            "held": sorted(self.shelf.held),
            "sent_bytes": sent,
            "received_bytes": received,
        }

"""Engines that draft beside the next step, on a stream that is as late as it may be, or runs on at any moment."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import jobs
import torch
from jobs import Engine

from faser.engine_adapter.overlap import late_drafting, splits
from faser.engine_adapter.overlap.late_drafting import LateDrafting
from faser.engine_adapter.overlap.ping_pong import PingPong
from faser.engine_adapter.partition.shares import Grain, Partition, Sizes, opened
from faser.engine_adapter.patches.speculators import draft_inputs
from faser.engine_adapter.patches.speculators.draft_inputs import DraftInputs
from faser.engine_adapter.runner import v2
from faser.engine_adapter.runner.v2 import FaserRunnerV2


class LateSide:
    """Keeps work until the engine's stream waits for it, or until a moment of a later step that chance names.

    Work of the engine's stream runs when it is launched: so what this stream may see too late, it sees too late, and
    what the other may read too early, it reads too early.
    """

    is_beside = False

    def __init__(self, chance: float, seed: int) -> None:
        """`chance`: with which work goes on at each moment; 1: at once, 0: when it is waited for."""
        self._chance, self._random = chance, random.Random(seed)
        self._work: Callable[[], None] | None = None
        self.lateness: list[int] = []  # of each work, moments after which it ran
        self.splits: list[int] = []  # of each work, on whose share
        self._moments = 0

    def launch(self, work: Callable[[], None], split: int = 0) -> None:
        assert self._work is None, "one drafting is under way at most, on whichever stream"
        self._work, self._moments = work, 0
        self.splits.append(split)
        self.moment()

    def moment(self) -> None:
        self._moments += 1
        if self._random.random() < self._chance:
            self.go_on()

    def wait(self) -> None:
        self.go_on()

    def finish(self) -> None:
        self.go_on()

    def go_on(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            self.lateness.append(self._moments)
            work()


class Shares:
    """A device like a GPU of 132 SMs, of which names and sizes are all that is asked here."""

    grain = Grain("SMs", 132, 8, 8)

    def open(self, name: str, asked: Sizes) -> Partition:
        return Partition(name=name, unit=self.grain.unit, asked=asked, allocated=asked)


def _raise(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken on purpose")


def _shared(name: str) -> None:
    """Let one of the batch's tensors be the one that the next step overwrites."""
    copied = DraftInputs._copied
    DraftInputs._copied = (  # type: ignore[method-assign]
        lambda inputs, field, batch: getattr(batch, field) if field == name else copied(inputs, field, batch)
    )


def _shared_tables() -> None:
    draft_inputs._apart = lambda theirs: theirs


def _shared_states() -> None:
    draft_inputs._states = lambda given: {}


def _let_states_be_written_over() -> Callable[[], None]:
    """Return what does to the states of the newest step that was put off what a replayed graph does to its results."""
    given_before: list[dict[str, Any]] = []
    take = DraftInputs.take

    def taken(inputs: DraftInputs, given: dict[str, Any]) -> dict[str, Any]:
        given_before[:] = [given]
        return take(inputs, given)

    def overwrite() -> None:
        for given in given_before:
            for states in (given["last_hidden_states"], *(given["aux_hidden_states"] or ())):
                states.zero_()
        given_before.clear()

    DraftInputs.take = taken  # type: ignore[method-assign]
    return overwrite


def _no_wait() -> None:
    """Let a step verify drafts that are still under way."""
    LateDrafting.meet = lambda *_: None  # type: ignore[method-assign]


CONTROLS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "no wait": _no_wait,
    "shared tables": _shared_tables,
    "shared states": _shared_states,
    **{f"shared {name}": partial(_shared, name) for name in draft_inputs.BUFFERED},
    "failing copy": lambda: setattr(DraftInputs, "take", _raise),
    "failing attention": lambda: setattr(DraftInputs, "_attention", _raise),
    "failing set-up": lambda: setattr(late_drafting, "DraftInputs", _raise),
}


def _offer(names: list[str]) -> None:
    """Let the engine be on a GPU of 132 SMs that can be split so."""
    os.environ["FASER_SPLITS"] = ",".join(names)
    splits._refusal_on_v2 = lambda config: None
    splits.shares_of_gpu = lambda asked: opened(Shares(), asked)  # type: ignore[assignment]


def _let_nobody_sit_out() -> None:
    """Put off drafts of requests that are in the next step all the same."""
    deal = PingPong.deal

    def dealt(groups: PingPong, running: Any, next_step: int) -> None:
        deal(groups, running, next_step)
        for request in running:
            request.next_decode_eligible_step = 0

    PingPong.deal = dealt  # type: ignore[method-assign]


def beside(given: dict[str, Any]) -> dict[str, Any]:
    """Run `job` ("generate" or "everything") with groups, and a drafter's stream of the given `chance`.

    :returns: what the job does; by step who was in it, with tokens verified and accepted; the stream's lateness; by
        drafting the split that it had, by step the one in force and the one that was told
    """
    os.environ["FASER_PING_PONG"] = given.get("mode", "always")
    side = LateSide(given.get("chance", 0.0), given.get("seed", 0))
    v2.side_stream = lambda device, splits: side
    if names := given.get("splits"):
        _offer(names)
    CONTROLS[given.get("break", "")]()
    if given.get("is_together"):
        _let_nobody_sit_out()
    mark, overwrite = FaserRunnerV2._mark_step, _let_states_be_written_over()

    def marked(runner: FaserRunnerV2, moment: str) -> None:
        side.moment()
        if moment == "verified":
            with torch.inference_mode():
                overwrite()
        mark(runner, moment)

    FaserRunnerV2._mark_step = marked  # type: ignore[method-assign]
    engines: list[Engine] = []
    jobs.CONTROLS["kept"] = engines.append
    run: dict[str, Any] = getattr(jobs, given.get("job", "generate"))(given | {"control": "kept"})
    late: LateDrafting | None = engines[0].runner.late
    steps = [
        {name.split("-")[0]: [row["verified"], row["accepted"]] for name, row in entry["rows"].items()}
        for entry in run["log"]
    ]
    told = {
        "drafted_under": side.splits,
        "splits": [entry["splits"] for entry in run["log"]],
        "deferred_under": [entry["splits"][0] for entry in run["log"] if entry["is_deferred"]],
    }
    is_on = late is not None and late.is_on
    return run | told | {"steps": steps, "lateness": side.lateness, "is_late_on": is_on}

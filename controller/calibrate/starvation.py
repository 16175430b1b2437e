"""How long the engine's compute threads were ready but had no core: time that other programs took from its steps.

Measured by `faser profile` and the demo on Linux with a CPU engine, used by calibration and replays. A thread reads the
kernel's run-queue waiting time of vLLM's worker and of the drafter's process, if there is one, a few hundred times a
second; what the steps lost is subtracted from their times, so that a profile describes the engine and not its
neighbours. Knows nothing of caches and memory bandwidth, which neighbours also take.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from ...engine_adapter.arrays import Bools, Floats
from ...env.calibration.step_samples import StepSamples
from ..engine.reaper import descendants
from ..errors import StoreError
from ..telemetry.tables import StepTable

SAMPLE_S: Final = 0.004
LOOK_S: Final = 1.0  # between two looks for a drafter's process where there is none
TAIL_S: Final = 0.001  # from the end of drafting to the end of the step
MOST: Final = 0.3  # of a phase's time; a step that waited longer says too little


class Waiting(msgspec.Struct, frozen=True):
    """Cumulative waiting time at some moments of the monotonic clock; kept beside the telemetry file.

    :param waited_s: of the thread that computes the target
    :param drafter_waited_s: of the drafter's process; empty: there was none
    """

    time_s: list[float]
    waited_s: list[float]
    drafter_waited_s: list[float] = []

    def of_drafter(self) -> Waiting:
        """Return what the drafter's process waited, as a clock of its own."""
        return Waiting(self.time_s if self.drafter_waited_s else [], self.drafter_waited_s)

    def between(self, start_s: Floats, end_s: Floats) -> Floats:
        """Return the waiting time in each span."""
        if not self.time_s:
            return np.zeros(len(start_s))
        at = np.array(self.time_s)
        # The kernel counts a wait when it is over: it was spent just before, and never faster than time passes.
        total = np.maximum.accumulate((np.array(self.waited_s) - at)[::-1])[::-1] + at
        found: Floats = np.interp(end_s, at, total) - np.interp(start_s, at, total)
        return found

    def undisturbed(self, time_s: Floats) -> Floats:
        """Return moments of a clock that stands still while there is waiting for a core."""
        return time_s - self.between(np.full(len(time_s), -np.inf), time_s)


class WaitingMeter:
    """Samples from its start to `stop`. Use it as a context."""

    def __init__(self, root_pid: int) -> None:
        self._root_pid = root_pid
        self._samples: list[tuple[float, float, float]] = []
        self._has_drafter = False
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="faser-waiting", daemon=True)

    def __enter__(self) -> WaitingMeter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopping.set()
        self._thread.join()

    def read(self) -> Waiting:
        """Return what was seen so far; empty where the system does not tell."""
        samples = list(self._samples)
        waiting = Waiting([at for at, _, _ in samples], [waited for _, waited, _ in samples])
        if not self._has_drafter:
            return waiting
        return msgspec.structs.replace(waiting, drafter_waited_s=[waited for _, _, waited in samples])

    def _run(self) -> None:
        pid = compute_process(self._root_pid)
        drafter = _DrafterWaiting(self._root_pid)
        while pid is not None and not self._is_stopping.wait(SAMPLE_S):
            waited_s = _waited_s(pid)
            if waited_s is None:
                return
            now_s = time.monotonic()
            self._samples.append((now_s, waited_s, drafter.read(now_s)))
            self._has_drafter = drafter.is_there


class _DrafterWaiting:
    """What the drafter's process waited since it was first seen, through all of its lives."""

    def __init__(self, root_pid: int) -> None:
        self.is_there = False  # was ever seen
        self._root_pid = root_pid
        self._pid: int | None = None
        self._look_at_s = 0.0
        self._newest_s = self._total_s = 0.0

    def read(self, now_s: float) -> float:
        if self._pid is None and now_s >= self._look_at_s:
            self._look_at_s = now_s + LOOK_S
            self._find()
        waited_s = None if self._pid is None else _waited_s(self._pid)
        if waited_s is None:
            self._pid = None
        else:
            self._total_s += waited_s - self._newest_s
            self._newest_s = waited_s
        return self._total_s

    def _find(self) -> None:
        self._pid = drafter_process(self._root_pid)
        if self._pid is not None:
            self.is_there = True
            self._newest_s = _waited_s(self._pid) or 0.0


def _waited_s(pid: int) -> float | None:
    """Return how long a process's first thread was ready without a core since it began; None if it is gone."""
    try:
        _, waited_ns, _ = Path(f"/proc/{pid}/schedstat").read_bytes().split()
    except (OSError, ValueError):
        return None
    return int(waited_ns) / 1e9


def compute_process(root_pid: int) -> int | None:
    """Return the one process of a tree that runs the model, by the names vLLM gives its processes; None if unclear."""
    for name in (b"VLLM::Worker", b"VLLM::EngineCore"):
        found = [pid for pid in descendants(root_pid) if _title(pid).startswith(name)]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def drafter_process(root_pid: int) -> int | None:
    """Return the one process of a tree that drafts in the engine's stead; None if there is none, or several."""
    found = [pid for pid in descendants(root_pid) if b"faser.engine_adapter.drafter_" in _title(pid)]
    return found[0] if len(found) == 1 else None


def _title(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def freed(samples: StepSamples, steps: StepTable, waiting: Waiting) -> StepSamples:
    """Return the samples with what the compute thread waited for a core taken out of both phases.

    Drafts that a process of their own makes wait with that process too: the target's thread sleeps meanwhile, so their
    times add up. A phase that waited for most of its time is left out, and so is one that nobody watched; without any
    noted waiting the samples are as they were.
    """
    if not waiting.time_s:
        return samples
    between_s, end_s = _drafting(steps)
    start_s = between_s - np.nan_to_num(samples.verify_s) + 2.0 * TAIL_S
    is_watched = (start_s > waiting.time_s[0]) & (end_s < waiting.time_s[-1])
    verifying_s = waiting.between(start_s, between_s)
    drafting_s = waiting.between(between_s, end_s) + waiting.of_drafter().between(between_s, end_s)
    return samples.shortened(
        _lost(verifying_s, samples.verify_s, is_watched), _lost(drafting_s, end_s - between_s, is_watched)
    )


def of_engine(waiting: Waiting, steps: StepTable) -> Waiting:
    """Return what the engine waited: its compute thread, and the drafter's process while a step waited for drafts."""
    drafter = waiting.of_drafter()
    if not drafter.time_s:
        return waiting
    begin_s, end_s = (np.sort(each) for each in _drafting(steps))
    lost_s = drafter.between(begin_s, end_s)
    until_s = np.cumsum(lost_s)
    knots = np.maximum.accumulate(np.column_stack([begin_s, end_s]).ravel())
    more_s = np.interp(waiting.time_s, knots, np.column_stack([until_s - lost_s, until_s]).ravel())
    return Waiting(waiting.time_s, (np.array(waiting.waited_s) + more_s).tolist())


def _drafting(steps: StepTable) -> tuple[Floats, Floats]:
    """Return from when to when each step waited for drafts, (n,) each; not for those made beside something else."""
    end_s = steps.time_s - TAIL_S
    return end_s - np.maximum(steps.draft_s - steps.overlap_s, 0.0), end_s


def _lost(waited_s: Floats, phase_s: Floats, is_watched: Bools) -> Floats:
    """Return the time to take out of a phase, NaN where too much of it was lost to say anything."""
    return np.where(is_watched & (waited_s < MOST * phase_s), waited_s, np.nan)


def waiting_path(telemetry: Path) -> Path:
    """Return where the waiting times of a telemetry file stand, if it has any."""
    return telemetry.with_name(f"{telemetry.name}.waiting.json")


def save_waiting(waiting: Waiting, telemetry: Path) -> None:
    """Keep the waiting times beside the telemetry file, so that it can be calibrated again."""
    if waiting.time_s:
        waiting_path(telemetry).write_bytes(msgspec.json.encode(waiting))


def load_waiting(telemetry: Path) -> Waiting:
    """Return the waiting times beside a telemetry file, none if there is no such file."""
    path = waiting_path(telemetry)
    try:
        waiting = msgspec.json.decode(path.read_bytes(), type=Waiting)
    except FileNotFoundError:
        return Waiting([], [])
    except (OSError, msgspec.MsgspecError) as error:
        raise StoreError(f"{path}: {error}", "what `faser profile` wrote, or no file") from None
    for values in (waiting.waited_s, waiting.drafter_waited_s or waiting.time_s):
        if len(waiting.time_s) != len(values):
            raise StoreError(f"{path}: {len(waiting.time_s)} times, {len(values)} values", "as many")
    return waiting

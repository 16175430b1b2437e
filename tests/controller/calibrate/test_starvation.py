"""Time that the engine's processes waited for a core: who is watched, and what is taken out of which phase."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from faser.controller.calibrate import starvation
from faser.controller.calibrate.starvation import (
    Waiting,
    WaitingMeter,
    drafter_process,
    freed,
    load_waiting,
    of_engine,
    save_waiting,
)
from faser.controller.errors import StoreError
from faser.controller.telemetry.tables import StepTable
from faser.env.calibration.step_samples import StepSamples

BUSY = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
WORKER = ["VLLM::Worker", "-c", BUSY]
DRAFTER = ["python", "-c", BUSY, "-m", "faser.engine_adapter.drafter_process.eagle"]
CORE = min(os.sched_getaffinity(0))


@contextmanager
def process(command: list[str]) -> Iterator[int]:
    """A child that computes, on one core with all the others."""
    with subprocess.Popen(command, executable=sys.executable) as child:
        try:
            while not Path(f"/proc/{child.pid}/cmdline").read_bytes():
                time.sleep(0.001)  # the kernel ends Popen's wait before it shows the new command
            os.sched_setaffinity(child.pid, {CORE})
            yield child.pid
        finally:
            child.kill()


def seen_until(meter: WaitingMeter, drafter_s: float) -> Waiting:
    """Return what the meter saw as soon as the drafter's process waited so long, or at the end of patience."""
    end_s = time.monotonic() + 30.0
    while (seen := meter.read()).time_s == [] or max(seen.drafter_waited_s, default=0.0) < drafter_s:
        if time.monotonic() > end_s:
            break
        time.sleep(0.02)
    return seen


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not tell")
def test_the_drafters_process_is_watched_beside_the_targets_through_all_of_its_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(starvation, "LOOK_S", 0.05)
    with ExitStack() as stack:
        stack.enter_context(process(WORKER))
        meter = stack.enter_context(WaitingMeter(os.getpid()))
        with process(DRAFTER) as first:
            assert drafter_process(os.getpid()) == first
            seen = seen_until(meter, 0.05)
            assert seen.drafter_waited_s[-1] >= 0.05
            assert seen.waited_s[-1] > seen.waited_s[0]
        with process(DRAFTER):
            again = seen_until(meter, seen.drafter_waited_s[-1] + 0.1)
    assert again.drafter_waited_s[-1] >= seen.drafter_waited_s[-1] + 0.1
    assert (np.diff(again.drafter_waited_s) >= 0.0).all()
    assert len(again.time_s) == len(again.waited_s) == len(again.drafter_waited_s)


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not tell")
def test_an_engine_that_drafts_itself_has_no_drafters_waiting() -> None:
    with process(WORKER), WaitingMeter(os.getpid()) as meter:
        while len(meter.read().time_s) < 3:
            time.sleep(0.02)
        assert drafter_process(os.getpid()) is None
        assert meter.read().drafter_waited_s == []


def steps(ends_s: list[float], step_s: float, draft_s: float, ahead_s: float = 0.0) -> tuple[StepSamples, StepTable]:
    """Steps of equal length, each ended by drafting; so much more was drafted beside something else."""
    count = len(ends_s)
    zeros = {item.name: np.zeros(count) for item in fields(StepSamples)}
    spans = {"verify_s": step_s - draft_s, "draft_s": draft_s + ahead_s, "overlap_s": ahead_s}
    samples = StepSamples(**zeros | {name: np.full(count, span_s) for name, span_s in spans.items()})
    table = object.__new__(StepTable)
    columns = {"time_s": np.array(ends_s), "draft_s": samples.draft_s, "overlap_s": samples.overlap_s}
    for name, values in columns.items():
        object.__setattr__(table, name, values)
    return samples, table


@pytest.mark.parametrize("ahead_s", [0.0, 0.15])
def test_what_the_drafters_process_waited_is_taken_out_of_drafting_alone(ahead_s: float) -> None:
    """Drafts made ahead were made beside the verification: they do not move the time in which drafts are waited for."""
    samples, table = steps([1.0, 2.0, 3.0], step_s=0.5, draft_s=0.2, ahead_s=ahead_s)
    times = [
        0.0,
        1.85,
        1.95,
        2.4,
        2.6,
        4.0,
    ]  # steps wait for drafts at 1.8 and at 2.8, for 0.2 s
    target = Waiting(times, [0.0] * 6)
    drafter = Waiting(times, [0.0] * 6, [0.0, 0.0, 0.04, 0.04, 0.1, 0.1])
    assert freed(samples, table, target).draft_s - ahead_s == pytest.approx(0.2)
    clean = freed(samples, table, drafter)
    assert clean.draft_s - ahead_s == pytest.approx([0.2, 0.16, 0.2])
    assert clean.verify_s == pytest.approx([0.3, 0.3, 0.3])
    long = [3.0 * waited_s for waited_s in drafter.drafter_waited_s]
    assert np.isnan(freed(samples, table, Waiting(times, [0.0] * 6, long)).draft_s[1])  # 0.12 s of it says too little
    assert freed(samples, table, Waiting(times, drafter.drafter_waited_s)).draft_s[1] - ahead_s == pytest.approx(0.16)


@pytest.mark.parametrize("ahead_s", [0.0, 0.3])
def test_the_engines_clock_stands_still_where_a_step_waits_for_a_drafter_without_a_core(ahead_s: float) -> None:
    _, table = steps([1.0, 2.0, 3.0], step_s=0.5, draft_s=0.2, ahead_s=ahead_s)
    times = [0.0, 1.8, 1.999, 2.3, 2.4, 3.5]
    both = Waiting(times, [0.0, 0.0, 0.0, 0.05, 0.05, 0.05], [0.0, 0.0, 0.04, 0.04, 0.1, 0.1])
    found = of_engine(both, table).undisturbed(np.array([1.5, 2.0, 2.5, 3.4]))
    # 0.04 s while the second step waited, 0.05 s of the target's thread; what the process waited alone costs nobody.
    assert found == pytest.approx([1.5, 1.96, 2.41, 3.31], abs=2e-3)
    alone = Waiting(times, both.waited_s)
    assert of_engine(alone, table) is alone


def test_waiting_times_of_both_survive_and_older_files_have_one(tmp_path: Path) -> None:
    waiting = Waiting([1.0, 2.0], [0.0, 0.5], [0.0, 0.25])
    save_waiting(waiting, tmp_path / "t.sqlite")
    assert load_waiting(tmp_path / "t.sqlite") == waiting
    path = tmp_path / "old.sqlite.waiting.json"
    path.write_text('{"time_s": [1.0, 2.0], "waited_s": [0.0, 0.5]}')
    assert load_waiting(tmp_path / "old.sqlite").of_drafter().time_s == []
    path.write_text('{"time_s": [1.0, 2.0], "waited_s": [0.0, 0.5], "drafter_waited_s": [0.0]}')
    with pytest.raises(StoreError, match="2 times, 1 values"):
        load_waiting(tmp_path / "old.sqlite")

"""What engine_child.py does to a drafter process: which one is started, and what becomes of it in mid-flight."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from faser.engine_adapter import drafter_process, runner_frontier

KNOWN = Path(__file__).with_name("known_drafter.py")
START_LIMIT_S = 60.0


def install(given: dict[str, Any]) -> None:
    """Let the runner start the given process: `texts` for known_drafter.py; without, the model's own."""
    os.environ["FASER_DRAFTER_CORES"] = given.get("cores", "all")
    drafter_process.FIRST_PAUSE_S = given.get("pause_s", 0.01)  # type: ignore[misc]
    if "texts" in given:
        command = [sys.executable, str(KNOWN), given["texts"]]
        runner_frontier.chosen_drafter = lambda cores, config: (command, None)


def begin(runner: Any, batch: dict[str, Any]) -> None:
    """Wait until the process can take jobs, and arrange for what shall happen to it."""
    process = runner.remote.process
    ends = time.monotonic() + START_LIMIT_S
    while not process.is_ready and time.monotonic() < ends:
        process.look()
        time.sleep(0.01)
    assert process.is_ready, "the drafter's process did not start"
    kills = list(batch.get("kill_at", []))
    begin_step, steps = runner.remote.begin_step, 0

    def kill() -> None:
        nonlocal steps
        steps += 1
        if kills and steps >= kills[0] and process.pid is not None:
            kills.pop(0)
            os.kill(process.pid, batch.get("signal", signal.SIGKILL))
        begin_step()

    runner.remote.begin_step = kill
    if batch.get("is_patient", True):  # whether an answer comes in time shall not depend on the machine's other work
        runner_frontier.SMOOTHING = 0.0  # type: ignore[misc]
        runner.remote.serial_s = START_LIMIT_S

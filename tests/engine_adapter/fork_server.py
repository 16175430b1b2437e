"""Runs one job after the other, each in a fork of this process, which has imported vLLM once.

Used by the processes that `ForkProcess` in conftest.py starts. One line of JSON on stdin is a job; what it prints goes
to the file that its "log" names. One line on stdout tells that it is over: its exit status.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

Work = Callable[[dict[str, Any]], None]


def serve(work: Work) -> None:
    """Say that all is imported, then do jobs until stdin ends."""
    _say("ready")
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(work, job)
        _, status = os.waitpid(child, 0)
        _say(str(os.waitstatus_to_exitcode(status)))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _run(work: Work, job: dict[str, Any]) -> None:
    """Do one job and end the process."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    status = 0
    try:
        work(job)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

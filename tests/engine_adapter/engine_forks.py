"""Imports vLLM once, then runs each scenario of engine_child.py in a fork of itself; run as a process by `conftest.py`.

One line of JSON on stdin is a job: {"scenario", "environment", "folder", "log"}. What it prints goes to the log. One
line on stdout tells that it is over: its exit status. Importing vLLM takes several seconds of each engine's life.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

import engine_child


def main() -> None:
    """Run jobs until stdin ends."""
    from vllm import LLM  # noqa: F401  once for all

    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            run(job)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def run(job: dict[str, Any]) -> None:
    """Do one job and end the process."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    try:
        engine_child.write_result(job["scenario"])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

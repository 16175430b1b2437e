"""Imports vLLM once, then runs each job in a fork of itself; run as a process by `conftest.Forks`.

One line of JSON on stdin is a job: {"function", "given", "result", "log"}, the function one of jobs.py, or of the
module before a colon. Its result goes to a file as JSON, what it prints to another. One line on stdout tells that it
is over: its exit status.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import interpreter


def main() -> None:
    """Run jobs until stdin ends."""
    interpreter.install()
    import jobs  # noqa: F401  once for all

    interpreter.top_k_by_torch()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            run(named(job["function"]), job)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def named(function: str) -> Any:
    """Return a function of jobs.py, or of the module that stands before a colon."""
    module, _, name = function.rpartition(":")
    return getattr(import_module(module or "jobs"), name)


def run(function: Any, job: dict[str, Any]) -> None:
    """Do one job and end the process."""
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        Path(job["result"]).write_text(json.dumps(function(job["given"])))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

"""Imports vLLM once under Triton's interpreter, then runs each job in a fork of itself.

A job is {"function", "given", "result", "log"}, the function one of jobs.py, or of the module before a colon. Its
result goes to a file as JSON.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import interpreter

sys.path.append(str(Path(__file__).parents[1]))
fork_server: Any = import_module("fork_server")


def work(job: dict[str, Any]) -> None:
    """Do one job."""
    Path(job["result"]).write_text(json.dumps(named(job["function"])(job["given"])))


def named(function: str) -> Any:
    """Return a function of jobs.py, or of the module that stands before a colon."""
    module, _, name = function.rpartition(":")
    return getattr(import_module(module or "jobs"), name)


if __name__ == "__main__":
    interpreter.install()
    import jobs  # noqa: F401  once for all

    interpreter.top_k_by_torch()
    fork_server.serve(work)

"""Runs each scenario of engine_child.py in a fork of itself: importing vLLM takes seconds of each engine's life.

A job is {"scenario", "environment", "folder", "log"}.
"""

from __future__ import annotations

import os
from typing import Any

import engine_child
import fork_server


def work(job: dict[str, Any]) -> None:
    """Run one scenario in its own environment."""
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["folder"])
    engine_child.write_result(job["scenario"])


if __name__ == "__main__":
    from vllm import LLM  # noqa: F401  once for all

    fork_server.serve(work)

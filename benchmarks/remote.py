"""An engine in a process of its own that does what it is told: one JSON line per order, one per answer.

`serve` runs in the child, `Remote` in the parent. Between two orders the child waits and uses no processor, so that
engines can take turns on one machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import Any, Self

from faser.controller.engine.launch import openmp_library

ANSWERS = 3  # the child's file descriptor; vLLM writes to its stdout


class Remote:
    """An engine's process, which has taken its place when the context is entered and ends with it.

    :param script: run with `--child` and these arguments
    :param environment: wins over what every engine gets
    """

    def __init__(self, script: str, arguments: list[str], folder: str, environment: dict[str, str]) -> None:
        merged = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "NUMBA_NUM_THREADS": "1",  # launch.py says why
            "LD_PRELOAD": str(openmp_library() or ""),
        }
        reading, writing = os.pipe()
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec {ANSWERS}>&{writing}; exec "$@"', "-", sys.executable, script, "--child", *arguments],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            env=merged | environment,
            cwd=folder,
            pass_fds=(writing,),
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent, which ends its children
        )
        os.close(writing)
        self._answers = os.fdopen(reading)

    def __enter__(self) -> Self:
        try:
            self._answer()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, *order: Any) -> Any:
        """Return the engine's answer to a method's name and its arguments."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then there is no answer
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        if not (line := self._answers.readline()):
            raise RuntimeError(f"the engine ended with {self._process.wait(10)}")
        return json.loads(line)

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(engine: object) -> None:
    """In the child: answer orders with the engine's methods until the parent is gone."""
    with os.fdopen(ANSWERS, "w", buffering=1) as answers:
        answers.write("null\n")
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            answers.write(json.dumps(getattr(engine, name)(*arguments)) + "\n")

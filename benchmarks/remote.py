"""An engine in a process of its own that does what it is told: one JSON line per order, one per answer.

`serve` runs in the child, `Remote` in the parent. Between two orders the child waits and uses no processor, so that
engines can take turns on one machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from faser.controller.engine.launch import openmp_library

ANSWERS = 3  # the child's file descriptor; vLLM writes to its stdout


class RemoteError(RuntimeError):
    """The engine's process has ended."""


class Remote:
    """An engine's process: `script` is run with `--child` and these arguments.

    :param environment: wins over what every engine gets
    :param log: where its output goes; None: this process's stderr
    """

    def __init__(
        self,
        script: str,
        arguments: list[str],
        folder: str | Path,
        threads: int = 1,
        environment: dict[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        merged = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(threads),
            "NUMBA_NUM_THREADS": str(threads),  # launch.py says why
            "LD_PRELOAD": str(openmp_library() or ""),
        }
        reading, writing = os.pipe()
        output = open(log, "ab") if log is not None else None  # noqa: SIM115  # the child's, closed below
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec {ANSWERS}>&{writing}; exec "$@"', "-", sys.executable, script, "--child", *arguments],
            stdin=subprocess.PIPE,
            stdout=output or sys.stderr,
            stderr=output,
            env=merged | (environment or {}),
            cwd=folder,
            pass_fds=(writing,),
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent, which ends its children
        )
        os.close(writing)
        if output is not None:
            output.close()
        self._answers = os.fdopen(reading)

    def wait_ready(self) -> None:
        """Wait until the engine can take orders; RemoteError if it ends before."""
        self._answer()

    def ask(self, *order: Any) -> Any:
        """Return the engine's answer to a method's name and its arguments."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise RemoteError(f"the engine ended with {self.process.wait(10)}") from None
        return self._answer()

    def _answer(self) -> Any:
        line = self._answers.readline()
        if not line:
            raise RemoteError(f"the engine ended with {self.process.wait(10)}")
        return json.loads(line)

    def end(self) -> None:
        """End the process and wait for it."""
        self.process.kill()
        self.process.wait()


def serve(engine: object) -> None:
    """In the child: answer orders with the engine's methods until the parent is gone."""
    with os.fdopen(ANSWERS, "w", buffering=1) as answers:
        answers.write("null\n")
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            answers.write(json.dumps(getattr(engine, name)(*arguments)) + "\n")

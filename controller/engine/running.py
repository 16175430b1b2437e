"""A vLLM server as a child: started, awaited with progress, stopped without leaving a process behind.

Called by `faser serve`, `faser demo` and the benchmarks. On failure it names the one line of the log that says why.
"""

from __future__ import annotations

import re
import signal
import time
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Literal, Self, TypeAlias
from urllib.parse import urlsplit

from ..errors import EngineError
from ..progress import ShowProgress
from .launch import EngineLaunch, require_free_port
from .processes import ProcessTree

Health: TypeAlias = Literal["ready", "dead", "silent"]
_POLL_S = 0.1
_LINE_LIMIT = 500
# Lines of vLLM 0.32's log in their order; a version without them only makes the bar jump.
_MILESTONES = (
    ("Initializing a V1 LLM engine", "starting the engine", 0.35),
    ("Starting to load model", "loading the target", 0.55),
    ("Loading drafter model", "loading the drafter", 0.70),
    ("GPU KV cache size", "preparing the KV cache", 0.80),
    ("Starting vLLM server", "starting the server", 0.95),
)
_PREFIX = re.compile(r"^(\([^)]*pid=\d+\) )?((ERROR|CRITICAL|WARNING|INFO) \S+ \S+ (\[[^\]]+\] )?)?")
_ERROR = re.compile(r"^[\w.]*(Error|Exception|Interrupt|Exit)\b.*: \S|^\S+: error: ")
_ECHO = re.compile(r"Engine core initialization failed|WorkerProc initialization failed|See (root cause|stack trace)")


class RunningEngine:
    """One API server, from its start to `stop`. Use it as a context."""

    def __init__(self, launch: EngineLaunch, log: Path, cwd: Path | str = "/", grace_s: float = 15.0) -> None:
        require_free_port(launch.port, launch.host)
        self.launch = launch
        self.log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        self._tree = ProcessTree(launch.command(), launch.environment(), log, cwd, grace_s)

    @property
    def pid(self) -> int:
        """Root of the engine's process tree."""
        return self._tree.pid

    @property
    def tree(self) -> ProcessTree:
        """The processes, to pause and to account for."""
        return self._tree

    def is_running(self) -> bool:
        """Return whether the server's process lives."""
        return self._tree.poll() is None

    def is_ready(self) -> bool:
        """Return whether the server answers /health."""
        return is_healthy(self.launch.url)

    def wait_ready(self, timeout_s: float = 600.0, progress: ShowProgress | None = None) -> float:
        """Block until the server answers /health; return the seconds it took; raise EngineError if it does not."""
        begin = time.monotonic()
        while not self.is_ready():
            waited_s = time.monotonic() - begin
            if (code := self._tree.poll()) is not None:
                raise EngineError(self._ending(code, " while starting"), remedy=self._see_log())
            if waited_s > timeout_s:
                raise EngineError(f"vLLM was not ready after {timeout_s:.0f} s", remedy=self._see_log())
            if progress:
                progress(*self._milestone())
            time.sleep(_POLL_S)
        if progress:
            progress("ready", 1.0)
        return time.monotonic() - begin

    def require_running(self) -> None:
        """Raise EngineError with the reason if the server is gone."""
        if (code := self._tree.poll()) is not None:
            raise EngineError(self._ending(code), remedy=self._see_log())

    def stop(self) -> int:
        """End the server and every process it started."""
        return self._tree.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _milestone(self) -> tuple[str, float]:
        text = self._log_text()
        reached = [(what, share) for mark, what, share in _MILESTONES if mark in text]
        return reached[-1] if reached else ("importing vLLM", 0.05)

    def _log_text(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def _ending(self, code: int, when: str = "") -> str:
        if code == 128 + signal.SIGKILL:  # it had no time to say why
            return f"vLLM was killed{when}, by somebody or for want of memory"
        return f"vLLM ended with code {code}{when}: {last_error(self._log_text())}"

    def _see_log(self) -> str:
        return f"see {self.log}"


def is_healthy(url: str) -> bool:
    """Return whether a server answers /health."""
    return health(url) == "ready"


def health(url: str) -> Health:
    """Return how a server is: vLLM answers 503 once its engine is dead; a busy one may not answer in time."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=2.0)  # unlike urllib, never by a proxy
    try:
        connection.request("GET", "/health")
        return "ready" if connection.getresponse().status == 200 else "dead"
    except ConnectionRefusedError:
        return "dead"
    except (OSError, HTTPException):
        return "silent"
    finally:
        connection.close()


def last_error(log: str) -> str:
    """Return the line of a vLLM log that says why it ended: its last error, one that points at no other if it can."""
    lines = [_PREFIX.sub("", line, count=1).strip() for line in log.splitlines()]
    errors = [at for at, line in enumerate(lines) if _ERROR.match(line)]
    found = [at for at in errors if not _ECHO.search(lines[at])] or errors  # a killed engine core leaves echoes only
    if not found:
        return next((line for line in reversed(lines) if line), "it said nothing")[:_LINE_LIMIT]
    # pydantic says on the next line what it did not like
    end = found[-1] + (2 if "validation error" in lines[found[-1]] else 1)
    return " ".join(lines[found[-1] : end])[:_LINE_LIMIT]

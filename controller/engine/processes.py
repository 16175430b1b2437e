"""Start a process tree that ends with this process, however this process ends.

Called by `faser serve`, `faser demo` and the benchmarks for vLLM and for the sidecar. The tree hangs on
controller/engine/reaper.py; closing the pipe to it, by `stop` or by dying, ends the tree.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final, Self

from .reaper import descendants

_REAPER = Path(__file__).with_name("reaper.py")
_INTERRUPTS: Final = (signal.SIGINT, signal.SIGTERM)
_KILL_S = 15.0  # what the reaper may need beyond its grace period


class ProcessTree:
    """A running command with all that it started; output goes to the file `log`, appended."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        cwd: Path | str = "/",
        grace_s: float = 15.0,
    ) -> None:
        self.log = log
        self._grace_s = grace_s
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_REAPER), str(grace_s), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=cwd,
                start_new_session=True,  # Ctrl-C in the terminal is for us alone; we stop the tree in order
            )

    @property
    def pid(self) -> int:
        """The reaper's process id: the root of the tree."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the command's exit code, None while it runs."""
        return self._process.poll()

    def pause(self) -> None:
        """Halt every process of the tree: it uses no CPU until `resume`; connections to it stay open."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused tree go on."""
        self._signal(signal.SIGCONT)

    def hang_up(self) -> None:
        """Send SIGHUP to every process of the tree, on which a sidecar reads its configuration again."""
        self._signal(signal.SIGHUP)

    def cpu_s(self) -> float:
        """Return the CPU time that the tree's living processes have used."""
        return sum(cpu_s(pid) for pid in descendants(self.pid))

    def thread_cpu_s(self) -> dict[int, float]:
        """Return the CPU time that each thread of the tree's living processes has used, by thread id."""
        return {thread: spent for pid in descendants(self.pid) for thread, spent in thread_cpu_s(pid).items()}

    def _signal(self, number: int) -> None:
        for pid in descendants(self.pid):  # not the reaper itself, which must stay able to end the tree
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> int:
        """End the tree, SIGTERM first; return the command's exit code. Stopping twice is allowed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            return self._process.wait(self._grace_s + _KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the command gets SIGTERM with it
            return self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextlib.contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back until the block ends: a tree that was started has an owner by then.

    Without it an interrupt between fork and `enter_context` loses the tree; it still ends, but after we have. To be
    used in the main thread; what each signal does, raising KeyboardInterrupt included, happens at the end.
    """
    seen: list[tuple[int, FrameType | None]] = []
    previous = {number: signal.signal(number, lambda *call: seen.append(call)) for number in _INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    for arrived, frame in seen:
        action = previous[signal.Signals(arrived)]
        if callable(action):
            action(arrived, frame)
        elif action == signal.SIG_DFL:
            signal.raise_signal(arrived)


class Terminated(KeyboardInterrupt):
    """SIGTERM, to be treated as Ctrl-C is."""


@contextlib.contextmanager
def stopping_on_sigterm() -> Iterator[None]:
    """Turn SIGTERM into an interrupt, so that an orderly end takes the same way as Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Terminated

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def ignored_interrupts() -> Iterator[None]:
    """Let nothing keep the block from its end."""
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in _INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used, all its threads together; 0 if it is gone."""
    try:
        return _ticks_s(Path(f"/proc/{pid}"))
    except OSError:
        return 0.0


def thread_cpu_s(pid: int) -> dict[int, float]:
    """Return the CPU time that each thread of a process has used, by thread id; nothing if the process is gone."""
    found = {}
    with contextlib.suppress(OSError):
        for folder in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found[int(folder.name)] = _nanoseconds_s(folder)
    return found


def _nanoseconds_s(folder: Path) -> float:
    """Return a thread's CPU time by the scheduler's own account; by ticks where the kernel keeps none."""
    try:
        return int((folder / "schedstat").read_text().split()[0]) / 1e9
    except FileNotFoundError:
        return _ticks_s(folder)


def _ticks_s(folder: Path) -> float:
    fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

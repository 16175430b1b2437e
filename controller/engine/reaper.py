"""Keeps one process tree on a leash: `python reaper.py GRACE_S COMMAND...`, started by controller/engine/processes.py.

Ends the command and everything it started when standard input closes, which the kernel does for us even if the parent
is killed with SIGKILL. It is run by path with nothing but the standard library and must never outlive its tree.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_STRAGGLERS_S = 2.0  # for grandchildren after the command itself is gone, and again after SIGTERM
_KILL_S = 5.0


class Reaper:
    """Runs one command and reaps it together with every orphan it leaves."""

    def __init__(self, command: list[str], grace_s: float) -> None:
        self._grace_s = grace_s
        self._wake = self._wake_on_signals()
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphaned grandchildren become ours instead of init's
        # If this process itself is killed, the command still gets a SIGTERM.
        self._child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent
        )
        self._exit_code: int | None = None

    def run(self) -> int:
        """Wait for the command or the leash, end what is left, return the command's exit code."""
        leash = sys.stdin.fileno()
        while self._exit_code is None:
            ready, _, _ = select.select([leash, self._wake], [], [])
            self._reap()
            if leash in ready and not os.read(leash, 64):
                break
            if self._wake in ready and signal.SIGTERM in os.read(self._wake, 256):
                break
        self._end_all()
        return 0 if self._exit_code is None else self._exit_code

    def _end_all(self) -> None:
        _send(signal.SIGCONT, descendants(os.getpid()))  # what was paused could not end in order
        if self._exit_code is None:
            _send(signal.SIGTERM, [self._child.pid])  # vLLM ends its own children in an orderly manner
            self._wait(self._grace_s, until_child=True)
        self._wait(_STRAGGLERS_S)
        for number, wait_s in ((signal.SIGTERM, _STRAGGLERS_S), (signal.SIGKILL, _KILL_S)):
            _send(number, descendants(os.getpid()))
            self._wait(wait_s)

    def _wait(self, limit_s: float, until_child: bool = False) -> None:
        end = time.monotonic() + limit_s
        while (left := end - time.monotonic()) > 0:
            has_children = self._reap()
            if not has_children or (until_child and self._exit_code is not None):
                return
            if select.select([self._wake], [], [], left)[0]:
                os.read(self._wake, 256)

    def _reap(self) -> bool:
        """Collect every finished child; return whether any are left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._child.pid:
                code = os.waitstatus_to_exitcode(status)
                self._exit_code = self._child.returncode = code if code >= 0 else 128 - code

    @staticmethod
    def _wake_on_signals() -> int:
        wake, notify = os.pipe()
        os.set_blocking(notify, False)
        signal.set_wakeup_fd(notify, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return wake


def descendants(root: int) -> list[int]:
    """Return the ids of every process below `root`."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(name))
    found, todo = [], [root]
    while todo:
        below = parents.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _send(number: int, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(Reaper(sys.argv[2:], float(sys.argv[1])).run())

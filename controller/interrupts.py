"""Ctrl-C before a command has handlers of its own: it is noted, so that code which swallows it cannot lose it."""

from __future__ import annotations

import signal
import sys
from types import FrameType


def remember_interrupts() -> list[int]:
    """Note each SIGINT from here on, and return where.

    It raises KeyboardInterrupt as always; but what is imported on the way runs code of C and of destructors, in which
    an exception is printed or lost. It is noted, so Python need not print it.
    """
    seen: list[int] = []
    print_unraisable = sys.unraisablehook

    def interrupt(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    def print_others(unraisable: sys.UnraisableHookArgs) -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            print_unraisable(unraisable)

    sys.unraisablehook = print_others
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where the shell said to ignore it
        signal.signal(signal.SIGINT, interrupt)
    return seen

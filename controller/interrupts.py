"""Ctrl-C before a command has handlers of its own: it is noted, so that code which swallows it cannot lose it."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Final

_SEEN: Final[list[int]] = []


def remember_interrupts() -> list[int]:
    """Note each SIGINT from here on and return where; calling it again gives the same list.

    It raises KeyboardInterrupt as always; but what is imported on the way runs code of C and of destructors, in which
    an exception is printed or lost. It is noted, so Python need not print it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where the shell said to ignore it
        signal.signal(signal.SIGINT, _note)
        sys.unraisablehook = _print_others
    return _SEEN


def _note(number: int, frame: FrameType | None) -> None:
    _SEEN.append(number)
    signal.default_int_handler(number, frame)


def _print_others(unraisable: sys.UnraisableHookArgs) -> None:
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)

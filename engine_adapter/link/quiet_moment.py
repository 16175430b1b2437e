"""The moment of a step when the engine's thread leaves the interpreter to others: the runner tells, the link waits.

A forward pass is hundreds of short calls. While another thread of the process is in Python, each of them waits on its
way back, so what the link's thread computes is added to the step. Behind the pass comes the product with the whole
vocabulary, or on a GPU the wait for it: one long call. Only where the runner is in the process of the scheduler.
"""

from __future__ import annotations

import contextlib
import os
import select

MOST_S = 0.1  # to wait for a quiet moment that may never come
NEXT_S = 1.0  # ... and for the next one while there are requests: the step of a long prompt takes no longer


class QuietMoments:
    """Tells the threads that listen in this process when a quiet moment begins."""

    def __init__(self) -> None:
        self.is_told = False  # the runner is in this process
        self._events: list[int] = []

    def tell(self) -> None:
        """Say that a quiet moment begins; called by the runner, costs a microsecond."""
        self.is_told = True
        for event in self._events:
            with contextlib.suppress(OSError):  # full, or closed just now
                os.eventfd_write(event, 1)

    def open(self) -> int:
        """Return an event to wait for quiet moments by."""
        event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events = [*self._events, event]
        return event

    def close(self, event: int) -> None:
        """Give an event back."""
        self._events = [each for each in self._events if each != event]
        os.close(event)


QUIET_MOMENTS = QuietMoments()


def heard(event: int) -> bool:
    """Return whether a quiet moment began since this was asked last."""
    try:
        return os.eventfd_read(event) > 0
    except BlockingIOError:
        return False


def wait(event: int, most_s: float) -> None:
    """Wait for the next quiet moment; those that have been do not count."""
    heard(event)
    poller = select.poll()
    poller.register(event, select.POLLIN)
    poller.poll(1e3 * most_s)

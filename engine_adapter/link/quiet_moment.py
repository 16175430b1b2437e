"""The moment of a step when the engine's thread leaves the interpreter to others: the runner tells, the link waits.

A forward pass is hundreds of short calls. While another thread of the process is in Python, each of them waits on its
way back, so what the link's thread computes is added to the step. Behind the pass comes the product with the whole
vocabulary, or on a GPU the wait for it: one long call. Only where the runner is in the process of the scheduler.
"""

from __future__ import annotations

import contextlib
import os
import select

MOST_S = 0.1  # to wait for a lull that may never come
NEXT_S = 1.0  # ... and for the next one while there are requests: the step of a long prompt takes no longer


class Lulls:
    """Tells the threads that listen in this process when a lull begins."""

    def __init__(self) -> None:
        self.is_told = False  # the runner is in this process
        self._bells: list[int] = []

    def tell(self) -> None:
        """Say that a lull begins; called by the runner, costs a microsecond."""
        self.is_told = True
        for bell in self._bells:
            with contextlib.suppress(OSError):  # full, or closed just now
                os.eventfd_write(bell, 1)

    def open(self) -> int:
        """Return a bell to wait for lulls by."""
        bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._bells = [*self._bells, bell]
        return bell

    def close(self, bell: int) -> None:
        """Give a bell back."""
        self._bells = [each for each in self._bells if each != bell]
        os.close(bell)


LULLS = Lulls()


def heard(bell: int) -> bool:
    """Return whether a lull began since this was asked last."""
    try:
        return os.eventfd_read(bell) > 0
    except BlockingIOError:
        return False


def wait(bell: int, most_s: float) -> None:
    """Wait for the next lull; those that have been do not count."""
    heard(bell)
    poller = select.poll()
    poller.register(bell, select.POLLIN)
    poller.poll(1e3 * most_s)

"""The time of day that never falls back: what the telemetry file is put in order by.

Called by the daemon's loop. A clock that is set back would put records before the hello or the reload they came after,
and the replay would take them for a session without a beginning, or under other settings.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class RisingClock:
    """Nanoseconds since 1970, each reading later than the one before."""

    def __init__(self, read_ns: Callable[[], int] = time.time_ns) -> None:
        self._read_ns = read_ns
        self._last_ns = 0

    def now_ns(self) -> int:
        """Return the time, or the nanosecond after the last reading if that is later."""
        self._last_ns = max(self._read_ns(), self._last_ns + 1)
        return self._last_ns

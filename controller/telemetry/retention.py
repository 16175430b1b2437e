"""How much telemetry is kept: limits of size and age, and deleting what is beyond them.

Called by the store's writer, on its one connection, between two commits. Pages that become free are used again, so a
file at its limit stays there; `faser store vacuum` gives them back to the disk. The limit of size is one for the file
and its log together: the log has a fixed part of it, not what it happens to take, or a reader that makes it grow would
cost the steps that are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from sqlite_utils import Database

from ..config import StoreConfig

BITE_STEPS: Final = 2000
SMALLEST_BITE_STEPS: Final = 64
BITES: Final = 8  # at least, to delete all of a small file
KEEP_SHARE: Final = 0.95  # of the limit: deleting starts at the limit and ends here
NS_PER_HOUR: Final = 3_600_000_000_000
LOG_BYTES: Final = 16 << 20  # the most that a log may take before it is cut ...
SMALL_LOG_BYTES: Final = 1 << 19  # ... and what it may where that is 1/8 to 1/32 of the limit
LOGS: Final = 4  # kept free: one log, what it adds to the file, and what a batch or a bite adds to either


@dataclass(slots=True)
class Retention:
    """The limits; 0 means none. `is_shrinking` is set between the limit and what is kept of it."""

    max_bytes: int = 0
    max_age_ns: int = 0
    is_shrinking: bool = False

    @classmethod
    def of(cls, store: StoreConfig) -> Self:
        """Return the configured limits."""
        return cls(store.max_mb << 20, int(store.max_age_h * NS_PER_HOUR))

    @property
    def log_bytes(self) -> int:
        """Return the size at which the log is to be cut."""
        if not self.max_bytes:
            return LOG_BYTES
        return max(min(self.max_bytes // 8, SMALL_LOG_BYTES), min(self.max_bytes // 32, LOG_BYTES))

    @property
    def file_bytes(self) -> int:
        """Return what the log leaves to the file; only with a limit."""
        return self.max_bytes - LOGS * self.log_bytes


def used_bytes(database: Database) -> int:
    """Return the bytes of a file that hold something."""
    pages, free, size = (
        database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def prune(database: Database, retention: Retention, now_ns: int) -> bool:
    """Delete one bite of the oldest steps and events if the file is over a limit; return whether it was."""
    if not _is_over(database, retention, now_ns):
        return False
    with database.atomic():
        first, last = database.execute("SELECT min(id), max(id) FROM steps").fetchone()
        if first is None:
            return False
        bite = min(max((last - first) // BITES, SMALLEST_BITE_STEPS), BITE_STEPS)
        end = min(first + bite, last)  # the newest step stays
        database.execute("DELETE FROM steps WHERE id < ?", [end])
        (oldest_ns,) = database.execute("SELECT received_ns FROM steps WHERE id >= ? ORDER BY id", [end]).fetchone()
        database.execute(
            "DELETE FROM events WHERE id IN (SELECT id FROM events WHERE received_ns < ? ORDER BY id LIMIT ?)",
            [oldest_ns, 8 * BITE_STEPS],
        )
    return bool(end > first)


def _is_over(database: Database, retention: Retention, now_ns: int) -> bool:
    if retention.max_age_ns:
        row = database.execute("SELECT received_ns FROM steps ORDER BY id LIMIT 1").fetchone()
        if row is not None and row[0] < now_ns - retention.max_age_ns:
            return True
    if not retention.max_bytes:
        return False
    used = used_bytes(database)
    retention.is_shrinking = used > retention.file_bytes * (KEEP_SHARE if retention.is_shrinking else 1.0)
    return retention.is_shrinking

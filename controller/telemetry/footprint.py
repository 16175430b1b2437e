"""What a telemetry file and SQLite's log beside it take on the disk, and what to do about a log that only grows.

Called by whoever writes, asks for or checks a file; looks at sizes alone and opens nothing.
"""

from __future__ import annotations

from pathlib import Path


def log_path(path: Path) -> Path:
    """Return where SQLite keeps a file's write-ahead log."""
    return path.with_name(f"{path.name}-wal")


def sizes(path: Path) -> tuple[int, int]:
    """Return the bytes of a file and of its log."""
    return _size(path), _size(log_path(path))


def in_words(size_bytes: int) -> str:
    """Return a size in MiB, with a digit behind the point where it is small."""
    return f"{size_bytes / 2**20:.{0 if size_bytes >= 10 << 20 else 1}f} MiB"


def remedy(path: Path) -> str:
    """Return what makes a reader let go of the log."""
    return f"end the program that keeps a transaction open, such as a SQLite shell (lsof {log_path(path)} names it)"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0

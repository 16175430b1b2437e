"""Telemetry files as an older FASER would have written them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from faser.controller.telemetry.schema import ADDED, SCHEMA_VERSION

BEFORE_COPIES = 5  # the last schema without copied drafts


def older(path: Path, version: int) -> None:
    """Make the file what an older FASER would have written."""
    with closing(sqlite3.connect(path)) as database:
        for since in range(version + 1, SCHEMA_VERSION + 1):
            for name, _, _ in ADDED[since]:
                database.execute(f"ALTER TABLE steps DROP COLUMN {name}")
        database.execute(f"PRAGMA user_version = {version}")
        database.commit()

"""Telemetry files as an older FASER would have written them."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

from faser.controller.telemetry.schema import ADDED, SCHEMA_VERSION, VIEWS

OBJECTIVE = re.compile(r",\s+max\(CASE WHEN kind = 'arrival' THEN t\w+_ms END\) AS \w+")
BEFORE_COPIES = 5  # the last schema without copied drafts


def older(path: Path, version: int) -> None:
    """Make the file what an older FASER would have written."""
    with closing(sqlite3.connect(path)) as database:
        for name in VIEWS:  # SQLite keeps a column that a view asks for
            database.execute(f"DROP VIEW IF EXISTS {name}")
        for since in range(version + 1, SCHEMA_VERSION + 1):
            for column in ADDED[since]:
                database.execute(f"ALTER TABLE {column.table} DROP COLUMN {column.name}")
        for name, sql in VIEWS.items():
            database.execute(f"CREATE VIEW {name} AS {OBJECTIVE.sub('', sql) if version < 7 else sql}")
        database.execute(f"PRAGMA user_version = {version}")
        database.commit()

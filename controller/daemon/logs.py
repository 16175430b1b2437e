"""What the sidecar says on stderr: lines of text, or one JSON object per line.

Called by the sidecar at start and when it is reloaded.
"""

from __future__ import annotations

import logging
import sys
from typing import Final

import msgspec

from ..config import LogConfig

TEXT_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One object per record: time_s, level, logger, message, and the traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time_s": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def set_up_logging(log: LogConfig) -> None:
    """Send what is logged to stderr, as configured; audit events are never filtered out."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log.format == "json" else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(level=log.level.upper(), handlers=[handler], force=True)
    logging.getLogger("faser.audit").setLevel(logging.INFO)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)

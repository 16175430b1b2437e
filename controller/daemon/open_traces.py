"""Where traces go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config import TraceConfig
from ..errors import UsageError

if TYPE_CHECKING:
    from .spans import SpanWriter


def open_traces(config: TraceConfig) -> SpanWriter | None:
    """Return where traces go, None if they are off; raise UsageError where OpenTelemetry is not installed."""
    if not config.enabled:
        return None
    try:
        from .spans import SpanWriter
    except ImportError as error:
        raise UsageError(
            f"trace.enabled is set, but {error.name} is not installed",
            "the extra otel",
            "pip install 'faser-vllm[otel]'",
        ) from None
    return SpanWriter(config)

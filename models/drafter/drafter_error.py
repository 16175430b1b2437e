"""The one error of the drafter's tools: an input that is refused before work starts. The CLI prints its line."""

from __future__ import annotations

from ...engine_adapter.errors import ModelError


class DrafterError(ModelError):
    """Say what was seen, what was expected and what to do; nothing has been written when it is raised."""

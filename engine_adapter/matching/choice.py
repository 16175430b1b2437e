"""Whether an engine may copy drafts from its requests' own texts; asked by HELLO and by the runner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def match_refusal(config: VllmConfig, settings: Settings) -> str | None:
    """Return why nothing is copied, None if that can be."""
    if config.speculative_config is None:
        return "nothing is drafted"
    if not settings.match_mib:
        return "FASER_MATCH_MIB=0"
    if config.use_v2_model_runner:
        return "the V2 runner keeps tokens on its device"
    if config.scheduler_config.async_scheduling:
        return "with async scheduling drafts are scheduled before the tokens are known that they follow"
    if settings.drafter_cores:
        return "a process drafts (FASER_DRAFTER_CORES)"
    return None

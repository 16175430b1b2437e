"""What one step emitted, counted before and after vLLM digests it. Called by the scheduler mixin.

vLLM cuts `sampled_token_ids` in place behind a stop, and some requests end while their step runs: their tokens reach
nobody. Accepted drafts are counted on what the target sampled, emitted tokens on what vLLM handed out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class SampledTokens:
    """What the target emitted in one step, by batch row; both lists are empty in a step that sampled nothing."""

    counts: list[int]
    lasts: list[int]  # each row's last token, -1 for none; empty too where no draft was pruned

    @classmethod
    def of(cls, sampled: Sequence[Sequence[int]], is_pruned: bool) -> SampledTokens:
        """Count vLLM's `sampled_token_ids` as the model runner returned them."""
        return cls(list(map(len, sampled)), [row[-1] if row else -1 for row in sampled] if is_pruned else [])


def delivered_tokens(result: Mapping[int, Any]) -> dict[str, int]:
    """Return by request how many tokens vLLM handed to its front end, of those that got any.

    :param result: what `update_from_output` returned: EngineCoreOutputs by client (0.32 v1/engine/__init__.py)
    """
    return {
        output.request_id: len(tokens)
        for client in result.values()
        for output in client.outputs
        if (tokens := output.new_token_ids)
    }


def vllms_count(result: Mapping[int, Any]) -> tuple[int, int] | None:
    """Return vLLM's own (drafted, accepted) tokens of this step; None where it keeps no statistics."""
    for client in result.values():
        if client.scheduler_stats is not None:
            counted = client.scheduler_stats.spec_decoding_stats
            return (0, 0) if counted is None else (counted.num_draft_tokens, counted.num_accepted_tokens)
    return None

"""Whether a request's own length saves drafting, or all draft the batch's longest: what HELLO says.

V2's mixin notes what its drafter does; hello.py reads that in the scheduler's process. Reads configuration
only, imports nothing of vLLM.
"""

from __future__ import annotations

from typing import Any, Final

from ..protocol import LONGEST, RAGGED, Rounds
from .ragged import MODEL_METHODS

_NOTE: Final = "faser_ragged_rounds"
_IN_ROUNDS: Final = frozenset({"eagle", "eagle3", "mtp"})  # that V2 drafts one after another, unless it fuses them


def note_rounds(config: Any, is_ragged: bool) -> None:
    """Leave in the worker's configuration whether rows leave the draft batch.

    Not before the models are loaded: vLLM copies the configuration for the drafter's, field by field.
    """
    object.__setattr__(config, _NOTE, is_ragged)


def told_rounds(config: Any) -> Rounds:
    """Return how drafts of different length are made: as the worker noted, else by configuration alone.

    Where the worker has a copy of the configuration in a process of its own, it is not known which attention backend
    vLLM chose; most of CUDA's have the rounds fused.
    """
    noted: bool | None = getattr(config, _NOTE, None)
    return RAGGED if (_configured(config) if noted is None else noted) else LONGEST


def _configured(config: Any) -> bool:
    drafting = config.speculative_config
    if drafting is None:
        return True  # nobody drafts, and nothing is saved or lost
    method = str(drafting.method)
    if not config.use_v2_model_runner:
        return method == "ngram" or method in MODEL_METHODS
    return method in _IN_ROUNDS and str(config.device_config.device_type) == "cpu"

"""The one split of prompts into a training side and a held-out side, by a hash of the first user turn.

Drafter, exit heads and policies are trained on the training side only; demo, tests, benchmarks and every figure
use the held-out side only. Changing anything here makes shipped weights and published figures incomparable.
"""

from __future__ import annotations

import hashlib
import unicodedata
from typing import Final

HELD_OUT_SHARE: Final = 0.25
_HELD_OUT_MODULUS: Final = 4


def is_training_prompt(first_user_turn: str) -> bool:
    """Say whether a prompt may be trained on.

    The text is the user's first turn alone: no system turn, no chat template. Unicode form and runs of white space
    do not matter, so that a re-wrapped copy of a prompt stays on its side.
    """
    return not is_held_out_prompt(first_user_turn)


def is_held_out_prompt(first_user_turn: str) -> bool:
    """Say whether a prompt is kept from training: a quarter of all, for demo, tests and benchmarks."""
    normalised = " ".join(unicodedata.normalize("NFC", first_user_turn).split())
    return hashlib.sha256(normalised.encode("utf-8", "surrogatepass")).digest()[0] % _HELD_OUT_MODULUS == 0

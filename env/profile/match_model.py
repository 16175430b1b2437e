"""Which drafts a request's own text offers, as a generator: how often, how long, how sure, and which are accepted.

Called by the simulator (draws) and by calibration (fits). Whether the same words were followed by something before is
a coin of each step, more often so right behind a copy that was accepted as a whole: texts repeat themselves in
stretches. Some requests repeat themselves and others never do.
"""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from .acceptance_model import QUANTILES, AcceptanceModel

LARGEST_LOGIT = 40.0


class MatchModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything per position of a copy is a tuple of `longest` numbers.

    P(a decoding request's step ends with a match) = sigmoid(after + spread * propensity), propensity ~ N(0, 1) once per
    request; after = `after_whole` where the step verified a copy and accepted all of it, else `after_other`.
    In `tokens` the confidences are the engine's own chances of a match's tokens, as it says them (a rule's slopes and
    intercepts have no part in them); its request level and residual are the copies', not the drafter's. Behind a copy
    that was accepted as a whole a match is longer, and the engine surer: there `quantiles_whole` take the place of
    those of `tokens`.
    """

    after_whole: float
    after_other: float
    spread: float  # standard deviation on the logit scale
    lengths: tuple[float, ...]  # share of the matches that offer 1, 2, ... tokens; they sum to 1
    tokens: AcceptanceModel
    quantiles_whole: tuple[tuple[float, ...], ...]  # (longest, QUANTILES), as in AcceptanceModel
    copies: int = 0  # measured ones; for comparison
    source: str = ""

    @property
    def longest(self) -> int:
        """The most tokens of a copy."""
        return len(self.lengths)

    @property
    def tokens_whole(self) -> AcceptanceModel:
        """Return the tokens behind a copy that was accepted as a whole."""
        return replace(self.tokens, quantiles=self.quantiles_whole)


def fault_of(model: MatchModel) -> str:
    """Return what a model of matches cannot be, in words; nothing if it is sound."""
    numbers = (model.after_whole, model.after_other, model.spread)
    if not all(math.isfinite(value) and abs(value) <= LARGEST_LOGIT for value in numbers) or model.spread < 0.0:
        return f"{numbers}; expected finite logits and a spread of at least 0"
    is_share = all(0.0 <= share <= 1.0 for share in model.lengths)
    if not 1 <= model.longest <= 64 or not is_share or abs(sum(model.lengths) - 1.0) > 1e-6:
        return f"lengths {model.lengths}; expected shares of 1 to 64 lengths that sum to 1"
    if model.tokens.k_max != model.longest:
        return f"tokens of {model.tokens.k_max} positions; expected {model.longest}, as there are lengths"
    if [len(row) for row in model.quantiles_whole] != [QUANTILES] * model.longest:
        return f"quantiles_whole of {len(model.quantiles_whole)} positions; expected {model.longest} of {QUANTILES}"
    return ""

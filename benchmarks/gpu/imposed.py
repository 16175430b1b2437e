"""Acceptance and confidence by decree, request by request, for engines whose weights are random.

Each draft token gets a confidence and a fate from a generator fitted to a measured run
(env/profile/acceptance_model.py), keyed by request and by the place in its answer where the draft begins, so that
every arm meets the same luck. The target's logits are raised at the draft's own token, or at another one, before
vLLM's rejection sampler looks (V1 runner, greedy, synchronous scheduling), and FASER's drafter notes the confidence.
Everything else is computed as always, and costs what it costs. Called by serve_engine.py behind the engine's start:
numba comes with the generator, and vLLM's start does not bear it.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from faser.env.profile.acceptance_model import AcceptanceModel, accept_chance, confidence_logit, draft_chain

if TYPE_CHECKING:
    from torch import Tensor

CERTAIN: Final = 1e4  # above any logit


class _Draft(NamedTuple):
    """One draft's luck, as long as a draft can be: its scores, which begin anew with it, and a coin for each token."""

    chain: list[float]
    coins: list[float]


@dataclass(slots=True)
class _Life:
    """One request's luck: what is its own, and its drafts by the place in the answer where they begin."""

    level: float
    residual: float
    drafts: dict[int, _Draft] = field(default_factory=dict)


class Fates:
    """Which draft tokens are accepted, and how sure the drafter is of each; the same for the same seed."""

    def __init__(self, model: AcceptanceModel, seed: int = 0) -> None:
        self._intercepts, self._slopes, self._quantiles, shares = model.tables()
        self._request_share, self._carry, self._hidden = map(float, shares)
        self._k_max, self._seed = model.k_max, seed
        self._lives: dict[int, _Life] = {}

    def logit(self, request: int, begin: int, position: int) -> float:
        """Return the confidence's logit of a draft's token.

        :param begin: the place in the answer where the draft begins
        :param position: in its draft, 0 for the first
        """
        life = self._life(request)
        chain = self._draft(request, begin).chain[position]
        found: float = confidence_logit(self._quantiles, position, life.level, chain, self._request_share)
        return found

    def confidence(self, request: int, begin: int, position: int) -> float:
        """Return the drafter's probability of that token."""
        return 1.0 / (1.0 + math.exp(-self.logit(request, begin, position)))

    def is_accepted(self, request: int, begin: int, position: int) -> bool:
        """Return whether the target accepts that token, given that it accepted all before it in the draft."""
        logit, residual = self.logit(request, begin, position), self._life(request).residual
        chance = accept_chance(self._intercepts, self._slopes, position, logit, residual, self._hidden)
        return self._draft(request, begin).coins[position] < chance

    def _life(self, request: int) -> _Life:
        if request not in self._lives:
            dice = random.Random(f"{self._seed} {request}")
            self._lives[request] = _Life(dice.gauss(0.0, 1.0), dice.gauss(0.0, 1.0))
        return self._lives[request]

    def _draft(self, request: int, begin: int) -> _Draft:
        drafts = self._life(request).drafts
        if begin not in drafts:
            chance = np.random.default_rng((self._seed, request, begin))
            drafts[begin] = _Draft(draft_chain(chance, self._k_max, self._carry), chance.random(self._k_max).tolist())
        return drafts[begin]


class Decree:
    """Puts the fates upon one engine's runner, for as long as it lives."""

    def __init__(self, runner: Any, fates: Fates) -> None:
        self._runner, self._fates = runner, fates
        self._book: Any = None  # of the drafting under way, and how many of its passes were noted
        self._column = 0
        self._next: list[tuple[int, int]] = []  # by batch row: request, and where its next draft begins
        runner.sampler.register_forward_hook(self._after_sampling)
        if hasattr(runner, "rejection_sampler"):
            runner.rejection_sampler.register_forward_pre_hook(self._before_rejecting)
            runner.rejection_sampler.register_forward_hook(self._after_sampling)
        if hasattr(drafter := getattr(runner, "drafter", None), "book"):  # FASER's
            drafter._note = self._note

    def _places(self) -> list[tuple[int, int]]:
        """Return of each request in the batch its number and the tokens it has emitted; vLLM may add to a name."""
        return [
            (int(name.split("-")[0]), len(self._runner.requests[name].output_token_ids))
            for name in self._runner.input_batch.req_ids
        ]

    def _before_rejecting(self, _module: Any, arguments: tuple[Any, ...]) -> None:
        verified, _, logits, _ = arguments
        rows, kept, first = list[int](), list[bool](), 0  # a request has a row more than it has drafts
        for (request, emitted), count in zip(self._places(), verified.num_draft_tokens, strict=True):
            rows += range(first, first + count)
            kept += [self._fates.is_accepted(request, emitted, j) for j in range(count)]
            first += count + 1
        if rows:
            drafts = verified.draft_token_ids.long().clamp(min=0)  # below 0: a place kept for a draft, never accepted
            is_kept = logits.new_tensor(kept).bool() & (verified.draft_token_ids >= 0)
            tokens = drafts.where(is_kept, (drafts + 1) % logits.shape[-1])
            logits[drafts.new_tensor(rows), tokens] = CERTAIN

    def _after_sampling(self, _module: Any, _arguments: tuple[Any, ...], output: Any) -> None:
        """Note where drafts begin: vLLM drafts before it counts the new tokens in.

        The rejection sampler calls the plain one for its last rows; what it says itself comes last and counts.
        """
        counts = (output.sampled_token_ids >= 0).sum(dim=-1).tolist()
        self._next = [
            (request, emitted + count) for (request, emitted), count in zip(self._places(), counts, strict=False)
        ]

    def _note(self, logits: Tensor, tops: Tensor, offsets: Tensor | None = None) -> None:
        """Take the place of RaggedModelDrafter's: the confidences that go with the fates, not the random weights'."""
        drafter = self._runner.drafter
        if drafter.book is None:
            return
        if drafter.book is not self._book:
            self._book, self._column = drafter.book, 0
        rows = range(len(tops)) if drafter._drafting is None else drafter._drafting
        sure = [
            self._fates.confidence(request, begin, self._column) for request, begin in (self._next[row] for row in rows)
        ]
        drafter.book.note(drafter._drafting, logits.new_tensor(sure).float())
        self._column += 1

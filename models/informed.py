"""Upper bounds for policies that do not see the future: all is known but how the coins will fall. Simulation only.

Called by models/evaluate.py. True costs, and of every request and token the true chance of acceptance, as
env/simulator_draft.py draws it; only whether a token is accepted is not known before it is verified.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from ..env.acceptance import Floats, Ints
from ..env.scenario import Scenario
from ..env.simulator_state import LEVEL, RESIDUAL
from ..env.spaces import Lengths
from ..env.world import CELLS, VALUES
from .hindsight import CutAfterwards

Knows = Literal["drafts", "rounds", "lengths"]
GRID = np.linspace(-3.6, 3.6, 25)  # scores of a token, standard deviations


class Informed(CutAfterwards):
    """What is known of the coming drafts, and when.

    drafts: the chance of every token that could be drafted, beforehand; more than any policy can know.
    rounds: the chance of a token once it is drafted, as a perfect confidence would tell; after every round the whole
    batch decides who goes on.
    lengths: what a request is like; lengths are fixed before anything is drafted.
    """

    def __init__(self, scenario: Scenario, seed: int, knows: Knows) -> None:
        super().__init__(scenario, seed)
        self._knows = knows
        world = self.simulator.world
        profile = int(self.simulator.state.engines["profile"][0])
        numbers = world.profiles[profile]
        self._request_share, self._token_share = float(numbers["request_share"]), float(numbers["token_share"])
        self._carry, self._fresh = float(numbers["carry"]), float(numbers["fresh"])
        self._hidden = float(numbers["hidden"])
        self._move = _bells(self._carry * GRID, np.full(len(GRID), self._fresh))  # from one token to the next
        self._coming = np.zeros(0)  # (n, positions, len(GRID)) chances of those who draft, by score of the token
        self._values = world.tables[profile, VALUES].astype(np.float64)  # (positions, CELLS) logits of acceptance
        self._base = self._residual = np.zeros(0)  # of those who draft: mean score, and shift of the chances' logits

    def choose(self, drafting: Ints, longest: Ints) -> tuple[Lengths, Lengths]:
        """Return the lengths that bring most tokens net of what their time is worth."""
        state = self.simulator.state
        running = int(state.engines[0]["running"])
        self._base = self._request_share * (state.traits[0, LEVEL, drafting] + state.engines[0]["hardness_now"])
        self._residual = self._hidden * state.traits[0, RESIDUAL, drafting].astype(np.float64)
        scores = (state.cells[0, drafting] + 0.5) * (8.0 / CELLS) - 4.0  # (n, positions) of what was drafted
        chances = self._chances(scores[:, :, None])[:, :, 0]
        if self._knows != "drafts":
            grid = self._base[:, None] + self._token_share * GRID
            self._coming = self._chances(np.broadcast_to(grid[:, None], (len(grid), self.k_max, len(GRID))))
        survival = (
            self._outlook(0, np.full(len(drafting), np.nan)) if self._knows == "lengths" else chances.cumprod(axis=1)
        )
        survival[np.arange(self.k_max) >= longest[:, None]] = 0.0  # the answer's end
        if self._knows == "rounds":
            kept, drawn = self._by_rounds(running, survival, scores)
        else:
            kept = drawn = self._ranked(running, survival)
        gained = float(survival[np.arange(self.k_max) < kept[:, None]].sum())
        self.note(running, gained, kept, drawn)
        return kept, drawn

    def _chances(self, scores: Floats) -> Floats:
        """Return (n, positions, m) chances of tokens with these scores; the n requests are those that draft."""
        cells = np.clip(((scores + 4.0) * (CELLS / 8.0)).astype(np.int64), 0, CELLS - 1)
        values = self._values[np.arange(self.k_max)[:, None], cells]
        chances: Floats = 1.0 / (1.0 + np.exp(-(values + self._residual[:, None, None])))
        return chances

    def _outlook(self, first: int, chain: Floats) -> Floats:
        """Return (n, positions from `first` on) survival expected of drafts that go on.

        :param chain: (n,) of each draft's last token, NaN where it has none yet
        """
        begins = np.isnan(chain)
        mean = np.where(begins, 0.0, self._carry * chain)
        weights = _bells(mean, np.where(begins, 1.0, self._fresh))
        survival = np.empty((len(chain), self.k_max - first))
        for j in range(first, self.k_max):
            weights = weights * self._coming[:, j]
            survival[:, j - first] = weights.sum(axis=1)
            weights = weights @ self._move
        return survival

    def _ranked(self, running: int, survival: Floats) -> Lengths:
        """Return the best lengths where survivals are known: the likeliest tokens, as many and as deep as they pay."""
        order = np.argsort(-survival, axis=None, kind="stable")
        likeliest, place = survival.reshape(-1)[order], order % self.k_max
        within = (place < np.arange(self.k_max + 1)[:, None]) & (likeliest > 0.0)  # (deepest, tokens by survival)
        nothing = np.zeros((self.k_max + 1, 1))
        kept = np.hstack([nothing, within.cumsum(axis=1)])
        gained = np.hstack([nothing, (within * likeliest).cumsum(axis=1)])
        requests = np.hstack([nothing, (within & (place == 0)).cumsum(axis=1)])
        rounds = np.where(kept > 0.0, np.arange(self.k_max + 1)[:, None], 0)
        worth = self.worth(running, gained, kept, self.cost.draft_s(requests, rounds, kept))
        deepest, last = np.unravel_index(int(np.argmax(worth)), worth.shape)
        chosen = order[:last][within[deepest, :last]]
        return np.bincount(chosen // self.k_max, minlength=len(survival))

    def _by_rounds(self, running: int, survival: Floats, scores: Floats) -> tuple[Lengths, Lengths]:
        """Return what is kept and what is drafted, decided round after round on what the rounds before have shown."""
        n = len(survival)
        kept, drawn = np.zeros(n, np.int64), np.zeros(n, np.int64)
        goes, alive, chain = np.ones(n, np.bool_), np.ones(n), np.full(n, np.nan)
        rate = self.rate(running)
        row_price = rate * self.cost.row_s(running, float(n))
        for j in range(self.k_max):
            goes &= survival[:, j] > 0.0
            prices = [self.cost.round_prices_s(place) for place in range(j, self.k_max)]
            rounds, tokens = rate * np.array(prices).T
            ahead = alive[:, None] * self._outlook(j, chain) - row_price - tokens
            value = np.maximum.accumulate(ahead.cumsum(axis=1), axis=1)  # of going on for so many rounds at most
            value = np.where(goes[:, None], np.maximum(value, 0.0), 0.0)
            total = value.sum(axis=0) - rounds.cumsum()
            if total.max() <= 0.0:
                break
            goes &= value[:, int(np.argmax(total))] > 0.0
            drawn[goes] = j + 1
            alive, chain = survival[:, j], (scores[:, j] - self._base) / self._token_share
            goes &= alive > row_price
            kept[goes] = j + 1
        return kept, drawn


def _bells(mean: Floats, deviation: Floats) -> Floats:
    """Return (n, len(GRID)) weights of normal distributions on the grid, which sum to 1."""
    weights = np.exp(-0.5 * np.square((GRID - mean[:, None]) / deviation[:, None]))
    shares: Floats = weights / weights.sum(axis=1, keepdims=True)
    return shares

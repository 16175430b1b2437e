"""GP-LCB as the FASER paper names it: a Gaussian process over batch size, length and acceptance, lowest bound wins.

Source: arXiv 2604.20503, of which only digests were to be had: "per-request length, chosen online with GP-LCB from
current batch size, SM allocation and past acceptance". Objective, kernel and periods are ours: seconds per emitted
token (log), a Matern kernel with a length scale for each input, a decision every few steps. scikit-learn does the work.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from ...engine_adapter.arrays import Floats
from ...env.estimate.engine_state import EngineState
from ...env.spaces import Action, Capabilities
from ..policies.baselines import uniform
from ..policies.policy import PolicyError
from .watch import StepWatch

BLOCK_STEPS, SETTLING_STEPS = 8, 2
LEVELS = 8  # acceptance, rounded for asking
MEMORY_BLOCKS = 128
FIT_BLOCKS = 32  # blocks between two fits of the kernel
OPTIMISM = 1.5  # standard deviations, sqrt(beta)


class GaussianProcessBound:
    """Each request gets the length with the lowest bound at its own acceptance; new lengths every BLOCK_STEPS."""

    name = "gplcb"

    def __init__(self, capabilities: Capabilities) -> None:
        try:
            from sklearn.gaussian_process import GaussianProcessRegressor  # type: ignore[import-untyped, unused-ignore]
            from sklearn.gaussian_process.kernels import (  # type: ignore[import-untyped, unused-ignore]
                ConstantKernel,
                Matern,
                WhiteKernel,
            )
        except ImportError:
            raise PolicyError("policy 'gplcb' needs scikit-learn: pip install 'faser-vllm[train]'") from None
        kernel = ConstantKernel(1.0, (1e-2, 1e2)) * Matern([2.0, 2.0, 0.5], (0.1, 30.0), nu=2.5)
        self._process = GaussianProcessRegressor(kernel + WhiteKernel(0.01, (1e-4, 1.0)), normalize_y=True)
        self._k_max = capabilities.k_max
        self._points: deque[tuple[float, float, float]] = deque(maxlen=MEMORY_BLOCKS)
        self._costs: deque[float] = deque(maxlen=MEMORY_BLOCKS)
        self._blocks, self._steps = 0, 0
        self._sums = np.zeros(5)  # tokens, seconds, steps, log2 of the batch, drafts per request
        self._best = np.full(LEVELS + 1, min(2, self._k_max), np.int64)  # by level of acceptance
        self._watch = StepWatch()

    def act(self, state: EngineState) -> Action:
        """Return lengths by each request's acceptance."""
        seen = self._watch.look(state)
        decoding = state.decoding()
        requests = int(np.count_nonzero(decoding))
        if self._k_max == 0:
            return uniform(state.requests.size, 0, "nothing to speculate on")
        if requests == 0:
            length = int(self._best[level(float(state.population.mean[0]))])
            return uniform(state.requests.size, length, "nobody decodes: as for the usual request")
        if seen is not None:
            self._steps += 1
            if self._steps > SETTLING_STEPS and seen.is_pure:
                batch = len(seen.drafted)
                self._sums += (seen.emitted, seen.elapsed_s, 1.0, np.log2(batch), float(seen.drafted.mean()))
            if self._steps >= BLOCK_STEPS:
                self._end_block(state, requests)
        lengths = np.full(state.requests.size, int(self._best[level(float(state.population.mean[0]))]), np.int64)
        lengths[decoding] = self._best[np.rint(state.acceptance()[decoding, 0] * LEVELS).astype(np.int64)]
        return Action(
            lengths, int(lengths.max()), reason=f"{requests} decoding: bound known from {self._blocks} blocks"
        )

    def learn(self, batch: float, length: float, acceptance: float, cost_s: float) -> None:
        """Take in a block: mean batch size and length, acceptance 0..1, seconds per token of one request."""
        self._points.append((np.log2(batch), length, acceptance))
        self._costs.append(float(np.log(cost_s)))
        self._blocks += 1
        if self._blocks % FIT_BLOCKS == 1 and self._blocks > 1:
            self._fit()
        elif self._blocks > FIT_BLOCKS:
            self._process.set_params(optimizer=None, kernel=self._process.kernel_)
            self._process.fit(np.array(self._points), np.array(self._costs))

    def choose(self, batch: int) -> None:
        """Set the length for each level of acceptance at this batch size."""
        if self._blocks <= FIT_BLOCKS:  # the first lengths are tried in turn
            self._best[:] = self._blocks % (self._k_max + 1)
            return
        lengths, levels = np.meshgrid(np.arange(self._k_max + 1.0), np.arange(LEVELS + 1.0) / LEVELS)
        points = np.stack([np.full(lengths.size, np.log2(batch)), lengths.ravel(), levels.ravel()], axis=1)
        mean, deviation = self._process.predict(points, return_std=True)
        bound: Floats = (mean - OPTIMISM * deviation).reshape(lengths.shape)
        self._best = bound.argmin(axis=1)

    def _end_block(self, state: EngineState, requests: int) -> None:
        tokens, elapsed_s, steps, log_batch, drafts = self._sums.tolist()
        self._sums, self._steps = np.zeros(5), 0
        if steps > 0.0 and tokens > 0.0:
            batch = 2.0 ** (log_batch / steps)
            acceptance = float(state.acceptance()[state.decoding(), 0].mean())
            self.learn(batch, drafts / steps, acceptance, elapsed_s * batch / tokens)
        self.choose(requests)

    def _fit(self) -> None:
        import warnings

        self._process.set_params(optimizer="fmin_l_bfgs_b")
        with warnings.catch_warnings():  # a length scale at its bound is an answer too
            warnings.simplefilter("ignore")
            self._process.fit(np.array(self._points), np.array(self._costs))


def level(acceptance: float) -> int:
    """Return the nearest of the levels at which the process is asked."""
    return min(max(round(acceptance * LEVELS), 0), LEVELS)

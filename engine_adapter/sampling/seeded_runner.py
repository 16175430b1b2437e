"""Draws by seed on the V1 runner: a request with a seed says the same under any drafts, and without.

A part of FASER's mixin. A step without such a request is vLLM's, and so are the other requests of a step that has one.
Where a draw fails, vLLM's own stands, and a line in the log names the requests.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ..operator_log import operator_log
from ..patches.sampling import SeededHooks, drawn_by, last_positions, seeds_of
from .noise import warm_up
from .seeded_step import GUARDED, SeededStep

logger = operator_log(__name__)


class SeededRunner(SeededHooks):
    """Mixin in front of CPUModelRunner or the V1 GPUModelRunner, whose `_guard` it uses."""

    _told: frozenset[str] = frozenset()  # requests of the batch whose failed draws have been logged

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Let vLLM set up its KV cache; then compile what draws."""
        super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        if self.device.type != "cpu":  # type: ignore[attr-defined]
            return
        try:
            warm_up()
        except Exception as error:
            logger.warning("FASER draws by seed slowly: %s", error)

    def draw_by_seed(self, sample: Callable[[Any, Any], Any], logits: Any, metadata: Any) -> Any:
        """Run the (rejection) sampler over `logits`, with the draws of requests that have a seed."""
        if not self.input_batch.generators:  # type: ignore[attr-defined]
            return sample(logits, metadata)
        failures = self._guard.faults[GUARDED]  # type: ignore[attr-defined]
        with ExitStack() as drawing:
            self._guard(GUARDED, lambda: self._begin(drawing, metadata))  # type: ignore[attr-defined]
            output = sample(logits, metadata)
        if self._guard.faults[GUARDED] > failures:  # type: ignore[attr-defined]
            self._tell()
        return output

    def _begin(self, drawing: ExitStack, metadata: Any) -> None:
        count = self.input_batch.num_reqs  # type: ignore[attr-defined]
        is_inside = self.discard_request_mask.np[:count].tolist()  # type: ignore[attr-defined]
        seeds = {row: seed for row, seed in seeds_of(self).items() if not is_inside[row]}
        if not seeds:
            return
        tests = [0] * count if metadata is None else list(metadata.num_draft_tokens)
        rows = sorted(seeds)
        lasts = last_positions(self, rows)
        firsts = lasts + 1 - lasts.new_tensor([tests[row] for row in rows])
        signed = [(seeds[row] + (1 << 63)) % (1 << 64) - (1 << 63) for row in rows]
        draws_all = len(rows) + sum(is_inside) == count
        step = SeededStep(
            rows, lasts.new_tensor(signed), firsts, tests, self._guard, draws_all  # type: ignore[attr-defined]
        )  # fmt: skip
        drawing.enter_context(drawn_by(self, step))

    def _tell(self) -> None:
        """Log once for each request that its answer may differ the next time."""
        batch = self.input_batch  # type: ignore[attr-defined]
        failed = frozenset(batch.req_ids[row] for row in batch.generators)
        if names := sorted(failed - self._told):
            logger.warning(
                "FASER could not draw by seed: what %s say from here on is vLLM's draw, and may differ the next time",
                ", ".join(names),
            )
        self._told = failed | (self._told & frozenset(batch.req_ids))

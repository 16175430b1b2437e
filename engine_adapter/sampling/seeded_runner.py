"""Draws by seed on the V1 runner: a request with a seed says the same under any drafts, and without.

A part of FASER's mixin. On a CPU requests without a seed get one from FASER, as their draws are then cheaper beside
drafts: vLLM's rejection sampler makes noise over the whole vocabulary for every draft. Where a draw fails, vLLM's own
stands, and a line in the log names the requests.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ..operator_log import operator_log
from ..patches.sampling import SeededHooks, drawn_by, has_drawn_drafts, last_positions, rows_at_random, seeds_of
from ..settings import load_settings
from .noise import warm_up
from .seeded_step import GUARDED, SeededStep, Stream

logger = operator_log(__name__)


class SeededRunner(SeededHooks):
    """Mixin in front of CPUModelRunner or the V1 GPUModelRunner, whose `_guard` it uses."""

    _seeds_all = False  # requests without a seed get one, in steps that are the cheaper for it
    _given: dict[str, int] | None = None  # the seeds that requests of the batch got
    _told: frozenset[str] = frozenset()  # requests of the batch whose failed draws have been logged

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Let vLLM set up its KV cache; then compile what draws."""
        super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        if self.device.type != "cpu":  # type: ignore[attr-defined]
            return
        try:
            self._seeds_all = warm_up() and load_settings().seeds_all
        except Exception as error:
            logger.warning("FASER draws by seed slowly: %s", error)

    def draw_by_seed(self, sample: Callable[[Any, Any], Any], logits: Any, metadata: Any) -> Any:
        """Run the (rejection) sampler over `logits`, with the draws of requests that have a seed."""
        batch = self.input_batch  # type: ignore[attr-defined]
        # Where nothing is compared vLLM's draws cost no more, and of drafts drawn at random vLLM's rule keeps more.
        gives_seeds = self._seeds_all and metadata is not None and not has_drawn_drafts(self)
        if not batch.generators and not (gives_seeds and batch.random_reqs):
            return sample(logits, metadata)
        failures = self._guard.faults[GUARDED]  # type: ignore[attr-defined]
        with ExitStack() as drawing:
            self._guard(GUARDED, lambda: self._begin(drawing, metadata, gives_seeds))  # type: ignore[attr-defined]
            output = sample(logits, metadata)
        if self._guard.faults[GUARDED] > failures:  # type: ignore[attr-defined]
            self._tell()
        return output

    def _begin(self, drawing: ExitStack, metadata: Any, gives_seeds: bool) -> None:
        count = self.input_batch.num_reqs  # type: ignore[attr-defined]
        is_inside = self.discard_request_mask.np[:count].tolist()  # type: ignore[attr-defined]
        streams = [stream for stream in self._streams(gives_seeds) if not is_inside[stream.row]]
        if all(stream.is_greedy for stream in streams):
            return
        draws_all = len(streams) + sum(is_inside) == count
        if not draws_all:  # vLLM compares for greedy rows anyway
            streams = [stream for stream in streams if not stream.is_greedy]
        tests = [0] * count if metadata is None else list(metadata.num_draft_tokens)
        rows = [stream.row for stream in streams]
        lasts = last_positions(self, rows)
        firsts = lasts + 1 - lasts.new_tensor([tests[row] for row in rows])
        step = SeededStep(streams, firsts, tests, self._guard, draws_all)  # type: ignore[attr-defined]
        drawing.enter_context(drawn_by(self, step))

    def _streams(self, gives_seeds: bool) -> list[Stream]:
        """Return how each row of the batch is drawn; rows that are left to vLLM are missing."""
        asked, streams = seeds_of(self), []
        given = self._seeds_given(asked) if gives_seeds else {}
        for row, is_at_random in enumerate(rows_at_random(self)):
            if not is_at_random:
                streams.append(Stream(row, is_greedy=True))
            elif row in asked:
                streams.append(Stream(row, _signed(asked[row])))
            elif row in given:
                streams.append(Stream(row, given[row]))
        return streams

    def _seeds_given(self, asked: dict[int, int]) -> dict[int, int]:
        """Return a seed for each row that has none; a request keeps the one that it got."""
        import torch

        batch, known, kept, given = self.input_batch, self._given or {}, {}, {}  # type: ignore[attr-defined]
        for row, name in enumerate(batch.req_ids[: batch.num_reqs]):
            if row not in asked and name in batch.random_reqs:
                if (seed := known.get(name)) is None:
                    # The engine's own generator: as repeatable as vLLM's draws, and alike on every rank.
                    seed = int(torch.randint(-(1 << 63), (1 << 63) - 1, ()))
                kept[name] = given[row] = seed
        self._given = kept
        return given

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


def _signed(seed: int) -> int:
    """Return a seed as the signed number that torch takes."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)

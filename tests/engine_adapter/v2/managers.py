"""vLLM's own manager of adaptive verification over random batches, with and without FASER's numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

LONGEST, SLOTS, MOST_TOKENS = 5, 32, 256
VERIFY_MS = [(1, 4.0), (8, 4.0), (16, 6.0), (32, 8.0), (64, 17.0), (256, 70.0)]
DRAFT_MS = [(1, 1.0), (SLOTS, 1.5)]


@dataclass
class Batch:
    """Requests by the slots they lie in, the drafts of each, and confidences of all slots now and a step ago."""

    slots: list[int]
    lengths: list[int]
    fresh: list[list[float]]
    stale: list[list[float]]


class Manager:
    """One of vLLM's managers."""

    def __init__(self, _: dict[str, Any]) -> None:
        import numpy as np
        import torch
        import vllm.v1.worker.cpu.shm  # noqa: F401 - streams that a CPU has
        from vllm.v1.worker.gpu.spec_decode.adaptive_verification import (
            AdaptiveVerificationManager,
            build_cost_tables_from_curves,
        )

        states = SimpleNamespace(
            num_speculative_steps=LONGEST, device=torch.device("cpu"), max_num_reqs=SLOTS,
            max_num_batched_tokens=MOST_TOKENS, req_id_to_index={str(slot): slot for slot in range(SLOTS)},
            num_computed_tokens_np=np.full(SLOTS, 50), prefill_len=SimpleNamespace(np=np.full(SLOTS, 40)),
        )  # fmt: skip
        self._manager = AdaptiveVerificationManager(states, torch.zeros(SLOTS + 1, dtype=torch.int32), 1, 1 << 20)
        self._manager.cost_tables = build_cost_tables_from_curves(DRAFT_MS, VERIFY_MS, SLOTS, MOST_TOKENS)
        self._steered: Any = None

    def ask_with(self, slowness: float, weight: float) -> Any:
        """Let FASER ask this one; return how a step's order is made, by its batch."""
        from faser.engine_adapter.runner.adaptive_verification import SteeredVerification

        runner = SimpleNamespace(adaptive_verification=self._manager)
        self._steered = SteeredVerification.of(runner, False, lambda name, hook: hook())
        return lambda batch: order_of(batch, slowness, weight)

    def random_batch(self, chance: random.Random) -> Batch:
        """Return requests in random slots with falling or rising confidence."""
        requests = chance.randint(1, SLOTS)

        def confidences() -> list[list[float]]:
            return [[chance.uniform(0.05, 1.0) for _ in range(LONGEST)] for _ in range(SLOTS)]

        slots = chance.sample(range(SLOTS), requests)
        lengths = sorted((chance.randint(0, LONGEST) for _ in slots), key=lambda length: length == 0)
        return Batch(slots, lengths, confidences(), confidences())

    def admit(self, batch: Batch, order: Any = None) -> tuple[int, list[int]]:
        """Return the tokens of the step, and how many drafts of each request are among them."""
        import numpy as np
        import torch

        manager = self._manager
        manager._confidence_probs.copy_(torch.tensor(batch.fresh))
        manager._stale_confidences[manager._stale_idx].np[:] = batch.stale
        names = [str(slot) for slot in batch.slots]
        if order is not None:
            self._steered.begin(order(batch))
        drafts = {name: [0] * length for name, length in zip(names, batch.lengths, strict=True) if length}
        tokens = {name: 1 + length for name, length in zip(names, batch.lengths, strict=True)}
        total = manager.get_num_tokens(tokens, drafts)
        lengths = np.array(batch.lengths, dtype=np.int32)
        manager.compact_batch(lengths, lengths + 1, np.arange(len(names) + 1))
        manager.reallocate_drafts(names, torch.tensor(batch.slots))
        admitted = manager._batch_draft_capacity[: len(names)].tolist()
        if order is not None:
            assert self._steered.admitted.values() == admitted
        return total, admitted


def order_of(batch: Batch, slowness: float, weight: float) -> Any:
    """Return an order with vLLM's own costs, which include drafting, and a weight for every other request."""
    import numpy as np

    from faser.engine_adapter.steering.orders import StepOrder

    requests = len(batch.slots)
    xs, ys = zip(*DRAFT_MS, strict=True)
    draft_ms = ys[int(np.searchsorted(xs, requests))]
    rows = [row for row, _ in VERIFY_MS]
    seconds = [(draft_ms + spent * (slowness if row > 16 else 1.0)) / 1e3 for row, spent in VERIFY_MS]
    weights = {str(slot): weight if place % 2 == 0 else 1.0 for place, slot in enumerate(batch.slots)}
    mean = sum(weights.values()) / requests
    return StepOrder({}, costs=(rows, seconds), weights={name: one / mean for name, one in weights.items()})

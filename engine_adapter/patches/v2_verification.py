"""Private names of vLLM's adaptive verification: the numbers by which it decides how many drafts are verified.

vLLM's manager chooses, from confidences of the step before, how many drafts a step verifies, and its device then gives
these places to the likeliest prefixes. Both stay vLLM's own code; what it reads can be exchanged for one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from .speculators.rounds import on_device

if TYPE_CHECKING:
    from torch import Tensor

    from ..arrays import Floats

Numbers = AbstractContextManager[Any, Any]  # what is read is exchanged while it is open


def around_verification(
    runner: Any,
    choosing: Callable[[], Numbers],
    placing: Callable[[], Numbers],
    note: Callable[[list[str], Tensor], None],
) -> VerificationNumbers | None:
    """Open `choosing` and `placing` around the two choices of adaptive verification; None for an engine without it.

    :param note: told the requests of a batch and how many drafts of each are verified, on the device
    """
    manager = runner.adaptive_verification
    if manager is None:
        return None
    choose, place = manager.get_num_tokens, manager.reallocate_drafts

    def get_num_tokens(*args: Any) -> int:
        with choosing():
            return int(choose(*args))

    def reallocate_drafts(names: list[str], slots: Tensor) -> Any:
        with placing():
            placed = place(names, slots)
        note(names, manager._batch_draft_capacity[: len(names)])
        return placed

    manager.get_num_tokens, manager.reallocate_drafts = get_num_tokens, reallocate_drafts
    return VerificationNumbers(manager)


class VerificationNumbers:
    """What vLLM's manager reads: costs by tokens, and confidences by request slot and position (0.32).

    Survival is a running product, so a request's first confidence carries its weight.
    """

    def __init__(self, manager: Any) -> None:
        import torch

        self._manager, self._device = manager, manager.req_states.device
        self._told: tuple[list[int], list[float]] | None = None  # whose tables these are
        self._tables: Any = None
        with torch.inference_mode(False):  # like vLLM's own, or its ranking would be compiled a second time
            self._weighted = torch.empty_like(manager._confidence_probs)

    @contextmanager
    def costs(self, rows: list[int], seconds: list[float]) -> Iterator[None]:
        """Let a step of so many tokens cost so many seconds, drafting included."""
        manager, own = self._manager, self._manager.cost_tables
        if (rows, seconds) != self._told:  # a lease holds for many steps
            self._tables, self._told = self._build(rows, seconds), (rows, seconds)
        manager.cost_tables = self._tables
        try:
            yield
        finally:
            manager.cost_tables = own

    def _build(self, rows: list[int], seconds: list[float]) -> tuple[Floats, Floats]:
        """Return costs by requests and by tokens in milliseconds; vLLM's own code knows what graphs pad."""
        from vllm.v1.worker.gpu.spec_decode.adaptive_verification import build_cost_tables_from_curves

        states = self._manager.req_states
        verify = [(count, spent * 1e3) for count, spent in zip(rows, seconds, strict=True)]
        tables: tuple[Floats, Floats] = build_cost_tables_from_curves(
            [(1, 0.0)], verify, states.max_num_reqs, states.max_num_batched_tokens, self._manager._cudagraph_limit
        )
        return tables

    @contextmanager
    def weights_on_host(self, weights: Mapping[str, float]) -> Iterator[None]:
        """Let these requests' tokens count for so much when their number is chosen; others' weight is 1."""
        manager = self._manager
        slots = [manager.req_states.req_id_to_index[name] for name in weights]
        seen = manager._stale_confidences[manager._stale_idx]
        own, weighted = seen.np, seen.np.copy()
        weighted[slots, 0] *= list(weights.values())
        seen.np = weighted
        try:
            yield
        finally:
            seen.np = own

    @contextmanager
    def weights_on_device(self, weights: Mapping[str, float]) -> Iterator[None]:
        """Let these requests' tokens count for so much when the device gives the places."""
        manager, own = self._manager, self._manager._confidence_probs
        slots = [manager.req_states.req_id_to_index[name] for name in weights]
        index = on_device(slots, self._device)
        factors = on_device(list(weights.values()), self._device, "float32")
        self._weighted.copy_(own)
        self._weighted[index, 0] *= factors
        manager._confidence_probs = self._weighted
        try:
            yield
        finally:
            manager._confidence_probs = own

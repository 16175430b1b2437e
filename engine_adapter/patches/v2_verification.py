"""Private names of vLLM's adaptive verification: the numbers by which it decides how many drafts are verified.

vLLM's manager chooses, from confidences of the step before, how many drafts a step verifies, and its device then gives
these places to the likeliest prefixes. Both stay vLLM's own code; what it reads can be exchanged for one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .v2_speculator import on_device

if TYPE_CHECKING:
    from torch import Tensor

    from ..arrays import Floats

Ask = Callable[[Callable[[], Any]], Any]  # runs what it is given, with other numbers


def around_verification(runner: Any, ask: Ask, note: Callable[[list[str], Tensor], None]) -> VerificationNumbers | None:
    """Route the two choices of adaptive verification through `ask`; None for an engine without it.

    :param note: told the requests of a batch and how many drafts of each are verified, on the device
    """
    manager = runner.adaptive_verification
    if manager is None:
        return None
    choose, place = manager.get_num_tokens, manager.reallocate_drafts

    def get_num_tokens(*args: Any) -> int:
        return int(ask(lambda: choose(*args)))

    def reallocate_drafts(names: list[str], slots: Tensor) -> Any:
        placed = ask(lambda: place(names, slots))
        note(names, manager._batch_draft_capacity[: len(names)])
        return placed

    manager.get_num_tokens, manager.reallocate_drafts = get_num_tokens, reallocate_drafts
    return VerificationNumbers(manager)


class VerificationNumbers:
    """What vLLM's manager reads: costs by tokens, and confidences by request slot and position (0.32)."""

    def __init__(self, manager: Any) -> None:
        self._manager, self._device = manager, manager.req_states.device

    @contextmanager
    def costs(self, rows: list[int], seconds: list[float]) -> Iterator[None]:
        """Let a step of so many tokens cost so many seconds, drafting included."""
        manager, own = self._manager, self._manager.cost_tables
        manager.cost_tables = self._tables(rows, seconds)
        try:
            yield
        finally:
            manager.cost_tables = own

    def _tables(self, rows: list[int], seconds: list[float]) -> tuple[Floats, Floats]:
        """Return costs by requests and by tokens in milliseconds; vLLM's own code knows what graphs pad."""
        from vllm.v1.worker.gpu.spec_decode.adaptive_verification import build_cost_tables_from_curves

        states = self._manager.req_states
        verify = [(count, spent * 1e3) for count, spent in zip(rows, seconds, strict=True)]
        tables: tuple[Floats, Floats] = build_cost_tables_from_curves(
            [(1, 0.0)], verify, states.max_num_reqs, states.max_num_batched_tokens, self._manager._cudagraph_limit
        )
        return tables

    @contextmanager
    def weights(self, weights: Mapping[str, float]) -> Iterator[None]:
        """Let the tokens of these requests count for so much more or less than others', whose weight is 1.

        Survival is a running product, so a request's first confidence carries its weight.
        """
        manager = self._manager
        slots = [manager.req_states.req_id_to_index[name] for name in weights]
        scale = list(weights.values())
        index, factors = on_device(slots, self._device, "int64"), on_device(scale, self._device, "float32")
        seen = manager._stale_confidences[manager._stale_idx]
        host, device = seen.np, manager._confidence_probs
        weighted_host, weighted = host.copy(), device.clone()
        weighted_host[slots, 0] *= scale
        weighted[index, 0] *= factors
        seen.np, manager._confidence_probs = weighted_host, weighted
        try:
            yield
        finally:
            seen.np, manager._confidence_probs = host, device

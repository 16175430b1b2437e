"""The drafter's confidence in each token on the V2 runner: noted on the device, told with the next step's report.

Nothing waits: the probabilities are copied to the host behind the drafting, and read when the next step's tokens are
there, which come later on the same stream. A copy that is late all the same is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..patches.v2_speculator import watch_logits

if TYPE_CHECKING:
    from torch import Tensor

Told = dict[str, tuple[float, ...]]  # request id -> probability of each drafted token's place


class LateConfidences:
    """The highest probability of each round, by request slot and position."""

    def __init__(self, speculator: Any, is_pinned: bool) -> None:
        import torch

        self._is_pinned = is_pinned
        self.is_on = watch_logits(speculator, self._note)
        if self.is_on:
            # The last row takes what graphs pad with, whose slot is -1.
            shape = (speculator.max_num_reqs + 1, speculator.num_speculative_steps)
            self._values = torch.zeros(shape, device=speculator.device)

    def _note(self, logits: Tensor, slots: Tensor, step: Tensor) -> None:
        wide = logits.float()
        self._values[slots, step] = (wide.amax(-1) - wide.logsumexp(-1)).exp()

    def take(self, slots: Tensor, names: list[str], lengths: list[int]) -> Drawn:
        """Start to copy what the drafting just noted, in batch order."""
        values = self._values[slots]
        if not self._is_pinned:
            return Drawn(values, None, names, lengths)
        import torch

        host = torch.empty(values.shape, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return Drawn(host, event, names, lengths)


class Drawn:
    """Confidences of one step's drafts, on their way to the host."""

    def __init__(self, values: Tensor, event: Any, names: list[str], lengths: list[int]) -> None:
        self._values, self._event, self._names, self._lengths = values, event, names, lengths

    def told(self) -> Told:
        """Return them by request, as many as each drafted; nothing while they are under way."""
        if self._event is not None and not self._event.query():
            return {}
        rows: list[list[float]] = self._values.tolist()
        return {
            name: tuple(row[:length])
            for name, length, row in zip(self._names, self._lengths, rows, strict=True)
            if length
        }

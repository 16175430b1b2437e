"""A small tensor on its way to the host, which nobody waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class HostCopy:
    """Copied behind the work that the stream has now; read when that is known to be done.

    :param is_pinned: whether the tensor lies on a device; on a CPU it is kept as it is, so give one of its own.
    """

    def __init__(self, tensor: Tensor, is_pinned: bool) -> None:
        self._host, self._event = tensor, None
        if is_pinned:
            import torch

            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._event = event

    def values(self) -> Any:
        """Return the numbers as nested lists; None while they are under way."""
        if self._event is not None and not self._event.query():
            return None
        return self._host.tolist()

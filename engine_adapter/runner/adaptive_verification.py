"""FASER's numbers in vLLM's adaptive verification: costs as the sidecar measured them, and what each request is worth.

vLLM chooses how many drafts a step verifies and its device gives the places to the likeliest prefixes, within the
lengths that FASER latched. A lease exchanges the costs and the weights that it reckons with; without one, and after
any failure, it is vLLM's own. Nothing waits for the device.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ..hook_guard import HookGuard
from ..host_copy import HostCopy
from ..patches.v2_verification import VerificationNumbers, around_verification
from ..steering.orders import StepOrder

if TYPE_CHECKING:
    from torch import Tensor


class SteeredVerification:
    """One engine's adaptive verification, asked with a lease's numbers."""

    def __init__(self, runner: Any, is_pinned: bool, guard: HookGuard) -> None:
        self._is_pinned, self._guard = is_pinned, guard
        self._order: StepOrder | None = None
        self.admitted: HostCopy | None = None  # drafts verified per batch row of the step under way; None: all
        self._numbers: VerificationNumbers | None = around_verification(
            runner, self._choosing, self._placing, self._note
        )

    @classmethod
    def of(cls, runner: Any, is_pinned: bool, guard: HookGuard) -> SteeredVerification | None:
        """Return it for a runner whose engine verifies adaptively, None for others."""
        made = cls(runner, is_pinned, guard)
        return None if made._numbers is None else made

    def begin(self, order: StepOrder | None) -> None:
        """Begin a step."""
        self._order, self.admitted = order, None

    def _choosing(self) -> ExitStack:
        """Exchange what the number of drafts is chosen by."""
        exchanged = ExitStack()
        self._guard("numbers of adaptive verification", lambda: self._exchange(exchanged, is_choice=True))
        return exchanged

    def _placing(self) -> ExitStack:
        """Exchange what the drafts are ranked by."""
        exchanged = ExitStack()
        self._guard("numbers of adaptive verification", lambda: self._exchange(exchanged, is_choice=False))
        return exchanged

    def _exchange(self, exchanged: ExitStack, is_choice: bool) -> None:
        order, numbers = self._order, self._numbers
        if order is None or numbers is None or order.costs is None:
            return
        if is_choice:
            exchanged.enter_context(numbers.costs(*order.costs))
        if order.weights:
            weigh = numbers.weights_on_host if is_choice else numbers.weights_on_device
            exchanged.enter_context(weigh(order.weights))

    def _note(self, names: list[str], admitted: Tensor) -> None:
        self._guard("admitted drafts", lambda: self._copy(admitted))

    def _copy(self, admitted: Tensor) -> None:
        self.admitted = HostCopy(admitted if self._is_pinned else admitted.clone(), self._is_pinned)

"""KV blocks on their way from rank to rank, in a process group of their own.

Only stage_rank.py calls it. Sends are posted and never waited for in the step that posts them; what is received is put
in its place in the order in which it was sent.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from .orders import BlockCopy

if TYPE_CHECKING:
    from torch import Tensor

TAGS: Final = 1 << 15


@dataclass(slots=True)
class Parcel:
    """What one rank sends another in one step."""

    work: Any
    data: Tensor  # (blocks of all copies, ...)
    copies: Sequence[BlockCopy]
    step: int


class KvTransfer:
    """One rank's end: `ranks` are the pipeline's, `me` is this one's place among them."""

    def __init__(self, group: Any, ranks: Sequence[int], me: int) -> None:
        self.sent_bytes = self.received_bytes = 0
        self.caches: Sequence[Tensor] = ()  # by layer, (blocks, ...)
        self._group, self._ranks, self._me = group, ranks, me
        self._tags: Counter[tuple[int, int]] = Counter()
        self._outgoing: deque[Parcel] = deque()
        self._incoming: deque[Parcel] = deque()

    def post(self, copies: Iterable[BlockCopy], step: int) -> None:
        """Send and expect what these copies say, as far as it concerns this rank."""
        pairs: dict[tuple[int, int], list[BlockCopy]] = defaultdict(list)
        for copy in copies:
            pairs[copy.source, copy.target].append(copy)
        ours = sorted(pair for pair in pairs if self._me in pair)
        for pair in [pair for pair in ours if pair[0] == self._me]:  # first, so that nobody waits in a circle
            self._send(pair, pairs[pair], step)
        for pair in [pair for pair in ours if pair[1] == self._me]:
            self._expect(pair, pairs[pair], step)

    def _send(self, pair: tuple[int, int], copies: list[BlockCopy], step: int) -> None:
        import torch
        import torch.distributed as dist

        data = torch.cat([self.caches[copy.layer][list(copy.blocks)] for copy in copies])
        work = dist.isend(data, self._ranks[pair[1]], group=self._group, tag=self._tag(pair))
        self._outgoing.append(Parcel(work, data, copies, step))
        self.sent_bytes += data.nbytes

    def _expect(self, pair: tuple[int, int], copies: list[BlockCopy], step: int) -> None:
        import torch
        import torch.distributed as dist

        rows, cache = sum(len(copy.blocks) for copy in copies), self.caches[copies[0].layer]
        data = torch.empty((rows, *cache.shape[1:]), dtype=cache.dtype)
        work = dist.irecv(data, self._ranks[pair[0]], group=self._group, tag=self._tag(pair))
        self._incoming.append(Parcel(work, data, copies, step))
        self.received_bytes += data.nbytes

    def _tag(self, pair: tuple[int, int]) -> int:
        self._tags[pair] += 1
        return self._tags[pair] % TAGS

    def settle(self, before: int) -> None:
        """Wait for what was posted before a step, and put it in its place."""
        while self._outgoing and self._outgoing[0].step < before:
            self._outgoing.popleft().work.wait()
        while self._incoming and self._incoming[0].step < before:
            self._place(self._incoming.popleft())

    def _place(self, parcel: Parcel) -> None:
        parcel.work.wait()
        start = 0
        for copy in parcel.copies:
            rows = parcel.data[start : start + len(copy.blocks)]
            self.caches[copy.layer][list(copy.blocks)] = rows
            start += len(copy.blocks)

    def receive_all(self) -> None:
        """Wait for everything that is on its way to this rank."""
        while self._incoming:
            self._place(self._incoming.popleft())

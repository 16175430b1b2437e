"""A CUDA device that is late: work that is launched runs later, and out of order wherever streams and events allow.

Within `with device:` every operation of torch on the device's tensors is queued on the current stream; its result is
allocated at once and holds rubbish until the work has run. Nothing runs by itself: asking whether an event has come
lets a random part of what may run go on, `drain` all of it. So what lacks an event reads rubbish under some seed.
Reading a tensor on the host shows the memory as it is; an operation for which torch would wait for the device raises
`HostWaited`.

Host memory is what is pinned or comes from numpy; all else that is made within the block lies on the device, and so
does what `own` was told of. Not modelled: memory that is used again once Python lets go of it, and the kernels of
Triton. `LateCuda` stands in for torch.cuda.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

RUBBISH = 77


class HostWaited(AssertionError):
    """The host read what the device has, and would have waited for it."""


@dataclass
class Work:
    run: Callable[[], Any]
    after: frozenset[int]
    is_done: bool = False


@dataclass(eq=False)
class LateStream:
    """In order in itself."""

    device: LateDevice
    tail: set[int] = field(default_factory=set)  # what must be done before its next work
    cuda_stream: int = 0

    def wait_event(self, event: LateEvent) -> None:
        self.tail |= event.after

    def wait_stream(self, other: LateStream) -> None:
        self.tail |= other.tail

    def synchronize(self) -> None:
        self.device.finish(self.tail)


class LateEvent:
    """Done once all that its stream had been given when it was recorded is done."""

    def __init__(self, device: LateDevice) -> None:
        self._device, self.after = device, set[int]()

    def record(self, stream: LateStream | None = None) -> None:
        self.after = set((stream or self._device.current).tail)

    def query(self) -> bool:
        self._device.go_on()
        return self._device.are_done(self.after)

    def synchronize(self) -> None:
        self._device.finish(self.after)

    def wait(self, stream: LateStream | None = None) -> None:
        (stream or self._device.current).wait_event(self)

    def elapsed_time(self, end: LateEvent) -> float:
        """Return milliseconds; CUDA refuses to say so before both are done."""
        if not self._device.are_done(self.after | end.after):
            raise HostWaited("elapsed_time of an event that is still to come")
        return 1.0


class LateDevice(TorchDispatchMode):
    """Queues what is launched; `seed` draws what runs when."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance = random.Random(seed)
        self._work: list[Work] = []
        self._host: set[int] = set()  # storages
        self._own: dict[int, torch.Tensor] = {}
        self._numbers = itertools.count(1)
        self.current = LateStream(self)
        self.captured: list[Callable[[], Any]] | None = None  # in place of the queue, while a graph is captured

    def own(self, *tensors: torch.Tensor) -> None:
        """Take tensors that were made outside to be the device's."""
        self._own |= {_memory(each): each for each in tensors}  # kept alive: an address names a storage only so long

    def stream(self) -> LateStream:
        return LateStream(self, cuda_stream=next(self._numbers))

    @contextmanager
    def on(self, stream: LateStream) -> Iterator[None]:
        """Launch on a stream within the block."""
        outer, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = outer

    # --- what is launched ---

    def launch(self, run: Callable[[], Any]) -> None:
        """Queue work on the current stream."""
        if self.captured is not None:
            self.captured.append(run)
            return
        self._work.append(Work(run, frozenset(self.current.tail)))
        self.current.tail = {len(self._work) - 1}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_pinned = bool(kwargs.pop("pin_memory", False))
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
        if func._schema.name in WAITING and any(map(self._is_device, tensors)):
            raise HostWaited(str(func))
        if func.is_view or not (any(map(self._is_device, tensors)) or (_makes(func) and not is_pinned)):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            self.launch(lambda: func(*args, **kwargs))
            return _mutated(func, args, kwargs)
        made = self._allocated(func, args, kwargs)
        self.launch(lambda: _fill(made, func(*args, **kwargs)))
        return made

    def _is_device(self, tensor: torch.Tensor) -> bool:
        return _memory(tensor) in self._own

    def _allocated(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result's memory, full of rubbish; its shape must not depend on what the device has."""

        def shape_only(each: Any) -> Any:
            return torch.empty_like(each, device="meta") if isinstance(each, torch.Tensor) else each

        if _makes(func):
            kwargs = kwargs | {"device": "meta"}
        try:
            shapes = func(*tree_map(shape_only, args), **tree_map(shape_only, kwargs))
        except Exception as error:
            raise HostWaited(f"the shape of {func} depends on what the device has: {error}") from None

        def real(each: Any) -> Any:
            if not isinstance(each, torch.Tensor):
                return each
            made = torch.empty_like(each, device="cpu").fill_(RUBBISH)
            self.own(made)
            return made

        return tree_map(real, shapes)

    # --- what runs ---

    def are_done(self, numbers: set[int] | frozenset[int]) -> bool:
        return all(self._work[number].is_done for number in numbers)

    def go_on(self, most: int | None = None) -> None:
        """Let a random part of what may run go on, in a random order."""
        steps = self._chance.randrange(4) if most is None else most
        for _ in range(steps):
            if not (ready := self._ready()):
                return
            self._run(self._chance.choice(ready))

    def _ready(self) -> list[Work]:
        return [work for work in self._work if not work.is_done and self.are_done(work.after)]

    def _run(self, work: Work) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            work.run()
        work.is_done = True

    def finish(self, numbers: set[int]) -> None:
        """Wait for so much work."""
        while not self.are_done(numbers):
            self.go_on(1)

    def drain(self) -> None:
        """Wait for all of it."""
        self.finish(set(range(len(self._work))))


WAITING = frozenset({"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::nonzero"})


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _makes(func: Any) -> bool:
    """Tell whether an operation makes a tensor out of numbers."""
    arguments = func._schema.arguments
    return any(each.name == "device" for each in arguments) and not any("Tensor" in str(a.type) for a in arguments)


def _mutated(func: Any, args: Any, kwargs: Any) -> Any:
    written = [
        kwargs[argument.name] if argument.name in kwargs else args[place]
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return written[0] if len(func._schema.returns) == 1 else tuple(written) or None


def _fill(made: Any, values: Any) -> None:
    for into, value in zip(tree_flatten(made)[0], tree_flatten(values)[0], strict=True):
        if isinstance(into, torch.Tensor):
            into.copy_(value)


class LateGraph:
    """A captured graph: its work goes to whichever stream replays it."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.work: list[Callable[[], Any]] = []

    def replay(self) -> None:
        for run in self.work:
            self._device.launch(run)


class LateCuda:
    """torch.cuda, as far as FASER uses it, on a late device."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._pools = itertools.count()

    def Event(self, **_: Any) -> LateEvent:
        return LateEvent(self._device)

    def Stream(self, device: Any = None) -> LateStream:
        return self._device.stream()

    def ExternalStream(self, handle: int, device: Any = None) -> LateStream:
        return self._device.stream()

    def CUDAGraph(self) -> LateGraph:
        return LateGraph(self._device)

    def graph_pool_handle(self) -> int:
        return next(self._pools)

    def current_stream(self, device: Any = None) -> LateStream:
        return self._device.current

    def synchronize(self, device: Any = None) -> None:
        self._device.drain()

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(multi_processor_count=132, major=9)

    def stream(self, stream: LateStream) -> Any:
        return self._device.on(stream)

    @contextmanager
    def graph(self, graph: LateGraph, pool: object = None, stream: LateStream | None = None) -> Iterator[None]:
        self._device.captured = graph.work
        try:
            with self._device.on(stream or self._device.current):
                yield
        finally:
            self._device.captured = None

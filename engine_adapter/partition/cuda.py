"""Streams and green contexts as shares of one CUDA device, used from one host thread.

Green contexts are cut through the driver (cuda.bindings, which PyTorch's CUDA builds bring): one split, the rest of
which is the target's, so both are disjoint and their true sizes are known. torch's own GreenContext.create hides the
size it got, and two of them may overlap (pytorch/pytorch#195378, before SMPartition of 2.15). A kernel captured into a
CUDA graph keeps the context of the stream it was captured on, so graphs are captured per partition
(cuda_graphs.py). Tensors that cross phases must be static buffers: the caching allocator knows nothing of the
other stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .shares import PHASES, STREAMS, UNSPLIT, Grain, Partition, PartitionError, Phase, Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaPartition(Partition):
    """Two streams and the contexts they belong to; none if unsplit."""

    cuda: Any  # torch.cuda, or a fake of it
    device: int
    streams: dict[Phase, Any] = field(default_factory=dict)
    driver: Any = None
    contexts: list[Any] = field(default_factory=list)
    events: dict[str, Any] = field(default_factory=dict)

    def stream(self, phase: Phase) -> Any:
        """Return the phase's stream; the caller's own if unsplit."""
        return self.streams.get(phase) or self.cuda.current_stream(self.device)

    @contextmanager
    def side_by_side(self) -> Iterator[None]:
        """Fork both streams off the current one, and join them to it."""
        home = self.cuda.current_stream(self.device)
        if self.streams:
            self.events["fork"].record(home)
        for phase in self.streams:
            self.streams[phase].wait_event(self.events["fork"])
        try:
            yield
        finally:
            for phase in self.streams:
                self.events[phase].record(self.streams[phase])
                home.wait_event(self.events[phase])

    @contextmanager
    def on(self, phase: Phase) -> Iterator[None]:
        """Launch on the phase's stream."""
        with self.cuda.stream(self.stream(phase)):
            yield

    def close(self) -> None:
        """Destroy the green contexts and their streams."""
        if not self.contexts:
            return
        self.cuda.synchronize(self.device)
        for phase in self.streams:
            self.driver.cuStreamDestroy(self.streams[phase].cuda_stream)
        for context in self.contexts:
            self.driver.cuGreenCtxDestroy(context)
        self.contexts.clear()
        self.streams.clear()


class CudaDevice:
    """One CUDA device. `cuda` and `driver` are torch.cuda and cuda.bindings.driver; tests put fakes there."""

    def __init__(self, index: int = 0, *, cuda: Any = None, driver: Any = None) -> None:
        if cuda is None:
            from torch import cuda
        self._cuda = cuda
        self._driver = driver
        self.index = index
        facts = cuda.get_device_properties(index)
        step, least = granularity(facts.major)
        self.grain = Grain("SMs", facts.multi_processor_count, step, least)

    def open(self, name: str, asked: Sizes) -> CudaPartition:
        """Return the partition; raise PartitionError without green contexts or where the driver refuses."""
        common = {"name": name, "unit": self.grain.unit, "asked": asked, "cuda": self._cuda, "device": self.index}
        if name == UNSPLIT:
            return CudaPartition(allocated=asked, **common)
        events = {each: self._cuda.Event() for each in ("fork", *PHASES)}
        if name == STREAMS:
            streams: dict[Phase, Any] = {phase: self._cuda.Stream(self.index) for phase in PHASES}
            return CudaPartition(allocated=asked, streams=streams, events=events, **common)
        driver = self._driver = self._driver or load_driver()
        self._cuda.synchronize(self.index)  # the primary context must exist
        contexts: list[Any] = []
        try:
            parts = _cut(driver, self.index, asked.draft)
            handles = [_context_with_stream(driver, self.index, part, contexts) for part in parts]
        except (PartitionError, RuntimeError) as error:  # the bindings raise the latter where there is no driver
            for context in contexts:
                driver.cuGreenCtxDestroy(context)
            raise PartitionError(f"no green contexts: {error}") from None
        streams = {
            phase: self._cuda.ExternalStream(int(handle), device=self.index)
            for phase, handle in zip(PHASES, handles, strict=True)
        }
        allocated = Sizes(*(int(part.sm.smCount) for part in parts))
        return CudaPartition(
            allocated=allocated, streams=streams, driver=driver, contexts=contexts, events=events, **common
        )


def granularity(major: int) -> tuple[int, int]:
    """Return (step, least) SMs of a green context by compute capability, as CUDA's driver manual has it."""
    if major >= 9:
        return 8, 8
    return (2, 4) if major == 8 else (2, 2) if major == 7 else (1, 1)


def load_driver() -> Any:
    """Return cuda.bindings.driver if it knows green contexts."""
    try:
        from cuda.bindings import driver
    except Exception as error:  # a broken installation raises anything
        raise PartitionError(f"no green contexts: cuda.bindings cannot be imported ({error})") from None
    if not hasattr(driver, "cuGreenCtxStreamCreate"):
        raise PartitionError("no green contexts: this cuda.bindings is older than CUDA 12.5")
    return driver


def _cut(driver: Any, index: int, draft: int) -> tuple[Any, Any]:
    """Return the SM resources of drafter and target: `draft` SMs or a little more, and all the others."""
    device = _checked(driver, "find the device", driver.cuDeviceGet(index))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = _checked(driver, "list its SMs", driver.cuDeviceGetDevResource(device, kind))
    groups, count, rest = _checked(driver, "split its SMs", driver.cuDevSmResourceSplitByCount(1, whole, 0, draft))
    if int(count) != 1 or int(rest.sm.smCount) < 1:
        raise PartitionError(f"the driver cannot split {draft} SMs off {int(whole.sm.smCount)}")
    return groups[0], rest


def _context_with_stream(driver: Any, index: int, part: Any, contexts: list[Any]) -> Any:
    """Return a stream of a new green context over the part; the context is added to `contexts`."""
    device = _checked(driver, "find the device", driver.cuDeviceGet(index))
    described = _checked(driver, "describe a share", driver.cuDevResourceGenerateDesc([part], 1))
    flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = _checked(driver, "create a green context", driver.cuGreenCtxCreate(described, device, flags))
    contexts.append(context)
    own = driver.CUstream_flags.CU_STREAM_NON_BLOCKING  # the driver takes no other for a green context
    return _checked(driver, "create its stream", driver.cuGreenCtxStreamCreate(context, own, 0))


def _checked(driver: Any, doing: str, answer: tuple[Any, ...]) -> Any:
    """Return what a driver call answered behind its status: the value, or the values as a tuple."""
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise PartitionError(f"the driver could not {doing} ({getattr(status, 'name', status)})")
    return values[0] if len(values) == 1 else tuple(values)

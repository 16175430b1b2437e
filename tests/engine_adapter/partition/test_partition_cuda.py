"""Streams, green contexts and their graphs, without a GPU: a fake torch.cuda that knows what must precede what."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from faser.engine_adapter.partition.cuda import CudaDevice, CudaPartition, granularity
from faser.engine_adapter.partition.cuda_graphs import WARM_UPS, PartitionGraphs
from faser.engine_adapter.partition.shares import (
    READY_MADE,
    STREAMS,
    UNSPLIT,
    PartitionError,
    Sizes,
    make_ready,
)


class Stream:
    """In order in itself; `known` are the operations that must have ended before its next one begins."""

    def __init__(self, cuda: Cuda, handle: int = 0) -> None:
        self.cuda_stream = handle
        self._cuda = cuda
        self.known: frozenset[str] = frozenset()

    def wait_event(self, event: Event) -> None:
        self.known |= event.known

    def wait_stream(self, other: Stream) -> None:
        self.known |= other.known


class Event:
    def __init__(self) -> None:
        self.known: frozenset[str] = frozenset()

    def record(self, stream: Stream) -> None:
        self.known = stream.known


class Graph:
    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.captured_on: Stream | None = None
        self.names: list[str] = []
        self.pool: object = None

    def replay(self) -> None:
        for name in self.names:
            self._cuda.launch(name)


class Cuda:
    """torch.cuda, as far as partitions use it."""

    def __init__(self, sms: int = 132, major: int = 9) -> None:
        self.properties = SimpleNamespace(multi_processor_count=sms, major=major)
        self.before: dict[str, frozenset[str]] = {}  # operation -> those that ended before it began
        self.streams: dict[str, Stream] = {}
        self._current = Stream(self)
        self._capturing: Graph | None = None
        self._pools = itertools.count()
        self.Event = Event

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return self.properties

    def current_stream(self, device: int) -> Stream:
        return self._current

    def synchronize(self, device: int) -> None:
        pass

    def Stream(self, device: int) -> Stream:
        return Stream(self)

    def ExternalStream(self, handle: int, device: int) -> Stream:
        return Stream(self, handle)

    def CUDAGraph(self) -> Graph:
        return Graph(self)

    def graph_pool_handle(self) -> int:
        return next(self._pools)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        outer, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = outer

    @contextmanager
    def graph(self, graph: Graph, pool: object, stream: Stream) -> Iterator[None]:
        graph.captured_on, graph.pool, self._capturing = stream, pool, graph
        with self.stream(stream):
            yield
        self._capturing = None

    def launch(self, name: str) -> None:
        if self._capturing is not None:
            self._capturing.names.append(name)
            return
        self.before[name] = self._current.known
        self._current.known |= {name}
        self.streams[name] = self._current


class Driver:
    """cuda.bindings.driver, as far as partitions use it: rounds SM counts up to whole groups."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM="sm")
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self, sms: int = 132, step: int = 8, failing: str = "") -> None:
        self.sms, self.step, self.failing = sms, step, failing
        self.alive: set[int] = set()
        self.streams: dict[int, int] = {}  # stream -> SMs
        self._numbers = itertools.count(100)

    def _status(self, name: str) -> Any:
        return SimpleNamespace(name="CUDA_ERROR_NOT_SUPPORTED") if name == self.failing else 0

    def cuDeviceGet(self, index: int) -> tuple[Any, int]:
        return self._status("cuDeviceGet"), index

    def cuDeviceGetDevResource(self, device: int, kind: str) -> tuple[Any, Any]:
        assert kind == "sm"
        return self._status("cuDeviceGetDevResource"), share(self.sms)

    def cuDevSmResourceSplitByCount(self, groups: int, whole: Any, flags: int, least: int) -> tuple[Any, ...]:
        size = -(-least // self.step) * self.step
        return self._status("cuDevSmResourceSplitByCount"), [share(size)], groups, share(whole.sm.smCount - size)

    def cuDevResourceGenerateDesc(self, resources: list[Any], count: int) -> tuple[Any, Any]:
        return self._status("cuDevResourceGenerateDesc"), resources[0].sm.smCount

    def cuGreenCtxCreate(self, described: int, device: int, flags: int) -> tuple[Any, Any]:
        context = SimpleNamespace(number=next(self._numbers), sms=described)
        if self._status("cuGreenCtxCreate") == 0:
            self.alive.add(context.number)
        return self._status("cuGreenCtxCreate"), context

    def cuGreenCtxStreamCreate(self, context: Any, flags: int, priority: int) -> tuple[Any, int]:
        assert flags == 1
        stream = next(self._numbers)
        self.streams[stream] = context.sms
        return self._status("cuGreenCtxStreamCreate"), stream

    def cuStreamDestroy(self, stream: int) -> tuple[int]:
        del self.streams[stream]
        return (0,)

    def cuGreenCtxDestroy(self, context: Any) -> tuple[int]:
        self.alive.remove(context.number)
        return (0,)


def share(sms: int) -> Any:
    return SimpleNamespace(sm=SimpleNamespace(smCount=sms))


def opened(cuda: Cuda, name: str, driver: Driver | None = None) -> CudaPartition:
    partitions = make_ready(CudaDevice(cuda=cuda, driver=driver or Driver()), [name])
    assert partitions.refused == ()
    partition = partitions.named(name)
    assert isinstance(partition, CudaPartition)
    return partition


def run(cuda: Cuda, partition: CudaPartition) -> None:
    cuda.launch("before")
    with partition.side_by_side():
        with partition.on("draft"):
            cuda.launch("draft")
        with partition.on("verify"):
            cuda.launch("verify")
    cuda.launch("behind")


@pytest.mark.parametrize("name", [each for each in READY_MADE if each != UNSPLIT])
def test_phases_are_side_by_side_between_what_precedes_and_follows_them(name: str) -> None:
    cuda = Cuda()
    run(cuda, opened(cuda, name))
    assert cuda.before["draft"] == {"before"}
    assert cuda.before["verify"] == {"before"}
    assert cuda.before["behind"] == {"before", "draft", "verify"}


def test_unsplit_runs_one_after_the_other_on_the_callers_stream() -> None:
    cuda = Cuda()
    run(cuda, opened(cuda, UNSPLIT))
    assert cuda.before["verify"] == {"before", "draft"}
    assert len(set(map(id, cuda.streams.values()))) == 1


def test_a_second_step_waits_for_the_first() -> None:
    cuda = Cuda()
    partition = opened(cuda, STREAMS)
    run(cuda, partition)
    with partition.side_by_side(), partition.on("draft"):
        cuda.launch("next draft")
    assert cuda.before["next draft"] == {"before", "draft", "verify", "behind"}


def test_a_step_that_fails_is_joined_all_the_same() -> None:
    cuda = Cuda()
    partition = opened(cuda, STREAMS)

    def step() -> None:
        with partition.side_by_side(), partition.on("draft"):
            cuda.launch("draft")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step()
    cuda.launch("behind")
    assert "draft" in cuda.before["behind"]


def test_green_contexts_are_disjoint_and_use_every_sm() -> None:
    cuda, driver = Cuda(), Driver()
    partition = opened(cuda, "1:3", driver)
    assert partition.asked == partition.allocated == Sizes(32, 100)
    assert {name: driver.streams[partition.stream(name).cuda_stream] for name in ("draft", "verify")} == {
        "draft": 32,
        "verify": 100,
    }


def test_what_the_driver_really_gave_is_told_beside_what_was_asked() -> None:
    partition = opened(Cuda(), "1:3", Driver(step=20))
    assert (partition.asked, partition.allocated) == (Sizes(32, 100), Sizes(40, 92))
    assert str(partition) == "1:3: asked 32+100, allocated 40+92 SMs (draft+verify)"


CALLS = ("cuDeviceGet", "cuDeviceGetDevResource", "cuDevSmResourceSplitByCount", "cuDevResourceGenerateDesc",
         "cuGreenCtxCreate", "cuGreenCtxStreamCreate")  # fmt: skip


@pytest.mark.parametrize("failing", CALLS)
def test_without_green_contexts_it_is_one_line_unsplit_and_nothing_left_behind(failing: str) -> None:
    driver = Driver(failing=failing)
    partitions = make_ready(CudaDevice(cuda=Cuda(), driver=driver), [STREAMS, "1:3"])
    assert partitions.names == [UNSPLIT, STREAMS]
    (line,) = partitions.refused
    assert "CUDA_ERROR_NOT_SUPPORTED" in line
    assert line.endswith("; unsplit instead")
    assert driver.alive == set()


def test_bindings_without_a_driver_are_one_line_and_unsplit() -> None:
    class Nothing(Driver):
        def cuDeviceGet(self, index: int) -> tuple[Any, int]:
            raise RuntimeError("Failed to dlopen libcuda.so.1")

    partitions = make_ready(CudaDevice(cuda=Cuda(), driver=Nothing()), ["1:1"])
    assert partitions.names == [UNSPLIT]
    assert "Failed to dlopen libcuda.so.1" in partitions.refused[0]


def test_without_bindings_it_is_one_line_and_unsplit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    partitions = make_ready(CudaDevice(cuda=Cuda()), [STREAMS, "1:1"])
    assert partitions.names == [UNSPLIT, STREAMS]
    assert "cuda.bindings cannot be imported" in partitions.refused[0]


def test_a_driver_that_gives_everything_to_the_drafter_is_refused() -> None:
    partitions = make_ready(CudaDevice(cuda=Cuda(sms=16), driver=Driver(sms=16, step=16)), ["1:1"])
    assert partitions.names == [UNSPLIT]
    assert "cannot split 8 SMs off 16" in partitions.refused[0]


def test_closing_destroys_contexts_and_streams_once() -> None:
    cuda, driver = Cuda(), Driver()
    partitions = make_ready(CudaDevice(cuda=cuda, driver=driver))
    assert len(driver.alive) == 2 * 5
    partitions.close()
    partitions.close()
    assert driver.alive == set()
    assert driver.streams == {}


@pytest.mark.parametrize(("major", "expected"), [(6, (1, 1)), (7, (2, 2)), (8, (2, 4)), (9, (8, 8)), (10, (8, 8))])
def test_steps_are_those_of_the_architecture(major: int, expected: tuple[int, int]) -> None:
    assert granularity(major) == expected
    assert (CudaDevice(cuda=Cuda(major=major)).grain.step, CudaDevice(cuda=Cuda(major=major)).grain.least) == expected


def captured(cuda: Cuda, names: list[str]) -> tuple[PartitionGraphs, list[CudaPartition]]:
    graphs = PartitionGraphs(cuda)
    ready = [opened(cuda, name) for name in names]
    for partition in ready:
        graphs.capture(partition, "draft", 8, lambda: cuda.launch("draft"))
        graphs.capture(partition, "verify", 8, lambda: cuda.launch("verify"))
    return graphs, ready


def test_graphs_are_captured_on_their_partitions_own_stream_after_warming_it_up() -> None:
    cuda = Cuda()
    runs: list[Stream] = []
    partition = opened(cuda, "1:1")
    graphs = PartitionGraphs(cuda)
    graphs.capture(partition, "draft", 8, lambda: runs.append(cuda.current_stream(0)))
    assert runs == [partition.stream("draft")] * (WARM_UPS + 1)
    (graph,) = graphs._graphs.values()
    assert graph.captured_on is partition.stream("draft")


def test_unsplit_graphs_are_captured_on_one_stream_and_replayed_on_the_callers() -> None:
    cuda = Cuda()
    graphs, (partition,) = captured(cuda, [UNSPLIT])
    graphs.capture(partition, "draft", 16, lambda: cuda.launch("draft"))
    streams = {graph.captured_on for (_, phase, _), graph in graphs._graphs.items() if phase == "draft"}
    assert len(streams) == 1
    assert cuda.current_stream(0) not in streams
    graphs.replay(partition, "draft", 16)
    assert cuda.streams["draft"] is cuda.current_stream(0)


def test_a_replay_runs_on_the_partitions_stream() -> None:
    cuda = Cuda()
    graphs, (streams, split) = captured(cuda, [STREAMS, "1:1"])
    for partition in (streams, split):
        cuda.before.clear()
        with partition.side_by_side():
            graphs.replay(partition, "draft", 8)
            graphs.replay(partition, "verify", 8)
        assert cuda.streams["draft"] is partition.stream("draft")
        assert cuda.streams["verify"] is partition.stream("verify")


def test_only_graphs_of_one_phase_share_memory() -> None:
    graphs, _ = captured(Cuda(), [UNSPLIT, STREAMS, "1:1"])
    pools = {(name, phase): graph.pool for (name, phase, _), graph in graphs._graphs.items()}
    drafts = {pool for (_, phase), pool in pools.items() if phase == "draft"}
    verifies = {pool for (_, phase), pool in pools.items() if phase == "verify"}
    assert len(drafts) == len(verifies) == 1
    assert drafts != verifies


def test_a_graph_that_was_never_captured_is_named() -> None:
    graphs, (partition,) = captured(Cuda(), ["1:1"])
    with pytest.raises(PartitionError, match="no graph of draft for shape 16 was captured for 1:1"):
        graphs.replay(partition, "draft", 16)
    graphs.clear()
    with pytest.raises(PartitionError, match="shape 8"):
        graphs.replay(partition, "draft", 8)

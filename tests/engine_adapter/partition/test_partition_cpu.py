"""Cores as shares, with a real child process of several threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

from faser.engine_adapter.partition import cpu as partition_cpu
from faser.engine_adapter.partition.cpu import CpuPartition
from faser.engine_adapter.partition.shares import STREAMS, UNSPLIT, Grain, PartitionError, Sizes, make_ready

# Three threads beside the main one, all alive until standard input ends.
CHILD = """
import sys, threading
done = threading.Event()
threads = [threading.Thread(target=done.wait) for _ in range(3)]
for thread in threads: thread.start()
print("up", flush=True)
sys.stdin.read()
done.set()
"""
USABLE = sorted(os.sched_getaffinity(0))
needs_two_cores = pytest.mark.skipif(len(USABLE) < 2, reason="one core cannot be shared out")


class CpuDevice:
    """The cores this process may use, or those of them that are named."""

    def __init__(self, cores: Sequence[int] | None = None) -> None:
        usable = os.sched_getaffinity(0)
        asked = usable if cores is None else set(cores)
        self.missing = sorted(asked - usable)
        self.cores = sorted(asked & usable) or sorted(usable)
        self.grain = Grain("cores", len(self.cores))

    def open(self, name: str, asked: Sizes) -> CpuPartition:
        """Return the partition: the target's cores come first, the drafter's last."""
        if name != UNSPLIT and self.missing:
            raise PartitionError(f"cores {self.missing} are not among those this process may use, {self.cores}")
        if name in (UNSPLIT, STREAMS):
            draft = verify = tuple(self.cores)
        else:
            verify, draft = tuple(self.cores[: asked.verify]), tuple(self.cores[asked.verify :])
        return CpuPartition(
            name=name, unit=self.grain.unit, asked=asked, allocated=Sizes(len(draft), len(verify)),
            draft_cores=draft, verify_cores=verify,
        )  # fmt: skip


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    yield process
    process.communicate("")


def affinities(process: int) -> list[set[int]]:
    return [os.sched_getaffinity(int(thread)) for thread in os.listdir(f"/proc/{process}/task")]


def halves() -> CpuPartition:
    partition = make_ready(CpuDevice(), ["1:1"]).named("1:1")
    assert isinstance(partition, CpuPartition)
    return partition


@needs_two_cores
def test_both_phases_have_cores_of_their_own_and_together_all() -> None:
    partition = halves()
    draft, verify = set(partition.cores("draft")), set(partition.cores("verify"))
    assert draft | verify == set(USABLE)
    assert not draft & verify
    assert (len(draft), len(verify)) == (partition.allocated.draft, partition.allocated.verify)
    assert min(verify) < min(draft)


@needs_two_cores
@pytest.mark.parametrize("phase", ["draft", "verify"])
def test_every_thread_of_a_process_moves_to_its_share(child: subprocess.Popen[str], phase: str) -> None:
    partition = halves()
    assert len(affinities(child.pid)) == 4
    count = partition.confine(phase, child.pid)  # type: ignore[arg-type]
    cores = set(partition.cores(phase))  # type: ignore[arg-type]
    assert count == len(cores)
    assert affinities(child.pid) == [cores] * 4
    assert os.sched_getaffinity(0) == set(USABLE)  # nobody else moves


@needs_two_cores
def test_a_process_takes_its_share_and_its_thread_count_before_anything_runs() -> None:
    partition = halves()
    code = (
        "import os; from faser.engine_adapter.partition.shares import Sizes;"
        "from faser.engine_adapter.partition.cpu import CpuPartition;"
        f"partition = {partition!r}; partition.confine('draft');"
        "import torch; print(sorted(os.sched_getaffinity(0)), torch.get_num_threads())"
    )
    environment = os.environ | partition.environment("draft")
    child = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert child.stdout.strip() == f"{list(partition.cores('draft'))} {partition.allocated.draft}"


@needs_two_cores
def test_the_environment_binds_the_target_to_its_cores() -> None:
    partition = CpuPartition(**{name: getattr(halves(), name) for name in ("name", "unit", "asked", "allocated")},
                             draft_cores=(6, 7), verify_cores=(0, 2, 4))  # fmt: skip
    assert partition.environment("verify") == {"OMP_NUM_THREADS": "3", "VLLM_CPU_OMP_THREADS_BIND": "0,2,4"}


@pytest.mark.parametrize("name", [UNSPLIT, STREAMS])
def test_what_is_not_split_has_all_cores_in_both_phases(name: str) -> None:
    partition = make_ready(CpuDevice()).named(name)
    assert partition.name == name
    assert isinstance(partition, CpuPartition)
    assert partition.cores("draft") == partition.cores("verify") == tuple(USABLE)


def test_fewer_cores_than_asked_are_one_line_and_unsplit() -> None:
    missing = USABLE[-1] + 1
    partitions = make_ready(CpuDevice([*USABLE, missing]), [STREAMS, "1:1"])
    assert partitions.names == [UNSPLIT]
    assert len(partitions.refused) == 2
    assert f"cores [{missing}] are not among those this process may use" in partitions.refused[0]
    assert partitions.named("1:1").allocated.verify == len(USABLE)


def test_a_core_alone_is_not_split() -> None:
    partitions = make_ready(CpuDevice([USABLE[0]]), ["1:1"])
    assert partitions.names == [UNSPLIT]
    assert partitions.refused == (
        "partition '1:1': leaves the drafter 0.5 of 1 cores; expected at least 1; unsplit instead",
    )


def test_a_process_that_is_gone_is_one_line(child: subprocess.Popen[str]) -> None:
    child.communicate("")
    with pytest.raises(PartitionError, match=f"process {child.pid} cannot be moved"):
        make_ready(CpuDevice()).ready[0].confine("draft", child.pid)  # type: ignore[attr-defined]


def test_cores_that_the_system_does_not_give_are_noticed(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = make_ready(CpuDevice()).ready[0]
    assert isinstance(partition, CpuPartition)
    monkeypatch.setattr(partition_cpu.os, "sched_getaffinity", lambda pid: {999})
    with pytest.raises(PartitionError, match=r"was given cores \[999\]"):
        partition.confine("draft", child.pid)

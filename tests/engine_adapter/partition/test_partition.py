"""Partitions above their back ends: ratios of whole units, and what becomes of those that cannot be had."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine_adapter.partition.shares import (
    READY_MADE,
    STREAMS,
    UNSPLIT,
    Grain,
    Partition,
    PartitionError,
    PartitionRatio,
    Sizes,
    make_ready,
)

HOPPER = Grain("SMs", 132, 8, 8)


class Machine:
    """A device that gives what it is asked for, but for the names it is short of."""

    def __init__(self, grain: Grain, short_of: tuple[str, ...] = ()) -> None:
        self.grain = grain
        self.short_of = short_of
        self.closed: list[str] = []

    def open(self, name: str, asked: Sizes) -> Partition:
        if name in self.short_of:
            raise PartitionError("sold out")
        machine = self

        class Recorded(Partition):
            def close(self) -> None:
                machine.closed.append(self.name)

        return Recorded(name=name, unit=self.grain.unit, asked=asked, allocated=asked)


@pytest.mark.parametrize(
    ("name", "grain", "expected"),
    [
        ("1:15", HOPPER, Sizes(8, 124)),
        ("1:7", HOPPER, Sizes(16, 116)),
        ("1:3", HOPPER, Sizes(32, 100)),
        ("3:5", HOPPER, Sizes(48, 84)),
        ("1:1", HOPPER, Sizes(64, 68)),
        ("1:1", Grain("cores", 2), Sizes(1, 1)),
        ("1:1", Grain("cores", 5), Sizes(3, 2)),
        ("1:3", Grain("cores", 16), Sizes(4, 12)),
        ("15:1", Grain("SMs", 128, 8, 8), Sizes(120, 8)),
        ("14:1", HOPPER, Sizes(120, 12)),  # the nearest step, 128, would leave the target 4
    ],
)
def test_a_ratio_is_rounded_to_what_the_device_can_be_cut_into(name: str, grain: Grain, expected: Sizes) -> None:
    assert PartitionRatio.parse(name).sizes(grain) == expected


@given(
    draft=st.integers(1, 64), verify=st.integers(1, 64), total=st.integers(1, 200), grain=st.sampled_from([1, 2, 4, 8])
)
def test_sizes_are_whole_steps_that_use_everything_and_starve_nobody(
    draft: int, verify: int, total: int, grain: int
) -> None:
    try:
        sizes = PartitionRatio(draft, verify).sizes(Grain("SMs", total, grain, grain))
    except PartitionError:
        share = min(draft, verify) / (draft + verify) * total
        assert share < grain or total < 2 * grain
        return
    assert sizes.draft + sizes.verify == total
    assert sizes.draft % grain == 0
    assert min(sizes.draft, sizes.verify) >= grain
    assert abs(sizes.draft - draft / (draft + verify) * total) <= grain


@pytest.mark.parametrize(
    "name", ["", "1", "1:", ":1", "0:1", "1:0", "1:65", "-1:2", "1:2:3", "a:b", "1.5:2", "²:1", "Unsplit"]
)
def test_what_is_no_ratio_is_refused_with_an_example(name: str) -> None:
    with pytest.raises(PartitionError, match="such as 1:3"):
        PartitionRatio.parse(name)


def test_a_share_below_the_least_is_refused_by_its_owner() -> None:
    with pytest.raises(PartitionError, match=r"leaves the drafter 0\.5 of 2 cores; expected at least 1"):
        PartitionRatio(1, 3).sizes(Grain("cores", 2))
    with pytest.raises(PartitionError, match=r"leaves the target 7\.3 of 132 SMs; expected at least 8"):
        PartitionRatio(17, 1).sizes(HOPPER)


def test_unsplit_comes_first_whatever_is_asked_for() -> None:
    assert make_ready(Machine(HOPPER), ["1:1", STREAMS]).names == [UNSPLIT, "1:1", STREAMS]
    assert make_ready(Machine(HOPPER)).names == list(READY_MADE)
    assert make_ready(Machine(HOPPER), []).names == [UNSPLIT]


def test_what_cannot_be_had_leaves_one_line_and_unsplit(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm"):
        partitions = make_ready(Machine(Grain("cores", 2), short_of=(STREAMS,)), [STREAMS, "1:3", "half", "1:1"])
    assert partitions.names == [UNSPLIT, "1:1"]
    assert [line.split(":")[0] for line in partitions.refused] == [
        "partition 'streams'",
        "partition '1",
        "partition 'half'",
    ]
    assert all(line.endswith("; unsplit instead") and "\n" not in line for line in partitions.refused)
    assert [record.getMessage() for record in caplog.records] == [f"FASER: {line}" for line in partitions.refused]
    for name in (STREAMS, "1:3", "half", "never heard of"):
        assert partitions.named(name).name == UNSPLIT
    assert partitions.named("1:1").name == "1:1"


def test_ratios_that_come_out_the_same_are_had_once() -> None:
    machine = Machine(Grain("cores", 4))
    partitions = make_ready(machine, ["1:3", "2:6", "1:2"])
    assert partitions.names == [UNSPLIT, "1:3"]
    assert machine.closed == ["2:6", "1:2"]
    assert all("comes out as 1:3 does, 1+3 cores" in line for line in partitions.refused)


@pytest.mark.parametrize(
    ("index", "name"), [(0, UNSPLIT), (1, STREAMS), (2, "1:1"), (3, UNSPLIT), (-1, UNSPLIT), (None, UNSPLIT)]
)
def test_an_index_of_an_action_set_means_a_partition_or_unsplit(index: int | None, name: str) -> None:
    assert make_ready(Machine(HOPPER), [STREAMS, "1:1"]).at(index).name == name


def test_it_tells_what_was_asked_and_what_was_given() -> None:
    partition = Partition(name="1:3", unit="SMs", asked=Sizes(33, 99), allocated=Sizes(40, 92))
    assert str(partition) == "1:3: asked 33+99, allocated 40+92 SMs (draft+verify)"
    assert partition.is_concurrent
    assert partition.is_disjoint


def test_what_is_ready_is_logged_once_with_both_sizes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="vllm"):
        make_ready(Machine(HOPPER), ["1:3"])
    (line,) = (record.getMessage() for record in caplog.records)
    assert line == (
        "FASER partitions: unsplit: asked 132+132, allocated 132+132 SMs (draft+verify); "
        "1:3: asked 32+100, allocated 32+100 SMs (draft+verify)"
    )


def test_streams_are_side_by_side_and_share_everything() -> None:
    partitions = make_ready(Machine(HOPPER), [STREAMS])
    assert [(each.is_concurrent, each.is_disjoint) for each in partitions.ready] == [(False, False), (True, False)]
    assert partitions.named(STREAMS).allocated == Sizes(132, 132)


def test_closing_closes_all() -> None:
    machine = Machine(HOPPER)
    make_ready(machine, ["1:1"]).close()
    assert machine.closed == [UNSPLIT, "1:1"]

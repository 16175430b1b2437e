"""What the command refuses, what a replica takes, who gets which cores."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from faser.controller.errors import EngineError, FaserError, UsageError
from faser.controller.fleet.cores import CoreClaim
from faser.controller.fleet.options import FleetOptions, cores_each, replica_range, require_ours, size_rule
from faser.controller.fleet.placement import Placement, Room, place, replicas_in, require_room
from faser.controller.fleet.sizing import SizeRule


def test_options_become_a_rule() -> None:
    options = FleetOptions("m", replicas="0:4", requests_per_replica=6.0, idle_s=60.0)
    assert size_rule(options) == SizeRule(0, 4, 6.0, 60.0)
    assert replica_range("3") == (3, 3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (FleetOptions("m", replicas="3:1"), "--replicas 3:1; expected LEAST:MOST with LEAST not above MOST; pass 1:3"),
        (FleetOptions("m", replicas="many"), "--replicas 'many'; expected LEAST:MOST such as 1:4, or one number"),
        (FleetOptions("m", replicas="1:2:3"), "--replicas '1:2:3'; expected LEAST:MOST such as 1:4, or one number"),
        (FleetOptions("m", replicas="-1:2"), "--replicas '-1:2'; expected LEAST:MOST such as 1:4, or one number"),
        (FleetOptions("m", replicas="٣"), "--replicas '٣'; expected LEAST:MOST such as 1:4, or one number"),
        (FleetOptions("m", replicas="0"), "--replicas 0; expected 1 to 4096 at most"),
        (FleetOptions("m", replicas="1:9999"), "--replicas 1:9999; expected 1 to 4096 at most"),
        (FleetOptions("m", requests_per_replica=0.0), "--requests-per-replica 0; expected a number above 0"),
        (FleetOptions("m", requests_per_replica=float("nan")), "--requests-per-replica nan; expected a number above 0"),
        (FleetOptions("m", idle_s=-1.0), "--idle-s -1; expected seconds, 0 or more"),
        (FleetOptions("m", idle_s=float("inf")), "--idle-s inf; expected seconds, 0 or more"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(options: FleetOptions, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        size_rule(options)
    assert str(refused.value) == said


def test_a_replica_has_an_even_share_of_the_cores_unless_told_otherwise() -> None:
    assert cores_each(FleetOptions("m"), 2, 8, is_cpu=True) == 4
    assert cores_each(FleetOptions("m"), 4, 2, is_cpu=True) == 1
    assert cores_each(FleetOptions("m"), 2, 8, is_cpu=False) == 1
    assert cores_each(FleetOptions("m", cores_per_replica=3), 2, 8, is_cpu=True) == 3
    with pytest.raises(UsageError, match="--cores-per-replica 0; expected 1 or more"):
        cores_each(FleetOptions("m", cores_per_replica=0), 2, 8, is_cpu=True)


@pytest.mark.parametrize(
    "argument",
    [
        "--scheduler-cls",
        "--worker_cls=x",
        "--data-parallel-size=2",
        "-dp",
        "--uds",
        "--ssl-keyfile",
        "--ssl-certfile=c",
    ],
)
def test_what_vllm_must_not_be_told_is_refused(argument: str) -> None:
    with pytest.raises(UsageError, match=r" with faser fleet; expected .*; drop it"):
        require_ours(["--max-num-seqs", "8", argument])
    require_ours(["--max-num-seqs", "8", "--served-model-name", "uds"])


# --- placement ---

TWO_RANKS = ["--tensor-parallel-size", "2"]


@pytest.mark.parametrize(
    ("arguments", "is_cpu", "expected"),
    [
        ([], True, Placement(2)),
        (["--pipeline-parallel-size", "2"], True, Placement(2, ranks=2)),
        ([], False, Placement(2, gpus=1)),
        (TWO_RANKS, False, Placement(2, ranks=2, is_spread=True, arguments=("--distributed-executor-backend", "ray"))),
        (["-tp=2", "-pp", "4"], False,
         Placement(2, ranks=8, is_spread=True, arguments=("--distributed-executor-backend", "ray"))),
        ([*TWO_RANKS, "--distributed-executor-backend", "ray"], False, Placement(2, ranks=2, is_spread=True)),
        ([*TWO_RANKS, "--distributed-executor-backend=mp"], False, Placement(2, gpus=2, ranks=2)),
        (["--tensor-parallel-size", "many"], False, Placement(2, gpus=1)),
    ],
)  # fmt: skip
def test_ranks_are_vllms_own_ray_actors_on_gpus_unless_told_otherwise(
    arguments: list[str], is_cpu: bool, expected: Placement
) -> None:
    assert place(arguments, is_cpu, cores=2) == expected


def test_room_is_counted_by_machine_except_for_ranks_that_spread() -> None:
    rooms = [Room(8, 3), Room(1, 3)]
    assert replicas_in(rooms, Placement(3), is_cpu=True) == 2
    assert replicas_in(rooms, Placement(1, gpus=1), is_cpu=False) == 4  # the second has one core
    assert replicas_in(rooms, Placement(1, gpus=2, ranks=2), is_cpu=False) == 2
    assert replicas_in(rooms, Placement(1, ranks=2, is_spread=True), is_cpu=False) == 3
    with pytest.raises(UsageError) as refused:
        require_room(2, 3, Placement(1).needs(is_cpu=True))
    assert str(refused.value) == (
        "room for 2 replicas of 1 core each on this machine; expected room for 3, as --replicas says; "
        "pass fewer, or give each less"
    )
    assert Placement(1, ranks=4).needs(is_cpu=False) == "4 GPUs"


# --- cores ---


def test_cores_belong_to_one_engine_each_until_given_back(tmp_path: Path) -> None:
    first = CoreClaim(2, [3, 5, 7], tmp_path)
    assert first.cores == [3, 5]
    with pytest.raises(EngineError, match="1 of 3 cores are free; expected 2 for an engine; stop another fleet"):
        CoreClaim(2, [3, 5, 7], tmp_path)
    second = CoreClaim(1, [3, 5, 7], tmp_path)
    assert second.cores == [7], "what a refused claim had taken is free again"
    first.close()
    assert CoreClaim(2, [3, 5, 7], tmp_path).cores == [3, 5]


def test_cores_of_a_killed_owner_are_free(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from faser.controller.fleet.cores import CoreClaim\n"
        "claim = CoreClaim(1, [3], Path(sys.argv[1])); print('claimed', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-P", "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd="/") as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"claimed\n"
        with pytest.raises(FaserError, match="0 of 1 cores are free"):
            CoreClaim(1, [3], tmp_path)
        os.kill(owner.pid, 9)
        owner.wait()
    end_s = time.monotonic() + 5.0
    while True:
        try:
            CoreClaim(1, [3], tmp_path).close()
            break
        except EngineError:
            assert time.monotonic() < end_s
            time.sleep(0.01)

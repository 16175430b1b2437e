"""The wire: round trips, golden frames, and everything that must be dropped."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faser.engine_adapter import protocol as wire

ROW = wire.RequestRow(7, 4, 3, 2, 3, 1, 1, 2, 120, False, (0.5, 0.25))
EVENT = wire.RequestEvent("arrival", 7, 1.5, 100, "chatcmpl-1", 0)
RECORD = wire.StepRecord(
    "boot", 1, 2, 3.0, 0.02, 0.001, 0.015, 0.001, 0.003, 0.0, 0.00002, 1, 0, 0, 1, 3, 0.25, None, None, 9, 4, 0, 0,
    [EVENT], [ROW], 24, 3, 5, 15, 0.0005, 0.5, 1, 2, 1, 4, 6, (3,), (7, 10),
)  # fmt: skip
ACTION = wire.ActionSet("boot", 9, 5, 34, 4.0, 0, [7], [3], price=0.001, prune=wire.Prune(15, 0.2))
STOP = wire.StopRule([1.0, 0.5], [0.0], [0.25], [0.5])

# A change of these bytes is a change of the protocol: bump VERSION and say so in the changelog.
GOLDEN_ACTION = (
    "fa02dc0013a3616374a4626f6f74090522cb40100000000000000091079103cb3f50624dd2f1a9fcc0c0920fcb3fc999999999999a"
    "a6616374697665c0c0c0c0c0"
)
GOLDEN_STOP = GOLDEN_ACTION.removesuffix("c0c0c0c0c0") + (
    "9492cb3ff0000000000000cb3fe000000000000091cb000000000000000091cb3fd000000000000091cb3fe0000000000000c0c0c0c0"
)
GOLDEN_RECORD = (
    "fa02dc002ba473746570a4626f6f740102cb4008000000000000cb3f947ae147ae147bcb3f50624dd2f1a9fccb3f8eb851eb"
    "851eb8cb3f50624dd2f1a9fccb3f689374bc6a7efacb0000000000000000cb3ef4f8b588e368f10100000103cb3fd0000000"
    "000000c0c009040000919aa76172726976616c07cb3ff800000000000064aa63686174636d706c2d310040c2c0c0919b0704"
    "03020301010278c292cb3fe0000000000000cb3fd00000000000001803050fcb3f40624dd2f1a9fccb3fe0000000000000010201"
    "0406910392070ac000c200"
)
GOLDEN_RELEASE = "fa0293a772656c65617365a4626f6f7409"


def test_messages_survive_the_round_trip() -> None:
    assert wire.decode_from_engine(wire.encode(RECORD)) == RECORD
    assert wire.decode_from_controller(wire.encode(ACTION)) == ACTION
    stopping = msgspec.structs.replace(ACTION, stop=STOP)
    assert wire.decode_from_controller(wire.encode(stopping)) == stopping
    assert wire.decode_from_controller(wire.encode(wire.HelloRequest(3))) == wire.HelloRequest(3)


def test_the_wire_format_of_this_version_does_not_change() -> None:
    assert wire.encode(ACTION).hex() == GOLDEN_ACTION
    assert wire.encode(msgspec.structs.replace(ACTION, stop=STOP)).hex() == GOLDEN_STOP
    assert wire.encode(wire.Release("boot", 9)).hex() == GOLDEN_RELEASE
    assert wire.encode(RECORD).hex() == GOLDEN_RECORD


LATER = {
    "prune_layer": None, "prune_s": 0.0, "saved_rows": 0.0, "wrongly_pruned": 0, "frontier_hits": 0,
    "frontier_misses": 0, "sat_out": 0, "miscounted": 0,
    "copied": (), "verified_copies": (), "stage_bounds": None, "stage_moves": 0, "is_moving": False,
    "rested": 0,
}  # fmt: skip


@pytest.mark.parametrize("missing", [1, 4, 6, 14])
def test_a_record_of_an_engine_that_does_not_tell_what_came_later_is_read(missing: int) -> None:
    """Fields that came later stand at the end, with a value for those who do not send them."""
    whole = msgspec.msgpack.decode(bytes(wire.encode(RECORD))[2:])
    older = wire.HEADER + msgspec.msgpack.encode(whole[:-missing])
    untold = dict(list(LATER.items())[-missing:])
    assert wire.decode_from_engine(older) == msgspec.structs.replace(RECORD, **untold)
    newer = wire.HEADER + msgspec.msgpack.encode([*whole, "what comes next"])
    assert wire.decode_from_engine(newer) == RECORD


@pytest.mark.parametrize(
    ("missing", "untold"),
    [(1, ("rest",)), (4, ("rest", "stage_bounds", "match", "admission"))],
)
def test_an_action_set_of_an_older_controller_is_read(missing: int, untold: tuple[str, ...]) -> None:
    admission, match = (
        wire.Admission([1, 8], [0.01, 0.02], [2.0]),
        wire.MatchRule([1.0], [0.0], [0.1], 6, 0.5, 2, (3,), (0.5,)),
    )
    asked = msgspec.structs.replace(
        ACTION, admission=admission, match=match, stage_bounds=(15,), rest=wire.Rest((7,), 2)
    )
    assert wire.decode_from_controller(wire.encode(asked)) == asked
    whole = msgspec.msgpack.decode(bytes(wire.encode(asked))[2:])
    assert wire.decode_from_controller(wire.HEADER + msgspec.msgpack.encode(whole[:-missing])) == (
        msgspec.structs.replace(asked, **dict.fromkeys(untold))
    )
    newer = wire.HEADER + msgspec.msgpack.encode([*whole, "what comes next"])
    assert wire.decode_from_controller(newer) == asked


@pytest.mark.parametrize("missing", [1, 2, 3, 4, 5, 6])
def test_a_hello_of_an_engine_that_does_not_tell_what_came_later_is_read(missing: int) -> None:
    hello = wire.Hello(
        "boot", 1, "host", "0.1.0", "0.32.0", "target", "cpu", "v1", False, "eagle3", "drafter", 6, 0, [], 256, 8192,
        100_000, [], ["unsplit"], [], 1, 1, 1, 0, 32, 1000, [], epoch=9, is_adaptive=True, copy_max=8,
        rounds="longest", stages=wire.Stages(30, (15,)), rest_steps=3,
    )  # fmt: skip
    later: list[tuple[str, Any]] = [
        ("rest_steps", 0),
        ("stages", None),
        ("rounds", "ragged"),
        ("copy_max", 0),
        ("is_adaptive", False),
        ("epoch", 0),
    ]
    whole = msgspec.msgpack.decode(bytes(wire.encode(hello))[2:])
    older = wire.HEADER + msgspec.msgpack.encode(whole[:-missing])
    assert wire.decode_from_engine(wire.encode(hello)) == hello
    assert wire.decode_from_engine(older) == msgspec.structs.replace(hello, **dict(later[:missing]))


@pytest.mark.parametrize("missing", [0, 1, 2, 3])
def test_an_event_of_an_engine_that_does_not_tell_objectives_is_read(missing: int) -> None:
    event = msgspec.structs.replace(EVENT, may_be_stop=True, ttft_ms=300.0, tpot_ms=40.5)
    later: list[tuple[str, Any]] = [("tpot_ms", None), ("ttft_ms", None), ("may_be_stop", False)]
    whole = msgspec.msgpack.decode(bytes(wire.encode(msgspec.structs.replace(RECORD, events=[event])))[2:])
    [told] = whole[wire.StepRecord.__struct_fields__.index("events") + 1]
    del told[len(told) - missing :]
    record = wire.decode_from_engine(wire.HEADER + msgspec.msgpack.encode(whole))
    assert isinstance(record, wire.StepRecord)
    assert record.events == [msgspec.structs.replace(event, **dict(later[:missing]))]


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "malformed"),
        (b"\x00\x02\x90", "malformed"),
        (bytes((wire.MAGIC, wire.VERSION + 1)) + wire.encode(ACTION)[2:], "wrong_version"),
        (wire.HEADER + b"\x9f\xa3act\xa4bo", "malformed"),
        (wire.HEADER + b"\xdd\xff\xff\xff\xff", "malformed"),
        (wire.HEADER + b"\xc4\xff" + b"x", "malformed"),
        (wire.HEADER + bytes(wire.MAX_FRAME_BYTES), "oversized"),
        (wire.encode(RECORD), "out_of_bounds"),  # an engine's message on the controller's way
    ],
)
def test_a_foreign_frame_is_refused_with_its_reason(frame: bytes, reason: str) -> None:
    with pytest.raises(wire.ProtocolError) as caught:
        wire.decode_from_controller(bytes(frame))
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": [-1]},
        {"lengths": [wire.MAX_DRAFT_LENGTH + 1]},
        {"lengths": [1, 2]},
        {"handles": [0]},
        {"valid_until_s": float("nan")},
        {"price": float("inf")},
        {"prune": wire.Prune(3, float("nan"))},
        {"prune": wire.Prune(3, 1.5)},
        {"split": 65},
        {"frontier": wire.MAX_DRAFT_LENGTH + 1},
        {"stage_bounds": (-1,)},
        {"stage_bounds": tuple(range(64))},
        {"epoch": 0},
        {"mode": "loud"},
        {"stop": wire.StopRule([], [0.0], [0.1], [0.1])},
        {"stop": wire.StopRule([1.0], [0.0], [0.1] * (wire.MAX_DRAFT_LENGTH + 1), [0.1])},
        {"stop": wire.StopRule([1.0], [float("nan")], [0.1], [0.1])},
        {"stop": wire.StopRule([1.0], [0.0], [0.1], [0.1, float("inf")])},
        {"match": wire.MatchRule([1.0], [0.0], [], 4)},
        {"match": wire.MatchRule([1.0], [0.0], [0.1], wire.MAX_DRAFT_LENGTH + 1)},
        {"match": wire.MatchRule([1.0], [0.0], [0.1], 4, float("inf"))},
        {"match": wire.MatchRule([1.0], [0.0], [0.1], 4, handles=(3,), weights=(0.0,))},
        {"handles": [1] * (wire.MAX_REQUESTS + 1), "lengths": [1] * (wire.MAX_REQUESTS + 1)},
    ],
)
def test_an_action_out_of_bounds_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(wire.ProtocolError) as caught:
        wire.decode_from_controller(bytes(wire.encode(msgspec.structs.replace(ACTION, **changes))))
    assert caught.value.reason == "out_of_bounds"


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf"), 1e300])
@pytest.mark.parametrize(
    "name", ["time_s", "step_s", "verify_s", "draft_s", "overlap_s", "adapter_s", "kv_usage", "saved_rows"]
)
def test_a_record_with_a_time_that_no_clock_shows_is_refused(name: str, broken: float) -> None:
    check_refused(msgspec.structs.replace(RECORD, **{name: broken}))


@pytest.mark.parametrize(
    "changes",
    [
        {"split": -1},
        {"split": 65},
        {"frontier": wire.MAX_DRAFT_LENGTH + 1},
        {"stage_bounds": (-1,)},
        {"stage_bounds": tuple(range(64))},
        {"counter": -1},
        {"counter": (1 << 62) + 1},
        {"events": [msgspec.structs.replace(EVENT, time_s=float("nan"))]},
        {"events": [msgspec.structs.replace(EVENT, priority=(1 << 62) + 1)]},
        {"events": [msgspec.structs.replace(EVENT, priority=-(1 << 63))]},
        {"events": [msgspec.structs.replace(EVENT, ttft_ms=0.5)]},
        {"events": [msgspec.structs.replace(EVENT, ttft_ms=600_001.0)]},
        {"events": [msgspec.structs.replace(EVENT, tpot_ms=0.05)]},
        {"events": [msgspec.structs.replace(EVENT, tpot_ms=float("nan"))]},
        {"rows": [msgspec.structs.replace(ROW, confidences=(0.5, float("nan")))]},
        {"rows": [msgspec.structs.replace(ROW, confidences=(1.5,))]},
    ],
)
def test_a_record_out_of_bounds_is_refused(changes: dict[str, object]) -> None:
    check_refused(msgspec.structs.replace(RECORD, **changes))


def check_refused(record: wire.StepRecord) -> None:
    with pytest.raises(wire.ProtocolError) as caught:
        wire.decode_from_engine(bytes(wire.encode(record)))
    assert caught.value.reason == "out_of_bounds"


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(noise: bytes) -> None:
    reasons = set()
    for decode in (wire.decode_from_engine, wire.decode_from_controller):
        for frame in (noise, wire.HEADER + noise):
            try:
                decode(frame)
            except wire.ProtocolError as error:
                reasons.add(error.reason)
    assert reasons <= set(wire.REASONS)


def test_mutated_frames_neither_crash_nor_allocate_past_the_cap() -> None:
    """10,000 mutations here; `make chaos` of the production issue runs the 100,000."""
    generator = random.Random(1)
    frames = [
        bytes(wire.encode(message))
        for message in (RECORD, msgspec.structs.replace(ACTION, stop=STOP), wire.Release("boot", 9))
    ]
    tracemalloc.start()
    for _ in range(10_000):
        frame = bytearray(generator.choice(frames))
        for _ in range(generator.randint(1, 6)):
            frame[generator.randrange(2, len(frame))] = generator.randrange(256)
        for decode in (wire.decode_from_engine, wire.decode_from_controller):
            try:
                decode(bytes(frame[: generator.randint(0, len(frame))]))
            except wire.ProtocolError:
                continue
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * wire.MAX_FRAME_BYTES

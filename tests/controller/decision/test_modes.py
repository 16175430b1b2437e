"""Modes on real sockets: who is steered, who is only watched, and that a switch holds."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from faser.controller.config import Config
from faser.controller.decision.modes import EVERY, MAX_TARGETS, ModeBoard, engine_name
from faser.controller.errors import StoreError, UsageError
from faser.controller.link import ask as status
from faser.controller.link.ask import ask, order
from faser.controller.link.status_orders import Switch, decode_order, encode_order
from faser.engine_adapter.protocol import ActionSet, Hello, HelloRequest, Mode, Release
from faser.engine_adapter.steering.lease import Lease

Start = Callable[..., Any]
Make = Callable[..., Any]


@pytest.fixture
def hello(make_engine: Make) -> Hello:
    return make_engine().hello()


def test_the_more_particular_name_wins(hello: Hello) -> None:
    board = ModeBoard("advisory")
    assert board.mode_of(hello) == "advisory"
    board.switch(EVERY, "canary")
    board.switch(engine_name(hello), "active")
    board.switch(hello.boot_id, "off")
    assert board.mode_of(hello) == "off"
    board.switch(hello.boot_id, None)
    assert board.mode_of(hello) == "active"
    board.switch(EVERY, "off")
    assert (board.mode_of(hello), board.switched()) == ("off", {EVERY: "off"})


def test_a_switch_survives_a_restart_and_a_damaged_file_never_switches_anything_on(tmp_path: Path) -> None:
    path = tmp_path / "state" / "modes.json"
    board = ModeBoard("active", path)
    for number in range(20):
        board.switch(f"boot-{number}", "off")
    board.switch(EVERY, "advisory")
    board.close()
    assert ModeBoard("active", path).switched() == {EVERY: "advisory"}
    assert path.stat().st_mode & 0o077 == 0
    assert os.listdir(path.parent) == [path.name]
    for content in (b"", b"{", b'{"version":9,"modes":{}}', b'{"version":1,"modes":{"*":"on"}}', b"\xff"):
        path.write_bytes(content)
        with pytest.raises(StoreError, match=r"mode"):
            ModeBoard("active", path)


def test_a_state_file_that_cannot_be_written_is_an_alarm_and_the_switch_holds(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    board = ModeBoard("active", tmp_path / "modes.json")
    board._path = tmp_path / "file" / "modes.json"
    board.switch(EVERY, "off")
    board.close()
    assert board.switched() == {EVERY: "off"}
    assert "modes.json" in board.error


def test_names_are_bounded_and_every_outlives_them() -> None:
    board = ModeBoard()
    board.switch(EVERY, "off")
    for number in range(2 * MAX_TARGETS):
        board.switch(f"boot-{number}", "active")
    assert len(board.switched()) == MAX_TARGETS
    assert board.switched()[EVERY] == "off"


def test_in_advisory_mode_every_record_is_decided_on_and_nothing_is_sent(
    start_daemon: Start, make_engine: Make, config: Config, eventually: Any
) -> None:
    daemon = start_daemon(mode=replace(config.mode, default="advisory"))
    sent: list[object] = []
    original = daemon.daemon._router.send
    daemon.daemon._router.send = lambda identity, message: sent.append(message) or original(identity, message)
    engine = make_engine()
    engine.hello()
    for _ in range(200):
        engine.step()
    status = eventually(lambda: (s := ask(config.link).engines) and s[0].records == 200 and s[0], "all are read")
    assert status.decisions > 0
    assert (status.sends_dropped, status.steering.mode) == (0, "advisory")
    daemon.stop()
    assert sent == []  # not even a release: no lease was ever given
    assert engine.is_silent(0.05)


@pytest.mark.parametrize("mode", ["advisory", "off"])
def test_an_engine_refuses_an_action_set_that_says_it_is_not_meant(mode: Mode) -> None:
    lease = Lease("boot-1", 6, 32, 1.0)
    action = ActionSet("boot-1", 1, 1, 100, 1e9, 3, [], [], mode=mode)
    assert lease.offer(action, 1, 0.0) == "advisory"
    assert lease.in_force(1, 0.0) is None


def test_an_engine_is_switched_while_it_runs_and_gets_its_lease_released_once(
    start_daemon: Start, make_engine: Make, config: Config, eventually: Any
) -> None:
    start_daemon()
    engine, neighbour = make_engine(), make_engine(boot_id="boot-2")
    for each in (engine, neighbour):
        each.hello()
        each.step()
        each.action()
    shown = order(config.link, Switch("boot-1", "advisory", "test"))
    assert [each.steering.mode for each in shown.engines] == ["advisory", "active"]
    assert isinstance(engine.receive(), Release)
    engine.step()
    neighbour.step()
    assert neighbour.action().mode == "active"
    eventually(lambda: ask(config.link).engines[0].records == 2, "the advised step has arrived")
    assert ask(config.link).engines[0].decisions == 2
    assert engine.is_silent(0.02)
    order(config.link, Switch("boot-1", "off"))
    engine.step()
    neighbour.step()
    neighbour.action()
    eventually(lambda: ask(config.link).engines[0].records == 3, "the step that nobody decides has arrived")
    assert ask(config.link).engines[0].decisions == 2
    order(config.link, Switch("boot-1", None))
    engine.step()
    assert engine.action().mode == "active"


def test_a_restarted_sidecar_goes_on_in_the_switched_mode(
    start_daemon: Start, make_engine: Make, config: Config, eventually: Any
) -> None:
    first = start_daemon()
    engine = make_engine()
    name = engine_name(engine.hello())
    engine.step()
    engine.action()
    order(config.link, Switch(name, "off"))
    first.stop()
    start_daemon()
    reborn = make_engine(boot_id="boot-2")
    reborn.hello()
    reborn.step()
    eventually(lambda: [each.records for each in ask(config.link).engines] == [1], "the step has arrived")
    (status,) = ask(config.link).engines
    assert (status.steering.mode, status.reason) == ("off", "off: switched off")


def test_an_unknown_engine_is_refused_with_the_names_there_are(
    start_daemon: Start, make_engine: Make, config: Config
) -> None:
    start_daemon()
    make_engine().hello()
    with pytest.raises(UsageError, match="no engine 'boot-9'; expected"):
        order(config.link, Switch("boot-9", "off"))
    assert ask(config.link).modes == {}


@pytest.mark.parametrize("frame", [b"", b"status", b"{}", b'{"type":"switch","target":"","mode":"off"}', b"\xff\xfe",
    b'{"type":"switch","target":"*","mode":"on"}', b"[" * 1000])  # fmt: skip
def test_what_is_no_order_is_none(frame: bytes) -> None:
    assert decode_order(frame) is None


def test_an_order_is_read_as_it_was_written() -> None:
    switch = Switch("*", "canary", "somebody")
    assert decode_order(encode_order(switch)) == switch
    assert decode_order(encode_order(Switch("x" * 700, "off"))) is not None
    for target in ("", "x" * 701, "x" * 2000):
        with pytest.raises(UsageError, match="expected one of up to 700"):
            encode_order(Switch(target, "off"))


def test_a_canary_steers_its_share_and_leaves_the_others_to_the_engines_own_length(
    start_daemon: Start, make_engine: Make, config: Config
) -> None:
    daemon = start_daemon(mode=replace(config.mode, default="canary", canary_share=0.5, canary_epsilon=0.0))
    engine = make_engine()
    engine.hello()
    engine.step(requests=40)
    action = engine.action()
    members = daemon.daemon._sessions[b"boot-1"].governor.canary
    expected = [handle for handle in range(1, 41) if members.has(handle)]
    assert 8 < len(expected) < 32
    assert (action.mode, action.default_length, action.stop) == ("canary", 0, None)
    assert dict(zip(action.handles, action.lengths, strict=True)) == dict.fromkeys(expected, 3)


def test_an_advisory_sidecar_still_asks_an_unknown_engine_who_it_is(
    start_daemon: Start, make_engine: Make, config: Config
) -> None:
    start_daemon(mode=replace(config.mode, default="advisory"))
    engine = make_engine()
    engine.step()
    assert isinstance(engine.receive(), HelloRequest)


def test_a_user_without_a_name_can_switch(
    start_daemon: Start, config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 2000")

    start_daemon()
    monkeypatch.setattr(status.getpass, "getuser", nameless)
    assert status.run_mode(config.link, "off", EVERY, is_forgotten=False) == 0
    monkeypatch.setattr(status.getpass, "getuser", lambda: "a-user-of-a-very-long-name@" * 9)
    assert status.run_mode(config.link, "advisory", EVERY, is_forgotten=False) == 0
    assert "advisory: switched for every engine" in capsys.readouterr().out

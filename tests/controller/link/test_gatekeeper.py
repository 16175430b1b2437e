"""Who may speak on a link that leaves the host: real CURVE handshakes over TCP, allow-list, rotation, limits."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from faser.controller.config import Config, LinkConfig
from faser.controller.errors import EndpointError, UsageError
from faser.controller.link.ask import ask
from faser.controller.link.endpoint import Endpoint
from faser.controller.link.engine_router import EngineRouter
from faser.controller.link.gatekeeper import MAX_IDENTITIES, Gatekeeper, RateLimit
from faser.controller.link.keys import engines, load_keyring, new_keys, revoke, rotate_server
from faser.engine_adapter.link.keys import EngineKeys, engine_keys, read_key, read_secret_key
from faser.engine_adapter.protocol import Goodbye, Release, decode_from_controller, encode
from faser.engine_adapter.settings import SettingError, load_settings

Start = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    new_keys(tmp_path / "keys", "rack-1")
    return tmp_path / "keys"


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def keys_of(folder: Path, name: str = "rack-1") -> EngineKeys:
    return EngineKeys(read_key(folder / "server.public"), read_secret_key(folder / "issued" / f"{name}.secret"))


class Door:
    """A router behind a gatekeeper, on loopback."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> None:
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.gatekeeper = Gatekeeper(context, load_keyring(folder))
        self.router = EngineRouter(context, Endpoint(self.address), 64, self.gatekeeper)
        self._context = context
        self._knocking: list[zmq.Socket[bytes]] = []

    def knock(self, keys: EngineKeys | None, name: str) -> zmq.Socket[bytes]:
        """Connect an engine, which says one word; who is turned away before has nobody left to say it to."""
        dealer = self._context.socket(zmq.DEALER)
        self._knocking.append(dealer)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, 10)
        dealer.setsockopt(zmq.ROUTING_ID, name.encode())
        if keys is not None:
            keys.apply(dealer)
        dealer.connect(self.address)
        with suppress(zmq.Again):
            dealer.send(encode(Goodbye(name)), zmq.NOBLOCK)
        return dealer

    def close(self) -> None:
        self.gatekeeper.close()
        for dealer in self._knocking:
            dealer.close()
        self.router.close()

    def heard(self, deadline_ms: int = 10_000) -> set[str]:
        """Return who is heard first; the socket also wakes for handshakes, in which nobody is heard."""
        end_s = time.monotonic() + deadline_ms / 1e3
        names: set[str] = set()
        while not names and time.monotonic() < end_s:
            self.router.socket.poll(deadline_ms)
            names = {incoming.message.boot_id for incoming in self.router.drain()}
        return names


@pytest.fixture
def door(context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> Iterator[Door]:
    made = Door(context, folder)
    yield made
    made.close()


def test_an_engine_with_a_key_of_the_list_is_heard_and_answered(door: Door, folder: Path) -> None:
    dealer = door.knock(keys_of(folder), "one")
    assert door.heard() == {"one"}
    assert door.router.send(b"one", Release("one", 1))
    assert dealer.poll(10_000)
    assert decode_from_controller(dealer.recv()) == Release("one", 1)


def test_nobody_else_is_heard(door: Door, folder: Path, tmp_path: Path, eventually: Any) -> None:
    new_keys(tmp_path / "other", "stranger")
    strange = EngineKeys(read_key(folder / "server.public"), keys_of(tmp_path / "other", "stranger").secret)
    deceived = EngineKeys(read_key(tmp_path / "other" / "server.public"), keys_of(folder).secret)
    outsiders = [
        door.knock(keys, name) for keys, name in ((None, "plain"), (strange, "strange"), (deceived, "deceived"))
    ]
    eventually(lambda: door.gatekeeper.refused["unknown_key"], "the unknown key is refused")
    door.knock(keys_of(folder), "honest")
    assert door.heard() == {"honest"}
    assert not any(outsider.poll(0) for outsider in outsiders)


def test_a_new_key_is_let_in_and_a_revoked_one_put_out_without_a_restart(
    door: Door, folder: Path, eventually: Any
) -> None:
    first = door.knock(keys_of(folder), "one")
    assert door.heard() == {"one"}
    new_keys(folder, "rack-2")
    assert door.gatekeeper.renew(load_keyring(folder)) is False
    second = door.knock(keys_of(folder, "rack-2"), "two")
    assert door.heard() == {"two"}
    revoke(folder, "rack-1")
    assert door.gatekeeper.renew(load_keyring(folder)) is True
    door.router.reopen()

    def is_second_heard() -> bool:  # what is sent before an end notices that its connection is over is lost
        for dealer, name in ((first, "one"), (second, "two")):
            with suppress(zmq.Again):
                dealer.send(encode(Goodbye(name)), zmq.NOBLOCK)
        heard = door.heard(100)
        assert "one" not in heard
        return heard == {"two"}

    eventually(is_second_heard, "the key that still opens the door is heard again")
    eventually(lambda: door.gatekeeper.refused["unknown_key"], "the revoked key knocks in vain")


def test_a_rotated_sidecar_key_is_taken_by_new_connections(door: Door, folder: Path) -> None:
    before = keys_of(folder)
    rotate_server(folder)
    assert door.gatekeeper.renew(load_keyring(folder)) is True
    door.router.reopen()
    door.knock(before, "old")
    door.knock(keys_of(folder), "new")
    assert door.heard() == {"new"}
    assert (folder / "server.secret.old").exists()


def test_a_daemon_off_the_host_needs_keys_and_steers_with_them(
    start_daemon: Start, config: Config, folder: Path, make_engine: Any, sockets: Path
) -> None:
    link = LinkConfig(endpoint=f"tcp://0.0.0.0:{free_port()}", status_endpoint=f"ipc://{sockets / 'status.sock'}")
    with pytest.raises(EndpointError, match="leaves this host without keys"):
        start_daemon(link=link)
    start_daemon(link=replace(link, keys=str(folder)))
    keys = keys_of(folder)
    fake = make_engine(link.endpoint.replace("0.0.0.0", "127.0.0.1"), keys=keys)
    fake.hello()
    fake.step()
    assert fake.action().sequence == 1
    assert len(ask(replace(link)).engines) == 1


@pytest.mark.parametrize(
    ("endpoint", "is_refused"),
    [("tcp://10.0.0.1:5", True), ("tcp://sidecar.example:5", True), ("tcp://[::]:5", True),
     ("tcp://127.0.0.1:5", False), ("tcp://[::1]:5", False), ("tcp://localhost:5", False), ("ipc:///x/y", False)],
)  # fmt: skip
def test_an_engine_does_not_connect_off_its_host_without_keys(endpoint: str, is_refused: bool) -> None:
    settings = load_settings({"FASER_ENDPOINT": endpoint})
    with pytest.raises(SettingError, match="leaves this host") if is_refused else contextlib.nullcontext():
        assert engine_keys(settings) is None


def test_an_engine_reads_its_keys_or_says_what_is_wrong_with_them(folder: Path) -> None:
    environment = {
        "FASER_ENDPOINT": "tcp://10.0.0.1:5555",
        "FASER_SERVER_KEY": str(folder / "server.public"),
        "FASER_ENGINE_KEY": str(folder / "issued" / "rack-1.secret"),
    }
    assert engine_keys(load_settings(environment)) == keys_of(folder)
    half = {name: value for name, value in environment.items() if name != "FASER_ENGINE_KEY"}
    with pytest.raises(SettingError, match="FASER_ENGINE_KEY is not set"):
        engine_keys(load_settings(half))
    (folder / "issued" / "rack-1.secret").chmod(0o644)
    with pytest.raises(SettingError, match="mode 0644; expected 0600"):
        engine_keys(load_settings(environment))


@given(st.binary(max_size=60))
def test_a_file_is_a_key_or_a_clear_error(content: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        with contextlib.suppress(SettingError):
            assert len(read_key(Path(file.name))) == 40


def test_keys_are_private_named_and_never_overwritten(folder: Path, tmp_path: Path) -> None:
    assert engines(folder) == ["rack-1"]
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.rglob("*.secret")}
    assert modes == {"server.secret": 0o600, "rack-1.secret": 0o600}
    assert new_keys(folder, None) == []
    for name, message in (("rack-1", "exists"), ("../x", "engine name"), ("", "engine name")):
        with pytest.raises(UsageError, match=message):
            new_keys(folder, name)
    with pytest.raises(UsageError, match=r"no key for 'rack-9'.*one of: rack-1"):
        revoke(folder, "rack-9")
    folder.chmod(0o755)
    with pytest.raises(EndpointError, match="mode 0755"):
        load_keyring(folder)


def test_a_flood_of_one_engine_is_cut_and_its_neighbour_is_served(
    start_daemon: Start, make_engine: Any, config: Config, eventually: Any
) -> None:
    start_daemon(link=replace(config.link, frames_per_s=20))
    loud, quiet = make_engine(), make_engine(boot_id="boot-2")
    loud.hello()
    for _ in range(300):
        loud.step()
    quiet.hello()
    quiet.step()
    assert quiet.action().boot_id == "boot-2"
    eventually(lambda: ask(config.link).link.dropped.get("rate", 0) > 150, "the flood is cut")


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=300), st.integers(1, 50))
def test_no_burst_beats_the_limit(pauses: list[float], per_s: int) -> None:
    limit, now_s, admitted = RateLimit(per_s), 0.0, 0
    for pause in pauses:
        now_s += pause
        admitted += limit.admits(b"x", now_s)
    assert admitted <= per_s * (now_s + 4.0) + 1


def test_invented_identities_cost_bounded_memory() -> None:
    limit = RateLimit(10)
    for number in range(3 * MAX_IDENTITIES):
        assert limit.admits(str(number).encode(), 0.0)
    assert len(limit._buckets) == MAX_IDENTITIES

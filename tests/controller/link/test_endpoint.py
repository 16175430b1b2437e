"""Where a sidecar may listen: private, on loopback, and alone."""

import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from faser.controller.errors import EndpointError
from faser.controller.link.endpoint import Endpoint, status_address


def bound(address: str) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with Endpoint(address) as endpoint, context.socket(zmq.ROUTER) as router:
            endpoint.bind(router)
    finally:
        context.term()


def test_the_socket_and_its_folder_are_for_this_user_alone(sockets: Path) -> None:
    path = sockets / "deep" / "engine.sock"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with Endpoint(f"ipc://{path}") as endpoint, context.socket(zmq.ROUTER) as router:
        endpoint.bind(router)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    context.term()


def test_a_second_sidecar_on_the_same_path_is_refused_and_names_the_first(sockets: Path) -> None:
    address = f"ipc://{sockets / 'engine.sock'}"
    holder = (
        "import sys; from faser.controller.link.endpoint import Endpoint; "
        "endpoint = Endpoint(sys.argv[1]); print(flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/"
    )
    assert process.stdout
    process.stdout.readline()
    try:
        with pytest.raises(EndpointError, match=rf"belongs to a running sidecar \(process {process.pid}\)"):
            Endpoint(address)
    finally:
        process.kill()
        process.communicate()
    bound(address)  # the dead one's lock went with it


def test_a_dead_sidecars_socket_file_is_replaced(sockets: Path) -> None:
    path = sockets / "engine.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    bound(f"ipc://{path}")


def test_a_socket_file_goes_with_its_owner(sockets: Path) -> None:
    path = sockets / "engine.sock"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as taken, Endpoint(f"ipc://{path}") as own:
        own.bind(taken)
        assert path.exists()
    assert not path.exists()


def test_a_file_that_is_no_socket_is_never_removed(sockets: Path) -> None:
    path = sockets / "engine.sock"
    path.write_text("precious")
    with pytest.raises(EndpointError, match="is no socket"):
        Endpoint(f"ipc://{path}")
    assert path.read_text() == "precious"


def test_a_folder_open_to_others_is_refused(sockets: Path) -> None:
    (sockets / "open").mkdir(mode=0o755)
    with pytest.raises(EndpointError, match="mode 0755; expected yours alone"):
        Endpoint(f"ipc://{sockets}/open/engine.sock")


@pytest.mark.parametrize(
    "address",
    ["tcp://*:5555", "tcp://0.0.0.0:5555", "tcp://10.0.0.1:5555", "tcp://example.org:5555", "tcp://127.0.0.1:*",
     "tcp://127.0.0.1", "tcp://[::]:5555", "ipc://relative.sock", "ipc://@abstract", "ipc:///" + "x" * 120,
     "inproc://x", "/run/x.sock", ""],
)  # fmt: skip
def test_other_addresses_are_refused_with_what_to_do(address: str) -> None:
    with pytest.raises(EndpointError, match=r"set link\.endpoint|use loopback"):
        Endpoint(address)


def test_loopback_tcp_is_allowed_and_a_taken_port_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EndpointError, match=f"tcp://127.0.0.1:{port} is in use"):
            bound(f"tcp://127.0.0.1:{port}")
    bound(f"tcp://127.0.0.1:{port}")


def test_status_is_answered_beside_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASER_RUNTIME_DIR", "/run/faser")
    assert status_address("ipc:///a/engine.sock") == "ipc:///a/status.sock"
    assert status_address("ipc:///a/other.sock") == "ipc:///a/other.sock.status"
    assert status_address("tcp://127.0.0.1:70") == "ipc:///run/faser/status-70.sock"
    assert status_address("ipc:///a/engine.sock", "ipc:///b") == "ipc:///b"


@pytest.mark.parametrize("endpoint", ["foo://bar", "127.0.0.1:5555", ""])
def test_an_address_of_no_kind_is_no_place_to_ask(endpoint: str) -> None:
    with pytest.raises(EndpointError, match=r"expected ipc://PATH or tcp://127\.0\.0\.1:PORT"):
        status_address(endpoint)

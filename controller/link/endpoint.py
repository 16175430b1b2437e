"""Where the sidecar may listen: private ipc:// paths and loopback tcp:// addresses, one owner each.

Called by the daemon before it binds and by status clients. libzmq removes an existing socket file before it binds,
dead or alive, so ownership is a lock file beside the socket: the kernel drops it with the process.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

import zmq

from ...engine_adapter.link.keys import is_off_host
from ...engine_adapter.settings import IPC_PATH_LIMIT, SettingError, ensure_private_folder, runtime_folder
from ..errors import EndpointError
from ..file_lock import FileLock

IPC: Final = "ipc://"
TCP: Final = "tcp://"


class Endpoint:
    """One address the sidecar owns while this object is open; raises EndpointError if it cannot."""

    def __init__(self, address: str, *, is_encrypted: bool = False) -> None:
        self.address = address
        self._lock: FileLock | None = None
        self._is_bound = False
        if address.startswith(IPC):
            self._claim_path(Path(address.removeprefix(IPC)))
        elif address.startswith(TCP):
            _require_tcp(address, is_encrypted)
        else:
            raise EndpointError(f"endpoint {address!r}", "ipc://PATH or tcp://127.0.0.1:PORT", "set link.endpoint")

    def bind(self, socket: zmq.Socket[bytes]) -> None:
        """Bind the socket, readable and writable for this user alone."""
        mask = os.umask(0o077)
        try:
            socket.bind(self.address)
            self._is_bound = True
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise EndpointError(
                    f"{self.address} is in use", "a free one", "stop its owner or choose another link.endpoint"
                ) from None
            raise EndpointError(
                f"{self.address} cannot be bound: {error.strerror}", remedy="check link.endpoint"
            ) from None
        finally:
            os.umask(mask)

    def close(self) -> None:
        """Let others have the address; the socket's file goes, lest it look like a sidecar that hangs."""
        if self._lock is not None:
            if self._is_bound:
                with suppress(OSError):
                    os.unlink(self.address.removeprefix(IPC))
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _claim_path(self, path: Path) -> None:
        if not path.is_absolute() or len(os.fsencode(path)) > IPC_PATH_LIMIT:
            raise EndpointError(
                f"socket path {str(path)!r} of {len(os.fsencode(path))} bytes",
                f"an absolute path of at most {IPC_PATH_LIMIT}",
                "set link.endpoint or FASER_RUNTIME_DIR",
            )
        ensure_private_folder(path.parent)
        if os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):
            raise EndpointError(f"{path} exists and is no socket", "a free path", "move it or set link.endpoint")
        try:
            self._lock = FileLock(path.with_name(f"{path.name}.lock"))
        except BlockingIOError as holder:
            raise EndpointError(
                f"{self.address} belongs to a running sidecar ({holder})",
                "one sidecar each",
                "stop it or set link.endpoint",
            ) from None
        except OSError as error:
            raise EndpointError(f"{path}.lock: {error.strerror}", remedy="check the folder's permissions") from None


def _require_tcp(address: str, is_encrypted: bool) -> None:
    """Raise EndpointError for an address without a port, or one that others can reach without keys."""
    port = address.rpartition(":")[2]
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise EndpointError(f"endpoint {address}", "tcp://127.0.0.1:PORT", "set link.endpoint")
    if is_off_host(address) and not is_encrypted:
        raise EndpointError(
            f"endpoint {address}",
            "tcp://127.0.0.1:PORT, since the link leaves this host without keys",
            "use loopback or ipc://, or make keys with `faser keys new` and set link.keys",
        )


def status_address(endpoint: str, configured: str = "") -> str:
    """Return where the sidecar of `endpoint` answers status questions: beside it unless configured."""
    if configured:
        return configured
    if endpoint.startswith(IPC):
        path = Path(endpoint.removeprefix(IPC))
        name = "status.sock" if path.name == "engine.sock" else f"{path.name}.status"
        return f"{IPC}{path.with_name(name)}"
    if not endpoint.startswith(TCP):
        raise EndpointError(f"endpoint {endpoint}", "ipc://PATH or tcp://127.0.0.1:PORT", "set link.endpoint")
    return f"{IPC}{runtime_folder() / ('status-' + endpoint.rpartition(':')[2] + '.sock')}"


@contextmanager
def socket_folder(name: str) -> Iterator[Path]:
    """Give a folder for one run's sockets that nobody else can enter, and remove it at the end."""
    try:
        ensure_private_folder(runtime_folder())
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=runtime_folder()))
    except (SettingError, OSError) as error:
        raise EndpointError(str(error), "a private folder for sockets", "set FASER_RUNTIME_DIR") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)

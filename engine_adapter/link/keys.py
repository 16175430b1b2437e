"""CURVE keys as files, and when the link demands them.

Called by the scheduler mixin before it connects and by the sidecar before it binds. A key file holds one key in Z85,
40 characters; a secret one must be readable by its owner alone. What is wrong with one is a SettingError.
"""

from __future__ import annotations

import ipaddress
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

from ..settings import SettingError, Settings

KEY_CHARACTERS: Final = 40
MAX_FILE_BYTES: Final = 4096
TCP: Final = "tcp://"


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """What an engine needs to be let in and to know its sidecar; Z85."""

    server_public: bytes
    secret: bytes

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket that is not connected yet use them."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(self.secret))


def engine_keys(settings: Settings) -> EngineKeys | None:
    """Return the configured keys, None where none are; raise SettingError where the endpoint demands them."""
    if settings.server_key and settings.engine_key:
        return EngineKeys(read_key(Path(settings.server_key)), read_secret_key(Path(settings.engine_key)))
    if settings.server_key or settings.engine_key:
        missing = "FASER_ENGINE_KEY" if settings.server_key else "FASER_SERVER_KEY"
        raise SettingError(f"{missing} is not set; expected both keys or none; make them with: faser keys new")
    if is_off_host(settings.endpoint):
        raise SettingError(
            f"FASER_ENDPOINT={settings.endpoint!r} leaves this host without keys; expected FASER_SERVER_KEY and "
            "FASER_ENGINE_KEY beside it; make them with: faser keys new"
        )
    return None


def is_off_host(endpoint: str) -> bool:
    """Return whether others than this host's users can reach an endpoint; a name counts as reachable."""
    if not endpoint.startswith(TCP):
        return False
    host = endpoint.removeprefix(TCP).rpartition(":")[0].strip("[]")
    try:
        return host != "localhost" and not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


def read_key(path: Path) -> bytes:
    """Return the key of a file; raise SettingError if it holds none."""
    try:
        with path.open("rb") as stream:
            key = stream.read(MAX_FILE_BYTES).strip()
    except OSError as error:
        raise SettingError(f"key {path} cannot be read: {error.strerror}; check path and permissions") from None
    try:
        is_key = len(key) == KEY_CHARACTERS and len(z85.decode(key)) == 32
    except Exception:  # z85 raises struct.error for numbers no 32 bits hold
        is_key = False
    if not is_key:
        raise SettingError(f"{path} holds no key; expected 40 characters of Z85; make one with: faser keys new")
    return key


def read_secret_key(path: Path) -> bytes:
    """Return the secret key of a file; raise SettingError if others may read it."""
    key = read_key(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise SettingError(f"secret key {path} has mode {mode:04o}; expected 0600; chmod 600 it")
    return key

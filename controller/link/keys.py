"""`faser keys`: the folder of CURVE keys: the sidecar's own pair and the engines' public keys it lets in.

    server.public         give it to every engine (FASER_SERVER_KEY)
    server.secret         stays here
    engines/NAME.public   who is let in
    issued/NAME.secret    give it to that engine alone (FASER_ENGINE_KEY), then delete it here

Called by the CLI and by the daemon at start and on SIGHUP. Keys are made here, never sent anywhere.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq

from ...engine_adapter.link.keys import read_key, read_secret_key
from ...engine_adapter.settings import SettingError, ensure_private_folder
from ..errors import EndpointError, UsageError

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_KEYS: Final = 4096
REMEDY: Final = "choose a folder of yours"


@dataclass(frozen=True, slots=True)
class Keyring:
    """The sidecar's pair and the public keys it lets in, Z85."""

    public: bytes
    secret: bytes
    allowed: frozenset[bytes]


def load_keyring(folder: Path) -> Keyring:
    """Return the keys of a folder; raise EndpointError if one of them cannot be used: all or nothing."""
    ensure_private_folder(folder, REMEDY)
    names = sorted((folder / "engines").glob("*.public"))
    if len(names) > MAX_KEYS:
        raise EndpointError(f"{len(names)} keys in {folder}/engines", f"at most {MAX_KEYS}", "revoke some")
    secret = read_secret_key(folder / "server.secret")
    return Keyring(zmq.curve_public(secret), secret, frozenset(map(read_key, names)))


def new_keys(folder: Path, engine: str | None) -> list[Path]:
    """Make the sidecar's pair if there is none, and a pair for an engine if one is named; return the new files."""
    try:
        ensure_private_folder(folder, REMEDY)
        made = [] if (folder / "server.secret").exists() else _make_pair(folder / "server", folder / "server")
        if engine is not None:
            _require_name(engine)
            public, secret = folder / "engines" / engine, folder / "issued" / engine
            for place in (public, secret):
                ensure_private_folder(place.parent, REMEDY)
            if public.with_name(f"{engine}.public").exists():
                raise UsageError(
                    f"a key for {engine!r} exists", "another name", f"revoke it: faser keys revoke {engine}"
                )
            made += _make_pair(public, secret)
    except SettingError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}", "a folder that can be written") from None
    return made


def rotate_server(folder: Path) -> list[Path]:
    """Replace the sidecar's own pair; engines need the new public key before they connect again."""
    load_keyring(folder)
    for kind in ("secret", "public"):
        (folder / f"server.{kind}").rename(folder / f"server.{kind}.old")
    return _make_pair(folder / "server", folder / "server")


def revoke(folder: Path, engine: str) -> Path:
    """Take an engine's key out of the allow-list; return the file that is gone."""
    _require_name(engine)
    path = folder / "engines" / f"{engine}.public"
    try:
        path.unlink()
    except OSError:
        there = ", ".join(engines(folder)) or "none"
        raise UsageError(f"no key for {engine!r} in {folder}", f"one of: {there}") from None
    (folder / "issued" / f"{engine}.secret").unlink(missing_ok=True)
    return path


def engines(folder: Path) -> list[str]:
    """Return the names of the engines that are let in."""
    return sorted(path.stem for path in (folder / "engines").glob("*.public"))


def _require_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise UsageError(f"engine name {name!r}", "letters, digits, dots, dashes and underscores", "choose another")


def _make_pair(public: Path, secret: Path) -> list[Path]:
    public_key, secret_key = zmq.curve_keypair()
    paths = [public.with_name(f"{public.name}.public"), secret.with_name(f"{secret.name}.secret")]
    for path, key, mode in zip(paths, (public_key, secret_key), (0o644, 0o600), strict=True):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(handle, "wb") as stream:
            stream.write(key + b"\n")
    return paths

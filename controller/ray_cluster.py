"""A connection to Ray: one that runs already, or an instance of our own. Ray is imported here and nowhere else.

Called by `faser fleet` (controller/fleet/ray_carrier.py) and `faser sweep --ray` (controller/cli/sweep_workers.py).
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, Self

from .errors import EndpointError, UsageError

_STORE_BYTES: Final = 80 << 20  # of an instance of our own, for objects: near the least Ray takes; ours are small
_CONNECT_S: Final = 20.0


class RayCluster:
    """A Ray that runs, or an instance of our own that ends with us; `ray` is the module, initialised.

    To be opened in the main thread: the kernel ends an instance with the thread that started it. Whoever reaches Ray's
    ports may run code unless a token is asked for, so our own instance asks for one.

    Raises ImportError without Ray.

    :param address: HOST:PORT or ray://HOST:PORT; None: an instance of our own on this machine
    :param cores: of an instance of our own
    """

    def __init__(self, address: str | None, cores: int) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self.is_ours = address is None
        self._folder = ""
        where = self._where(address, cores)
        import ray  # only now: it reads the environment as it is imported

        self.ray: Any = ray
        try:
            ray.init(**where, logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            self._remove_folder()
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise EndpointError(
                f"Ray at {address or 'this machine'}: {reason}", "a running Ray of this version"
            ) from None

    def _where(self, address: str | None, cores: int) -> dict[str, Any]:
        if address is not None:
            _require_ray(address)
            return {"address": address}
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        self._folder = tempfile.mkdtemp(prefix="faser-ray-", dir="/tmp")  # short: sockets lie in it
        return {
            "address": "local", "num_cpus": cores, "include_dashboard": False, "object_store_memory": _STORE_BYTES,
            "_temp_dir": self._folder,
        }  # fmt: skip

    def close(self) -> None:
        """Leave the cluster, which ends our actors and tasks; an instance of our own ends too."""
        self.ray.shutdown()
        self._remove_folder()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _remove_folder(self) -> None:
        if self._folder and Path(self._folder).is_dir():
            shutil.rmtree(self._folder, ignore_errors=True)


def _require_ray(address: str) -> None:
    """Raise EndpointError where no Ray answers: Ray itself would try for minutes, and cannot be interrupted."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"--address {address!r}", "HOST:PORT")
    command = [sys.executable, "-P", "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
        if not address.startswith("ray://"):  # where a client connects it gives up by itself
            subprocess.run(command, check=True, capture_output=True, timeout=_CONNECT_S, cwd="/")
    except (OSError, OverflowError, subprocess.SubprocessError):
        raise EndpointError(
            f"no Ray answers at {address}", "a running one", "start it with: ray start --head"
        ) from None

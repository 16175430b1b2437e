"""The configuration of a demo's own sidecar, and the folder of its run.

Called by controller/demo/demo.py and stages.py.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from ..config import Config
from ..config_layers import load
from ..decision.session import check_policy
from ..errors import StoreError
from .options import DemoOptions


def own_config(options: DemoOptions, sockets: Path) -> Config:
    """Return the sidecar's configuration: the user's, with the demo's own socket and telemetry file."""
    folder = (options.output or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")).absolute()
    telemetry = folder / "telemetry.sqlite"
    flags = {
        "link.endpoint": f"ipc://{sockets / 'engine.sock'}",
        "link.status_endpoint": f"ipc://{sockets / 'status.sock'}",
        "policy.spec": options.policy,
        "mode.state": folder / "modes.json",
        "store.enabled": True,
        "store.path": telemetry,
    }
    config = load(options.config, os.environ, flags).config
    check_policy(config.policy.spec)
    if telemetry.exists():
        raise StoreError(f"{telemetry} exists", "a new file", "remove it or pass another --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{folder} cannot be made: {error.strerror}", "a writable folder", "pass --output") from None
    return config

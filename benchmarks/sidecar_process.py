"""A sidecar as a process of its own, for the benchmarks that send it records."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from faser.controller.config import LinkConfig


def start_sidecar(folder: Path, settings: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], LinkConfig]:
    """Start one with files of its own in `folder`; `settings` are variables of its environment."""
    endpoint = f"ipc://{folder / 'engine.sock'}"
    base = {name: value for name, value in os.environ.items() if not name.startswith("FASER_")}
    environment = base | {
        "FASER_ENDPOINT": endpoint, "FASER_STORE": str(folder / "t.sqlite"),
        "FASER_MODE_STATE": str(folder / "modes.json"), "XDG_CONFIG_HOME": str(folder),
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **settings,
    }  # fmt: skip
    command = [sys.executable, "-P", "-c", "from faser.controller.cli.main import main; main()", "sidecar"]
    process = subprocess.Popen(command, env=environment, cwd="/", stderr=subprocess.DEVNULL)
    return process, LinkConfig(endpoint=endpoint)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

"""A sidecar as a process of its own, for the benchmarks that send it records: fleet.py, round_trip.py, soak.py."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from faser.controller.config import LinkConfig
from faser.controller.engine.sidecar_child import COMMAND
from faser.controller.errors import NotRunningError
from faser.controller.link.ask import ask

START_S = 20.0


@contextlib.contextmanager
def running_sidecar(
    folder: Path, settings: Mapping[str, str], cores: Iterable[int] = ()
) -> Iterator[tuple[int, LinkConfig]]:
    """Give the process id and the link of a sidecar that answers, with files of its own in `folder`.

    :param settings: variables of its environment
    :param cores: where it may run; none: anywhere
    """
    link = LinkConfig(endpoint=f"ipc://{folder / 'engine.sock'}")
    base = {name: value for name, value in os.environ.items() if not name.startswith("FASER_")}
    environment = base | {
        "FASER_ENDPOINT": link.endpoint, "FASER_STORE": str(folder / "t.sqlite"),
        "FASER_MODE_STATE": str(folder / "modes.json"), "XDG_CONFIG_HOME": str(folder),
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **settings,
    }  # fmt: skip
    process = subprocess.Popen(COMMAND, env=environment, cwd="/", stderr=subprocess.DEVNULL)
    try:
        os.sched_setaffinity(process.pid, list(cores) or os.sched_getaffinity(0))  # before it starts its threads
        _wait_ready(link)
        yield process.pid, link
    finally:
        process.terminate()
        process.wait(20)


def _wait_ready(link: LinkConfig) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        with contextlib.suppress(NotRunningError):
            ask(link, 0.5)
            return
        time.sleep(0.1)
    raise SystemExit(f"the sidecar did not start; expected it to answer within {START_S:g} s")

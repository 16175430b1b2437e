"""Run by test_ray_carrier.py: actors on a real Ray with orders for engines that cannot start; prints what was seen.

python ray_child.py FOLDER [ADDRESS]
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from faser.controller.engine.reaper import descendants
from faser.controller.errors import FaserError
from faser.controller.fleet.carrier import EngineSight
from faser.controller.fleet.engine_actor import EngineOrder
from faser.controller.fleet.placement import Placement
from faser.controller.fleet.ray_carrier import RayCarrier, room
from faser.controller.ray_cluster import RayCluster

CORES = 2


def until(look: Callable[[], EngineSight], probe: Callable[[EngineSight], bool]) -> dict[str, Any]:
    """Return the first sight of which something is true."""
    end_s = time.monotonic() + 60.0
    while not probe(sight := look()):
        if time.monotonic() > end_s:
            raise TimeoutError(str(sight))
        time.sleep(0.1)
    return asdict(sight)


def kill_actors() -> None:
    """Kill the processes of this fleet's actors."""
    for pid in descendants(os.getpid()):
        if (Path(f"/proc/{pid}/cmdline").read_bytes()).startswith(b"ray::EngineActor"):
            os.kill(pid, signal.SIGKILL)


def main(folder: str, address: str | None) -> None:
    """Look at an engine that is refused, at one without room and, on an instance of our own, at a killed actor."""
    order = EngineOrder(
        "fleet-1", "/nowhere", ["-sc", "{}"], "ipc:///e", "" if address else "127.0.0.1", 0, False,
        {"FASER_RUNTIME_DIR": folder},
    )  # fmt: skip
    with RayCluster(address, CORES) as cluster:
        found: dict[str, Any] = {"room": [[each.cores, each.gpus] for each in room(cluster)]}
        found["is_ours"] = cluster.is_ours
        found["is_guarded"] = os.environ.get("RAY_AUTH_MODE") == "token" and len(os.environ["RAY_AUTH_TOKEN"]) >= 32
        refused = RayCarrier(cluster, order, Placement(1)).hold("replica-1")
        found["refused"] = until(refused.look, lambda sight: not sight.is_running)
        huge = RayCarrier(cluster, order, Placement(CORES + 1)).hold("replica-2")
        found["without_room"] = asdict(huge.look())
        huge.stop()
        found["stopped"] = until(huge.look, lambda sight: not sight.is_running)
        if address is None:
            kill_actors()
            found["killed"] = until(refused.look, lambda sight: sight.reason.startswith("Ray: "))
        refused.stop()
        refused.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
    except FaserError as error:
        sys.exit(f"ray_child: {error}")

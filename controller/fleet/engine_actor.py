"""What runs in a Ray actor: it starts one vLLM API server as its child and owns it.

Called by controller/fleet/ray_carrier.py through Ray, with plain values only. The server hangs on the actor by a pipe
(controller/engine/processes.py): however the actor ends, by order, by Ray or by a signal, the engine ends with it.
It must import neither ray nor vLLM.
"""

from __future__ import annotations

import os
import secrets
from typing import Final

import msgspec

from ...engine_adapter.settings import ensure_private_folder, runtime_folder
from ...models.embedded.pair import ensure_embedded_pair
from ..engine.launch import EngineLaunch, free_port
from ..engine.running import RunningEngine, health_status
from ..engine.serve import EMBEDDED, embedded_launch, model_launch
from ..engine.sidecar_child import log_folder
from ..errors import EngineError, FaserError
from .cores import CoreClaim

_RAYS_OWN: Final = ("OMP_NUM_THREADS",)  # Ray sets it to its own idea of a task


class EngineOrder(msgspec.Struct, frozen=True):
    """What an actor is told: how to start its engine. Crosses processes as a dict of plain values."""

    name: str
    model: str
    arguments: list[str]
    endpoint: str
    host: str  # where the engine listens
    cores: int  # of its own; 0: it runs on all (GPUs)
    environment: dict[str, str]


class EngineActor:
    """One engine and its owner."""

    def __init__(self) -> None:
        self._engine: RunningEngine | None = None
        self._claim: CoreClaim | None = None
        self._refusal = ""

    def start(self, order: dict[str, object]) -> dict[str, object]:
        """Start the engine and return at once, with where it is; what kept it from starting is in `look`."""
        told = msgspec.convert(order, EngineOrder)
        try:
            self._start(told)
        except (FaserError, OSError) as error:
            self._refusal = str(error)
            return {"url": "", "where": "", "pid": 0}
        assert self._engine is not None
        cores = self._claim.cores if self._claim else []
        where = f"cores {','.join(map(str, cores))}" if cores else f"GPUs {os.environ.get('CUDA_VISIBLE_DEVICES', '')}"
        return {"url": self._engine.launch.url, "where": where, "pid": self._engine.pid}

    def look(self) -> dict[str, object]:
        """Return whether the engine's process lives, the status of its /health, and why it ended."""
        if self._engine is None:
            return {"is_running": False, "status": 0, "reason": self._refusal}
        try:
            self._engine.require_running()
        except EngineError as error:
            return {"is_running": False, "status": 0, "reason": str(error)}
        return {"is_running": True, "status": health_status(self._engine.launch.url), "reason": ""}

    def stop(self) -> None:
        """End the engine and give its cores back."""
        if self._engine is not None:
            self._engine.stop()
        if self._claim is not None:
            self._claim.close()

    def _start(self, order: EngineOrder) -> None:
        for name in _RAYS_OWN:
            if name not in order.environment:
                os.environ.pop(name, None)
        os.environ.update(order.environment)
        if order.cores:
            folder = runtime_folder() / "cores"
            ensure_private_folder(folder.parent)
            ensure_private_folder(folder)
            self._claim = CoreClaim(order.cores, sorted(os.sched_getaffinity(0)), folder)
            os.sched_setaffinity(0, self._claim.cores)  # the engine inherits it and counts its threads by it
        launch = launch_of(order)
        log = log_folder() / f"{order.name}-{launch.port}-{secrets.token_hex(2)}.log"
        self._engine = RunningEngine(launch, log)


def launch_of(order: EngineOrder) -> EngineLaunch:
    """Return the engine's command line on this machine, as `faser serve` would start it."""
    arguments = [*order.arguments, "--host", order.host, "--port", str(free_port(order.host))]
    if order.model == EMBEDDED:
        pair = ensure_embedded_pair()
        return embedded_launch(pair, order.endpoint, int(arguments[-1]), arguments, os.environ.get("FASER_SPLITS", ""))
    return model_launch(order.model, order.endpoint, arguments)

"""A real sidecar that decides at random, killed and started again and again while an engine runs.

Used inside the engine's process by gauntlet.py and engine_child.py. It counts the engine's steps, no seconds: after
some under a lease the sidecar gets SIGKILL, after some on the engine's default a new one is started.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from faser.engine_adapter.protocol import StepRecord, decode_from_engine, encode
from faser.engine_adapter.steering.orders import StepOrder
from faser.engine_adapter.steering.record import RawStep, RecordBuilder
from faser.engine_adapter.steering.steering import BatchOutcome, Steering

SCRIPT = Path(__file__).with_name("random_sidecar.py")
STEERED_STEPS = (4, 24)  # before a kill, at least and at most
LOST_STEPS = (1, 10)  # on the engine's default, before the next life
PATIENCE_S = 300.0  # its first start after an installation compiles
# Its guard shall mind neither how slow random decisions are nor how late what it did not hear while dead arrives.
ENVIRONMENT = {"FASER_GUARD_ENVELOPE_MARGIN": "1", "FASER_GUARD_STALE_MS": "60000"}


class KilledSidecar:
    """Context of a sidecar's lives; `records` are what the engine said of its steps, whoever heard it."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        os.environ.update(ENVIRONMENT | {"FASER_MODE_STATE": str(folder / "modes.json")})
        outage: Any = import_module("outage")
        self._socket = Path(endpoint.removeprefix("ipc://"))
        self._sidecar = outage.Sidecar(endpoint, folder, [sys.executable, str(SCRIPT)])
        self._leash = outage.leashed(self._sidecar)
        self._chance = random.Random(7)
        self._is_alive = False
        self._steps_left = 0
        self.lives = 0
        self.records: list[StepRecord] = []

    def __enter__(self) -> KilledSidecar:
        self._leash.__enter__()
        self._start()
        inherited, built = Steering.record, RecordBuilder.build

        def record(steering: Steering, order: StepOrder, outcome: BatchOutcome) -> None:
            inherited(steering, order, outcome)
            self._after_step(order.lease_epoch > 0)

        def build(builder: RecordBuilder, raw: RawStep) -> StepRecord:
            found = built(builder, raw)
            message = decode_from_engine(encode(found))
            assert isinstance(message, StepRecord)
            self.records.append(message)
            return found

        Steering.record = record  # type: ignore[method-assign]
        RecordBuilder.build = build  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: Any) -> None:
        self._leash.__exit__(*error)

    def _after_step(self, is_steered: bool) -> None:
        self._steps_left -= is_steered == self._is_alive
        if self._steps_left <= 0:
            change = self._kill if self._is_alive else self._start
            change()

    def _kill(self) -> None:
        self._sidecar.send(signal.SIGKILL)
        self._is_alive, self._steps_left = False, self._chance.randint(*LOST_STEPS)

    def _start(self) -> None:
        self._socket.unlink(missing_ok=True)  # a killed one leaves it
        self.lives += 1
        self._sidecar.start(f"random:{self.lives}")
        ends = time.monotonic() + PATIENCE_S
        while not self._socket.exists():
            assert self._sidecar.process.poll() is None, "the sidecar ended; see sidecar.log"
            assert time.monotonic() < ends, f"the sidecar does not listen after {PATIENCE_S} s"
            time.sleep(0.01)
        self._is_alive, self._steps_left = True, self._chance.randint(*STEERED_STEPS)

"""A real sidecar moves the stages of a real pipeline: tokens, records, replay, and what a kill leaves behind.

A file of its own, so that it runs beside test_stages_engine.py.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from faser.controller.replay.replay import replay

from .scenarios import QUICK, SHORT, Run
from .test_stages_engine import different

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

FASER = [sys.executable, "-P", "-c", "from faser.controller.__main__ import main; main()"]


def test_a_sidecar_orders_moves_and_what_it_ordered_outlasts_it(
    stage_engine: Run, short_answers: dict[str, Any], tmp_path: Path
) -> None:
    """Its policy asks for one stage and two in turn; the records tell, replay says the same, a kill moves nothing."""
    with tempfile.TemporaryDirectory(prefix="faser-") as folder:
        endpoint, store = f"ipc://{folder}/s.sock", tmp_path / "t.sqlite"
        told = ["--endpoint", endpoint, "--store", str(store), "--policy", "off+stages:turns:6"]
        own = os.environ | {"FASER_RUNTIME_DIR": folder, "FASER_MODE_STATE": f"{folder}/modes.json"}
        with (tmp_path / "sidecar.log").open("w") as log:
            command = [*FASER, "sidecar", *told]
            sidecar = subprocess.Popen(command, env=own, stderr=log)
        try:
            led = SHORT | {"is_moving": False}
            phases = [led, led, led | {"kills": sidecar.pid}]
            result = stage_engine(2, {"phases": phases, "pace": QUICK}, FASER_ENDPOINT=endpoint)
        finally:
            sidecar.kill()
            sidecar.wait()
    assert result["code"] == 0, result["log"]
    *before, last = result["phases"]
    assert [different(phase["rounds"][0], short_answers) for phase in result["phases"]] == [[], [], []]
    assert sum(phase["moves"] for phase in before) >= 6, (tmp_path / "sidecar.log").read_text()
    # It was killed in the middle of a move: that is completed, and none follows.
    assert not last["is_moving"]
    assert last["switches"][-20:] == [last["switches"][-1]] * 20
    with closing(sqlite3.connect(store)) as file:
        bounds = {cut for (cut,) in file.execute("SELECT DISTINCT stage_bounds FROM steps")}
        decided = "decision_sequence IS NOT NULL"  # a sidecar that lags behind leaves records without a decision
        asked = {cut for (cut,) in file.execute(f"SELECT DISTINCT decision_stage_bounds FROM steps WHERE {decided}")}
    assert bounds == asked == {"0", "15"}
    again = replay(store)
    assert again.differing == []
    assert again.identical == again.decisions > 50
    with closing(sqlite3.connect(store)) as file, file:
        file.execute("UPDATE steps SET stage_bounds = CASE stage_bounds WHEN '0' THEN '15' ELSE '0' END")
    assert replay(store).differing, "the control: the records say other stages"

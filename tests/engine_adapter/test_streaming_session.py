"""What a session of several turns emitted adds up: vLLM begins its list anew at every turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from faser.controller.engine.launch import openmp_library
from faser.models.embedded.pair import ensure_embedded_drafter, ensure_embedded_target

SCRIPT = Path(__file__).with_name("streaming_session.py")


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_records_hold_every_token_of_every_turn() -> None:
    with tempfile.TemporaryDirectory(prefix="faser-") as folder:
        environment = os.environ | {
            "VLLM_USE_V2_MODEL_RUNNER": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "NUMBA_NUM_THREADS": "1",
            "LD_PRELOAD": str(openmp_library() or ""),
            "FASER_RUNTIME_DIR": folder,
            "FASER_ENDPOINT": f"ipc://{folder}/engine.sock",
        }
        command = [sys.executable, str(SCRIPT), str(ensure_embedded_target()), str(ensure_embedded_drafter())]
        done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True)
    said = [line for line in done.stdout.splitlines() if line.startswith("COUNTS ")]
    assert said, done.stdout[-2000:] + done.stderr[-4000:]
    counts = json.loads(said[0].removeprefix("COUNTS "))
    assert counts["delivered"] == 60
    assert counts["emitted"] == counts["delivered"]
    assert counts["ends"] in ([60], [])  # a session that is closed between two turns leaves nothing to record
    assert counts["accepted"] > 10
    assert counts["miscounted"] == 0
    # What two requests behind the session asked for in extra_args: the first is no number, and only counted.
    assert counts["objectives"] == [["session", None, None], ["odd", None, None], ["last", 900.0, 40.5]]
    assert counts["rejected"] >= 1

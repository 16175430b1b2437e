"""Runs the cases of the Triton kernel where Triton's interpreter was chosen from the start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parents[1] / "exit_kernel_cases.py"


def test_the_kernel_agrees_with_its_reference_and_the_controls_fail() -> None:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stdout[-4000:]
    assert "6 passed" in result.stdout

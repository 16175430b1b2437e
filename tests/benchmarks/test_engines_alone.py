"""Scripts that build vLLM's engine in their own process may not have imported numba by then.

vLLM 0.32 looks through the namespaces of all modules while its CPU worker starts (triton_utils/dispatcher.py), and
llvmlite's library object breaks that scan.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import faser

FOLDER = Path(faser.__file__).parent / "benchmarks"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if "start_engine" in path.read_text(encoding="utf-8"))


def imports_numba(module: str) -> bool:
    """Tell whether importing a module in a fresh process imports numba."""
    code = f"import {module}, sys; raise SystemExit(3 if 'numba' in sys.modules else 0)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, check=False, capture_output=True, text=True)
    assert ended.returncode in (0, 3), ended.stderr
    return ended.returncode == 3


def test_there_are_such_scripts() -> None:
    assert "pruning_gate" in SCRIPTS


@pytest.mark.parametrize("script", SCRIPTS)
def test_importing_a_script_imports_no_numba(script: str) -> None:
    assert not imports_numba(script)


def test_the_decision_core_does_import_numba() -> None:
    assert imports_numba("faser.controller.decision.decide")  # the control: else the test above could not fail

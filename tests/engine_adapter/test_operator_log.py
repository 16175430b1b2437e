"""What the engine's side logs reaches the operator: INFO lines come out of vLLM's log as vLLM configures it."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from faser import engine_adapter

FLOOR = Path(next(iter(engine_adapter.__path__)))
TEXTS = {file: file.read_text() for file in sorted(FLOOR.rglob("*.py"))}
SAYING = {file: text for file, text in TEXTS.items() if re.search(r"\blogger\.[a-z]+\(", text)}

# As an engine's process does before it makes a scheduler or a worker (0.32 v1/engine/core.py:1395).
CODE = """
import sys
from importlib import import_module
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
configure_logging(LoggingConfig())
for name in sys.argv[1:]:
    import_module("faser.engine_adapter." + name).logger.info("FASER speaks in %s", name)
"""


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(FLOOR).with_suffix("").parts)


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs an installed vLLM")
def test_info_lines_come_out_of_vllms_own_log() -> None:
    modules = [module_of(file) for file, text in SAYING.items() if "logger.info(" in text]
    assert {"drafting.ragged", "runner.v1", "runner.v2", "scheduler"} <= set(modules)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    command = [sys.executable, "-W", "ignore", "-c", CODE, *modules]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    said = [line for line in done.stdout.splitlines() if "FASER speaks in" in line]
    assert [line.rpartition(" ")[2] for line in said] == modules
    assert all(" INFO " in line for line in said)


def test_every_module_that_says_something_says_it_there() -> None:
    """pruning/forward.py has lines from ERROR on alone, which Python shows without a handler too."""
    apart = [module_of(file) for file, text in SAYING.items() if "operator_log(__name__)" not in text]
    assert set(apart) <= {"pruning.forward"}
    assert "logger.info(" not in SAYING[FLOOR / "pruning" / "forward.py"]

"""The compiled kernel keeps its promise: no function is given a column twice, and every file of it is watched."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from faser.engine_adapter import compiled
from faser.env import speculative_serving
from faser.env import vectorised as kernel
from faser.env.cost import cost_table_kernel
from faser.env.imported_sources import digest_of, imported_sources
from faser.env.layout.action_vector import ACTION, meant
from faser.env.simulator import simulator
from faser.env.simulator import step as simulator_step
from faser.env.simulator.simulator import Simulator
from faser.env.simulator.speed import scenario

STEP = Path(simulator_step.__file__).resolve()
ENV = STEP.parents[1]
KERNEL = [path for path in ENV.rglob("*.py") if "import apart" in path.read_text() or path == STEP]


def doubled(source: str) -> Iterator[str]:
    """Yield calls that are given the same array, or a part and the whole of it, in two arguments."""
    for call in ast.walk(ast.parse(source)):
        if isinstance(call, ast.Call):
            texts = [ast.unparse(argument) for argument in call.args if isinstance(argument, ast.Subscript)]
            whole = [argument.id for argument in call.args if isinstance(argument, ast.Name)]
            names = {text.partition("[")[0] for text in texts}
            if len(set(texts)) < len(texts) or names.intersection(whole) or len(set(whole)) < len(whole):
                yield ast.unparse(call)


def test_no_part_of_the_kernel_is_given_the_same_column_twice() -> None:
    assert len(KERNEL) >= 6
    allowed = {"row(", "min(", "max("}  # make a view, or compare numbers
    for path in KERNEL:
        found = [call for call in doubled(path.read_text()) if not call.startswith(tuple(allowed))]
        assert found == [], path.name


@pytest.mark.parametrize("call", ["f(a[X], a[X])", "f(a, a[X])", "f(a, a)"])
def test_a_column_given_twice_is_seen(call: str) -> None:
    assert list(doubled(call)) == [call]


def test_the_cache_of_machine_code_watches_every_file_of_the_kernel() -> None:
    watched = imported_sources(STEP)
    assert set(KERNEL) <= watched
    assert {Path(module.__file__).resolve() for module in (kernel, compiled, cost_table_kernel)} <= watched
    assert {Path(each.__file__).resolve() for each in (simulator, speculative_serving)}.isdisjoint(
        watched
    )  # they call it


def test_a_change_of_what_a_module_imports_changes_the_digest_and_another_file_does_not(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "below.py").write_text("SIZE = 1")
    (tmp_path / "stranger.py").write_text("")
    (tmp_path / "room" / "deep.py").write_text("from ..below import SIZE")
    module = tmp_path / "module.py"
    module.write_text("import os\nfrom .room import (\n    deep,\n)\nfrom .below import SIZE")
    before = digest_of(module)
    (tmp_path / "stranger.py").write_text("changed = True")
    assert digest_of(module) == before
    (tmp_path / "below.py").write_text("SIZE = 2")
    assert digest_of(module) != before


def test_any_nan_of_an_action_counts_as_the_least() -> None:
    for bits in (0x7FC00000, 0x7F800001, 0xFF800001):
        for size in (1, 7, 64):
            vectors = np.full((size, 7), bits, np.uint32).view(np.float32)
            assert (meant(vectors) == meant(np.full((size, 7), -1.0))).all()


def test_the_kernel_reads_actions_as_policies_do() -> None:
    simulator = Simulator(scenario(), 3, seed=1)
    simulator.reset()
    simulator.warm()
    raw = np.random.default_rng(1).uniform(-1.5, 1.5, (3, len(ACTION))).astype(np.float32)
    raw[0, :3] = (np.nan, np.inf, -np.inf)
    simulator.step(raw)
    places = (simulator.state.engines["steps"] - 1) % simulator.state.vectors.shape[1]
    np.testing.assert_array_equal(simulator.state.vectors[np.arange(3), places], meant(raw))


COMPARED = """
import hashlib, sys
import numpy as np
from numba.core.compiler import Compiler
from faser.env import vectorised as kernel
if sys.argv[1] == "plain":
    kernel._NoAlias = Compiler
from faser.env.simulator.speed import scenario
from faser.env.simulator.simulator import Simulator
simulator = Simulator(scenario(), 8, seed=3)
simulator.reset()
simulator.warm()
random, digest = np.random.default_rng(3), hashlib.sha256()
for _ in range(400):
    digest.update(simulator.step(random.random((8, 7), np.float32) * 2.0 - 1.0).tobytes())
    for array in simulator.state:
        digest.update(np.ascontiguousarray(array).tobytes())
engines = simulator.state.engines
print(digest.hexdigest(), engines["preemptions"].sum() > 0, engines["drafted"].sum() > 0)
"""


@pytest.mark.slow  # `make proof`: it compiles the kernel twice
def test_the_promise_changes_no_byte(tmp_path: Path) -> None:
    told = []
    for kind in ("apart", "plain"):
        run = subprocess.run(
            [sys.executable, "-c", COMPARED, kind],
            env={"NUMBA_CACHE_DIR": str(tmp_path / kind), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
            timeout=600,
        )
        told.append(run.stdout.split())
    assert told[0] == told[1]
    assert told[0][1:] == ["True", "True"]

"""The kernels are ready before an engine waits for them."""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from faser.controller.daemon import warm_up as module
from faser.controller.daemon.warm_up import warm_up
from faser.controller.decision.decide import Decision, decide

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("policy", ["price", "learned", "fixed:3"])
def test_any_policy_is_warmed_up_once(policy: str) -> None:
    first_s = warm_up(policy)
    assert first_s > 0.0
    assert warm_up(policy) == first_s


def test_stop_rules_are_warmed_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stops = []

    def spy(*arguments: Any) -> Decision:
        decision = decide(*arguments)
        stops.append(decision.action_set.stop)
        return decision

    monkeypatch.setattr(module, "decide", spy)
    warm_up.__wrapped__("price")
    assert stops[0] is None
    assert any(stops)


def test_a_long_compilation_is_told_while_it_lasts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, eventually: Any
) -> None:
    monkeypatch.setattr(module, "WORTH_TELLING_S", 0.0)
    monkeypatch.setattr(module, "_decide_all", lambda policy: eventually(lambda: caplog.records, "it is told"))
    with caplog.at_level(logging.INFO):
        warm_up.__wrapped__("off")
    assert "compiling the estimates" in caplog.text


def test_a_short_one_is_not(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "_decide_all", lambda policy: None)
    with caplog.at_level(logging.INFO):
        warm_up.__wrapped__("off")
    assert not caplog.records


SERVING = """
import sys
from faser.controller.config import LeaseConfig
from faser.controller.decision.session import Session
from faser.controller.daemon.warm_up import warm_up
from faser.env.simulator.simulated_record import hello
from faser.env.simulator.simulated_engine import SimulatedEngine
from faser.models.evaluation.objective_worlds import ObjectiveWorld
from faser.models.evaluation.worlds import held_out

def signatures():
    names = [name for name in sys.modules if name.startswith("faser.") and "simulator" not in name]
    kernels = {value for name in names for value in vars(sys.modules[name]).values() if hasattr(value, "py_func")}
    return {(kernel.py_func.__qualname__, signature) for kernel in kernels for signature in kernel.signatures}

warm_up(sys.argv[1])
world = ObjectiveWorld(held_out()[0], 8, 0.5, 0.7)
engine, action_set = SimulatedEngine(world.scenario(), 1), None
engine.step(None)  # has kernels of its own
before = signatures()
session = Session(hello(engine.simulator), sys.argv[1], LeaseConfig(), 1, 0.0)
for _ in range(200):
    record = engine.step(action_set)
    session.admit(record, record.time_s)
    action_set = session.decide(record).action_set
    session.learn()
    session.measure(record)
assert len(before) > 20 and not session.failures
print(signatures() - before)
"""


@pytest.mark.slow  # `make proof`: a process of its own, since others here have compiled too
@pytest.mark.parametrize("policy", ["price", "learned"])
def test_an_engine_finds_nothing_left_to_compile(policy: str) -> None:
    command = [sys.executable, "-c", SERVING, policy]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/")
    assert result.stdout == "set()\n"


def foreign_names(source: str) -> list[str]:
    """Return names from other files of ours that the compiled functions of a file use."""
    tree = ast.parse(source)
    foreign = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    return [
        f"{function.name}: {name.id}"
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        and any(isinstance(mark, ast.Name) and mark.id == "compiled" for mark in function.decorator_list)
        for body in function.body
        for name in ast.walk(body)
        if isinstance(name, ast.Name) and name.id in foreign - {"Floats", "Ints", "Bools"}
    ]


def test_a_kernel_uses_nothing_of_other_files() -> None:
    """numba's cache looks for changes in a kernel's own file only: another file's change would go unnoticed."""
    folders = ("engine_adapter", "env", "models", "controller")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    kernels = [path for path in files if "compiled import compiled" in path.read_text()]
    assert {path.relative_to(ROOT).parts[0] for path in kernels} >= set(folders)
    assert {str(path.relative_to(ROOT)): names for path in kernels if (names := foreign_names(path.read_text()))} == {}


def test_a_kernel_that_does_is_seen() -> None:
    source = "from .compiled import compiled\nfrom .other import LIMIT\n@compiled\ndef f(x):\n    return x + LIMIT\n"
    assert foreign_names(source) == ["f: LIMIT"]

"""What may not stand on the wire and runtime paths: what turns data into code, or a peer's bytes into objects."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import faser

ROOT = Path(faser.__file__).parent
FLOORS = ("engine_adapter", "env", "models", "controller")
MODULES = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib", "jsonpickle", "runpy", "code"}
NAMES = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {"recv_pyobj", "send_pyobj", "recv_serialized", "system", "popen", "load_module", "exec_module"}
# Names come from a table in the same file, never from data.
IMPORTS_BY_NAME = {"engine_adapter/patches/v1.py"}


def violations(tree: ast.AST) -> Iterator[str]:
    """Yield every forbidden construct with its line."""
    for node in ast.walk(tree):
        for fault in _faults(node):
            yield f"line {getattr(node, 'lineno', 0)}: {fault}"


def _faults(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (f"import {name.name}" for name in node.names if name.name.split(".")[0] in MODULES)
    elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in MODULES:
        yield f"from {node.module} import"
    elif isinstance(node, ast.Call):
        yield from _call_faults(node)


def _call_faults(node: ast.Call) -> Iterator[str]:
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    owner = node.func.value.id if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) else ""
    keywords = {word.arg: word.value for word in node.keywords}
    if isinstance(node.func, ast.Name) and called in NAMES:
        yield f"{called}()"
    if isinstance(node.func, ast.Attribute) and called in ATTRIBUTES and owner != "platform":
        yield f".{called}()"
    if called == "import_module" and not (node.args and isinstance(node.args[0], ast.Constant)):
        yield "import by a computed name"
    if called == "load" and owner == "torch" and not _is(keywords.get("weights_only"), True):
        yield "torch.load without weights_only=True"
    if called == "load" and owner == "yaml":
        yield "yaml.load"
    if _is(keywords.get("allow_pickle"), True):
        yield "allow_pickle=True"
    if "shell" in keywords and not _is(keywords["shell"], False):
        yield "a shell"


def _is(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize("floor", FLOORS)
def test_no_runtime_path_turns_data_into_code(floor: str) -> None:
    found = {}
    for path in sorted((ROOT / floor).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        faults = list(violations(ast.parse(path.read_text())))
        if name in IMPORTS_BY_NAME:
            faults = [fault for fault in faults if "computed name" not in fault]
        if faults:
            found[name] = faults
    assert found == {}


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle", "from cloudpickle import loads", "import marshal as m", "eval(x)", "exec(x)",
        "compile(a, b, c)",
        "__import__(name)", "socket.recv_pyobj()", "socket.send_pyobj(1)", "importlib.import_module(name)",
        "import_module(f'{a}.b')", "torch.load(path)", "torch.load(path, weights_only=False)", "yaml.load(text)",
        "np.load(path, allow_pickle=True)", "subprocess.run(text, shell=True)", "os.system(text)", "import_module()",
    ],
)  # fmt: skip
def test_each_forbidden_construct_is_seen(planted: str) -> None:
    assert list(violations(ast.parse(planted)))


@pytest.mark.parametrize(
    "harmless",
    ["re.compile(x)", "torch.compile(model)", "import_module('vllm.v1')", "torch.load(p, weights_only=True)",
     "np.load(path)", "model.eval()", "platform.system()", "from .code import x", "subprocess.run([a], shell=False)"],
)  # fmt: skip
def test_harmless_lookalikes_are_not(harmless: str) -> None:
    assert not list(violations(ast.parse(harmless)))

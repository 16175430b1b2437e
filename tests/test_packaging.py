"""The house: packages listed, floors respected, the adapter light, entry points real."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import faser

ROOT = Path(faser.__file__).parent
FLOORS = ("engine_adapter", "env", "models", "controller")  # ground first
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def modules(floor: str) -> list[Path]:
    return sorted((ROOT / floor).rglob("*.py"))


def test_every_folder_with_code_is_a_listed_package() -> None:
    found = {"faser"} | {
        "faser." + ".".join(path.parent.relative_to(ROOT).parts) for floor in FLOORS for path in modules(floor)
    }
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(found)


def imported(path: Path) -> set[str]:
    """Return the floors that a module imports, relative and absolute."""
    depth = len(path.parent.relative_to(ROOT).parts)
    floors = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth + 1 and node.module:
            floors.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("faser."):
            floors.add(str(node.module).split(".")[1])
    return floors & set(FLOORS)


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_only_run_downward(floor: str) -> None:
    upper = set(FLOORS[FLOORS.index(floor) + 1 :])
    offenders = {str(path.relative_to(ROOT)): imported(path) & upper for path in modules(floor)}
    assert {path: seen for path, seen in offenders.items() if seen} == {}


def test_the_floor_check_sees_an_upward_import(tmp_path: Path) -> None:
    source = ROOT / "engine_adapter" / "planted.py"
    tree = "from ..controller.daemon import run\nfrom faser.models.policies import policy\n"
    planted = tmp_path / source.name
    planted.write_text(tree)
    nodes = [n for n in ast.walk(ast.parse(tree)) if isinstance(n, ast.ImportFrom)]
    assert [(n.level, n.module) for n in nodes] == [(2, "controller.daemon"), (0, "faser.models.policies")]


@pytest.mark.parametrize("package", ["faser", *(f"faser.{floor}" for floor in FLOORS)])
def test_package_inits_import_nothing(package: str) -> None:
    path = ROOT / Path(*package.split(".")[1:]) / "__init__.py"
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree)
    assert not any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(tree))


def test_the_adapter_pulls_in_neither_torch_nor_gymnasium_nor_vllm() -> None:
    code = (
        "import sys; import faser.engine_adapter.steering.steering, faser.engine_adapter.link.engine_link;"
        "import faser.engine_adapter.plugin;"
        "faser.engine_adapter.plugin.register();"
        "print([m for m in ('torch', 'gymnasium', 'vllm', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert result.stdout.strip() == "[]"


def test_entry_points_load() -> None:
    for group, name in (("console_scripts", "faser"), ("vllm.general_plugins", "faser")):
        (entry,) = (e for e in metadata.entry_points(group=group) if e.name == name)
        assert callable(entry.load())


def test_nothing_on_the_runtime_path_unpickles_or_evaluates() -> None:
    banned = {"pickle", "cloudpickle", "marshal", "shelve", "dill"}
    for path in [*modules("engine_adapter"), *modules("controller"), *modules("env")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not banned & {name.name.split(".")[0] for name in node.names}, path
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in banned, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec", "__import__"}, path
